"""Draws the protocol's machines for `docs/protocol.md` from their transition tables.

    state_diagram.py            rewrite the page's blocks
    state_diagram.py --check    exit 1 if a block is not what the tables say

Every (state, event) cell of a table is drawn: handled, or why not (`epd.protocol.unhandled`).

A block stands between `<!-- states: MACHINE -->` and `<!-- end -->`, MACHINE being a module of
`epd.protocol`. What may follow is read from the handlers' code, over all branches: no edge is missing,
and one may be drawn that a condition rules out. `?` stands where the code does not tell.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple, get_args

import epd.protocol
from epd.protocol.unhandled import UNHANDLED, Cells

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
UNKNOWN: Final = "?"
_BLOCK: Final = re.compile(r"(<!-- states: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

States = frozenset[str]
Table = Mapping[tuple[type, type], Callable[..., Any]]


class Row(NamedTuple):
    state: str
    event: str
    handler: str
    following: tuple[str, ...]


# -- what a handler may return ---------------------------------------------------------------


@cache
def _definition(function: FunctionType) -> ast.FunctionDef:
    statement = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(statement, ast.FunctionDef), function
    return statement


class _Reader:
    """Evaluates functions to the names of the states they may return, alone or in a `Step`."""

    def __init__(self, states: frozenset[str]) -> None:
        self._states = states
        self._known: dict[tuple[FunctionType, tuple[States, ...]], States] = {}

    def returned(self, function: FunctionType, arguments: tuple[States, ...]) -> States:
        key = (function, arguments)
        if key not in self._known:
            self._known[key] = frozenset()  # what a recursive call adds is found by the outer one
            self._known[key] = self._read(function, arguments)
        return self._known[key]

    def _read(self, function: FunctionType, arguments: tuple[States, ...]) -> States:
        definition = _definition(function)
        names = [argument.arg for argument in definition.args.args]
        scope = _Scope(function.__globals__, dict(zip(names, arguments, strict=False)), {})
        for node in ast.walk(definition):
            for name, value in _assignments(node):
                scope.assigned.setdefault(name, []).append(value)
        returns = [node.value for node in ast.walk(definition) if isinstance(node, ast.Return) and node.value]
        return _union(self._value(value, scope, ()) for value in returns)

    def _value(self, value: ast.expr, scope: "_Scope", open_names: tuple[str, ...]) -> States:
        match value:
            case ast.Name(name) if name in scope.assigned and name not in open_names:
                values = scope.assigned[name]
                now_open = (*open_names, name)
                found = _union(self._value(one, scope, now_open) for one in values)
                return found | scope.arguments.get(name, frozenset())
            case ast.Name(name) if name in scope.assigned:
                return scope.arguments.get(name, frozenset())
            case ast.Name(name):
                return scope.arguments.get(name, frozenset({UNKNOWN}))
            case ast.Attribute(value=ast.Name() as step, attr="state" | "part") if step.id in scope.assigned:
                return self._value(step, scope, open_names)
            case ast.IfExp(body=body, orelse=orelse):
                return self._value(body, scope, open_names) | self._value(orelse, scope, open_names)
            case ast.Call(func=ast.Name(name), args=args):
                return self._call(name, args, scope, open_names)
            case _:
                return frozenset({UNKNOWN})

    def _call(self, name: str, args: list[ast.expr], scope: "_Scope", open_names: tuple[str, ...]) -> States:
        if name in self._states:
            return frozenset({name})
        called = scope.names.get(name)
        values = tuple(self._value(argument, scope, open_names) for argument in args)
        is_step = isinstance(called, type) and issubclass(called, tuple)
        if (is_step or name == "replace") and values:
            return values[0]
        ours = scope.names["__name__"].partition(".")[0]
        if isinstance(called, FunctionType) and called.__module__.partition(".")[0] == ours:
            return self.returned(called, values)
        return frozenset({UNKNOWN})


class _Scope(NamedTuple):
    names: Mapping[str, Any]
    arguments: dict[str, States]
    assigned: dict[str, list[ast.expr]]


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case (
            ast.Assign(targets=[ast.Name(name)], value=value)
            | ast.NamedExpr(target=ast.Name(name), value=value)
        ):
            yield name, value
        case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
            yield name, value


def _union(parts: Iterator[States]) -> States:
    return frozenset().union(*parts)


# -- tables ----------------------------------------------------------------------------------


def machines() -> dict[str, ModuleType]:
    """Modules of the protocol that have a transition table, by their last name."""
    found = {}
    for info in pkgutil.iter_modules(epd.protocol.__path__):
        module = importlib.import_module(f"epd.protocol.{info.name}")
        if hasattr(module, "TRANSITIONS") and hasattr(module, "INITIAL"):
            found[info.name] = module
    return found


def tables(module: ModuleType) -> dict[str, Table]:
    """The machine's table first, then those of its parts, by name."""
    names = sorted((name for name in vars(module) if name.endswith("TRANSITIONS")), key=len)
    return {name: getattr(module, name) for name in names}


def state_names(module: ModuleType, table: Table) -> frozenset[str]:
    """States of a table, and those that only other states lead to."""
    names = {state.__name__ for state, _ in table}
    kinds = {kind for state, _ in table for kind in state.__mro__[1:] if kind.__module__.startswith("epd.")}
    for name, value in vars(module).items():
        if isinstance(value, type) and kinds.intersection(value.__mro__[1:]):
            names.add(name)
    return frozenset(names)


def rows(module: ModuleType, table: Table) -> list[Row]:
    reader = _Reader(state_names(module, table))
    found = []
    for (state, event), handler in table.items():
        assert isinstance(handler, FunctionType), handler
        names = [argument.arg for argument in _definition(handler).args.args]
        # A handler's own state is the argument before the event; a part's handler has the request's first.
        own = names.index("event") - 1
        arguments = [frozenset({state.__name__ if index == own else UNKNOWN}) for index in range(len(names))]
        following = reader.returned(handler, tuple(arguments))
        found.append(Row(state.__name__, event.__name__, handler.__name__, tuple(sorted(following))))
    return found


def cells(module: ModuleType, name: str) -> tuple[list[type], list[type]]:
    """All states and all events of a table, of the machine or of its parts."""
    kind = name.removesuffix("TRANSITIONS").rstrip("_").capitalize() or "Any"
    return list(get_args(getattr(module, f"{kind}State"))), list(get_args(getattr(module, f"{kind}Event")))


def unhandled(module: ModuleType, name: str) -> Cells:
    return UNHANDLED.get((module.__name__.rpartition(".")[2], name), {})


# -- drawing ---------------------------------------------------------------------------------


def draw(module: ModuleType) -> str:
    """The Markdown of a machine: for each of its tables a diagram and all rows."""
    return "\n".join(_draw_table(module, name, table) for name, table in tables(module).items())


def _draw_table(module: ModuleType, name: str, table: Table) -> str:
    found = rows(module, table)
    order = list(dict.fromkeys(row.state for row in found))
    events: dict[tuple[str, str], list[str]] = {}
    for row in found:
        for following in row.following:
            if following not in (row.state, UNKNOWN):
                events.setdefault((row.state, following), []).append(row.event)
    lines = ["```mermaid", "stateDiagram-v2"]
    initial = type(module.INITIAL).__name__
    if initial in order:
        lines.append(f"    [*] --> {initial}")
    lines += [
        f"    {state} --> {following}: {', '.join(names)}" for (state, following), names in events.items()
    ]
    lines += ["```", ""]
    if name != "TRANSITIONS":
        lines.insert(0, f"`{name}`:\n")
    lines += ["| state | event | handler | then |", "|---|---|---|---|"]
    lines += [
        f"| {row.state} | {row.event} | `{row.handler}` | {', '.join(row.following)} |" for row in found
    ]
    return "\n".join([*lines, "", *_draw_cells(module, name, table)]) + "\n"


def _draw_cells(module: ModuleType, name: str, table: Table) -> list[str]:
    """A matrix: `x` is handled, a letter is a reason below. Raises `ValueError` for what is in neither."""
    states, events = cells(module, name)
    reasons = unhandled(module, name)
    letters = dict(zip(dict.fromkeys(reasons.values()), ascii_lowercase, strict=False))
    lines = [f"| event | {' | '.join(state.__name__ for state in states)} |", f"|---|{':-:|' * len(states)}"]
    for event in events:
        marks = []
        for cell in ((state, event) for state in states):
            if (cell in table) == (cell in reasons):
                where = f"{module.__name__}.{name}: ({cell[0].__name__}, {event.__name__})"
                raise ValueError(f"{where} must be handled, or unhandled with a reason, and not both")
            marks.append("x" if cell in table else letters[reasons[cell]])
        lines.append(f"| {event.__name__} | {' | '.join(marks)} |")
    told = [f"{letter}: {reason.kind}, {reason.why}." for reason, letter in letters.items()]
    return [*lines, "", "\\\n".join(["x: handled.", *told])]


def redraw(page: str, drawn: Mapping[str, str]) -> str:
    """The page with its blocks filled in. Raises `ValueError` naming what is missing or unknown."""
    named = [match[2] for match in _BLOCK.finditer(page)]
    if unknown := set(named) - set(drawn):
        raise ValueError(f"no machine is called {', '.join(sorted(unknown))}")
    if missing := set(drawn) - set(named):
        blocks = " ".join(f"<!-- states: {name} --> <!-- end -->" for name in sorted(missing))
        raise ValueError(f"blocks are missing, each marker on a line of its own: {blocks}")
    return _BLOCK.sub(lambda match: f"{match[1]}{drawn[match[2]]}{match[3]}", page)


def main() -> int:
    checking = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not checking:
        print(__doc__, file=sys.stderr)
        return 2
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    try:
        redrawn = redraw(page, {name: draw(module) for name, module in machines().items()})
    except ValueError as error:
        print(f"docs/protocol.md: {error}")
        return 1
    if not checking:
        PAGE.write_text(redrawn, encoding="utf-8")
    elif redrawn != page:
        print(
            "docs/protocol.md: not what the tables say: run tools/state_diagram.py and look at the difference"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
