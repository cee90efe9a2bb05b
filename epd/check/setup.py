"""What is explored: the requests, the room, the bounds, and which of the nodes' rules are broken."""

from typing import Final, NamedTuple

from epd.protocol.messages import EmbeddingSpec, Item, Probe, ReadyItem, Source

JUNK: Final = 999
SEAL: Final = 1000
"""A cell of staging memory holds `content(kind, row)`, `JUNK`, or `SEAL` + a seal."""


class Part(NamedTuple):
    """Items, by the kind of their picture, that are placed together on one encoder at first."""

    kinds: tuple[int, ...]
    encoder: int = 0


class Setup(NamedTuple):
    """Bounds and shape of one exploration.

    `rows` has the rows (cells, pieces of a read) of each kind of picture; slots are counted, each
    holds any item, those of an encoder any of at most `staging_rows`: it refuses a larger one.
    `faults` bounds how many things of the `kinds` of fault go wrong in one run, early time-outs
    included. `mailboxes`, `prefill`, `encoder` or `both`: in these nodes the messages between actors
    wait in mailboxes and arrive in any order that these allow; otherwise at once. `hostile`: messages
    may be dropped, repeated and reordered. `broken` names rules of the nodes that are left out.
    """

    requests: tuple[tuple[Part, ...], ...]
    kinds: frozenset[str]
    faults: int
    rows: tuple[int, ...] = (2,)
    encoders: int = 1
    staging_slots: int = 1
    staging_rows: int = 8
    pool_slots: int = 1
    attempts: int = 2
    mailboxes: str = ""
    hostile: bool = False
    broken: frozenset[str] = frozenset()


def content(kind: int, row: int) -> int:
    """The embedding's row, as a cell."""
    return kind * 8 + row + 1


def picture(kind: int) -> Item:
    return Item(Probe("image", 28 * (kind + 1), 28), bytes([kind]) * 32, 100)


def kind_of(item: Item) -> int:
    return item.sha256[0]


def spec_of(setup: Setup, kind: int) -> EmbeddingSpec:
    return EmbeddingSpec(setup.rows[kind], 1, "float32")


def rows_of(source: Source) -> int:
    return source.nbytes // 4


def seals_in(ready: tuple[ReadyItem, ...]) -> tuple[int, ...]:
    return tuple(item.source.seal for item in ready)
