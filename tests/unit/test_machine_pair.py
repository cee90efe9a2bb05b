"""The coupled pair that users drive, and the fixture that replays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from epd.protocol import encoder as e
from epd.protocol import prefill_types as p
from epd.protocol.errors import ForwardFailed, PoolExhausted, ReadFailed
from epd.protocol.ids import LeaseId
from epd.protocol.machine import Effect
from epd.protocol.messages import ErrorValue
from epd.protocol.trace import encode_block
from epd.testing.machine_pair import MachinePair
from epd.testing.replaying import assert_replays

pytest_plugins = ["epd.testing.pytest_plugin"]
TRACES = Path(__file__).parent.parent / "traces"


def until(pair: MachinePair, wish: type[Effect]) -> None:
    """Deliver and answer until this wish stands first."""
    while not isinstance(pair.wishes[0][1] if pair.wishes else None, wish):
        if pair.to_encoder:
            pair.to_encoder.deliver()
        elif pair.to_prefill:
            pair.to_prefill.deliver()
        else:
            pair.answer(type(pair.wishes[0][1]))


def test_a_request_goes_through_every_state(machine_pair: MachinePair) -> None:
    pair = machine_pair
    transfer = pair.submit(4096, 8)
    states = [pair.state(transfer)]
    for wish in (p.AskRoom, p.StartRead, p.Deliver):
        until(pair, wish)
        states.append(pair.state(transfer))
    pair.settle()
    assert [*states, pair.state(transfer)] == [
        "requested",
        "metadata",
        "forward-done",
        "rdma-written",
        "freed",
    ]
    assert pair.outcomes == {transfer: "delivered"}
    assert not pair.requests and not pair.parts


@pytest.mark.parametrize(
    ("wish", "error", "outcome"),
    [
        (p.AskRoom, PoolExhausted("too large").as_value(), "pool_exhausted"),
        (e.TellGranted, ForwardFailed("it broke").as_value(0), "delivered"),
        (p.StartRead, ReadFailed("gone").as_value(0), "delivered"),
        (e.PinSource, None, "delivered"),
    ],
)
def test_a_wish_may_fail(
    machine_pair: MachinePair, wish: type[Effect], error: ErrorValue | None, outcome: str
) -> None:
    pair = machine_pair
    transfer = pair.submit(4096)
    until(pair, wish)
    pair.answer(wish, error)
    pair.settle()
    pair.advance(2.0)
    pair.settle()
    assert pair.outcomes[transfer] == outcome


@pytest.mark.parametrize("wish", [p.AskRoom, e.TellGranted, e.PinSource, p.StartRead])
def test_a_session_that_ends_anywhere_is_followed_by_another_attempt(
    machine_pair: MachinePair, wish: type[Effect]
) -> None:
    pair = machine_pair
    transfer = pair.submit(4096)
    until(pair, wish)
    pair.end_session()
    pair.wishes = [one for one in pair.wishes if not isinstance(one[0], tuple)]  # the encoder forgot
    pair.advance(2.0)
    pair.settle()
    assert pair.outcomes == {transfer: "delivered"}


def test_without_a_session_the_deadline_ends_it(machine_pair: MachinePair) -> None:
    transfer = machine_pair.submit(4096, deadline_s=5.0)
    machine_pair.end_session(new=False)
    machine_pair.advance(10.0)
    assert machine_pair.outcomes[transfer] != "delivered"
    assert not machine_pair.requests


def test_an_answer_to_what_nobody_wishes_says_so(machine_pair: MachinePair) -> None:
    with pytest.raises(LookupError, match="nobody wishes StartRead"):
        machine_pair.answer(p.StartRead)


def test_the_check_at_the_end_finds_a_broken_rule() -> None:
    pair = MachinePair()
    transfer = pair.submit(4096)
    until(pair, p.Deliver)
    pair.check()
    pair._note(0, "prefill", transfer, p.CancelWanted(), (p.Deliver(LeaseId(1), ()),), p.New(), p.New())
    with pytest.raises(AssertionError, match=r"I3: prefill step .* told delivered, delivered"):
        pair.check()


# -- replaying -------------------------------------------------------------------------------------


def test_the_fixture_replays_a_run(replays: Callable[..., object]) -> None:
    replays(TRACES / "0.1.0" / "shm-prefill.trace", TRACES / "0.1.0" / "shm-encoder.trace")


def test_what_comes_out_otherwise_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.trace"
    good = (TRACES / "0.2.0" / "success-prefill.trace").read_bytes()
    path.write_bytes(good + encode_block([("slots", 9, 1.0, p.Released(), ())]))
    with pytest.raises(AssertionError, match="Released"):
        assert_replays(path)
    path.write_bytes(good + b"\xff" * 64)
    with pytest.raises(AssertionError, match="damaged"):
        assert_replays(path)
