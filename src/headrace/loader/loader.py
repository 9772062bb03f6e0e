"""The resumable DataLoader: epochs, positions, state and statistics."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torch.utils.hooks import RemovableHandle

from headrace.arguments import missing_attribute
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import Collating
from headrace.datasets.core.ways import choose_way
from headrace.errors import warn
from headrace.loader.budget import LoaderMemory
from headrace.loader.build import choose_collate, resolve, start_of
from headrace.loader.config import (
    FIELDS,
    DataLoaderConfig,
    Indexable,
    LoaderOptions,
    Reasons,
    check_options,
)
from headrace.loader.data import check_dataset, images_until, inner_datasets, length_of, source_of
from headrace.loader.distributed.agreement import Agreement
from headrace.loader.distributed.sampler import EpochSampler, check_world, counts_as_prepared
from headrace.loader.epoch import EpochIterator
from headrace.loader.explain import explain_loader
from headrace.loader.plan import IterablePlan, OrderPlan, make_plan
from headrace.loader.state import VERSION, Cursor, Position, check_data, check_order, check_samples
from headrace.loader.stateful import States
from headrace.loader.worker.fetch import Fetch
from headrace.loader.worker.fetch_stream import FetchIterable
from headrace.loader.worker.pool import WorkerPool, is_of_workers
from headrace.loader.worker.start import check_picklable
from headrace.memory.ring import Delivered, Ring
from headrace.monitor.hooks import Hooks, OnBatch, OnSlow
from headrace.monitor.stats import LoadingStats, Stats
from headrace.order import detect_world

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # that of `typing` has defaults since Python 3.13

    B = TypeVar("B", default=Any)
    """Of a batch."""
else:
    from typing import TypeVar

    B = TypeVar("B")
_COMPARED = 8  # positions of an order that ranks compare


def has_sampler(config: Any, options: Mapping[str, Any]) -> bool:
    """True if the indices come from a sampler of the user."""
    return any(
        options.get(name, getattr(config, name, None)) is not None
        for name in ("sampler", "batch_sampler")
    )


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
        self,
        dataset: Indexable,
        config: DataLoaderConfig | None = None,
        **overrides: Unpack[LoaderOptions],
    ) -> None:
        check_dataset(type(self).__name__, "dataset", dataset, has_sampler(config, overrides))
        check_options(type(self).__name__, config, overrides)
        self.given = config = (config or DataLoaderConfig()).with_(**overrides)
        world = detect_world(config.rank, config.world_size)
        self._reasons: Reasons
        config, self._reasons = resolve(config, dataset, world)
        self._collate = choose_collate(config, dataset)
        self._collating = Collating(self._collate, config.yields_batches)
        self._images = images_until(config.device, dataset, self._collating)
        usage, pixels = config.max_memory_usage, self._images.pixels
        self._memory = LoaderMemory(dataset, usage, self._collating, world.local_world_size, pixels)
        config = self._memory.fit(config, self._reasons)
        draws_again = config.replacement and (config.weights is not None or config.balanced)
        if draws_again or isinstance(config.sampler, WeightedRandomSampler):
            for inner in inner_datasets(dataset):
                inner.mode.expect_skew()
        parts = {
            "dataset": dataset,
            "collate_fn": self._collate,
            "worker_init_fn": config.worker_init_fn,
        }
        check_picklable(config.multiprocessing_context, parts)
        self.config = config
        self._plan = make_plan(config, dataset, {})
        self._planned = length_of(dataset)  # samples that the plan knows
        self._is_growth_said = False
        if config.drop_last and self._plan.steps() == 0 and length_of(dataset):
            warn(
                f"drop_last=True leaves no batch: {length_of(dataset):,} samples are fewer than "
                "one global batch (batch_size "
                f"{config.batch_size} on {config.world_size or 1} ranks); use drop_last=False, or "
                "a smaller batch_size"
            )
        self._memory.reserve_blocks(config, self._plan)
        self._stats, self._hooks = LoadingStats(), Hooks(functools.partial(source_of, dataset))
        self._pids: set[int] = set()
        self._cursor = Cursor[Position](lambda epoch: Position(epoch, 0))
        self._end: Position | None = None  # where an epoch ended
        stream = isinstance(self._plan, IterablePlan)
        # of a foreign dataset
        self._states = States(
            config.num_workers or 0, config.world_size or 1, config.rank or 0, stream
        )
        self._last_nbytes = 0
        self._pool: WorkerPool | None = None
        super().__init__(dataset, **self._torch_arguments(dataset))  # type: ignore[arg-type]  # torch takes sequences too
        is_shared = self.given.rank is None and isinstance(self._plan, OrderPlan)
        self._agreement = Agreement(self._facts() if is_shared else None, world)
        self._agreement.look()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            return missing_attribute(self, name)

    # -- set-up

    def _torch_arguments(self, dataset: Any) -> dict[str, Any]:
        """The arguments of torch's own constructor, so that everything which looks at a
        DataLoader finds what it expects.
        """
        config = self.config
        names = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "generator"]
        names += (
            ["prefetch_factor", "persistent_workers", "multiprocessing_context"]
            if config.num_workers
            else []
        )
        arguments: dict[str, Any] = {
            "collate_fn": self._collate,
            **{name: getattr(config, name) for name in names},
        }
        if config.batch_sampler is not None:
            # torch refuses one for an IterableDataset: in mode "streaming" it stays ours
            name = "batch_size" if isinstance(dataset, IterableDataset) else "batch_sampler"
            return {**arguments, name: None if name == "batch_size" else config.batch_sampler}
        arguments["batch_size"] = config.batch_size
        if config.batch_size is not None:
            arguments["drop_last"] = config.drop_last
        if not isinstance(dataset, IterableDataset):
            arguments["sampler"] = (
                config.sampler if config.sampler is not None else self._order_sampler(dataset)
            )
        return arguments

    def _order_sampler(self, dataset: Any) -> EpochSampler:
        assert isinstance(self._plan, OrderPlan)
        batches = self._plan.batches
        shares = {
            "rank": batches.rank,
            "world_size": batches.world_size,
            "drop_last": batches.drop_last,
            "pad": batches.pad,
        }
        return EpochSampler(
            self, dataset, batch_size=batches.batch_size, order=batches.order, **shares
        )

    def _facts(self) -> dict[str, Any]:
        """What the batches of all ranks together depend on."""
        config, order = self.config, self._plan.parameters()
        order.pop("global_batch", None)  # batch_size says it in the user's words
        data = {
            "length": self._length,
            "fingerprint": self.fingerprint,
            "batch_size": config.batch_size,
        }
        return {**data, **order, "drop_last": config.drop_last, "pad": config.pad}

    def _facts_of_epoch(self) -> dict[str, Any]:
        """What the batches of the epoch that begins depend on besides; some of its order too,
        which other code may compute differently.
        """
        assert isinstance(self._plan, OrderPlan)
        epoch, batches = self._cursor.at
        order = self._plan.batches_of(epoch).order
        positions = np.linspace(0, len(order) - 1, min(_COMPARED, len(order))).astype(np.int64)
        return {
            "epoch": epoch,
            "position": f"batch {batches}",
            "order": f"{order[positions].tolist()} at {_COMPARED} positions",
        }

    def _new_pool(self) -> WorkerPool:
        config, plan, dataset = self.config, self._plan, self.dataset
        ring = Ring((config.num_workers or 0) * (config.prefetch_factor or 1) + 2)
        if isinstance(plan, IterablePlan):
            fetch: Fetch = FetchIterable(
                dataset,
                ring,
                self._collating,
                config.batch_size or 1,
                config.drop_last,
                self._images.pixels,
            )
        else:
            is_streaming = isinstance(dataset, BaseDataset) and isinstance(dataset, IterableDataset)
            ahead = plan if isinstance(plan, OrderPlan) and is_streaming else None
            fetch = Fetch(
                dataset,
                ring,
                self._collating,
                ahead,
                max(1, config.num_workers or 0),
                plan.origin,
                self._images.pixels,
            )
        self._pids.clear()
        return WorkerPool(fetch, plan, config)

    # -- epochs

    def __len__(self) -> int:
        steps = self._plan.steps()
        if steps is None:
            raise TypeError(
                f"the length of a loader over {type(self.dataset).__name__} is not known"
            )
        return steps

    @property
    def padding(self) -> int:
        """Number of samples per epoch that come twice, so that all ranks have equally many."""
        return self._plan.padding

    @property
    def epoch(self) -> int:
        """The epoch of the current or last iterator."""
        return self._cursor.at.epoch

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iterator."""
        return self._cursor.next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterator; see NOTE [ epochs and positions ] in
        `loader/state.py`.
        """
        self._cursor.set_epoch(epoch)

    def __iter__(self) -> Iterator[B]:  # type: ignore[override]
        check_world(self.given, self.config, self._reasons["world_size"])
        self._check_growth()
        with self._cursor.starting() as goes_on:
            if self._agreement.is_asked:
                self._agreement.begin(self._facts_of_epoch())
            if self._pool is not None and not self._pool.is_sound:
                self._pool = None
            self._refit(goes_on)
            if not goes_on:
                self._states = self._states_of_next_epoch()
            iterator = EpochIterator(self, *self._cursor.at, self._states)
            # else an iterator uses it which may be gone before the first batch is asked for
            if self._pool is None or self._pool.is_free:
                self._start(iterator, self._states)
        self._cursor.running = iterator
        return iterator

    @property
    def _length(self) -> int | None:
        """Number of samples that the order is of, also where the dataset has grown since; None: it
        is not known.
        """
        return self._planned if isinstance(self._plan, OrderPlan) else length_of(self.dataset)

    def _check_growth(self) -> None:
        """Warns, once, of samples that the order does not know."""
        planned, length = self._length, length_of(self.dataset)
        if planned is None or length is None or length <= planned or self._is_growth_said:
            return
        self._is_growth_said = True
        warn(
            f"{type(self.dataset).__name__} had {planned:,} samples when this loader was made, and "
            f"has {length:,} now: the others are left out; make another loader"
        )

    def _start(self, iterator: EpochIterator, states: States) -> None:
        """Gives an iterator, of a dataset in these states, a pool that no other one uses."""
        try:
            iterator.start(self._free_pool(states))
        except RuntimeError as error:
            if self._pool is None or not is_of_workers(error):
                raise
            # a worker of an earlier epoch died just now, with nothing that anybody waits for
            self._pool = None
            iterator.start(self._free_pool(states))

    def _refit(self, goes_on: bool) -> None:
        """Before an epoch: what the first batch of the last one said of the ring's size."""
        if self._pool is not None and not self._pool.is_free:
            return
        is_stream = isinstance(self._plan, IterablePlan)
        # of so many workers is the state that a loaded epoch goes on from
        if goes_on and (is_stream or self._states):
            return
        config = self._memory.refit(self.config, self._reasons)
        if config is not None:
            self.config, self._pool = config, None
            # as torch's loader shows them
            for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout"):
                self.__dict__[name] = getattr(config, name)
            if is_stream:  # its order depends on the number of workers
                self._plan = make_plan(config, self.dataset, {"seed": self._plan.seed})

    def _free_pool(self, states: States) -> WorkerPool:
        if self._pool is not None and self._pool.is_free:
            return self._pool
        if self.config.num_workers and self.given.multiprocessing_context is None:
            # threads may run now that did not when the loader was made
            context, self._reasons["multiprocessing_context"] = start_of(self.given, self.dataset)
            self.config = self.config.with_(multiprocessing_context=context)
            self.multiprocessing_context = context
        pool = self._new_pool()
        if self.config.num_workers:
            states.to_new_processes()
        if pool.is_lasting:
            self._pool = pool  # a former one ends with the iterator that still uses it
        return pool

    def _states_of_next_epoch(self) -> States:
        workers = self.config.num_workers or 0
        return self._states.of_next_epoch(
            workers, lives_on=not workers or bool(self.config.persistent_workers)
        )

    # -- what an iterator tells

    def _received(self, delivered: Delivered, states: States, at: Position) -> None:
        """The user gets a batch: the position moves on."""
        self._agreement.received()
        if self._cursor.loaded is None:  # else another state was loaded since
            self._states = states
            self._plan.received(*at)
        self._cursor.at, self._last_nbytes = at, delivered.nbytes
        self._memory.reserve_measured(self.config, delivered.nbytes)
        if self.config.enable_monitoring:
            self._pids.add(delivered.report["pid"])
            if self._stats.batches:  # the first batch does not wait for it
                self._stats.look(self._pids)

    def _ended(self, at: Position) -> None:
        """An epoch has ended."""
        self._end = at
        self._agreement.ended()

    def _broke(self, pool: WorkerPool) -> None:
        """A pool can't be used any more: the next iterator gets another one."""
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
        if (running := self._cursor.running) is not None:
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
        states of datasets ] in `loader/stateful.py`).

        Raises:
            StateError: the `state_dict` of the user's dataset raised an error, or returned
                something that can't be pickled.
        """
        at, plan = self._cursor.position, self._plan
        states = self._states_of_next_epoch() if self._cursor.is_at_next else self._states
        if not (states or at.batches or self.config.num_workers):
            states = states.before_first_batch(self.dataset)
        has_ended = self._end == at
        state = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "length": self._length,
            **plan.parameters(),
            **at._asdict(),
            "samples": plan.samples_before(at.batches),
        }
        if self._stats.skipped_count:
            state |= {
                "skipped": self._stats.skipped_count,
                "skipped_samples": list(self._stats.skipped),
            }
        # after the last batch, or of an epoch whose length nobody knows before
        if has_ended or plan.ends_at(at.batches):
            state["ended"] = has_ended
        if (sampler_state := plan.state_at(*at)) is not None:
            state["sampler_state"] = sampler_state
        return {**state, "dataset": states.as_dict()} if states else state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Resumes from a saved state with the next iterator.

        The number of workers and the loading mode may change, and so may the number of ranks, if it
        divides the global batch. If the dataset has its own state, the number of workers and ranks
        must be the same as before, and each rank must load its own state.

        Args:
            state: the result of `state_dict()`.
            strict: False: adopt the saved order if this loader's differs, accept changed data of
                the same length, and ignore the dataset's own state if it belongs to another job.

        Raises:
            StateError: the state does not fit; the message has both values.
        """
        check_data(state, self.fingerprint, self._length, strict)
        world_size = self.config.world_size or 1
        plan = self._plan
        differing = check_order(state, plan.parameters(), world_size, strict)
        if differing:
            plan = make_plan(self.config, self.dataset, differing)
            check_order(state, plan.parameters(), world_size, strict=False)
        at = Position(int(state["epoch"]), int(state["batches"]))
        check_samples(state, plan.samples_before(at.batches))
        states = self._states.loaded(state.get("dataset"), strict)
        plan.load_state(*at, state.get("sampler_state"))
        if plan is not self._plan:
            self._plan, self._pool = plan, None
            self._memory.reserve_blocks(self.config, plan)
            self._reasons.update(dict.fromkeys(differing, "adopted from the loaded state"))
            self.config = self.config.with_(
                **{name: value for name, value in differing.items() if name in FIELDS}
            )
            if isinstance(self.sampler, EpochSampler):
                vars(self.sampler).update(vars(self._order_sampler(self.dataset)))
        has_ended = bool(state.get("ended", plan.ends_at(at.batches)))
        self._cursor.load(at, has_ended)
        self._states, self._end = states, at if has_ended else None
        self._stats.restore_skipped(int(state.get("skipped", 0)), state.get("skipped_samples", []))

    # -- trainers

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate looks for this before it shards a loader: True makes its `prepare` hand
        back the loader as it is.
        """
        return counts_as_prepared(self.config, isinstance(self._plan, OrderPlan))

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """`prepare` marks what it has been given; there is nothing to remember."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy starts at the position of this loader. Workers, statistics and prefetched
        batches are not copied.
        """
        return _copied, (type(self), self.dataset, self.given, self.state_dict())

    # -- reports

    def on_batch(self, function: OnBatch) -> RemovableHandle:
        """Registers a function that is called with the `BatchTimes` of each batch.

        It is called just before the loop receives the batch. The loop receives its exceptions.

        Returns:
            A handle, whose ``remove()`` unregisters the function. A copy of the loader has no
            registered functions.
        """
        return self._hooks.on_batch(function)

    def on_slow(self, threshold: float, function: OnSlow) -> RemovableHandle:
        """Registers a function that is called with a `SlowStage` for each stage of a batch that
        took more than `threshold` seconds.

        For decoding, transforms, and datasets of other libraries, the time of the slowest sample
        counts. For reading and collating, the time of the whole batch counts.

        Returns:
            A handle, whose ``remove()`` unregisters the function.

        Raises:
            ConfigError: `threshold` is not a number of at least 0.
        """
        return self._hooks.on_slow(threshold, function)

    def get_stats(self) -> dict[str, Any]:
        """Returns statistics since the loader was created: a dict, which prints as a table with
        units. It is empty until the first batch is asked for.

        * Time, in seconds: total_time (from the first request of each epoch to its end), wait_time
          (blocked in ``next``), p50_wait, p90_wait, p99_wait, avg_batch_time, transfer_time (copies
          to the device; on CUDA measured by the device, for the copies that have ended).
          wait_fraction is wait_time / total_time.
        * Time of all workers, in seconds: read_seconds, decode_seconds, transform_seconds,
          collate_seconds, sample_seconds (all work of a dataset of another library), work_seconds
          (all work on batches), work_cpu_seconds.
        * Bytes: bytes_read, held_bytes, queued_bytes, avg_memory_bytes and peak_memory_bytes (PSS
          of this process and its workers). avg_memory_percent refers to the tightest memory limit:
          the machine's, a cgroup's or the process's. avg_cpu_usage is in percent of one core.
        * Means of the last 100 batches: recent_batch_time, recent_samples_per_second,
          recent_wait_fraction.
        * Counts: queued_batches (being made, or ready), normalized_on_device (batches whose images
          were normalised there).
        * With bucket_by_length: padding_fraction, the fraction of padding in the batches so far, by
          their attention_mask. For batches without one: in the first 1,000 batches of the epoch, by
          the known lengths; padding_fraction_unbucketed is then that of a plain shuffle.
        * If samples were skipped: skipped_samples, the first 1,000, each a dict of index, path and
          error.
        """
        if not self._stats.is_begun:
            return Stats()
        if self.config.enable_monitoring and self._stats.batches < 2:
            self._stats.look(self._pids)
        running = self._cursor.running
        pool = self._pool if running is None else running.pool
        queued = (
            0
            if running is None or pool is None
            else max(0, pool.dispatch.handed_out - running.received)
        )
        cached: Counter[str] = Counter()
        for mode in {
            id(d._mode): d._mode for d in inner_datasets(self.dataset) if d._mode is not None
        }.values():
            cached.update(mode.stats())  # views share one
        return Stats(
            dataset_size=length_of(self.dataset) or 0,
            num_batches=self._plan.steps() or 0,
            batch_size=self.config.batch_size or 0,
            num_workers=self.config.num_workers or 0,
            pin_memory=bool(self.config.pin_memory),
            persistent_workers=bool(self.config.persistent_workers),
            queued_batches=queued,
            queued_bytes=queued * self._last_nbytes,
            **self._stats.as_dict(),
            **self._plan.stats(),
            **cached,
            **({} if pool is None else pool.ring.stats()),
        )

    def __repr__(self) -> str:
        config, samples, batches = self.config, length_of(self.dataset), length_of(self)
        about = [
            type(self.dataset).__name__,
            *([] if samples is None else [f"{samples:,} samples"]),
        ]
        if isinstance(self.dataset, BaseDataset):
            about.append(str(self.dataset.loading_mode))
        values: dict[str, Any] = {} if batches is None else {"batches": batches}
        values["batch_size"] = config.batch_size
        own = config.order_of_its_own
        values |= (
            {name: type(getattr(config, name)).__name__ for name in own}
            if own
            else {"shuffle": config.shuffle}
        )
        values |= {"num_workers": config.num_workers, "seed": config.seed}
        if config.world_size != 1:
            values |= {"rank": config.rank, "world_size": config.world_size}
        values |= {
            name: value
            for name in ("drop_last", "device")
            if (value := getattr(config, name)) not in (None, False)
        }
        return (
            f"{type(self).__name__}(<{', '.join(about)}>, "
            f"{', '.join(f'{name}={value}' for name, value in values.items())})"
        )

    def explain(self) -> str:
        """Describes each option and the reason for its value, the epoch, how often blocks are
        decoded and how to reduce that, the dataset, and the memory budget.
        """
        memory = self._memory
        way = (
            choose_way(self.dataset, self._collating).explain()
            if isinstance(self.dataset, BaseDataset)
            else None
        )
        parts = memory.budget, memory.reserved, way, self._images
        return explain_loader(
            self.config, self.given, self._reasons, self._plan, self.dataset, self._collate, *parts
        )


def _copied(cls: Any, dataset: Any, config: DataLoaderConfig, state: dict[str, Any]) -> Loader:
    loader: Loader = cls(dataset, config)
    loader.load_state_dict(state, strict=False)
    return loader
