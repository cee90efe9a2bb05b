"""`docs/protocol.md` says what the code does: sizes, deadlines, messages, error codes."""

import re
from pathlib import Path
from typing import get_args

import pytest

from epd.protocol import jobs, prefill, slots, wire
from epd.protocol.errors import BY_CODE
from epd.protocol.messages import AnyMessage
from epd.protocol.session import SessionLimits

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def table(after: str) -> list[list[str]]:
    """The cells of the first table after this text, without its head."""
    rows = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(after) :], re.MULTILINE)
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


def test_the_table_of_errors_has_every_code_and_whether_it_is_retryable() -> None:
    told = {row[0].strip("`"): row[1] == "yes" for row in table("<!-- errors: begin -->")}
    assert told == {code: kind.retryable for code, kind in BY_CODE.items()}
    assert list(told) == sorted(told)


def test_the_table_of_the_frame_is_the_header() -> None:
    rows = table("### Frame")
    offset = 0
    for row, code in zip(rows, re.findall(r"\d*[a-zA-Z]", wire.HEADER.format.lstrip("<")), strict=False):
        nbytes = {"4s": 4, "H": 2, "B": 1, "Q": 8, "I": 4}[code]
        assert [int(row[0]), int(row[1])] == [offset, nbytes], row
        offset += nbytes
    assert int(rows[-1][0]) == offset == wire.HEADER_NBYTES


def test_the_table_of_limits_has_the_limits() -> None:
    told = [int(re.sub(r"\D", "", row[1])) for row in table("| limit |")]
    assert told == [
        wire.CONTROL_FRAME_NBYTES,
        wire.MEDIA_CHUNK_NBYTES,
        wire.MEDIA_FRAME_NBYTES,
        wire.MAX_ITEMS_PER_PART,
        wire.MAX_AUX_NBYTES,
    ]


def test_every_message_is_on_the_page() -> None:
    kinds = {kind.__name__ for union in get_args(AnyMessage) for kind in (get_args(union) or (union,))}
    told = {name for row in table("### Messages") for name in re.findall(r"`(\w+)`", row[0])}
    assert told == kinds


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("`metadata`", f"{prefill.Limits().metadata_s:g} s"),
        ("`room`", f"{prefill.Limits().room_s:g} s"),
        (
            "`read`",
            f"{slots.Limits().read_base_s:g} s + nbytes / "
            f"{slots.Limits().read_min_bandwidth_bytes_per_s / 1e6:g} MB/s",
        ),
        ("`consume warning`", f"{prefill.Limits().consume_warning_s:g} s"),
        ("`media`", f"{jobs.Limits().media_s:g} s"),
        ("`forward`", f"{jobs.Limits().forward_s:g} s"),
        ("`dedup retention`", f"{jobs.Limits().dedup_retention_s:g} s"),
        (
            "heartbeat, suspect, dead",
            f"{SessionLimits().heartbeat_s:g}, {SessionLimits().suspect_after_s:g}, "
            f"{SessionLimits().dead_after_s:g} s",
        ),
    ],
)
def test_the_defaults_of_the_deadlines_are_those_of_the_machines(name: str, default: str) -> None:
    assert {row[0]: row[1] for row in table("## Deadlines")}[name] == default


def test_the_retry_rule_names_the_bounds_of_the_code() -> None:
    limits = prefill.Limits()
    text = " ".join(PAGE.split())
    assert f"double from {limits.retry_base_s * 1000:g} ms to {limits.retry_max_s:g} s" in text
    assert f"at most {limits.max_attempts} attempts" in text
