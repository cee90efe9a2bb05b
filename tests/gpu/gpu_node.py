"""An encoder node in a process of its own: `python gpu_node.py TOML`.

Prints its ready line. Each line on standard input is an order, answered by one line of JSON:
`profile` (start), `copies` (stop: how often each kind of copy was made), `memory`.
"""

import asyncio
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import uvloop

from epd.config import load_config
from epd.node import EncoderNode
from epd.observe.log import configure_logging


class Copies:
    """Counts the copies that this process's GPU makes meanwhile, by kind."""

    def start(self) -> None:
        self._profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def stop(self) -> dict[str, int]:
        torch.cuda.synchronize()
        self._profiler.stop()
        return dict(Counter(e.name for e in self._profiler.events() if e.name.startswith("Mem")))


def resources() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "device_used_nbytes": total - free,
        "torch_reserved_nbytes": torch.cuda.memory_reserved(),
        "rss_nbytes": int(rss.split()[1]) * 1024,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


async def serve(toml: str) -> None:
    loop = asyncio.get_running_loop()
    copies = Copies()
    async with EncoderNode(load_config(toml, {})) as node:

        def say(answer: dict[str, Any]) -> None:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

        def obey() -> None:
            for line in sys.stdin:
                match line.strip():
                    case "profile":
                        copies.start()
                        say({})
                    case "copies":
                        say(copies.stop())
                    case "memory":
                        say(resources() | {"registrations": node.plane.registrations()})

        say({"listen": node.listen, "data_plane": node.data_plane, "device": node.plane.device})
        await loop.run_in_executor(None, obey)


if __name__ == "__main__":
    configure_logging("json", level=logging.WARNING)
    uvloop.run(serve(sys.argv[1]))
