"""Opens Mooncake's plane where only a few more files can be opened; one line for each number of them."""

import contextlib
import os
import resource
import sys

from mooncake.engine import TransferEngine  # noqa: F401 - its libraries are files, too

from epd.dataplane.mooncake import MooncakePlane
from epd.protocol.errors import DataPlaneError

_LIMIT = 64
_FREE = range(1, 7)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, _LIMIT))
    for free in _FREE:
        taken: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in taken[-free:]:
            os.close(descriptor)
        said = "opened"
        try:
            MooncakePlane("127.0.0.1").close()
        except DataPlaneError as error:
            said = error.message
        for descriptor in taken[:-free]:
            os.close(descriptor)
        sys.stdout.write(f"{free}: {said}\n")


if __name__ == "__main__":
    main()
