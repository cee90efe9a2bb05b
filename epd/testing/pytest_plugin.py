"""Fixtures for users' tests: put `pytest_plugins = ["epd.testing.pytest_plugin"]` into a `conftest.py`."""

from collections.abc import Callable, Iterator

import pytest

from epd.check.traces.check import Checked
from epd.testing.hold_points import HoldPoints
from epd.testing.machine_pair import MachinePair
from epd.testing.replaying import assert_replays
from epd.testing.virtual_clock import VirtualClock


@pytest.fixture
def replays() -> Callable[..., Checked]:
    """`replays(path, ...)`: fails unless these traces replay identically and keep every rule."""
    return assert_replays


@pytest.fixture
def virtual_clock() -> VirtualClock:
    """A clock that stands still until it is advanced."""
    return VirtualClock()


@pytest.fixture
def hold_points() -> Iterator[HoldPoints]:
    """Named places at which threads wait; whoever still waits is let go at the end."""
    points = HoldPoints()
    yield points
    points.release_all()


@pytest.fixture
def machine_pair() -> Iterator[MachinePair]:
    """The request machines of both sides, coupled; the invariants are checked at the end of the test."""
    pair = MachinePair()
    yield pair
    pair.check()
