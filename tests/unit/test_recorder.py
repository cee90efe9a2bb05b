import errno
from pathlib import Path

import pytest
import toy_door as door
from structlog.testing import capture_logs

from epd.protocol.errors import ConfigError
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect
from epd.protocol.trace import StepRecord, TraceReader
from epd.runtime.recorder import FLUSH_NBYTES, Recorder
from epd.runtime.timers import Timers
from epd.testing.virtual_clock import VirtualClock


class Recording:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock()
        self.timers = Timers(self.clock, self.clock.call_at)
        self.recorder = Recorder(path, NodeId("node"), "prefill", Incarnation(2**64 - 1), self.timers)

    def step(self, who: str = "ann", effects: tuple[Effect, ...] = ()) -> None:
        self.recorder.record("door", (1, "front"), door.Passed(who), self.clock.now_s(), effects)

    def steps_on_disk(self) -> int:
        with self.path.open("rb") as file:
            return sum(isinstance(record, StepRecord) for record in TraceReader(file.read))


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "trace")


def test_the_header_is_there_at_once(recording: Recording) -> None:
    with recording.path.open("rb") as file:
        header = TraceReader(file.read).header
    assert (header.node, header.role, header.incarnation) == ("node", "prefill", 2**64 - 1)
    recording.recorder.close()


def test_steps_reach_the_file_within_a_second_and_an_idle_recorder_has_no_timer(
    recording: Recording,
) -> None:
    recording.step()
    recording.step()
    assert recording.steps_on_disk() == 0
    assert len(recording.timers) == 1
    recording.clock.advance(1.0)
    assert recording.steps_on_disk() == 2
    assert len(recording.timers) == 0
    recording.recorder.close()


def test_steps_reach_the_file_when_there_are_64_kib_of_them(recording: Recording) -> None:
    for _ in range(70):
        recording.step("a" * 1024)
    assert recording.path.stat().st_size >= FLUSH_NBYTES
    assert recording.steps_on_disk() >= 60
    recording.recorder.close()
    assert recording.steps_on_disk() == 70


def test_close_flushes_and_is_idempotent_and_leaves_no_timer(recording: Recording) -> None:
    recording.step()
    recording.recorder.close()
    recording.recorder.close()
    assert recording.steps_on_disk() == 1
    assert len(recording.timers) == 0
    recording.step()
    recording.recorder.flush()
    assert recording.steps_on_disk() == 1


def test_limits_are_declared_once(recording: Recording) -> None:
    recording.recorder.declare("door", door.Limits())
    recording.recorder.declare("door", door.Limits())
    recording.recorder.close()
    with recording.path.open("rb") as file:
        assert [record.kind for record in TraceReader(file.read)] == ["door"]


def test_a_full_disk_ends_the_trace_and_nothing_else(recording: Recording) -> None:
    class FullDisk:
        closed = False

        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.closed = True

    recording.recorder._file.close()
    recording.recorder._file = FullDisk()  # type: ignore[assignment]  # only write and close are used
    recording.step()
    with capture_logs() as logs:
        recording.clock.advance(1.0)
        recording.step()
        recording.recorder.close()
    assert [log["event"] for log in logs] == ["trace ended"]
    assert recording.recorder.closed
    assert len(recording.timers) == 0


def test_a_value_that_cannot_be_encoded_ends_the_trace_after_the_last_whole_step(
    recording: Recording,
) -> None:
    recording.step()
    with capture_logs() as logs:
        recording.step(effects=(door.Slam(2**70),))
        recording.step()
    assert [log["event"] for log in logs] == ["trace ended"]
    assert recording.steps_on_disk() == 1
    assert len(recording.timers) == 0


def test_a_path_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: cannot write .*: No such file or directory"):
        Recording(tmp_path / "absent" / "trace")
