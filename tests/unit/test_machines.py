from collections.abc import Callable, Hashable

import pytest
import toy_door as door

from epd.protocol.machine import Effect, Event, TimerExpired
from epd.runtime.machines import STORY_STEPS, MachineFailed, MachineTable
from epd.runtime.timers import Timers
from epd.testing.virtual_clock import VirtualClock

KEY = ("house", 1)


class House:
    """One table of doors on a virtual clock, with everything that was performed and recorded."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.timers = Timers(self.clock, self.clock.call_at)
        self.performed: list[tuple[Hashable, Effect]] = []
        self.declared: list[tuple[str, object]] = []
        self.recorded: list[tuple[str, Hashable, Event, float, tuple[Effect, ...]]] = []
        self.on_effect: Callable[[Hashable, Effect], None] = lambda key, effect: None
        self.doors = MachineTable("door", door, door.Limits(), self.clock, self.timers, self, self._perform)

    def declare(self, kind: str, limits: object) -> None:
        self.declared.append((kind, limits))

    def record(
        self, kind: str, key: Hashable, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        self.recorded.append((kind, key, event, now_s, effects))

    def _perform(self, key: Hashable, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            self.performed.append((key, effect))
            self.on_effect(key, effect)


@pytest.fixture
def house() -> House:
    return House()


def test_a_step_is_recorded_stored_and_performed(house: House) -> None:
    house.doors.feed(KEY, door.Opened("ann"))
    effects = (door.Ring("ann"), door.Light(True))
    assert house.declared == [("door", door.Limits())]
    assert house.recorded == [("door", KEY, door.Opened("ann"), 1000.0, effects)]
    assert house.performed == [(KEY, effects[0]), (KEY, effects[1])]
    assert house.doors.state(KEY) == door.Open(1005.0)
    assert house.doors.keys() == (KEY,)
    assert len(house.doors) == 1


def test_every_key_has_its_own_machine(house: House) -> None:
    house.doors.feed(1, door.Opened("ann"))
    house.doors.feed("two", door.Opened("bob"))
    house.doors.feed(1, door.Passed("ann"))
    assert house.doors.state(1).passed == 1
    assert house.doors.state("two").passed == 0
    assert house.doors.state("three") == door.INITIAL


def test_the_timer_fires_at_the_deadline_of_the_current_state_only(house: House) -> None:
    house.doors.feed(KEY, door.Opened("ann"))
    house.clock.advance(4.0)
    house.doors.feed(KEY, door.Passed("ann"))
    house.clock.advance(4.9)
    assert house.doors.state(KEY) == door.Open(1009.0, 1)
    house.clock.advance(0.1)
    assert house.recorded[-1][2:4] == (TimerExpired(), 1009.0)
    assert house.performed[-2:] == [(KEY, door.Light(False)), (KEY, door.Slam(1))]


def test_a_deadline_that_moves_forward_is_kept(house: House) -> None:
    """The lazy timer must not be later than the state's own deadline."""
    house.doors.feed(KEY, door.Opened("ann"))
    house.doors._limits = door.Limits(open_s=1.0)
    house.doors.feed(KEY, door.Passed("ann"))
    house.clock.advance(1.0)
    assert house.doors.state(KEY) == door.Closed()


def test_a_state_without_deadline_has_no_timer(house: House) -> None:
    house.doors.feed(KEY, door.Opened("ann"))
    assert len(house.timers) == 1
    house.doors.feed(KEY, door.WedgedOpen())
    assert len(house.timers) == 0
    house.clock.advance(100.0)
    assert house.doors.state(KEY) == door.Open(None)


@pytest.mark.parametrize("end", [door.BrickedUp(), TimerExpired()], ids=["final", "initial again"])
def test_a_machine_that_has_ended_leaves_nothing(house: House, end: Event) -> None:
    house.doors.feed(KEY, door.Opened("ann"))
    house.doors.feed(KEY, end)
    assert len(house.doors) == 0
    assert len(house.timers) == 0
    assert house.doors.state(KEY) == door.INITIAL


def test_an_event_for_a_machine_that_is_not_there_leaves_nothing(house: House) -> None:
    house.doors.feed(KEY, door.Passed("ann"))
    assert len(house.doors) == 0
    assert house.doors.ignored == {("door", "Closed", "Passed"): 1}


def test_an_event_fed_while_performing_waits_for_all_effects_of_the_step(house: House) -> None:
    def on_effect(key: Hashable, effect: Effect) -> None:
        if effect == door.Ring("ann"):
            house.doors.feed(key, TimerExpired())
            house.doors.feed("other", door.Opened("bob"))
            assert house.doors.state(key) == door.Open(1005.0)

    house.on_effect = on_effect
    house.doors.feed(KEY, door.Opened("ann"))
    assert [effect for _, effect in house.performed] == [
        door.Ring("ann"),
        door.Light(True),
        door.Light(False),
        door.Slam(0),
        door.Ring("bob"),
        door.Light(True),
    ]


def test_a_long_chain_of_nested_feeds_does_not_recurse(house: House) -> None:
    rings: list[Hashable] = []

    def on_effect(key: Hashable, effect: Effect) -> None:
        if isinstance(effect, door.Ring) and len(rings) < 5000:
            rings.append(key)
            house.doors.feed(len(rings), door.Opened("next"))

    house.on_effect = on_effect
    house.doors.feed(0, door.Opened("ann"))
    assert len(house.doors) == 5001


def test_a_step_that_raises_is_a_typed_error_with_the_story_of_its_key(house: House) -> None:
    house.doors.feed("other", door.Opened("bob"))
    house.doors.feed(KEY, door.Opened("ann"))
    house.doors.feed(KEY, door.Passed("ann"))
    with pytest.raises(MachineFailed, match="ZeroDivisionError: the hinge") as caught:
        house.doors.feed(KEY, door.Broken())
    error = caught.value
    assert (error.kind, error.key, error.event) == ("door", KEY, door.Broken())
    assert error.state == door.Open(1005.0, 1)
    assert len(error.story) == 2
    assert "Opened(who='ann') -> [Ring(who='ann')" in error.story[0]
    assert "bob" not in "".join(error.story)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert house.recorded[-1] == ("door", KEY, door.Broken(), 1000.0, ())


def test_the_story_is_bounded_and_keeps_the_newest(house: House) -> None:
    house.doors.feed(KEY, door.Opened("ann"))
    for n in range(1000):
        house.doors.feed(KEY, door.Passed(f"guest {n}"))
    with pytest.raises(MachineFailed) as caught:
        house.doors.feed(KEY, door.Broken())
    assert STORY_STEPS <= len(caught.value.story) < 2 * STORY_STEPS
    assert "guest 999" in caught.value.story[-1]


def test_a_deadline_that_its_own_expiry_does_not_move_is_an_error_not_a_spinning_loop(house: House) -> None:
    house.doors.feed(KEY, door.Stuck())
    with pytest.raises(MachineFailed, match="left the deadline where it was"):
        house.clock.advance(1.0)


def test_when_performing_raises_the_events_that_waited_are_dropped(house: House) -> None:
    def on_effect(key: Hashable, effect: Effect) -> None:
        house.doors.feed("other", door.Opened("bob"))
        raise OSError("no bell")

    house.on_effect = on_effect
    with pytest.raises(OSError, match="no bell"):
        house.doors.feed(KEY, door.Opened("ann"))
    house.on_effect = lambda key, effect: None
    house.doors.feed("third", door.Opened("cat"))
    assert house.doors.keys() == (KEY, "third")


def test_closing_forgets_machines_and_timers(house: House) -> None:
    house.doors.feed(KEY, door.Opened("ann"))
    house.doors.close()
    assert len(house.doors) == 0
    assert len(house.timers) == 0
