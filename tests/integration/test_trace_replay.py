"""Traces of real runs replay to the letter; a changed event diverges at its own step."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_pairs import PLANES, empty

from epd.cli.replay import run
from epd.client import NodeClient
from epd.protocol.registry import MACHINES
from epd.protocol.replay import replay
from epd.protocol.trace import (
    LimitsRecord,
    LimitsWritten,
    StepRecord,
    StepWritten,
    TraceReader,
    encode_block,
    encode_header,
)
from epd.testing.processes import held_encoder, node_process
from epd.testing.synthetic import pattern, synthetic_item

TRACES = Path(__file__).parent.parent / "traces"


@pytest.fixture(scope="module", params=PLANES)
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """One trace of each role, of a run of two processes: deliveries, shared jobs, a refusal."""
    folder = tmp_path_factory.mktemp("traces")
    paths = [folder / "encoder.trace", folder / "prefill.trace"]
    common = {"data_plane": request.param, "timeouts.dedup_retention_s": 0.2, "log_format": "json"}
    encoding = common | {"node": "encoder-1", "trace": str(paths[0])}
    with held_encoder(encoding, encoder="synthetic") as encoder:
        prefilling = {"role": "prefill", "node": "prefill-1", "trace": str(paths[1])}
        settings = common | prefilling | {"encoders": [encoder.listen]}
        with node_process(settings) as prefill:
            asyncio.run(_load(prefill.listen))
            assert prefill.terminate() == 0
        encoder.close()
        assert encoder.process.wait(30) == 0
    yield paths


async def _load(address: str) -> None:
    async with NodeClient(address) as client:
        sizes = (4, 65536, 2_000_000, 0, 65536)
        async with asyncio.TaskGroup() as requests:
            for size in sizes:
                requests.create_task(client.submit([synthetic_item(size), synthetic_item(size + 4)]))
        refused = await client.submit([synthetic_item(100_000_000)])
        assert refused.outcome.error is not None
        assert refused.outcome.error.code == "request_too_large"
    await empty(address)


def test_the_traces_of_a_real_run_replay_identically(traces: list[Path]) -> None:
    assert run(traces, as_json=True) == 0


def test_both_traces_hold_steps_of_every_machine_of_their_role(traces: list[Path]) -> None:
    kinds = []
    for path in traces:
        with path.open("rb") as file:
            kinds.append({record.kind for record in TraceReader(file.read) if isinstance(record, StepRecord)})
    assert kinds[0] == {"session", "encoder", "jobs", "sources"}
    assert kinds[1] == {"session", "prefill", "group", "rank", "slots", "reads"}


def test_media_and_payload_bytes_never_enter(traces: list[Path]) -> None:
    """Of both there are enough in the run: the media are sent, the payload is their hash again and again."""
    item = synthetic_item(65536)
    payload = pattern(item.media, 64)
    for path in traces:
        with path.open("rb") as file:
            reader = TraceReader(file.read)
            recorded = b"".join(
                bytes(part) for record in reader if isinstance(record, StepRecord) for part in record[3:]
            )
        assert len(recorded) > 5_000
        assert item.media not in recorded
        assert payload not in recorded
        assert item.sha256 in recorded  # it would be found


@pytest.mark.parametrize(
    ("role", "kind", "name"), [(0, "encoder", "GrantReceived"), (1, "prefill", "MetadataReceived")]
)
def test_one_changed_event_diverges_at_its_own_step(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], role: int, kind: str, name: str
) -> None:
    """The changed event is of an attempt that is not open."""
    changed = tmp_path / "changed.trace"
    index = _change_one(traces[role], changed, kind, name)
    assert run([changed], as_json=True) == 1
    report = msgspec.json.decode(capsys.readouterr().out)
    assert report["divergence"]["index"] == index
    assert name in report["divergence"]["event"]


def _change_one(path: Path, into: Path, kind: str, name: str) -> int:
    """Copy a trace with another attempt number in the third event `name`; the index of that step."""
    limits: list[LimitsWritten] = []
    changed: list[StepWritten] = []
    found: int | None = None
    index = seen = 0
    with path.open("rb") as file:
        reader = TraceReader(file.read)
        for record in reader:
            if isinstance(record, LimitsRecord):
                limits.append((record.kind, record.limits))
                continue
            assert isinstance(record, StepRecord)
            event: Any = MACHINES[record.kind].decode_event(record.event)
            if record.kind == kind and type(event).__name__ == name:
                seen += 1
                if seen == 3:
                    event, found = msgspec.structs.replace(event, attempt=event.attempt + 1), index
            effects = MACHINES[record.kind].decode_effects(record.effects)
            changed.append((record.kind, record.key, record.now_s, event, effects))
            index += 1
    assert found is not None
    into.write_bytes(encode_header(reader.header) + encode_block(limits) + encode_block(changed))
    return found


@pytest.mark.parametrize("path", sorted(TRACES.rglob("*.trace")), ids=lambda path: path.name)
def test_the_traces_of_every_release_replay_for_ever(path: Path) -> None:
    with path.open("rb") as file:
        assert replay(TraceReader(file.read)) is None


def test_there_are_traces_of_this_release() -> None:
    assert len(list((TRACES / "0.1.0").glob("*.trace"))) >= 2
