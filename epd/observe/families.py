"""Every metric there is: its name, kind, labels and meaning; and the histogram that they share.

A label's values are ours, never what a client or a peer sends: state names, error codes that we
know, configured addresses.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from epd.protocol.errors import BY_CODE

TIME_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""From a message between two processes to a wait for room that is given up."""

_CODES: Final = frozenset(BY_CODE) | {"received", "superseded", "delivered"}


class Histogram:
    """Counts by bucket. Written by one thread without a lock, read by another: a sum may lag a count."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(TIME_BUCKETS_S) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(TIME_BUCKETS_S, seconds)] += 1
        self.sum += seconds


class Family(NamedTuple):
    """`name` without the `_total` that a counter gets when it is shown."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


class Sample(NamedTuple):
    family: str
    labels: tuple[str, ...]
    value: float | Histogram


FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        Family(
            "epd_build_info", "gauge", ("version", "protocol_version", "logic_version", "role"), "Always 1."
        ),
        Family(
            "epd_ready", "gauge", (), "1 if requests can be served: what /readyz answers with 200, else 0."
        ),
        # -- transfers
        Family(
            "epd_transfers_open",
            "gauge",
            ("state",),
            "Open transfers (encoder: parts) by the furthest state that they have reached.",
        ),
        Family(
            "epd_transfers",
            "counter",
            ("outcome",),
            "Ended transfers: delivered, or an error code (encoder: parts, received or why not).",
        ),
        Family(
            "epd_transfer_phase_seconds",
            "histogram",
            ("state",),
            "Seconds from reaching a state to reaching the next one.",
        ),
        Family(
            "epd_transfer_duration_seconds",
            "histogram",
            (),
            "From submit to delivered (encoder: from request to receipt).",
        ),
        Family("epd_retries", "counter", (), "Attempts of a part after its first one."),
        Family("epd_requests_refused", "counter", ("code",), "Requests refused at submit."),
        # -- memory
        Family("epd_pool_capacity_bytes", "gauge", (), "All bytes of the pool."),
        Family(
            "epd_pool_bytes",
            "gauge",
            ("state",),
            "Bytes of the pool by slot state. quarantined: given back, while our engine may still write it.",
        ),
        Family("epd_pool_largest_free_bytes", "gauge", (), "An item of so many bytes finds room now."),
        Family(
            "epd_pool_fragmentation_ratio",
            "gauge",
            (),
            "0: the free bytes are as whole as regions allow; towards 1: they are in small pieces.",
        ),
        Family("epd_room_waiting", "gauge", (), "Requests (encoder: forwards) that wait for room."),
        Family("epd_media_bytes", "gauge", (), "Media held by an encoder."),
        # -- reads
        Family("epd_reads", "counter", ("plane", "transport", "outcome"), "Reads that are terminal."),
        Family("epd_read_bytes", "counter", ("plane", "transport"), "Bytes of reads that ended well."),
        Family(
            "epd_read_seconds", "counter", ("plane", "transport"), "Seconds from hand-in to end of reads."
        ),
        Family("epd_reads_running", "gauge", (), "Reads that are not terminal yet."),
        Family("epd_read_aborts", "counter", (), "Reads that our side gave up and aborted."),
        Family(
            "epd_read_abort_to_terminal_seconds",
            "histogram",
            (),
            "From an abort to our own engine's last word on that read.",
        ),
        Family(
            "epd_read_mismatches",
            "counter",
            ("peer", "check"),
            "Reads whose seal or checksum was not the announced one, by the configured address.",
        ),
        # -- push
        Family(
            "epd_push_windows",
            "gauge",
            ("state",),
            "Windows that encoders write through: granted, revoking, or held, as they cannot be revoked.",
        ),
        Family("epd_push_fences", "counter", (), "Windows that were revoked; the end of a session is one."),
        Family(
            "epd_push_quarantined_bytes",
            "gauge",
            (),
            "Bytes of slots whose writer has not said what became of its write, until its window is revoked.",
        ),
        # -- encoders
        Family("epd_jobs", "gauge", ("state",), "Jobs by state."),
        Family("epd_shared_jobs", "counter", (), "Subscriptions that joined a job that was there already."),
        Family(
            "epd_forwards", "counter", ("outcome",), "Forwards of one item that ended: ok, or an error code."
        ),
        Family("epd_forward_duration_seconds", "histogram", (), "One item's forward, its batch included."),
        Family("epd_forward_queue", "gauge", (), "Items whose forward has not started."),
        Family("epd_worker_deaths", "counter", (), "Forward workers that died; each is started again."),
        # -- sessions
        Family("epd_sessions", "gauge", ("peer_role",), "Sessions in force."),
        Family("epd_sessions_opened", "counter", (), "Sessions that came into force."),
        Family("epd_sessions_ended", "counter", ("code",), "Sessions that ended or could not be had."),
        Family("epd_rejected_frames", "counter", ("reason",), "Frames that were dropped."),
        # -- the process
        Family("epd_event_loop_lag_seconds", "histogram", (), "How late the loop ran what was due."),
        Family("epd_mailbox_messages", "gauge", ("actor",), "Mail that waits for an actor."),
    )
}


def known_code(code: str) -> str:
    """A label for an error code, which a peer may have sent: one of ours, or `other`."""
    return code if code in _CODES else "other"


def samples(family: str, values: Mapping[str, float]) -> Iterable[Sample]:
    """Of a family with one label. `values` may grow meanwhile, in the thread that owns it."""
    return [Sample(family, (label,), value) for label, value in list(values.items())]
