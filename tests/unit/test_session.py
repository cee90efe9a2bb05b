"""The session machine (I8): what opens a session, what ends it, and what each side is told."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Bench
from msgspec.structs import asdict, replace

from epd.protocol import session
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect, Event, TimerExpired
from epd.protocol.messages import Hello, PeerLimits, Role, Welcome
from epd.protocol.negotiation import check_hello
from epd.protocol.session import (
    OUTSIDE,
    SESSION_OVER,
    BodyMalformed,
    CloseSockets,
    CloseWanted,
    ConnectionLost,
    Dialled,
    Dialling,
    DialMedia,
    Ended,
    Ending,
    FrameReceived,
    FrameSent,
    HelloReceived,
    MediaConnected,
    Open,
    ProbeWanted,
    RejectedReceived,
    Replaced,
    SendEmptyMedia,
    SendHeartbeat,
    SendRejected,
    SendWelcome,
    SessionLimits,
    TellEnded,
    TellOpened,
    TellSuspect,
    WelcomeReceived,
)
from epd.protocol.wire import Lane

LIMITS = SessionLimits()
MEDIA_ADDRESS = "tcp://127.0.0.1:4000"


def hello(role: Role, **given: Any) -> Hello:
    client = role == "client"
    told = Hello(
        node=NodeId(f"{role}-1"),
        incarnation=Incarnation(1),
        role=role,
        protocol_version=1,
        logic_version=1,
        fingerprint="" if client else "model-a",
        data_plane="" if client else "mooncake/tcp",
        segment="",
        limits=PeerLimits(128, 1 << 20, 1 << 20),
    )
    return replace(told, **given)


def welcome(**given: Any) -> Welcome:
    told = hello("encoder", **given)
    values = {name: value for name, value in asdict(told).items() if name != "dial"}
    return Welcome(**values, media_address=MEDIA_ADDRESS)


PREFILL, ENCODER = hello("prefill"), hello("encoder")
GREETED = HelloReceived(ENCODER, PREFILL, room=True, draining=False)


def control(sequence: int) -> FrameReceived:
    return FrameReceived(Lane.CONTROL, sequence, 100)


def media(sequence: int) -> FrameReceived:
    return FrameReceived(Lane.MEDIA, sequence, 100)


@pytest.fixture
def dialling() -> Bench:
    bench = Bench(session, LIMITS)
    bench.feed(Dialled("tcp://enc:1"), FrameSent(Lane.CONTROL, 0, 100))
    return bench


@pytest.fixture
def dialler(dialling: Bench) -> Bench:
    dialling.feed(control(0), WelcomeReceived(PREFILL, welcome()), MediaConnected())
    assert isinstance(dialling.state, Open)
    return dialling


@pytest.fixture
def listener() -> Bench:
    bench = Bench(session, LIMITS)
    bench.feed(GREETED)
    assert isinstance(bench.state, Open)
    return bench


@pytest.fixture(params=["dialler", "listener"])
def either(request: pytest.FixtureRequest) -> Bench:
    bench: Bench = request.getfixturevalue(request.param)
    return bench


def assert_over(bench: Bench, code: str, words: str) -> None:
    """Told once, sockets let go of, nothing left to wait for."""
    [told] = bench.all(TellEnded)
    assert told.code == code
    assert words in told.reason
    assert bench.count(CloseSockets) == 1
    assert bench.state == Ended(code)


# -- opening ---------------------------------------------------------------------------------


def test_a_good_hello_is_welcomed_before_anybody_is_told() -> None:
    assert Bench(session, LIMITS).feed(GREETED) == [SendWelcome(), TellOpened()]


def test_a_good_welcome_opens_the_session_and_dials_the_media_lane(dialling: Bench) -> None:
    effects = dialling.feed(control(0), WelcomeReceived(PREFILL, welcome()))
    assert effects == [TellOpened(), DialMedia(MEDIA_ADDRESS)]


def test_the_first_media_frame_tells_the_listener_that_the_lane_is_there(dialling: Bench) -> None:
    dialling.feed(control(0), WelcomeReceived(PREFILL, welcome()))
    assert dialling.feed(MediaConnected()) == [SendEmptyMedia()]


def test_a_dial_that_gets_no_welcome_in_time_ends_as_unreachable(dialling: Bench) -> None:
    assert dialling.state.deadline_s == dialling.now_s + LIMITS.connect_s
    dialling.jump_to_deadline()
    assert_over(dialling, "peer_unreachable", "no welcome within 5 s")


def test_a_refused_dial_ends_as_unreachable_with_the_reason(dialling: Bench) -> None:
    dialling.feed(ConnectionLost(Lane.CONTROL, "tcp://127.0.0.1:1: connection refused"))
    assert_over(dialling, "peer_unreachable", "connection refused")


def test_a_rejected_dial_ends_with_the_peers_own_code_and_reason(dialling: Bench) -> None:
    dialling.feed(RejectedReceived("rejected", "because"))
    assert_over(dialling, "rejected", "because")


def test_a_media_lane_that_does_not_connect_in_time_ends_the_session(dialling: Bench) -> None:
    dialling.feed(control(0), WelcomeReceived(PREFILL, welcome()))
    for sequence in range(1, 40):
        dialling.jump_to_deadline()
        if not isinstance(dialling.state, Open):
            break
        dialling.feed(control(sequence))
    assert_over(dialling, "session_lost", "media lane: not connected within 5 s")


def test_a_dialler_refuses_a_welcome_that_does_not_match_and_says_so(dialling: Bench) -> None:
    effects = dialling.feed(control(0), WelcomeReceived(PREFILL, welcome(fingerprint="model-b")))
    assert isinstance(effects[0], SendRejected)
    assert dialling.count(TellOpened) == 0
    assert_over(dialling, "rejected", "'model-a'")


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (replace(GREETED, room=False), "busy"),
        (replace(GREETED, draining=True), "draining"),
        (replace(GREETED, hello=hello("prefill", fingerprint="model-b")), "rejected"),
        (replace(GREETED, hello=hello("encoder", node="encoder-2")), "wrong_role"),
    ],
)
def test_a_hello_that_is_refused_leaves_nothing_behind(event: HelloReceived, code: str) -> None:
    bench = Bench(session, LIMITS)
    [effect] = bench.feed(event)
    assert isinstance(effect, SendRejected)
    assert effect.code == code
    assert bench.state is session.INITIAL


# -- negotiation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [
        (PREFILL, hello("encoder", logic_version=0), ("logic versions", "1", "0")),
        (hello("encoder", protocol_version=2), PREFILL, ("2", "1")),
        (hello("encoder", data_plane="shm"), PREFILL, ("'shm'", "'mooncake/tcp'")),
        (hello("encoder", fingerprint="model-b"), PREFILL, ("'model-b'", "'model-a'")),
        (PREFILL, welcome(fingerprint="model-b"), ("'model-a'", "'model-b'")),
        (hello("encoder", protocol_version=2), hello("client"), ("2", "1")),
    ],
)
def test_what_differs_is_refused_with_both_sides_values(
    ours: Hello, theirs: Hello | Welcome, values: tuple[str, str]
) -> None:
    refusal = check_hello(ours, theirs)
    assert refusal is not None
    assert refusal.code == "rejected"
    for value in (*values, ours.node, theirs.node):
        assert value in refusal.reason


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ENCODER, PREFILL),
        (ENCODER, hello("prefill", fingerprint="")),
        (hello("prefill", fingerprint=""), welcome()),
        (ENCODER, hello("prefill", data_plane="mooncake/rdma")),
        (ENCODER, hello("prefill", logic_version=2)),
        (ENCODER, hello("client")),
        (PREFILL, hello("client")),
    ],
)
def test_what_fits_is_taken(ours: Hello, theirs: Hello | Welcome) -> None:
    assert check_hello(ours, theirs) is None


def test_an_encoder_without_a_fingerprint_fits_no_prefill_node_that_has_one() -> None:
    assert check_hello(hello("encoder", fingerprint=""), PREFILL) is not None


def test_two_clients_have_nothing_to_say_to_each_other() -> None:
    refusal = check_hello(hello("client"), hello("client"))
    assert refusal is not None
    assert refusal.code == "wrong_role"


# -- sequence --------------------------------------------------------------------------------


def test_frames_in_order_are_taken_on_each_lane_by_its_own_count(either: Bench) -> None:
    either.feed(media(0), control(1), control(2), media(1), media(2), control(3))
    assert isinstance(either.state, Open)
    assert (either.state.control_received, either.state.media_received) == (4, 3)


@pytest.mark.parametrize("frame", [control(2), control(0), media(1), control(OUTSIDE - 1)])
def test_any_other_number_than_the_next_is_a_gap_and_ends_the_session(
    either: Bench, frame: FrameReceived
) -> None:
    effects = either.feed(frame)
    assert isinstance(effects[0], SendRejected)
    assert_over(either, "session_lost", "gap")


def test_a_repeated_frame_is_a_gap_too(either: Bench) -> None:
    either.feed(control(1), control(1))
    assert_over(either, "session_lost", "gap on the control lane: frame 1 where 2 was due")


@pytest.mark.parametrize("frame", [control(1), media(0)])
def test_a_dialler_takes_nothing_but_frame_0_before_its_welcome(dialling: Bench, frame: Event) -> None:
    dialling.feed(frame)
    assert_over(dialling, "session_lost", "gap")


def test_a_frame_of_no_session_is_answered_that_it_is_over() -> None:
    bench = Bench(session, LIMITS)
    assert bench.feed(control(5)) == [SendRejected("session_lost", SESSION_OVER)]
    assert bench.state is session.INITIAL


# -- silence ---------------------------------------------------------------------------------


def test_heartbeats_go_out_at_their_pace_whatever_arrives(either: Bench) -> None:
    start_s = either.now_s
    for sequence in range(1, 6):
        assert either.jump_to_deadline() == [SendHeartbeat()]
        assert either.now_s == start_s + sequence * LIMITS.heartbeat_s
        either.feed(control(sequence))


def test_a_silent_peer_is_suspect_then_dead_at_the_times_said(either: Bench) -> None:
    start_s = either.now_s
    told: list[tuple[float, Effect]] = []
    while isinstance(either.state, Open):
        told += [(either.now_s - start_s, effect) for effect in either.jump_to_deadline()]
    at = {type(effect): at_s for at_s, effect in told if not isinstance(effect, SendHeartbeat)}
    assert at[TellSuspect] == LIMITS.suspect_after_s
    assert at[TellEnded] == LIMITS.dead_after_s
    assert sum(isinstance(effect, SendHeartbeat) for _, effect in told) == 9
    assert_over(either, "session_lost", "no frame for 10 s")


@pytest.mark.parametrize("frame", [control(1), media(0)])
def test_a_frame_of_either_lane_ends_the_suspicion(either: Bench, frame: FrameReceived) -> None:
    either.advance(LIMITS.suspect_after_s)
    assert TellSuspect(True) in either.feed(TimerExpired())
    assert either.feed(frame) == [TellSuspect(False)]
    assert either.state.silent_at_s == either.now_s + LIMITS.suspect_after_s


def test_a_loop_that_was_stalled_is_given_one_turn_to_read_before_the_peer_is_dead(either: Bench) -> None:
    either.advance(10 * LIMITS.dead_after_s)
    either.feed(TimerExpired())
    assert isinstance(either.state, Open)
    either.feed(control(1))
    assert not either.state.suspect


def test_a_probe_sends_at_once_and_puts_the_next_heartbeat_off(listener: Bench) -> None:
    listener.advance(0.5)
    assert listener.feed(ProbeWanted(Lane.CONTROL)) == [SendHeartbeat()]
    assert listener.state.heartbeat_at_s == listener.now_s + LIMITS.heartbeat_s


def test_a_media_lane_is_probed_once_it_has_been_heard(listener: Bench) -> None:
    assert listener.feed(ProbeWanted(Lane.MEDIA)) == []
    assert listener.feed(media(0), ProbeWanted(Lane.MEDIA)) == [SendEmptyMedia()]


# -- ends ------------------------------------------------------------------------------------


def test_the_loss_of_the_control_lane_ends_the_session_and_there_is_nobody_to_tell(either: Bench) -> None:
    either.feed(ConnectionLost(Lane.CONTROL, "connection lost"))
    assert_over(either, "session_lost", "control lane: connection lost")
    assert either.count(SendRejected) == 0


def test_a_dialler_that_loses_its_media_lane_ends_and_says_so(dialler: Bench) -> None:
    assert isinstance(dialler.feed(ConnectionLost(Lane.MEDIA, "connection lost"))[0], SendRejected)
    assert_over(dialler, "session_lost", "media lane: connection lost")


def test_a_listener_that_loses_the_media_lane_still_takes_what_is_on_the_control_lane(
    listener: Bench,
) -> None:
    """The dialler may have closed in order, with much on its way."""
    assert listener.feed(ConnectionLost(Lane.MEDIA, "lost"), control(1), control(2)) == []
    listener.feed(RejectedReceived("draining", "bye"))
    assert_over(listener, "draining", "bye")


def test_a_lost_media_lane_without_a_word_of_the_dialler_ends_the_session_in_time(listener: Bench) -> None:
    start_s = listener.now_s
    listener.feed(ConnectionLost(Lane.MEDIA, "lost"))
    for sequence in range(1, 40):
        listener.jump_to_deadline()
        if not isinstance(listener.state, Open):
            break
        listener.feed(control(sequence), ConnectionLost(Lane.MEDIA, "lost"))
    assert listener.now_s == start_s + LIMITS.drain_s
    assert listener.count(SendRejected) == 1
    assert_over(listener, "session_lost", "media lane: connection lost")


def test_a_malformed_body_ends_the_session_and_the_peer_is_told_why(either: Bench) -> None:
    assert either.feed(BodyMalformed("no msgpack"))[0] == SendRejected("malformed", "no msgpack")
    assert_over(either, "malformed", "no msgpack")


def test_a_newer_session_of_the_node_ends_the_older_one(either: Bench) -> None:
    either.feed(Replaced())
    assert_over(either, "session_lost", "replaced")


def test_a_rejected_from_the_peer_ends_the_session_without_an_answer(either: Bench) -> None:
    effects = either.feed(RejectedReceived("draining", "bye"))
    assert effects == [CloseSockets(linger=False), TellEnded("draining", "bye")]


def test_a_dialler_that_ends_says_so_and_closes_at_once_letting_it_go_out(dialler: Bench) -> None:
    effects = dialler.feed(CloseWanted("draining", "bye"))
    assert effects == [
        SendRejected("draining", "bye"),
        CloseSockets(linger=True),
        TellEnded("draining", "bye"),
    ]


def test_a_listener_that_ends_never_closes_first(listener: Bench) -> None:
    effects = listener.feed(CloseWanted("draining", "bye"))
    assert effects == [SendRejected("draining", "bye"), TellEnded("draining", "bye")]
    assert isinstance(listener.state, Ending)
    assert listener.feed(control(1), media(7), ConnectionLost(Lane.MEDIA, "lost")) == []
    assert listener.feed(ConnectionLost(Lane.CONTROL, "lost")) == [CloseSockets(linger=False)]
    assert_over(listener, "draining", "bye")


def test_a_listener_waits_for_the_dialler_no_longer_than_its_drain_limit(listener: Bench) -> None:
    listener.feed(CloseWanted("draining", "bye"))
    assert listener.state.deadline_s == listener.now_s + LIMITS.drain_s
    assert listener.jump_to_deadline() == [CloseSockets(linger=False)]


def test_a_probe_of_an_ending_session_repeats_the_last_word(listener: Bench) -> None:
    listener.feed(CloseWanted("draining", "bye"))
    assert listener.feed(ProbeWanted(Lane.CONTROL)) == [SendRejected("session_lost", SESSION_OVER)]


def test_a_dial_that_is_given_up_tells_no_peer(dialling: Bench) -> None:
    effects = dialling.feed(CloseWanted("draining", "bye"))
    assert effects == [CloseSockets(linger=False), TellEnded("draining", "bye")]


# -- whatever comes --------------------------------------------------------------------------

EVENTS: tuple[Event, ...] = (
    Dialled("tcp://enc:1"),
    GREETED,
    WelcomeReceived(PREFILL, welcome()),
    WelcomeReceived(PREFILL, welcome(fingerprint="model-b")),
    *(control(n) for n in range(4)),
    *(media(n) for n in range(3)),
    FrameSent(Lane.CONTROL, 0, 100),
    RejectedReceived("rejected", "because"),
    BodyMalformed("no msgpack"),
    MediaConnected(),
    ConnectionLost(Lane.CONTROL, "lost"),
    ConnectionLost(Lane.MEDIA, "lost"),
    CloseWanted("draining", "bye"),
    Replaced(),
    ProbeWanted(Lane.CONTROL),
    ProbeWanted(Lane.MEDIA),
)


@given(st.lists(st.one_of(st.sampled_from(EVENTS), st.floats(0.0, 12.0))))
def test_every_session_that_began_ends_once_whatever_comes(script: list[Event | float]) -> None:
    """Silence alone ends it: nothing else is needed, and nothing is told twice."""
    bench = Bench(session, LIMITS)
    begun = 0
    for event in script:
        if isinstance(event, float):
            bench.advance(event)
            while bench.state.deadline_s is not None and bench.state.deadline_s <= bench.now_s:
                bench.jump_to_deadline()
            continue
        absent = bench.state is session.INITIAL
        bench.feed(event)
        begun += absent and isinstance(bench.state, Dialling | Open)
        if isinstance(bench.state, Ended):
            bench.state = session.INITIAL  # as the table that hosts it forgets it
    while bench.state.deadline_s is not None:
        bench.jump_to_deadline()
    assert bench.count(TellEnded) == bench.count(CloseSockets) == begun
