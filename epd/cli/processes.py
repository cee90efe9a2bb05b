"""Real nodes as child processes, for the demo: started, waited for until ready, ended on every path."""

import contextlib
import json
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from epd.protocol.errors import TimedOut

_READY_S: Final = 60.0
_END_S: Final = 30.0


@contextlib.contextmanager
def node_process(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """An `epd-node` with these arguments; its ready line. It is drained at the end, killed if it must be.

    Raises `TimedOut` if it does not become ready; its own words are on standard error.
    """
    command = [sys.executable, "-m", "epd.cli.node", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        yield _wait_ready(process)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _wait_ready(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(_READY_S) else b""
    if not line:
        raise TimedOut(f"a node did not become ready within {_READY_S} s", phase="start")
    ready: dict[str, Any] = json.loads(line)
    return ready
