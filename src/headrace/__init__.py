"""headrace carries training data to PyTorch: repeatable, resumable, within a memory budget.

Names are imported when they are first used, so that the `headrace` command begins without torch.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from headrace.collate import (
        Batch,
        DetectionCollator,
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
        EpisodeDataset,
        HDF5Dataset,
        ImageDataset,
        MemoryEfficientDataset,
        RandomHorizontalFlip,
        RandomResizedCrop,
        SparseDataset,
        SparseRow,
        SparseRows,
        Statistics,
        StreamingDataset,
        TableDataset,
        TextDataset,
        ZarrDataset,
        open_dataset,
        sparse_collate,
        write_index,
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
    from headrace.monitor.hooks import BatchTimes, SlowStage
    from headrace.monitor.loading import LoadingMonitor
    from headrace.monitor.memory import MemoryMonitor
    from headrace.order import EpochOrder, OrderSampler, RankBatches, seed_everything
    from headrace.packing import pack, verify
    from headrace.profiling import (
        Profile,
        find_max_batch_size,
        profile_dataloader,
        suggest_num_workers,
    )
    from headrace.storage.read_rows import read_rows
    from headrace.storage.source import Source
    from headrace.storage.tar.source import TarSource
    from headrace.tokenizer import CharTokenizer

__version__ = "0.1.0"
__all__ = [
    "AccessError",
    "BaseDataset",
    "Batch",
    "BatchTimes",
    "BudgetError",
    "CharTokenizer",
    "CollateError",
    "ConfigError",
    "DataLoaderConfig",
    "DataModule",
    "DataModuleProtocol",
    "DataNotFoundError",
    "DetectionCollator",
    "EpisodeDataset",
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
    "LoadingMonitor",
    "MemoryBudget",
    "MemoryEfficientDataset",
    "MemoryMonitor",
    "MissingNameError",
    "MultiDataLoader",
    "OrderSampler",
    "Padded",
    "Profile",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RankBatches",
    "RemoteError",
    "RemoteOptions",
    "SampleError",
    "SlowStage",
    "Source",
    "SparseDataset",
    "SparseRow",
    "SparseRows",
    "StateError",
    "Statistics",
    "StreamingDataset",
    "TableDataset",
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
    "profile_dataloader",
    "read_rows",
    "seed_everything",
    "sparse_collate",
    "split_workers",
    "suggest_num_workers",
    "variable_length_collate",
    "verify",
    "write_index",
]  # fmt: skip

_MODULES = {
    "collate": (
        "Batch",
        "DetectionCollator",
        "Padded",
        "TextCollator",
        "VisionCollator",
        "collators",
        "document_mask",
        "list_collate",
        "pad_collate",
        "variable_length_collate",
    ),
    "datasets": (
        "BaseDataset",
        "EpisodeDataset",
        "HDF5Dataset",
        "ImageDataset",
        "MemoryEfficientDataset",
        "RandomHorizontalFlip",
        "RandomResizedCrop",
        "SparseDataset",
        "SparseRow",
        "SparseRows",
        "Statistics",
        "StreamingDataset",
        "TableDataset",
        "TextDataset",
        "ZarrDataset",
        "open_dataset",
        "sparse_collate",
        "write_index",
    ),
    "io.remote.options": ("RemoteOptions",),
    "loader": (
        "DataLoaderConfig",
        "DataModule",
        "DataModuleProtocol",
        "Loader",
        "MultiDataLoader",
        "create_dataloader",
        "get_epoch_length",
        "get_train_dataloader_steps",
        "get_val_dataloader_steps",
        "move_to_device",
        "split_workers",
    ),
    "memory.budget": ("MemoryBudget",),
    "memory.lru": ("LRUCache",),
    "memory.per_process": ("WorkerHandle",),
    "modes": ("LoadingMode",),
    "monitor.hooks": (
        "BatchTimes",
        "SlowStage",
    ),
    "monitor.loading": ("LoadingMonitor",),
    "monitor.memory": ("MemoryMonitor",),
    "order": (
        "EpochOrder",
        "OrderSampler",
        "RankBatches",
        "seed_everything",
    ),
    "packing": (
        "pack",
        "verify",
    ),
    "profiling": (
        "Profile",
        "find_max_batch_size",
        "profile_dataloader",
        "suggest_num_workers",
    ),
    "storage.read_rows": ("read_rows",),
    "storage.source": ("Source",),
    "storage.tar.source": ("TarSource",),
    "tokenizer": ("CharTokenizer",),
}
"""The names that are imported when they are first used, by module of the package."""
_ALIASES = {"WorkerHandle": "PerProcess"}

if not TYPE_CHECKING:  # a checker is to find a name that is not there by itself
    _HOMES = {name: f"headrace.{module}" for module, names in _MODULES.items() for name in names}

    def __dir__():
        return sorted({*globals(), *__all__})

    def __getattr__(name):
        """Imports a public name, or a module of the package. Of a name that is not there it says
        which to use; of older ones in ``from headrace import ...`` too, which drops the message of
        an AttributeError.
        """
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), _ALIASES.get(name, name))
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"headrace.{name}") is not None:
            return importlib.import_module(f"headrace.{name}")
        from headrace.arguments import explain_missing
        from headrace.synonyms import NAMES

        is_import = sys._getframe(1).f_globals.get("__name__") in (
            "importlib._bootstrap",
            "_frozen_importlib",
        )
        error = ImportError if is_import and name in NAMES else AttributeError
        raise error(explain_missing(name, __all__))
