"""The content key of a job: equal keys share one forward."""

from typing import NamedTuple

from epd.protocol.messages import DType, Item, Probe


class JobKey(NamedTuple):
    """Hash of the media, the probe that was announced, and the dtype; one model per node."""

    sha256: str
    kind: str
    width: int
    height: int
    frames: int
    samples: int
    dtype: str


def job_key(item: Item, dtype: DType) -> JobKey:
    probe: Probe = item.probe
    return JobKey(
        item.sha256.hex(), probe.kind, probe.width, probe.height, probe.frames, probe.samples, dtype
    )
