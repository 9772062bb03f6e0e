"""headrace carries training data to PyTorch: repeatable, resumable, within a memory budget."""

import sys
import warnings
from typing import TYPE_CHECKING

from headrace.arguments import OLD_NAMES, explain_missing
from headrace.collate import (
    Batch,
    Padded,
    TextCollator,
    VisionCollator,
    collators,
    document_mask,
    list_collate,
    pad_collate,
    variable_length_collate,
)
from headrace.datasets import (
    BaseDataset,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
    open_dataset,
    write_index,
)
from headrace.errors import (
    AccessError,
    BudgetError,
    CollateError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceError,
    HeadraceWarning,
    MissingNameError,
    RemoteError,
    SampleError,
    StateError,
    TargetExistsError,
    WorkerError,
    WriteError,
)
from headrace.io.remote.options import RemoteOptions
from headrace.loader import (
    DataLoaderConfig,
    DataModule,
    DataModuleProtocol,
    Loader,
    MultiDataLoader,
    create_dataloader,
    get_epoch_length,
    get_train_dataloader_steps,
    get_val_dataloader_steps,
    move_to_device,
    split_workers,
)
from headrace.memory.budget import MemoryBudget
from headrace.memory.lru import LRUCache
from headrace.memory.per_process import PerProcess as WorkerHandle
from headrace.modes import LoadingMode
from headrace.monitor.memory import MemoryMonitor
from headrace.order import EpochOrder, OrderSampler, RankBatches, seed_everything
from headrace.packing import pack, verify
from headrace.profiling import find_max_batch_size, suggest_num_workers
from headrace.storage.source import Source
from headrace.storage.tar.source import TarSource
from headrace.tokenizer import CharTokenizer

__version__ = "0.1.0"
__all__ = [
    "AccessError",
    "BaseDataset",
    "Batch",
    "BudgetError",
    "CharTokenizer",
    "CollateError",
    "ConfigError",
    "DataLoaderConfig",
    "DataModule",
    "DataModuleProtocol",
    "DataNotFoundError",
    "EpochOrder",
    "FileChangedError",
    "FormatError",
    "HDF5Dataset",
    "HeadraceError",
    "HeadraceWarning",
    "ImageDataset",
    "LRUCache",
    "Loader",
    "LoadingMode",
    "MemoryBudget",
    "MemoryEfficientDataset",
    "MemoryMonitor",
    "MissingNameError",
    "MultiDataLoader",
    "OrderSampler",
    "Padded",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RankBatches",
    "RemoteError",
    "RemoteOptions",
    "SampleError",
    "Source",
    "StateError",
    "StreamingDataset",
    "TarSource",
    "TargetExistsError",
    "TextCollator",
    "TextDataset",
    "VisionCollator",
    "WorkerError",
    "WorkerHandle",
    "WriteError",
    "ZarrDataset",
    "collators",
    "create_dataloader",
    "document_mask",
    "find_max_batch_size",
    "get_epoch_length",
    "get_train_dataloader_steps",
    "get_val_dataloader_steps",
    "list_collate",
    "move_to_device",
    "open_dataset",
    "pack",
    "pad_collate",
    "seed_everything",
    "split_workers",
    "suggest_num_workers",
    "variable_length_collate",
    "verify",
    "write_index",
]  # fmt: skip

if not TYPE_CHECKING:  # a checker is to find a name that is not there by itself

    def __getattr__(name):
        """Says which name to use; of older ones in ``from headrace import ...`` too, which drops the message of an AttributeError."""
        if name == "ReplacedError":
            warnings.warn("headrace.ReplacedError is deprecated: use headrace.FileChangedError", DeprecationWarning, stacklevel=2)
            return FileChangedError
        is_import = sys._getframe(1).f_globals.get("__name__") in ("importlib._bootstrap", "_frozen_importlib")
        error = ImportError if is_import and name in OLD_NAMES else AttributeError
        raise error(explain_missing(name, __all__))
