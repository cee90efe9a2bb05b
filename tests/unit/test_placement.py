"""Placement: equal pictures meet, loads stay even, nothing is lost or asked twice."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from machines import items

from epd.protocol.ids import Incarnation, SessionId
from epd.protocol.placement import SLACK_ITEMS, EncoderLoad, choose_encoder, plan_parts

MAX = 128


def encoders(count: int, open_items: int = 0, max_items: int = MAX) -> list[EncoderLoad]:
    return [
        EncoderLoad(SessionId(n), Incarnation(1000 + n), open_items, max_items) for n in range(1, count + 1)
    ]


LOADS = st.lists(
    st.builds(
        EncoderLoad,
        st.integers(1, 6).map(SessionId),
        st.integers(-(2**63), 2**64 - 1).map(Incarnation),
        st.integers(0, 50),
        st.integers(-1, 200),
    ),
    max_size=5,
    unique_by=lambda load: load.session,
)


@given(st.integers(1, 150), LOADS)
def test_parts_partition_the_items_and_keep_within_every_limit(count: int, loads: list[EncoderLoad]) -> None:
    plans = plan_parts(items(count), loads, MAX)
    assert sorted(n for plan in plans for n in plan.items) == list(range(count))
    room = {load.session: min(MAX, load.max_items_per_part) for load in loads}
    for plan in plans:
        assert 1 <= len(plan.items) <= (MAX if plan.session is None else room[plan.session])
        assert list(plan.items) == sorted(plan.items)


@given(st.integers(1, 150), LOADS, st.lists(st.integers(1, 6).map(SessionId), max_size=3))
def test_a_retry_goes_to_another_encoder_that_takes_all_of_it_if_there_is_one(
    count: int, loads: list[EncoderLoad], avoid: list[SessionId]
) -> None:
    chosen = choose_encoder(items(count), loads, avoid)
    able = {load.session for load in loads if load.max_items_per_part >= count}
    if not able:
        assert chosen is None
    else:
        assert chosen in (able - set(avoid) or able)


def test_without_encoders_parts_have_no_session() -> None:
    plans = plan_parts(items(130), [], MAX)
    assert [(len(plan.items), plan.session) for plan in plans] == [(128, None), (2, None)]


def test_equal_pictures_meet_at_one_encoder_whoever_asks_and_in_whatever_order() -> None:
    loads = encoders(4)
    for one in items(30):
        home = plan_parts([one], loads, MAX)[0].session
        assert plan_parts([one], loads[::-1], MAX)[0].session == home
        assert choose_encoder([one], loads, ()) == home


def test_most_pictures_stay_at_home_when_an_encoder_goes() -> None:
    loads = encoders(4)
    before = {one: choose_encoder([one], loads, ()) for one in items(200)}
    after = {one: choose_encoder([one], loads[:3], ()) for one in items(200)}
    moved = [one for one in before if before[one] != after[one]]
    assert all(before[one] == loads[3].session for one in moved)


def test_an_encoder_with_clearly_more_to_do_is_passed_over() -> None:
    busy, idle = EncoderLoad(SessionId(1), Incarnation(1), 100, MAX), encoders(2)[1]
    assert {choose_encoder([one], [busy, idle], ()) for one in items(50)} == {idle.session}


def test_many_different_pictures_are_spread_evenly() -> None:
    plans = plan_parts(items(128), encoders(4), MAX)
    counts = Counter({plan.session: len(plan.items) for plan in plans})
    assert max(counts.values()) - min(counts.values()) <= SLACK_ITEMS + 1


def test_an_encoder_that_takes_no_items_gets_none() -> None:
    assert plan_parts(items(3), encoders(1, max_items=0), MAX)[0].session is None
