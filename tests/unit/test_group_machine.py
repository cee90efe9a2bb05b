"""The rank group (I6): one order on all ranks, and a word counts only when all have said it."""

from collections.abc import Iterator
from itertools import permutations

import pytest
from machines import FIRST, LEASE, NEAR, ONE, TWO, Bench, failure, source, specs

from epd.protocol import group, rank
from epd.protocol.errors import Cancelled
from epd.protocol.group import (
    Append,
    Cancel,
    Commit,
    Deliver,
    DeliverWanted,
    EndGroup,
    EndWanted,
    Fail,
    Forming,
    Free,
    FreeLease,
    GroupFormed,
    Leading,
    LeaseTaken,
    Over,
    RankApplied,
    RankFreed,
    RankJoined,
    RankLost,
    RankRead,
    RankReleased,
    Read,
    ReadWanted,
    ReturnWanted,
    TellReadEnded,
    TellReleased,
)
from epd.protocol.ids import Attempt, Incarnation, LeaseId, TransferId
from epd.protocol.messages import ErrorValue

GROUP, OLDER = Incarnation(71), Incarnation(70)
TRANSFER = TransferId(5)
SPECS = specs([0])
READ = Read(LEASE, NEAR, FIRST, ONE, 0, source(0))
AGAIN = Read(LEASE, NEAR, FIRST, TWO, 0, source(0))


def has_read(
    by: int, error: ErrorValue | None = None, attempt: Attempt = ONE, group: Incarnation = GROUP
) -> RankRead:
    return RankRead(group, by, LEASE, FIRST, attempt, 0, error)


def formed(ranks: int) -> Bench:
    bench = Bench(group, group.Limits())
    bench.feed(GroupFormed(GROUP, ranks), *(RankJoined(GROUP, number) for number in range(ranks)))
    assert bench.state == Leading(GROUP, (0,) * ranks)
    return bench


def reading(ranks: int) -> Bench:
    bench = formed(ranks)
    assert bench.feed(LeaseTaken(LEASE, TRANSFER), ReadWanted(READ)) == [Append(1, READ)]
    return bench


def delivered(ranks: int) -> Bench:
    bench = reading(ranks)
    bench.feed(*map(has_read, range(ranks)))
    assert bench.feed(DeliverWanted(LEASE, SPECS)) == [Append(2, Deliver(TRANSFER, LEASE, SPECS))]
    return bench


@pytest.fixture(params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


# -- rank 0 ------------------------------------------------------------------------------------


def test_nothing_is_told_before_every_rank_is_there() -> None:
    bench = Bench(group, group.Limits())
    bench.feed(GroupFormed(GROUP, 2), RankJoined(GROUP, 1))
    assert isinstance(bench.state, Forming)
    assert bench.ignores(
        RankJoined(GROUP, 1), RankJoined(OLDER, 0), LeaseTaken(LEASE, TRANSFER), ReadWanted(READ)
    )


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_read_has_ended_when_it_has_ended_on_every_rank(order: tuple[int, ...]) -> None:
    bench = reading(3)
    *early, last = order
    for number in early:
        assert bench.feed(has_read(number)) == []
        assert bench.ignores(has_read(number))  # a repeat is not another rank's word
    assert bench.feed(has_read(last)) == [TellReadEnded(TRANSFER, FIRST, ONE, 0, None)]
    assert bench.ignores(has_read(last))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_failed_read_fails_the_item_once_the_others_have_ended_too(bad: int) -> None:
    bench = reading(3)
    error = failure("read_failed")
    first, second = (number for number in range(3) if number != bad)
    assert bench.feed(has_read(bad, error), has_read(first)) == []
    assert bench.feed(has_read(second)) == [TellReadEnded(TRANSFER, FIRST, ONE, 0, error)]


def test_words_of_an_older_attempt_are_not_those_of_the_newer() -> None:
    bench = reading(2)
    bench.feed(has_read(0))
    assert bench.feed(ReadWanted(AGAIN)) == [Append(2, AGAIN)]
    assert bench.ignores(has_read(0), has_read(1))
    assert bench.feed(has_read(1, attempt=TWO)) == []
    assert bench.feed(has_read(0, attempt=TWO)) == [TellReadEnded(TRANSFER, FIRST, TWO, 0, None)]


def test_words_of_another_incarnation_or_of_no_rank_count_for_nothing(ranks: int) -> None:
    bench = reading(ranks)
    assert bench.ignores(has_read(0, group=OLDER), has_read(ranks), has_read(-1))
    bench = delivered(ranks)
    assert bench.ignores(RankReleased(OLDER, 0, LEASE), RankApplied(OLDER, 0, 2), RankJoined(OLDER, 0))
    bench.feed(*(RankReleased(GROUP, number, LEASE) for number in range(ranks)), ReturnWanted(LEASE))
    assert bench.ignores(RankFreed(OLDER, 0, LEASE), RankFreed(GROUP, ranks, LEASE))


def test_a_view_is_released_when_every_rank_has_released(ranks: int) -> None:
    bench = delivered(ranks)
    *early, last = range(ranks)
    for number in early:
        assert bench.feed(RankReleased(GROUP, number, LEASE)) == []
        assert bench.ignores(RankReleased(GROUP, number, LEASE))
    assert bench.ignores(ReturnWanted(LEASE))  # some rank still looks at it
    assert bench.feed(RankReleased(GROUP, last, LEASE)) == [TellReleased(TRANSFER)]


def test_a_lease_is_free_when_every_rank_has_said_so(ranks: int) -> None:
    bench = reading(ranks)
    assert bench.ignores(RankFreed(GROUP, 0, LEASE))  # nobody was told to let go of it
    assert bench.feed(ReturnWanted(LEASE)) == [Append(2, Free(LEASE))]
    *early, last = range(ranks)
    for number in early:
        assert bench.feed(RankFreed(GROUP, number, LEASE)) == []
        assert bench.ignores(RankFreed(GROUP, number, LEASE), has_read(last), ReadWanted(AGAIN))
    assert bench.feed(RankFreed(GROUP, last, LEASE)) == [FreeLease(LEASE)]
    assert bench.state.leases == ()
    assert bench.ignores(RankFreed(GROUP, last, LEASE), ReturnWanted(LEASE), DeliverWanted(LEASE, SPECS))


def test_an_item_is_delivered_once(ranks: int) -> None:
    bench = delivered(ranks)
    assert bench.ignores(DeliverWanted(LEASE, SPECS), ReadWanted(AGAIN), LeaseTaken(LEASE, TRANSFER))


def test_failures_and_cancels_have_their_place_in_the_order(ranks: int) -> None:
    bench = formed(ranks)
    error, cancelled = failure("read_failed"), Cancelled("by the caller").as_value()
    assert bench.feed(EndWanted(TRANSFER, error), EndWanted(TransferId(6), cancelled)) == [
        Append(1, Fail(TRANSFER, error)),
        Append(2, Cancel(TransferId(6), cancelled)),
    ]


def test_rank_0_shows_what_every_rank_has_applied() -> None:
    bench = formed(3)
    bench.feed(*(EndWanted(TransferId(number), failure()) for number in range(3)))
    assert bench.feed(RankApplied(GROUP, 0, 3), RankApplied(GROUP, 1, 1)) == []
    assert bench.feed(RankApplied(GROUP, 2, 2)) == [Commit(1)]
    assert bench.ignores(RankApplied(GROUP, 1, 1), RankApplied(GROUP, 1, 4), RankApplied(GROUP, 3, 1))
    assert bench.feed(RankApplied(GROUP, 1, 3)) == [Commit(2)]
    assert bench.feed(RankApplied(GROUP, 2, 3)) == [Commit(3)]


@pytest.mark.parametrize("leaving", [RankLost(GROUP, 1), RankJoined(GROUP, 1)], ids=["lost", "came again"])
def test_a_rank_that_is_lost_or_comes_again_ends_the_group_for_all(leaving: RankLost | RankJoined) -> None:
    bench = reading(2)
    (effect,) = bench.feed(leaving)
    assert isinstance(effect, EndGroup) and "rank 1" in effect.reason
    assert isinstance(bench.state, Over)
    assert bench.ignores(has_read(0), has_read(1), RankFreed(GROUP, 0, LEASE), ReturnWanted(LEASE))
    assert bench.ignores(RankJoined(GROUP, 1), RankLost(GROUP, 0), GroupFormed(GROUP, 2))


def test_a_rank_lost_while_the_group_forms_ends_it_too() -> None:
    bench = Bench(group, group.Limits())
    bench.feed(GroupFormed(GROUP, 2), RankJoined(GROUP, 1))
    assert bench.ignores(RankLost(OLDER, 1))
    assert [type(effect) for effect in bench.feed(RankLost(GROUP, 1))] == [EndGroup]


def test_leases_are_found_in_whatever_order_they_come_and_go() -> None:
    bench = formed(1)
    numbers = [LeaseId(number) for number in (4, 9, 2, 7)]
    for number in numbers:
        bench.feed(LeaseTaken(number, TransferId(number)))
    assert [held.lease for held in bench.state.leases] == [2, 4, 7, 9]
    for lease in map(LeaseId, (7, 2, 9, 4)):
        assert bench.feed(ReturnWanted(lease))
        assert bench.feed(RankFreed(GROUP, 0, lease)) == [FreeLease(lease)]
    assert bench.state.leases == ()


# -- a rank ------------------------------------------------------------------------------------

ENTRIES = (READ, Deliver(TRANSFER, LEASE, SPECS), Free(LEASE))


def entry(number: int, of: Incarnation = GROUP) -> rank.EntryReceived:
    return rank.EntryReceived(of, number, ENTRIES[number - 1])


@pytest.fixture
def follower() -> Bench:
    bench = Bench(rank, rank.Limits())
    bench.feed(rank.Joined(GROUP, 1))
    return bench


def test_a_rank_applies_each_entry_once_in_order(follower: Bench) -> None:
    assert follower.feed(entry(1)) == [rank.Apply(1, READ)]
    assert follower.ignores(entry(1), entry(2, of=OLDER), rank.Joined(GROUP, 1))
    assert follower.feed(entry(2)) == [rank.Apply(2, ENTRIES[1]), rank.SendApplied(2)]
    assert follower.feed(entry(3)) == [rank.Apply(3, ENTRIES[2])]


def test_a_gap_in_the_log_ends_the_rank(follower: Bench) -> None:
    follower.feed(entry(1))
    (effect,) = follower.feed(entry(3))
    assert effect == rank.EndIncarnation("entry 3 of the log where 2 was due")
    assert follower.ignores(entry(2), entry(3), rank.Joined(GROUP, 1), rank.GroupEnded(GROUP))


def test_a_rank_ends_with_its_group(follower: Bench) -> None:
    assert follower.ignores(rank.GroupEnded(OLDER))
    assert follower.feed(rank.GroupEnded(GROUP)) == [rank.EndIncarnation("the group has ended")]
    assert follower.ignores(entry(1))
