"""The encoder's half of push: what it writes, what it refuses, and what it vouches for."""

import pytest
from push_parts import WINDOWS, A, B, Parts

from epd.actors.push_writer import ReaderGone
from epd.actors.transfer import PollerNews
from epd.dataplane.poller import PeerOpened
from epd.protocol.ids import RegionId, Seal, WriteId
from epd.protocol.messages import Drained, EmbeddingWritten, PushWanted, Reconcile, Source

SOURCE = Source(RegionId(0), 256, 100, Seal(7))


def wanted(number: int, source: Source = SOURCE) -> PushWanted:
    return PushWanted(WriteId(number), source, RegionId(0), 512)


@pytest.fixture
def parts() -> Parts:
    parts = Parts()
    parts.ready()
    return parts


def test_the_payload_is_written_first_and_the_seal_when_it_has_arrived(parts: Parts) -> None:
    parts.hear(wanted(1))
    (payload,) = parts.reads
    assert (payload.source.offset, payload.source.nbytes) == (512, 100)
    assert payload.local_address == (1 << 32) + 256
    parts.end("ok")
    seal = parts.reads[1]
    assert (seal.source.offset, seal.source.nbytes) == (512 + 104, 8)
    assert seal.local_address == payload.local_address + 104
    assert parts.sent == [], "nothing is said before the seal has arrived"
    parts.end("ok")
    assert parts.sent == [(A, EmbeddingWritten(WriteId(1), "written"))]
    assert parts.writer.counts()["writes"] == 0


def test_a_repeat_is_not_done_again(parts: Parts) -> None:
    parts.hear(wanted(2))
    parts.end("ok")
    parts.end("ok")
    parts.hear(wanted(2))
    parts.hear(wanted(1))
    assert len(parts.reads) == 2


def test_what_is_asked_before_the_windows_are_open_waits_for_them() -> None:
    parts = Parts()
    parts.hear(WINDOWS)
    assert parts.opened == (A, "127.0.0.1:1", WINDOWS.regions)
    parts.hear(wanted(1))
    parts.hear(wanted(2))
    parts.hear(Reconcile((WriteId(1),)))
    assert parts.sent == [(A, Drained((WriteId(1),)))], "not begun, so it needs no more than a word"
    parts.writer.handle(PollerNews([PeerOpened(A, True, "")]))
    assert len(parts.reads) == 1


def test_windows_that_cannot_be_reached_end_the_session() -> None:
    parts = Parts()
    parts.hear(WINDOWS)
    parts.writer.handle(PollerNews([PeerOpened(A, False, "refused")]))
    assert parts.closed == [A]


@pytest.mark.parametrize(
    "source",
    [
        Source(RegionId(1), 0, 100, Seal(7)),
        Source(RegionId(-1), 0, 100, Seal(7)),
        Source(RegionId(0), -256, 100, Seal(7)),
        Source(RegionId(0), 0, -8, Seal(7)),
        Source(RegionId(0), 256, 4096 - 256, Seal(7)),
        Source(RegionId(0), 0, 2**62, Seal(7)),
    ],
)
def test_what_is_not_in_the_pool_is_not_written(parts: Parts, source: Source) -> None:
    parts.hear(wanted(1, source))
    assert parts.reads == []
    assert parts.sent == [(A, EmbeddingWritten(WriteId(1), "untouched"))]


def test_a_write_that_failed_is_never_said_to_be_drained(parts: Parts) -> None:
    parts.hear(wanted(1))
    parts.end("failed")
    parts.hear(Reconcile((WriteId(1),)))
    assert parts.sent == [(A, EmbeddingWritten(WriteId(1), "unknown"))] * 2


def test_a_write_that_was_never_handed_to_the_engine_is_untouched(parts: Parts) -> None:
    parts.hear(wanted(1))
    parts.hear(Reconcile((WriteId(1),)))
    assert parts.aborted == [parts.reads[0].read]
    assert parts.sent == [], "its end will say what became of it"
    parts.end("aborted", posted=False)
    assert parts.sent == [(A, EmbeddingWritten(WriteId(1), "untouched"))]


def test_a_write_that_is_taken_back_midway_is_unknown(parts: Parts) -> None:
    parts.hear(wanted(1))
    parts.hear(Reconcile((WriteId(1),)))
    parts.end("aborted")
    assert parts.sent == [(A, EmbeddingWritten(WriteId(1), "unknown"))]


def test_what_it_was_asked_about_and_never_heard_of_is_not_begun_later(parts: Parts) -> None:
    parts.hear(Reconcile((WriteId(3),)))
    assert parts.sent == [(A, Drained((WriteId(3),)))]
    parts.hear(wanted(3))
    assert parts.reads == []


def test_a_lost_reader_leaves_nothing(parts: Parts) -> None:
    parts.hear(wanted(1))
    parts.writer.handle(ReaderGone(A))
    assert parts.aborted == [parts.reads[0].read]
    parts.end("aborted")
    assert parts.sent == []
    assert parts.closed_peer == A
    assert parts.writer.counts() == {"writes": 0, "readers": 0}


def test_a_stranger_is_not_heard(parts: Parts) -> None:
    parts.hear(wanted(1), session=B)
    assert parts.reads == []
