"""What a node takes of the machine it runs on: time, chance, network, threads, files.

The simulator gives it others; everything else of a node is the same there.
"""

import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

from epd.dataplane.poller import ReadPoller
from epd.runtime.clock import Clock, MonotonicClock, unix_s
from epd.runtime.lanes import OpenTransport
from epd.runtime.recorder import OpenWriter
from epd.runtime.trace_writer import TraceWriter
from epd.runtime.zmq_lanes import ZmqTransport


class Host(NamedTuple):
    clock: Clock
    unix_s: Callable[[], float]
    """For people to read, in traces."""
    randbits: Callable[[int], int]
    """So many unpredictable bits: incarnations, sessions and seals must be neither guessed nor repeated."""
    open_transport: OpenTransport
    poller: Callable[..., ReadPoller]
    trace_writer: OpenWriter

    def jitter(self) -> float:
        """In 0..1."""
        return self.randbits(53) / 2**53


THIS_HOST: Final = Host(MonotonicClock(), unix_s, secrets.randbits, ZmqTransport, ReadPoller, TraceWriter)
