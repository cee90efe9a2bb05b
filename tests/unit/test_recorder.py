import errno
from collections.abc import Hashable
from pathlib import Path
from secrets import token_hex

import pytest
import toy_door as door
from structlog.testing import capture_logs

from epd.protocol.errors import ConfigError
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect
from epd.protocol.registry import MachineSpec
from epd.protocol.replay import replay
from epd.protocol.trace import StateRecord, StepRecord, TraceReader
from epd.runtime.machines import MachineTable
from epd.runtime.recorder import _BATCH_RECORDS, _BATCHES_AT_ONCE, Recorder
from epd.runtime.timers import Timers
from epd.runtime.trace_writer import TraceWriter
from epd.testing.virtual_clock import VirtualClock


class Recording:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock()
        self.timers = Timers(self.clock, self.clock.call_at)
        self.recorder = Recorder(path, NodeId("node"), "prefill", Incarnation(2**64 - 1), self.timers, 0.0)

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
    assert len(recording.timers) == 0
    recording.recorder._writer.wait()
    assert recording.steps_on_disk() == 2
    recording.recorder.close()


def test_steps_reach_the_file_when_there_are_eight_blocks_of_them(recording: Recording) -> None:
    enough = _BATCH_RECORDS * _BATCHES_AT_ONCE
    for _ in range(enough):
        recording.step()
    recording.recorder._writer.wait()
    assert recording.steps_on_disk() == 0
    for _ in range(10):
        recording.step()
    recording.recorder._writer.wait()
    assert recording.steps_on_disk() == enough
    recording.recorder.close()
    assert recording.steps_on_disk() == enough + 10


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
        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            """Nothing was kept."""

    assert isinstance(recording.recorder._writer, TraceWriter)
    recording.recorder._writer._file.close()
    recording.recorder._writer._file = FullDisk()  # type: ignore[assignment]  # only these are used
    recording.step()
    with capture_logs() as logs:
        recording.clock.advance(1.0)
        recording.recorder.flush()
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
        recording.recorder.flush()
        recording.step()
        recording.recorder.close()
    assert [log["event"] for log in logs] == ["trace ended"]
    assert recording.steps_on_disk() == 1
    assert len(recording.timers) == 0


def test_a_path_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: cannot write .*: No such file or directory"):
        Recording(tmp_path / "absent" / "trace")


# -- files of a bounded size ---------------------------------------------------------------------


class Rotating:
    """A table of doors whose recorder keeps `files` files."""

    def __init__(self, path: Path, files: int) -> None:
        self.path = path
        clock = VirtualClock()
        timers = Timers(clock, clock.call_at)
        node, incarnation = NodeId("node"), Incarnation(1)
        self.recorder = Recorder(
            path, node, "prefill", incarnation, timers, 0.0, file_nbytes=20_000, files=files
        )
        self.table = MachineTable("door", door, door.Limits(), clock, timers, self.recorder, self._perform)
        self.recorder.live = self.table.live
        self.clock = clock

    def _perform(self, key: Hashable, effects: tuple[Effect, ...]) -> None:
        """Nothing to do."""

    def run(self, rounds: int) -> None:
        """Doors that stay open over the change of files, and names that do not compress."""
        for n in range(rounds):
            self.table.feed(n % 700, door.Opened(token_hex(16)))
            self.table.feed(n % 700, door.Passed("somebody"))
            if n % 3 == 0:
                self.table.feed(n % 500, door.BrickedUp())
            if n % 100 == 99:
                self.clock.advance(0.4)
                self.recorder.flush()
        self.recorder.close()

    def files(self) -> list[Path]:
        """The newest first."""
        return sorted(self.path.parent.glob(f"{self.path.name}*"))


TOYS = {"door": MachineSpec(door)}


def test_a_full_file_is_followed_by_another_and_each_replays_alone(tmp_path: Path) -> None:
    rotating = Rotating(tmp_path / "trace", files=100)
    rotating.run(10_000)
    files = rotating.files()
    assert len(files) > 5
    numbers, steps = set(), 0
    for path in files:
        with path.open("rb") as file:
            reader = TraceReader(file.read)
            records = list(reader)
        assert replay(records, TOYS) is None
        numbers.add(reader.header.file)
        has_states = any(isinstance(record, StateRecord) for record in records)
        assert has_states == (reader.header.file > 0)
        steps += sum(isinstance(record, StepRecord) for record in records)
    assert numbers == set(range(len(files)))
    assert steps == rotating.recorder.steps


def test_only_so_many_files_are_kept_and_those_of_an_earlier_recording_go(tmp_path: Path) -> None:
    for _ in range(2):
        rotating = Rotating(tmp_path / "trace", files=3)
        rotating.run(10_000)
        assert [path.name for path in rotating.files()] == ["trace", "trace.1", "trace.2"]
        newest = []
        for path in rotating.files():
            assert path.stat().st_size < 40_000
            with path.open("rb") as file:
                newest.append(TraceReader(file.read).header.file)
        assert newest == [newest[0], newest[0] - 1, newest[0] - 2]
    Rotating(tmp_path / "trace", files=3).recorder.close()
    assert [path.name for path in rotating.files()] == ["trace"]


def test_without_the_states_a_file_that_goes_on_does_not_replay(tmp_path: Path) -> None:
    rotating = Rotating(tmp_path / "trace", files=100)
    rotating.run(10_000)
    with rotating.path.open("rb") as file:
        records = [record for record in TraceReader(file.read) if not isinstance(record, StateRecord)]
    assert replay(records, TOYS) is not None
