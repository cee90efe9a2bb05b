"""What is counted of the machines' steps, with the machines themselves, and how it is shown."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pools import make_pool
from prometheus_client.parser import text_string_to_metric_families

from epd.observe.exposition import node_registry, page
from epd.observe.families import FAMILIES, Histogram, Sample, known_code
from epd.observe.steps import StepMetrics
from epd.protocol import encoder, session, slots
from epd.protocol import prefill_types as t
from epd.protocol.errors import ReadFailed
from epd.protocol.ids import Attempt, LeaseId, Part, ReadId, RegionId, Seal, SessionId
from epd.protocol.machine import Event
from epd.protocol.messages import ErrorValue, Source
from epd.protocol.registry import MACHINES
from epd.protocol.trace import LimitsRecord, Record, StepRecord, TraceReader
from epd.runtime.machines import MachineTable
from epd.runtime.timers import Timers

LEASE, SESSION = LeaseId(1), SessionId(77)
TRACES = Path(__file__).parents[1] / "traces" / "0.1.0"
ADDRESS = "tcp://127.0.0.1:7101"


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now_s(self) -> float:
        return self.seconds


class Slots:
    """One slot machine in a table, watched by step metrics; a lease is 1,000 bytes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = StepMetrics("prefill")
        self.metrics.nbytes_of = lambda key: 1_000
        timers = Timers(self.clock, lambda when, callback: _NoTimer())
        self.table = MachineTable(
            "slots", slots, slots.Limits(), self.clock, timers, None, lambda key, effects: None
        )
        self.table.observers = (self.metrics.saw_slots,)

    def feed(self, *events: Event) -> None:
        for event in events:
            self.table.feed(LEASE, event)

    def value(self, family: str, *labels: str) -> Any:
        return value(self.metrics, family, *labels)


class _NoTimer:
    def cancel(self) -> None:
        pass


def value(metrics: StepMetrics, family: str, *labels: str) -> Any:
    found = [s.value for s in metrics.samples() if (s.family, s.labels) == (family, labels)]
    return found[0] if found else None


def wanted(read: int = 1) -> slots.Wanted:
    source = Source(RegionId(0), 0, 1_000, Seal(3))
    return slots.Wanted(ReadId(read), SESSION, Part(0), Attempt(1), 0, source)


def test_bytes_are_leased_then_quarantined_until_the_engine_has_spoken() -> None:
    one = Slots()
    one.feed(slots.LeaseTaken(LEASE), slots.ReadWanted(wanted()), slots.ReadPosted(ReadId(1)))
    assert (one.value("epd_pool_bytes", "leased"), one.value("epd_pool_bytes", "quarantined")) == (1_000, 0)
    one.feed(slots.LeaseReturned())
    assert (one.value("epd_pool_bytes", "leased"), one.value("epd_pool_bytes", "quarantined")) == (0, 1_000)
    one.feed(slots.ReadTerminal(ReadId(1), "ok"))
    assert (one.value("epd_pool_bytes", "leased"), one.value("epd_pool_bytes", "quarantined")) == (0, 0)


def test_an_aborted_read_is_counted_with_the_time_to_its_terminal_word() -> None:
    one = Slots()
    one.feed(slots.LeaseTaken(LEASE), slots.ReadWanted(wanted(1)), slots.ReadPosted(ReadId(1)))
    one.feed(slots.ReadWanted(wanted(2)))  # a newer attempt reads into the same item
    assert one.value("epd_read_aborts") == 1
    one.clock.seconds += 3.0
    one.feed(slots.ReadTerminal(ReadId(1), "aborted"))
    took = one.value("epd_read_abort_to_terminal_seconds")
    assert (sum(took.counts), took.sum) == (1, 3.0)
    one.feed(slots.ReadTerminal(ReadId(2), "ok"))
    assert sum(took.counts) == 1


@pytest.mark.parametrize(("outcome", "check"), [("seal_mismatch", "seal"), ("digest_mismatch", "checksum")])
def test_a_mismatch_is_counted_by_the_address_that_we_dialled(outcome: str, check: str) -> None:
    one = Slots()
    one.metrics.saw_session(SESSION, None, None, session.Dialled(ADDRESS), 0.0, ())
    one.metrics.saw_session(SESSION, None, None, Event(), 0.0, (session.TellEnded("session_lost", ""),))
    one.feed(slots.LeaseTaken(LEASE), slots.ReadWanted(wanted()), slots.ReadTerminal(ReadId(1), outcome))
    assert one.value("epd_read_mismatches", ADDRESS, check) == 1
    assert one.value("epd_sessions_ended", "session_lost") == 1


def test_addresses_of_sessions_that_are_over_are_not_kept_for_ever() -> None:
    one = Slots()
    for number in range(5_000):
        one.metrics.saw_session(number, None, None, session.Dialled(ADDRESS), 0.0, ())
    assert len(one.metrics._addresses) <= 1_024


def test_a_code_that_a_peer_made_up_is_no_label() -> None:
    assert known_code("session_lost") == "session_lost"
    assert known_code('x"} 1\nepd_ready') == known_code("") == "other"
    metrics = StepMetrics("encoder")
    ended = encoder.AttemptEnded(Attempt(1), "made up")
    metrics.saw_encoder("key", encoder.Idle(), encoder.Idle(), Event(), 0.0, (ended,))
    assert value(metrics, "epd_transfers", "other") == 1
    metrics.saw_session(1, None, None, Event(), 0.0, (session.TellEnded("made up", ""),))
    assert value(metrics, "epd_sessions_ended", "other") == 1


def records(path: Path) -> list[Record]:
    with path.open("rb") as file:
        return list(TraceReader(file.read))


@pytest.mark.parametrize("name", ["encoder", "prefill"])
def test_the_states_of_a_recorded_run_are_those_that_people_see(name: str) -> None:
    module: Any = MACHINES[name].module
    metrics = StepMetrics(name)
    states: dict[Any, Any] = {}
    seen: dict[Any, set[str]] = {}
    steps = 0
    for record in records(TRACES / f"shm-{name}.trace"):
        if isinstance(record, LimitsRecord) and record.kind == name:
            limits = MACHINES[name].decode_limits(record.limits)
        elif isinstance(record, StepRecord) and record.kind == name:
            event = MACHINES[name].decode_event(record.event)
            before = states.get(record.key, module.INITIAL)
            after, effects = module.step(before, event, record.now_s, limits)
            metrics.observers[name](record.key, before, after, event, record.now_s, effects)
            states[record.key] = module.INITIAL if after.final else after
            if type(after) is not type(module.INITIAL) and not after.final:
                seen.setdefault(record.key, set()).add(module.state_name(after))
            steps += 1
    assert steps > 30
    counted = {
        sample.labels[0]: sum(sample.value.counts)
        for sample in metrics.samples()
        if sample.family == "epd_transfer_phase_seconds" and isinstance(sample.value, Histogram)
    }
    expected = Counter(state for names in seen.values() for state in names)
    assert counted == {state: expected.get(state, 0) for state in counted}
    assert metrics._transfers == {}
    assert all(s.value == 0 for s in metrics.samples() if s.family == "epd_transfers_open")


def live(kind: Any, deadline_s: float, **more: Any) -> Any:
    return kind((), (), (), (), "model", deadline_s, None, **more)


def test_a_request_of_parts_is_counted_by_the_furthest_state_that_it_has_reached() -> None:
    metrics = StepMetrics("prefill")
    asked, sized = live(t.Negotiating, 99.0), live(t.Negotiating, 98.0)
    filling = live(t.Filling, 99.0, lease=LeaseId(1))
    retried = live(t.Filling, 98.0, lease=LeaseId(1))
    sizes = t.MetadataReceived(SESSION, Part(0), Attempt(1), ())
    source = Source(RegionId(0), 0, 8, Seal(3))
    read = t.StartRead(SESSION, Part(0), Attempt(1), LeaseId(1), 0, source, None)
    again = t.SendEncodeRequest(SESSION, Part(0), Attempt(2), (), "model", 9.0, None)
    reached = []
    for before, after, event, effects in (
        (t.New(), asked, Event(), ()),
        (asked, sized, sizes, ()),  # one part's sizes; the other's are to come
        (sized, filling, t.RoomLeased(LeaseId(1)), ()),
        (filling, retried, Event(), (read,)),
        (retried, filling, Event(), (again,)),
        (filling, retried, sizes, ()),
    ):
        metrics.saw_prefill("key", before, after, event, 1.0, effects)
        now = [s.labels[0] for s in metrics.samples() if s.family == "epd_transfers_open" and s.value]
        reached += now
    assert reached == ["requested", "metadata", "buffer-registered", *["forward-done"] * 3]
    assert value(metrics, "epd_retries") == 1


def test_every_ended_part_leaves_the_open_gauge_and_nothing_behind() -> None:
    metrics = StepMetrics("encoder")
    opened = encoder.Open(Attempt(1), (), (encoder.Waiting(),), None, 9.0)
    granted = encoder.Open(Attempt(1), (), (encoder.Waiting(),), LeaseId(5), 9.0)
    asked = encoder.RequestReceived(Attempt(1), (), (), 9.0)
    metrics.saw_encoder("key", encoder.Idle(), opened, asked, 1.0, ())
    assert value(metrics, "epd_transfers_open", "metadata") == 1
    grant = encoder.GrantReceived(Attempt(1), LeaseId(5))
    metrics.saw_encoder("key", opened, granted, grant, 1.5, ())
    assert value(metrics, "epd_transfers_open", "buffer-registered") == 1
    ended = (encoder.AttemptEnded(Attempt(1), "received"),)
    metrics.saw_encoder("key", granted, encoder.Idle(), Event(), 4.0, ended)
    open_now = [s.value for s in metrics.samples() if s.family == "epd_transfers_open"]
    assert (open_now, metrics._transfers) == ([0] * 6, {})
    assert value(metrics, "epd_transfer_phase_seconds", "metadata").sum == 0.5
    assert value(metrics, "epd_transfer_phase_seconds", "buffer-registered").sum == 2.5
    assert value(metrics, "epd_transfer_duration_seconds").sum == 3.0


def test_a_pool_says_how_fragmented_its_free_bytes_are() -> None:
    pool = make_pool(2, 1 << 20)
    assert pool.fragmentation == 0.0
    held = [pool.take((1 << 17,)) for _ in range(16)]
    assert (pool.free_nbytes, pool.fragmentation) == (0, 0.0)
    for extents in held[::2]:
        assert extents is not None
        pool.give(extents)
    assert pool.free_nbytes == 1 << 20
    assert pool.fragmentation == 1 - (1 << 17) / (1 << 20)


def test_the_page_is_what_prometheus_reads_and_every_sample_has_a_family() -> None:
    histogram = Histogram()
    for seconds in (0.00005, 0.0001, 0.2, 3_000.0):
        histogram.observe(seconds)
    given = [
        Sample("epd_read_abort_to_terminal_seconds", (), histogram),
        Sample("epd_read_mismatches", (ADDRESS, "seal"), 2),
        Sample("epd_pool_bytes", ("quarantined",), 5),
    ]
    text = page(node_registry(lambda: given)).decode()
    shown = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(FAMILIES) <= set(shown)
    (mismatches,) = shown["epd_read_mismatches"].samples
    assert (mismatches.name, mismatches.labels, mismatches.value) == (
        "epd_read_mismatches_total",
        {"peer": ADDRESS, "check": "seal"},
        2.0,
    )
    buckets = {
        s.labels.get("le", s.name): s.value for s in shown["epd_read_abort_to_terminal_seconds"].samples
    }
    assert (buckets["0.0001"], buckets["0.25"], buckets["60.0"], buckets["+Inf"]) == (2, 3, 3, 4)
    for role in ("prefill", "encoder"):
        for sample in StepMetrics(role).samples():
            assert len(sample.labels) == len(FAMILIES[sample.family].labels)
            assert isinstance(sample.value, Histogram) == (FAMILIES[sample.family].kind == "histogram")


def test_names_follow_prometheus() -> None:
    for name, family in FAMILIES.items():
        assert name.startswith("epd_")
        assert not name.endswith("_total")  # added for counters when they are shown
        if family.kind == "histogram":
            assert name.endswith("_seconds")


def test_errors_of_ours_are_labels() -> None:
    assert known_code(ReadFailed.code) == ReadFailed.code
    assert known_code(ErrorValue("busy", True, "").code) == "busy"
