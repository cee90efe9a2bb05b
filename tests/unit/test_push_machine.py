"""The window machine of push: memory that another's engine may write is reused by proof only."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Bench

from epd.protocol import push
from epd.protocol.ids import WriteId
from epd.protocol.machine import Event, TimerExpired
from epd.protocol.push import (
    AbortWanted,
    AskDrained,
    AskWrite,
    EndSession,
    EndWrite,
    Fenced,
    Granted,
    Held,
    Limits,
    OpenWindow,
    RevokeWindow,
    Revoking,
    SessionOver,
    TellOpened,
    WindowOpened,
    WindowRevoked,
    WindowWanted,
    WriteEnded,
    WritesDrained,
    WriteWanted,
    Writing,
)

W1, W2, W3 = WriteId(1), WriteId(2), WriteId(3)


@pytest.fixture
def window() -> Bench:
    bench = Bench(push, Limits(answer_s=2.0))
    assert bench.feed(WindowWanted()) == [OpenWindow()]
    assert bench.feed(WindowOpened(True)) == [TellOpened(True)]
    return bench


@pytest.fixture
def writing(window: Bench) -> Bench:
    assert window.feed(WriteWanted(W1), WriteWanted(W2)) == [AskWrite(W1), AskWrite(W2)]
    return window


@pytest.mark.parametrize("outcome", ["written", "untouched"])
def test_a_write_ends_by_its_writers_word_and_once(
    writing: Bench, outcome: Literal["written", "untouched"]
) -> None:
    assert writing.feed(WriteEnded(W1, outcome)) == [EndWrite(W1, outcome)]
    assert writing.ignores(WriteEnded(W1, outcome), WritesDrained((W1,)), AbortWanted(W1))
    assert writing.state == Writing((W2,))
    assert writing.feed(WriteEnded(W2, outcome)) == [EndWrite(W2, outcome)]
    assert writing.state == Granted()


def test_a_write_that_failed_frees_nothing_before_the_window_is_revoked(writing: Bench) -> None:
    revoke, end = writing.feed(WriteEnded(W1, "unknown"))
    assert revoke == RevokeWindow()
    assert isinstance(end, EndSession)
    assert writing.ignores(WriteEnded(W2, "written"), WritesDrained((W1, W2)), AbortWanted(W2), SessionOver())
    assert writing.feed(WindowRevoked(True)) == [EndWrite(W1, "fenced"), EndWrite(W2, "fenced")]
    assert writing.state == Fenced()


def test_the_end_of_a_session_frees_nothing_before_the_window_is_revoked(writing: Bench) -> None:
    assert writing.feed(SessionOver()) == [RevokeWindow()]
    assert writing.ignores(SessionOver())
    assert writing.feed(WindowRevoked(True)) == [EndWrite(W1, "fenced"), EndWrite(W2, "fenced")]


def test_a_window_without_writes_is_revoked_with_its_session(window: Bench) -> None:
    assert window.feed(SessionOver()) == [RevokeWindow()]
    assert window.feed(WindowRevoked(True)) == []
    assert window.state == Fenced()


def test_a_write_nobody_waits_for_is_asked_about_and_then_fenced(writing: Bench) -> None:
    assert writing.feed(AbortWanted(W1)) == [AskDrained((W1,))]
    assert writing.ignores(AbortWanted(W1)), "asked once"
    deadline_s = writing.state.deadline_s
    writing.advance(1.0)
    assert writing.feed(AbortWanted(W2)) == [AskDrained((W2,))]
    assert writing.state.deadline_s == deadline_s, "a later doubt does not put off an earlier one"
    revoke, end = writing.jump_to_deadline()
    assert (revoke, type(end)) == (RevokeWindow(), EndSession)
    assert writing.state == Revoking((W1, W2))


def test_a_write_the_writer_never_began_needs_no_fence(writing: Bench) -> None:
    writing.feed(AbortWanted(W1))
    assert writing.feed(WritesDrained((W1,))) == [EndWrite(W1, "untouched")]
    assert writing.state == Writing((W2,)), "and no deadline any more"


def test_drained_speaks_of_what_was_asked_only(writing: Bench) -> None:
    assert writing.ignores(WritesDrained((W1, W2, W3)))


def test_a_window_that_cannot_be_revoked_keeps_its_memory_out_of_use(writing: Bench) -> None:
    writing.feed(SessionOver())
    assert writing.feed(WindowRevoked(False)) == []
    assert writing.state == Held((W1, W2))
    assert writing.ignores(WriteEnded(W1, "written"), WritesDrained((W1,)), SessionOver(), TimerExpired())
    assert writing.feed(WriteWanted(W3)) == [EndWrite(W3, "refused")]


def test_a_session_that_ends_while_its_window_opens_has_it_revoked() -> None:
    bench = Bench(push, Limits())
    bench.feed(WindowWanted(), SessionOver())
    assert bench.feed(WindowOpened(True)) == [RevokeWindow()]
    assert bench.feed(WindowRevoked(True)) == []
    assert bench.state == Fenced()


def test_a_window_that_cannot_be_had_is_told() -> None:
    bench = Bench(push, Limits())
    bench.feed(WindowWanted())
    assert bench.feed(WindowOpened(False)) == [TellOpened(False)]
    assert bench.feed(WriteWanted(W1)) == [EndWrite(W1, "refused")]


writes = st.sampled_from([W1, W2, W3])
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(WriteWanted, writes),
    st.builds(WriteEnded, writes, st.sampled_from(["written", "untouched", "unknown"])),
    st.builds(WritesDrained, st.tuples(writes)),
    st.builds(AbortWanted, writes),
    st.just(SessionOver()),
    st.builds(WindowRevoked, st.booleans()),
    st.just(TimerExpired()),
)


@given(st.lists(events, max_size=40))
def test_a_write_is_over_only_by_proof(fed: list[Event]) -> None:
    """Whatever comes in whatever order: by its writer's word on itself, or by the revoked window."""
    bench = Bench(push, Limits())
    bench.feed(WindowWanted(), WindowOpened(True))
    asked: set[WriteId] = set()
    for event in fed:
        if isinstance(event, TimerExpired) and bench.state.deadline_s is None:
            continue
        if isinstance(event, WindowRevoked) and not isinstance(bench.state, Revoking):
            continue
        before = bench.state
        for effect in bench.feed(event):
            if isinstance(effect, AskWrite):
                asked.add(effect.write)
            elif isinstance(effect, EndWrite) and effect.end != "refused":
                assert effect.write in asked
                asked.discard(effect.write)
                match effect.end:
                    case "fenced":
                        assert event == WindowRevoked(True)
                        assert isinstance(before, Revoking)
                    case "untouched" if isinstance(event, WritesDrained):
                        assert effect.write in before.doubted
                    case end:
                        assert event == WriteEnded(effect.write, end)
    open_writes = getattr(bench.state, "writes", ())
    assert set(open_writes) == asked, "what was asked for is over, or still held"
