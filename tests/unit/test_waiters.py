"""Who gets room, and when nobody passes any more."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pools import KIB, make_pool

from epd.memory.pool import Extent, Pool
from epd.memory.waiters import LOOK_AHEAD, Waiters

AGEING_S = 1.0
Admitted = list[tuple[str, tuple[Extent, ...]]]


def keys(admitted: Admitted) -> list[str]:
    return [key for key, _ in admitted]


def full_pool() -> tuple[Pool, dict[str, tuple[Extent, ...]]]:
    """One region of 16 KiB, taken in four leases of 4 KiB."""
    pool = make_pool(count=1)
    held = {name: pool.take([4 * KIB]) for name in "abcd"}
    return pool, {name: extents for name, extents in held.items() if extents is not None}


def waiting(*requests: tuple[str, int, float]) -> Waiters[str]:
    waiters: Waiters[str] = Waiters(AGEING_S)
    for key, nbytes, since_s in requests:
        waiters.push(key, [nbytes], since_s)
    return waiters


def test_room_is_given_in_order() -> None:
    waiters = waiting(("first", 4 * KIB, 0.0), ("second", 4 * KIB, 0.0), ("third", 4 * KIB, 0.0))
    pool, held = full_pool()
    assert waiters.admit(pool, 0.0) == []
    pool.give(held["a"] + held["c"])
    assert keys(waiters.admit(pool, 0.0)) == ["first", "second"]
    assert len(waiters) == 1


def test_a_smaller_one_passes_while_the_first_is_young() -> None:
    waiters = waiting(("large", 8 * KIB, 0.0), ("small", 4 * KIB, 0.0))
    pool, held = full_pool()
    pool.give(held["a"])
    assert keys(waiters.admit(pool, AGEING_S - 0.01)) == ["small"]


def test_nobody_passes_when_the_first_has_waited_long_enough() -> None:
    waiters = waiting(("large", 8 * KIB, 0.0), ("small", 4 * KIB, 0.5))
    pool, held = full_pool()
    pool.give(held["a"])
    assert waiters.admit(pool, AGEING_S) == []
    pool.give(held["b"])
    assert keys(waiters.admit(pool, AGEING_S)) == ["large"]


def test_one_that_is_not_smaller_does_not_pass_even_if_it_fits() -> None:
    pool, held = full_pool()
    pool.give(held["a"] + held["c"])  # two holes of 4 KiB
    waiters: Waiters[str] = Waiters(AGEING_S)
    waiters.push("whole", [8 * KIB], 0.0)
    waiters.push("pieces", [4 * KIB, 4 * KIB], 0.0)
    assert waiters.admit(pool, 0.0) == []


def test_the_next_first_ages_from_its_own_arrival() -> None:
    waiters = waiting(("old", 4 * KIB, 0.0), ("large", 8 * KIB, 5.0), ("small", 4 * KIB, 5.0))
    pool, held = full_pool()
    pool.give(held["a"] + held["c"])
    assert keys(waiters.admit(pool, 5.5)) == ["old", "small"]


def test_withdrawing_the_first_lets_the_others_go() -> None:
    waiters = waiting(("large", 16 * KIB, 0.0), ("small", 4 * KIB, 0.0))
    pool, held = full_pool()
    pool.give(held["b"])
    assert waiters.admit(pool, 9.0) == []
    assert waiters.withdraw("large")
    assert not waiters.withdraw("large")
    assert keys(waiters.admit(pool, 9.0)) == ["small"]
    assert len(waiters) == 0


def test_only_so_many_are_tried_behind_the_first() -> None:
    waiters = waiting(("large", 8 * KIB, 0.0))
    for index in range(LOOK_AHEAD):
        waiters.push(f"middling{index}", [6 * KIB], 0.0)
    waiters.push("small", [KIB], 0.0)
    pool, held = full_pool()
    pool.give(held["a"])
    assert waiters.admit(pool, 0.0) == []
    waiters.withdraw("middling0")
    assert keys(waiters.admit(pool, 0.0)) == ["small"]


class WaitersMachine(RuleBasedStateMachine):
    """Random arrivals, releases and time; every first is served once everything before it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(count=2)
        self.waiters: Waiters[int] = Waiters(AGEING_S)
        self.queue: dict[int, tuple[float, int]] = {}
        self.held: list[tuple[Extent, ...]] = []
        self.now_s = 0.0
        self.next_key = 0

    def admit(self) -> None:
        first = next(iter(self.queue), None)
        aged = first is not None and self.now_s - self.queue[first][0] >= AGEING_S
        admitted = self.waiters.admit(self.pool, self.now_s)
        if aged and admitted:
            assert admitted[0][0] == first
        for key, extents in admitted:
            ahead = [other for other in self.queue if other < key]
            if ahead:
                since_s, nbytes = self.queue[ahead[0]]
                assert self.now_s - since_s < AGEING_S
                assert sum(extent.nbytes for extent in extents) < nbytes
            del self.queue[key]
            self.held.append(extents)

    @rule(sizes=st.lists(st.integers(0, 16 * KIB), max_size=4))
    def push(self, sizes: list[int]) -> None:
        if not self.pool.fits_empty(sizes):
            return
        self.waiters.push(self.next_key, sizes, self.now_s)
        self.queue[self.next_key] = (self.now_s, sum(sizes))
        self.next_key += 1
        self.admit()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.give(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))
        self.admit()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.queue)))
        del self.queue[key]
        assert self.waiters.withdraw(key)
        self.admit()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def the_same_wait(self) -> None:
        assert len(self.waiters) == len(self.queue)
        assert all(key in self.waiters for key in self.queue)

    def teardown(self) -> None:
        """When everything is freed, again and again, everybody gets room and the pool ends empty."""
        while self.held or self.queue:
            before = len(self.held) + len(self.queue)
            for extents in self.held:
                self.pool.give(extents)
            self.held = []
            self.admit()
            assert len(self.held) + len(self.queue) < before or self.held
        assert self.pool.counts()["used_nbytes"] == 0


WaitersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_first_in_the_queue_is_never_starved = pytest.mark.slow(WaitersMachine.TestCase)
