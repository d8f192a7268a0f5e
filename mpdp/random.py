"""The counter-based generator that the library itself draws from, for programs that need the same numbers.

See :mod:`mpdp.kernels.random`; these are its public names.
"""

from .kernels.random import bits, derive_key, dropout_mask, normal, philox4x32, uniform

__all__ = ["bits", "derive_key", "dropout_mask", "normal", "philox4x32", "uniform"]
