"""Data: datasets, the order of samples, shares of ranks, and the loader.

Everything that decides which rank reads which sample is arithmetic on a few numbers (length, seed,
epoch, rank, size): no message carries data or an order. Read next: ``order``, ``datasets``, ``loader``.
"""

from .datasets import ArrayDataset, TokenDataset
from .images import ImageFolder
from .loader import Loader, MicroBatch
from .order import Order, Share, batches, micro_batches, share
from .reading import Draw, check_dataset, map_arrays, split_batch, stack, take
from .streams import Stream, StreamLoader, as_dataset
from .transforms import Select, Transform
from .workers import Workers

__all__ = [
    "ArrayDataset",
    "Draw",
    "ImageFolder",
    "Loader",
    "MicroBatch",
    "Order",
    "Select",
    "Share",
    "Stream",
    "StreamLoader",
    "TokenDataset",
    "Transform",
    "Workers",
    "as_dataset",
    "batches",
    "check_dataset",
    "map_arrays",
    "micro_batches",
    "share",
    "split_batch",
    "stack",
    "take",
]
