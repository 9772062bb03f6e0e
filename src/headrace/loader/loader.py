"""The resumable DataLoader: epochs, positions, state and statistics.

NOTE [ epochs and positions ]

* `set_epoch(e)` names the epoch of the next iterator; without it each iterator takes the epoch after the last one's.
* The position is the number of batches of the current epoch that the user has received. `state_dict()` holds both; between
  `set_epoch` and the next iterator, the named epoch and 0.
* After `load_state_dict` the next iterator goes on at the position. `set_epoch` with the loaded epoch keeps it (also at the
  epoch's end: nothing is left then), with another epoch drops it. A state saved at the end of an epoch, without `set_epoch`, goes on
  with the next epoch.
* An iterator that is left early leaves its position in `state_dict()`; the next iterator begins the next epoch.
* An epoch is at its end when the user has been told so (`StopIteration`). A state that was saved after the last batch and before that goes
  on with what is left, which is nothing: a loop over the rest of that epoch ends at once, as it would have. torchdata has it so too.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Self, Unpack

from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from headrace.collate import TextCollator, stack_collate
from headrace.datasets import open_dataset
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.open import known_keywords
from headrace.errors import warn
from headrace.loader.batches import IterablePlan, OrderPlan, length_of
from headrace.loader.build import (
    batches_nbytes,
    beside_nbytes,
    check_dataset,
    check_picklable,
    choose_collate,
    fit_budget,
    hold_chunks,
    is_path,
    make_room,
    resolve,
    start_of,
)
from headrace.loader.config import FIELDS, DataLoaderConfig, check_options
from headrace.loader.distributed.agreement import Agreement
from headrace.loader.epoch import EpochIterator
from headrace.loader.explain import explain_loader
from headrace.loader.options import Data, Indexable, LoaderOptions, PathOptions
from headrace.loader.plan import make_plan
from headrace.loader.shown import EpochSampler, check_world, counts_as_prepared
from headrace.loader.state import check_data, check_order, check_samples, make_state
from headrace.loader.stateful import States
from headrace.loader.worker.fetch import Fetch, inner_datasets
from headrace.loader.worker.fetch_stream import FetchIterable
from headrace.loader.worker.pool import WorkerPool, is_of_workers
from headrace.memory.budget import MemoryBudget, Reservation, format_size
from headrace.memory.ring import Delivered, Ring
from headrace.monitor.stats import LoadingStats, Stats
from headrace.order import detect_world

logger: logging.Logger = logging.getLogger("headrace.loader")


def create_dataloader(dataset: Data, config: DataLoaderConfig | None = None, **overrides: Unpack[PathOptions]) -> Loader:
    """A `Loader` over a dataset, or over a path, which `open_dataset` opens.

    Samples are shuffled by default, unlike torch's: pass ``shuffle=False``, or ``config=DataLoaderConfig.eval()``, for validation and
    test data.

    Args:
        dataset: any torch dataset, or a path; with a path, keywords that are no fields of `DataLoaderConfig` go to `open_dataset`,
            as do `seed` and `max_memory_usage`.
        config: the options; the defaults without.
        **overrides: fields of `DataLoaderConfig`, which says more of each, that replace those of `config`. None: chosen at start-up.

            * ``batch_size=32``: samples of a batch of each rank; None: the dataset yields batches.
            * ``shuffle=None``: True, False, or "block": blocks of the storage are permuted and interleaved. None: True for most datasets.
            * ``num_workers=None``: worker processes; 0: load in this process.
            * ``pin_memory=None``: batches arrive in page-locked memory.
            * ``prefetch_factor=None``: batches on their way for each worker.
            * ``persistent_workers=None``: workers live on between epochs.
            * ``drop_last=False``: leave the last, incomplete global batch out.
            * ``pad=True``: fill the epoch up with its own first samples to a multiple of the number of ranks.
            * ``collate_fn=None``: makes a batch of samples: a callable, or the name of a registered one.
            * ``sampler=None``: an iterable of indices.
            * ``batch_sampler=None``: an iterable of lists of indices.
            * ``weights=None``: one number a sample: how likely it is to be drawn.
            * ``replacement=True``: with weights or balanced, a sample may come again.
            * ``balanced=False``: all classes come equally often.
            * ``bucket_by_length=False``: batches hold samples of like length: True, or one integer a sample.
            * ``num_samples=None``: samples of an epoch, over all ranks.
            * ``seed=42``: of order and random transforms.
            * ``interleave=None``: with shuffle="block", lanes that a global batch draws from.
            * ``turns=None``: with shuffle="block", sets of lanes that are used in turn.
            * ``rank=None``, ``world_size=None``: of this process in the job; None: found out.
            * ``device=None``: where batches go; None: they stay.
            * ``max_memory_usage=None``: the memory budget, a fraction or bytes ("500MB"); None: the dataset's.
            * ``multiprocessing_context=None``: "fork", "forkserver" or "spawn".
            * ``worker_init_fn=None``: called in each worker with its number.
            * ``generator=None``: a `torch.Generator` whose seed is used instead of `seed`.
            * ``timeout=0``: seconds to wait for a batch before an error; 0: for ever, as long as the workers live.
            * ``enable_monitoring=True``: sample memory and CPU for `get_stats()`.
            * ``log_loading_stats=False``: log a line an epoch (logger "headrace.loader", INFO).

    Raises:
        ConfigError: an option makes no sense, the message names it; or other ranks build another loader (see `loader/agreement.py`).
        BudgetError: not even one batch fits the memory budget.
    """
    check_dataset("create_dataloader", "dataset", dataset, _has_sampler(config, overrides))
    options: dict[str, Any] = {**overrides}
    opened: Any = dataset
    if is_path(dataset):
        opened, options = open_path("create_dataloader", dataset, config, options)
    check_options("create_dataloader", config, options)
    return Loader(opened, config, **options)


def _has_sampler(config: Any, options: Mapping[str, Any]) -> bool:
    return any(options.get(name, getattr(config, name, None)) is not None for name in ("sampler", "batch_sampler"))


def open_path(door: str, path: Any, config: DataLoaderConfig | None, options: Mapping[str, Any]) -> tuple[BaseDataset, dict[str, Any]]:
    """The dataset of a path, and those of the options that are a loader's; the others, and what both know, are the dataset's.

    Args:
        door: what the user called, for messages.
        path: or paths.
        config: of the loader.
        options: of loader and dataset.
    """
    check_options(door, config, options, known_keywords())
    own = {name: value for name, value in options.items() if name not in FIELDS}
    rest = {name: value for name, value in options.items() if name in FIELDS}
    shared = (config or DataLoaderConfig()).with_(**rest)
    for name in ("seed", "max_memory_usage"):  # of both
        if getattr(shared, name) != getattr(DataLoaderConfig, name):
            own[name] = getattr(shared, name)
    return open_dataset(path, **own), rest


class Loader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` in an order that can be repeated and resumed; see `DataLoaderConfig` for its options.

    The batches of an epoch depend on the data, the seed, the epoch and the global batch alone: not on workers, mode or start
    method, and not on the number of ranks that a global batch is shared out to. Batches arrive in recycled buffers, which are used
    again when the last tensor over them is gone; a batch that is kept is never overwritten.

    Attributes:
        config: the options with all auto values decided.
        dataset: the dataset as it was given.
        padding: samples that come twice in an epoch, so that all ranks have as many.
    """

    config: DataLoaderConfig
    dataset: Any

    def __init__(self, dataset: Indexable, config: DataLoaderConfig | None = None, **overrides: Unpack[LoaderOptions]) -> None:
        check_dataset(type(self).__name__, "dataset", dataset, _has_sampler(config, overrides))
        check_options(type(self).__name__, config, overrides)
        self._given = config = (config or DataLoaderConfig()).with_(**overrides)
        world = detect_world(config.rank, config.world_size)
        config, self._reasons = resolve(config, dataset, world)
        self._collate = choose_collate(config, dataset)
        self._ring_bytes: Reservation | None = None
        self._max_memory_usage = config.max_memory_usage
        config = self._within_budget(config, dataset)
        draws_again = config.replacement and (config.weights is not None or config.balanced)
        if draws_again or isinstance(config.sampler, WeightedRandomSampler):
            for inner in inner_datasets(dataset):
                inner.mode.expect_skew()
        parts = {"dataset": dataset, "collate_fn": self._collate, "worker_init_fn": config.worker_init_fn}
        check_picklable(config, parts)
        self.config = config
        self._plan = make_plan(config, dataset, {})
        if config.drop_last and self._plan.steps() == 0 and length_of(dataset):
            warn(
                f"drop_last=True leaves no batch: {length_of(dataset):,} samples are fewer than one global batch (batch_size "
                f"{config.batch_size} on {config.world_size or 1} ranks); use drop_last=False, or a smaller batch_size"
            )
        hold_chunks(config, inner_datasets(dataset), self._plan.parameters(), self._budget(dataset))
        self._stats = LoadingStats()
        self._pids: set[int] = set()
        self._next_epoch, self._is_named = 0, False  # named: by set_epoch, since the last iterator began
        self._resume: tuple[int, int] | None = None  # (epoch, position) that were loaded
        self._at = (0, 0)  # epoch, and the batches of it that the user has received
        self._end: tuple[int, int] | None = None  # where an epoch was found to be through
        is_stream = isinstance(self._plan, IterablePlan)
        self._states = States(config.num_workers or 0, config.world_size or 1, config.rank or 0, is_stream)  # of a foreign dataset
        self._last_nbytes = 0
        self._too_large = 0  # bytes of a batch of which too many are on their way
        self._pool: WorkerPool | None = None
        self._running: weakref.ref[EpochIterator] | None = None
        super().__init__(dataset, **self._torch_arguments(dataset))  # type: ignore[arg-type]  # torch takes sequences too
        self._agreement = Agreement(self, world, is_given=self._given.rank is not None)
        self._agreement.look()

    # -- set-up

    def _within_budget(self, config: DataLoaderConfig, dataset: Any) -> DataLoaderConfig:
        sample = dataset.sample_nbytes() if isinstance(dataset, BaseDataset) else None
        return config if sample is None else self._fitted(config, dataset, sample * (config.batch_size or 1))

    def _fitted(self, config: DataLoaderConfig, dataset: Any, batch_nbytes: int) -> DataLoaderConfig:
        """The config with as many batches on their way as the budget has room for, which is reserved."""
        budget = self._budget(dataset)
        beside = beside_nbytes(batch_nbytes, dataset, self._collate is stack_collate)
        make_room(config, budget, batch_nbytes, beside, inner_datasets(dataset))
        config, nbytes = fit_budget(config, budget, batch_nbytes, beside, self._reasons)
        self._ring_bytes = budget.reserve(nbytes, "batches on their way")
        return config

    def _reserve_ring(self, batch_nbytes: int) -> None:
        """The first batch says how large the ring is, where nobody knew before."""
        budget = self._budget(self.dataset)
        workers, prefetch = self.config.num_workers or 0, self.config.prefetch_factor or 1
        beside = beside_nbytes(batch_nbytes, self.dataset, self._collate is stack_collate)
        make_room(self.config, budget, batch_nbytes, beside, inner_datasets(self.dataset))
        needed = batches_nbytes(batch_nbytes, workers, prefetch, budget, beside, bool(self.config.pin_memory))
        available = budget.available
        self._ring_bytes = budget.reserve(min(needed, available), "batches on their way")
        if needed > available:
            self._too_large = batch_nbytes
            warn(
                f"batches of {format_size(batch_nbytes)} take {format_size(needed)} on their way, and {format_size(available)} are left "
                "of the memory budget: in the next epoch there will be fewer; use a smaller batch_size or prefetch_factor, or raise "
                "max_memory_usage"
            )

    def _fit_again(self) -> None:
        """Before an epoch: what the first batch of the last one said of the ring's size."""
        if self._too_large and self._ring_bytes is not None and (self._pool is None or self._pool.is_free):
            self._ring_bytes.close()
            self._ring_bytes = None
            self.config = self._fitted(self.config, self.dataset, self._too_large)
            self._too_large, self._pool = 0, None
            for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout"):  # as torch's loader shows them
                self.__dict__[name] = getattr(self.config, name)

    def _budget(self, dataset: Any) -> MemoryBudget:
        usage = self._max_memory_usage
        if usage is None and isinstance(dataset, BaseDataset):
            return dataset.budget
        return MemoryBudget(0.8 if usage is None else usage, local_world_size=detect_world().local_world_size)

    def _torch_arguments(self, dataset: Any) -> dict[str, Any]:
        """What torch's own constructor is told, so that everything which looks at a DataLoader finds what it expects."""
        config = self.config
        arguments: dict[str, Any] = {
            "num_workers": config.num_workers,
            "collate_fn": self._collate,
            "pin_memory": config.pin_memory,
            "timeout": config.timeout,
            "worker_init_fn": config.worker_init_fn,
            "generator": config.generator,
        }
        if config.num_workers:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                arguments[name] = getattr(config, name)
        if config.batch_sampler is not None:
            # torch refuses one for an IterableDataset: in mode "streaming" it stays ours
            return {
                **arguments,
                **({"batch_size": None} if isinstance(dataset, IterableDataset) else {"batch_sampler": config.batch_sampler}),
            }
        arguments["batch_size"] = config.batch_size
        if config.batch_size is not None:
            arguments["drop_last"] = config.drop_last
        if isinstance(dataset, IterableDataset):
            return arguments
        return {**arguments, "sampler": config.sampler if config.sampler is not None else self._order_sampler(dataset)}

    def _order_sampler(self, dataset: Any) -> EpochSampler:
        config = self.config
        assert isinstance(self._plan, OrderPlan)
        return EpochSampler(
            self,
            dataset,
            batch_size=config.batch_size or 1,
            order=self._plan.order,
            rank=config.rank,
            world_size=config.world_size,
            drop_last=config.drop_last,
            pad=config.pad,
        )

    def _new_pool(self) -> WorkerPool:
        config, streaming = self.config, isinstance(self.dataset, BaseDataset) and isinstance(self.dataset, IterableDataset)
        ring = Ring((config.num_workers or 0) * (config.prefetch_factor or 1) + 2)
        if isinstance(self._plan, IterablePlan):
            fetch: Fetch = FetchIterable(self.dataset, ring, config.batch_size or 1, config.drop_last)
        else:
            ahead = self._plan if streaming and isinstance(self._plan, OrderPlan) else None
            is_ours, collate = isinstance(self.dataset, BaseDataset), self._collate
            fills = is_ours and not config.yields_batches
            join = collate.join if type(collate) is TextCollator and fills else None
            stacks = collate is stack_collate and fills
            fetch = Fetch(self.dataset, ring, ahead, max(1, config.num_workers or 0), stacks, self._plan.origin, join)
        self._pids.clear()
        return WorkerPool(fetch, self._plan, config, self._collate)

    # -- epochs

    def __len__(self) -> int:
        steps = self._plan.steps()
        if steps is None:
            raise TypeError(f"the length of a loader over {type(self.dataset).__name__} is not known")
        return steps

    @property
    def given(self) -> DataLoaderConfig:
        """The options as they were given, with None where `config` has what was chosen."""
        return self._given

    @property
    def padding(self) -> int:
        """Samples that come twice in an epoch, so that all ranks have as many."""
        return self._plan.padding

    @property
    def epoch(self) -> int:
        """The epoch of the current iterator, or of the last."""
        return self._at[0]

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch of the next iterator; see NOTE [ epochs and positions ]."""
        self._next_epoch, self._is_named = int(epoch), True
        if self._resume is not None and self._resume[0] != self._next_epoch:
            self._resume = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        check_world(self)
        self._agreement.look()
        epoch, start = self._next_epoch, 0
        if self._resume is not None and self._resume[0] == epoch:
            start = self._resume[1]
        goes_on, self._resume = self._resume is not None and self._resume[0] == epoch, None
        self._next_epoch, self._is_named, self._at = epoch + 1, False, (epoch, start)
        if self._pool is not None and not self._pool.is_sound:
            self._pool = None
        self._fit_again()
        if not goes_on:
            self._states = self._states_of_next_epoch()
        try:
            iterator = EpochIterator(self, self._free_pool(), epoch, start, self._states)
        except RuntimeError as error:
            if self._pool is None or not is_of_workers(error):
                raise
            self._pool = None  # a worker of an earlier epoch died just now, with nothing that anybody waits for
            iterator = EpochIterator(self, self._free_pool(), epoch, start, self._states)
        self._running = weakref.ref(iterator)
        return iterator

    def _free_pool(self) -> WorkerPool:
        if self._pool is not None and self._pool.is_free:
            return self._pool
        self._choose_start()
        pool = self._new_pool()
        if self.config.num_workers:
            self._states.to_new_processes()
        if pool.is_lasting and self._pool is None:
            self._pool = pool
        return pool

    def _choose_start(self) -> None:
        """Before workers are made: threads may run now that did not when the loader was made."""
        if self.config.num_workers and self._given.multiprocessing_context is None:
            context, reason = start_of(self._given, self.dataset)
            self._reasons["multiprocessing_context"] = reason
            self.config = self.config.with_(multiprocessing_context=context)
            self.multiprocessing_context = context

    def _states_of_next_epoch(self) -> States:
        workers = self.config.num_workers or 0
        return self._states.of_next_epoch(workers, lives_on=not workers or bool(self.config.persistent_workers))

    def _received(
        self, delivered: Delivered, states: States, epoch: int, position: int, wait: float, elapsed: float, transfer: float
    ) -> None:
        """The user gets a batch: what is known of it is counted, and the position moves on."""
        self._agreement.look()
        if self._resume is None:  # else another state was loaded since
            self._states = states
            self._plan.received(epoch, position)
        report, stats = delivered.report, self._stats
        stats.add_report(report["counts"])
        stats.add_batch(report["samples"], wait, elapsed)
        stats.transfer_time += transfer
        self._at, self._last_nbytes = (epoch, position), delivered.nbytes
        if self._ring_bytes is None and delivered.nbytes:
            self._reserve_ring(delivered.nbytes)
        if self.config.enable_monitoring:
            self._pids.add(report["pid"])
            stats.look(self._pids - {os.getpid()})

    def _failed(self, delivered: Delivered) -> None:
        """The user gets an error in place of a batch."""
        self._stats.add_report(delivered.report["counts"])

    def _ended(self, epoch: int, position: int, seconds: float, wait: float, batches: int, samples: int) -> None:
        """An epoch is through."""
        self._end = epoch, position
        if self.config.log_loading_stats and batches:
            logger.info(
                "epoch %d: %d batches, %d samples in %.2f s (%.1f samples/s), %.1f %% of it waiting",
                epoch, batches, samples, seconds, samples / max(seconds, 1e-9), 100 * wait / max(seconds, 1e-9),
            )  # fmt: skip

    def _broke(self, pool: WorkerPool) -> None:
        """A pool is past saving: the next iterator gets another one."""
        if self._pool is pool:
            self._pool = None

    def close(self) -> None:
        """Ends persistent workers and gives the ring's share of the budget back. The loader can be used again after it, and an iterator
        that is under way goes on."""
        self._pool = None
        if self._ring_bytes is not None:
            self._ring_bytes.close()
            self._ring_bytes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all workers, also those of an iterator that is under way, and closes the loader, which can be used again."""
        running = self._current()
        if running is not None:
            running.close()
        self.close()

    # -- state

    @property
    def fingerprint(self) -> str:
        """What the dataset is; for a foreign one its type and length."""
        found = getattr(self.dataset, "fingerprint", None)
        return found if isinstance(found, str) else f"{type(self.dataset).__name__}:{length_of(self.dataset)}"

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands: its order, and the number of global batches that the user has received; and what a sampler, a dataset
        or an iterator of the user's calls its state, where it has one (NOTE [ states of datasets ] in `loader/stateful.py`).

        Raises:
            StateError: a `state_dict` of the user's dataset has raised, or gave what can't be pickled.
        """
        (epoch, position), states = self._at, self._states
        if self._resume is not None:
            epoch, position = self._resume
        elif self._is_named and (self._next_epoch != epoch or self._current() is None):
            epoch, position, states = self._next_epoch, 0, self._states_of_next_epoch()
        has_ended = self._end == (epoch, position)
        return make_state(
            self.fingerprint,
            length_of(self.dataset),
            self._plan.parameters(),
            epoch,
            position,
            self._plan.samples_before(position),
            self._stats.skipped_count,
            list(self._stats.skipped),
            has_ended if has_ended or self._plan.ends_at(position) else None,
            self._plan.state_at(epoch, position),
            states.as_dict() if states else None,
        )

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """The next iterator goes on where the state was saved, with any number of workers, in any mode, on any number of ranks that
        divides the global batch; where the dataset has a state of its own, with as many workers and ranks as before, each from its own.

        Args:
            state: from `state_dict()`.
            strict: False takes over the saved order where this loader's differs, and goes on with changed data of the same length, and
                without the dataset's own state where that is of another pool.

        Raises:
            StateError: it does not fit; the message holds both values.
        """
        check_data(state, self.fingerprint, length_of(self.dataset), strict)
        world_size = self.config.world_size or 1
        differing = check_order(state, self._plan.parameters(), world_size, strict)
        plan = self._plan
        if differing:
            plan = make_plan(self.config, self.dataset, differing)
            check_order(state, plan.parameters(), world_size, strict=False)
        check_samples(state, plan.samples_before(int(state["batches"])))
        states = self._states.loaded(state.get("dataset"), strict)
        if differing:
            self._plan, self._pool = plan, None
            hold_chunks(self.config, inner_datasets(self.dataset), plan.parameters(), self._budget(self.dataset))
            self._reasons.update(dict.fromkeys(differing, "adopted from the loaded state"))
            self.config = self.config.with_(**{name: value for name, value in differing.items() if name in FIELDS})
            if isinstance(self.sampler, EpochSampler):
                vars(self.sampler).update(vars(self._order_sampler(self.dataset)))
        epoch, position = int(state["epoch"]), int(state["batches"])
        has_ended = bool(state.get("ended", self._plan.ends_at(position)))
        self._resume, self._at, self._states = (epoch, position), (epoch, position), states
        self._end = self._at if has_ended else None
        self._plan.load_state(epoch, position, state.get("sampler_state"))
        self._is_named = False
        self._next_epoch = epoch + 1 if has_ended else epoch
        self._stats.restore_skipped(int(state.get("skipped", 0)), state.get("skipped_samples", []))

    # -- trainers

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate looks for this before it shards a loader: True makes its `prepare` hand back the loader as it is."""
        return counts_as_prepared(self)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """`prepare` marks what it has been given; there is nothing to remember."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins where this loader stands; workers, statistics and batches on their way stay behind."""
        return _copied, (type(self), self.dataset, self._given, self.state_dict())

    # -- what it says

    def get_stats(self) -> dict[str, Any]:
        """Numbers on what happened since the loader was made, zeros before the first batch: a dict, and as text a table with units.

        Seconds: total_time (from each epoch's first request to its end), wait_time (blocked in ``next``), p50_wait, p90_wait,
        p99_wait, avg_batch_time, transfer_time, and of all workers read_seconds, decode_seconds, work_seconds. Bytes: bytes_read,
        held_bytes, queued_bytes, avg_memory_bytes and peak_memory_usage (PSS of this process and its workers); avg_memory_percent is that
        of the tightest limit on memory, the machine's, a cgroup's or the process's, and avg_cpu_usage is percent of one core.
        wait_fraction is wait_time / total_time. transfer_time is what copies to the device took: on CUDA by its own clock, while the
        user's step goes on, and of those that have ended. queued_batches are on their way or ready. padding_fraction, with
        bucket_by_length: how much of the batches so far is padding, by their attention_mask; of batches without one, how much of the
        epoch's first 1,000 would be by the lengths that are known, and padding_fraction_unbucketed how much of these would be by a plain
        shuffle. If samples were skipped, "skipped_samples" lists the first 1,000 (index, path, error).
        """
        if self.config.enable_monitoring and not self._stats.batches:
            self._stats.look(())
        stats = self._stats.as_dict()
        running = self._current()
        queued = 0 if running is None else max(0, running.pool.dispatch.handed_out - running.received)
        pool = self._pool if running is None else running.pool
        held: Counter[str] = Counter()
        for mode in {id(d._mode): d._mode for d in inner_datasets(self.dataset) if d._mode is not None}.values():
            held.update(mode.stats())  # views share one
        return Stats(
            dataset_size=length_of(self.dataset) or 0,
            num_batches=self._plan.steps() or 0,
            batch_size=self.config.batch_size or 0,
            num_workers=self.config.num_workers or 0,
            queued_batches=queued,
            queued_bytes=queued * self._last_nbytes,
            **stats,
            **self._plan.stats(),
            **held,
            **({} if pool is None else pool.ring.stats()),
        )

    def _current(self) -> EpochIterator | None:
        """The iterator that is under way, if there is one."""
        running = None if self._running is None else self._running()
        return None if running is None or running.is_done else running

    def __repr__(self) -> str:
        config, samples, batches = self.config, length_of(self.dataset), length_of(self)
        about = [type(self.dataset).__name__, *([] if samples is None else [f"{samples:,} samples"])]
        if isinstance(self.dataset, BaseDataset):
            about.append(str(self.dataset.loading_mode))
        shown: dict[str, Any] = {} if batches is None else {"batches": batches}
        shown["batch_size"] = config.batch_size
        own = config.order_of_its_own
        shown |= {name: type(getattr(config, name)).__name__ for name in own} if own else {"shuffle": config.shuffle}
        shown |= {"num_workers": config.num_workers, "seed": config.seed}
        for name in ("rank", "world_size") if config.world_size != 1 else ():
            shown[name] = getattr(config, name)
        for name in ("drop_last", "device"):
            if getattr(config, name) not in (None, False):
                shown[name] = getattr(config, name)
        return f"{type(self).__name__}(<{', '.join(about)}>, {', '.join(f'{name}={value}' for name, value in shown.items())})"

    def explain(self) -> str:
        """In words: each option and why it is what it is; what an epoch is; how often blocks are decoded for it, and what would make it
        less; the dataset's own explanation, and the memory budget."""
        reserved = None if self._ring_bytes is None else self._ring_bytes.nbytes
        budget = self._budget(self.dataset)
        return explain_loader(self.config, self._given, self._reasons, self._plan, self.dataset, self._collate, budget, reserved)


def _copied(cls: Any, dataset: Any, config: DataLoaderConfig, state: dict[str, Any]) -> Loader:
    loader: Loader = cls(dataset, config)
    loader.load_state_dict(state, strict=False)
    return loader
