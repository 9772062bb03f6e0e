"""Options of loaders: checks of options, datasets, paths and devices; what is chosen where an
option is None; and why each is what it is.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from headrace.arguments import (
    check_callable,
    check_flag,
    check_integer,
    check_names,
    check_seconds,
    described,
)
from headrace.collate import collators, stack_collate
from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode
from headrace.core.reader import SHARE
from headrace.core.views import parts_of
from headrace.display import is_default
from headrace.errors import ConfigError, warn
from headrace.formats.resolve.resolver import DataPath
from headrace.loader.start import choose_context
from headrace.memory.budget import MemoryBudget, format_size
from headrace.memory.limits import cores
from headrace.memory.processes import check_may_start, is_daemonic
from headrace.order import World
from headrace.order.epoch import DEFAULT_TURNS
from headrace.synonyms import WITHOUT_ARGUMENT

Shuffle = bool | Literal["block"]
Collate = Callable[[list[Any]], Any]
Reasons = dict[str, str]
"""Why options have the values that they have."""
NO_WORKERS: dict[str, Any] = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "multiprocessing_context": None,
}
"""Values of the options that have no effect without workers."""

_FLAGS = ("drop_last", "pad", "replacement", "balanced", "enable_monitoring", "log_loading_stats")
_STARTS = (None, "fork", "forkserver", "spawn")
# integers, and the least that each may be
_LEAST = {
    "batch_size": 1,
    "prefetch_factor": 1,
    "interleave": 1,
    "turns": 1,
    "world_size": 1,
    "num_samples": 1,
    "num_workers": 0,
    "rank": 0,
    "seed": None,
}
_SCARCE = 4 << 30  # below this, at most 2 workers
# options that are shown in any case, in this order; the others where they are not as they are by
# default
_ALWAYS = ["batch_size", "shuffle", "seed", "num_workers", "prefetch_factor"]
_ALWAYS += ["persistent_workers", "multiprocessing_context", "pin_memory", "device", "collate_fn"]
_ALWAYS += ["drop_last", "pad", "rank", "world_size", "max_memory_usage"]
_WIDEST = 16  # letters of a value before its reason moves to the right


class Indexable(Protocol):
    """Anything with samples by index: a torch dataset, a HuggingFace dataset, a list."""

    def __getitem__(self, index: Any, /) -> Any: ...


Data = Indexable | DataPath


@dataclass(frozen=True)
class DataLoaderConfig:
    """Options of a `Loader`.

    None means: chosen at start-up. ``loader.config`` has the chosen values, and
    ``loader.explain()`` the reasons.

    Attributes:
        batch_size: number of samples per batch and rank. None: the dataset yields batches.
        shuffle: True: a full permutation. "block": storage blocks are permuted and interleaved.
            False: in order, for validation and test data. None: False with `sampler`, `weights` or
            `balanced`, "block" in mode "streaming", else True (torch's default is False).
        num_workers: number of worker processes. 0: load in this process.
        pin_memory: put batches in page-locked memory.
        prefetch_factor: number of batches that each worker prefetches.
        persistent_workers: keep workers alive between epochs.
        drop_last: drop the last, incomplete global batch.
        pad: pad the epoch with its own first samples to a multiple of the number of ranks. False:
            repeat no sample, for exact evaluation.
        collate_fn: a callable that makes a batch from a list of samples, or the name of a
            registered one.
        sampler: an iterable of indices. The random generators that it uses, global ones or its own,
            are seeded by (seed, epoch). If the sampler or its iterator has a `state_dict`, that is
            saved with the loader's state; otherwise its order is replayed on resume.
        batch_sampler: an iterable of lists of indices. `batch_size` and `drop_last` are then
            ignored.
        weights: [samples] relative probability of each sample; 0: never drawn. The order is a
            `WeightedOrder`.
        balanced: draw all classes of the dataset's targets equally often. The order is a
            `BalancedOrder`.
        replacement: with `weights`: a sample may be drawn more than once per epoch. With
            `balanced`: a class whose samples are used up starts again.
        bucket_by_length: batch samples of similar length, to reduce padding. The order is a
            `BucketedOrder`. True: use the lengths that the dataset provides (as `TextDataset`
            does). Or one integer per sample.
        num_samples: number of samples per epoch, over all ranks. If smaller than the order, an
            epoch is its beginning; if larger, the order starts again, reshuffled. None: all; for
            `weights` and `balanced` see `WeightedOrder` and `BalancedOrder`.
        seed: seed of the order and of random transforms.
        interleave: for "block": number of lanes that a global batch draws from. None: 8 to 64,
            depending on the layout.
        turns: for "block": number of sets of lanes, used in turn so that each worker has its own
            lanes. None: up to 24, depending on the layout.
        rank, world_size: rank of this process and number of ranks. None: detected from
            torch.distributed, torchrun, SLURM or MPI.
        device: device that batches are moved to. None: batches stay on the host. On CUDA, the next
            batch is copied while the current one is processed, from pinned memory and on a separate
            stream. A device without an index is the one that is current when the first batch of the
            epoch is copied.
        memory_format: memory format of batches [batch, C, H, W] on `device`: `torch.channels_last`,
            which suits convolutions in half precision, or `torch.contiguous_format`. Values and
            shapes don't change. None: unchanged.
        max_memory_usage: memory budget, as a fraction of the memory that is free at first use, or
            bytes ("500MB"). None: the dataset's.
        multiprocessing_context: "fork", "forkserver" or "spawn". None: forkserver if the dataset
            has ``fork_safe = False``, or if other threads run when the workers start, the dataset
            pickles fast, and the main script has ``if __name__ == "__main__":``; else fork.
            `Loader.explain` shows the choice and the reason.
        worker_init_fn: a callable that is called in each worker with the worker's number.
        generator: a `torch.Generator` whose seed replaces `seed`.
        timeout: seconds to wait for a batch before an error. 0: no limit while the workers are
            alive.
        enable_monitoring: sample memory and CPU usage for `get_stats()`.
        log_loading_stats: log one line at the end of each epoch, at INFO to the logger
            "headrace.loader"; ``logging.basicConfig(level=logging.INFO)`` shows it.

    Raises:
        ConfigError: a value is invalid; the message names the field.
    """

    batch_size: int | None = 32
    shuffle: Shuffle | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    drop_last: bool = False
    pad: bool = True
    collate_fn: Callable[[list[Any]], Any] | str | None = None
    sampler: Iterable[int] | None = None
    batch_sampler: Iterable[list[int]] | None = None
    weights: Any = None
    replacement: bool = True
    balanced: bool = False
    bucket_by_length: Any = False
    num_samples: int | None = None
    seed: int = 42
    interleave: int | None = None
    turns: int | None = None
    rank: int | None = None
    world_size: int | None = None
    device: torch.device | str | int | None = None
    memory_format: torch.memory_format | None = None
    max_memory_usage: float | int | str | None = None
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], Any] | None = None
    generator: torch.Generator | None = None
    timeout: float = 0
    enable_monitoring: bool = True
    log_loading_stats: bool = False

    def __new__(cls, *_: Any, **options: Any) -> DataLoaderConfig:
        # before __init__ raises a TypeError without a hint
        check_options(cls.__name__, None, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            number = check_integer(name, getattr(self, name), least, optional=name != "seed")
            object.__setattr__(self, name, number)  # NumPy's as Python's
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        for name in ("pin_memory", "persistent_workers"):
            check_flag(name, getattr(self, name), optional=True)
        if not isinstance(self.collate_fn, str):
            check_callable("collate_fn", self.collate_fn)
        check_callable("worker_init_fn", self.worker_init_fn)
        check_seconds("timeout", self.timeout)
        if self.max_memory_usage is not None:
            MemoryBudget(self.max_memory_usage)  # raises where it makes no sense
        if self.shuffle != "block":
            check_flag("shuffle", self.shuffle, optional=True)
        for name in ("sampler", "batch_sampler"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Iterable):
                raise ConfigError(f"{name} must be an iterable, not {described(given)}")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise ConfigError(f"generator must be a torch.Generator, not {self.generator!r}")
        context = self.multiprocessing_context
        if context not in _STARTS and not hasattr(context, "get_start_method"):
            raise ConfigError(
                "multiprocessing_context must be fork, forkserver, spawn or a context, not "
                f"{context!r}"
            )
        if self.memory_format not in (None, torch.contiguous_format, torch.channels_last):
            raise ConfigError(
                "memory_format must be torch.channels_last, torch.contiguous_format or None, not "
                f"{self.memory_format!r}"
            )
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"device must be one that torch knows, not {self.device!r}: {error}"
                ) from None
        elif self.memory_format is not None:
            raise ConfigError(
                f"memory_format={self.memory_format} has an effect only with device=, to which "
                "batches are copied: pass device=, or call images.to(memory_format=...)"
            )
        orders = self.orders
        # lengths are a shuffle already; the others exclude one
        is_other = self.shuffle in (False, "block") if self.is_bucketed else bool(self.shuffle)
        if is_other and orders:
            orders.append(f"shuffle={self.shuffle!r}")
        if len(orders) > 1:
            raise ConfigError(
                f"{' and '.join(orders)} can't be given together, since each is an order: pass "
                "one of them"
            )
        if self.num_samples is not None and (self.has_sampler or self.is_bucketed):
            raise ConfigError(f"num_samples and {orders[0]} can't be given together: pass one")
        if not self.replacement and self.weights is None and not self.balanced:
            raise ConfigError(
                "replacement=False is for weights and balanced: other orders draw nothing twice; "
                "leave it out"
            )
        if self.batch_sampler is not None and self.drop_last:
            raise ConfigError(
                "drop_last has no effect with batch_sampler, which makes the batches: leave it out"
            )

    @property
    def has_sampler(self) -> bool:
        """True if the indices come from a sampler of the user."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def is_bucketed(self) -> bool:
        """True if batches hold samples of similar length."""
        return self.bucket_by_length is not False and self.bucket_by_length is not None

    @property
    def yields_batches(self) -> bool:
        """True if each sample of the dataset is already a batch."""
        return self.batch_size is None and self.batch_sampler is None

    @property
    def orders(self) -> list[str]:
        """Names of the given options that define an order, instead of `shuffle`."""
        names = ("sampler", "batch_sampler", "weights")
        given = [name for name in names if getattr(self, name) is not None]
        if self.balanced:
            given.append("balanced")
        if self.is_bucketed:
            given.append("bucket_by_length")
        return given

    def with_(self, **changes: Any) -> DataLoaderConfig:
        """Returns a copy with other values.

        Raises:
            ConfigError: a name is not a field; the message names the one to use.
        """
        return dataclasses.replace(self, **changes)

    @classmethod
    def train(cls, **options: Any) -> DataLoaderConfig:
        """Returns a config for training: shuffled, and without the incomplete last batch, unless
        a given sampler or order decides this.
        """
        if "shuffle" not in options and not cls(**options).orders:
            options["shuffle"] = True
        if options.get("batch_sampler") is None:
            options.setdefault("drop_last", True)
        return cls(**options)

    @classmethod
    def eval(cls, **options: Any) -> DataLoaderConfig:
        """Returns a config for evaluation: in order, without dropping or padding samples."""
        for name in ("shuffle", "drop_last", "pad"):
            options.setdefault(name, False)
        return cls(**options)


FIELDS = frozenset(f.name for f in dataclasses.fields(DataLoaderConfig))


def check_options(
    door: str, config: object, options: Iterable[str], also: Collection[str] = ()
) -> None:
    """Raises a ConfigError unless `config` is a config or None, and for the first option that is
    neither a field of `DataLoaderConfig` nor in `also` (options of datasets, for a path, and
    arguments of the function). `door` is the called function.
    """
    if config is not None and not isinstance(config, DataLoaderConfig):
        instead = "options as keywords (batch_size=64), or config=DataLoaderConfig(...)"
        if isinstance(config, int) and not isinstance(config, bool):
            instead = f"batch_size={config}"
        raise ConfigError(
            f"{door}: config must be a DataLoaderConfig, not {described(config)}: pass {instead}"
        )
    known = FIELDS.union(also)
    if not known.issuperset(options):
        from headrace.datasets.open import KNOWN_KEYWORDS  # which imports all formats

        others = KNOWN_KEYWORDS - known - WITHOUT_ARGUMENT.keys()
        elsewhere = dict.fromkeys(others, "where the dataset is made")
        check_names(door, options, known, elsewhere)


def length_of(dataset: Any) -> int | None:
    """The length of a dataset, if it has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def inner_datasets(dataset: Any) -> list[BaseDataset]:
    """The headrace datasets that a dataset is, or wraps (`Subset`, `ConcatDataset` and their
    like).
    """
    return [part for part in parts_of(dataset, opaque=BaseDataset) if isinstance(part, BaseDataset)]


def is_path(dataset: Any) -> bool:
    """True if it is a path, or several, rather than a dataset."""
    paths = dataset if isinstance(dataset, (list, tuple)) else [dataset]
    return bool(paths) and all(isinstance(path, (str, os.PathLike)) for path in paths)


def check_dataset(name: str, dataset: Any, has_sampler: bool = False) -> None:
    """Raises a ConfigError unless a value is a dataset or a path. A sampler's indices may be keys
    of a dict.
    """
    if is_path(dataset) or isinstance(dataset, IterableDataset):
        return
    is_indexed = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    is_wrong = isinstance(dataset, (type, DataLoader, bytes)) or hasattr(dataset, "iloc")
    first = next(iter(dataset), None) if isinstance(dataset, (list, tuple)) else None
    # HuggingFace's datasets have column names
    are_several = isinstance(first, (Dataset, DataLoader)) or hasattr(first, "column_names")
    if isinstance(dataset, Mapping) and dataset and not has_sampler:
        are_several = 0 not in dataset and len(dataset) - 1 not in dataset
    if is_indexed and not is_wrong and not are_several:
        return
    instead = (
        "pass a dataset with __getitem__ and __len__ (not a class or a loader; for a table, its "
        "rows), or an IterableDataset"
    )
    if are_several:
        instead = (
            "pass one of its datasets, torch.utils.data.ConcatDataset([...]) for epochs of all "
            "their samples, or MultiDataLoader({'a': ..., 'b': ...}) for batches of each"
        )
    raise ConfigError(f"{name} must be a dataset or a path, not {described(dataset)}: {instead}")


def is_accelerator(device: Any) -> bool:
    """True if a device is not the host."""
    return device is not None and torch.device(device).type not in ("cpu", "meta")


def check_device(device: Any) -> None:
    """Raises a ConfigError for a device that this process can't use, without initialising one."""
    if device is None:
        return
    kind = torch.device(device).type
    module = getattr(torch, kind, None)
    if kind in ("cuda", "mps", "xpu") and not (module is not None and module.is_available()):
        raise ConfigError(
            f"device={str(device)!r}, but torch sees no {kind.upper()} device here: install a "
            f"torch with support for it, check the driver, or pass device={kind!r} if "
            f"torch.{kind}.is_available() else 'cpu'"
        )


def resolve(
    config: DataLoaderConfig, dataset: Any, world: World
) -> tuple[DataLoaderConfig, Collate | None, Reasons]:
    """The config with every None decided as far as it can be, the collate function, and why each
    value is what it is.
    """
    check_device(config.device)
    is_own = isinstance(dataset, BaseDataset)
    is_stream = isinstance(dataset, IterableDataset) and not is_own
    chosen: dict[str, Any] = {}
    reasons: Reasons = {}

    def choose(name: str, value: Any, reason: str) -> None:
        chosen[name] = value
        reasons[name] = reason

    source = world.source if config.rank is None else "given"
    choose("rank", world.rank, source)
    choose("world_size", world.world_size, source)
    orders = config.orders
    if config.num_samples is not None:
        orders.append("num_samples")
    if is_stream and (orders or config.shuffle):
        raise ConfigError(
            f"{' and '.join(orders) or 'shuffle'} can't be given for an IterableDataset, which has "
            "its own order"
        )
    if config.shuffle is None:
        choose("shuffle", *_auto_shuffle(config, dataset, is_stream))
    if config.generator is not None:
        choose("seed", config.generator.initial_seed() & ((1 << 63) - 1), "the generator's seed")
    collate, reasons["collate_fn"] = _collate(config, dataset)
    if config.max_memory_usage is None:
        default = "the default: 0.8 of what is free at first use"
        reasons["max_memory_usage"] = "the dataset's" if is_own else default
    if config.num_workers is None:
        turns = 0
        if chosen.get("shuffle", config.shuffle) == "block":
            turns = config.turns or DEFAULT_TURNS
            blocks = dataset.blocks() if is_own and config.turns is None else None
            if blocks is not None:
                turns = dataset.lanes(len(blocks))[1]
        choose("num_workers", *_auto_workers(dataset, world, turns, is_stream))
    elif config.num_workers:
        check_may_start(f"num_workers={config.num_workers}")
    if chosen.get("num_workers", config.num_workers):
        for name, value in (("prefetch_factor", 2), ("persistent_workers", True)):
            if getattr(config, name) is None:
                choose(name, value, "the default with workers")
        parts = [collate, config.worker_init_fn]
        context, reason = choose_context(config.multiprocessing_context, dataset, parts)
        choose("multiprocessing_context", context, reason)
    else:
        for name, value in NO_WORKERS.items():
            if getattr(config, name):
                warn(f"{name} has no effect with num_workers=0 and is ignored")
            choose(name, value, "no workers")
    choose("pin_memory", *_auto_pin(config))
    return config.with_(**chosen), collate, reasons


def _auto_shuffle(config: DataLoaderConfig, dataset: Any, is_stream: bool) -> tuple[Shuffle, str]:
    if config.is_bucketed:
        return True, "bucket_by_length is a shuffle"
    if config.orders:
        return False, f"{config.orders[0]} is the order"
    if is_stream:
        return False, "an IterableDataset has an order of its own"
    if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.STREAMING:
        return "block", "streaming reads whole blocks, one after the other"
    return True, "the default of map-style datasets"


def _auto_workers(dataset: Any, world: World, turns: int, is_stream: bool) -> tuple[int, str]:
    if is_stream:
        return 0, "an IterableDataset may not divide its samples: each worker would yield them all"
    is_held = isinstance(dataset, TensorDataset)
    if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.EAGER:
        is_held = not (dataset.holds_encoded or dataset.is_random)
    if is_held:  # nothing is left to be done with the samples that costs more than a copy
        return 0, "the dataset is in memory already"
    if is_daemonic():
        return 0, "this process is daemonic, and may start no workers"
    usable = cores()
    ranks = world.local_world_size
    number = min(8, max(1, int(SHARE * usable.number / ranks)))
    quota = f" ({usable.quota})" if usable.quota else ""
    reason = f"min(8, max(1, {SHARE} x {usable.number} usable cores{quota} / {ranks} local ranks))"
    if number > 2 and MemoryBudget(1.0).available < _SCARCE:
        reason += f" = {number}, but less than {format_size(_SCARCE)} of memory are free"
        number = 2
    if turns % number:
        number = max(w for w in range(1, number + 1) if turns % w == 0)
        reason += f", lowered to a divisor of turns={turns}, so that each worker has its own blocks"
    return number, reason


def _auto_pin(config: DataLoaderConfig) -> tuple[bool, str]:
    if config.pin_memory is None:
        is_cuda = config.device is None or torch.device(config.device).type == "cuda"
        if is_cuda and torch.cuda.is_available():
            return True, "CUDA is available"
        return False, "batches don't go to a CUDA device"
    if config.pin_memory and not torch.accelerator.is_available():
        warn("pin_memory=True has no effect without an accelerator and is ignored")
        return False, "there is no accelerator"
    return config.pin_memory, "given"


def _collate(config: DataLoaderConfig, dataset: Any) -> tuple[Collate | None, str]:
    """The collate function. Where the dataset yields batches, one that was given gets one batch,
    as torch's does; else there is none.
    """
    given = config.collate_fn
    if config.yields_batches:
        reason = "the dataset yields batches"
        if given is not None:
            reason += ", and it gets each of them"
    elif given is not None:
        reason = f"registered as {given!r}" if isinstance(given, str) else "given"
    else:
        given = getattr(dataset, "collate", None) if isinstance(dataset, BaseDataset) else None
        reason = f"{type(dataset).__name__}'s own"
        if given is None:
            given = stack_collate
            reason = "the default: samples of one shape are stacked"
    return collators.get(given) if isinstance(given, str) else given, reason


def explain_options(
    config: DataLoaderConfig,
    given: DataLoaderConfig,
    reasons: Reasons,
    order: dict[str, Any],
    collate: Collate | None,
) -> list[str]:
    """A line for each option: its value, and why it is what it is.

    Args:
        config, given: with all auto values decided, and as the user gave it.
        reasons: why values are what they are, where more is known than that they were given.
        order: its parameters.
        collate: the collate function.
    """
    default = vars(DataLoaderConfig())
    values = {**vars(config), "collate_fn": collate}
    shown = [*_ALWAYS, *(name for name in values if not is_default(values[name], default[name]))]
    for name in ("interleave", "turns"):
        if order.get(name) is not None:
            shown.append(name)
            values[name] = order[name]
    texts = {name: _in_words(values[name]) for name in dict.fromkeys(shown)}
    width = max(map(len, texts))
    wide = min(_WIDEST, max(map(len, texts.values())))
    lines = []
    for name, text in texts.items():
        reason = reasons.get(name, "given")
        if name not in reasons and is_default(getattr(given, name), default[name]):
            reason = "the default" if values[name] == default[name] else "from the layout"
        lines.append(f"{name:<{width}} = {text:<{wide}}  {reason}")
    return lines


def _in_words(value: Any) -> str:
    """A value in a word or two."""
    plain = (bool, int, float, str, torch.device, torch.memory_format)
    if value is None or isinstance(value, plain):
        return str(value)
    if hasattr(value, "get_start_method"):
        return str(value.get_start_method())
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__name__", None) or type(value).__name__
