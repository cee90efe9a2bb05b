"""OpenTelemetry spans of a request through two real nodes, as an engine's tracing would collect them."""

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from epd.client import NodeClient
from epd.config import load_config
from epd.node import EncoderNode, PrefillNode
from epd.protocol.errors import EpdError
from epd.request import EmbeddingRequest
from epd.testing.processes import node_process
from epd.testing.synthetic import InstantWorker, SyntheticEncoder, synthetic_item

pytestmark = pytest.mark.slow

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the nodes' spans go to, instead of the process's own provider."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


async def encode(
    requests: list[EmbeddingRequest], settings: Mapping[str, Any] | None = None
) -> list[EpdError | None]:
    common = {"data_plane": "shm", "spans": True} | dict(settings or {})
    encoder = EncoderNode(
        load_config(None, {"role": "encoder", "data_plane": "shm", "spans": True}),
        encoder=SyntheticEncoder(),
        worker=InstantWorker(),
    )
    outcomes: list[EpdError | None] = []
    async with encoder:
        overrides = common | {"role": "prefill", "encoders": [encoder.listen]}
        async with PrefillNode(load_config(None, overrides)) as prefill:
            for request in requests:
                try:
                    (await prefill.encode(request)).release()
                    outcomes.append(None)
                except EpdError as error:
                    outcomes.append(error)
            await prefill.drain(30.0)
    return outcomes


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return int(span.parent.span_id)


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


async def test_spans_of_both_nodes_stand_under_the_callers(exporter: InMemorySpanExporter) -> None:
    request = EmbeddingRequest("r", [synthetic_item(4_096)], 30.0, traceparent=TRACEPARENT)
    assert await encode([request]) == [None]
    found = by_name(exporter)
    assert all(f"{span.context.trace_id:032x}" == TRACE for span in found.values() if span.context)
    assert f"{parent_of(found['epd.request']):016x}" == CALLER
    phases = {
        "epd.requested",
        "epd.metadata",
        "epd.buffer-registered",
        "epd.forward-done",
        "epd.rdma-written",
    }
    assert phases <= set(found)
    for name in (*phases, "epd.part"):
        assert parent_of(found[name]) == id_of(found["epd.request"])
    forward = found["epd.forward"]
    assert parent_of(forward) == id_of(found["epd.part"])
    assert [link.context.span_id for link in forward.links] == [id_of(found["epd.part"])]


async def test_without_a_good_traceparent_a_request_begins_its_own_trace(
    exporter: InMemorySpanExporter,
) -> None:
    bad = [None, "", "garbage", f"00-{'0' * 32}-{CALLER}-01", "é" * 5_000]
    requests = [
        EmbeddingRequest(f"r{number}", [synthetic_item(64 + 4 * number)], 30.0, traceparent=traceparent)
        for number, traceparent in enumerate(bad)
    ]
    assert await encode(requests) == [None] * len(bad)
    spans = exporter.get_finished_spans()
    begun = [span for span in spans if span.name == "epd.request"]
    assert [span.parent for span in begun] == [None] * len(bad)
    assert len({span.context.trace_id for span in begun if span.context}) == len(bad)
    parts = [parent_of(span) for span in spans if span.name == "epd.part"]
    assert sorted(parts) == sorted(map(id_of, begun))


async def test_a_failed_request_has_its_code_and_nothing_stays_open(exporter: InMemorySpanExporter) -> None:
    small = {"pool.regions": 1, "pool.region_nbytes": 4_096}
    (error,) = await encode([EmbeddingRequest("r", [synthetic_item(8_192)], 30.0)], small)
    assert error is not None
    found = by_name(exporter)
    span = found["epd.request"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["epd.code"] == error.code


class Collector(BaseHTTPRequestHandler):
    """Keeps what an exporter sends by OTLP."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        data = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
        self.received.append((self.path, data))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing to standard error."""


async def test_a_node_sends_its_spans_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            settings = {
                "role": "prefill",
                "data_plane": "shm",
                "spans": True,
                "encoders": ["tcp://127.0.0.1:9"],
            }
            with node_process(settings) as node:
                async with NodeClient(node.listen) as client:
                    result = await client.submit([synthetic_item(64)], deadline_s=0.01)
                    assert result.outcome.error is not None
                assert node.terminate() == 0
        finally:
            collector.shutdown()
            thread.join()
    assert {path for path, _ in Collector.received} == {"/v1/traces"}
    data = b"".join(data for _, data in Collector.received)
    assert b"epd.request" in data
    assert result.outcome.error.code.encode() in data


def test_without_spans_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, epd.cli.node, epd.node, epd.receiver; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_spans_without_the_extra_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('not installed')\n")
    (tmp_path / "spans.toml").write_text('role = "encoder"\ndata_plane = "shm"\nspans = true\n')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "epd.cli.node", "--config", str(tmp_path / "spans.toml")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "spans: " in done.stderr
    assert "epd[otel]" in done.stderr
