"""Values to and from engines that still pickle (SGLang's frames); our own wire has no pickles.

`safe_pickle_loads` reads their pickles without unpickling: it interprets a fixed set of opcodes and
builds plain values and torch tensors itself. Nothing is imported or called because a pickle names it.
`normalize_aux_value` turns what we would send them into types that such a reader takes.

Nothing else of `epd.protocol` imports this package: it is the only one there that knows torch and numpy.
"""

from epd.protocol.safe_pickle.normalize import normalize_aux_value
from epd.protocol.safe_pickle.reader import safe_pickle_loads
from epd.protocol.safe_pickle.values import PickleLimits, PickleRefused

__all__ = ["PickleLimits", "PickleRefused", "normalize_aux_value", "safe_pickle_loads"]
