"""A peer whose memory cannot be read any more, in whatever way, costs its own attempts and nothing else."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bad_wire import MODES, BadWire, Mode

from epd.config import load_config
from epd.dataplane.mooncake import MooncakePlane
from epd.memory.tensors import host_bytes
from epd.node import EncoderNode, PrefillNode
from epd.request import Delivery, EmbeddingRequest
from epd.testing.residue import empty
from epd.testing.synthetic import PatternWorker, SyntheticEncoder, pattern, synthetic_item

MIB = 1024 * 1024
SIZES = (64 * 1024, MIB, 4 * MIB)
READ_S = 0.5


@contextlib.asynccontextmanager
async def encoder(plane: MooncakePlane) -> AsyncIterator[EncoderNode]:
    config = load_config(
        None, {"role": "encoder", "data_plane": "mooncake", "timeouts.dedup_retention_s": 0.2}
    )
    node = EncoderNode(
        config, encoder=SyntheticEncoder(), worker=PatternWorker(), open_plane_with=lambda: plane
    )
    async with node:
        yield node


@contextlib.asynccontextmanager
async def nodes() -> AsyncIterator[tuple[BadWire, EncoderNode, EncoderNode, PrefillNode]]:
    """Two encoders, one of them behind a wire that can go bad, and a prefill node."""
    behind = MooncakePlane("127.0.0.1")
    with BadWire(behind.segment) as wire:
        behind.segment = wire.segment
        async with encoder(behind) as bad, encoder(MooncakePlane("127.0.0.1")) as good:
            settings: dict[str, Any] = {
                "role": "prefill",
                "data_plane": "mooncake",
                "encoders": [bad.listen, good.listen],
                "timeouts.read_base_s": READ_S,
            }
            async with PrefillNode(load_config(None, settings)) as prefill:
                yield wire, bad, good, prefill


async def ask(prefill: PrefillNode, name: str, nbytes: int) -> Delivery:
    return await prefill.encode(EmbeddingRequest(name, [synthetic_item(nbytes)], 30.0))


def check(delivery: Delivery, nbytes: int) -> None:
    assert bytes(host_bytes(delivery.views[0])) == pattern(synthetic_item(nbytes).media, nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_a_bad_wire_costs_its_own_attempts_only(mode: Mode) -> None:
    async with nodes() as (wire, bad, good, prefill):
        for number in range(12):  # both encoders are read while all is well
            delivery = await ask(prefill, f"well-{number}", 65_536 + 4 * number)
            check(delivery, 65_536 + 4 * number)
            delivery.release()
        assert bad.dedup.forwards and good.dedup.forwards
        wire.go(mode)
        before = bad.dedup.forwards
        number = 0
        while bad.dedup.forwards < before + len(SIZES):  # until so many had to be read through it
            nbytes = SIZES[number % len(SIZES)] + 4 * number
            delivery = await ask(prefill, f"bad-{number}", nbytes)
            check(delivery, nbytes)
            delivery.release()
            number += 1
        outcomes = prefill.transfer.outcomes
        assert set(outcomes) <= {"ok", "failed", "aborted", "seal_mismatch"}
        assert sum(outcomes.values()) > outcomes["ok"]  # some attempts did fail
        if mode in ("stalled", "dropped", "slow"):
            assert outcomes["aborted"] > 0
        await empty(prefill.listen)  # every read has ended, nothing is quarantined
        await empty(good.listen)
