"""The thin builder: a dataset becomes a pinned, prefetching, seeded, resumable torch DataLoader."""

from headrace.loader.config import DataLoaderConfig
from headrace.loader.device import move_to_device
from headrace.loader.loader import Loader, create_dataloader

__all__ = ["DataLoaderConfig", "Loader", "create_dataloader", "move_to_device"]
