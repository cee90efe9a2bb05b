"""Media on their way in: asked for as the budget allows, assembled, checked against their hash.

Content-addressed: several users of one hash share the bytes. One sender at a time, from the start.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from epd.protocol.errors import (
    EpdError,
    MediaInvalid,
    MediaMismatch,
    MediaUnavailable,
    RequestTooLarge,
)
from epd.protocol.ids import SessionId
from epd.protocol.messages import MediaChunk

User = TypeVar("User", bound=Hashable)


class Progress(NamedTuple):
    """Media were asked for, or a chunk came."""


class Arrived(NamedTuple):
    """Whole, and the hash is the one announced."""


class Refused(NamedTuple):
    """`sender` could not, or did not, send what it had announced."""

    sender: SessionId
    error: EpdError


class _Entry(Generic[User]):
    def __init__(self, sha256: bytes, nbytes: int) -> None:
        self.sha256 = sha256
        self.nbytes = nbytes
        self.users: dict[User, SessionId] = {}
        self.sender: SessionId | None = None
        self.buffer: bytearray | None = None
        self.received_nbytes = 0
        self.hash = hashlib.sha256()  # of what has come: all at the end would hold the loop up
        self.complete = False


class MediaStore(Generic[User]):
    """`ask(session, sha256)` sends `NeedMedia`; `report(user, news)` tells each user of progress."""

    def __init__(
        self,
        budget_nbytes: int,
        ask: Callable[[SessionId, bytes], None],
        report: Callable[[User, Progress | Arrived | Refused], None],
    ) -> None:
        self._budget_nbytes = budget_nbytes
        self._held_nbytes = 0
        self._ask = ask
        self._report = report
        self._entries: dict[bytes, _Entry[User]] = {}
        self._queue: deque[bytes] = deque()
        self.unwanted_chunks = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_nbytes(self) -> int:
        return self._held_nbytes

    def fetch(self, user: User, sha256: bytes, nbytes: int, sender: SessionId) -> None:
        """Get the media for `user` from `sender`, unless they are here or on their way."""
        if nbytes > self._budget_nbytes:
            large = RequestTooLarge(f"media of {nbytes} B, the media budget is {self._budget_nbytes} B")
            self._report(user, Refused(sender, large))
            return
        if nbytes < 0 or len(sha256) != hashlib.sha256().digest_size:
            invalid = MediaInvalid(f"media of {nbytes} B named by a hash of {len(sha256)} B")
            self._report(user, Refused(sender, invalid))
            return
        entry = self._entries.get(sha256)
        if entry is None:
            entry = self._entries[sha256] = _Entry(sha256, nbytes)
            self._queue.append(sha256)
        elif entry.nbytes != nbytes:
            error = MediaMismatch(f"media announced with {nbytes} B and with {entry.nbytes} B")
            self._report(user, Refused(sender, error))
            return
        entry.users[user] = sender
        if entry.complete:
            self._report(user, Arrived())
        elif entry.sender is not None:
            self._report(user, Progress())
        else:
            self._ask_next()

    def drop(self, user: User, sha256: bytes) -> None:
        """`user` needs them no more; the last one frees the bytes. Idempotent."""
        entry = self._entries.get(sha256)
        if entry is None or user not in entry.users:
            return
        del entry.users[user]
        gone = not entry.complete and entry.sender is not None and entry.sender not in entry.users.values()
        if not entry.users or gone:
            self._forget(entry)
            for other, session in entry.users.items():  # its sender has left: from the start, of the next
                self.fetch(other, sha256, entry.nbytes, session)
            self._ask_next()

    def get(self, sha256: bytes) -> memoryview:
        """The whole media, read only; only between `Arrived` and `drop`."""
        buffer = self._entries[sha256].buffer
        return memoryview(buffer or b"").toreadonly()

    def take_chunk(self, session: SessionId, chunk: MediaChunk) -> None:
        entry = self._entries.get(chunk.sha256)
        if entry is None or entry.complete or entry.sender != session or entry.buffer is None:
            self.unwanted_chunks += 1
            return
        if chunk.offset and not entry.received_nbytes:
            # Asked for again while the rest of what was given up is on its way: ours is behind it.
            self.unwanted_chunks += 1
            return
        end = chunk.offset + len(chunk.data)
        if chunk.total_nbytes != entry.nbytes or chunk.offset != entry.received_nbytes or end > entry.nbytes:
            self._blame(
                entry,
                MediaMismatch(f"chunk {chunk.offset}..{end} of {entry.nbytes} B announced"),
            )
            return
        entry.buffer[chunk.offset : end] = chunk.data
        entry.hash.update(chunk.data)
        entry.received_nbytes = end
        if end == entry.nbytes:
            self._finish(entry)
        else:
            self._tell(entry, Progress())

    def missing(self, session: SessionId, sha256: bytes) -> None:
        """The sender says that it does not have them (any more)."""
        entry = self._entries.get(sha256)
        if entry is not None and entry.sender == session and not entry.complete:
            self._blame(entry, MediaUnavailable("the sender no longer has the media"))

    def session_ended(self, session: SessionId) -> None:
        """What this session was sending starts again from another user's session."""
        for entry in [e for e in self._entries.values() if e.sender == session and not e.complete]:
            self._blame(
                entry,
                MediaUnavailable("the session ended while its media were on their way"),
            )

    def _ask_next(self) -> None:
        """Ask in order of arrival, as long as the budget has room for the head."""
        while self._queue:
            entry = self._entries.get(self._queue[0])
            if entry is None or entry.sender is not None or not entry.users:
                self._queue.popleft()
                continue
            if self._held_nbytes + entry.nbytes > self._budget_nbytes:
                return
            self._queue.popleft()
            self._held_nbytes += entry.nbytes
            entry.buffer = bytearray(entry.nbytes)
            entry.sender = next(iter(entry.users.values()))
            if entry.nbytes == 0:
                self._finish(entry)
            else:
                self._ask(entry.sender, entry.sha256)
                self._tell(entry, Progress())

    def _finish(self, entry: _Entry[User]) -> None:
        if entry.hash.digest() != entry.sha256:
            self._blame(
                entry,
                MediaMismatch("the media are not those whose SHA-256 was announced"),
            )
            return
        entry.complete = True
        self._tell(entry, Arrived())

    def _blame(self, entry: _Entry[User], error: EpdError) -> None:
        """Fail the sender's users; the others' media are asked for again, from one of them."""
        sender = entry.sender
        assert sender is not None
        blamed = [user for user, session in entry.users.items() if session == sender]
        innocent = [(user, session) for user, session in entry.users.items() if session != sender]
        self._forget(entry)
        for user, session in innocent:
            self.fetch(user, entry.sha256, entry.nbytes, session)
        for user in blamed:
            self._report(user, Refused(sender, error))
        self._ask_next()

    def _forget(self, entry: _Entry[User]) -> None:
        if entry.buffer is not None:
            self._held_nbytes -= entry.nbytes
        if self._entries.get(entry.sha256) is entry:
            del self._entries[entry.sha256]

    def _tell(self, entry: _Entry[User], news: Progress | Arrived) -> None:
        for user in list(entry.users):
            self._report(user, news)
