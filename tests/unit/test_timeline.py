"""What `epd trace` makes of recorded runs: a summary, a Perfetto file, a page; and of damaged ones."""

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from epd.cli.trace import trace_command
from epd.observe.timeline.load import NodeTrace, load
from epd.observe.timeline.merge import merge
from epd.observe.timeline.messages import received_by
from epd.observe.timeline.transfers import transfers_of
from epd.protocol.trace import TraceReader, encode_block, encode_header

TRACES = Path(__file__).parent.parent / "traces" / "0.1.0"
PREFILL, ENCODER = TRACES / "shm-prefill.trace", TRACES / "shm-encoder.trace"


def epd_trace(*args: object) -> Result:
    return CliRunner().invoke(trace_command, [str(arg) for arg in args])


def summary_of(*args: object, exit_code: int = 0) -> dict[str, Any]:
    result = epd_trace(*args, "--summary", "--json")
    assert result.exit_code == exit_code, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


# -- the summary -----------------------------------------------------------------------------------


def test_each_transfer_has_its_states_its_outcome_and_who_waited_for_whom() -> None:
    summary = summary_of(PREFILL, ENCODER)
    assert summary["ok"]
    assert summary["outcomes"] == {"freed": 5, "failed(request_too_large)": 1}
    assert summary["unmatched_messages"] == 0
    first = summary["transfers"][0]
    assert first["encoders"] == ["encoder-1"]
    assert first["delivered"]
    names = [state["state"] for state in first["states"] if state["node"] == "prefill-1"]
    assert names[:3] == ["requested", "metadata", "buffer-registered"]
    assert names[-2:] == ["rdma-written", "consumed"]
    assert {state["node"] for state in first["states"]} == {"prefill-1", "encoder-1"}
    waits = {(wait["who"], wait["whom"], wait["what"]) for wait in first["waits"]}
    assert ("prefill-1", "encoder-1", "the forward") in waits
    assert ("encoder-1", "prefill-1", "the receipt") in waits


def test_the_states_of_a_side_follow_each_other_without_a_gap() -> None:
    for transfer in transfers_of(merge(load([PREFILL, ENCODER]).nodes)):
        for phases in (transfer.phases, transfer.encoder_phases):
            for one, next_one in itertools.pairwise(phases):
                assert one.end_s == next_one.start_s
            assert all(phase.took_s >= 0 for phase in phases)


def test_the_text_says_it_in_lines() -> None:
    result = epd_trace(PREFILL, ENCODER)
    assert result.exit_code == 0
    assert "6 transfers: 5 freed, 1 failed(request_too_large)" in result.output
    assert "prefill-1 transfer 1: freed after" in result.output
    assert re.search(r"prefill-1 waited \d+\.\d\d ms for sizes \(encoder-1\)", result.output)


@pytest.mark.parametrize("path", [PREFILL, ENCODER])
def test_one_side_alone_is_shown_as_far_as_it_goes(path: Path) -> None:
    summary = summary_of(path)
    assert len(summary["transfers"]) == 6
    assert summary["unmatched_messages"] > 0


# -- merging ---------------------------------------------------------------------------------------


def shifted(path: Path, by_s: float) -> NodeTrace:
    """The trace as a node with another clock would have recorded it."""
    (node,) = load([path]).nodes
    node.steps = [step._replace(now_s=step.now_s + by_s) for step in node.steps]
    return node


@pytest.mark.parametrize("by_s", [0.0, 5000.0, -5000.0, 0.01])
def test_sends_meet_receives_whatever_the_clocks_say(by_s: float) -> None:
    merged = merge([shifted(ENCODER, by_s), *load([PREFILL]).nodes])
    assert [node.header.role for node in merged.nodes] == ["prefill", "encoder"]
    offset = merged.offsets[1]
    assert offset.within_s is not None
    assert abs(offset.add_s + by_s) < 0.01
    assert 0 < offset.within_s < 0.01
    place_of = {place: n for n, place in enumerate(merged.in_order())}
    assert len(place_of) == sum(len(node.steps) for node in merged.nodes)
    assert len(merged.messages) > 30
    for message in merged.messages:
        assert message.sent is not None and message.received is not None
        assert place_of[message.sent] < place_of[message.received]
        step = merged.nodes[message.received.node].steps[message.received.step]
        assert received_by(step) == message.name


def test_a_receive_comes_after_its_send_though_its_clock_runs_wild() -> None:
    """Half of the steps an hour early: no offset can make them right; the messages can."""
    (encoder,) = load([ENCODER]).nodes
    encoder.steps = [
        step._replace(now_s=step.now_s - 3600.0 * (n > 80)) for n, step in enumerate(encoder.steps)
    ]
    merged = merge([encoder, *load([PREFILL]).nodes])
    place_of = {place: n for n, place in enumerate(merged.in_order())}
    for message in merged.messages:
        assert message.sent is not None and message.received is not None
        assert place_of[message.sent] < place_of[message.received]


def test_traces_that_share_no_session_stand_side_by_side() -> None:
    other = TRACES / "mooncake-encoder.trace"
    merged = merge(load([PREFILL, other]).nodes)
    assert merged.offsets[1].within_s is None
    assert len(list(merged.in_order())) == sum(len(node.steps) for node in merged.nodes)
    assert "its clock is not known" in epd_trace(PREFILL, other).output


# -- Perfetto --------------------------------------------------------------------------------------


def test_the_perfetto_file_has_a_track_per_actor_flows_and_spans(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert epd_trace(PREFILL, ENCODER, "--perfetto", out).exit_code == 0
    events = json.loads(out.read_text())["traceEvents"]
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_phase.setdefault(event["ph"], []).append(event)
    tracks = {(e["pid"], e["args"]["name"]) for e in by_phase["M"] if e["name"] == "thread_name"}
    assert {(1, "PrefillActor"), (1, "BufferManagerActor"), (1, "TransferActor")} <= tracks
    assert {(2, "EncodeActor"), (2, "DedupCoordinator"), (2, "BufferManagerActor")} <= tracks
    steps = sum(len(node.steps) for node in load([PREFILL, ENCODER]).nodes)
    assert len(by_phase["X"]) == steps
    sent = {e["id"]: e for e in by_phase["s"]}
    received = {e["id"]: e for e in by_phase["f"]}
    assert sent.keys() == received.keys()
    assert all(sent[n]["pid"] != received[n]["pid"] for n in sent)
    assert all(sent[n]["ts"] <= received[n]["ts"] for n in sent)
    begun = [e["id"] for e in by_phase["b"] if e["cat"] == "slot"]
    ended = [e["id"] for e in by_phase["e"] if e["cat"] == "slot"]
    leases = sorted(name for name in begun if "lease" in name)
    assert leases == sorted(ended)  # the results were still kept when the encoder stopped
    assert len(begun) - len(leases) == 7
    slices = {(e["pid"], e["tid"], e["ts"]) for e in by_phase["X"]}
    assert {(e["pid"], e["tid"], e["ts"]) for e in by_phase["s"]} <= slices  # a flow needs a slice


# -- the page --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Counts what opens and closes, and collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "input", "link", "img", "br"):
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.startswith("{"):
            self.data = data


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    assert epd_trace(PREFILL, ENCODER, "--html", out).exit_code == 0
    page = Page()
    page.feed(out.read_text())
    page.close()
    assert page.open == []
    assert page.fetched == []
    assert "url(http" not in out.read_text() and "@import" not in out.read_text()
    data = json.loads(page.data)
    assert [transfer["number"] for transfer in data["transfers"]] == [1, 2, 3, 4, 5, 6]
    kinds = [message["kind"] for message in data["transfers"][1]["messages"]]
    assert kinds[:3] == ["EncodeRequest", "EmbeddingMetadata", "BufferGrant"]
    assert kinds[-1] == "Receipt"


def test_a_name_in_a_trace_is_never_markup(tmp_path: Path) -> None:
    with PREFILL.open("rb") as file:
        header = TraceReader(file.read).header
    evil = msgspec.structs.replace(header, node="</script><script>alert(1)</script>", format_version=2)
    path, out = tmp_path / "evil.trace", tmp_path / "out.html"
    path.write_bytes(encode_header(evil))
    assert epd_trace(path, "--html", out).exit_code == 0
    assert "alert(1)</script>" not in out.read_text()


# -- bad input -------------------------------------------------------------------------------------


def test_what_can_be_read_is_summarised_and_what_not_is_one_line_and_exit_2(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.trace"
    data = bytearray(PREFILL.read_bytes())
    data[-4000:] = b"\xff" * 4000
    damaged.write_bytes(data)
    result = epd_trace(damaged, ENCODER, "--summary")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"{damaged}: ")
    assert "damaged" in result.stderr
    assert "6 transfers" in result.stdout
    summary = summary_of(damaged, exit_code=2)
    assert not summary["ok"]
    assert 50 < summary["nodes"][0]["steps"] < 187
    assert summary["damages"] == [result.stderr.strip()]


def newer() -> bytes:
    with PREFILL.open("rb") as file:
        header = TraceReader(file.read).header
    return encode_header(msgspec.structs.replace(header, format_version=99))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xd8\xff\xe0JFIF", "not a trace of epd"),
        (b"", "not a trace of epd"),
        (newer(), "trace of format_version 99, this program reads up to"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_trace_of_ours_is_one_line_and_exit_2(
    tmp_path: Path, data: bytes | None, reason: str
) -> None:
    path = tmp_path / "picture.jpg"
    if data is not None:
        path.write_bytes(data)
    result = epd_trace(path, "--summary", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{path}: {reason}")
    assert len(result.stderr.splitlines()) == 1


def test_a_torn_tail_is_said_and_is_no_damage(tmp_path: Path) -> None:
    torn = tmp_path / "torn.trace"
    torn.write_bytes(PREFILL.read_bytes()[:-3])
    result = epd_trace(torn)
    assert result.exit_code == 0
    assert "prefill-1: 186 steps, the last record was torn" in result.output


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = epd_trace(PREFILL, "--html", tmp_path / "absent" / "out.html")
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr
    assert "Traceback" not in result.output


def test_files_of_one_recording_are_one_node(tmp_path: Path) -> None:
    """A second file that goes on from the first, and the second alone."""
    (node,) = load([PREFILL]).nodes
    cut = 100
    first, second = tmp_path / "a.trace.1", tmp_path / "a.trace"
    with PREFILL.open("rb") as file:
        records = list(TraceReader(file.read))
    limits = [record for record in records if len(record) == 2]
    steps: Any = [record for record in records if len(record) == 5]
    states = {(step.kind, step.key): step.after for step in node.steps[:cut] if not step.after.final}
    for path, number, body in (
        (first, 0, encode_block(steps[:cut])),
        (second, 1, encode_block([(*k, s) for k, s in states.items()]) + encode_block(steps[cut:])),
    ):
        header = msgspec.structs.replace(node.header, format_version=2, file=number)
        path.write_bytes(encode_header(header) + encode_block(limits) + body)
    (whole,) = load([second, first]).nodes
    assert whole.steps == node.steps
    assert whole.whole
    (alone,) = load([second]).nodes
    assert alone.steps == node.steps[cut:]
    assert not alone.whole
    assert "from the midst of its run" in epd_trace(second).output
