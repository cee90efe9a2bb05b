"""A prefill node reads nothing that the peer which names it has not announced."""

import asyncio
import secrets

import pytest
from node_pairs import empty
from test_hostile import Hostile
from test_nodes import encoder_node, prefill_node, request

from epd.protocol.errors import EpdError
from epd.protocol.ids import LeaseId, RegionId, Seal, SessionId
from epd.protocol.messages import (
    AnyMessage,
    BufferGrant,
    EmbeddingMetadata,
    EmbeddingSpec,
    EncodeRequest,
    ForwardDone,
    ReadyItem,
    Regions,
    Source,
)
from epd.testing.synthetic import synthetic_item


@pytest.mark.parametrize("plane", ["shm", "mooncake"])
@pytest.mark.parametrize(
    ("region", "offset"), [(0, 64 * 1024 * 1024 - 64), (1, 0), (7, 0), (0, 2**62)], ids=str
)
async def test_a_source_that_its_peer_never_announced_is_not_read(
    plane: str, region: int, offset: int
) -> None:
    """Region 1 is there, of the same process; this peer announced region 0 alone."""
    spec = EmbeddingSpec(1024, 1, "float32")
    async with encoder_node(data_plane=plane) as owner:
        hostile = Hostile("encoder", owner.plane.segment, owner.plane.name)
        address = hostile.endpoint.bind("tcp://127.0.0.1:0")
        asked: list[EncodeRequest] = []

        def answer(session: SessionId, message: AnyMessage) -> None:
            if isinstance(message, EncodeRequest):
                asked.append(message)
                where = (message.transfer, message.part, message.attempt)
                hostile.endpoint.send(session, EmbeddingMetadata(*where, (spec,)))
            elif isinstance(message, BufferGrant):
                where = (message.transfer, message.part, message.attempt)
                source = Source(RegionId(region), offset, spec.nbytes, Seal(1))
                done = ForwardDone(*where, LeaseId(message.grant), 0, (ReadyItem(source, spec),), True)
                hostile.endpoint.send(session, done)

        hostile.answer = answer
        async with prefill_node(address, data_plane=plane) as prefill:
            session = await hostile.sessions.get()
            hostile.endpoint.send(session, Regions(owner.plane.export()[:1]))
            with pytest.raises(EpdError) as caught:
                async with asyncio.timeout(20):
                    await prefill.encode(request(secrets.token_hex(4), synthetic_item(4096), deadline_s=10.0))
            assert caught.value.code == "source_invalid"
            assert asked
            await empty(prefill.listen)
        await hostile.endpoint.close_all(0.0)
