"""The prefill side inside an event loop of one's own.

.venv/bin/epd-node --role encoder --listen tcp://127.0.0.1:7101 &
.venv/bin/python examples/own_loop.py tcp://127.0.0.1:7101 photo.jpg other.png
"""

import asyncio
import sys

from epd import EmbeddingRequest, ImageItem, PrefillNode
from epd.config import load_config


async def main() -> None:
    encoder, *pictures = sys.argv[1:]
    config = load_config(None, {"role": "prefill", "encoders": [encoder]})
    items = [ImageItem.from_file(picture) for picture in pictures]
    async with PrefillNode(config) as node:
        delivery = await node.encode(EmbeddingRequest("all-pictures", items, deadline_s=30))
        try:
            for picture, tensor in zip(pictures, delivery.tensors, strict=True):  # views into the pool
                sys.stdout.write(f"{picture}: {tuple(tensor.shape)} {tensor.dtype}\n")
        finally:
            delivery.release()


if __name__ == "__main__":
    asyncio.run(main())
