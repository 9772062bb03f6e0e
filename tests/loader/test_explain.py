"""`explain()` says what was chosen, why, and what it leads to; its numbers are those of real
epochs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from headrace import (
    BaseDataset,
    DataLoaderConfig,
    HDF5Dataset,
    Loader,
    create_dataloader,
    pad_collate,
)
from tests.testing.test_contract import SquareDataset, Squares


class Blocks(Squares):
    """Blocks of five, each of which is decoded as a whole."""

    def __init__(self, count: int, size: int = 5) -> None:
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


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def value_and_reason(text: str, name: str) -> tuple[str, str]:
    found = re.search(rf"^{name} += (\S+) +(.+)$", text, re.MULTILINE)
    assert found, (name, text)
    return found[1], found[2]


# -- a line for each option

OTHERS: dict[str, Any] = {
    "batch_size": 5,
    "shuffle": False,
    "num_workers": 0,
    "pin_memory": False,
    "prefetch_factor": 3,
    "persistent_workers": False,
    "drop_last": True,
    "pad": False,
    "collate_fn": "list",
    "sampler": [1, 2],
    "batch_sampler": [[1, 2]],
    "seed": 7,
    "interleave": 3,
    "turns": 5,
    "rank": 1,
    "world_size": 2,
    "device": "cpu",
    "max_memory_usage": 0.5,
    "multiprocessing_context": "fork",
    "worker_init_fn": print,
    "generator": torch.Generator(),
    "timeout": 3.5,
    "enable_monitoring": False,
    "log_loading_stats": True,
    "memory_format": torch.channels_last,
    "weights": [1.0] * 42,
    "balanced": True,
    "replacement": False,
    "num_samples": 30,
    "bucket_by_length": [3] * 42,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_was_given_is_named(name: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, name: OTHERS[name]}
    if name in ("rank", "world_size"):
        options |= {"rank": 1, "world_size": 2}
    if name == "memory_format":
        options["device"] = "cpu"
    if name == "replacement":
        options["balanced"] = True
    dataset = SquareDataset()
    dataset.targets = [0, 1] * 21
    loader = create_dataloader(dataset, **options)
    value, reason = value_and_reason(loader.explain(), name)
    own = {
        "collate_fn": "registered as 'list'",
        "multiprocessing_context": "as given",
        "worker_init_fn": "given",
        "shuffle": "given",
    }
    assert own.get(name, "given") in reason
    assert value == {
        "sampler": "list",
        "batch_sampler": "list",
        "generator": "Generator",
        "collate_fn": "list_collate",
        "weights": "list",
        "bucket_by_length": "list",
    }.get(name, getattr(OTHERS[name], "__name__", str(OTHERS[name])))


def test_every_option_of_a_config_is_tried() -> None:
    fields = {field.name for field in dataclasses.fields(DataLoaderConfig)}
    assert fields == set(OTHERS), "a new option: does explain() name it?"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_chosen_is_named_with_its_reason(workers: int) -> None:
    text = explained(SquareDataset(), num_workers=workers)
    expected = {
        "batch_size": ("32", "the default"),
        "shuffle": ("True", "the default of map-style datasets"),
        "seed": ("42", "the default"),
        "num_workers": (str(workers), "given"),
        "prefetch_factor": ("2", "the default with workers") if workers else ("None", "no workers"),
        "persistent_workers": ("True", "the default with workers")
        if workers
        else ("False", "no workers"),
        "multiprocessing_context": ("fork", "the dataset is fork-safe")
        if workers
        else ("None", "no workers"),
        "pin_memory": ("False", "batches don't go to a CUDA device"),
        "device": ("None", "the default: batches stay in the host's memory"),
        "collate_fn": ("stack_collate", "the default: samples of one shape are stacked"),
        "drop_last": ("False", "the default: the last global batch may be incomplete"),
        "rank": ("0", "no launcher found: a single process"),
        "world_size": ("1", "no launcher found: a single process"),
        "max_memory_usage": ("None", "the dataset's"),
    }
    for name, (value, reason) in expected.items():
        if name != "pin_memory" or not torch.cuda.is_available():
            assert value_and_reason(text, name) == (value, reason)
    starts = {line.index("=") for line in text.splitlines()[: len(expected)]}
    assert len(starts) == 1, "the lines are aligned"
    for name in ("interleave", "turns", "sampler", "generator"):
        assert not re.search(rf"^{name} ", text, re.MULTILINE), (
            "what means nothing here is not shown"
        )


def test_the_collate_function_and_who_chose_it() -> None:
    class Own(SquareDataset):
        collate = "list"

    for dataset, options, value, reason in [
        (Own(), {}, "list_collate", "Own's own, registered as 'list'"),
        (Own(), {"collate_fn": list}, "list", "given"),
        (SquareDataset(), {"collate_fn": pad_collate(fields=["x"])}, "pad_collate", "given"),
        (SquareDataset(), {"batch_size": None}, "None", "the dataset yields batches"),
    ]:
        assert value_and_reason(explained(dataset, **options), "collate_fn") == (value, reason)


def test_a_long_value_does_not_move_the_others() -> None:
    text = explained(SquareDataset(), seed=123456789012345678901)
    assert "seed                    = 123456789012345678901  given" in text
    assert re.search(r"^batch_size {14}= 32 {16}the default$", text, re.MULTILINE)


# -- the epoch


def test_batches_ranks_padding_and_what_is_dropped() -> None:
    assert "an epoch: 42 samples, 2 batches of 32, the last of 10" in explained(SquareDataset())
    assert "an epoch: 42 samples, 1 batch of 42\n" in explained(SquareDataset(), batch_size=42)
    padded = explained(SquareDataset(), rank=0, world_size=4, batch_size=4)
    assert "an epoch: 42 samples, 3 batches of 16 (4 on each of 4 ranks), the last of 12" in padded
    assert "padding: 2 samples come twice" in padded and "dropped" not in padded
    dropped = explained(SquareDataset(), rank=0, world_size=4, batch_size=4, drop_last=True)
    assert (
        "dropped: 10 samples are left out of each epoch, other ones each time (drop_last=False: "
        "none)" in dropped
    )
    assert "padding" not in dropped and "2 batches of 16 (4 on each of 4 ranks)\n" in dropped
    assert "always the last" in explained(SquareDataset(), drop_last=True, shuffle=False)
    assert "0 batches" in explained(SquareDataset(), batch_size=64, drop_last=True)


def test_whose_order_it_is() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    assert "order: as the samples are stored" in explained(SquareDataset(), shuffle=False)
    assert "order: a permutation of all samples, which follows from seed and epoch\n" in explained(
        SquareDataset()
    )
    assert "order: blocks are permuted and stand in 3 x 2 lanes" in explained(
        SquareDataset(), shuffle="block", interleave=3, turns=2
    )
    assert "no blocks, so that 'block' is a full shuffle" in explained(
        TensorDataset(torch.zeros(4)), shuffle="block"
    )
    weighted = explained(
        SquareDataset(),
        sampler=torch.utils.data.WeightedRandomSampler([1.0] * 42, 30),
        batch_size=8,
        drop_last=True,
    )
    assert (
        "order: the sampler's" in weighted
        and "an epoch: 3 batches" in weighted
        and "dropped: 6 samples" in weighted
    )
    assert value_and_reason(weighted, "sampler")[0] == "WeightedRandomSampler"
    assert "an epoch: 2 batches" in explained(SquareDataset(), batch_sampler=[[1, 2], [3]])
    by_weight = explained(SquareDataset(), weights=[1.0] * 42, num_samples=100)
    assert (
        "order: drawn by weight, with replacement; it follows" in by_weight
        and "an epoch: 100 samples, 4 batches of 32" in by_weight
    )
    assert value_and_reason(by_weight, "shuffle") == ("False", "weights is the order")
    dataset = SquareDataset()
    dataset.targets = [0, 1] * 21
    assert "order: drawn so that all classes come equally often, without replacement" in explained(
        dataset, balanced=True, replacement=False
    )
    assert "and epoch; num_samples=30 positions of it\n" in explained(dataset, num_samples=30)
    assert "num_samples=90 positions of it; after the last sample it begins again" in explained(
        dataset, num_samples=90
    )
    assert "order: a shuffle whose batches hold samples of like length" in explained(
        SquareDataset(), bucket_by_length=range(42)
    )
    stream = explained(Stream())
    assert (
        "an epoch: as many batches as there are" in stream
        and "order: the IterableDataset's own" in stream
    )


def test_memory_is_explained_for_every_dataset() -> None:
    foreign = create_dataloader(TensorDataset(torch.zeros(40, 1000)), num_workers=1, batch_size=10)
    assert (
        "memory: 1 x 2 + 2 batches may be on their way; the first one says how large"
        in foreign.explain()
    )
    assert foreign.explain().count("memory budget:") == 1
    list(foreign)
    assert re.search(
        r"memory: \d+\.\d MB are set aside for 1 x 2 \+ 2 batches on their way", foreign.explain()
    )
    foreign.close()
    assert explained(SquareDataset()).count("memory budget:") == 1
    assert "max_memory_usage=500.0 MB within" in explained(
        SquareDataset(), max_memory_usage="500MB"
    )


# -- how often blocks are decoded


def decodes_said(loader: Loader) -> int:
    found = re.search(r"process(?:es on average)?: ([\d,]+) decodes an epoch", loader.explain())
    assert found, loader.explain()
    return int(found[1].replace(",", ""))


def rate_said(text: str) -> float:
    return float(
        re.search(r"decodes an epoch over all ranks and workers, ([\d.]+) a block", text)[1]
    )  # type: ignore[index]


def advice(text: str) -> list[tuple[dict[str, Any], float]]:
    """What would help, and the rate that it would lead to."""
    found = re.findall(r"^  (\S.*) would make it ([\d.]+) a block", text, re.MULTILINE)
    return [(eval(f"dict({changes})"), float(rate)) for changes, rate in found]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("world", [1, 2, 3, 6])
@pytest.mark.parametrize("workers", [0, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_what_would_help_does_help_as_much_as_it_is_said_to(
    world: int, workers: int, shuffle: Any
) -> None:
    dataset = BlockDataset(120, 32)
    options: dict[str, Any] = {
        "shuffle": shuffle,
        "num_workers": workers,
        "world_size": world,
        "rank": 0,
        "batch_size": 24,
        "multiprocessing_context": None,
        **({"interleave": 8, "turns": 4} if shuffle == "block" else {}),
    }
    text = create_dataloader(dataset, **options).explain()
    now, found = rate_said(text), advice(text)
    own = shuffle == "block" and (workers < 2 or 4 % workers == 0) and 8 % world == 0
    if shuffle == "block":
        assert bool(found) != own and ("each is decoded by one process" in text) == (
            own and world == 1
        ), text
        assert ("shared by lanes of several ranks" in text) == (own and world > 1)
        assert not own or now < 1.2
        assert ("is no multiple of num_workers" in text) == (workers > 1 and 4 % workers > 0)
        assert ("is no multiple of world_size" in text) == (8 % world > 0)
    elif shuffle is True:
        assert now > 5 and found
    for change, rate in found:
        assert rate < now
        after = create_dataloader(dataset, **{**options, **change}).explain()
        assert rate_said(after) == rate, (change, text, after)
        assert "num_workers" in change or "another order of samples" in text


def test_blocks_that_are_not_decoded_as_a_whole_need_no_advice() -> None:
    text = explained(
        SquareDataset(), shuffle="block", interleave=3, turns=1, world_size=2, rank=0, num_workers=2
    )
    assert "blocks: 9 of the storage\n  samples are read one by one" in text and not advice(text)
    assert "blocks:" not in explained(SquareDataset())
    assert "blocks:" not in explained(TensorDataset(torch.zeros(4)))


def test_an_epoch_of_another_length_is_counted_by_the_pass() -> None:
    whole = explained(BlockDataset(), shuffle="block", interleave=6, turns=2)
    for number in (100, 1000):
        text = explained(BlockDataset(), shuffle="block", interleave=6, turns=2, num_samples=number)
        said = line_of(whole, "each is decoded").replace("an epoch", "a pass over all samples")
        assert line_of(text, "each is decoded") == said and "6 x 2 lanes" in text


def test_drawn_samples_take_blocks_from_everywhere() -> None:
    text = explained(BlockDataset(), weights=[1.0] * 300, num_samples=600, batch_size=30)
    found = re.search(
        r"this order draws a batch from ([\d.]+) blocks.*about (\d+) decodes an epoch", text
    )
    assert (
        found
        and 15 < float(found[1]) < 30
        and int(found[2]) == pytest.approx(20 * float(found[1]), abs=2)
    )
    assert not advice(text)


def test_modes_that_hold_samples_say_so() -> None:
    with (
        BlockDataset(loading_mode="eager", progress=False) as eager,
        BlockDataset(loading_mode="cached") as cached,
    ):
        assert "blocks:" not in explained(eager, shuffle="block")
        assert "a block, less what is cached\n" in explained(cached, shuffle="block")
    assert "less what is cached" not in explained(BlockDataset(), shuffle="block")


def test_views_know_their_blocks_and_torch_s_do_not() -> None:
    assert "blocks: 30 of the storage" in explained(
        BlockDataset().subset(range(150)), shuffle="block"
    )
    text = explained(Subset(BlockDataset(), range(150)), shuffle="block")
    assert "can't be seen through Subset" in text and "dataset.subset" in text


HEIGHT, CHUNKS = 16, 40


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "a.h5"
    with h5py.File(path, "w") as file:
        rows = np.arange(HEIGHT * CHUNKS * 2, dtype=np.int32).reshape(-1, 2)
        file.create_dataset("data", data=rows, chunks=(HEIGHT, 2), compression="gzip")
    return path


def decoded(path: Path, world: int, **options: Any) -> tuple[int, int]:
    """Chunks that an epoch is said to decode, and that it decodes, over all ranks."""
    said = real = 0
    for rank in range(world):
        with HDF5Dataset(path) as dataset:
            loader = create_dataloader(dataset, rank=rank, world_size=world, **options)
            said = decodes_said(loader)
            for _ in loader:
                pass
            real += loader.get_stats()["chunks_decoded"]
            loader.close()
    return said, real


@pytest.mark.parametrize("shuffle", ["block", False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_decodes_as_many_chunks_as_it_is_said_to(
    chunked: Path, world: int, shuffle: Any
) -> None:
    said, real = decoded(
        chunked, world, shuffle=shuffle, num_workers=0, batch_size=10, interleave=4, turns=2
    )
    # A chunk whose first rows end a lane may still be there when the rest comes, in so short an
    # epoch; each lane's end cuts one at most.
    assert said - (4 * 2 - 1) * world <= real <= said
    assert real >= CHUNKS * (1 if shuffle == "block" and world < 3 else world)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "each"), [(2, 1), (3, 3)])
def test_workers_decode_as_many_chunks_as_they_are_said_to(
    chunked: Path, workers: int, each: int
) -> None:
    said, real = decoded(
        chunked, 1, shuffle="block", num_workers=workers, batch_size=4, interleave=4, turns=2
    )
    assert said - (4 * 2 - 1) * each <= real <= said
    assert said >= 0.9 * each * CHUNKS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", ["block", False])
def test_any_job_decodes_as_many_chunks_as_it_is_said_to(
    chunked: Path, world: int, workers: int, shuffle: Any
) -> None:
    said, real = decoded(
        chunked, world, shuffle=shuffle, num_workers=workers, batch_size=6, interleave=6, turns=2
    )
    # Or the first part of such a chunk, which nobody wants before the end of the epoch, may have
    # pushed another out.
    assert abs(real - said) <= (6 * 2 - 1) * world * workers
    assert real >= CHUNKS * (min(workers, world) if shuffle is False else 1)
