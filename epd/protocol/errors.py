"""One hierarchy of errors. Each has `code`, `retryable`, and its facts as attributes.

The codes travel in `Failed`, `Outcome` and `Rejected`, stand in logs and metrics, and never change
their meaning. `retryable` says whether another attempt, perhaps elsewhere, may succeed.
"""

from typing import Any, ClassVar, Final

from epd.protocol.messages import ErrorValue

MAX_MESSAGE_CHARS: Final = 1000


class EpdError(Exception):
    """Base of all errors of this library."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def as_value(self, item: int | None = None) -> ErrorValue:
        """For the wire: a message longer than `MAX_MESSAGE_CHARS` is cut, so that it fits a frame."""
        return ErrorValue(self.code, self.retryable, self.message[:MAX_MESSAGE_CHARS], item)


class ConfigError(EpdError):
    """A setting is wrong: names the key, what was given and what is allowed."""

    code = "config"


class Malformed(EpdError):
    """Bytes from a peer that are not a frame of ours; `reason` is one of a few fixed words."""

    code = "malformed"


class SessionRejected(EpdError):
    """The peer, or we, refused the session: versions, fingerprints or data planes differ."""

    code = "rejected"


class PeerUnreachable(EpdError):
    code = "peer_unreachable"
    retryable = True


class SessionLost(EpdError):
    """The session ended while an attempt was open in it."""

    code = "session_lost"
    retryable = True


class Busy(EpdError):
    """A bounded queue is full."""

    code = "busy"
    retryable = True


class TooFast(EpdError):
    """A peer sends more in a second than one may; its session is over."""

    code = "too_fast"
    retryable = True


class Draining(EpdError):
    code = "draining"
    retryable = True


class NoEncoder(EpdError):
    """No session to any encoder before the deadline."""

    code = "no_encoder"
    retryable = True


class DeadlineExceeded(EpdError):
    code = "deadline"


class Cancelled(EpdError):
    code = "cancelled"


class TimedOut(EpdError):
    """A phase other than the request's own deadline took too long; `phase` names it."""

    code = "timeout"
    retryable = True


class ReadFailed(EpdError):
    """Our read of the encoder's memory ended without the bytes."""

    code = "read_failed"
    retryable = True


class SealMismatch(EpdError):
    """The source was reused before the read had ended; nothing was delivered."""

    code = "seal_mismatch"
    retryable = True


class DigestMismatch(EpdError):
    code = "digest_mismatch"
    retryable = True


class SourceInvalid(EpdError):
    """A peer named memory it never announced, or other sizes than it announced."""

    code = "source_invalid"


class PoolExhausted(EpdError):
    """No room within `room` seconds; the pool is large enough, others hold it."""

    code = "pool_exhausted"
    retryable = True


class RequestTooLarge(EpdError):
    """Would not fit an empty pool, or an item is larger than a region; names both sizes."""

    code = "request_too_large"


class MediaInvalid(EpdError):
    """The item cannot be decoded, is empty, or is not media at all."""

    code = "media_invalid"


class MediaMismatch(EpdError):
    """The media received are not those announced (SHA-256, size, or rows)."""

    code = "media_mismatch"


class MediaUnavailable(EpdError):
    """The side that announced the media could not send them in time."""

    code = "media_unavailable"


class UnsupportedItem(EpdError):
    """The encoder has no plan for an item of this kind or shape."""

    code = "unsupported_item"


class ForwardFailed(EpdError):
    """The forward raised, its worker died, or it took too long."""

    code = "forward_failed"
    retryable = True


class SiblingFailed(EpdError):
    """Another item of the same request is to blame."""

    code = "sibling_failed"


class WrongRole(EpdError):
    code = "wrong_role"


class DataPlaneError(EpdError):
    """The data plane cannot be set up; says which plane and what is missing."""

    code = "data_plane"


def _all_errors(base: type[EpdError]) -> dict[str, type[EpdError]]:
    found = {base.code: base}
    for sub in base.__subclasses__():
        found.update(_all_errors(sub))
    return found


BY_CODE: dict[str, type[EpdError]] = _all_errors(EpdError)


def error_from_value(value: ErrorValue) -> EpdError:
    """The exception for an error that travelled; unknown codes become `EpdError`."""
    return BY_CODE.get(value.code, EpdError)(value.message, item=value.item)


def spans_need_the_extra(error: ImportError) -> ConfigError:
    """What to say where `spans` is set and OpenTelemetry cannot be imported."""
    message = f"spans: true given, which needs the extra: pip install 'epd[otel]' ({error})"
    return ConfigError(message, key="spans", given="true", allowed="false")
