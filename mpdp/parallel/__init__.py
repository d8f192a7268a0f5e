"""Where arithmetic and messages meet: one index space, its buffers, and their reduction over ranks.

``layout`` maps names to ranges, ``chunks`` cuts them, ``arena`` holds the buffers, ``reducer`` carries gradients,
``record`` is what ranks agree on in each step, ``replica`` binds a model to its arenas, ``data_parallel`` runs updates.
"""

from .arena import GradientArena
from .data_parallel import DataParallel
from .layout import Layout
from .reducer import Reducer

__all__ = ["DataParallel", "GradientArena", "Layout", "Reducer"]
