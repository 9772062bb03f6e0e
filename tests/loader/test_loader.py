"""Loader as users see it: batches, epochs, errors, and what is left of them."""

import copy
import dataclasses
import gc
import logging
import os
import pickle
import random
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, get_worker_info

from headrace import (
    HDF5Dataset,
    HeadraceWarning,
    ImageDataset,
    SampleError,
    WorkerError,
    create_dataloader,
    list_collate,
)
from headrace.collate import stack_collate
from headrace.testing.contract import RandomProbe, same
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(8)

WORKERS = pytest.mark.parametrize("workers", [0, 1])


def drawn(loader: Any) -> list[list[int]]:
    """The indices of the batches of a SquareDataset."""
    return [batch[:, 0].tolist() for batch in loader]


def epoch_of(epoch: int, **options: Any) -> list[list[int]]:
    loader = create_dataloader(
        SquareDataset(), **{"batch_size": 4, "num_workers": 0, "seed": 5, **options}
    )
    loader.set_epoch(epoch)
    return drawn(loader)


# -- it is a DataLoader


@WORKERS
def test_it_has_what_trainers_read(loader_of: Any, workers: int) -> None:
    dataset = SquareDataset()
    loader = loader_of(dataset, num_workers=workers, batch_size=5, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert (
        loader.dataset is dataset
        and loader.batch_size == 5
        and loader.num_workers == workers
        and loader.drop_last is True
    )
    assert isinstance(loader.sampler, DistributedSampler) and isinstance(
        loader.batch_sampler, torch.utils.data.BatchSampler
    )
    assert (
        loader.sampler.rank,
        loader.sampler.num_replicas,
        loader.sampler.seed,
        len(loader.sampler),
    ) == (0, 1, 5, 40)
    assert (
        loader.collate_fn is stack_collate
        and loader.pin_memory is False
        and loader.timeout == 0
        and loader.generator is None
    )
    assert len(loader) == len(list(loader)) == 8
    assert not hasattr(loader, "no_such_attribute")


def test_its_sampler_yields_its_order(loader_of: Any) -> None:
    for shuffle in (False, True, "block"):
        loader = loader_of(SquareDataset(), shuffle=shuffle)
        loader.sampler.set_epoch(3)
        assert list(loader.batch_sampler) == drawn(loader) == epoch_of(3, shuffle=shuffle)


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
def test_without_set_epoch_epochs_are_counted_on(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    for epoch in range(3):
        assert drawn(loader) == epoch_of(epoch)
        assert loader.epoch == epoch
    loader.set_epoch(7)
    assert drawn(loader) == epoch_of(7)
    assert drawn(loader) == epoch_of(8)
    loader.set_epoch(7)
    assert drawn(loader) == epoch_of(7)


def test_last_set_epoch_counts_for_the_next_iterator(loader_of: Any) -> None:
    loader = loader_of(SquareDataset())
    iterator = iter(loader)
    first = next(iterator)[:, 0].tolist()
    loader.set_epoch(4)
    loader.set_epoch(2)
    assert [first, *drawn(iterator)] == epoch_of(0)
    assert drawn(loader) == epoch_of(2)


@WORKERS
def test_the_sampler_s_set_epoch_is_the_loader_s(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    for epoch in (5, 5, 0, 6):
        loader.sampler.set_epoch(epoch)
        assert drawn(loader) == epoch_of(epoch)


def test_the_sampler_s_set_epoch_after_the_loader_s(loader_of: Any) -> None:
    loader = loader_of(SquareDataset())
    loader.sampler.set_epoch(1)
    loader.set_epoch(2)
    assert drawn(loader) == epoch_of(2)
    loader.sampler.set_epoch(1)
    assert drawn(loader) == epoch_of(1)


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


def position(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["batches"]


@WORKERS
def test_a_loaded_position_is_gone_on_with(loader_of: Any, workers: int) -> None:
    state = {**loader_of(SquareDataset()).state_dict(), "epoch": 2, "batches": 3, "samples": 12}
    for calls, expected in {
        (): epoch_of(2)[3:],
        (2,): epoch_of(2)[3:],
        (2, 2): epoch_of(2)[3:],
        (3,): epoch_of(3),
        (0,): epoch_of(0),
        (3, 2): epoch_of(2),  # the other epoch has dropped the position
    }.items():
        loader = loader_of(SquareDataset(), num_workers=workers)
        next(iter(loader))
        loader.load_state_dict(state)
        for epoch in calls:
            loader.set_epoch(epoch)
        assert position(loader) == (
            calls[-1] if calls else 2,
            3 if expected == epoch_of(2)[3:] else 0,
        )
        assert drawn(loader) == expected
        assert drawn(loader) == epoch_of((calls[-1] if calls else 2) + 1)


@WORKERS
def test_a_state_of_an_epoch_s_end(loader_of: Any, workers: int) -> None:
    done = loader_of(SquareDataset())
    list(done)
    for calls, expected in {
        (): epoch_of(1),
        (0,): [],
        (1,): epoch_of(1),
        (5,): epoch_of(5),
    }.items():
        loader = loader_of(SquareDataset(), num_workers=workers)
        loader.load_state_dict(done.state_dict())
        assert position(loader) == (0, 11)
        for epoch in calls:
            loader.set_epoch(epoch)
        assert drawn(loader) == expected
        loader.set_epoch(0)
        assert drawn(loader) == epoch_of(0)


@WORKERS
def test_an_iterator_left_early(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    for epoch in range(3):
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == epoch_of(epoch)[number]
            if number == epoch:
                break
        assert position(loader) == (epoch, epoch + 1)
        del batch
    assert drawn(loader) == epoch_of(3)


def test_the_state_says_what_the_next_iterator_will_do(loader_of: Any) -> None:
    loader = loader_of(SquareDataset())
    list(loader)
    loader.set_epoch(0)  # once more
    again = loader_of(SquareDataset())
    again.load_state_dict(loader.state_dict())
    assert drawn(again) == drawn(loader) == epoch_of(0)
    next(iter(loader))
    loader.set_epoch(1)  # once more, after an early break
    again.load_state_dict(loader.state_dict())
    assert drawn(again) == drawn(loader) == epoch_of(1)


# -- several iterators


@WORKERS
def test_two_iterators_at_once(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    first, second = iter(loader), iter(loader)
    pairs = [(a[:, 0].tolist(), b[:, 0].tolist()) for a, b in zip(first, second, strict=True)]
    assert [a for a, _ in pairs] == epoch_of(0)
    assert [b for _, b in pairs] == epoch_of(1)
    assert drawn(loader) == epoch_of(2)


@WORKERS
def test_nested_loops_over_one_loader(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers, batch_size=14)
    outer, inner = [], []
    for batch in loader:
        outer.append(batch[:, 0].tolist())
        inner.append(drawn(loader))
    assert outer == epoch_of(0, batch_size=14)
    assert inner == [epoch_of(epoch, batch_size=14) for epoch in (1, 2, 3)]


def test_an_iterator_goes_on_after_a_later_one_is_dropped(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=1)
    first = iter(loader)
    received = [next(first)[:, 0].tolist()]
    next(iter(loader))
    received.append(next(first)[:, 0].tolist())
    third = drawn(loader)
    assert received + drawn(first) == epoch_of(0)
    assert third == epoch_of(2)


def test_workers_live_on_after_an_early_break(loader_of: Any) -> None:
    loader = loader_of(ProcessIds(8), num_workers=2)
    iterator = iter(loader)
    first = set(next(iterator).tolist())
    iterator = iter(loader)  # the former one is freed only now
    second = {pid for batch in iterator for pid in batch.tolist()}
    assert first < second == {pid for batch in loader for pid in batch.tolist()}


class CountedEpochs(torch.utils.data.IterableDataset[int]):
    """Counts, in each process, the epochs that came to their end."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch] * 3
        self.epoch += 1


def test_dataset_in_workers_keeps_what_it_counted(loader_of: Any) -> None:
    loader = loader_of(CountedEpochs(), batch_size=None, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    iterator = iter(loader)
    assert list(iterator) == [0] * 6 and list(loader) == [1] * 6


def test_inner_loops_share_their_workers(loader_of: Any) -> None:
    loader = loader_of(ProcessIds(8), num_workers=1, batch_size=4)
    inner = [{pid for batch in loader for pid in batch.tolist()} for _ in loader]
    assert len(inner) == 2 and inner[0] == inner[1]


def test_workers_live_on_between_epochs(loader_of: Any) -> None:
    def pids(**options: Any) -> list[set[int]]:
        loader = loader_of(ProcessIds(8), num_workers=2, **options)
        return [{pid for batch in loader for pid in batch.tolist()} for _ in range(3)]

    lasting = pids()
    assert (
        lasting[0] == lasting[1] == lasting[2]
        and len(lasting[0]) == 2
        and os.getpid() not in lasting[0]
    )
    fresh = pids(persistent_workers=False)
    assert not fresh[0] & fresh[1] and not fresh[1] & fresh[2]


class ProcessIds(torch.utils.data.Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return os.getpid()


# -- buffers


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, "list"])
def test_kept_batches_are_never_overwritten(loader_of: Any, workers: int, collate: Any) -> None:
    values = torch.arange(45 * 8).reshape(45, 8) * 1.5
    loader = loader_of(
        TensorDataset(values, torch.arange(45)),
        batch_size=1,
        num_workers=workers,
        collate_fn=collate,
    )
    kept, copies = [], []
    for _ in range(3):
        for batch in loader:
            kept.append(batch)
            x, y = batch if collate is None else batch[0]
            copies.append((x.clone(), y.clone()))
    assert len(kept) == 135
    for batch, (x, y) in zip(kept, copies, strict=True):
        a, b = batch if collate is None else batch[0]
        assert torch.equal(a, x) and torch.equal(b, y) and torch.equal(a.view(-1), values[int(b)])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_view_of_a_batch_keeps_it(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers, batch_size=2)
    views = [batch.numpy()[1, 1:] for batch in loader]
    expected = [indices[1] ** 2 for indices in epoch_of(0, batch_size=2)]
    list(loader)
    gc.collect()
    list(loader)
    assert [int(view[0]) for view in views] == expected


@pytest.mark.quick_every(12)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize("collate", [None, "list"])
def test_writing_into_a_batch_changes_nothing_else(
    loader_of: Any, workers: int, mode: str, collate: Any
) -> None:
    with SquareDataset(loading_mode=mode, progress=False) as dataset:
        loader = loader_of(dataset, num_workers=workers, collate_fn=collate, shuffle=False)
        for _ in range(2):
            seen = []
            for batch in loader:
                rows = batch if collate is None else [torch.from_numpy(row) for row in batch]
                seen += [int(row[1]) for row in rows]
                for row in rows:
                    row.fill_(-1)
            assert seen == [i * i for i in range(42)]
        assert dataset[3].tolist() == [3, 9]
        loader.close()


def pad(samples: list[Any]) -> dict[str, Any]:
    """Batches of all sizes, of a fresh tensor, an array, and a text."""
    length = int(max(s[0] for s in samples)) + 1
    rows = torch.zeros(len(samples), length, dtype=torch.int32)
    for row, sample in zip(rows, samples, strict=True):
        row[: int(sample[0])] = int(sample[0])
    return {
        "rows": rows,
        "array": np.full((length, 40), length),
        "text": f"{length}",
        "part": rows[:, :1],
        "turned": rows.T,
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_shapes_may_change_from_batch_to_batch(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers, collate_fn=pad, batch_size=3)
    for epoch in range(2):
        for indices, batch in zip(epoch_of(epoch, batch_size=3), loader, strict=True):
            expected = pad([np.array([i, i * i]) for i in indices])
            assert same(
                {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in batch.items()},
                {
                    k: v.contiguous() if isinstance(v, torch.Tensor) else v
                    for k, v in expected.items()
                },
            )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_slots_are_free_again(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers)
    kept = list(loader)
    ring = loader._pool.ring
    assert ring.in_use >= min(11, ring.planned)
    del kept
    gc.collect()
    assert ring.in_use == 0
    for _ in range(3):
        next(iter(loader))
    list(loader)
    gc.collect()
    assert loader._pool.ring is ring and ring.in_use == 0


def test_batches_beyond_the_ring_are_copied_and_counted(loader_of: Any) -> None:
    iterator = iter(loader := loader_of(SquareDataset(), num_workers=0, batch_size=3))
    loader._pool.ring._most_extra = 1
    kept = list(iterator)
    assert loader.get_stats()["ring_copied"] == len(kept) - 3
    assert [batch[:, 0].tolist() for batch in kept] == list(epoch_of(0, batch_size=3))


# -- exceptions


class Unbuildable(Exception):
    """Its pickle can't be loaded."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Failing(torch.utils.data.Dataset[torch.Tensor]):
    """Sample 5 raises."""

    def __init__(self, error: BaseException | type[BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise self.error
        return torch.tensor([index])


def fail(value: Any) -> Any:
    """A transform, and a collate function, that can't bear 5."""
    items = value if isinstance(value, list) else [value]
    if any(int(item[0]) == 5 for item in items):
        raise ZeroDivisionError("five is too much")
    return stack_collate(value) if isinstance(value, list) else value


def take_all(iterator: Any) -> tuple[list[Any], list[Exception]]:
    """What an iterator yields, and what it raises, until its end."""
    batches, errors = [], []
    while True:
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append(error.with_traceback(None))
            assert len(errors) < 50


@pytest.mark.quick_every(6)
@WORKERS
@pytest.mark.parametrize(
    ("kind", "expected", "said"),
    [
        ("decode", SampleError, "sample 5.*square"),
        ("transform", ZeroDivisionError, "five is too much"),
        ("collate", ZeroDivisionError, "five is too much"),
        ("foreign", KeyError, "a key"),
        ("runtime", RuntimeError, "DataLoader worker trouble"),
        ("memory", MemoryError, "none"),
    ],
)
def test_an_error_is_raised_where_its_batch_would_be(
    loader_of: Any, workers: int, kind: str, expected: type, said: str
) -> None:
    dataset: Any = {
        "decode": lambda: SquareDataset(bad=[5]),
        "transform": lambda: SquareDataset(transform=fail),
        "collate": lambda: SquareDataset(),
        "foreign": lambda: Failing(KeyError("a key")),
        "runtime": lambda: Failing(RuntimeError("DataLoader worker trouble of the dataset's own")),
        "memory": lambda: Failing(MemoryError("none")),
    }[kind]()
    options = {"collate_fn": fail} if kind == "collate" else {}
    loader = loader_of(dataset, shuffle=False, num_workers=workers, **options)
    for epoch in range(2):
        iterator = iter(loader)
        assert next(iterator)[:, 0].tolist() == [0, 1, 2, 3]
        with pytest.raises(expected, match=said) as raised:
            next(iterator)
        assert type(raised.value) is expected
        notes = "\n".join(raised.value.__notes__)
        assert f"epoch {epoch}, batch 1" in notes and ("worker 0" in notes) == bool(workers)
        if kind == "transform":
            assert "sample 5" in notes
        if workers:
            assert "Traceback" in str(raised.value.__cause__) and "line" in str(
                raised.value.__cause__
            )
        assert position(loader) == (epoch, 1)
        assert next(iterator)[:, 0].tolist() == [8, 9, 10, 11]
        assert position(loader) == (epoch, 3)
        assert len(take_all(iterator)[1]) == 0
    del raised, iterator
    ring = loader._pool.ring
    gc.collect()
    assert ring.in_use == 0


class FiveError(Exception):
    """One that can be looked at weakly."""


def fail_in_collate(samples: list[Any]) -> Any:
    if any(int(item[0]) == 5 for item in samples):
        raise FiveError
    return stack_collate(samples)


@WORKERS
@pytest.mark.parametrize("kind", ["sample", "collate"])
def test_an_error_that_is_dealt_with_keeps_nothing_alive(
    loader_of: Any, workers: int, kind: str
) -> None:
    """No circle through its traceback: a ring and its workers would wait for the garbage
    collector.
    """
    if kind == "sample":
        loader = loader_of(Failing(FiveError), shuffle=False, num_workers=workers)
    else:
        loader = loader_of(
            SquareDataset(), shuffle=False, num_workers=workers, collate_fn=fail_in_collate
        )
    iterator, seen = iter(loader), []
    next(iterator)
    gc.collect()
    gc.disable()
    try:
        try:
            next(iterator)
        except FiveError as error:
            seen.append(weakref.ref(error))
        assert len(seen) == 1 and seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collection_in_workers_is_as_here(loader_of: Any, collects: bool) -> None:
    gc.collect()
    if not collects:
        gc.disable()
    try:
        states = list(loader_of(Collecting(), num_workers=1))
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert all(bool(state) is collects for batch in states for state in batch)


class Collecting(torch.utils.data.Dataset[bool]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> bool:
        return gc.isenabled()


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
    garbage.itself, garbage.iterator = (
        garbage,
        iter(create_dataloader(TensorDataset(torch.arange(8)), num_workers=2)),
    )
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


class Garbage:
    itself: Any
    iterator: Any


@WORKERS
def test_a_batch_that_failed_is_tried_again_on_resume(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(bad=[5]), shuffle=False, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(SampleError):
        next(iterator)
    mended = loader_of(SquareDataset(), shuffle=False)
    mended.load_state_dict(loader.state_dict())
    assert drawn(mended)[0] == [4, 5, 6, 7]


@WORKERS
def test_a_stop_iteration_of_a_dataset_does_not_end_the_epoch(loader_of: Any, workers: int) -> None:
    loader = loader_of(
        Failing(StopIteration("next() of an empty list")), shuffle=False, num_workers=workers
    )
    batches, errors = take_all(iter(loader))
    assert [b[:, 0].tolist() for b in batches] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert (
        len(errors) == 1
        and "StopIteration" in str(errors[0])
        and "next() of an empty list" in str(errors[0])
    )


@pytest.mark.slow
@WORKERS
def test_every_batch_may_fail_and_nothing_leaks(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(bad=range(42)), num_workers=workers)
    for _ in range(3):
        batches, errors = take_all(iter(loader))
        assert batches == [] and len(errors) == 11
        del errors
        gc.collect()
        assert loader._pool.ring.in_use == 0 and loader._pool.ring.grown == 0
    assert loader.get_stats()["batches"] == 0 and loader.get_stats()["errors"] >= 33


def test_an_exception_that_cannot_be_pickled(loader_of: Any) -> None:
    loader = loader_of(Failing(Unbuildable("one", "two")), shuffle=False, num_workers=1)
    batches, errors = take_all(iter(loader))
    assert len(batches) == 2 and len(errors) == 1
    assert isinstance(errors[0], Unbuildable)
    assert "one and two" in str(errors[0]) and "epoch 0, batch 1" in errors[0].__notes__[1]
    assert errors[0].__notes__[0] == "headrace: in Failing[5]"
    in_process = loader_of(Failing(Unbuildable("one", "two")), shuffle=False)
    assert isinstance(take_all(iter(in_process))[1][0], Unbuildable)


def unpicklable_batch(samples: list[Any]) -> Any:
    return [lambda: None]


@pytest.mark.slow
def test_a_batch_that_cannot_be_pickled(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=1, collate_fn=unpicklable_batch)
    batches, errors = take_all(iter(loader))
    assert batches == [] and len(errors) == 11
    assert all("pickle" in str(error) for error in errors)
    del errors
    gc.collect()
    assert loader._pool.ring.in_use == 0
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
    assert loader._pool.ring.in_use == 0


class Dying(torch.utils.data.Dataset[torch.Tensor]):
    """Sample 5 ends its process, as long as a file is there."""

    def __init__(self, how: str, flag: Path) -> None:
        self.how, self.flag = how, flag

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and self.flag.exists():
            sys.exit(3) if self.how == "sys.exit" else os._exit(3)
        return torch.tensor([index])


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_a_worker_that_exits_is_an_error(loader_of: Any, tmp_path: Path, how: str) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    loader = loader_of(Dying(how, flag), shuffle=False, num_workers=2)
    iterator = iter(loader)
    with pytest.raises((WorkerError, RuntimeError), match="worker") as raised:
        for _ in range(3):
            next(iterator)
    # else torch's signal handler was faster than the loader
    if isinstance(raised.value, WorkerError):
        assert "epoch 0" in str(raised.value) and "died" in str(raised.value)
        assert next(iterator, None) is None
    del iterator, raised
    flag.unlink()
    loader.set_epoch(0)
    assert [b[:, 0].tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


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


class Initialised(torch.utils.data.Dataset[int]):
    mark = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.mark


def mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker
    info.dataset.mark = 100 + worker  # type: ignore[attr-defined]


def test_worker_init_fn_reaches_the_dataset(loader_of: Any) -> None:
    loader = loader_of(Initialised(), num_workers=2, worker_init_fn=mark)
    assert [batch.tolist() for batch in loader] == [[100] * 4, [101] * 4]
    assert loader.dataset.mark == 0
    in_process = loader_of(Initialised(), worker_init_fn=mark)
    assert [batch.tolist() for batch in in_process] == [[0] * 4] * 2


def fail_to_start(worker: int) -> None:
    raise LookupError("no licence for this worker")


@pytest.mark.slow
def test_a_worker_init_fn_that_fails_says_so(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=2, worker_init_fn=fail_to_start, batch_size=14)
    for _ in range(2):
        batches, errors = take_all(iter(loader))
        assert (
            batches == [] and [str(error) for error in errors] == ["no licence for this worker"] * 3
        )
        assert all(
            type(error) is LookupError and "worker_init_fn" in error.__notes__[0]
            for error in errors
        )
    ring = loader._pool.ring
    del errors
    gc.collect()
    assert ring.in_use == 0


def test_the_dataset_in_a_worker_finds_itself(loader_of: Any) -> None:
    assert all(all(batch) for batch in loader_of(FindsItself(), num_workers=1))


class FindsItself(ProcessIds):
    def __init__(self) -> None:
        super().__init__(8)

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        return int(info is not None and info.dataset is self)


def test_more_workers_than_batches(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=2, batch_size=42)
    for epoch in range(2):
        assert drawn(loader) == epoch_of(epoch, batch_size=42)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn"])
def test_a_spawned_worker_knows_all_it_needs(loader_of: Any, start: str) -> None:
    with SquareDataset(transform=RandomProbe(), loading_mode="cached") as dataset:
        options: dict[str, Any] = {"collate_fn": "list", "batch_size": 6}
        loader = loader_of(
            dataset,
            num_workers=1,
            multiprocessing_context=start,
            worker_init_fn=mark_ours,
            **options,
        )
        expected = loader_of(SquareDataset(transform=RandomProbe()), **options)
        for _ in range(2):
            assert same(list(loader), list(expected))
        loader.close()


def mark_ours(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, SquareDataset)


# -- random numbers


def global_state() -> tuple[Any, ...]:
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2],
        torch.get_rng_state().tolist(),
    )  # type: ignore[index]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["ours", "foreign", "iterable", "sampler"])
def test_the_training_loop_s_random_numbers_are_its_own(
    loader_of: Any, workers: int, kind: str
) -> None:
    datasets = {
        "ours": lambda: SquareDataset(transform=RandomProbe()),
        "foreign": Noise,
        "iterable": NoiseStream,
        "sampler": Noise,
    }
    options: dict[str, Any] = {"sampler": RandomIndices()} if kind == "sampler" else {}
    before = global_state()
    loader = loader_of(datasets[kind](), num_workers=workers, **options)
    for _ in range(2):
        iterator = iter(loader)
        assert global_state() == before
        for _ in range(3):
            next(iterator)
            assert global_state() == before
        del iterator
        list(loader)
        assert global_state() == before


@pytest.mark.parametrize("kind", ["ours", "foreign", "iterable", "sampler"])
def test_batches_ignore_the_loops_random_numbers(loader_of: Any, kind: str) -> None:
    datasets = {
        "ours": lambda: SquareDataset(transform=RandomProbe()),
        "foreign": Noise,
        "iterable": NoiseStream,
        "sampler": Noise,
    }
    results = []
    for noise in range(2):
        options: dict[str, Any] = {"sampler": RandomIndices()} if kind == "sampler" else {}
        batches = []
        for batch in loader_of(datasets[kind](), collate_fn="list", **options):
            batches.append(batch)
            for draw in (random.random, np.random.rand, lambda: torch.rand(3)):
                if noise:
                    draw()
        results.append(batches)
    assert same(*results)
    assert not same(results[0][0], results[0][1])


class Noise(torch.utils.data.Dataset[list[float]]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> list[float]:
        return [
            index,
            random.random(),
            np.random.rand(),
            float(torch.rand(())),
            self.generator.random(),
        ]


class NoiseStream(torch.utils.data.IterableDataset[list[float]]):
    def __init__(self) -> None:
        self.noise = Noise()

    def __iter__(self) -> Iterator[list[float]]:
        return (self.noise[i] for i in range(21))


class RandomIndices:
    def __iter__(self) -> Iterator[int]:
        for _ in range(21):
            yield random.randrange(21)

    def __len__(self) -> int:
        return 21


@pytest.mark.parametrize("dataset", [lambda: SquareDataset(transform=RandomProbe()), Noise])
def test_the_number_of_workers_changes_nothing(loader_of: Any, dataset: Any) -> None:
    loaders = [
        loader_of(dataset(), num_workers=workers, collate_fn="list") for workers in (0, 1, 3)
    ]
    for _ in range(2):
        first, second, third = (list(loader) for loader in loaders)
        assert same(first, second) and same(first, third)


def test_epochs_and_seeds_differ(loader_of: Any) -> None:
    loader = loader_of(Noise(), shuffle=False)
    epochs = [torch.cat(list(loader_batches(loader))) for _ in range(3)]
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])
    assert torch.equal(epochs[0][:, 0], epochs[1][:, 0])
    other = loader_of(Noise(), shuffle=False, seed=6)
    assert not torch.equal(torch.cat(list(loader_batches(other))), epochs[0])


def loader_batches(loader: Any) -> Iterator[torch.Tensor]:
    for batch in loader:
        yield torch.stack([torch.as_tensor(column, dtype=torch.float64) for column in batch], 1)


def test_a_generator_gives_the_seed(loader_of: Any) -> None:
    generator = torch.Generator().manual_seed(77)
    before = generator.get_state()
    loader = loader_of(SquareDataset(), generator=generator, seed=1)
    assert (
        loader.config.seed == 77
        and "generator" in loader.explain()
        and loader.state_dict()["seed"] == 77
    )
    assert drawn(loader) == epoch_of(0, seed=77) != epoch_of(0, seed=1)
    assert torch.equal(generator.get_state(), before)
    assert loader.generator is generator


# -- few samples


@pytest.mark.quick_every(10)
@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"pad": False}, {"shuffle": "block"}, {"batch_size": None}]
)
@WORKERS
def test_an_empty_dataset_has_no_batches(
    loader_of: Any, workers: int, options: dict[str, Any]
) -> None:
    for empty in (SquareDataset().subset([]), TensorDataset(torch.zeros(0, 3)), []):
        for world in ({}, {"rank": 1, "world_size": 2}):
            loader = loader_of(empty, num_workers=workers, **options, **world)
            assert len(loader) == 0 and list(loader) == [] and list(loader) == []
            assert (
                position(loader) == (1, 0)
                and loader.get_stats()["batches"] == loader.get_stats()["dataset_size"] == 0
            )


@WORKERS
def test_a_dataset_shorter_than_a_batch(loader_of: Any, workers: int) -> None:
    dataset = SquareDataset().subset([4, 8, 9])
    assert [
        sorted(batch) for batch in drawn(loader_of(dataset, num_workers=workers, batch_size=64))
    ] == [[4, 8, 9]]
    assert drawn(loader_of(dataset, num_workers=workers, batch_size=64, drop_last=True)) == []
    assert len(loader_of(dataset, batch_size=64, drop_last=True)) == 0


# -- ranks


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("shuffle", [True, "block"])
def test_ranks_have_equally_many_batches_and_share_all_samples(
    loader_of: Any, world_size: int, pad: bool, shuffle: Any
) -> None:
    dataset = SquareDataset().subset(range(37))
    ranks = [
        loader_of(dataset, rank=rank, world_size=world_size, batch_size=3, pad=pad, shuffle=shuffle)
        for rank in range(world_size)
    ]
    batches = [drawn(loader) for loader in ranks]
    assert {len(b) for b in batches} == {len(ranks[0])}
    seen = Counter(i for rank in batches for batch in rank for i in batch)
    padding = -37 % world_size if pad else 0
    assert ranks[0].padding == padding
    assert set(seen) == set(range(37)) and sum(seen.values()) == 37 + padding
    assert [loader.state_dict() for loader in ranks] == [ranks[0].state_dict()] * world_size


def test_ranks_of_a_foreign_dataset(loader_of: Any) -> None:
    dataset = TensorDataset(torch.arange(10))
    ranks = [loader_of(dataset, rank=rank, world_size=3, batch_size=2) for rank in range(3)]
    seen = Counter(int(i) for loader in ranks for (batch,) in loader for i in batch)
    assert set(seen) == set(range(10)) and sum(seen.values()) == 12 == 10 + ranks[0].padding


# -- collation


def test_a_dataset_s_own_collate_is_the_default(loader_of: Any) -> None:
    class Proposes(SquareDataset):
        collate = "list"

    class ProposesFunction(SquareDataset):
        collate = staticmethod(len)

    class Names(TensorDataset):
        collate = 3  # of a foreign dataset it means nothing

    assert loader_of(Proposes()).collate_fn is list_collate
    assert next(iter(loader_of(ProposesFunction()))) == 4
    assert loader_of(Proposes(), collate_fn="default").collate_fn is stack_collate
    assert loader_of(Names(torch.zeros(3))).collate_fn is stack_collate


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_size_none_passes_batches_through(loader_of: Any, workers: int) -> None:
    batches = [{"x": torch.full((n, 2), n), "names": ["a"] * n} for n in range(1, 5)]
    loader = loader_of(batches, batch_size=None, shuffle=False, num_workers=workers)
    assert len(loader) == 4 and loader.batch_size is None
    assert same(list(loader), batches)


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list[str]


def pair(samples: list[Any]) -> Pair:
    return Pair(torch.stack([torch.as_tensor(s) for s in samples]), ["r"] * len(samples))


@WORKERS
def test_a_batch_may_be_anything(loader_of: Any, workers: int) -> None:
    for batch, indices in zip(
        loader_of(SquareDataset(), collate_fn=pair, num_workers=workers), epoch_of(0), strict=True
    ):
        assert (
            type(batch) is Pair
            and batch.left[:, 0].tolist() == indices
            and batch.right == ["r"] * len(indices)
        )
    assert list(loader_of(SquareDataset(), collate_fn=len, num_workers=workers)) == [4] * 10 + [2]


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
    assert (
        len(lines) == 2
        and "epoch 0: 11 batches, 42 samples" in lines[0]
        and "epoch 1: 11 batches, 42 samples" in lines[1]
    )


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
    loader = create_dataloader(ProcessIds(8), batch_size=4, num_workers=1)
    (pid,) = {int(pid) for batch in loader for pid in batch}
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


def test_image_and_hdf5_datasets_through_workers(
    loader_of: Any, photos: Path, tmp_path: Path
) -> None:
    import h5py

    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["data"] = np.arange(60.0, dtype=np.float32).reshape(20, 3)
    for dataset in (ImageDataset(photos, image_size=16), HDF5Dataset(tmp_path / "rows.h5")):
        with dataset:
            assert same(list(loader_of(dataset, num_workers=1)), list(loader_of(dataset)))


# -- copies


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_copy_goes_on_where_the_loader_stands(loader_of: Any, copied: Any) -> None:
    loader = loader_of(SquareDataset(), num_workers=0)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    other = copied(loader)
    assert other.state_dict() == loader.state_dict() and other.dataset is not loader.dataset
    assert all(torch.equal(a, b) for a, b in zip(other, iterator, strict=True))


# -- what fails while an epoch begins


def test_an_epoch_that_could_not_begin_is_over(
    loader_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(SquareDataset(), num_workers=0)
    kept = None

    def fail(*_: Any) -> None:
        raise OSError("Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.loader.worker.pool.WorkerPool.start", fail)
        try:
            iter(loader)
        except OSError as error:
            kept = error  # and the iterator's frame with it
    assert len(list(loader)) == len(loader) and kept is not None


# -- a budget that turns out to be too small


class Large:
    """A transform whose result is larger than anybody could know."""

    def __call__(self, value: Any) -> torch.Tensor:
        return torch.zeros(100_000)


@pytest.mark.parametrize("persistent", [False, True])
def test_large_first_batch_lowers_prefetch(loader_of: Any, persistent: bool) -> None:
    dataset = SquareDataset(transform=Large(), max_memory_usage="17MB")  # a batch of 4 takes 1.6 MB
    loader = loader_of(dataset, num_workers=2, prefetch_factor=3, persistent_workers=persistent)
    with pytest.warns(
        HeadraceWarning,
        match=(
            r"batches of 1\.6 MB take 19\.3 MB on their way, and 17\.0 MB are left.*in the next "
            r"epoch"
        ),
    ):
        first = [batch.shape for batch in loader]
    assert dataset.budget.available == 0
    with pytest.warns(HeadraceWarning, match="lowered to 2 x 2"):
        second = [batch.shape for batch in loader]
    assert first == second
    assert (loader.config.num_workers, loader.config.prefetch_factor, loader.prefetch_factor) == (
        2,
        2,
        2,
    )
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
        before = dataset.mode.stats()["held_bytes"]
        loader = create_dataloader(dataset, batch_size=8, num_workers=1, prefetch_factor=1)
        assert (
            before == 0 and dataset.budget.reserved <= 5 * batch and loader.config.num_workers == 1
        )
        lazy = create_dataloader(ImageDataset(photos, image_size=64), batch_size=8, num_workers=0)
        for _ in range(2):
            assert all(torch.equal(a, b) for (a, _), (b, _) in zip(loader, lazy, strict=True))
        assert 0 < dataset.mode.stats()["held_bytes"] <= 2 * batch
        loader.close()
