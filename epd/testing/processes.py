"""Real nodes as child processes: started, waited for, stopped in every way a machine may stop them.

What they hold is counted from outside, in /proc: nothing here trusts the node's own word.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

START_S: Final = 60.0
_END_S: Final = 40.0


class Held(NamedTuple):
    """What a process holds, counted from outside."""

    descriptors: int
    threads: int
    shared_mappings: int


def held_by(pid: int) -> Held:
    """Descriptors, threads and shared mappings of a process, read from /proc."""
    proc = Path(f"/proc/{pid}")
    shared = sum("memfd:" in line for line in (proc / "maps").read_text().splitlines())
    return Held(len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir())), shared)


class NodeProcess:
    """A running node. `ready` is its ready line."""

    def __init__(self, process: "subprocess.Popen[bytes]", ready: Mapping[str, Any]) -> None:
        self.process = process
        self.ready = ready

    @property
    def listen(self) -> str:
        return str(self.ready["listen"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for its death."""
        self.process.kill()
        self.process.wait(_END_S)

    def stop(self) -> None:
        """SIGSTOP; returns when the kernel says that it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM; its exit status."""
        self.process.terminate()
        return self.process.wait(_END_S)

    def held(self) -> Held:
        return held_by(self.pid)


@contextlib.contextmanager
def node_process(settings: Mapping[str, Any], stderr: int | None = None) -> Iterator[NodeProcess]:
    """`epd-node` with these settings (dotted keys). Killed at the end if it still runs."""
    with toml_file(settings) as path:
        command = [sys.executable, "-m", "epd.cli.node", "--config", path]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)
        with _ended(process):
            assert process.stdout is not None
            with process.stdout:
                yield NodeProcess(process, _first_line(process))


class HeldProcess(NodeProcess):
    """An encoder of `epd.testing.held_node`: its hold points by name."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", ready: Mapping[str, Any], control: socket.socket
    ) -> None:
        super().__init__(process, ready)
        self._control = control
        self._heard: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def hold(self, name: str) -> None:
        """Whoever reaches `name` from now on waits there."""
        self._control.send(json.dumps({"hold": name}).encode())
        self._wait({"held": name})

    def release(self, name: str) -> None:
        self._control.send(json.dumps({"release": name}).encode())

    def wait_reached(self, name: str) -> None:
        """Until somebody waits at `name`; each arrival counts once. Raises `TimeoutError`."""
        self._wait({"reached": name})

    def free_early(self) -> int:
        """Make it misbehave: free and reuse every slot that somebody reads. How many there were."""
        self._control.send(json.dumps({"free": True}).encode())
        return int(self._wait_key("freed")["freed"])

    def reuse_early(self) -> int:
        """Make it misbehave: overwrite every staged result and its seal. How many there were."""
        self._control.send(json.dumps({"reuse": True}).encode())
        return int(self._wait_key("reused")["reused"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._control.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._control.recv(65536):
                with self._news:
                    self._heard.append(json.loads(data))
                    self._news.notify_all()

    def _wait(self, message: dict[str, Any]) -> None:
        with self._news:
            if not self._news.wait_for(lambda: message in self._heard, START_S):
                raise TimeoutError(f"{message} did not come within {START_S} s; heard {self._heard}")
            self._heard.remove(message)

    def _wait_key(self, key: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next((heard for heard in self._heard if key in heard), None)

        with self._news:
            if not self._news.wait_for(lambda: found() is not None, START_S):
                raise TimeoutError(f"{key} did not come within {START_S} s; heard {self._heard}")
            message = found()
            assert message is not None
            self._heard.remove(message)
            return message


@contextlib.contextmanager
def held_encoder(
    settings: Mapping[str, Any], *, encoder: str = "", stderr: int | None = None
) -> Iterator[HeldProcess]:
    """An encoder process with hold points. `encoder` `synthetic` needs no model and no media."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, toml_file({"role": "encoder"} | dict(settings)) as path:
        command = [sys.executable, "-m", "epd.testing.held_node", str(theirs.fileno()), path, encoder]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=(theirs.fileno(),)
        )
        theirs.close()
        with _ended(process):
            ours.settimeout(START_S)
            ready = json.loads(ours.recv(65536))["ready"]
            ours.settimeout(None)
            held = HeldProcess(process, ready, ours)
            try:
                yield held
            finally:
                held.close()


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(_END_S)


@contextlib.contextmanager
def toml_file(settings: Mapping[str, Any]) -> Iterator[str]:
    """A settings file for dotted keys; JSON's numbers, strings and lists are TOML's."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        file.flush()
        yield file.name


def _first_line(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(START_S) else b""
    if not line:
        raise TimeoutError(f"the node did not become ready within {START_S} s")
    ready: dict[str, Any] = json.loads(line)
    return ready
