"""Another prefill node, for the encoders of a chaos run: `python -m epd.chaos.neighbour PLANE TOML`.

It asks for small embeddings, four at a time, until it is killed, which is what it is for; or until its
standard input ends, so that it never outlives the run.
"""

import asyncio
import itertools
import logging
import sys

import uvloop

from epd.config import load_config
from epd.node import PrefillNode
from epd.observe.log import configure_logging
from epd.protocol.errors import EpdError
from epd.request import EmbeddingRequest
from epd.testing.synthetic import synthetic_item

CONCURRENCY = 4
_PAUSE_S = 0.02


async def serve(toml: str) -> None:
    async with PrefillNode(load_config(toml, {})) as node:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        numbers = itertools.count(1)

        async def work() -> None:
            while True:
                number = next(numbers)
                items = [synthetic_item(4096 * (1 + number % 50))]
                try:
                    delivery = await node.encode(EmbeddingRequest(f"neighbour-{number}", items, 20.0))
                    await asyncio.sleep(_PAUSE_S)
                    delivery.release()
                except EpdError:
                    await asyncio.sleep(_PAUSE_S)

        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        async with asyncio.TaskGroup() as workers:
            tasks = [workers.create_task(work()) for _ in range(CONCURRENCY)]
            await ended
            for task in tasks:
                task.cancel()
        await node.drain(5.0)


def main() -> None:
    configure_logging(level=logging.ERROR)
    uvloop.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
