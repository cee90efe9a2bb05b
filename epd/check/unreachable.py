"""Cells of the tables that no exploration visits, each with the reason.

One that is listed here and visited, or is no cell of the tables, is an error; so is a visited cell that
`epd.protocol.unhandled` calls impossible.
"""

from typing import Final

from epd.check.machines import Cell
from epd.check.relation import MACHINES
from epd.protocol.unhandled import UNHANDLED

_ROOM_ONCE: Final = "a request asks for room once, in AwaitingRoom; its lease comes there or after its end"
_READS_LATER: Final = "reads begin in Filling, and no request goes back from there"
_ANNOUNCED_EARLY: Final = "sources are announced after the grant; only an encoder that lies does it before"
_SENT_AT_ONCE: Final = "here a frame is sent as it is built; none is left when its session is over"

UNREACHABLE: Final[dict[Cell, str]] = {
    (
        "job",
        "AwaitingStaging",
        "StagingRefused",
    ): "an item larger than a region is refused as its part is planned",
    ("request", "AwaitingRoom", "ReadEnded"): _READS_LATER,
    ("request", "AwaitingRoom", "SourcesReady"): _ANNOUNCED_EARLY,
    ("request", "Consumed", "RoomLeased"): _ROOM_ONCE,
    ("request", "Delivered", "RoomLeased"): _ROOM_ONCE,
    ("request", "Ended", "RoomLeased"): "what has ended is forgotten: a stray lease finds it New",
    ("request", "Filling", "RoomLeased"): _ROOM_ONCE,
    ("request", "Negotiating", "ReadEnded"): _READS_LATER,
    ("request", "Negotiating", "RoomLeased"): _ROOM_ONCE,
    ("request", "Negotiating", "SourcesReady"): _ANNOUNCED_EARLY,
    ("session", "Absent", "FrameSent"): _SENT_AT_ONCE,
    ("session", "Ending", "FrameSent"): _SENT_AT_ONCE,
    (
        "source",
        "Writing",
        "Unpinned",
    ): "an unpin follows the news of its pin, which follows the writing's end",
}
"""Cells that have a handler, for what this model does not show or to be safe."""

IMPOSSIBLE: Final[frozenset[Cell]] = frozenset(
    (MACHINES[module], state.__name__, event.__name__)
    for (module, _), cells in UNHANDLED.items()
    if module != "push"  # push is not explored: the test of its window machine feeds it whatever comes
    for (state, event), reason in cells.items()
    if reason.kind == "impossible"
)
"""Cells without a handler, which nobody who feeds the machine ever asks for."""
