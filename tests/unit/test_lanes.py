"""Room for sockets and descriptors is made, or refused with both numbers, before the first socket."""

import resource

import pytest
import zmq

from epd.protocol.errors import ConfigError
from epd.runtime import zmq_lanes
from epd.runtime.zmq_lanes import open_context


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard limit of open files, as far as the module can see."""
    values = [1024, 4096]

    class Pretended:
        RLIMIT_NOFILE = resource.RLIMIT_NOFILE
        RLIM_INFINITY = resource.RLIM_INFINITY

        @staticmethod
        def getrlimit(which: int) -> tuple[int, int]:
            return values[0], values[1]

    monkeypatch.setattr(zmq_lanes, "resource", Pretended)
    return values


def test_the_limit_is_only_read_in_somebody_elses_process(limits: list[int]) -> None:
    """The pretended module cannot set any; `epd-node` raises its own."""
    open_context(16).term()
    assert limits == [1024, 4096]


def test_an_unlimited_node_is_left_as_it_is(limits: list[int]) -> None:
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    open_context(5000).term()
    assert limits == [resource.RLIM_INFINITY, resource.RLIM_INFINITY]


def test_too_few_open_files_are_refused_with_both_numbers(limits: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"limits.max_peers: 1000 peers need 8192 open files, .* 1024"):
        open_context(1000)
    assert limits == [1024, 4096]


def test_sockets_are_allowed_for_every_peer_before_the_first_is_made() -> None:
    context = open_context(300)
    try:
        assert context.get(zmq.MAX_SOCKETS) >= 300 * 6
        assert context is not zmq.Context.instance()
    finally:
        context.term()
        zmq.Context.instance().term()
