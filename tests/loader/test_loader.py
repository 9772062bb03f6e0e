"""Loader as users see it: batches, epochs, errors, and what is left of them."""

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import random
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from headrace import HeadraceWarning, ImageDataset, SampleError, WorkerError, create_dataloader
from headrace.collate import stack_collate
from headrace.testing.contract import RandomProbe, same
from tests.loader.test_foreign import Count, Noise, RandomWalk
from tests.testing.test_contract import SquareDataset

WORKERS = pytest.mark.parametrize("workers", [0, 1])


def drawn(loader: Any) -> list[list[int]]:
    """The indices of the batches of a SquareDataset."""
    return [batch[:, 0].tolist() for batch in loader]


def epoch_of(epoch: int, **options: Any) -> list[list[int]]:
    options = {"batch_size": 4, "num_workers": 0, "seed": 5, **options}
    loader = create_dataloader(SquareDataset(), **options)
    loader.set_epoch(epoch)
    return drawn(loader)


def position(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["batches"]


class Worker(Dataset[int]):
    """Eight samples, each of which is the number of its process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def pids_of(loader: Any) -> set[int]:
    return {int(pid) for batch in loader for pid in batch}


# -- it is a DataLoader


def test_it_has_what_trainers_read(loader_of: Any) -> None:
    dataset = SquareDataset()
    loader = loader_of(dataset, num_workers=1, batch_size=5, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, DistributedSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert loader.dataset is dataset and loader.collate_fn is stack_collate
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (5, 1, True)
    assert (loader.pin_memory, loader.timeout, loader.generator) == (False, 0, None)
    sampler = loader.sampler
    assert (sampler.rank, sampler.num_replicas, sampler.seed, len(sampler)) == (0, 1, 5, 40)
    assert len(loader) == len(list(loader)) == 8
    assert not hasattr(loader, "no_such_attribute")


def test_an_iterator_knows_what_is_left(loader_of: Any) -> None:
    loader = loader_of(SquareDataset())
    iterator = iter(loader)
    assert iter(iterator) is iterator and len(iterator) == len(loader) == 11
    next(iterator)
    assert len(iterator) == 10
    assert len(list(iterator)) == 10 and len(iterator) == 0
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


# -- NOTE [ epochs and positions ]


@WORKERS
def test_epochs_are_counted_or_named(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    for epoch in range(2):
        assert drawn(loader) == epoch_of(epoch)
        assert loader.epoch == epoch
    loader.set_epoch(7)
    assert drawn(loader) == epoch_of(7)
    assert drawn(loader) == epoch_of(8)
    for epoch in (5, 5, 0):
        loader.sampler.set_epoch(epoch)
        assert drawn(loader) == epoch_of(epoch)
    loader.sampler.set_epoch(1)
    loader.set_epoch(2)
    assert drawn(loader) == epoch_of(2), "the last one counts"
    loader.sampler.set_epoch(1)
    iterator = iter(loader)
    first = next(iterator)[:, 0].tolist()
    loader.set_epoch(4)
    assert [first, *drawn(iterator)] == epoch_of(1), "and for the next iterator"


@WORKERS
def test_the_position_is_what_the_user_has_received(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    assert position(loader) == (0, 0)
    for received, _ in enumerate(loader, 1):
        assert position(loader) == (0, received)
    assert position(loader) == (0, 11)
    iterator = iter(loader)
    assert position(loader) == (1, 0)
    next(iterator)
    assert position(loader) == (1, 1)
    del iterator
    assert position(loader) == (1, 1)
    assert drawn(loader) == epoch_of(2), "after an early break the next epoch is whole"


def test_a_loaded_position_is_gone_on_with(loader_of: Any) -> None:
    state = {**loader_of(SquareDataset()).state_dict(), "epoch": 2, "batches": 3, "samples": 12}
    for epochs, expected in {
        (): epoch_of(2)[3:],
        (2,): epoch_of(2)[3:],
        (3,): epoch_of(3),
        (3, 2): epoch_of(2),  # the other epoch has dropped the position
    }.items():
        loader = loader_of(SquareDataset())
        next(iter(loader))
        loader.load_state_dict(state)
        for epoch in epochs:
            loader.set_epoch(epoch)
        last = epochs[-1] if epochs else 2
        assert position(loader) == (last, 11 - len(expected))
        assert drawn(loader) == expected, epochs
        assert drawn(loader) == epoch_of(last + 1)


def test_a_state_of_an_epoch_s_end(loader_of: Any) -> None:
    done = loader_of(SquareDataset())
    list(done)
    for epoch, expected in ((None, epoch_of(1)), (0, []), (1, epoch_of(1)), (5, epoch_of(5))):
        loader = loader_of(SquareDataset())
        loader.load_state_dict(done.state_dict())
        assert position(loader) == (0, 11)
        if epoch is not None:
            loader.set_epoch(epoch)
        assert drawn(loader) == expected, epoch


def test_a_named_epoch_is_that_of_the_state(loader_of: Any) -> None:
    loader, again = loader_of(SquareDataset()), loader_of(SquareDataset())
    list(loader)
    loader.set_epoch(0)  # once more
    again.load_state_dict(loader.state_dict())
    assert drawn(again) == drawn(loader) == epoch_of(0)
    next(iter(loader))
    loader.set_epoch(1)  # once more, after an early break
    again.load_state_dict(loader.state_dict())
    assert drawn(again) == drawn(loader) == epoch_of(1)


# -- several iterators


@WORKERS
def test_several_iterators_at_once(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    first, second = iter(loader), iter(loader)
    pairs = [(a[:, 0].tolist(), b[:, 0].tolist()) for a, b in zip(first, second, strict=True)]
    assert [a for a, _ in pairs] == epoch_of(0)
    assert [b for _, b in pairs] == epoch_of(1)
    first = iter(loader)
    received = [next(first)[:, 0].tolist()]
    next(iter(loader))  # which is dropped
    received.append(next(first)[:, 0].tolist())
    assert drawn(loader) == epoch_of(4)
    assert received + drawn(first) == epoch_of(2)


def test_nested_loops_share_their_workers(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=1, batch_size=14)
    inner = [drawn(loader) for _ in loader]
    assert inner == [epoch_of(epoch, batch_size=14) for epoch in (1, 2, 3)]
    processes = loader_of(Worker(), num_workers=1)
    pids = [pids_of(processes) for _ in processes]
    assert len(pids) == 2 and pids[0] == pids[1]


def test_workers_live_on_between_epochs(loader_of: Any) -> None:
    loader = loader_of(Worker(), num_workers=2)
    iterator = iter(loader)
    first = set(next(iterator).tolist())
    iterator = iter(loader)  # the former one is freed only now
    second = pids_of(iterator)
    assert first < second == pids_of(loader)
    assert os.getpid() not in second
    fresh = loader_of(Worker(), num_workers=1, persistent_workers=False)
    assert pids_of(fresh) != pids_of(fresh)


class Filled(Worker):
    """Samples that are written into their batch."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), os.getpid(), dtype=torch.int64, device="cpu")


@WORKERS
def test_forked_process_has_buffers_and_workers_of_its_own(loader_of: Any, workers: int) -> None:
    """Also where its parent has begun with the loader before."""
    loader, fork = loader_of(Filled(), num_workers=workers), multiprocessing.get_context("fork")
    before = pids_of(loader)
    begin, answers = fork.Event(), fork.SimpleQueue()

    def load() -> None:
        begin.wait(60)
        answers.put(pids_of(loader))

    process = fork.Process(target=load)
    process.start()
    batch = next(iter(loader))
    begin.set()
    process.join(60)
    assert process.exitcode == 0
    others = answers.get()
    assert len(others) == 1 and not others & before
    assert set(batch.flatten().tolist()) == before == pids_of(loader)


class CountedEpochs(IterableDataset[int]):
    """Counts, in each process, the epochs that came to their end."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch] * 3
        self.epoch += 1


def test_dataset_in_workers_keeps_what_it_counted(loader_of: Any) -> None:
    loader = loader_of(CountedEpochs(), batch_size=None, num_workers=2)
    next(iter(loader))
    assert list(loader) == [0] * 6 and list(loader) == [1] * 6


# -- buffers


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_batches_are_never_overwritten(loader_of: Any, workers: int) -> None:
    values = torch.arange(45 * 8).reshape(45, 8) * 1.5
    dataset = TensorDataset(values, torch.arange(45))
    for collate in (None, "list"):
        loader = loader_of(dataset, batch_size=1, num_workers=workers, collate_fn=collate)
        kept = [batch for _ in range(3) for batch in loader]
        assert len(kept) == 135
        for batch in kept:
            value, index = batch[0] if collate else batch
            assert torch.equal(value.view(-1), values[int(index)])


@pytest.mark.parametrize(("mode", "workers"), [("lazy", 1), ("eager", 0), ("cached", 0)])
def test_writing_into_a_batch_changes_nothing_else(loader_of: Any, mode: str, workers: int) -> None:
    with SquareDataset(loading_mode=mode, progress=False) as dataset:
        for collate in (None, "list"):
            loader = loader_of(dataset, num_workers=workers, collate_fn=collate, shuffle=False)
            for _ in range(2):
                seen = []
                for batch in loader:
                    for row in batch:
                        seen.append(int(row[1]))
                        row[...] = -1
                assert seen == [i * i for i in range(42)]
            loader.close()
        assert dataset[3].tolist() == [3, 9]


def pad(samples: list[Any]) -> dict[str, Any]:
    """Batches of all sizes, of a fresh tensor, an array, and a text."""
    length = int(max(sample[0] for sample in samples)) + 1
    rows = torch.full((len(samples), length), length)
    return {"rows": rows, "array": np.full((length, 40), length), "text": f"{length}"}


def test_shapes_may_change_from_batch_to_batch(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=2, collate_fn=pad, batch_size=3)
    for epoch in range(2):
        for indices, batch in zip(epoch_of(epoch, batch_size=3), loader, strict=True):
            assert same(batch, pad([np.array([i, i * i]) for i in indices]))


@WORKERS
def test_slots_are_free_again(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(transform=Large()), num_workers=workers)
    kept = list(loader)
    ring = loader._pool.fetch.ring
    assert ring.in_use >= min(11, ring.planned)
    del kept
    next(iter(loader))
    list(loader)
    gc.collect()
    assert loader._pool.fetch.ring is ring and ring.in_use == 0


# -- exceptions


class Failing(Dataset[torch.Tensor]):
    """Sample 5 of 12 raises."""

    flag: Path

    def __init__(self, error: BaseException | type[BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise self.error
        return torch.tensor([index])


class FiveError(Exception):
    """One that can be looked at weakly."""


def fail(value: Any) -> Any:
    """A transform, and a collate function, that can't bear 5."""
    items = value if isinstance(value, list) else [value]
    if any(int(item[0]) == 5 for item in items):
        raise FiveError("five is too much")
    return stack_collate(value) if isinstance(value, list) else value


def take_all(iterator: Any) -> tuple[list[list[int]], list[Exception]]:
    """The indices that an iterator yields, and what it raises, until its end."""
    batches, errors = [], []
    while True:
        try:
            batches.append(next(iterator)[:, 0].tolist())
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append(error.with_traceback(None))
            assert len(errors) < 50


OTHERS = [[0, 1, 2, 3], [8, 9, 10, 11]]  # batches of `Failing` that come


@WORKERS
@pytest.mark.parametrize(
    ("kind", "expected", "message"),
    [
        ("decode", SampleError, "sample 5"),
        ("transform", FiveError, "too much"),
        ("collate", FiveError, "too much"),
        ("foreign", RuntimeError, "DataLoader worker"),
    ],
)
def test_an_error_is_raised_where_its_batch_would_be(
    loader_of: Any, workers: int, kind: str, expected: type[Exception], message: str
) -> None:
    dataset: Any = SquareDataset()
    if kind == "decode":
        dataset = SquareDataset(bad=[5])
    elif kind == "transform":
        dataset = SquareDataset(transform=fail)
    elif kind == "foreign":
        dataset = Failing(RuntimeError("DataLoader worker trouble of the dataset's own"))
    options = {"collate_fn": fail} if kind == "collate" else {}
    loader = loader_of(dataset, shuffle=False, num_workers=workers, **options)
    for epoch in range(2):
        iterator = iter(loader)
        assert next(iterator)[:, 0].tolist() == [0, 1, 2, 3]
        with pytest.raises(expected, match=message) as raised:
            next(iterator)
        assert type(raised.value) is expected
        notes = "\n".join(raised.value.__notes__)
        assert f"epoch {epoch}, batch 1" in notes and ("worker 0" in notes) == bool(workers)
        assert kind != "transform" or "sample 5" in notes
        assert not workers or "Traceback" in str(raised.value.__cause__)
        assert position(loader) == (epoch, 1)
        assert next(iterator)[:, 0].tolist() == [8, 9, 10, 11]
        assert position(loader) == (epoch, 3)
        assert take_all(iterator)[1] == []
    del raised, iterator
    gc.collect()
    assert loader.get_stats()["ring_in_use"] == 0


@WORKERS
def test_an_error_that_is_dealt_with_keeps_nothing_alive(loader_of: Any, workers: int) -> None:
    """No circle through its traceback: a ring and its workers would wait for the collector."""
    for dataset, collate in ((Failing(FiveError), None), (SquareDataset(), fail)):
        loader = loader_of(dataset, shuffle=False, num_workers=workers, collate_fn=collate)
        iterator, seen = iter(loader), []
        next(iterator)
        gc.collect()
        gc.disable()
        try:
            next(iterator)
        except FiveError as error:
            seen.append(weakref.ref(error))
        finally:
            gc.enable()
        assert len(seen) == 1 and seen[0]() is None
        del iterator


class Collecting(Worker):
    def __getitem__(self, index: int) -> int:
        return int(gc.isenabled())


def test_garbage_collection_in_workers_is_as_here(loader_of: Any) -> None:
    assert pids_of(loader_of(Collecting(), num_workers=1)) == {1}
    gc.collect()
    gc.disable()
    try:
        assert pids_of(loader_of(Collecting(), num_workers=1)) == {0}
        assert not gc.isenabled()
    finally:
        gc.enable()


class Garbage:
    itself: Any
    iterator: Any


def test_iterators_in_garbage_are_not_collected_by_a_new_worker(
    capfd: Any, monkeypatch: Any
) -> None:
    """Whose workers are not its children: torch would say so on stderr."""
    start = BaseProcess._bootstrap

    def collecting_start(process: Any, *args: Any, **options: Any) -> Any:
        if gc.isenabled():  # it may come at any time
            gc.collect()
        return start(process, *args, **options)

    monkeypatch.setattr(BaseProcess, "_bootstrap", collecting_start)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # not pytest's, in workers
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(10**9)  # not here, in between
    garbage = Garbage()
    garbage.itself = garbage
    garbage.iterator = iter(create_dataloader(TensorDataset(torch.arange(8)), num_workers=2))
    next(garbage.iterator)
    seen = weakref.ref(garbage)
    del garbage
    assert len(list(create_dataloader(TensorDataset(torch.arange(8)), num_workers=2))) == 1
    gc.set_threshold(*threshold)
    found = seen()
    assert found is not None
    found.itself = None  # torch takes its time where the collector finds workers
    del found
    assert capfd.readouterr().err == ""


class Unbuildable(Exception):
    """Its pickle can't be loaded."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class FormattedError(Exception):
    """It formats its arguments, and pickle would pass it the result."""

    def __init__(self, path: str) -> None:
        super().__init__(f"can't read {path}")


class OfWorker(Exception):
    """One whose module is found in the worker alone."""

    def __reduce__(self) -> Any:
        return made_in, (os.getpid(), str(self))


def made_in(pid: int, text: str) -> OfWorker:
    if os.getpid() != pid:
        raise ModuleNotFoundError("No module named 'plugin'")
    return OfWorker(text)


Nameless = type("NowhereError", (Exception,), {})


@WORKERS
def test_errors_that_are_hard_to_pass_on(loader_of: Any, workers: int) -> None:
    for error, kind, message in (
        (StopIteration("of an empty list"), RuntimeError, "StopIteration.*of an empty list"),
        (Unbuildable("one", "two"), Unbuildable, "one and two"),
        (FormattedError("0.bin"), FormattedError, r"^can't read 0\.bin"),
        (Nameless("not found by its name"), WorkerError if workers else Nameless, "by its name"),
        (OfWorker("a bad disk"), *((WorkerError, "'plugin'") if workers else (OfWorker, "disk"))),
    ):
        loader = loader_of(Failing(error), shuffle=False, num_workers=workers)
        batches, errors = take_all(iter(loader))
        assert batches == OTHERS and len(errors) == 1
        assert errors[0].__notes__[-1].endswith("epoch 0, batch 1")
        with pytest.raises(kind, match=message):
            raise errors[0]
        assert not workers or str(error) in str(errors[0].__cause__)


def unpicklable_batch(samples: list[Any]) -> Any:
    return [lambda: None]


def test_a_batch_that_cannot_be_pickled(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=1, collate_fn=unpicklable_batch)
    batches, errors = take_all(iter(loader))
    assert batches == [] and len(errors) == 11
    assert all("pickle" in str(error) for error in errors)
    del errors
    gc.collect()
    assert loader.get_stats()["ring_in_use"] == 0
    assert len(list(loader_of(SquareDataset(), collate_fn=unpicklable_batch))) == 11


def test_an_interrupt_in_this_process_passes_and_costs_nothing(loader_of: Any) -> None:
    loader = loader_of(Failing(KeyboardInterrupt()), shuffle=False)
    for _ in range(3):
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        del iterator
    gc.collect()
    assert loader.get_stats()["ring_in_use"] == 0


class Exiting(Failing):
    """Sample 5 ends its process, as long as a file is there."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and self.flag.exists():
            sys.exit(3)
        return torch.tensor([index])


def test_a_worker_that_exits_is_an_error(loader_of: Any, tmp_path: Path) -> None:
    dataset = Exiting(KeyError)
    dataset.flag = tmp_path / "flag"
    dataset.flag.touch()
    loader = loader_of(dataset, shuffle=False, num_workers=2)
    iterator = iter(loader)
    with pytest.raises((WorkerError, RuntimeError), match="worker") as raised:
        list(iterator)
    # else torch's signal handler was faster than the loader
    if isinstance(raised.value, WorkerError):
        assert "epoch 0" in str(raised.value) and "died" in str(raised.value)
        assert next(iterator, None) is None
    del iterator, raised
    dataset.flag.unlink()
    loader.set_epoch(0)
    assert drawn(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


class Slow(Failing):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            time.sleep(2)
        return torch.tensor([index])


@pytest.mark.slow
def test_a_timeout_says_so(loader_of: Any) -> None:
    loader = loader_of(Slow(KeyError), shuffle=False, num_workers=1, timeout=0.5)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(WorkerError, match=r"timeout=0\.5 s in epoch 0.*batch 1"):
        next(iterator)
    assert position(loader) == (0, 1)
    assert next(iterator, None) is None
    del iterator
    assert next(iter(loader))[:, 0].tolist() == [0, 1, 2, 3]


# -- workers


class Marked(Worker):
    """Its samples say what `worker_init_fn` set, and whether torch knows this very dataset."""

    mark = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return [self.mark, info is not None and info.dataset is self]


def mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker
    info.dataset.mark = 100 + worker  # type: ignore[attr-defined]


def test_worker_init_fn_reaches_the_dataset(loader_of: Any) -> None:
    loader = loader_of(Marked(), num_workers=2, worker_init_fn=mark, collate_fn="list")
    assert list(loader) == [[[100, True]] * 4, [[101, True]] * 4]
    assert loader.dataset.mark == 0
    in_process = loader_of(Marked(), worker_init_fn=mark, collate_fn="list")
    assert list(in_process) == [[[0, False]] * 4] * 2


def fail_to_start(worker: int) -> None:
    raise LookupError("no licence for this worker")


def test_a_worker_init_fn_that_fails_says_so(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=2, worker_init_fn=fail_to_start, batch_size=14)
    for _ in range(2):
        batches, errors = take_all(iter(loader))
        assert batches == [] and len(errors) == 3
        for error in errors:
            assert type(error) is LookupError and str(error) == "no licence for this worker"
            assert "worker_init_fn" in error.__notes__[0]
    ring = loader._pool.fetch.ring
    del error, errors
    gc.collect()
    assert ring.in_use == 0


# -- random numbers


def global_state() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state()  # type: ignore[misc]
    return random.getstate(), keys.tolist(), rest, torch.get_rng_state().tolist()


@WORKERS
@pytest.mark.parametrize("make", [SquareDataset, Noise, Count, "sampler"])
def test_random_numbers_of_loop_and_loader_are_apart(
    loader_of: Any, make: Any, workers: int
) -> None:
    epochs = []
    for is_noisy in (False, True):
        options: dict[str, Any] = {"collate_fn": "list", "num_workers": workers}
        if make is SquareDataset:
            dataset: Any = SquareDataset(transform=RandomProbe())
        elif make == "sampler":
            dataset, options["sampler"] = Noise(), RandomWalk(own=False)
        else:
            dataset = Noise() if make is Noise else Count(21, noise=True)
        before = global_state()
        loader = loader_of(dataset, **options)
        assert global_state() == before
        batches = []
        for batch in loader:
            assert global_state() == before
            batches.append(batch)
            if is_noisy:
                random.random()
                np.random.rand()
                torch.rand(3)
                before = global_state()
        epochs.append(batches)
    assert same(*epochs), "the loop's random numbers are seen in batches"


def test_a_generator_gives_the_seed(loader_of: Any) -> None:
    generator = torch.Generator().manual_seed(77)
    before = generator.get_state()
    loader = loader_of(SquareDataset(), generator=generator, seed=1)
    assert loader.config.seed == loader.state_dict()["seed"] == 77
    assert drawn(loader) == epoch_of(0, seed=77) != epoch_of(0, seed=1)
    assert torch.equal(generator.get_state(), before)
    assert loader.generator is generator


# -- few samples and ranks


def test_an_empty_dataset_has_no_batches(loader_of: Any) -> None:
    for empty in (SquareDataset().subset([]), TensorDataset(torch.zeros(0, 3)), []):
        for options in (
            {"num_workers": 1},
            {"drop_last": True},
            {"pad": False, "shuffle": "block"},
            {"batch_size": None},
            {"rank": 1, "world_size": 2},
        ):
            loader, other = loader_of(empty, **options), loader_of(empty, **options)
            assert len(loader) == 0 and list(loader) == [] and list(loader) == []
            stats, state = loader.get_stats(), loader.state_dict()
            assert stats["batches"] == stats["dataset_size"] == state["length"] == 0
            other.load_state_dict(state)
            assert other.state_dict() == state and list(other) == []


def test_a_dataset_shorter_than_a_batch(loader_of: Any) -> None:
    dataset = SquareDataset().subset([4, 8, 9])
    (batch,) = drawn(loader_of(dataset, batch_size=64))
    assert sorted(batch) == [4, 8, 9]
    with pytest.warns(HeadraceWarning, match="3 samples"):
        dropping = loader_of(dataset, batch_size=64, drop_last=True)
        assert len(dropping) == 0 and drawn(dropping) == []


def test_batch_size_none_passes_batches_through(loader_of: Any) -> None:
    batches = [{"x": torch.full((n, 2), n), "names": ["a"] * n} for n in range(1, 5)]
    for workers in (0, 1):
        loader = loader_of(batches, batch_size=None, shuffle=False, num_workers=workers)
        assert len(loader) == 4 and loader.batch_size is None
        assert same(list(loader), batches)


# -- the rest


def test_a_line_an_epoch_is_logged(loader_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace.loader"):
        list(loader_of(SquareDataset()))
        assert caplog.records == []
        loader = loader_of(SquareDataset(), log_loading_stats=True)
        list(loader)
        list(loader)
        next(iter(loader))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for epoch, line in enumerate(lines):
        assert f"epoch {epoch}: 11 batches, 42 samples" in line


@WORKERS
def test_a_closed_loader_can_be_used_again(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    for epoch in range(2):
        assert drawn(loader) == epoch_of(epoch)
        loader.close()
        loader.close()
    iterator = iter(loader)
    first = next(iterator)[:, 0].tolist()
    loader.close()
    assert [first, *drawn(iterator)] == epoch_of(2)  # an iterator lives on
    assert drawn(loader) == epoch_of(3)


def test_a_dropped_loader_takes_its_workers_along() -> None:
    loader = create_dataloader(Worker(), batch_size=4, num_workers=1)
    (pid,) = pids_of(loader)
    assert os.path.exists(f"/proc/{pid}")
    del loader
    gc.collect()
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the worker lives on")


def test_a_copy_goes_on_where_the_loader_stands(loader_of: Any) -> None:
    loader = loader_of(SquareDataset())
    list(loader)
    iterator = iter(loader)
    next(iterator)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.state_dict() == loader.state_dict() and other.dataset is not loader.dataset
        assert drawn(other) == epoch_of(1)[1:]


def test_an_epoch_that_could_not_begin_begins_again(
    loader_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, saved = loader_of(SquareDataset()), loader_of(SquareDataset())
    next(iter(saved))
    loader.load_state_dict(saved.state_dict())
    kept = None

    def fail(*_: Any) -> None:
        raise OSError("Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.loader.processes.WorkerPool.start", fail)
        try:
            iter(loader)
        except OSError as error:
            kept = error  # and the iterator's frame with it
    assert kept is not None
    assert loader.state_dict() == saved.state_dict() and loader.next_epoch == 0
    assert drawn(loader) == epoch_of(0)[1:]


# -- a budget that turns out to be too small


class Large:
    """A transform whose result is larger than anybody could know."""

    def __call__(self, value: Any) -> torch.Tensor:
        return torch.zeros(100_000)


@pytest.mark.parametrize("persistent", [False, True])
def test_large_first_batch_lowers_prefetch(loader_of: Any, persistent: bool) -> None:
    dataset = SquareDataset(transform=Large(), max_memory_usage="17MB")  # a batch of 4 takes 1.6 MB
    loader = loader_of(dataset, num_workers=2, prefetch_factor=3, persistent_workers=persistent)
    with pytest.warns(HeadraceWarning, match=r"1\.6 MB take 19\.3 MB, but 17\.0 MB"):
        first = [batch.shape for batch in loader]
    assert dataset.budget.available == 0
    with pytest.warns(HeadraceWarning, match="2 x 2"):
        second = [batch.shape for batch in loader]
    assert first == second
    config = loader.config
    assert (config.num_workers, config.prefetch_factor, loader.prefetch_factor) == (2, 2, 2)
    assert dataset.budget.reserved == 6 * 1_600_000 + 2 * (2_400_000 + 17_000_000 // 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadraceWarning)
        list(loader)
    loader.close()
    assert dataset.budget.reserved == 0


def test_a_cache_gives_way_to_the_batches(photos: Path) -> None:
    """Lazy runs with this budget, so cached does too, and holds what is left."""
    batch = 8 * (64 * 64 * 3 * 4 + 8)
    options: dict[str, Any] = {"image_size": 64, "max_memory_usage": 5 * batch}
    with ImageDataset(photos, loading_mode="cached", **options) as dataset:
        before = dataset.held.stats()["held_bytes"]
        loader = create_dataloader(dataset, batch_size=8, num_workers=1, prefetch_factor=1)
        assert before == 0 and dataset.budget.reserved <= 5 * batch
        assert loader.config.num_workers == 1
        lazy = create_dataloader(ImageDataset(photos, image_size=64), batch_size=8, num_workers=0)
        for _ in range(2):
            assert all(torch.equal(a, b) for (a, _), (b, _) in zip(loader, lazy, strict=True))
        assert 0 < dataset.held.stats()["held_bytes"] <= 2 * batch
        loader.close()
