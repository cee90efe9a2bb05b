"""`epd-node` from configuration alone, scraped and probed over real HTTP, through its whole life."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd.client import NodeClient, Result
from epd.data import photographs
from epd.observe.families import FAMILIES
from epd.request import ImageItem
from epd.testing.processes import NodeProcess, held_encoder, node_process
from epd.testing.synthetic import synthetic_item

COMMON = {
    "data_plane": "shm",
    "log_format": "json",
    "worker.threads": 1,
    "metrics_port": 0,
    "verify": "checksum",
}
PATIENCE_S = 60.0

DOCS = Path(__file__).parents[2] / "docs"
METRIC = re.compile(r"\b(?:epd|process)_[a-z_]+[a-z]\b")

pytestmark = pytest.mark.slow


def get(node: NodeProcess, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{node.ready['metrics']}{path}", timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until(condition: Callable[[], bool]) -> None:
    """Ask until it is true; for what is milliseconds away."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s


def scrape(node: NodeProcess) -> dict[tuple[str, ...], float]:
    """Values by sample name and sorted label values."""
    status, text = get(node, "/metrics")
    assert status == 200
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def send(node: NodeProcess, items: list[ImageItem]) -> Result:
    async with NodeClient(node.listen) as client:
        return await client.submit(items, deadline_s=PATIENCE_S)


def worker_of(node: NodeProcess) -> int:
    (child,) = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    return int(child)


@pytest.fixture(scope="module")
def items() -> list[ImageItem]:
    return [ImageItem.from_file(path) for path in list(photographs())[:2]]


@pytest.fixture(scope="module")
def encoder() -> Iterator[NodeProcess]:
    with node_process(COMMON | {"role": "encoder"}) as node:
        yield node


async def test_probes_and_metrics_tell_what_happens(encoder: NodeProcess, items: list[ImageItem]) -> None:
    settings = COMMON | {"role": "prefill", "encoders": [encoder.listen]}
    with node_process(settings) as prefill:
        result = await send(prefill, items)
        assert result.outcome.error is None
        # What was delivered came through a session and a worker: both are there now.
        assert get(prefill, "/readyz") == get(encoder, "/readyz") == (200, "ready\n")
        assert get(prefill, "/healthz") == get(encoder, "/healthz") == (200, "ready\n")
        repeated = await send(prefill, items)
        assert repeated.outcome.error is None
        nbytes = 2 * sum(item.nbytes for item in result.outcome.items)

        seen = scrape(prefill)
        assert seen["epd_transfers_total", "delivered"] == 2
        assert seen["epd_transfer_duration_seconds_count",] == 2
        assert seen["epd_transfer_phase_seconds_count", "buffer-registered"] == 2
        assert seen["epd_reads_total", "ok", "shm", "shm"] == 4
        assert seen["epd_read_bytes_total", "shm", "shm"] == nbytes
        assert seen["epd_read_seconds_total", "shm", "shm"] > 0
        assert seen["epd_sessions", "encoder"] == seen["epd_ready",] == 1
        assert seen["epd_read_aborts_total",] == seen["epd_pool_bytes", "quarantined"] == 0
        assert seen["process_start_time_seconds",] > 1e9
        until(lambda: scrape(prefill)["epd_pool_bytes", "free"] == seen["epd_pool_capacity_bytes",])

        seen = scrape(encoder)
        assert seen["epd_transfers_total", "received"] == 2
        assert seen["epd_forwards_total", "ok"] == 2
        assert seen["epd_forward_duration_seconds_count",] == 2
        assert seen["epd_shared_jobs_total",] == 2
        assert seen["epd_pool_bytes", "retained"] >= nbytes / 2
        assert seen["epd_sessions", "prefill"] == 1
        assert (prefill.terminate(), get(encoder, "/readyz")) == (0, (200, "ready\n"))


async def test_a_prefill_node_is_ready_only_while_an_encoder_is() -> None:
    settings = {"data_plane": "shm"}
    with held_encoder(settings, encoder="synthetic") as first:
        first.stop()  # its kernel accepts connections, it does not
        with node_process(COMMON | {"role": "prefill", "encoders": [first.listen]}) as prefill:
            assert get(prefill, "/readyz") == (503, "loading\n")
            first.go_on()
            assert (await send(prefill, [synthetic_item(64)])).outcome.error is None
            assert get(prefill, "/readyz") == (200, "ready\n")
            first.kill()
            until(lambda: get(prefill, "/readyz") == (503, "loading\n"))
            assert get(prefill, "/healthz") == (200, "loading\n")
            with held_encoder(settings | {"listen": first.listen}, encoder="synthetic"):
                assert (await send(prefill, [synthetic_item(128)])).outcome.error is None
                assert get(prefill, "/readyz") == (200, "ready\n")


async def test_a_killed_worker_is_not_ready_until_another_has_its_model(
    encoder: NodeProcess, items: list[ImageItem]
) -> None:
    with node_process(COMMON | {"role": "prefill", "encoders": [encoder.listen]}) as prefill:
        await send(prefill, items)
        assert get(encoder, "/readyz")[0] == 200
        deaths = scrape(encoder)["epd_worker_deaths_total",]
        os.kill(worker_of(encoder), signal.SIGKILL)
        until(lambda: get(encoder, "/readyz") == (503, "loading\n"))
        assert get(encoder, "/healthz") == (200, "loading\n")
        assert scrape(encoder)["epd_worker_deaths_total",] == deaths + 1
        # Encoded by nobody yet, so that it waits for the new worker.
        unseen = [ImageItem.from_file(list(photographs())[2])]
        assert (await send(prefill, unseen)).outcome.error is None
        assert get(encoder, "/readyz") == (200, "ready\n")


async def test_a_draining_node_is_not_ready_at_once_and_still_serves_what_runs(
    encoder: NodeProcess, items: list[ImageItem]
) -> None:
    settings = COMMON | {"role": "prefill", "encoders": [encoder.listen], "drain_timeout_s": PATIENCE_S}
    with node_process(settings) as prefill:
        await send(prefill, items)
        encoder.stop()
        try:
            async with NodeClient(prefill.listen) as client, asyncio.TaskGroup() as group:
                running = group.create_task(client.submit(items, deadline_s=PATIENCE_S))
                await asyncio.to_thread(
                    until, lambda: scrape(prefill)["epd_transfers_open", "requested"] == 1
                )
                prefill.process.terminate()
                await asyncio.to_thread(until, lambda: get(prefill, "/readyz") == (503, "draining\n"))
                assert get(prefill, "/healthz") == (200, "draining\n")
                encoder.go_on()
                result = await running
        finally:
            encoder.go_on()
        assert result.outcome.error is None
        assert prefill.process.wait(PATIENCE_S) == 0


def test_a_metrics_port_that_is_taken_ends_the_start_with_one_line(encoder: NodeProcess) -> None:
    port = encoder.ready["metrics"].rpartition(":")[2]
    command = [sys.executable, "-m", "epd.cli.node", "--role", "encoder", "--data-plane", "shm"]
    done = subprocess.run(
        [*command, "--metrics-port", port], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"metrics_port: cannot listen on 127.0.0.1 port {port}" in done.stderr


def test_the_dashboard_and_the_table_name_metrics_that_nodes_show_and_labels_that_they_have(
    encoder: NodeProcess,
) -> None:
    text = get(encoder, "/metrics")[1]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    shown = {
        name + suffix
        for name, family in families.items()
        for suffix in {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[
            family.type
        ]
    }
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    expressions = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    assert set(METRIC.findall(expressions)) <= shown
    # Whatever there is can be seen: nothing is counted for nobody.
    assert {name for name in FAMILIES if name not in expressions} == set()
    labels = set(re.findall(r"by \(([a-z_, ]+)\)", expressions))
    known = {label for family in FAMILIES.values() for label in family.labels} | {"le", "instance"}
    assert {label for group in labels for label in group.split(", ")} <= known
    operations = (DOCS / "operations.md").read_text()
    named = set(METRIC.findall(operations))
    assert named
    assert named <= shown | set(families)
