"""Structured logs: how commands set them up, and the one line per ended transfer.

The library only ever calls `structlog.get_logger()`; who embeds it keeps their own set-up.
"""

import contextlib
import logging
import os
import select
import threading
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "json", "console"]

_STDERR_FD: Final = 2

_log = structlog.get_logger()


class LogWriter:
    """Writes whole lines to a descriptor, and never stops or fails the caller.

    A line that cannot be written whole at once is counted in `lost`, its rest dropped: the reader is
    gone, the disk is full, or a pipe's reader does not read (the loop must not wait for it).
    """

    def __init__(self, fd: int = _STDERR_FD) -> None:
        self.lost = 0
        self._fd = fd
        self._torn = False
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace")
        with self._lock:
            if self._torn:
                data = b"\n" + data
            rest = self._write_what_fits(data)
            if rest:
                self.lost += 1
            if len(rest) < len(data):
                self._torn = bool(rest)

    def _write_what_fits(self, data: bytes) -> bytes:
        # What polls writable takes a page without waiting, so never more than that at a time.
        with contextlib.suppress(OSError):  # the caller counts what is left
            while data and self._poll.poll(0):
                data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]
        return data

    def flush(self) -> None:
        """Nothing is held back."""


class _StructlogHandler(logging.Handler):
    """Hands the standard library's records (asyncio's complaints) on, so that all lines look alike."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )


def configure_logging(
    log_format: LogFormat = "auto", fd: int = _STDERR_FD, level: int = logging.INFO
) -> LogWriter:
    """Log to `fd`, from `level` on; for commands only. `auto` is `console` on a terminal, else `json`."""
    writer = LogWriter(fd)
    console = log_format == "console" or (log_format == "auto" and os.isatty(fd))
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendered: list[Processor]
    if console:
        rendered = [structlog.dev.ConsoleRenderer(colors=os.isatty(fd))]
    else:
        rendered = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=writer),  # type: ignore[arg-type]  # write and flush
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_StructlogHandler()]
    root.setLevel(logging.WARNING)
    return writer


def log_info(event: str, **facts: object) -> None:
    """Log at level info; for libraries: unconfigured, structlog would print it to standard output."""
    if structlog.is_configured():
        _log.info(event, **facts)


def phase_durations(phases_s: Mapping[str, float], ended_s: float) -> dict[str, float]:
    """Seconds spent in each phase, from the seconds at which each was entered, in that order."""
    entered = [*phases_s.values(), ended_s]
    return {
        name: after - entered[n] for n, (name, after) in enumerate(zip(phases_s, entered[1:], strict=True))
    }


def log_transfer_ended(
    *,
    request: str,
    transfer: int,
    peers: Sequence[object],
    outcome: str,
    started_s: float,
    phases_s: Mapping[str, float],
    ended_s: float,
) -> None:
    """The one line about a transfer: `outcome` is `freed` or an error code.

    `phases_s` has the second at which each state was entered, on the clock of `ended_s`; the line
    has the seconds spent in each.
    """
    level = logging.INFO if outcome == "freed" else logging.WARNING
    silent = level < logging.WARNING and not structlog.is_configured()
    if silent or not _log.is_enabled_for(level):  # unconfigured, structlog prints to standard output
        return
    durations = {
        f"{name.replace('-', '_')}_s": round(seconds, 6)
        for name, seconds in phase_durations(phases_s, ended_s).items()
        if name not in {outcome, "failed"}
    }
    _log.log(
        level,
        "transfer ended",
        request=request,
        transfer=transfer,
        peers=[str(peer) for peer in peers],
        outcome=outcome,
        total_s=round(ended_s - started_s, 6),
        **durations,
    )
