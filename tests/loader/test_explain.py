"""`explain()` says what was chosen, why, and what it leads to; its numbers are those of real
epochs.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, WeightedRandomSampler

from headrace import (
    BaseDataset,
    DataLoaderConfig,
    HDF5Dataset,
    create_dataloader,
    list_collate,
    pad_collate,
)
from headrace.memory import MemoryBudget
from tests.loader.datasets import Stream
from tests.testing.test_contract import SquareDataset, Squares


class Blocks(Squares):
    """Blocks, each of which is decoded as a whole."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count * self.size

    def blocks(self) -> Any:
        return np.full(self.count, self.size)

    @property
    def block_nbytes(self) -> int:
        return 1000


class BlockDataset(BaseDataset):
    def __init__(self, count: int = 60, size: int = 5, **options: Any) -> None:
        super().__init__(Blocks(count, size), **options)

    def decode(self, record: bytes) -> Any:
        return np.frombuffer(record, "<i8").copy()


def explained(dataset: Any, **options: Any) -> str:
    return create_dataloader(dataset, **{"num_workers": 0, **options}).explain()


def value_and_reason(text: str, name: str) -> tuple[str, str]:
    found = re.search(rf"^{name} += (\S+) +(.+)$", text, re.MULTILINE)
    assert found, (name, text)
    return found[1], found[2]


# -- a line for each option

GIVEN: dict[str, Any] = {
    **{"batch_size": 5, "shuffle": False, "num_workers": 0, "pin_memory": False},
    **{"prefetch_factor": 3, "persistent_workers": False, "drop_last": True, "pad": False},
    **{"collate_fn": list_collate, "sampler": [1, 2], "batch_sampler": [[1, 2]], "seed": 7},
    **{"interleave": 3, "turns": 5, "rank": 1, "world_size": 2, "device": "cpu"},
    **{"max_memory_usage": 0.5, "multiprocessing_context": "fork", "worker_init_fn": print},
    **{"generator": torch.Generator(), "timeout": 3.5, "enable_monitoring": False},
    **{"log_loading_stats": True, "memory_format": torch.channels_last, "weights": [1.0] * 42},
    **{"balanced": True, "replacement": False, "num_samples": 30, "bucket_by_length": [3] * 42},
}
NEEDED: dict[str, dict[str, Any]] = {
    "rank": {"world_size": 2},
    "world_size": {"rank": 1},
    "memory_format": {"device": "cpu"},
    "replacement": {"balanced": True},
}


def test_what_was_given_is_named() -> None:
    fields = {field.name for field in dataclasses.fields(DataLoaderConfig)}
    assert fields == set(GIVEN), "a new option: does explain() name it?"
    dataset = SquareDataset()
    dataset.targets = [0, 1] * 21
    for name, given in GIVEN.items():
        options = {"num_workers": 1, name: given, **NEEDED.get(name, {})}
        value, reason = value_and_reason(explained(dataset, **options), name)
        is_plain = isinstance(given, (bool, int, float, str, torch.memory_format))
        kind = type(given) if not callable(given) else given
        assert value == (str(given) if is_plain else kind.__name__) and "given" in reason, name


def test_what_was_chosen_is_named_with_its_reason() -> None:
    for workers in (0, 2):
        loader = create_dataloader(SquareDataset(), num_workers=workers)
        text = loader.explain()
        for name in ("batch_size", "shuffle", "seed", "num_workers", "prefetch_factor", "rank"):
            value, reason = value_and_reason(text, name)
            assert value == str(getattr(loader.config, name)) and reason
        for name in ("multiprocessing_context", "prefetch_factor", "persistent_workers"):
            assert ("no workers" in value_and_reason(text, name)[1]) == (workers == 0)
        starts = {line.index("=") for line in text.splitlines()[:13]}
        assert len(starts) == 1, "the lines are aligned"
        for name in ("interleave", "turns", "sampler", "generator"):
            assert f"\n{name} " not in text, "what means nothing here is not shown"
    long = explained(SquareDataset(), seed=123456789012345678901)
    assert "seed                    = 123456789012345678901  given" in long
    assert re.search(r"^batch_size {14}= 32 {16}the default$", long, re.MULTILINE)


class Own(SquareDataset):
    collate = "list"


def test_the_collate_function_and_who_chose_it() -> None:
    foreign = TensorDataset(torch.zeros(3))
    for dataset, options, value, reason in (
        (Own(), {}, "list_collate", "Own's own"),
        (foreign, {}, "stack_collate", "the default: samples of one shape are stacked"),
        (Own(), {"collate_fn": "default"}, "stack_collate", "registered as 'default'"),
        (SquareDataset(), {"collate_fn": pad_collate(fields=["x"])}, "pad_collate", "given"),
        (SquareDataset(), {"batch_size": None}, "None", "the dataset yields batches"),
    ):
        assert value_and_reason(explained(dataset, **options), "collate_fn") == (value, reason)


# -- the epoch


def test_batches_and_padding() -> None:
    squares = SquareDataset()
    four: dict[str, Any] = {"rank": 0, "world_size": 4, "batch_size": 4}
    sampler = WeightedRandomSampler([1.0] * 42, 30)
    for dataset, options, expected in (
        (squares, {}, "2 batches of 32; 42 samples, 0 of them twice"),
        (squares, four, "3 batches of 16 (4 on each of 4 ranks); 42 samples, 2 of them twice"),
        (squares, {**four, "drop_last": True}, "2 batches of 16 (4 on"),
        (squares, {"sampler": sampler, "batch_size": 8, "drop_last": True}, "3 batches"),
        (squares, {"batch_sampler": [[1, 2], [3]]}, "an epoch: 2 batches"),
        (squares, {"weights": [1.0] * 42, "num_samples": 100}, "4 batches"),
        (Stream(5), {}, "as many batches as there are"),
    ):
        assert expected in explained(dataset, **options), options


def test_memory_is_explained_for_every_dataset() -> None:
    foreign = create_dataloader(TensorDataset(torch.zeros(40, 1000)), num_workers=1, batch_size=10)
    text = foreign.explain()
    assert text.count("memory budget:") == 1
    list(foreign)
    measured = r"batches on their way: \d+\.\d MB"
    assert re.search(measured, foreign.explain())
    foreign.close()
    assert explained(SquareDataset()).count("memory budget:") == 1
    own = explained(SquareDataset(), max_memory_usage="500MB")
    assert "max_memory_usage=500.0 MB within" in own


# -- blocks


def test_what_is_said_of_blocks() -> None:
    assert "is decoded as a whole" in explained(BlockDataset(), shuffle=True)
    eager = BlockDataset(loading_mode="eager", progress=False)
    for dataset, shuffle in (
        (SquareDataset(), True),
        (TensorDataset(torch.zeros(4)), True),
        (eager, "block"),
    ):
        assert "blocks of the storage" not in explained(dataset, shuffle=shuffle)
    eager.close()


HEIGHT, CHUNKS = 16, 40


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "a.h5"
    with h5py.File(path, "w") as file:
        rows = np.arange(HEIGHT * CHUNKS * 2, dtype=np.int32).reshape(-1, 2)
        file.create_dataset("data", data=rows, chunks=(HEIGHT, 2), compression="gzip")
    return path


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("shuffle", "world", "workers"),
    [
        ("block", 1, 0),
        ("block", 3, 0),
        (False, 2, 0),
        ("block", 1, 2),
        ("block", 1, 3),
        pytest.param(False, 2, 3, marks=pytest.mark.slow),
        pytest.param("block", 4, 3, marks=pytest.mark.slow),
    ],
)
def test_an_epoch_decodes_each_chunk_about_once(
    chunked: Path, shuffle: Any, world: int, workers: int
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "num_workers": workers, "batch_size": 6}
    real = 0
    for rank in range(world):
        with HDF5Dataset(chunked) as dataset:
            loader = create_dataloader(
                dataset, rank=rank, world_size=world, interleave=4, turns=2, **options
            )
            for _ in loader:
                pass
            real += loader.get_stats()["chunks_decoded"]
            loader.close()
    # each lane's end cuts a chunk at most, and where turns are not dealt out evenly each rank or
    # worker decodes it
    readers = 1
    if 2 % max(1, workers) or shuffle is False:
        readers *= max(1, workers)
    if 4 % world or shuffle is False:
        readers *= world
    most = CHUNKS * readers + (4 * 2 - 1) * world * max(1, workers)
    assert CHUNKS * (world if shuffle is False else 1) <= real <= most


def test_another_view_s_loader_leaves_an_epoch_its_chunks(
    chunked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.loader.budget.CHUNK_BYTES", 1)
    with HDF5Dataset(chunked) as dataset:
        train, val = dataset.subset(range(30 * HEIGHT)), dataset.subset(range(30 * HEIGHT, 640))
        options: dict[str, Any] = {"num_workers": 0, "batch_size": 6}
        loader = create_dataloader(train, shuffle="block", interleave=4, turns=2, **options)
        other = create_dataloader(val, shuffle=False, **options)
        for _ in loader:
            pass
        assert loader.get_stats()["chunks_decoded"] < 40
        reserved = dataset.budget.reserved
        del loader, other
        create_dataloader(val, shuffle=False, **options)
        assert dataset.budget.reserved < reserved


def test_loaders_of_one_dataset_add_up(chunked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.loader.budget.CHUNK_BYTES", 1)
    before = MemoryBudget().reserved
    with HDF5Dataset(chunked) as dataset:
        loaders = [
            create_dataloader(dataset[:99], shuffle=False, num_workers=workers, batch_size=6)
            for workers in (2, 0, 3)
        ]
        for loader in loaders:
            loader.close()  # whose batches are not chunks
        block = dataset.sample_source.block_nbytes
        assert dataset.budget.reserved - before == (2 + 1 + 3) * block > 0
        del loader, loaders
        assert dataset.budget.reserved == before
