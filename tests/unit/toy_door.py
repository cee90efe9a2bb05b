"""A toy machine: a door that closes by itself, rings when asked, and may be bricked up."""

from collections.abc import Callable
from typing import ClassVar, Final

import msgspec

from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch


class Limits(msgspec.Struct, frozen=True):
    open_s: float = 5.0


class Closed(State):
    deadline_s: None = None
    final: ClassVar[bool] = False


class Open(State):
    deadline_s: float | None
    passed: int = 0
    final: ClassVar[bool] = False


class Bricked(State):
    deadline_s: None = None
    final: ClassVar[bool] = True


AnyState = Closed | Open | Bricked
INITIAL: Final = Closed()


class Opened(Event):
    who: str


class Passed(Event):
    who: str


class WedgedOpen(Event):
    pass


class BrickedUp(Event):
    pass


class Broken(Event):
    """The handler of this one has a bug."""


class Stuck(Event):
    """The state after this one has a bug: its deadline stays."""


AnyEvent = Opened | Passed | WedgedOpen | BrickedUp | Broken | Stuck | TimerExpired


class Ring(Effect):
    who: str


class Slam(Effect):
    passed: int


class Light(Effect):
    on: bool


AnyEffect = Ring | Slam | Light | Ignored


class Jammed(State):
    deadline_s: float
    final: ClassVar[bool] = False


def _open(state: Closed, event: Opened, now_s: float, limits: Limits) -> Step:
    return Step(Open(now_s + limits.open_s), (Ring(event.who), Light(True)))


def _pass(state: Open, event: Passed, now_s: float, limits: Limits) -> Step:
    return Step(Open(now_s + limits.open_s, state.passed + 1), ())


def _wedge(state: Open, event: WedgedOpen, now_s: float, limits: Limits) -> Step:
    return Step(Open(None, state.passed), ())


def _close(state: Open, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    return Step(Closed(), (Light(False), Slam(state.passed)))


def _brick(state: AnyState, event: BrickedUp, now_s: float, limits: Limits) -> Step:
    return Step(Bricked(), (Slam(0),))


def _break(state: AnyState, event: Broken, now_s: float, limits: Limits) -> Step:
    raise ZeroDivisionError("the hinge")


def _jam(state: AnyState, event: Stuck, now_s: float, limits: Limits) -> Step:
    return Step(Jammed(now_s + 1.0), ())


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Closed, Opened): _open,
    (Closed, BrickedUp): _brick,
    (Closed, Broken): _break,
    (Closed, Stuck): _jam,
    (Open, Passed): _pass,
    (Open, WedgedOpen): _wedge,
    (Open, TimerExpired): _close,
    (Open, BrickedUp): _brick,
    (Open, Broken): _break,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    return dispatch(TRANSITIONS, state, event, now_s, limits)
