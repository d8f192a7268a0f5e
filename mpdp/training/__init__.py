"""Training: the loop that people expect around ``parallel``, its files and its callbacks.

``trainer`` is the public class, ``loop`` the loop of ``fit``, ``step`` one update, ``evaluation`` exact metrics,
``checkpoint`` the format on disk, ``snapshot`` what goes into it, ``saving`` and ``resuming`` the two ways,
``run_folder`` what else a run leaves there, ``run_lock`` what keeps other jobs out, ``loading`` models without a
trainer.
"""

from .callbacks import Callback, EarlyStopping
from .loading import best_checkpoint, load_model
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
    "best_checkpoint",
    "load_model",
    "new_run_dir",
]
