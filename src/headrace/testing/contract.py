"""Tests that a dataset keeps headrace's laws.

`DatasetContract` is a pytest class: subclass it in a test module, return your dataset from `make`, and headrace's laws are run
against it, in all modes, with workers of all kinds.

    class TestMyDataset(DatasetContract):
        @pytest.fixture(autouse=True)
        def _data(self, tmp_path):
            self.path = write_my_files(tmp_path)

        def make(self, **options):
            return MyDataset(self.path, **options)

Combinations that need worker processes run as a set that covers each pair of mode, number of workers and start method but spawn, which
takes seconds and pickles no more than forkserver; the others are marked `slow`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.datasets.core.base import BaseDataset
from headrace.errors import CollateError, SampleError, StateError
from headrace.loader import Loader, create_dataloader
from headrace.memory.tree import SPARSE, sparse_parts
from headrace.modes import LoadingMode
from headrace.order import RankBatches

MODES = tuple(mode.value for mode in LoadingMode)
SHUFFLES: tuple[Any, ...] = (False, True, "block")
_STARTS = ("fork", "forkserver", "spawn")
_COVERING = {(mode, 3 if (m + s) % 2 else 1, start) for m, mode in enumerate(MODES) for s, start in enumerate(_STARTS[:2])}
PROCESSES = [
    pytest.param(mode, workers, start, marks=() if (mode, workers, start) in _COVERING else pytest.mark.slow)
    for mode in MODES
    for workers in (1, 3)
    for start in _STARTS
]


class RandomProbe:
    """A transform that uses every kind of random generator. It returns its input together with the numbers that it drew."""

    def __init__(self) -> None:
        self.generator: np.random.Generator = np.random.default_rng(0)
        self.held: dict[str, Any] = {"torch": torch.Generator(), "random": random.Random(0)}

    def __call__(self, value: Any) -> dict[str, Any]:
        held = float(torch.rand((), dtype=torch.float32, device="cpu", generator=self.held["torch"])), self.held["random"].random()
        drawn = [
            random.random(),
            float(np.random.rand()),
            float(torch.rand((), dtype=torch.float32, device="cpu")),
            self.generator.random(),
            *held,
        ]
        plain = value if isinstance(value, (torch.Tensor, dict, str)) else np.asarray(value)
        return {"value": plain, "draws": torch.tensor(drawn, dtype=torch.float64, device="cpu")}


def same(a: Any, b: Any) -> bool:
    """True if two samples or batches are equal bit for bit, including types and dtypes."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        if a.layout in SPARSE:
            return same(sparse_parts(a)[1], sparse_parts(b)[1])
        flat = [t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)]
        return torch.equal(*flat)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


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
    """The laws of headrace as tests of one dataset. Use at least 20 small samples, since they are read many times."""

    def make(self, **options: Any) -> BaseDataset:
        """Returns your dataset; `options` are keywords of `BaseDataset`: loading_mode, transform, seed, on_error, return_index, …"""
        raise NotImplementedError("return your dataset from make(**options)")

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]] | None:
        """Returns the same kind of dataset with some unreadable samples, and their indices. None: there are no unreadable samples of this
        kind."""
        return None

    # -- helpers

    def _probed(self, **options: Any) -> BaseDataset:
        return self.make(transform=RandomProbe(), return_index=True, progress=False, **options)

    @staticmethod
    def _loader(dataset: Any, **options: Any) -> Loader:
        """Batches as lists of samples, so that their shapes don't matter."""
        return create_dataloader(dataset, **{"collate_fn": "list", "batch_size": 4, "num_workers": 0, "seed": 5, **options})

    @staticmethod
    def _index(sample: Any) -> int:
        return int(sample["index"] if isinstance(sample, dict) else sample[-1])

    def _indices(self, batches: list[Any]) -> list[list[int]]:
        return [[self._index(sample) for sample in batch] for batch in batches]

    def _expected(self, epoch: int, shuffle: Any) -> list[Any]:
        """The batches of an epoch, made one sample at a time by a lazy dataset without a loader."""
        with self._probed(loading_mode="lazy", seed=5) as dataset:
            dataset.set_epoch(epoch)
            order = RankBatches(dataset.epoch_order(shuffle, 5, epoch, 4), batch_size=4)
            return [[dataset[i] for i in order.batch(step).tolist()] for step in range(len(order))]

    # -- law 8: no surprise

    @pytest.mark.parametrize("mode", MODES)
    def test_law_8_it_is_what_torch_takes_it_for(self, mode: str) -> None:
        with self.make(loading_mode=mode, progress=False) as dataset:
            assert isinstance(dataset, Dataset)
            assert isinstance(dataset, IterableDataset) == (mode == "streaming")
            loader = self._loader(dataset)
            assert isinstance(loader, DataLoader)
            assert loader.dataset is dataset
            assert len(loader) == len(list(loader)) == -(-len(self.make()) // 4)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_law_8_a_plain_dataloader_gives_each_sample_once(self, mode: str, workers: int) -> None:
        with self._probed(loading_mode=mode) as dataset:
            plain = DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list)
            seen = Counter(self._index(sample) for batch in plain for sample in batch)
            assert seen == Counter(range(len(dataset)))

    @pytest.mark.parametrize("mode", MODES)
    def test_law_8_torch_defaults_change_nothing(self, mode: str) -> None:
        usual = self._samples_and_batches(mode)
        with unusual_defaults():
            unusual = self._samples_and_batches(mode)
        assert same(unusual, usual)

    def _samples_and_batches(self, mode: str) -> list[Any]:
        """An epoch's samples, and its batches where the dataset's own collate function takes them."""
        with self.make(loading_mode=mode, progress=False) as dataset:
            made: list[Any] = [list(self._loader(dataset))]
            with contextlib.suppress(CollateError):  # samples of several shapes
                made.append(list(self._loader(dataset, collate_fn=None)))
            return made

    # -- laws 1 and 2: one value, one order

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("shuffle", SHUFFLES)
    def test_laws_1_and_2_without_workers(self, mode: str, shuffle: Any) -> None:
        with self._probed(loading_mode=mode) as dataset:
            loader = self._loader(dataset, shuffle=shuffle)
            for epoch in (0, 1):
                assert same(list(loader), self._expected(epoch, shuffle)), f"epoch {epoch} differs from samples made one by one"

    @pytest.mark.parametrize(("mode", "workers", "start"), PROCESSES)
    def test_laws_1_2_3_with_workers(self, mode: str, workers: int, start: str) -> None:
        shuffle = "block" if workers == 3 else True
        options: dict[str, Any] = {"shuffle": shuffle, "num_workers": workers, "multiprocessing_context": start}
        with self._probed(loading_mode=mode) as dataset:
            loader = self._loader(dataset, **options)
            assert same(list(loader), self._expected(0, shuffle)), "epoch 0 differs from samples made one by one"
            expected, received = self._expected(1, shuffle), []
            for batch in loader:
                received.append(batch)
                if len(received) == 2:
                    break  # while others are on their way
            state = pickle.loads(pickle.dumps(loader.state_dict()))
            del batch
            loader.close()
        with self._probed(loading_mode=MODES[(MODES.index(mode) + 1) % 4]) as dataset:
            resumed = self._loader(dataset, shuffle=shuffle)
            resumed.load_state_dict(state)
            assert same(received + list(resumed), expected), "an epoch that was resumed differs from one that was not"

    @pytest.mark.parametrize("shuffle", SHUFFLES)
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_law_2_ranks_share_the_global_batches(self, shuffle: Any, world_size: int) -> None:
        whole = self._indices(list(self._loader(self._probed(), shuffle=shuffle)))
        ranks = [
            self._indices(list(self._loader(self._probed(), shuffle=shuffle, rank=r, world_size=world_size, batch_size=4 // world_size)))
            for r in range(world_size)
        ]
        for step, batch in enumerate(whole):
            shared = [ranks[p % world_size][step][p // world_size] for p in range(len(batch))]
            assert shared == batch

    # -- law 3: one integer

    @pytest.mark.parametrize("shuffle", SHUFFLES)
    def test_law_3_any_rank_resumes_any_world(self, shuffle: Any) -> None:
        expected = self._expected(0, shuffle)
        one = self._loader(self._probed(), shuffle=shuffle)
        iterator = iter(one)
        first = [next(iterator) for _ in range(3)]
        del iterator
        halves = []
        for rank in range(2):
            loader = self._loader(self._probed(), shuffle=shuffle, rank=rank, world_size=2, batch_size=2)
            loader.load_state_dict(one.state_dict())
            iterator = iter(loader)
            halves.append([next(iterator)])
            state = loader.state_dict()
            del iterator
        mixed = [halves[p % 2][0][p // 2] for p in range(len(expected[3]))]
        assert same([*first, mixed], expected[:4])
        again = self._loader(self._probed(), shuffle=shuffle)
        again.load_state_dict(state)
        assert same(list(again), expected[4:])

    def test_law_3_a_state_of_other_data_is_refused(self) -> None:
        state = self._loader(self.make()).state_dict()
        other = self.make().subset(range(10))
        with pytest.raises(StateError) as refused:
            self._loader(other).load_state_dict(state)
        assert state["fingerprint"] in str(refused.value) and other.fingerprint in str(refused.value)

    # -- law 4: exactly once

    @pytest.mark.parametrize("world_size", [1, 2, 3, 5])
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("pad", [False, True])
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_law_4_exactly_once(self, world_size: int, drop_last: bool, pad: bool, batch_size: int) -> None:
        dataset, n = self.make(), len(self.make())
        for shuffle in SHUFFLES:
            order = dataset.epoch_order(shuffle, 1, 2, world_size * batch_size)
            ranks = [RankBatches(order, r, world_size, batch_size, drop_last, pad) for r in range(world_size)]
            batches = [[ranks[r].batch(step).tolist() for step in range(len(ranks[r]))] for r in range(world_size)]
            assert len({len(b) for b in batches}) == 1, "ranks have different numbers of batches"
            assert all(batch for rank in batches for batch in rank), "a batch is empty"
            seen = Counter(i for rank in batches for batch in rank for i in batch)
            if drop_last:
                assert set(seen.values()) <= {1} and sum(seen.values()) == n // (world_size * batch_size) * world_size * batch_size
            else:
                padding = -n % world_size if pad else 0
                assert set(seen) == set(range(n)) and sum(seen.values()) == n + padding == n + ranks[0].padding

    # -- law 6: nothing is made up

    @pytest.mark.parametrize("mode", MODES)
    def test_law_6_a_bad_sample_is_named(self, mode: str) -> None:
        made = self.make_bad()
        if made is None:
            pytest.skip("make_bad says that no sample can be bad")
        index = made[1][0]
        with pytest.raises(SampleError) as raised:
            dataset, _ = self.make_bad(loading_mode=mode, progress=False) or made
            list(self._loader(dataset, shuffle=False))
        assert str(index) in str(raised.value) and made[0].source_of(index) in str(raised.value)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("workers", [0, 1])
    def test_law_6_a_skipped_sample_is_counted(self, mode: str, workers: int) -> None:
        made = self.make_bad(loading_mode=mode, on_error="skip", return_index=True, progress=False)
        if made is None:
            pytest.skip("make_bad says that no sample can be bad")
        dataset, bad = made
        with dataset:
            loader = self._loader(dataset, num_workers=workers, batch_size=8)
            batches = list(loader)
            seen = Counter(self._index(sample) for batch in batches for sample in batch)
            assert seen == Counter(set(range(len(dataset))) - set(bad))
            assert len(batches) == len(loader)
            stats, state = loader.get_stats(), loader.state_dict()
            assert stats["skipped"] == len(bad) == state["skipped"]
            assert sorted(entry["index"] for entry in stats["skipped_samples"]) == sorted(bad)
            again = self._loader(dataset, batch_size=8)
            again.load_state_dict(state)
            assert again.state_dict()["skipped_samples"] == state["skipped_samples"]
            loader.close()

    # -- law 7: nothing is left behind

    @pytest.mark.parametrize("mode", MODES)
    def test_law_7_nothing_is_left_behind(self, mode: str) -> None:
        gc.collect()
        before = _traces()
        with self.make(loading_mode=mode, progress=False) as dataset:
            loader = self._loader(dataset, num_workers=1)
            iterator = iter(loader)
            next(iterator)
            del iterator
            loader.close()
        del dataset, loader
        deadline = time.monotonic() + 10
        while (left := _traces() - before) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        assert not left


def _traces() -> set[str]:
    """Child processes, names in the system's shared memory, and open anonymous files of headrace."""
    traces = {f"process {child.pid}" for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}
    if os.path.isdir("/dev/shm"):
        own = f"sem.{multiprocessing.current_process()._config['semprefix'].lstrip('/')}-"  # type: ignore[attr-defined]
        names = os.listdir("/dev/shm")  # semaphores of other processes come and go
        traces |= {f"/dev/shm/{name}" for name in names if name.startswith(own) or not name.startswith("sem.")}
    if os.path.isdir("/proc/self/fd"):
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:  # the descriptor of the listing itself
                continue
            if "memfd:headrace" in target:
                traces.add(f"{fd} {target}")
    return traces
