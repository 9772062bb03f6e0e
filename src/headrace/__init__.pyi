"""The public names of headrace, each by the module that it is imported from at first use."""

from headrace.collate import (
    Batch as Batch,
)
from headrace.collate import (
    DetectionCollator as DetectionCollator,
)
from headrace.collate import (
    Padded as Padded,
)
from headrace.collate import (
    TextCollator as TextCollator,
)
from headrace.collate import (
    VisionCollator as VisionCollator,
)
from headrace.collate import (
    collators as collators,
)
from headrace.collate import (
    document_mask as document_mask,
)
from headrace.collate import (
    list_collate as list_collate,
)
from headrace.collate import (
    pad_collate as pad_collate,
)
from headrace.collate import (
    variable_length_collate as variable_length_collate,
)
from headrace.datasets.core.base import BaseDataset as BaseDataset
from headrace.datasets.episodes.episodes import EpisodeDataset as EpisodeDataset
from headrace.datasets.episodes.statistics import Statistics as Statistics
from headrace.datasets.hdf5 import HDF5Dataset as HDF5Dataset
from headrace.datasets.image.augment import (
    RandomHorizontalFlip as RandomHorizontalFlip,
)
from headrace.datasets.image.augment import (
    RandomResizedCrop as RandomResizedCrop,
)
from headrace.datasets.image.image import ImageDataset as ImageDataset
from headrace.datasets.indexing import write_index as write_index
from headrace.datasets.memory_efficient import MemoryEfficientDataset as MemoryEfficientDataset
from headrace.datasets.open import open_dataset as open_dataset
from headrace.datasets.shards.streaming import StreamingDataset as StreamingDataset
from headrace.datasets.sparse.batches import (
    SparseRow as SparseRow,
)
from headrace.datasets.sparse.batches import (
    SparseRows as SparseRows,
)
from headrace.datasets.sparse.batches import (
    sparse_collate as sparse_collate,
)
from headrace.datasets.sparse.sparse import SparseDataset as SparseDataset
from headrace.datasets.table.table import TableDataset as TableDataset
from headrace.datasets.text.text import TextDataset as TextDataset
from headrace.datasets.zarr import ZarrDataset as ZarrDataset
from headrace.errors import (
    AccessError as AccessError,
)
from headrace.errors import (
    BudgetError as BudgetError,
)
from headrace.errors import (
    CollateError as CollateError,
)
from headrace.errors import (
    ConfigError as ConfigError,
)
from headrace.errors import (
    DataNotFoundError as DataNotFoundError,
)
from headrace.errors import (
    FileChangedError as FileChangedError,
)
from headrace.errors import (
    FormatError as FormatError,
)
from headrace.errors import (
    HeadraceError as HeadraceError,
)
from headrace.errors import (
    HeadraceWarning as HeadraceWarning,
)
from headrace.errors import (
    MissingNameError as MissingNameError,
)
from headrace.errors import (
    RemoteError as RemoteError,
)
from headrace.errors import (
    SampleError as SampleError,
)
from headrace.errors import (
    StateError as StateError,
)
from headrace.errors import (
    TargetExistsError as TargetExistsError,
)
from headrace.errors import (
    WorkerError as WorkerError,
)
from headrace.errors import (
    WriteError as WriteError,
)
from headrace.io.remote.options import RemoteOptions as RemoteOptions
from headrace.loader.config import DataLoaderConfig as DataLoaderConfig
from headrace.loader.create import create_dataloader as create_dataloader
from headrace.loader.device import move_to_device as move_to_device
from headrace.loader.loader import Loader as Loader
from headrace.loader.module import (
    DataModule as DataModule,
)
from headrace.loader.module import (
    DataModuleProtocol as DataModuleProtocol,
)
from headrace.loader.multi.multi import MultiDataLoader as MultiDataLoader
from headrace.loader.multi.schedule import split_workers as split_workers
from headrace.loader.steps import (
    get_epoch_length as get_epoch_length,
)
from headrace.loader.steps import (
    get_train_dataloader_steps as get_train_dataloader_steps,
)
from headrace.loader.steps import (
    get_val_dataloader_steps as get_val_dataloader_steps,
)
from headrace.memory.budget import MemoryBudget as MemoryBudget
from headrace.memory.lru import LRUCache as LRUCache
from headrace.memory.per_process import PerProcess as WorkerHandle  # noqa: F401
from headrace.modes import LoadingMode as LoadingMode
from headrace.monitor.hooks import (
    BatchTimes as BatchTimes,
)
from headrace.monitor.hooks import (
    SlowStage as SlowStage,
)
from headrace.monitor.loading import LoadingMonitor as LoadingMonitor
from headrace.monitor.memory import MemoryMonitor as MemoryMonitor
from headrace.order import (
    EpochOrder as EpochOrder,
)
from headrace.order import (
    OrderSampler as OrderSampler,
)
from headrace.order import (
    RankBatches as RankBatches,
)
from headrace.order import (
    seed_everything as seed_everything,
)
from headrace.packing import (
    pack as pack,
)
from headrace.packing import (
    verify as verify,
)
from headrace.profiling import (
    Profile as Profile,
)
from headrace.profiling import (
    find_max_batch_size as find_max_batch_size,
)
from headrace.profiling import (
    profile_dataloader as profile_dataloader,
)
from headrace.profiling import (
    suggest_num_workers as suggest_num_workers,
)
from headrace.storage.read_rows import read_rows as read_rows
from headrace.storage.source import Source as Source
from headrace.storage.tar.source import TarSource as TarSource
from headrace.tokenizer import CharTokenizer as CharTokenizer

__version__: str
