"""OpenTelemetry spans from the steps of the machines; only imported where `spans` is set.

A prefill node: one span a request, under the caller's `traceparent`, and under it one for each state
it passed. Its own `traceparent` travels in `EncodeRequest`, so that an encoder's parts and their
forwards stand below it. A forward that several parts share is a child of the first and linked to all.
"""

import os
from collections.abc import Hashable
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epd.protocol import encoder, jobs, prefill
from epd.protocol import prefill_types as t
from epd.protocol.errors import spans_need_the_extra
from epd.protocol.ids import TransferId
from epd.protocol.machine import Effect, Event
from epd.runtime.machines import Observe

EXPORT_S: Final = 2.0
"""One export, its repeats included, unless an `OTEL_*` variable says otherwise."""

_TIMEOUTS: Final = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class _Request:
    __slots__ = ("phase", "phase_span", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.phase = ""
        self.phase_span: Span | None = None

    def end_phase(self) -> None:
        if self.phase_span is not None:
            self.phase_span.end()
            self.phase_span = None


class _Part(NamedTuple):
    span: Span
    attempt: int


class Spans:
    """Spans of one node; without a `provider` they go to the process's own. Used from the loop only."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("epd", version("epd"), provider)
        self._requests: dict[Hashable, _Request] = {}
        self._parts: dict[Hashable, _Part] = {}
        self._forwards: dict[Hashable, Span] = {}
        self.observers: dict[str, Observe] = {
            "prefill": self.saw_prefill,
            "encoder": self.saw_encoder,
            "jobs": self.saw_jobs,
        }

    def begin_request(self, transfer: TransferId, traceparent: str | None) -> str | None:
        """Begin a request's span under the caller's; the `traceparent` that its messages carry."""
        span = self._tracer.start_span("epd.request", _parent(traceparent), SpanKind.CLIENT)
        span.set_attribute("epd.transfer", transfer)
        self._requests[transfer] = _Request(span)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
        return carrier.get("traceparent", traceparent)

    def close(self) -> None:
        """End what is open: the node ends."""
        for request in self._requests.values():
            request.end_phase()
        spans = [r.span for r in self._requests.values()] + [p.span for p in self._parts.values()]
        for span in [*spans, *self._forwards.values()]:
            span.set_status(Status(StatusCode.ERROR, "the node ended"))
            span.end()
        self._requests.clear()
        self._parts.clear()
        self._forwards.clear()

    # -- steps -------------------------------------------------------------------------------

    def saw_prefill(
        self, key: Hashable, before: Any, after: Any, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        for effect in effects:
            if isinstance(effect, t.FailRequest):
                _fail(request.span, effect.error.code)
            elif isinstance(effect, t.SendEncodeRequest) and effect.attempt > 1:
                request.span.add_event("retry", {"epd.attempt": effect.attempt})
        if isinstance(after, t.New | t.Ended):
            request.end_phase()
            request.span.end()
            del self._requests[key]
            return
        phase = prefill.state_name(after)
        if phase != request.phase:
            request.end_phase()
            request.phase = phase
            context = trace.set_span_in_context(request.span, Context())
            request.phase_span = self._tracer.start_span(f"epd.{phase}", context)

    def saw_encoder(
        self, key: Hashable, before: Any, after: Any, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        for effect in effects:
            if isinstance(effect, encoder.AttemptEnded):
                self._end_part(key, effect)
        if isinstance(event, encoder.RequestReceived) and isinstance(after, encoder.Open):
            known = self._parts.get(key)
            if known is None or known.attempt != after.attempt:
                span = self._tracer.start_span("epd.part", _parent(event.traceparent), SpanKind.SERVER)
                span.set_attributes({"epd.items": len(after.items), "epd.attempt": after.attempt})
                self._parts[key] = _Part(span, after.attempt)

    def _end_part(self, key: Hashable, ended: encoder.AttemptEnded) -> None:
        part = self._parts.get(key)
        if part is not None and part.attempt == ended.attempt:
            del self._parts[key]
            if ended.outcome != "received":
                _fail(part.span, ended.outcome)
            part.span.end()

    def saw_jobs(
        self, key: Hashable, before: Any, after: Any, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        if isinstance(event, jobs.ForwardStarted) and isinstance(after, jobs.Running):
            wanting = [wish.subscriber for wish in after.wishes]
            parts = [self._parts.get((s.session, s.transfer, s.part)) for s in wanting]
            spans = [part.span for part in parts if part is not None]
            context = trace.set_span_in_context(spans[0], Context()) if spans else Context()
            links = [Link(span.get_span_context()) for span in spans]
            self._forwards[key] = self._tracer.start_span("epd.forward", context, links=links)
        elif isinstance(event, jobs.ForwardEnded):
            forward = self._forwards.pop(key, None)
            if forward is not None:
                if event.error is not None:
                    _fail(forward, event.error.code)
                forward.end()


def export_spans() -> None:
    """Send the process's spans by OTLP over HTTP, as the `OTEL_*` variables say; for `epd-node` only.

    Raises `ConfigError` if only the interface of OpenTelemetry is installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise spans_need_the_extra(error) from error

    resource = Resource.create({SERVICE_NAME: "epd"} if not _is_named() else {})
    provider = SdkProvider(resource=resource)
    # The last batch is sent at the exit, which a collector that is away must not keep waiting for 10 s.
    timeout_s = None if any(name in os.environ for name in _TIMEOUTS) else EXPORT_S
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
    trace.set_tracer_provider(provider)


def _is_named() -> bool:
    return "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )


def _parent(traceparent: str | None) -> Context:
    """The caller's context; empty, and so a new trace, if there is none or it is malformed."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context()) if traceparent else Context()


def _fail(span: Span, code: str) -> None:
    span.set_attribute("epd.code", code)
    span.set_status(Status(StatusCode.ERROR, code))
