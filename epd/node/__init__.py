"""Whole nodes in the caller's event loop: `PrefillNode` and `EncoderNode`.

A node owns everything it makes: data plane, pool, endpoint, actors, worker, recorder. Entering the
context builds it, leaving it ends it, on every path.
"""

from epd.node.encoder import EncoderNode
from epd.node.prefill import PrefillNode

__all__ = ["EncoderNode", "PrefillNode"]
