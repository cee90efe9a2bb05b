"""Recorded runs as tests: replayed by today's machines, and checked against every rule."""

import os
from pathlib import Path

from epd.check.traces.check import Checked, check_traces

TracePath = str | os.PathLike[str]


def assert_replays(*paths: TracePath) -> Checked:
    """Replay these traces (those of all nodes of one run together) and check them.

    Raises `AssertionError` that names the first step that comes out otherwise, each broken rule and where,
    and what cannot be read.
    """
    checked = check_traces([Path(path) for path in paths])
    lines = [str(one.damage) for one in checked.replayed if one.damage is not None]
    for one in checked.replayed:
        if one.divergence is not None:
            was = one.divergence
            got = f"raises {was.raised}" if was.raised is not None else f"gives {list(was.got)}"
            lines.append(
                f"{one.path}: step {was.index}, {was.kind} {was.key!r}: {was.event!r} gave "
                f"{list(was.expected)}, now {got}"
            )
    lines += map(str, checked.findings)
    assert not lines, "\n".join(lines)
    return checked
