"""Resolves the options that are left to the loader, and checks that they fit together before workers start.

Everything that can be known before the first worker starts is said here.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from headrace.arguments import described
from headrace.collate import collators, stack_collate
from headrace.datasets.core.base import CHUNK_BYTES, BaseDataset
from headrace.datasets.core.threads import SHARE
from headrace.errors import BudgetError, ConfigError, warn
from headrace.loader.config import DataLoaderConfig, Shuffle
from headrace.loader.worker.fetch import inner_datasets
from headrace.loader.worker.start import choose_context
from headrace.memory.budget import MemoryBudget, format_size
from headrace.memory.limits import usable_cpus
from headrace.modes import LoadingMode
from headrace.order import World
from headrace.order.epoch import DEFAULT_TURNS

Reasons = dict[str, str]
_SCARCE = 4 << 30  # below this, at most 2 workers
_WORKING = 16 << 20  # bytes that a process which loads takes beside its batch


def resolve(config: DataLoaderConfig, dataset: Any, world: World) -> tuple[DataLoaderConfig, Reasons]:
    """The config with every None decided as far as it can be, and why each value is what it is."""
    check_device(config.device)
    reasons: Reasons = {}
    changes: dict[str, Any] = {"rank": world.rank, "world_size": world.world_size}
    reasons["rank"] = reasons["world_size"] = world.source
    foreign_stream = isinstance(dataset, IterableDataset) and not isinstance(dataset, BaseDataset)
    ordered = {"shuffle": bool(config.shuffle), "num_samples": config.num_samples is not None, "bucket_by_length": config.is_bucketed}
    if foreign_stream and (given := [name for name, is_given in ordered.items() if is_given] + config.order_of_its_own):
        raise ConfigError(f"{' and '.join(given)} can't be given for an IterableDataset, which has its own order")
    if config.shuffle is None:
        changes["shuffle"], reasons["shuffle"] = _auto_shuffle(config, dataset, foreign_stream)
    if config.generator is not None:
        changes["seed"], reasons["seed"] = config.generator.initial_seed() & ((1 << 63) - 1), "the generator's seed"
    if config.num_workers is None:
        block = changes.get("shuffle", config.shuffle) == "block"
        changes["num_workers"], reasons["num_workers"] = _auto_workers(dataset, world, _turns(config, dataset) if block else None)
    workers: int = changes["num_workers"] if config.num_workers is None else config.num_workers
    changes.update(_parallel_options(config, workers, reasons))
    changes["pin_memory"], reasons["pin_memory"] = _auto_pin(config)
    if workers:
        changes["multiprocessing_context"], reasons["multiprocessing_context"] = start_of(config, dataset)
    else:
        changes["multiprocessing_context"], reasons["multiprocessing_context"] = None, "no workers"
        if config.multiprocessing_context is not None:
            _ignored("multiprocessing_context")
    return config.with_(**changes), reasons


def _auto_shuffle(config: DataLoaderConfig, dataset: Any, foreign_stream: bool) -> tuple[Shuffle, str]:
    if own := config.order_of_its_own:
        return False, f"{own[0]} is the order"
    if config.is_bucketed:
        return True, "bucket_by_length is a shuffle"
    if foreign_stream:
        return False, "an IterableDataset has an order of its own"
    if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.STREAMING:
        return "block", "streaming reads whole blocks, one after the other"
    return True, "the default of map-style datasets"


def _auto_workers(dataset: Any, world: World, turns: int | None) -> tuple[int, str]:
    if isinstance(dataset, TensorDataset) or (isinstance(dataset, BaseDataset) and dataset.has_inputs_in_memory):
        return 0, "the dataset is in memory already"
    cores, ranks = len(usable_cpus()), world.local_world_size
    number = min(8, max(1, int(SHARE * cores / ranks)))
    reason = f"min(8, max(1, {SHARE} x {cores} usable cores / {ranks} local ranks))"
    if number > 2 and MemoryBudget(1.0).available < _SCARCE:
        number, reason = 2, f"{reason} = {number}, but less than {format_size(_SCARCE)} of memory are free"
    if turns is not None and turns % number:
        number = max(w for w in range(1, number + 1) if turns % w == 0)
        reason = f"{reason}, lowered to a divisor of turns={turns}, so that each worker has blocks of its own"
    return number, reason


def _turns(config: DataLoaderConfig, dataset: Any) -> int:
    blocks = dataset.blocks() if isinstance(dataset, BaseDataset) else None
    return config.turns or (DEFAULT_TURNS if blocks is None else dataset.lanes(len(blocks))[1])


def _parallel_options(config: DataLoaderConfig, workers: int, reasons: Reasons) -> dict[str, Any]:
    if not workers:
        for name in ("prefetch_factor", "persistent_workers", "timeout"):
            if getattr(config, name):
                _ignored(name)
            reasons[name] = "no workers"
        return {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    found: dict[str, Any] = {}
    if config.prefetch_factor is None:
        found["prefetch_factor"], reasons["prefetch_factor"] = 2, "the default with workers"
    if config.persistent_workers is None:
        found["persistent_workers"], reasons["persistent_workers"] = True, "the default with workers"
    return found


def _ignored(name: str) -> None:
    warn(f"{name} has no meaning with num_workers=0 and is ignored")


def _auto_pin(config: DataLoaderConfig) -> tuple[bool, str]:
    device = None if config.device is None else torch.device(config.device)
    if config.pin_memory is None:
        wanted = torch.cuda.is_available() and (device is None or device.type == "cuda")
        return wanted, "CUDA is available" if wanted else "batches don't go to a CUDA device"
    if config.pin_memory and not torch.accelerator.is_available():
        warn("pin_memory=True has no meaning without an accelerator and is ignored")
        return False, "there is no accelerator"
    return config.pin_memory, "given"


def start_of(config: DataLoaderConfig, dataset: Any) -> tuple[Any, str]:
    """The multiprocessing context of a loader's workers, and why, as things are now: threads come and go."""
    return choose_context(config.multiprocessing_context, dataset, [choose_collate(config, dataset), config.worker_init_fn])


def choose_collate(config: DataLoaderConfig, dataset: Any) -> Callable[[list[Any]], Any] | None:
    """The collate function. Where the dataset yields batches, one that was given gets one batch, as torch's does; else there is none."""
    chosen = config.collate_fn
    if config.yields_batches:
        return collators.get(chosen) if isinstance(chosen, str) else chosen
    if chosen is None:
        chosen = getattr(dataset, "collate", None) if isinstance(dataset, BaseDataset) else None
    if chosen is None:
        return stack_collate
    return collators.get(chosen) if isinstance(chosen, str) else chosen


def batches_nbytes(batch: int, workers: int, prefetch: int, budget: MemoryBudget, beside: int, pins: bool = False) -> int:
    """Bytes of all batches on their way, and of what they are made of.

    The ring has a slot for each batch that is handed out, and two that the user holds, or that are copied to a device. Pinned batches
    have as many buffers once more: torch keeps those that it has made, and rounds each up to a power of two. Beside it, each process
    that loads holds what `beside_nbytes` counts, and what decoders and allocators take: 16 MiB, or 5 % of a small budget
    (docs/memory.md).

    Args:
        batch: bytes of a batch.
        workers, prefetch: how many batches are on their way.
        budget: that they are to fit.
        beside: bytes of each process beside the slots.
        pins: True if batches are copied to pinned memory.
    """
    slots = workers * prefetch + 2 if workers else 2
    pinned = 1 << (batch - 1).bit_length() if pins and batch else 0
    return (batch + pinned) * slots + max(1, workers) * (min(_WORKING, budget.limit // 20) + beside)


def beside_nbytes(batch: int, dataset: Any, stacks: bool) -> int:
    """Bytes that a process which loads holds of a batch beside its slot: the samples before they are stacked and some of what they were
    decoded from, by measurement a batch and a half; half a batch where they are written straight into it; and what it reads ahead."""
    straight = stacks and isinstance(dataset, BaseDataset) and dataset.writes_batches
    ahead = sum(d.mode.window for d in inner_datasets(dataset) if d.loading_mode is LoadingMode.STREAMING)
    return (batch // 2 if straight else batch * 3 // 2) + ahead


def make_room(config: DataLoaderConfig, budget: MemoryBudget, batch: int, beside: int, datasets: Iterable[BaseDataset]) -> None:
    """Has caches give way where what is left of the budget does not do for one batch (of so many bytes) a worker."""
    for dataset in datasets:
        short = batches_nbytes(batch, config.num_workers or 0, 1, budget, beside, bool(config.pin_memory)) - budget.available
        if short > 0 and dataset.loading_mode is LoadingMode.CACHED:
            dataset.mode.give_way(short)


def fit_budget(config: DataLoaderConfig, budget: MemoryBudget, batch: int, beside: int, reasons: Reasons) -> tuple[DataLoaderConfig, int]:
    """Lowers `prefetch_factor`, and then `num_workers`, until batches fit what is left of the budget (see `batches_nbytes`); says so.

    Returns:
        The config, and the bytes that the batches take.

    Raises:
        BudgetError: not even without workers do they fit.
    """
    left, workers, prefetch = budget.available, config.num_workers or 0, config.prefetch_factor or 1
    nbytes = functools.partial(batches_nbytes, batch, budget=budget, beside=beside, pins=bool(config.pin_memory))
    choices = [(workers, p) for p in range(prefetch, 0, -1)] + [(w, 1) for w in range(workers - 1, -1, -1)]
    fitting = next((choice for choice in choices if nbytes(*choice) <= left), None)
    if fitting is None:
        least = format_size(nbytes(0, 1))
        raise BudgetError(
            f"a batch of {config.batch_size} samples takes {format_size(batch)}, two are held while the next one is made ({least} in "
            f"all), and {format_size(left)} are left of the budget: use a smaller batch_size, or raise max_memory_usage.\n"
            f"{budget.explain()}"
        )
    if workers and fitting != (workers, prefetch):
        said = f"{format_size(batch)} a batch, {format_size(left)} left of the budget"
        warn(
            f"num_workers={workers} x prefetch_factor={prefetch} don't fit the memory budget ({said}): lowered to "
            f"{fitting[0]} x {fitting[1]}; use a smaller batch_size, or raise max_memory_usage"
        )
        reasons["prefetch_factor"] = reasons["num_workers"] = f"lowered to fit the memory budget: {said}"
        parallel: dict[str, Any] = {} if fitting[0] else {"persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
        config = config.with_(num_workers=fitting[0], prefetch_factor=fitting[1] if fitting[0] else None, **parallel)
    return config, nbytes(*fitting)


def hold_chunks(config: DataLoaderConfig, datasets: Iterable[BaseDataset], order: dict[str, Any], budget: MemoryBudget) -> None:
    """Sets memory aside for the decoded chunks that each process holds: under a block shuffle all that it is in the midst of, so that
    each is decoded once; else some.

    Raises:
        BudgetError: those of a block shuffle don't fit the budget; or not even one does.
    """
    processes, world = max(1, config.num_workers or 0), config.world_size or 1
    for dataset in datasets:
        _hold_ahead(config, dataset, order, budget)
        block = dataset.block_nbytes
        if not block:
            continue
        if dataset.loading_mode is LoadingMode.EAGER:
            dataset.hold_chunks(0)
            continue
        is_block, interleave, turns = order.get("shuffle") == "block", order.get("interleave") or 1, order.get("turns") or 1
        drawn, own = _open_lanes(order, processes, world)
        wanted = block * drawn * (own + 1) if is_block else max(block, CHUNK_BYTES)  # a batch may end a block and begin the next
        dataset.hold_chunks(0)
        short = wanted * processes - budget.available
        if short > 0 and dataset.loading_mode is LoadingMode.CACHED:
            dataset.mode.give_way(short)
        left = budget.available // processes
        if is_block and wanted > left:
            raise BudgetError(
                f"shuffle='block': each of {processes} processes has {drawn * own} blocks open at a time, which take "
                f"{format_size(wanted)} when they are decoded, and {format_size(left)} a process are left of the budget: use a smaller "
                f"interleave (now {interleave}) or turns (now {turns}), fewer workers, smaller chunks, or raise max_memory_usage.\n"
                f"{budget.explain()}"
            )
        if block > left:
            raise BudgetError(
                f"samples lie in chunks that take {format_size(block)} when they are decoded, in each of {processes} processes, and "
                f"{format_size(left)} a process are left of the budget: use fewer workers, write smaller chunks, or raise "
                f"max_memory_usage.\n{budget.explain()}"
            )
        dataset.hold_chunks(min(wanted, left if is_block else left // 2), processes)


def _open_lanes(order: dict[str, Any], processes: int, world: int) -> tuple[int, int]:
    """Lanes that one batch of a rank draws from, and turns that one of its processes takes part in."""
    interleave, turns = order.get("interleave") or 1, order.get("turns") or 1
    return interleave // world if interleave % world == 0 else interleave, turns // processes if turns % processes == 0 else turns


def _hold_ahead(config: DataLoaderConfig, dataset: BaseDataset, order: dict[str, Any], budget: MemoryBudget) -> None:
    """Sets memory aside for the blocks that are far away, are fetched as a whole, and are not used up yet. Where they don't fit, each batch
    fetches what it takes: more requests, and the same samples."""
    processes = max(1, config.num_workers or 0)
    drawn, own = _open_lanes(order, processes, config.world_size or 1)
    dataset.hold_ahead(0)
    wanted = dataset.far_nbytes(drawn * (own + 1)) if order.get("shuffle") == "block" else 0  # a batch may end a block and begin the next
    left = budget.available // processes
    if wanted > left:
        warn(
            f"shuffle='block': each of {processes} processes would hold {drawn * own} blocks that it has fetched, which take "
            f"{format_size(wanted)}, and {format_size(left)} a process are left of the budget: samples are fetched one by one instead, in "
            f"many more requests. Use a smaller interleave (now {order.get('interleave')}) or turns (now {order.get('turns')}), fewer "
            "workers, or raise max_memory_usage"
        )
        wanted = 0
    dataset.hold_ahead(wanted, processes)


class _Nowhere:
    """A file that forgets what is written to it."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes  # of a large array no bytes come, but a buffer without a length


class _Trial(pickle.Pickler):
    """Pickles to nowhere, and notes a function or class of the main program that was met."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=5)
        self.of_main: str | None = None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__":
            self.of_main = self.of_main or value.__qualname__
        return NotImplemented


def check_picklable(config: DataLoaderConfig, parts: dict[str, Any]) -> None:
    """Says before the first worker starts that something can't travel to it.

    Raises:
        ConfigError: names the part, and what to do.
    """
    context = config.multiprocessing_context
    if context is None or context.get_start_method() == "fork":
        return
    start, main = context.get_start_method(), sys.modules["__main__"]
    path = None if getattr(main, "__spec__", None) is not None else getattr(main, "__file__", None)
    if path is not None and not os.path.isfile(path):
        raise ConfigError(
            f"workers started by {start} import the program again, and this one was not read from a file ({path}): save it as one, or pass "
            "multiprocessing_context='fork', or num_workers=0"
        )
    is_interactive = path is None and getattr(main, "__spec__", None) is None
    for name, part in parts.items():
        trial = _Trial()
        try:
            trial.dump(part)
        except Exception as error:
            raise ConfigError(
                f"the {name} can't be pickled, and workers started by {start} need that: {error}. Use functions and "
                "classes of a module instead of lambdas and local ones, or multiprocessing_context='fork', or num_workers=0"
            ) from error
        if is_interactive and trial.of_main is not None:
            raise ConfigError(
                f"the {name} needs {trial.of_main}, which is defined in a notebook or an interactive session, and workers started by "
                f"{start} can't import it from there: put it in a module (a .py file that you import), or pass "
                "multiprocessing_context='fork', or num_workers=0"
            )


def check_dataset(door: str, name: str, dataset: Any, has_sampler: bool = False) -> None:
    """Raises a ConfigError for what is neither a dataset nor a path.

    Args:
        door: what the user called.
        name: the argument's.
        dataset: it.
        has_sampler: True if a sampler of the user's gives the indices, which may then be keys of a dict.
    """
    wanted = f"{door}: {name} must be a dataset or a path"
    if isinstance(dataset, type):
        raise ConfigError(f"{wanted}, not {described(dataset)}: write {dataset.__name__}(...)")
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"{wanted}, not a loader: pass its dataset, loader.dataset")
    if isinstance(dataset, Mapping) and len(dataset) and not has_sampler and not (0 in dataset or len(dataset) - 1 in dataset):
        keys = ", ".join(repr(key) for key, _ in zip(dataset, range(5), strict=False))
        raise ConfigError(f"{wanted}, not a dict of {keys}: pass one of its values, or all of them to MultiDataLoader")
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        raise ConfigError(f"{wanted}, not a table ({described(dataset)}): pass its rows, table.to_dict('records')")
    if isinstance(dataset, bytes):
        raise ConfigError(f"{wanted}, not {described(dataset)}: pass the path as text, os.fsdecode(path)")
    if isinstance(dataset, (list, tuple)) and len(dataset) and isinstance(dataset[0], (str, os.PathLike)) and not is_path(dataset):
        number, entry = next((n, e) for n, e in enumerate(dataset) if not isinstance(e, (str, os.PathLike)))
        raise ConfigError(f"{wanted}, and this list begins with a path and has {described(entry)} at place {number}")
    if is_path(dataset) or isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
        return
    if hasattr(dataset, "__iter__"):
        raise ConfigError(f"{wanted}, not {described(dataset)}: give it __getitem__ and __len__, or make it an IterableDataset")
    raise ConfigError(f"{wanted}, not {described(dataset)}")


def check_device(device: Any) -> None:
    """Raises a ConfigError for a device that this process can't reach; asks nothing that would initialise one."""
    kind = None if device is None else torch.device(device).type
    module = getattr(torch, str(kind), None)
    if kind not in ("cuda", "mps", "xpu") or (module is not None and module.is_available()):
        return
    raise ConfigError(
        f"device={str(device)!r}, and torch sees no {str(kind).upper()} device here: install a torch with support for it, look at the "
        f"driver, or write device={str(kind)!r} if torch.{kind}.is_available() else 'cpu'"
    )


def is_path(dataset: Any) -> bool:
    """True if it is a path, or several, rather than a dataset."""
    return isinstance(dataset, (str, os.PathLike)) or (
        isinstance(dataset, (list, tuple)) and bool(dataset) and all(isinstance(d, (str, os.PathLike)) for d in dataset)
    )
