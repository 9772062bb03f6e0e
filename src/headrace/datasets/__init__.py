"""Datasets: the samples of a storage, decoded, with their targets and transforms."""

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.episodes.episodes import EpisodeDataset
from headrace.datasets.episodes.statistics import Statistics
from headrace.datasets.hdf5 import HDF5Dataset
from headrace.datasets.image.augment import RandomHorizontalFlip, RandomResizedCrop
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.indexing import write_index
from headrace.datasets.memory_efficient import MemoryEfficientDataset
from headrace.datasets.open import open_dataset
from headrace.datasets.shards.streaming import StreamingDataset
from headrace.datasets.sparse.batches import SparseRow, SparseRows, sparse_collate
from headrace.datasets.sparse.sparse import SparseDataset
from headrace.datasets.table.table import TableDataset
from headrace.datasets.text.text import TextDataset
from headrace.datasets.zarr import ZarrDataset

__all__ = [
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
]
