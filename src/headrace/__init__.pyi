"""The public names of headrace, each by the module that it is imported from at first use."""

from headrace.collate import (
    TextCollator as TextCollator,
    VisionCollator as VisionCollator,
    collators as collators,
    list_collate as list_collate,
    pad_collate as pad_collate,
)
from headrace.core.dataset import BaseDataset as BaseDataset
from headrace.core.options import LoadingMode as LoadingMode
from headrace.datasets.arrays import HDF5Dataset as HDF5Dataset, ZarrDataset as ZarrDataset
from headrace.datasets.columns import ColumnsDataset as ColumnsDataset
from headrace.datasets.episodes import EpisodeDataset as EpisodeDataset
from headrace.datasets.files import FilesDataset as FilesDataset
from headrace.datasets.image.augment import (
    RandomHorizontalFlip as RandomHorizontalFlip,
    RandomResizedCrop as RandomResizedCrop,
)
from headrace.datasets.image.image import ImageDataset as ImageDataset
from headrace.datasets.memory_efficient import MemoryEfficientDataset as MemoryEfficientDataset
from headrace.datasets.open import open_dataset as open_dataset
from headrace.datasets.sparse import SparseDataset as SparseDataset
from headrace.datasets.streaming import StreamingDataset as StreamingDataset
from headrace.datasets.table import TableDataset as TableDataset
from headrace.datasets.text.text import TextDataset as TextDataset
from headrace.errors import (
    AccessError as AccessError,
    BudgetError as BudgetError,
    CollateError as CollateError,
    ConfigError as ConfigError,
    DataNotFoundError as DataNotFoundError,
    FileChangedError as FileChangedError,
    FormatError as FormatError,
    HeadraceError as HeadraceError,
    HeadraceWarning as HeadraceWarning,
    MissingNameError as MissingNameError,
    RemoteError as RemoteError,
    SampleError as SampleError,
    StateError as StateError,
    TargetExistsError as TargetExistsError,
    WorkerError as WorkerError,
    WriteError as WriteError,
)
from headrace.formats.read_rows import read_rows as read_rows
from headrace.formats.registry import write_index as write_index
from headrace.formats.source import Source as Source
from headrace.io.remote.options import RemoteOptions as RemoteOptions
from headrace.loader.config import DataLoaderConfig as DataLoaderConfig
from headrace.loader.device import move_to_device as move_to_device
from headrace.loader.loader import Loader as Loader, create_dataloader as create_dataloader
from headrace.loader.module import (
    DataModule as DataModule,
    DataModuleProtocol as DataModuleProtocol,
    get_epoch_length as get_epoch_length,
    get_train_dataloader_steps as get_train_dataloader_steps,
    get_val_dataloader_steps as get_val_dataloader_steps,
)
from headrace.loader.multi import MultiDataLoader as MultiDataLoader, split_workers as split_workers
from headrace.memory.lru import LRUCache as LRUCache
from headrace.order import seed_everything as seed_everything
from headrace.packing import (
    pack as pack,
    verify as verify,
)
from headrace.profiling import (
    find_max_batch_size as find_max_batch_size,
    profile_dataloader as profile_dataloader,
    suggest_num_workers as suggest_num_workers,
)
from headrace.tokenizer import CharTokenizer as CharTokenizer

__version__: str
