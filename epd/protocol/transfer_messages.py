"""How the request machines of both sides speak: their effects as messages, and messages as their events."""

from epd.protocol import encoder
from epd.protocol import prefill_types as prefill
from epd.protocol.ids import Part, SessionId, TransferId
from epd.protocol.machine import Event
from epd.protocol.messages import (
    BufferGrant,
    Cancel,
    EmbeddingMetadata,
    EncodeRequest,
    ErrorValue,
    Failed,
    ForwardDone,
    Receipt,
)

SentByPrefill = prefill.SendEncodeRequest | prefill.SendGrant | prefill.SendReceipt | prefill.SendCancel
SentByEncoder = encoder.SendMetadata | encoder.SendForwardDone | encoder.SendFailed


def told_by_prefill(
    transfer: TransferId, effect: SentByPrefill, now_s: float
) -> EncodeRequest | BufferGrant | Receipt | Cancel:
    """A deadline travels as what remains of it at `now_s`."""
    about = (transfer, effect.part, effect.attempt)
    match effect:
        case prefill.SendEncodeRequest():
            remaining_ms = max(1, int((effect.deadline_s - now_s) * 1000))
            return EncodeRequest(*about, effect.items, effect.dtype, remaining_ms, effect.traceparent)
        case prefill.SendGrant():
            return BufferGrant(*about, effect.lease)
        case prefill.SendReceipt():
            return Receipt(*about, effect.lease, effect.first, effect.count, effect.last)
        case prefill.SendCancel():
            return Cancel(*about)


def heard_by_encoder(message: BufferGrant | Receipt | Cancel) -> Event:
    """An `EncodeRequest` is not among them: it takes an encoder to say what its items need."""
    match message:
        case BufferGrant():
            return encoder.GrantReceived(message.attempt, message.grant)
        case Receipt():
            return encoder.ReceiptReceived(message.attempt, message.grant, message.first, message.count)
        case Cancel():
            return encoder.CancelReceived(message.attempt)


def told_by_encoder(
    transfer: TransferId, part: Part, effect: SentByEncoder
) -> EmbeddingMetadata | ForwardDone | Failed:
    about = (transfer, part, effect.attempt)
    match effect:
        case encoder.SendMetadata():
            return EmbeddingMetadata(*about, effect.specs)
        case encoder.SendForwardDone():
            return ForwardDone(*about, effect.grant, effect.first, effect.ready, effect.last)
        case encoder.SendFailed():
            error = effect.error
            return Failed(*about, error.code, error.retryable, error.item, error.message)


def heard_by_prefill(session: SessionId, message: EmbeddingMetadata | ForwardDone | Failed) -> Event:
    about = (session, message.part, message.attempt)
    match message:
        case EmbeddingMetadata():
            return prefill.MetadataReceived(*about, message.specs)
        case ForwardDone():
            return prefill.SourcesReady(*about, message.grant, message.first, message.items, message.last)
        case Failed():
            error = ErrorValue(message.code, message.retryable, message.reason, message.item)
            return prefill.AttemptFailed(*about, error)
