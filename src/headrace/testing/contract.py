"""Tests that a dataset keeps headrace's laws.

`DatasetContract` is a pytest class: subclass it in a test module, return your dataset from `make`,
and headrace's laws are run against it, in all modes.

    class TestMyDataset(DatasetContract):
        @pytest.fixture(autouse=True)
        def _data(self, tmp_path):
            self.path = write_my_files(tmp_path)

        def make(self, **options):
            return MyDataset(self.path, **options)

What follows from the length and the blocks of a dataset alone, its order, is tested once in
headrace. Worker processes are started once, by fork where the dataset is fork-safe.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode
from headrace.errors import CollateError, SampleError, StateError
from headrace.loader.loader import Loader, create_dataloader
from headrace.memory.tree import SPARSE, sparse_parts
from headrace.order import RankBatches

MODES = tuple(mode.value for mode in LoadingMode)
SHUFFLES: tuple[Any, ...] = (False, True, "block")


class RandomProbe:
    """A transform that uses every kind of random generator. It returns its input together with
    the numbers that it drew.
    """

    def __init__(self) -> None:
        self.generator: np.random.Generator = np.random.default_rng(0)
        self.held: dict[str, Any] = {"torch": torch.Generator(), "random": random.Random(0)}

    def __call__(self, value: Any) -> dict[str, Any]:
        generator = self.held["torch"]
        drawn = [
            random.random(),
            float(np.random.rand()),
            float(torch.rand((), dtype=torch.float32, device="cpu")),
            self.generator.random(),
            float(torch.rand((), dtype=torch.float32, device="cpu", generator=generator)),
            self.held["random"].random(),
        ]
        plain = value
        if not isinstance(value, (torch.Tensor, dict, str)):
            plain = np.asarray(value)
        return {"value": plain, "draws": torch.tensor(drawn, dtype=torch.float64, device="cpu")}


def same(a: Any, b: Any) -> bool:
    """True if two samples or batches are equal bit for bit, including types and dtypes."""
    return bool(_bits(a) == _bits(b))


def _bits(value: Any) -> Any:
    """A value that equals those of the same bits, types and dtypes only."""
    if isinstance(value, dict):
        return type(value), {name: _bits(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [_bits(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if not isinstance(value, torch.Tensor):
        return type(value), value
    about = (value.dtype, value.shape, value.layout)
    if value.layout in SPARSE:
        return about, _bits(sparse_parts(value)[1])
    if not value.numel():  # of strides that no view of its bytes may have
        return about, b""
    flat = value.detach().contiguous().reshape(-1).cpu()
    return about, flat.view(torch.uint8).numpy().tobytes()


def spoiled(value: Any) -> Any:
    """A copy of a value, which is then overwritten, as by a transform that works in place."""
    kept = copy.deepcopy(value)
    for item in value.values() if isinstance(value, dict) else [value]:
        if isinstance(item, torch.Tensor):
            item.zero_()
        elif isinstance(item, np.ndarray) and item.flags.writeable:
            item.fill(0)
    return kept


@contextlib.contextmanager
def unusual_defaults() -> Iterator[None]:
    """Torch's default device is "meta", which holds no values, and its default dtype float64."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)


class DatasetContract:
    """The laws of headrace as tests of one dataset.

    Use at least 20 small samples, since they are read many times.
    """

    def make(self, **options: Any) -> BaseDataset:
        """Returns your dataset.

        `options` are keywords of `BaseDataset`: loading_mode, transform, seed, on_error, ...
        """
        raise NotImplementedError("return your dataset from make(**options)")

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]] | None:
        """Returns the same kind of dataset with some unreadable samples, and their indices.

        None: there are no unreadable samples of this kind.
        """
        return None

    # -- helpers

    def _probed(self, **options: Any) -> BaseDataset:
        return self.make(transform=RandomProbe(), return_index=True, progress=False, **options)

    @staticmethod
    def _loader(dataset: Any, **options: Any) -> Loader:
        """Batches as lists of samples, so that their shapes don't matter."""
        defaults = {"collate_fn": "list", "batch_size": 4, "num_workers": 0, "seed": 5}
        return create_dataloader(dataset, **{**defaults, **options})

    @staticmethod
    def _index(sample: Any) -> int:
        return int(sample["index"] if isinstance(sample, dict) else sample[-1])

    def _expected(self, epoch: int, shuffle: Any) -> list[Any]:
        """The batches of an epoch, made one sample at a time by a lazy dataset without a loader."""
        with self._probed(loading_mode="lazy", seed=5) as dataset:
            dataset.set_epoch(epoch)
            order = RankBatches(dataset.epoch_order(shuffle, 5, epoch, 4), batch_size=4)
            batches = [order.batch(step).tolist() for step in range(len(order))]
            return [[dataset[index] for index in batch] for batch in batches]

    # -- laws 1, 2 and 8: one value, one order, no surprise

    @pytest.mark.parametrize("mode", MODES)
    def test_values_and_order_of_a_mode(self, mode: str) -> None:
        shuffles = {"lazy": False, "eager": True, "cached": "block", "streaming": "block"}
        with self._probed(loading_mode=mode) as dataset:
            assert isinstance(dataset, Dataset)
            assert isinstance(dataset, IterableDataset) == (mode == "streaming")
            loader = self._loader(dataset, shuffle=shuffles[mode])
            assert isinstance(loader, DataLoader)
            assert loader.dataset is dataset
            assert len(loader) == -(-len(dataset) // 4)
            for epoch in (0, 1):
                expected = self._expected(epoch, shuffles[mode])
                message = f"epoch {epoch} differs from samples made one by one"
                assert same(list(loader), expected), message
            loader.close()

    @pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "streaming"])
    def test_law_1_a_pickled_copy_reads_in_any_order(self, mode: str) -> None:
        indices = [7, 2, 2, 11, 0, -1, 7]
        with self.make(loading_mode=mode, progress=False) as dataset:
            expected = [dataset[index] for index in indices]
            read: list[Any] = []
            with pickle.loads(pickle.dumps(dataset)) as pickled:
                reader = threading.Thread(
                    target=lambda: read.extend(pickled.__getitems__(indices)), name="contract"
                )
                reader.start()
                reader.join()
            assert same(read, expected)
            assert same(dataset.__getitems__(indices), expected)

    @pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "streaming"])
    def test_law_1_a_transform_may_work_in_place(self, mode: str) -> None:
        indices = [7, 2, 2, 7]
        with self.make(transform=copy.deepcopy, progress=False) as dataset:
            expected = dataset.__getitems__(indices)
        with self.make(transform=spoiled, loading_mode=mode, progress=False) as dataset:
            for _ in range(2):
                assert same(dataset.__getitems__(indices), expected)

    def test_law_8_a_plain_dataloader_gives_each_sample_once(self) -> None:
        for mode, workers in (("lazy", 0), ("streaming", 2)):
            with self._probed(loading_mode=mode) as dataset:
                plain = DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list)
                seen = Counter(self._index(sample) for batch in plain for sample in batch)
                assert seen == Counter(range(len(dataset))), mode

    def test_law_8_torch_defaults_change_nothing(self) -> None:
        usual = self._samples_and_batches()
        with unusual_defaults():
            unusual = self._samples_and_batches()
        assert same(unusual, usual)

    def _samples_and_batches(self) -> list[Any]:
        """An epoch's samples, and its batches where the dataset's own collate function takes
        them.
        """
        made: list[Any] = []
        for mode in MODES:
            with self.make(loading_mode=mode, progress=False) as dataset:
                made.append(list(self._loader(dataset)))
                with contextlib.suppress(CollateError):  # samples of several shapes
                    made.append(list(self._loader(dataset, collate_fn=None)))
        return made

    # -- laws 1 to 3 and 7 with workers

    def test_laws_1_2_3_7_with_workers(self) -> None:
        """An epoch, and one that a loader without workers finishes in another mode."""
        gc.collect()
        before = _traces()
        with self._probed(loading_mode="cached") as dataset:
            loader = self._loader(dataset, shuffle=True, num_workers=2)
            message = "epoch 0 differs from samples made one by one"
            assert same(list(loader), self._expected(0, True)), message
            received = []
            for batch in loader:
                received.append(batch)
                if len(received) == 2:
                    break  # while others are on their way
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            del batch
            loader.close()
        with self._probed(loading_mode="streaming") as resumed_dataset:
            resumed = self._loader(resumed_dataset, shuffle=True)
            resumed.load_state_dict(state)
            received += list(resumed)
        message = "an epoch that was resumed differs from one that was not"
        assert same(received, self._expected(1, True)), message
        del dataset, loader, resumed_dataset, resumed, received
        deadline = time.monotonic() + 10
        while (left := _traces() - before) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        assert not left

    # -- laws 2 to 4: ranks

    def test_laws_2_3_any_rank_resumes_any_world(self) -> None:
        expected = self._expected(0, "block")
        one = self._loader(self._probed(), shuffle="block")
        iterator = iter(one)
        first = [next(iterator) for _ in range(3)]
        del iterator
        halves = []
        for rank in range(2):
            loader = self._loader(
                self._probed(), shuffle="block", rank=rank, world_size=2, batch_size=2
            )
            loader.load_state_dict(one.state_dict())
            iterator = iter(loader)
            halves.append(next(iterator))
            state = loader.state_dict()
            del iterator
        mixed = [halves[position % 2][position // 2] for position in range(len(expected[3]))]
        assert same([*first, mixed], expected[:4])
        again = self._loader(self._probed(), shuffle="block")
        again.load_state_dict(state)
        assert same(list(again), expected[4:])

    def test_law_3_a_state_of_other_data_is_refused(self) -> None:
        state = self._loader(self.make()).state_dict()
        other = self.make().subset(range(10))
        with pytest.raises(StateError) as refused:
            self._loader(other).load_state_dict(state)
        assert state["fingerprint"] in str(refused.value)
        assert other.fingerprint in str(refused.value)

    def test_law_4_exactly_once_over_all_ranks(self) -> None:
        """The blocks that the dataset gives make an order of all its samples."""
        dataset = self.make()
        for world_size in (2, 3):
            order = dataset.epoch_order("block", 1, 2, world_size * 3)
            ranks = [
                RankBatches(order, rank, world_size, 3, pad=False) for rank in range(world_size)
            ]
            batches = [rank.batch(step) for rank in ranks for step in range(len(rank))]
            seen = Counter(int(index) for batch in batches for index in batch)
            assert seen == Counter(range(len(dataset)))

    # -- law 6: nothing is made up

    def test_law_6_a_bad_sample_is_named(self) -> None:
        if self.make_bad() is None:
            pytest.skip("make_bad says that no sample can be bad")
        for mode in MODES:
            with pytest.raises(SampleError) as raised:
                dataset, bad = self.make_bad(loading_mode=mode, progress=False) or (None, [])
                list(self._loader(dataset, shuffle=False))
            message = str(raised.value)
            whole, bad = self.make_bad() or (self.make(), [])
            assert str(bad[0]) in message and whole.source_of(bad[0]) in message, mode

    @pytest.mark.parametrize(("mode", "workers"), [("lazy", 1), ("cached", 0), ("streaming", 0)])
    def test_law_6_a_skipped_sample_is_counted(self, mode: str, workers: int) -> None:
        options = {"on_error": "skip", "return_index": True, "progress": False}
        made = self.make_bad(loading_mode=mode, **options)
        if made is None:
            pytest.skip("make_bad says that no sample can be bad")
        dataset, bad = made
        with dataset:
            loader = self._loader(dataset, num_workers=workers, batch_size=8)
            batches = list(loader)
            seen = Counter(self._index(sample) for batch in batches for sample in batch)
            assert seen == Counter(set(range(len(dataset))) - set(bad))
            assert len(batches) == len(loader)
            stats = loader.get_stats()
            state = loader.state_dict()
            assert stats["skipped"] == len(bad) == state["skipped"]
            skipped = [entry["index"] for entry in stats["skipped_samples"]]
            assert sorted(skipped) == sorted(bad)
            again = self._loader(dataset, batch_size=8)
            again.load_state_dict(state)
            assert again.state_dict()["skipped_samples"] == state["skipped_samples"]
            loader.close()


def _traces() -> set[str]:
    """Child processes, names in the system's shared memory, and open anonymous files of
    headrace.
    """
    traces = {
        f"process {child.pid}"
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }
    if os.path.isdir("/dev/shm"):
        names = os.listdir("/dev/shm")  # semaphores of other processes come and go
        traces |= {f"/dev/shm/{name}" for name in names if not name.startswith("sem.")}
    if os.path.isdir("/proc/self/fd"):
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:  # the descriptor of the listing itself
                continue
            if "memfd:headrace" in target:
                traces.add(f"{fd} {target}")
    return traces
