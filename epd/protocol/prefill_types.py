"""States, events and effects of the prefill side's request machine (`prefill.py` has the rules)."""

from typing import ClassVar, Final

import msgspec

from epd.protocol.ids import Attempt, LeaseId, Part, SessionId
from epd.protocol.machine import Effect, Event, Ignored, State, TimerExpired
from epd.protocol.messages import EmbeddingSpec, ErrorValue, Item, ReadyItem, Source, Struct, WantedDType


class Limits(msgspec.Struct, frozen=True):
    """Deadlines of the prefill side, and the bounds of a retry."""

    metadata_s: float = 5.0
    room_s: float = 30.0
    consume_warning_s: float = 60.0
    max_attempts: int = 8
    retry_base_s: float = 0.05
    retry_max_s: float = 1.0


# -- parts -------------------------------------------------------------------------------------


class PartPlan(Struct):
    """Items of one part, by their index in the request, and the encoder chosen for them, if any."""

    items: tuple[int, ...]
    session: SessionId | None


class Placing(State):
    """No attempt is open: waiting for an encoder, at the earliest at `deadline_s`."""

    items: tuple[int, ...]
    attempt: Attempt
    deadline_s: float | None
    avoid: tuple[SessionId, ...] = ()
    last_error: ErrorValue | None = None


class Requested(State):
    """`EncodeRequest` sent for `asked`."""

    items: tuple[int, ...]
    attempt: Attempt
    session: SessionId
    asked: tuple[int, ...]
    deadline_s: float


class Sized(State):
    """Sizes known; no lease yet."""

    items: tuple[int, ...]
    attempt: Attempt
    session: SessionId
    asked: tuple[int, ...]
    deadline_s: None = None


class Granted(State):
    """`BufferGrant` sent; `reading` are items whose sources were announced and not yet read."""

    items: tuple[int, ...]
    attempt: Attempt
    session: SessionId
    asked: tuple[int, ...]
    reading: tuple[int, ...] = ()
    deadline_s: None = None


class Read(State):
    """Every item of the part is whole in our memory; the last `Receipt` was sent."""

    items: tuple[int, ...]
    attempt: Attempt
    deadline_s: None = None


PartState = Placing | Requested | Sized | Granted | Read


# -- the request -------------------------------------------------------------------------------


class New(State):
    deadline_s: None = None
    final: ClassVar[bool] = False


class _Unfinished(State):
    """What a request has until it is delivered or has ended."""

    items: tuple[Item, ...]
    specs: tuple[EmbeddingSpec | None, ...]
    done: tuple[bool, ...]
    parts: tuple[PartState, ...]
    dtype: WantedDType
    request_deadline_s: float
    traceparent: str | None
    final: ClassVar[bool] = False

    @property
    def deadline_s(self) -> float:
        return min([self.request_deadline_s, *(p.deadline_s for p in self.parts if p.deadline_s is not None)])


class Negotiating(_Unfinished):
    """Not all sizes are known (people see `requested`, then `metadata`)."""


class AwaitingRoom(_Unfinished):
    """All sizes are known, room was asked for (people see `metadata`)."""

    room_deadline_s: float

    @property
    def deadline_s(self) -> float:
        return min(self.room_deadline_s, super().deadline_s)


class Filling(_Unfinished):
    """The lease is held (`buffer-registered`, then `forward-done`)."""

    lease: LeaseId


class Delivered(State):
    """Whole, handed to the consumer's queue (`rdma-written`). Its deadline only warns (I5)."""

    lease: LeaseId
    deadline_s: float | None
    final: ClassVar[bool] = False


class Consumed(State):
    """The scheduler holds the view. Its deadline only warns; only `Released` frees (I5)."""

    lease: LeaseId
    deadline_s: float | None
    final: ClassVar[bool] = False


class Ended(State):
    """`freed`, or an error code. Nothing is left to wait for (I4)."""

    outcome: str
    deadline_s: None = None
    final: ClassVar[bool] = True


Live = Negotiating | AwaitingRoom | Filling
AnyState = New | Negotiating | AwaitingRoom | Filling | Delivered | Consumed | Ended
INITIAL: Final = New()


# -- events ------------------------------------------------------------------------------------


class Submitted(Event):
    items: tuple[Item, ...]
    dtype: WantedDType
    deadline_s: float
    plans: tuple[PartPlan, ...]
    traceparent: str | None = None


class EncoderChosen(Event):
    """Answer to `ChooseEncoder`; None: none is there now, an `EncoderAvailable` will follow."""

    part: Part
    session: SessionId | None


class EncoderAvailable(Event):
    """Some encoder's session was opened, or is no longer suspect."""


class MetadataReceived(Event):
    session: SessionId
    part: Part
    attempt: Attempt
    specs: tuple[EmbeddingSpec, ...]


class RoomLeased(Event):
    lease: LeaseId


class RoomRefused(Event):
    """It would not fit an empty pool: names the sizes."""

    error: ErrorValue


class SourcesReady(Event):
    """A `ForwardDone`: items `first ..` of the attempt may be read."""

    session: SessionId
    part: Part
    attempt: Attempt
    grant: LeaseId
    first: int
    ready: tuple[ReadyItem, ...]
    last: bool


class ReadEnded(Event):
    """The slot machine's word on one item: `error` is None if it is whole."""

    part: Part
    attempt: Attempt
    item: int
    error: ErrorValue | None


class AttemptFailed(Event):
    """A `Failed`; `item` is numbered as in the `EncodeRequest`."""

    session: SessionId
    part: Part
    attempt: Attempt
    error: ErrorValue


class SessionEnded(Event):
    session: SessionId


class CancelWanted(Event):
    pass


class Taken(Event):
    """The consumer took the delivery."""


class Released(Event):
    """The consumer released it."""


AnyEvent = (
    Submitted
    | EncoderChosen
    | EncoderAvailable
    | MetadataReceived
    | RoomLeased
    | RoomRefused
    | SourcesReady
    | ReadEnded
    | AttemptFailed
    | SessionEnded
    | CancelWanted
    | Taken
    | Released
    | TimerExpired
)


# -- effects -----------------------------------------------------------------------------------


class ChooseEncoder(Effect):
    part: Part
    items: tuple[Item, ...]
    avoid: tuple[SessionId, ...]


class SendEncodeRequest(Effect):
    session: SessionId
    part: Part
    attempt: Attempt
    items: tuple[Item, ...]
    dtype: WantedDType
    deadline_s: float
    traceparent: str | None


class AskRoom(Effect):
    """Lease one slot per item, all or none."""

    sizes_nbytes: tuple[int, ...]


class WithdrawRoom(Effect):
    """Room is no longer wanted; a lease on its way comes back as `ReturnLease`."""


class SendGrant(Effect):
    session: SessionId
    part: Part
    attempt: Attempt
    lease: LeaseId


class StartRead(Effect):
    session: SessionId
    part: Part
    attempt: Attempt
    lease: LeaseId
    item: int
    source: Source
    digest: bytes | None


class SendReceipt(Effect):
    session: SessionId
    part: Part
    attempt: Attempt
    lease: LeaseId
    first: int
    count: int
    last: bool


class SendCancel(Effect):
    session: SessionId
    part: Part
    attempt: Attempt


class ReturnLease(Effect):
    """We are done with the lease; the slot machine frees it when our engine is (I1)."""

    lease: LeaseId


class Deliver(Effect):
    lease: LeaseId
    specs: tuple[EmbeddingSpec, ...]


class FailRequest(Effect):
    error: ErrorValue


class WarnUnconsumed(Effect):
    lease: LeaseId


AnyEffect = (
    ChooseEncoder
    | SendEncodeRequest
    | AskRoom
    | WithdrawRoom
    | SendGrant
    | StartRead
    | SendReceipt
    | SendCancel
    | ReturnLease
    | Deliver
    | FailRequest
    | WarnUnconsumed
    | Ignored
)
