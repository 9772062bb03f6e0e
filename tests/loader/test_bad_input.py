"""Input that makes no sense, or can't go on: it is said, and nothing hangs.

What belongs to one room is tested there: fields, ranks and pickling in
`test_config.py`, states in `test_state.py`, dead workers in `test_loader.py` and `test_kill.py`.
Here is what lies between them.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from headrace import (
    CollateError,
    ConfigError,
    DataLoaderConfig,
    DataModule,
    HeadraceError,
    Loader,
    MultiDataLoader,
    StateError,
    TextCollator,
    WorkerError,
    create_dataloader,
    pad_collate,
    suggest_num_workers,
)
from headrace.collate import stack_collate
from headrace.order import OrderSampler
from headrace.testing.contract import RandomProbe, same
from tests.conftest import living_children
from tests.testing.test_contract import SquareDataset


@pytest.fixture
def loader_of(loader_of: Any) -> Any:
    return functools.partial(loader_of, collate_fn="list", enable_monitoring=False)


# -- samples that make no batch


def short_at_9(value: Any) -> Any:
    return value[:1] if value[0] == 9 else value


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2 + (index == 9))


def refused_batch(loader: Any) -> str:
    with pytest.raises(CollateError) as refused:
        list(loader)
    return str(refused.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_errors_name_index_and_file(loader_of: Any, workers: int) -> None:
    dataset = SquareDataset(transform=short_at_9)
    for collate, first, second in (
        ("default", "sample 9 (Squares", "sample 8 (Squares"),
        (pad_collate(max_length=1), "sample 0 (Squares", "2"),
        (TextCollator(max_length=1), "sample 0 (Squares", "2"),
    ):
        loader = loader_of(dataset, shuffle=False, num_workers=workers, collate_fn=collate)
        message = refused_batch(loader)
        assert first in message and second in message


def test_collate_errors_number_samples_as_the_user_does(loader_of: Any) -> None:
    make = functools.partial(loader_of, shuffle=False, collate_fn="default")
    view = refused_batch(make(SquareDataset(transform=short_at_9).subset([1, 2, 9, 4])))
    assert "sample 2 (Squares" in view and "sample 0 (Squares" in view
    assert ": sample 9 is float32 [3], sample 8 is float32 [2]. " in refused_batch(make(Ragged()))
    dataset = SquareDataset(bad=[8], on_error="skip", transform=short_at_9)
    skipping = refused_batch(make(dataset, batch_size=6))
    assert "sample 9 (Squares" in skipping and "sample 6 (Squares" in skipping
    # a function of one's own may have chosen among the samples
    own = refused_batch(make(Ragged(), collate_fn=lambda samples: stack_collate(samples[::-1])))
    assert "sample 2 of the batch is float32 [3], sample 0 of the batch is float32 [2]" in own


# -- indices


def test_an_index_out_of_range_is_an_error_of_its_batch(loader_of: Any) -> None:
    for make in (
        SquareDataset,
        lambda: SquareDataset(loading_mode="eager", progress=False),
        lambda: SquareDataset(loading_mode="cached"),
        lambda: SquareDataset(loading_mode="streaming"),
        lambda: SquareDataset(on_error="skip"),
        lambda: SquareDataset().subset(range(42)),
        lambda: TensorDataset(torch.arange(42)),
        lambda: list(range(42)),
        lambda: Subset(TensorDataset(torch.arange(100)), range(42)),
    ):
        dataset: Any = make()
        for index in (42, -43):
            with pytest.raises(IndexError) as raised:
                list(loader_of(dataset, sampler=[1, 2, 3, 4, 5, index]))
            assert "batch 1" in raised.value.__notes__[-1]
            if isinstance(dataset, SquareDataset):
                assert str(index) in str(raised.value) and "42" in str(raised.value)
            with pytest.raises(IndexError):
                list(loader_of(dataset, batch_sampler=[[1, 2], [index]]))


class NoPrefetching(SquareDataset):
    def prefetch(self, key: Any, steps: range, batches: Any) -> None:
        raise HeadraceError("no prefetching")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_prefetching_comes_with_the_batch(loader_of: Any, workers: int) -> None:
    dataset = NoPrefetching(loading_mode="streaming")
    with pytest.raises(HeadraceError, match="no prefetching"):
        list(loader_of(dataset, num_workers=workers))


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise IndexError("a bug in the dataset")


class OwnSampler:
    """As a generator of Python is, but for `iter`, which begins anew."""

    def __iter__(self) -> Any:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at > 10:
            raise StopIteration
        return self.at


def test_indices_of_odd_samplers(loader_of: Any) -> None:
    dataset = SquareDataset(transform=RandomProbe())
    (batch,) = loader_of(dataset, sampler=[-1, -42])
    assert [int(sample["value"][0]) for sample in batch] == [41, 0]
    with pytest.raises(IndexError, match=r"^a bug in the dataset"):
        list(loader_of(Broken(torch.arange(5)), sampler=[1]))
    for _ in range(2):
        batches = list(loader_of(SquareDataset(), sampler=OwnSampler()))
        assert [len(batch) for batch in batches] == [4, 4, 2]


# -- lengths


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class EndlessSampler:
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(42))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_endless_streams_and_samplers_may_be_left(loader_of: Any, workers: int) -> None:
    loader = loader_of(Endless(), num_workers=workers)
    for epoch in range(2):
        batches = list(itertools.islice(loader, 4))
        assert list(itertools.chain(*batches)) == list(range(16))
        assert (loader.epoch, loader.state_dict()["batches"]) == (epoch, 4)
    with pytest.raises(TypeError, match="Endless"):
        len(loader)
    with pytest.raises(TypeError):
        len(iter(loader))
    with pytest.raises(ConfigError, match=r"endless.*steps="):
        MultiDataLoader({"endless": loader})
    sampled = loader_of(SquareDataset(), sampler=EndlessSampler(), num_workers=workers)
    assert len(list(itertools.islice(sampled, 20))) == 20
    with pytest.raises(TypeError):
        len(sampled)


class RefusesLength(WithoutLength):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_dataset_without_a_length(loader_of: Any) -> None:
    for make in (WithoutLength, RefusesLength):
        with pytest.raises(ConfigError, match=f"{make.__name__} has no length"):
            loader_of(make())
        assert list(loader_of(make(), sampler=range(6))) == [[0, 1, 2, 3], [4, 5]]


def test_fewer_samples_than_ranks(loader_of: Any) -> None:
    for n, world in ((1, 2), (2, 3), (5, 6)):
        dataset = SquareDataset().subset(range(n))
        ranks = [loader_of(dataset, rank=rank, world_size=world) for rank in range(world)]
        seen = Counter(int(sample[0]) for loader in ranks for batch in loader for sample in batch)
        assert set(seen) == set(range(n)) and sum(seen.values()) == world
        with pytest.raises(ConfigError, match=f"{n} for world_size={world}: use pad=True"):
            loader_of(dataset, rank=0, world_size=world, pad=False)


# -- samples that can't be read, in the midst of an epoch


def test_skipped_samples_are_skipped_by_every_world_size(loader_of: Any) -> None:
    """States of the midst of an epoch; a batch with skipped samples is shorter, and the others
    are what they were.
    """
    bad = [3, 11, 30, 31]
    dataset = SquareDataset(bad=bad, on_error="skip", transform=RandomProbe())
    one = loader_of(dataset, batch_size=12)
    whole = list(one)
    listed = [entry["index"] for entry in one.get_stats()["skipped_samples"]]
    assert sorted(listed) == bad and sum(map(len, whole)) == 38
    one.set_epoch(0)
    iterator = iter(one)
    for received in range(5):
        state = json.loads(json.dumps(one.state_dict()))
        expected = [sample for batch in whole[received:] for sample in batch]
        expected.sort(key=lambda sample: int(sample["value"][0]))
        for world_size in (1, 2, 3):
            rest: list[Any] = []
            for rank in range(world_size):
                loader = loader_of(
                    dataset, batch_size=12 // world_size, rank=rank, world_size=world_size
                )
                loader.load_state_dict(state)
                assert loader.state_dict() == state
                loader.set_epoch(0)
                rest += [sample for batch in loader for sample in batch]
            rest.sort(key=lambda sample: int(sample["value"][0]))
            assert same(rest, expected), (received, world_size)
        next(iterator, None)


# -- what is passed for a dataset, a config or a device

DOORS: tuple[Any, ...] = (create_dataloader, Loader, DataModule)


class Frame:
    """What is asked of a table of pandas."""

    iloc = columns = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def test_what_is_no_dataset_is_refused() -> None:
    for dataset, message in (
        (None, "None"),
        (5, "5"),
        (b"photos", "b'photos'"),
        (SquareDataset, "class SquareDataset"),
        ((i for i in range(3)), "generator"),
        (DataLoader([1]), "loader"),
        ([SquareDataset(), SquareDataset()], "ConcatDataset.*MultiDataLoader"),
        ((SquareDataset(), "photos"), "ConcatDataset"),
        (Frame(), "for a table, its rows"),
    ):
        for door in DOORS:
            with pytest.raises(ConfigError, match=rf"^(dataset|train) must .*{message}"):
                door(dataset)
    with pytest.raises(ConfigError, match="ConcatDataset"):
        create_dataloader({"train": [1], "test": [2]})
    with pytest.raises(ConfigError, match=r"loaders\['a'\].*SquareDataset"):
        MultiDataLoader({"a": SquareDataset})
    assert len(create_dataloader([None, "a text"], num_workers=0)) == 1
    assert len(create_dataloader({0: 5, 1: 6}, num_workers=0)) == 1
    assert isinstance(Loader[int](SquareDataset(), num_workers=0), Loader)


def test_a_state_of_a_dataset_that_has_grown(make_loader: Any) -> None:
    samples = list(range(8))
    loader = make_loader(samples, batch_size=4, num_workers=0, shuffle=False)
    samples += [8, 9]
    assert [len(list(loader)) for _ in range(2)] == [2, 2]
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(StateError, match=r"list:8.*list:10"):  # another order
        make_loader(samples, batch_size=4, num_workers=0).load_state_dict(state)


def test_epoch_that_is_no_integer_is_refused(make_loader: Any) -> None:
    dataset = SquareDataset()
    loader = make_loader(dataset, num_workers=0)
    multi = MultiDataLoader({"a": loader})
    for epoch in (1.5, True, "1"):
        for counts in (loader, dataset, loader.sampler, OrderSampler(dataset), multi):
            with pytest.raises(ConfigError):
                counts.set_epoch(epoch)
    loader.set_epoch(np.int64(3))
    assert loader.next_epoch == 3


def test_every_door_names_the_option_that_was_meant() -> None:
    for door in DOORS:
        with pytest.raises(ConfigError, match=f"^{door.__name__}: .*batch_size=64"):
            door(SquareDataset(), config=64)
        with pytest.raises(ConfigError, match=f"^{door.__name__}: "):
            door("there/is/nothing/here", config={"batch_size": 64})
    for door in (*DOORS, suggest_num_workers):
        with pytest.raises(ConfigError, match="'image_size'"):
            door(SquareDataset(), image_size=4)
        if door is not Loader:
            with pytest.raises(ConfigError, match="did you mean image_size"):
                door("there/is/nothing/here", imagesize=4)


def test_a_class_in_place_of_an_instance() -> None:
    for name, cls in (
        ("collate_fn", TextCollator),
        ("worker_init_fn", TextCollator),
        ("sampler", RandomSampler),
        ("batch_sampler", RandomSampler),
    ):
        with pytest.raises(ConfigError, match=rf"{name} .*class {cls.__name__}"):
            create_dataloader(SquareDataset(), **{name: cls})


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)
    for device in ("cuda", "cuda:3", torch.device("cuda"), "mps", "xpu"):
        with pytest.raises(ConfigError, match=str(device)):
            create_dataloader(SquareDataset(), device=device)
        assert DataLoaderConfig(device=device).device is device  # a config may be made elsewhere


# -- what workers can't import


def collate_here(samples: list[Any]) -> Any:
    return samples


def test_a_function_of_a_notebook_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(main, "collate_here", collate_here, raising=False)
    make = functools.partial(create_dataloader, SquareDataset(), collate_fn=collate_here)
    make(num_workers=1, multiprocessing_context="spawn")
    monkeypatch.setattr(collate_here, "__module__", "__main__")
    for start in ("spawn", "forkserver"):
        with pytest.raises(ConfigError, match=f"collate_here, .*{start}"):
            make(num_workers=1, multiprocessing_context=start)
    make(num_workers=0)
    make(num_workers=1, multiprocessing_context="fork")


@pytest.mark.slow
def test_a_script_without_a_main_block_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    call = "create_dataloader(range(9), num_workers=1, multiprocessing_context='spawn')"
    script.write_text(f"from headrace import create_dataloader\nlist({call})\n")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 1
    assert "if __name__ == '__main__':" in ran.stderr.splitlines()[-1]


# -- the end


def test_a_with_block_ends_the_workers_of_a_held_iterator() -> None:
    gc.collect()  # tracebacks of errors before hold their iterators
    for workers in (0, 1):
        with create_dataloader(SquareDataset(), batch_size=4, num_workers=workers) as loader:
            held = iter(loader)
            assert len(next(held)) == 4
            assert len(living_children()) == workers
        until = time.monotonic() + 5
        while living_children() and time.monotonic() < until:
            time.sleep(0.01)
        assert not living_children()
        with pytest.raises(WorkerError):
            next(held)
        with loader:
            assert len(list(loader)) == 11  # it can be used again
            iterator = iter(loader)
            iterator.close()
            assert len(list(loader)) == 11
            assert len(living_children()) == workers
