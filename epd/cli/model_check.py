"""`epd model-check`: explore the protocol's machines, slots and channels within stated bounds."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import click
import msgspec

from epd.check.configurations import CONFIGURATIONS, Result, run_named
from epd.check.coverage import Coverage, coverage_of
from epd.check.mutations import MUTATIONS, run_mutation
from epd.check.relation import Transition
from epd.check.traces.explored import Comparison, compare, trace_files, wrongly_listed
from epd.observe.timeline.load import Loaded, load

PROCESSES = 2


@click.command("model-check")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--depth", type=click.IntRange(1), help="At most so many moves from the start.")
@click.option("--faults", type=click.IntRange(0), help="So many faults in every configuration.")
@click.option(
    "--only",
    type=click.Choice([c.name for c in CONFIGURATIONS]),
    multiple=True,
    help="This configuration (may be given more than once); cells are then not judged.",
)
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="Compare these recorded runs, a file or a folder of them, with what was explored.",
)
@click.option("--mutations", is_flag=True, help="Seed known bugs instead, one at a time: each must be found.")
@click.pass_context
def model_check_command(
    context: click.Context,
    as_json: bool,
    depth: int | None,
    faults: int | None,
    only: tuple[str, ...],
    traces: tuple[Path, ...],
    mutations: bool,
) -> None:
    """Explore the shipped machines exhaustively, breadth-first, and check every invariant in every state.

    With --traces every step of the recorded runs must be one that was explored, or be listed as one that
    no exploration makes. Exit status: 0 if nothing was violated, every cell of the tables was visited or is
    listed as unreachable, and every recorded step is known; 1 otherwise (the shortest script of a violation
    is shown); 2 if a trace cannot be read.
    """
    started_s = monotonic()
    if mutations:
        context.exit(_seed_bugs(as_json=as_json))
    recorded = _load(traces)
    names = only or tuple(c.name for c in CONFIGURATIONS)
    results = explore_all(names, depth, faults)
    coverage = coverage_of(results)
    whole = not only and depth is None and faults is None
    relation: frozenset[Transition] = frozenset().union(*(result.relation for result in results))
    wrong = wrongly_listed(relation)
    compared = compare(recorded, relation) if traces else None
    violations = [result for result in results if result.violation is not None]
    ok = not violations and not coverage.wrongly_listed and not (whole and coverage.missing)
    ok = ok and not wrong and not (compared and compared.unknown)
    if as_json:
        found = _as_builtins(results, coverage, ok, monotonic() - started_s)
        found["relation"] = {"transitions": len(relation), "wrongly_listed": [str(one) for one in wrong]}
        found["traces"] = None if compared is None else _compared_as_builtins(compared)
        click.echo(msgspec.json.encode(found).decode())
    else:
        _show(results, coverage, whole=whole)
        _show_relation(wrong, compared)
    context.exit(0 if ok else 1)


def _load(paths: Sequence[Path]) -> Loaded:
    """Before anything is explored: a trace that cannot be read ends the command."""
    files = trace_files(paths)
    if paths and not files:
        raise click.UsageError(f"--traces: no trace (NAME.trace) in {', '.join(map(str, paths))}")
    loaded = load(files)
    if loaded.damages:
        raise click.UsageError(f"--traces: {'; '.join(map(str, loaded.damages))}")
    return loaded


def _seed_bugs(*, as_json: bool) -> int:
    results = [run_mutation(mutation) for mutation in MUTATIONS]
    ok = all(result.found for result in results)
    if as_json:
        listed = [result._asdict() | {"found": result.found} for result in results]
        click.echo(msgspec.json.encode({"ok": ok, "mutations": listed}).decode())
        return 0 if ok else 1
    for result in results:
        how = f"{result.moves:2} moves, {result.states:5,} states" if result.found else "NOT FOUND"
        click.echo(f"{result.expected:8} {how}  {result.name}")
    return 0 if ok else 1


def explore_all(names: Sequence[str], depth: int | None, faults: int | None) -> list[Result]:
    """Each configuration in a process of its own, two at a time; in the order of `names`."""
    explore_one = partial(run_named, max_depth=depth, faults=faults)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return list(pool.map(explore_one, names))


def _as_builtins(results: Sequence[Result], coverage: Coverage, ok: bool, seconds: float) -> dict[str, Any]:
    return {
        "ok": ok,
        "violations": sum(result.violation is not None for result in results),
        "states": sum(result.states for result in results),
        "transitions": sum(result.transitions for result in results),
        "seconds": round(seconds, 3),
        "cells": {
            "visited": coverage.visited,
            "total": coverage.total,
            "unreachable": [
                {"cell": " ".join(cell), "reason": reason} for cell, reason in coverage.unreachable
            ],
            "missing": [" ".join(cell) for cell in coverage.missing],
            "wrongly_listed": [" ".join(cell) for cell in coverage.wrongly_listed],
        },
        "configurations": [
            {
                "name": result.name,
                "bounds": result.bounds,
                "states": result.states,
                "transitions": result.transitions,
                "depth": result.depth,
                "complete": result.complete,
                "seconds": round(result.seconds, 3),
                "violation": result.violation,
                "script": list(result.script),
            }
            for result in results
        ],
    }


def _compared_as_builtins(compared: Comparison) -> dict[str, Any]:
    return {
        "nodes": compared.nodes,
        "steps": compared.steps,
        "transitions": compared.transitions,
        "listed": [
            {"transition": str(one.transition), "times": one.times, "reason": reason}
            for one, reason in compared.listed
        ],
        "not_explored": [
            {
                "transition": str(one.transition),
                "times": one.times,
                "trace": str(one.trace),
                "node": one.node,
                "step": one.step,
            }
            for one in compared.unknown
        ],
    }


def _show(results: Sequence[Result], coverage: Coverage, *, whole: bool) -> None:
    for result in results:
        how = "complete" if result.complete else "not complete"
        click.echo(
            f"{result.name:18} {result.states:9,} states {result.transitions:11,} transitions "
            f"depth {result.depth:3}  {result.seconds:6.1f} s  {how}"
        )
        if result.script:
            click.echo("\n".join(result.script))
    click.echo(
        f"cells {coverage.visited} of {coverage.total}, {len(coverage.unreachable)} listed as unreachable"
    )
    for cell in coverage.missing if whole else ():
        click.echo(f"not visited: {' '.join(cell)}")
    for cell in coverage.wrongly_listed:
        click.echo(f"listed as unreachable, but visited: {' '.join(cell)}")


def _show_relation(wrong: Sequence[Transition], compared: Comparison | None) -> None:
    for transition in wrong:
        click.echo(f"listed as not explored, but explored or impossible: {transition}")
    if compared is None:
        return
    click.echo(
        f"recorded: {compared.steps:,} steps of {compared.nodes} nodes, {compared.transitions} transitions, "
        f"{len(compared.listed)} listed as not explored, {len(compared.unknown)} unknown"
    )
    for one in compared.unknown:
        click.echo(f"neither explored nor listed: {one}")
