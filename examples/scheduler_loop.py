"""The prefill side inside a synchronous scheduler loop: submit, poll each step, use, release.

.venv/bin/epd-node --role encoder --listen tcp://127.0.0.1:7101 &
.venv/bin/python examples/scheduler_loop.py tcp://127.0.0.1:7101 photo.jpg other.png
"""

import sys
import time

from epd import EmbeddingReceiver, EmbeddingRequest, ImageItem
from epd.config import load_config


def main() -> None:
    encoder, *pictures = sys.argv[1:]
    config = load_config(None, {"role": "prefill", "encoders": [encoder]})
    with EmbeddingReceiver.start(config) as receiver:
        waiting = set()
        for number, picture in enumerate(pictures):
            request_id = f"req-{number}"
            receiver.submit(EmbeddingRequest(request_id, [ImageItem.from_file(picture)], deadline_s=30))
            waiting.add(request_id)
        while waiting:
            for delivery in receiver.poll():  # never blocks
                waiting.discard(delivery.request_id)
                if delivery.error is not None:
                    sys.stdout.write(f"{delivery.request_id}: {delivery.error.code}: {delivery.error}\n")
                    continue
                for tensor in delivery.tensors:  # a view into the pool: use it before release
                    sys.stdout.write(f"{delivery.request_id}: {tuple(tensor.shape)} {tensor.dtype}\n")
                delivery.release()
            time.sleep(0.001)  # a scheduler would run its next step here


if __name__ == "__main__":
    main()
