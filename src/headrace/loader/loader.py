"""The resumable DataLoader: epochs, positions, state and statistics."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torch.utils.hooks import RemovableHandle

from headrace.arguments import check_callable, check_seconds
from headrace.core.batcher import Batcher, Collating
from headrace.core.dataset import BaseDataset
from headrace.core.held import Held
from headrace.core.options import LoadingMode
from headrace.datasets.unnormalized import DevicePixels, pixels_of
from headrace.display import Lines, short_call
from headrace.errors import StateError, warn
from headrace.loader.budget import LoaderMemory
from headrace.loader.config import (
    FIELDS,
    Data,
    DataLoaderConfig,
    Indexable,
    Reasons,
    check_dataset,
    check_options,
    explain_options,
    inner_datasets,
    is_accelerator,
    is_path,
    length_of,
    resolve,
)
from headrace.loader.epoch import EpochIterator, LoaderState, Position
from headrace.loader.fetch import Fetch, FetchIterable
from headrace.loader.plan import SamplerPlan, StreamPlan, ends_at, make_plan
from headrace.loader.processes import WorkerPool, is_of_workers
from headrace.loader.ranks import Agreement, EpochSampler, check_world, counts_as_prepared
from headrace.loader.start import check_picklable, choose_context
from headrace.loader.state import VERSION, States, check_state, is_stateful
from headrace.memory.budget import format_size
from headrace.memory.ring import Ring
from headrace.monitor.stats import LoadingStats, OnBatch, OnSlow, Stats, slow_stages
from headrace.order import RankBatches, detect_world

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # that of `typing` has defaults since Python 3.13

    B = TypeVar("B", default=Any)
    """Of a batch."""
else:
    from typing import TypeVar

    B = TypeVar("B")


class Loader(DataLoader[B]):
    """A `torch.utils.data.DataLoader` whose order can be repeated and resumed. `DataLoaderConfig`
    describes its options.

    The batches of an epoch depend on the data, the seed, the epoch and the global batch only; not
    on workers, loading mode or start method, and not on the number of ranks that share a global
    batch. Batches use recycled buffers. A buffer is used again when the last tensor over it is
    freed, so a batch that you keep is never overwritten.

    Attributes:
        config: the options, with all automatic values resolved.
        given: the options as passed, with None where `config` has a chosen value.
        dataset: the dataset as passed.
    """

    config: DataLoaderConfig
    given: DataLoaderConfig
    dataset: Any

    def __init__(
        self, dataset: Indexable, config: DataLoaderConfig | None = None, **overrides: Any
    ) -> None:
        check_options(type(self).__name__, config, overrides)
        self.given = config = (config or DataLoaderConfig()).with_(**overrides)
        check_dataset("dataset", dataset, config.has_sampler)
        self.dataset = dataset
        world = detect_world(config.rank, config.world_size)
        self._reasons: Reasons
        config, collate, self._reasons = resolve(config, dataset, world)
        self._collating = Collating(collate, config.yields_batches)
        self._pixels: DevicePixels | None = None  # what leaves images to a device
        if is_accelerator(config.device):
            self._pixels = pixels_of(dataset, self._collating)
        self._memory = LoaderMemory(
            dataset, config.max_memory_usage, self._collating, world.local_world_size, self._pixels
        )
        self.config = config = self._memory.fit(config, self._reasons)
        draws_again = config.replacement and (config.weights is not None or config.balanced)
        if draws_again or isinstance(config.sampler, WeightedRandomSampler):
            for inner in inner_datasets(dataset):
                held = inner.value_source.find(Held)
                if held is not None:
                    held.expect_skew()
        functions = {"collate_fn": collate, "worker_init_fn": config.worker_init_fn}
        check_picklable(config.multiprocessing_context, {"dataset": dataset, **functions})
        self._plan = make_plan(config, dataset)
        self._is_ordered = isinstance(self._plan, RankBatches)  # by headrace's own order
        self._length = length_of(dataset)  # later ones may differ, where the dataset grows
        if config.drop_last and self._plan.steps == 0 and self._length:
            warn(
                f"drop_last=True leaves no batch: {self._length:,} samples are fewer than one "
                f"global batch (batch_size {config.batch_size} on {config.world_size} ranks); use "
                "drop_last=False, or a smaller batch_size"
            )
        self._memory.reserve_blocks(config, self._plan)
        self._stats = LoadingStats()
        self._hooks: OrderedDict[int, OnBatch] = OrderedDict()
        self._pids: set[int] = set()
        self._state: LoaderState[Position] = LoaderState(Position)
        self._states: States | None = None  # of a foreign dataset
        is_stream = isinstance(self._plan, StreamPlan)
        if is_stream or is_stateful(dataset):
            job = (config.num_workers or 0, world.world_size, world.rank)
            self._states = States(*job, is_stream)
        self._pool: WorkerPool | None = None
        arguments = self._torch_arguments()
        super().__init__(dataset, **arguments)  # type: ignore[arg-type]  # it takes sequences too
        self._agreement: Agreement | None = None
        if self.given.rank is None and world.world_size > 1 and self._is_ordered:
            # what the batches of all ranks together depend on
            facts = {"length": self._length, "fingerprint": self.fingerprint}
            facts |= self._plan.parameters()
            del facts["global_batch"]  # batch_size says it in the user's words
            for name in ("batch_size", "drop_last", "pad"):
                facts[name] = getattr(config, name)
            # some of the order too, which other code may compute differently
            assert isinstance(self._plan, RankBatches)
            order = self._plan.order
            facts["order"] = order[: len(order) : max(1, len(order) // 8)].tolist()
            self._agreement = Agreement(facts, world)

    # -- set-up

    def _torch_arguments(self) -> dict[str, Any]:
        """The arguments of torch's constructor, for code that inspects a DataLoader."""
        config = self.config
        names = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "generator"]
        if config.num_workers:
            names += ["prefetch_factor", "persistent_workers", "multiprocessing_context"]
        arguments: dict[str, Any] = {name: getattr(config, name) for name in names}
        arguments["collate_fn"] = self._collating.function
        # torch refuses samplers for an IterableDataset: in mode "streaming" they stay ours
        is_iterable = isinstance(self.dataset, IterableDataset)
        if config.batch_sampler is not None and is_iterable:
            arguments["batch_size"] = None
        elif config.batch_sampler is not None:
            arguments["batch_sampler"] = config.batch_sampler
        else:
            arguments["batch_size"] = config.batch_size
            arguments["drop_last"] = config.drop_last and config.batch_size is not None
            if not is_iterable:
                arguments["sampler"] = config.sampler
                if isinstance(self._plan, RankBatches):
                    arguments["sampler"] = EpochSampler(self, self.dataset, self._plan)
        return arguments

    # -- epochs

    def __len__(self) -> int:
        steps = self._plan.steps
        if steps is None:
            raise TypeError(
                f"the length of a loader over {type(self.dataset).__name__} is not known"
            )
        return steps

    @property
    def padding(self) -> int:
        """Number of samples per epoch that are repeated, so that all ranks have the same number."""
        return self._plan.padding

    @property
    def epoch(self) -> int:
        """The epoch of the current or last iterator."""
        return self._state.at.epoch

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iterator."""
        return self._state.next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterator; see NOTE [ epochs and positions ] in
        `loader/epoch.py`.
        """
        self._state.set_epoch(epoch)

    def __iter__(self) -> Iterator[B]:  # type: ignore[override]
        is_alone = self.given.rank is None and self.config.world_size == 1
        if is_alone and dist.is_available() and dist.is_initialized():
            check_world(self._reasons["world_size"])
        before = copy.copy(self._state)
        try:
            at = self._state.start()
            goes_on = at is before.loaded
            if self._pool is not None and not self._pool.is_sound:
                self._pool = None
            is_free = self._pool is None or self._pool.is_free
            if self._memory.too_large and is_free:
                self._refit(goes_on)
            if self._states is not None and not goes_on:
                self._states = self._states_of_next_epoch(self._states)
            iterator = EpochIterator(self, at, self._states)
            # else an iterator uses it which may be gone before the first batch is asked for
            if is_free:
                self._start(iterator)
        except BaseException:  # the next attempt begins at the same position
            self._state = before
            raise
        self._state.running = iterator
        return iterator

    def _refit(self, goes_on: bool) -> None:
        """Fits the ring to the batches of the last epoch, before another one."""
        is_stream = isinstance(self._plan, StreamPlan)
        # of so many workers is the state that a loaded epoch goes on from
        if goes_on and (is_stream or self._states):
            return
        self.config = self._memory.fit(self.config, self._reasons)
        self._pool = None
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout"):
            self.__dict__[name] = getattr(self.config, name)  # as torch's loader shows them
        if is_stream:  # its order depends on the number of workers
            self._plan = make_plan(self.config, self.dataset)

    def _start(self, iterator: EpochIterator) -> None:
        """Starts an iterator with a pool of its own."""
        if self._pool is not None and self._pool.is_free:
            try:
                iterator.start(self._pool)
                return
            except RuntimeError as error:
                if not is_of_workers(error):
                    raise
                # a worker of an earlier epoch died just now, with nothing that anybody waits for
        iterator.start(self._new_pool(iterator.states))

    def _new_pool(self, states: States | None) -> WorkerPool:
        if self.config.num_workers and self.given.multiprocessing_context is None:
            # threads may run now that did not when the loader was made
            parts = [self._collating.function, self.config.worker_init_fn]
            context, why = choose_context(None, self.dataset, parts)
            self._reasons["multiprocessing_context"] = why
            self.config = self.config.with_(multiprocessing_context=context)
            self.multiprocessing_context = context
        config = self.config
        dataset = self.dataset
        workers = config.num_workers or 0
        ring = Ring(workers * (config.prefetch_factor or 1) + 2)
        common: dict[str, Any] = {"collating": self._collating, "pixels": self._pixels}
        fetch: Fetch
        if isinstance(self._plan, StreamPlan):
            size = config.batch_size or 1
            fetch = FetchIterable(
                dataset, ring, batch_size=size, drop_last=config.drop_last, **common
            )
        else:
            is_streaming = isinstance(dataset, BaseDataset) and isinstance(dataset, IterableDataset)
            batches = self._plan if is_streaming and isinstance(self._plan, RankBatches) else None
            fetch = Fetch(dataset, ring, batches=batches, stride=max(1, workers), **common)
        pool = WorkerPool(fetch, config)
        self._pids.clear()
        if workers and states is not None:
            states.to_new_processes()
        if pool.is_lasting:
            self._pool = pool  # a former one ends with the iterator that still uses it
        return pool

    def _states_of_next_epoch(self, states: States) -> States:
        workers = self.config.num_workers or 0
        return states.of_next_epoch(workers, not workers or bool(self.config.persistent_workers))

    # -- called by iterators

    def _received(self, iterator: EpochIterator, pid: int) -> None:
        """Advances the position: the user receives a batch."""
        if self._agreement is not None and iterator.received == 2:
            self._agreement.compare(iterator.at.epoch, iterator.begin)
        state = self._state
        state.at = iterator.at
        if state.loaded is None:  # else another state was loaded since
            self._states = iterator.states
            if isinstance(self._plan, SamplerPlan):
                self._plan.received(*iterator.at)
        if self._memory.reservation is None:
            self._memory.reserve_measured(self.config, iterator.nbytes)
        if self.config.enable_monitoring:
            self._pids.add(pid)
            if self._stats.batches:  # the first batch does not wait for it
                self._stats.look(self._pids)

    def _broke(self, pool: WorkerPool) -> None:
        """Drops a broken pool: the next iterator gets another one."""
        if self._pool is pool:
            self._pool = None

    def close(self) -> None:
        """Stops persistent workers and returns the ring's share of the memory budget. The loader
        can be used again, and a running iterator continues.
        """
        self._pool = None
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops all workers, including those of a running iterator, and closes the loader, which
        can be used again.
        """
        running = self._state.running
        if running is not None:
            running.close()
        self.close()

    # -- state

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the dataset; for a dataset of another library its type and length."""
        own = getattr(self.dataset, "fingerprint", None)
        return own if isinstance(own, str) else f"{type(self.dataset).__name__}:{self._length}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: the order, and the number of global batches that the user has
        received.

        It includes the states of the user's sampler, dataset and iterator, if they have any (NOTE [
        states of datasets ] in `loader/state.py`).

        Raises:
            StateError: the `state_dict` of the user's dataset raised an error, or returned
                something that can't be pickled.
        """
        at = self._state.position
        plan = self._plan
        state = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "length": self._length,
            **plan.parameters(),
            **at._asdict(),
            "samples": plan.samples_before(at.batches) if isinstance(plan, RankBatches) else None,
        }
        if self._stats.counts["skipped"]:
            state["skipped"] = self._stats.counts["skipped"]
            state["skipped_samples"] = list(self._stats.skipped)
        has_ended = self._state.end == at
        # after the last batch, or of an epoch whose length nobody knows before
        if has_ended or ends_at(plan, at.batches):
            state["ended"] = has_ended
        sampler_state = plan.state_at(*at) if isinstance(plan, SamplerPlan) else None
        if sampler_state is not None:
            state["sampler_state"] = sampler_state
        states = self._states
        if states is not None:
            if self._state.is_at_next:
                states = self._states_of_next_epoch(states)
            if not (states or at.batches or self.config.num_workers):
                states = states.before_first_batch(self.dataset)
            if states:
                state["dataset"] = states.as_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Resumes from a saved state with the next iterator.

        The number of workers and the loading mode may change, and so may the number of ranks, if it
        divides the global batch. If the dataset has its own state, the number of workers and ranks
        must be the same as before, and each rank must load its own state.

        Args:
            state: the result of `state_dict()`.
            strict: False: accept changed data of the same length, and ignore the dataset's own
                state if it belongs to another job.

        Raises:
            StateError: the state does not fit; the message has both values.
        """
        plan = self._plan
        world_size = self.config.world_size or 1
        order = plan.parameters()
        check_state(state, self.fingerprint, self._length, order, world_size, strict)
        at = Position(state["epoch"], state["batches"])
        samples = plan.samples_before(at.batches) if isinstance(plan, RankBatches) else None
        if state.get("samples") != samples:
            raise StateError(
                f"load_state_dict: {state.get('samples')} samples of the epoch were received when "
                f"the state was saved, this loader would go on after {samples}: with pad=False the "
                "last batches of an epoch depend on the number of ranks; resume with the saved one"
            )
        states = None
        if self._states is not None:
            states = self._states.loaded(state.get("dataset"), strict)
        elif state.get("dataset") is not None:
            raise StateError(
                f"load_state_dict: the state includes that of {type(self.dataset).__name__}, which "
                "has no load_state_dict now: build the dataset as it was"
            )
        if isinstance(plan, SamplerPlan):
            plan.load_state(*at, state.get("sampler_state"))
        self._states = states
        self._state.load(at, bool(state.get("ended", ends_at(plan, at.batches))))
        self._stats.counts["skipped"] = state.get("skipped") or 0
        self._stats.skipped = list(state.get("skipped_samples") or [])

    # -- trainers

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate looks for this before it shards a loader: True makes its `prepare` hand
        back the loader as it is.
        """
        return counts_as_prepared(self.config, self._is_ordered)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """`prepare` marks what it has been given; there is nothing to remember."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy starts at the position of this loader. Workers, statistics and prefetched
        batches are not copied.
        """
        return type(self), (self.dataset, self.given), self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state, strict=False)

    # -- reports

    def on_batch(self, function: OnBatch) -> RemovableHandle:
        """Registers a function that is called with the `BatchTimes` of each batch.

        It is called just before the loop receives the batch. The loop receives its exceptions.

        Returns:
            A handle, whose ``remove()`` unregisters the function. A copy of the loader has no
            registered functions.
        """
        check_callable("on_batch: function", function, optional=False)
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = function
        return handle

    def on_slow(self, threshold: float, function: OnSlow) -> RemovableHandle:
        """Registers a function that is called with a `SlowStage` for each stage of a batch that
        took more than `threshold` seconds.

        Returns:
            A handle, whose ``remove()`` unregisters the function.

        Raises:
            ConfigError: `threshold` is not a number of at least 0.
        """
        check_seconds("on_slow: threshold", threshold)
        check_callable("on_slow: function", function, optional=False)
        return self.on_batch(slow_stages(threshold, function))

    def get_stats(self) -> dict[str, Any]:
        """Returns statistics since the loader was created: a dict, which prints as a table. It
        is empty until the first batch is asked for.

        * Time, in seconds: total_time (from the first request of each epoch to its end), wait_time
          (blocked in ``next``), p50_wait, p90_wait, p99_wait, avg_batch_time, transfer_time (copies
          to the device; on CUDA measured by the device, for the copies that have ended).
          wait_fraction is wait_time / total_time.
        * Time of all workers, in seconds: read_seconds, decode_seconds, transform_seconds,
          collate_seconds, sample_seconds (all work of a dataset of another library), work_seconds
          (all work on batches), work_cpu_seconds.
        * Bytes: bytes_read, held_bytes, queued_bytes, avg_memory_bytes and peak_memory_bytes (PSS
          of this process and its workers). avg_memory_usage is in percent of the tightest memory
          limit: the machine's, a cgroup's or the process's. avg_cpu_usage is in percent of one
          core.
        * Counts: queued_batches (being made, or ready), normalized_on_device (batches whose images
          were normalised there).
        * If samples were skipped: skipped_samples, the first 1,000, each a dict of index, path and
          error.
        """
        if not self._stats.is_begun:
            return Stats()
        if self.config.enable_monitoring and self._stats.batches < 2:
            self._stats.look(self._pids)
        config = self.config
        stats = Stats(
            dataset_size=length_of(self.dataset) or 0,
            num_batches=self._plan.steps or 0,
            batch_size=config.batch_size or 0,
            num_workers=config.num_workers or 0,
            queued_batches=0,
            queued_bytes=0,
            **self._stats.as_dict(),
        )
        # views share one
        stores = {id(inner.held): inner.held for inner in inner_datasets(self.dataset)}
        cached: Counter[str] = Counter()
        for store in stores.values():
            if store is not None:
                cached.update(store.stats())
        stats.update(cached)
        pool = self._pool
        running = self._state.running
        if running is not None:
            pool = running.pool
            stats["queued_batches"] = running.queued
            stats["queued_bytes"] = running.queued * running.nbytes
        if pool is not None:
            stats.update(pool.fetch.ring.stats())
        return stats

    def __repr__(self) -> str:
        options = short_call("", DataLoaderConfig.__init__, vars(self.given))[1:-1]
        about = f"{type(self.dataset).__name__}, {length_of(self.dataset)} samples"
        return f"{type(self).__name__}(<{about}>, {options})"

    def explain(self) -> str:
        """Describes each option and the reason for its value, the epoch, the dataset, and the
        memory budget.
        """
        config = self.config
        plan = self._plan
        dataset = self.dataset
        order = plan.parameters()
        collate = self._collating.function
        lines = explain_options(config, self.given, self._reasons, order, collate)
        epoch = "an epoch: as many batches as there are"
        if plan.steps is not None:
            epoch = f"an epoch: {plan.steps:,} batches of {order['global_batch']:,}"
            if config.world_size != 1 and self._is_ordered:
                epoch += f" ({config.batch_size:,} on each of {config.world_size} ranks)"
        lines.append(f"{epoch}; {self._length} samples, {self.padding} of them twice")
        is_own = isinstance(dataset, BaseDataset)
        if is_own:
            nbytes = dataset.sample_source.block_nbytes
            if nbytes and dataset.loading_mode is not LoadingMode.EAGER:
                size = format_size(nbytes)
                lines.append(f"blocks of the storage: each of {size} is decoded as a whole")
            lines.append(f"batches: {Batcher(dataset, self._collating).explain()}")
        if self._pixels is not None and config.device is not None:
            dtype = str(self._pixels.normalization.dtype).removeprefix("torch.")
            lines.append(
                f"images: uint8 until {torch.device(config.device)}, and normalised there, to "
                f"{dtype} (normalize='host': on the host)"
            )
        if is_own:
            lines.append(dataset.explain())
        if not is_own or config.max_memory_usage is not None:
            lines.append(self._memory.budget.explain())
        return Lines("\n".join(lines))


def create_dataloader(
    dataset: Data, config: DataLoaderConfig | None = None, **overrides: Any
) -> Loader:
    """Creates a `Loader` for a dataset, or for a path, which `open_dataset` opens.

    Samples are shuffled by default, unlike in torch. Pass ``shuffle=False`` or
    ``config=DataLoaderConfig.eval()`` for validation and test data.

    Args:
        dataset: any torch dataset, or a path. With a path, keywords that are not fields of
            `DataLoaderConfig` are passed to `open_dataset`, as are `seed` and `max_memory_usage`.
        config: the options. None: the defaults.
        **overrides: fields of `DataLoaderConfig`, which replace those of `config`; see there.

    Raises:
        ConfigError: an option is invalid, and the message names it.
        BudgetError: not even one batch fits the memory budget.
    """
    opened, shared = open_paths("create_dataloader", {"dataset": dataset}, config, overrides)
    return Loader(opened.get("dataset", dataset), shared)


def open_paths(
    door: str,
    data: Mapping[str, Any],
    config: DataLoaderConfig | None,
    options: dict[str, Any],
    arguments: frozenset[str] = frozenset(),
) -> tuple[dict[str, Any], DataLoaderConfig]:
    """Opens the paths among the data, and returns their datasets by name, and the loaders' config.

    Options that are no fields of `DataLoaderConfig`, and those of both, go to these datasets.
    `door` is the called function, `arguments` its other arguments.
    """
    paths = {name: value for name, value in data.items() if is_path(value)}
    if not paths:
        check_options(door, config, options, arguments)
        return {}, (config or DataLoaderConfig()).with_(**options)
    from headrace.datasets.open import KNOWN_KEYWORDS, open_dataset  # imports all formats

    check_options(door, config, options, KNOWN_KEYWORDS | arguments)
    own = {name: value for name, value in options.items() if name not in FIELDS}
    rest = {name: value for name, value in options.items() if name in FIELDS}
    shared = (config or DataLoaderConfig()).with_(**rest)
    for name in ("seed", "max_memory_usage"):  # of both
        value = getattr(shared, name)
        if value != getattr(DataLoaderConfig, name):
            own[name] = value
    return {name: open_dataset(path, **own) for name, path in paths.items()}, shared
