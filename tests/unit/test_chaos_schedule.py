"""A chaos run is decided by its seed: what is asked, and what is broken after how many requests."""

from collections import Counter

import pytest

from epd.chaos import schedule


def test_one_seed_gives_one_schedule() -> None:
    assert schedule.requests(7, 300) == schedule.requests(7, 300)
    assert schedule.faults(7, 300) == schedule.faults(7, 300)
    assert schedule.requests(7, 300) != schedule.requests(8, 300)
    assert schedule.faults(7, 300) != schedule.faults(8, 300)


def test_the_doses_of_ten_thousand_requests() -> None:
    requests, faults = schedule.requests(1, 10_000), schedule.faults(1, 10_000)
    kinds = Counter(fault.kind for fault in faults)
    assert kinds["sigkill"] >= 20
    assert kinds["sigstop"] >= 20
    on_encoders = Counter(fault.kind for fault in faults if fault.victim < schedule.ENCODERS)
    assert min(on_encoders.values()) >= 10
    cancelled = sum(request.cancel_s is not None for request in requests)
    assert 0.04 <= cancelled / len(requests) <= 0.06
    sizes = [sum(nbytes for _, nbytes in request.items) for request in requests]
    assert max(sizes) <= schedule.MAX_REQUEST_NBYTES
    # log-uniform: as many between 4 and 256 KiB as between 128 KiB and 8 MiB
    small = sum(size < 2**18 for size in sizes)
    middle = sum(2**17 <= size < 2**23 for size in sizes)
    assert small == pytest.approx(middle, rel=0.1)
    assert [request.number for request in requests] == list(range(10_000))


def test_faults_come_in_order_and_leave_the_ends_alone() -> None:
    faults = schedule.faults(3, 1_000)
    assert [fault.after for fault in faults] == sorted(fault.after for fault in faults)
    assert all(50 <= fault.after < 950 for fault in faults)
    assert {fault.kind for fault in schedule.faults(3, 1)} == set(schedule.EVERY)


def test_some_items_are_asked_for_again() -> None:
    items = Counter(item for request in schedule.requests(1, 1_000) for item in request.items)
    assert sum(count > 1 for count in items.values()) > 50
