"""The owner of staging memory, as a process of its own: `plane_source.py PLANE REGIONS REGION_NBYTES`.

Says where it is as one line of JSON, then obeys one line of JSON at a time, until its input ends.
"""

import hashlib
import json
import sys

from epd.dataplane.base import DataPlane
from epd.dataplane.select import Choice, open_plane


def main(choice: Choice, count: int, region_nbytes: int) -> None:
    plane: DataPlane = open_plane(choice, "127.0.0.1")
    regions = plane.allocate(count, region_nbytes, exported=True)
    for region in regions:
        region.view[:] = pattern(region.region, region_nbytes)
    exported = [[d.region, d.base, d.nbytes] for d in plane.export()]
    say({"name": plane.name, "segment": plane.segment, "regions": exported})
    for line in sys.stdin:
        order = json.loads(line)
        view = regions[order["region"]].view
        match order["do"]:
            case "write":
                data = bytes.fromhex(order["data"])
                view[order["offset"] : order["offset"] + len(data)] = data
                say({})
            case "digest":
                say({"digest": hashlib.sha256(view).hexdigest()})
    plane.close()


def pattern(region: int, nbytes: int) -> bytes:
    """Bytes that differ between regions and between places (the period is a prime)."""
    period = bytes((at * 7 + region * 31) % 251 for at in range(251))
    return (period * (nbytes // 251 + 1))[:nbytes]


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))  # type: ignore[arg-type]  # checked by open_plane
