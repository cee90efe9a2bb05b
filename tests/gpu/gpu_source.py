"""A process that exports memory of a GPU and reuses it without pause, honestly or not.

    python gpu_source.py REGION_NBYTES NBYTES KIND

It rewrites one slot again and again: the seal is changed (even: being rewritten), the slot is filled
on a stream, waited for, and sealed with the next odd number, which is also in every word of the slot.
KIND `honest` does it in that order; `late` changes the seal only after the slot, as a broken encoder
would; `still` fills it once. Ends with standard input.
"""

import json
import random
import sys
import threading

import torch

from epd.dataplane.mooncake_cuda import MooncakeCudaPlane
from epd.memory.region import Region
from epd.memory.tensors import as_tensor
from epd.protocol.ids import Seal
from epd.protocol.sources import seal_offset


def rewrite(region: Region, nbytes: int, kind: str, end: threading.Event) -> None:
    words = as_tensor(region.part(0, nbytes)).view(torch.int32)
    at, number = seal_offset(nbytes), 1
    while not end.is_set():
        if kind == "honest":
            region.write_seal(at, Seal(number + 1))
        number += 2
        words.fill_(number)
        torch.cuda.current_stream().synchronize()
        if kind == "late":
            end.wait(1e-3)
        region.write_seal(at, Seal(number))
        if kind == "still":
            return
        end.wait(random.uniform(0, 400e-6))


def main() -> None:
    region_nbytes, nbytes, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    plane = MooncakeCudaPlane("127.0.0.1", "cuda:0")
    region = plane.allocate(1, region_nbytes, exported=True)[0]
    end = threading.Event()
    writer = threading.Thread(target=rewrite, args=(region, nbytes, kind, end))
    writer.start()
    if kind == "still":
        writer.join()
    (shown,) = plane.export()
    hello = {"segment": plane.segment, "regions": [[int(shown.region), shown.base, shown.nbytes]]}
    sys.stdout.write(json.dumps(hello) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    end.set()
    writer.join()
    plane.close()


if __name__ == "__main__":
    main()
