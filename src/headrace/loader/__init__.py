"""The thin builder: a dataset becomes a pinned, prefetching, seeded, resumable torch DataLoader."""

from headrace.loader.config import DataLoaderConfig
from headrace.loader.create import create_dataloader
from headrace.loader.device import move_to_device
from headrace.loader.loader import Loader
from headrace.loader.module import DataModule, DataModuleProtocol
from headrace.loader.multi.multi import MultiDataLoader
from headrace.loader.multi.schedule import split_workers
from headrace.loader.steps import (
    get_epoch_length,
    get_train_dataloader_steps,
    get_val_dataloader_steps,
)

__all__ = [
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
]
