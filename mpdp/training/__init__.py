"""Training: the loop that people expect around ``parallel``, its files and its callbacks.

``trainer`` is the public class, ``loop`` the loop of ``fit``, ``step`` one update, ``evaluation`` exact metrics,
``checkpoint`` the format on disk, ``resuming`` what goes into it, ``run_folder`` what else a run leaves there.
"""

from .callbacks import Callback, EarlyStopping
from .run_folder import new_run_dir
from .trainer import History, Trainer
from .writers import CsvWriter, TensorBoardWriter

__all__ = [
    "Callback",
    "CsvWriter",
    "EarlyStopping",
    "History",
    "TensorBoardWriter",
    "Trainer",
    "new_run_dir",
]
