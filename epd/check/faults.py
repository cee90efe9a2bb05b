"""The kinds of fault that a configuration may allow; each is one move of `moves.py` or `world.py`."""

from typing import Final

CHANNEL: Final = frozenset({"cut", "crash", "crash-prefill"})
HOSTILE: Final = frozenset({"drop", "repeat"})
TIMEOUTS: Final = frozenset({"timeout", "read-timeout", "warning", "part-deadline", "job-timeout"})
READS: Final = frozenset({"read-fails", "stick-read"})
ENCODER: Final = frozenset({"evict", "drain", "bad-media", "forward-fails", "stick-forward"})
RANKS: Final = frozenset({"lose-rank"})
SESSIONS: Final = frozenset({"close", "probe", "beat", "silence", "reorder", "garble", "refuse"})
CONSUMER: Final = frozenset({"cancel"})
ALL: Final = CHANNEL | HOSTILE | TIMEOUTS | READS | ENCODER | CONSUMER | RANKS | SESSIONS
