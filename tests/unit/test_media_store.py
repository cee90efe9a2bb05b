"""Media on their way in: asked for as the budget allows, shared by hash, blamed on their sender only."""

import hashlib

from epd.actors.media import Arrived, MediaStore, Progress, Refused
from epd.protocol.ids import SessionId
from epd.protocol.messages import MediaChunk

ONE, TWO = SessionId(1), SessionId(2)
MEDIA = bytes(range(200))
SHA = hashlib.sha256(MEDIA).digest()


class Store:
    """A store with what it asked for and what it told."""

    def __init__(self, budget_nbytes: int = 1000) -> None:
        self.asked: list[tuple[SessionId, bytes]] = []
        self.told: list[tuple[str, object]] = []
        self.store: MediaStore[str] = MediaStore(
            budget_nbytes,
            ask=lambda session, sha256: self.asked.append((session, sha256)),
            report=lambda user, news: self.told.append((user, news)),
        )

    def send(self, session: SessionId, media: bytes = MEDIA, sha256: bytes = SHA, size: int = 64) -> None:
        for offset in range(0, len(media), size):
            chunk = memoryview(media)[offset : offset + size]
            self.store.take_chunk(session, MediaChunk(sha256, offset, len(media), chunk))

    def kinds(self, user: str) -> list[type]:
        return [type(news) for told, news in self.told if told == user]


def test_media_arrive_whole_and_are_held_until_the_last_user_drops_them() -> None:
    s = Store()
    s.store.fetch("a", SHA, len(MEDIA), ONE)
    assert s.asked == [(ONE, SHA)]
    s.send(ONE)
    assert s.kinds("a")[-1] is Arrived
    assert bytes(s.store.get(SHA)) == MEDIA
    s.store.drop("a", SHA)
    assert (len(s.store), s.store.held_nbytes) == (0, 0)


def test_equal_media_are_asked_for_once_and_reach_every_user() -> None:
    s = Store()
    s.store.fetch("a", SHA, len(MEDIA), ONE)
    s.store.fetch("b", SHA, len(MEDIA), TWO)
    s.send(ONE)
    assert s.asked == [(ONE, SHA)]
    assert s.kinds("a")[-1] is Arrived
    assert s.kinds("b")[-1] is Arrived
    s.store.fetch("c", SHA, len(MEDIA), TWO)
    assert s.kinds("c") == [Arrived]


def test_what_does_not_fit_the_budget_waits_and_is_asked_for_when_there_is_room() -> None:
    s = Store(budget_nbytes=250)
    other = hashlib.sha256(b"x" * 100).digest()
    s.store.fetch("a", SHA, 200, ONE)
    s.store.fetch("b", other, 100, ONE)
    assert s.asked == [(ONE, SHA)]
    s.store.drop("a", SHA)
    assert s.asked == [(ONE, SHA), (ONE, other)]


def test_media_larger_than_the_budget_are_refused_at_once() -> None:
    s = Store(budget_nbytes=100)
    s.store.fetch("a", SHA, 200, ONE)
    assert s.kinds("a") == [Refused]
    assert len(s.store) == 0


def test_wrong_bytes_fail_their_sender_only_and_the_next_one_is_asked() -> None:
    s = Store()
    s.store.fetch("a", SHA, len(MEDIA), ONE)
    s.store.fetch("b", SHA, len(MEDIA), TWO)
    s.send(ONE, media=bytes(200))
    assert s.kinds("a")[-1] is Refused
    assert Refused not in s.kinds("b")
    assert s.asked == [(ONE, SHA), (TWO, SHA)]
    s.send(TWO)
    assert s.kinds("b")[-1] is Arrived


def test_a_sender_that_leaves_or_has_them_no_more_is_replaced_by_another_users_session() -> None:
    for end in ("drop", "session", "missing"):
        s = Store()
        s.store.fetch("a", SHA, len(MEDIA), ONE)
        s.store.fetch("b", SHA, len(MEDIA), TWO)
        s.send(ONE, media=MEDIA[:64])
        if end == "drop":
            s.store.drop("a", SHA)
        elif end == "session":
            s.store.session_ended(ONE)
        else:
            s.store.missing(ONE, SHA)
        assert s.asked[-1] == (TWO, SHA), end
        s.send(TWO)
        assert s.kinds("b")[-1] is Arrived, end


def test_chunks_that_nobody_asked_for_are_counted_and_change_nothing() -> None:
    s = Store()
    s.send(ONE)
    s.store.fetch("a", SHA, len(MEDIA), ONE)
    s.send(TWO)
    assert s.store.unwanted_chunks == 8
    assert s.kinds("a") == [Progress]


def test_what_is_left_of_a_stream_that_was_given_up_does_no_harm_to_the_next_one() -> None:
    s = Store()
    s.store.fetch("given up", SHA, len(MEDIA), ONE)
    first = MediaChunk(SHA, 0, len(MEDIA), memoryview(MEDIA)[:64])
    s.store.take_chunk(ONE, first)
    s.store.drop("given up", SHA)
    s.store.fetch("next", SHA, len(MEDIA), ONE)  # asked for again, while the rest is on its way
    for offset in (64, 128, 192):
        chunk = memoryview(MEDIA)[offset : offset + 64]
        s.store.take_chunk(ONE, MediaChunk(SHA, offset, len(MEDIA), chunk))
    assert s.kinds("next") == [Progress]
    s.send(ONE)
    assert s.kinds("next")[-1] is Arrived
    assert bytes(s.store.get(SHA)) == MEDIA


def test_a_chunk_out_of_place_is_the_senders_fault() -> None:
    s = Store()
    s.store.fetch("a", SHA, len(MEDIA), ONE)
    s.store.take_chunk(ONE, MediaChunk(SHA, 0, len(MEDIA), memoryview(MEDIA)[:64]))
    s.store.take_chunk(ONE, MediaChunk(SHA, 128, len(MEDIA), memoryview(MEDIA)[128:192]))
    assert s.kinds("a")[-1] is Refused
    assert (len(s.store), s.store.held_nbytes) == (0, 0)


def test_a_repeated_drop_changes_nothing() -> None:
    s = Store()
    s.store.fetch("a", SHA, len(MEDIA), ONE)
    s.store.drop("a", SHA)
    s.store.drop("a", SHA)
    assert (len(s.store), s.store.held_nbytes) == (0, 0)
