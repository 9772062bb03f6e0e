"""BaseDataset: a sample is the same by every way of access, in formats of one's own too."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import random
import struct
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from headrace import (
    BaseDataset,
    ConfigError,
    HeadraceWarning,
    ImageDataset,
    LoadingMode,
    SampleError,
    Source,
)
from headrace.core.ahead import Ahead
from headrace.datasets.memory_efficient import MemoryEfficientDataset
from headrace.memory import MemoryBudget
from headrace.memory.anonymous import SharedInt
from headrace.order.ranks import BatchRequest
from headrace.testing.contract import RandomProbe

MODES = ["lazy", "eager", "cached", "streaming"]
MAP_MODES = MODES[:3]
N = 30


STEPS: list[dict[str, Any]] = [
    {},
    {"value_spec": lambda dataset: None},
    {"split_target": lambda dataset, index, value: (value, index)},
]


class Squares(Source):
    """Record i is the text of i; some fail, or raise another error."""

    def __init__(self, n: int, broken: Sequence[int], failing: dict[int, Exception]) -> None:
        self.n, self.broken, self.failing = n, set(broken), failing
        self.reads = SharedInt()

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Sequence[int]) -> list[str]:
        self.reads.value += len(indices)
        if bad := set(indices) & self.broken:
            raise OSError(f"no record {min(bad)}")
        for index in set(indices) & set(self.failing):
            raise self.failing[index]
        return [str(index) for index in indices]

    def blocks(self) -> Any:
        return np.full(self.n // 5, 5)

    def fingerprint(self) -> str:
        return f"squares:{self.n}"


class SquaresDataset(BaseDataset):
    """Sample i is [i, i^2], its target -i. One record may be made undecodable."""

    def __init__(
        self,
        n: int = N,
        *,
        broken: Sequence[int] = (),
        undecodable: int | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("targets", -np.arange(n))
        failing = options.pop("failing", {})
        super().__init__(Squares(n, broken, failing), progress=False, **options)
        self.undecodable = undecodable  # an attribute that is set after super().__init__()

    def decode(self, record: str) -> np.ndarray[Any, Any]:
        number = int(record)
        if number == self.undecodable:
            raise ValueError("not a square\nat all")
        return np.array([number, number**2])


class Draws(RandomProbe):
    """What it draws from every kind of generator, as numbers."""

    def __call__(self, value: Any) -> Any:
        return (float(value[0]), *super().__call__(value)["draws"].tolist())


class SelfAugmenting(SquaresDataset):
    """Its transform is a method of its own, and draws from a generator that it holds."""

    def __init__(self, **options: Any) -> None:
        self.rng = np.random.default_rng()
        super().__init__(transform=self.augment, **options)

    def augment(self, value: Any) -> float:
        return float(value[0] + self.rng.random())


class Numbered(SquaresDataset):
    """Its targets are looked up by number."""

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        return value, (index, int(self.targets[index]))


class Pair(NamedTuple):
    value: Any
    target: Any


def pickled(dataset: Any) -> Any:
    return pickle.loads(pickle.dumps(dataset))


def first_of(sample: Any) -> int:
    return int(sample[0][0])


def numbers(samples: Any) -> list[int]:
    """Which samples come, in their order."""
    return [first_of(sample) for sample in samples]


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes datasets, and closes them at the end."""
    made: list[Any] = []

    def maker(*args: Any, cls: type[BaseDataset] = SquaresDataset, **options: Any) -> Any:
        made.append(cls(*args, **options))
        return made[-1]

    yield maker
    for dataset in made:
        dataset.close()


class TestOwnFormat:
    def test_random_access(self, make: Any) -> None:
        for mode in MAP_MODES:
            dataset = make(loading_mode=mode)
            for index in (0, 7, 29, -1, -30, np.int64(4), torch.tensor(5)):
                value, target = dataset[index]
                wanted = int(index) % N
                assert value.tolist() == [wanted, wanted**2]
                assert target == -wanted
                assert type(target) is int
            assert numbers(dataset.__getitems__([3, 3, 0])) == [3, 3, 0]
            assert dataset.__getitems__([]) == []
            assert numbers(dataset) == list(range(N))
            assert numbers(dataset.__getitems__([-1, 0, -30])) == [29, 0, 0]
            for index in (30, -31, 10**9):
                with pytest.raises(IndexError, match="30 samples"):
                    dataset[index]
                with pytest.raises(IndexError):
                    dataset.__getitems__([0, index])
            with pytest.raises(IndexError):
                dataset.source_of(30)
        for index in ("a", [1, 2], 1.5, None, np.array([1, 2])):
            with pytest.raises(TypeError):
                dataset[index]

    def test_no_samples_at_all(self, make: Any) -> None:
        for mode in MODES:
            dataset = make(0, loading_mode=mode)
            assert list(dataset) == list(dataset.subset([])) == []
            assert [len(part) for part in dataset.split(0.5)] == [0, 0]

    def test_bad_arguments(self) -> None:
        for wrong in (
            {"transforms": print, "transform": print},
            {"transforms": print, "target_transform": print},
            {"targets": list(range(29))},
            {"targets": list(range(31))},
        ):
            with pytest.raises(ConfigError, match=next(iter(wrong))):
                SquaresDataset(**wrong)  # type: ignore[arg-type]

    def test_arguments_that_are_missing_or_too_many(self) -> None:
        for arguments in ((), ("a", "b", "c", "d")):
            with pytest.raises(TypeError, match=r"ImageDataset.__init__\(\)"):
                ImageDataset(*arguments)

    def test_a_constructor_that_calls_no_base_class(self) -> None:
        class Forgetful(ImageDataset):
            def __init__(self, path: str) -> None:
                self.path = path

        with pytest.raises(ConfigError, match=r"Forgetful.__init__ .*super\(\).__init__"):
            Forgetful("a")

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
    def test_a_dataset_opens_no_descriptor_of_its_own(self) -> None:
        first = SquaresDataset()
        before = len(os.listdir("/proc/self/fd"))
        datasets = [SquaresDataset() for _ in range(60)]
        assert len(os.listdir("/proc/self/fd")) == before
        assert first.epoch == datasets[-1].epoch == 0


class TestViews:
    def test_slices_indices_and_masks(self, make: Any) -> None:
        dataset = make()
        for part in (slice(3, 9), slice(None, None, -1), slice(-4, None), slice(5, 5)):
            wanted = list(range(N))[part]
            assert numbers(dataset[part]) == wanted
            assert len(dataset[part]) == len(wanted)
            assert [target for _, target in dataset[part]] == [-index for index in wanted]
        for indices in ((4, 2, -1, 2), np.array([4, 2, -1, 2], np.int32), torch.tensor([4, 2, -1])):
            view = dataset.subset(indices)
            assert numbers(view)[:3] == [4, 2, 29]
            assert list(view.targets)[:3] == [-4, -2, -29]
            assert numbers(view.__getitems__([-2, 0])) == [numbers(view)[-2], 4]
        mask = np.arange(N) % 7 == 3
        for given in (mask, mask.tolist(), torch.from_numpy(mask)):
            assert numbers(dataset.subset(given)) == [3, 10, 17, 24]
        for wrong in ([True] * 29, [True] * 31, [1.7], [30], [-31], [0, 10**12]):
            with pytest.raises((IndexError, ConfigError, TypeError)):
                dataset.subset(wrong)

    def test_of_views(self, make: Any) -> None:
        dataset = make()
        view = dataset.subset([9, 7, 5, 3, 1])[1:].subset([-1, 0]).subset([1, 0, 1])
        assert numbers(view) == [7, 1, 7]
        assert view.targets.tolist() == [-7, -1, -7]
        assert view.source_of(1) == dataset.source_of(1) == "Squares[1]"
        with pytest.raises(IndexError, match="3 samples"):
            view[3]
        listed = make(targets=[{"i": index} for index in range(N)]).subset([3, 2])
        assert listed.targets == [{"i": 3}, {"i": 2}]
        assert listed[1][1] == {"i": 2}
        stream = make(loading_mode="streaming")[10:20]
        assert isinstance(stream, IterableDataset)
        assert sorted(numbers(stream)) == list(range(10, 20))
        stream.value_source.find(Ahead).close()

    def test_an_overridden_split_gets_numbers_of_the_whole(self) -> None:
        dataset = Numbered()
        views = [
            whole.subset([9, 7, 5]).subset([2, 0])
            for whole in (dataset, MemoryEfficientDataset(dataset))
        ]
        views += [pickle.loads(pickle.dumps(views[0])), MemoryEfficientDataset(views[0])]
        for view in views:
            assert [target for _, target in view] == [(5, -5), (9, -9)]

    def test_split_and_folds(self, make: Any) -> None:
        dataset = make(100, targets=[index % 4 for index in range(100)])
        for fractions, sizes in ((1 / 3, [33, 67]), ([0.7, 0.15, 0.15], [70, 15, 15])):
            parts = [numbers(part) for part in dataset.split(fractions)]
            assert [len(part) for part in parts] == sizes
            assert sorted(number for part in parts for number in part) == list(range(100))
            assert numbers(dataset.split(fractions, seed=1)[0]) != parts[0]
        for wrong in (0, 1, 0.004, -0.1, 1.1, float("nan")):
            with pytest.raises(ConfigError, match="fraction"):
                dataset.split(wrong)
        parts = [*dataset.split(0.8, stratify=True), *dataset[:80].folds(5, stratify=True)[0]]
        for part in parts:
            assert set(np.bincount(part.targets)) == {len(part) // 4}
        with pytest.raises(ConfigError, match="stratify"):
            make(targets=None).split(0.5, stratify=True)

    def test_share_what_is_held(self, make: Any) -> None:
        closed, copied = make(loading_mode="eager"), pickled(make(loading_mode="eager"))
        closed.close()
        for dataset in (make(loading_mode="eager"), make(loading_mode="cached"), closed, copied):
            filled = dataset.sample_source.reads.value if dataset in (closed, copied) else 0
            one, two = dataset.split(0.5)
            assert sorted(numbers(one) + numbers(two)) == numbers(dataset) == list(range(N))
            with dataset[3:5] as view:
                assert numbers(view) == [3, 4]
            assert numbers(one) == numbers(dataset.split(0.5)[0])
            assert dataset.sample_source.reads.value - filled == N
        copied.close()

    def test_have_fingerprints_and_blocks_of_their_own(self, make: Any) -> None:
        dataset = make()
        others = [dataset[1:], dataset[:29], dataset[:0]]
        others += [dataset.subset(indices) for indices in ([0, 2], [2, 0])]
        assert len({view.fingerprint for view in (dataset, *others)}) == 6
        assert make(loading_mode="cached")[1:].fingerprint == dataset[1:].fingerprint
        assert dataset[:].fingerprint == dataset[0:30].fingerprint
        assert dataset.blocks().tolist() == [5] * 6
        assert dataset[3:11].blocks().tolist() == [2, 5, 1]
        assert dataset.subset([0, 1, 9, 2, 3]).blocks().tolist() == [2, 1, 2]
        assert dataset[:0].blocks().tolist() == []


class TestSamples:
    def test_return_index(self, make: Any) -> None:
        class Dicts(SquaresDataset):
            def make_sample(self, value: Any, target: Any) -> Any:
                return {"value": int(value[0]), "target": target}

        class Named(SquaresDataset):
            def make_sample(self, value: Any, target: Any) -> Any:
                return Pair(int(value[0]), target)

        assert make(return_index=True)[3][1:] == (-3, 3)
        assert make(return_index=True, targets=None)[-1][1] == 29
        assert [sample[2] for sample in make(return_index=True).subset([9, 8])] == [0, 1]
        assert Dicts(return_index=True)[4] == {"value": 4, "target": -4, "index": 4}
        assert Named(return_index=True)[4] == (Pair(4, -4), 4)

    def test_transforms(self, make: Any) -> None:
        def joint(value: Any, target: Any) -> Any:
            return target, int(value[1])

        assert make(transform=sum)[3] == (12, -3)
        assert make(target_transform=abs)[3][1] == 3
        assert make(transform=sum, target_transform=abs)[3] == (12, 3)
        assert make(transform=[sum, str])[3] == ("12", -3)
        assert make(transforms=joint)[3] == (-3, 9)
        assert make(target_transform=str, targets=None, transform=sum)[3] == 12
        assert MemoryEfficientDataset(list(range(10)), transform=[float, str])[3] == "3.0"

    def test_transforms_may_write_into_what_they_get(self, make: Any) -> None:
        def spoil(value: Any, target: Any) -> Any:
            if isinstance(target, dict):
                target["boxes"].append(2)
            else:
                target += 1
            value += 1000
            return int(value[0]), str(target)

        for targets in ([{"boxes": [1]}] * N, np.ones((N, 4)), torch.ones(N, 4)):
            for mode in MAP_MODES:
                dataset = make(targets=targets, transforms=spoil, loading_mode=mode)
                first = dataset.__getitems__([4, 4, 5])
                assert first == dataset.__getitems__([4, 4, 5])
                assert [value for value, _ in first] == [1004, 1004, 1005]

    def test_an_error_in_a_transform_says_where(self, make: Any) -> None:
        def fails(value: Any, target: Any = None) -> Any:
            random.random()
            raise RuntimeError("too dark")

        before = random.getstate()
        for name in ("transform", "target_transform", "transforms"):
            # it is not the sample's fault: nothing is skipped
            dataset = make(on_error="skip", **{name: fails})
            with pytest.raises(RuntimeError, match="too dark") as caught:
                dataset[-2]
            assert str(caught.value) == "too dark"
            (note,) = caught.value.__notes__
            assert "sample 28" in note
            assert "Squares[28]" in note
        assert random.getstate() == before


class TestSeeds:
    def test_one_sample_has_one_draw_by_all_ways(self, make: Any) -> None:
        found: list[Any] = []
        for mode in MODES:
            dataset = make(transform=Draws(), targets=None, loading_mode=mode, seed=3)
            dataset.set_epoch(2)
            if mode == "streaming":
                found += [sample for sample in dataset if sample[0] == 5]
                continue
            found += [dataset[5], dataset[-25], dataset.__getitems__([1, 5, 2])[1]]
            found += [dataset.__getitems__([5, 5])[1], dataset[5]]
            found += [dataset.subset([7, 5])[1], dataset[3:8][2]]
            found += [pickled(dataset)[5], copy.deepcopy(dataset)[5], copy.copy(dataset)[5]]
            found.append(dataset.__getitems__(BatchRequest([0, 5], 3, 2, step=3))[1])
        assert len(found) == 34
        assert len(set(found)) == 1
        assert found[0][0] == 5
        assert len(set(found[0])) == 7

    def test_a_transform_may_be_the_datasets_own_method(self, make: Any) -> None:
        one, two = make(cls=SelfAugmenting), make(cls=SelfAugmenting)
        assert [one[i] for i in (3, 4, 3)] == [two[i] for i in (3, 4, 3)]
        assert one[3] == one.subset([3])[0] != one[4]
        for copied in (pickled(one), copy.deepcopy(one)):
            assert copied[3] == one[3]
            assert copied.transform.__self__ is copied

    def test_generators_of_transforms_that_come_later(self, make: Any) -> None:
        class Holder:
            """Equal to all others; it may make its generator when it is first called."""

            def __init__(self, rng: Any = None) -> None:
                self.rng = rng

            def __call__(self, value: Any) -> Any:
                self.rng = self.rng or np.random.default_rng()
                return float(self.rng.random())

            def __eq__(self, other: object) -> bool:
                return type(other) is Holder

            __hash__ = None  # type: ignore[assignment]

        for rngs in ([None, None], [np.random.default_rng(0), np.random.default_rng(0)]):
            dataset = make(transform=Holder(rngs[0]), targets=None)
            first = [dataset[index] for index in range(5)]
            assert len(set(first)) == 5
            assert [dataset[index] for index in range(5)] == first
            dataset.transform = Holder(rngs[1])
            assert [dataset[index] for index in range(5)] == first


class TestErrors:
    def test_raise(self, make: Any) -> None:
        for mode in MAP_MODES:
            for options, message, cause in (
                ({"broken": [7]}, r"can't be read: Squares\[7\]: no record 7; .*skip", OSError),
                (
                    {"undecodable": 7},
                    r"can't be decoded: Squares\[7\]: not a square at all",
                    ValueError,
                ),
            ):
                with pytest.raises(SampleError, match=f"sample 7 {message}") as caught:
                    make(loading_mode=mode, **options).__getitems__([6, 7, 8])
                assert type(caught.value.__cause__) is cause
                assert "\n" not in str(caught.value)
                assert type(pickled(caught.value)) is SampleError
        with pytest.raises(SampleError, match=r"sample 7 of the whole .*Squares\[7\]"):
            make(broken=[7])[5:9][2]

    def test_skip(self, make: Any) -> None:
        for mode in MAP_MODES:
            dataset = make(loading_mode=mode, broken=[7, 9], undecodable=4, on_error="skip")
            for _ in range(2):
                dataset.sample_reader.take_report()
                assert numbers(dataset.__getitems__([3, 4, 7, 8])) == [3, 8]
                report = dataset.sample_reader.take_report()
                assert report["skipped"] == 2
                (four, seven) = report["skipped_samples"]
                assert four[:2] == (4, "Squares[4]")
                assert seven[:2] == (7, "Squares[7]")
                assert "can't be decoded" in four[2]
                assert "no record 7" in seven[2]
            with pytest.raises(SampleError, match=r"none of the 2 samples .* sample 9"):
                dataset.__getitems__([9, 7])
            with pytest.raises(SampleError, match="sample 7"):
                dataset[7]
            assert numbers(dataset) == [i for i in range(N) if i not in (4, 7, 9)]
        view = make(broken=[7], on_error="skip").subset([8, 7])
        view.__getitems__([0, 1])  # counted by the view's own indices
        ((index, path, _),) = view.sample_reader.take_report()["skipped_samples"]
        assert (index, path) == (1, "Squares[7]")

    def test_a_callable(self, make: Any) -> None:
        asked: list[Any] = []

        def instead(index: int, path: str, error: Exception) -> Any:
            asked.append((index, path, type(error)))
            if path == "Squares[9]":
                raise LookupError from error
            return np.array([index, 0]), None

        for mode in MAP_MODES:
            dataset = make(loading_mode=mode, broken=[7, 9], undecodable=4, on_error=instead)
            for _ in range(2):
                asked.clear()
                assert numbers(dataset.__getitems__([4, 5, 7])) == [4, 5, 7]
                assert asked == [(4, "Squares[4]", ValueError), (7, "Squares[7]", OSError)]
            with pytest.raises(LookupError):
                dataset[9]

    def test_trouble_of_the_machine_is_no_samples_fault(self, make: Any) -> None:
        for error in (
            MemoryError("no more"),
            OSError(errno.EMFILE, "Too many open files"),
            OSError(errno.ENOSPC, "No space left on device"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ):
            for mode in MAP_MODES:
                with pytest.raises(type(error), match=str(error.args[-1])) as caught:
                    make(loading_mode=mode, on_error="skip", failing={7: error})[7]
                assert not isinstance(caught.value, SampleError)
                assert "may be intact" in caught.value.__notes__[0]


class Heavy(SquaresDataset):
    """Half of the samples can't be decoded, after a MiB was made of each; the others are the
    memory that their process has traced.
    """

    def decode(self, record: str) -> np.ndarray[Any, Any]:
        if int(record) % 2:
            self.fail(np.ones(1 << 20, np.uint8))
        return np.array([tracemalloc.get_traced_memory()[0]])

    def fail(self, pixels: np.ndarray[Any, Any]) -> None:
        try:
            struct.unpack("<Q", pixels[:3])
        except struct.error as error:
            raise ValueError("half an image") from error


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is counted, and nothing is freed by the garbage collector."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.parametrize(("mode", "workers"), [("lazy", 0), ("cached", 2)])
def test_bad_samples_hold_no_memory(
    make: Any, make_loader: Any, traced: None, mode: str, workers: int
) -> None:
    kept: list[Exception] = []

    def instead(index: int, path: str, error: Exception) -> Any:
        kept.append(error)
        return np.array([0]), 0

    on_error: Any = "skip" if workers else instead
    before = tracemalloc.get_traced_memory()[0]
    dataset = make(16, cls=Heavy, loading_mode=mode, on_error=on_error, max_memory_usage="50MB")
    loader = make_loader(
        dataset, batch_size=8, num_workers=workers, persistent_workers=bool(workers), shuffle=False
    )
    for _ in range(10):
        most = max(int(values.max()) for values, _ in loader)
    assert max(most, tracemalloc.get_traced_memory()[0]) - before < 3 << 20
    assert workers or [str(error) for error in kept] == ["half an image"] * 80


class TestLife:
    def test_repr_is_the_call(self, make: Any) -> None:
        for options in (
            {"n": 5},
            {"n": 7, "undecodable": 3, "loading_mode": "cached", "cache_size": "1MB", "seed": 1},
            {"loading_mode": LoadingMode.STREAMING, "max_memory_usage": 0.5, "hold": "encoded"},
        ):
            dataset = make(**options)
            again = eval(repr(dataset))
            assert repr(again) == repr(dataset)
            assert again.loading_mode is dataset.loading_mode
            assert len(again) == len(dataset)
            assert f"# {len(dataset)} samples" in repr(dataset)
            assert dataset.loading_mode.value in dataset.explain()
            again.close()

    def test_repr_of_a_view_and_of_secrets(self) -> None:
        class Remote(BaseDataset):
            def __init__(
                self, data_path: Any, *, storage_options: Any = None, **options: Any
            ) -> None:
                super().__init__(Squares(3, (), {}), **options)

        urls = ["s3://alice:hunter2@b/k?t=TOKEN", "s3://b/l"]
        view = Remote(urls, storage_options={"secret": "s3cr3t"}, seed=1)[1:]
        assert repr(view) == (
            "Remote(['s3://b/k', 's3://b/l'], storage_options={...}, seed=1).subset(<2 "
            "indices>)  # 2 samples"
        )

    def test_repr_of_a_constructor_that_passes_all_on(self) -> None:
        class All(SquaresDataset):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)

        assert repr(All(5, seed=1)) == "All(args=(5,), seed=1)  # 5 samples"

    @pytest.mark.parametrize("steps", STEPS)
    def test_an_overridden_step_keeps_no_dataset_alive(self, steps: dict[str, Any]) -> None:
        """What it holds would stay reserved until the garbage collector comes by."""
        kind: Any = type("Overriding", (SquaresDataset,), steps)
        gc.collect()
        before = MemoryBudget().reserved
        gc.disable()
        try:
            dataset = kind(loading_mode="cached")
            assert numbers(dataset) == list(range(N))
            del dataset
            assert MemoryBudget().reserved == before
        finally:
            gc.enable()

    def test_memory_is_given_back(self, make: Any) -> None:
        before = MemoryBudget().reserved
        for mode in MODES:
            with make(200, loading_mode=mode) as dataset:
                for _ in range(2):
                    assert sorted(numbers(dataset)) == list(range(200))
                    dataset.close()
                    gc.collect()
                    assert MemoryBudget().reserved == before, mode
        view = SquaresDataset(loading_mode="eager")[3:]
        gc.collect()
        assert numbers(view) == list(range(3, N))
        assert MemoryBudget().reserved > before
        del view  # which nobody closes
        gc.collect()
        assert MemoryBudget().reserved == before


def test_a_stream_is_an_iterable_dataset(make: Any) -> None:
    dataset = make(loading_mode="STREAMING")
    assert isinstance(dataset, SquaresDataset) and not issubclass(SquaresDataset, IterableDataset)
    assert isinstance(dataset, IterableDataset) and type(dataset).__name__ == "SquaresDataset"
    with pytest.raises(TypeError, match="'lazy'"):
        dataset[0]


class TestPlainDataLoader:
    # more workers than cores

    @pytest.mark.parametrize("mode", ["lazy", "streaming"])
    def test_persistent_workers_see_the_epoch(self, make: Any, mode: str) -> None:
        dataset = make(200, loading_mode=mode, transform=Draws(), targets=None)
        loader = DataLoader(
            dataset,
            16,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
            collate_fn=list,
        )
        epochs = []
        for epoch in (0, 1, 0):
            dataset.set_epoch(epoch)
            epochs.append([sample for batch in loader for sample in batch])
        assert epochs[0] == epochs[2]
        assert not set(epochs[0]) & set(epochs[1])
        alone = make(200, transform=Draws(), targets=None)
        assert sorted(epochs[0]) == list(alone)

    def test_repeated_draws_are_warned_of_once(self, make: Any) -> None:
        """Nobody but the user knows which epoch it is."""
        named, unnamed = (make(transform=Draws(), targets=None) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for epoch in range(3):
                named.set_epoch(epoch)
                list(DataLoader(named, 7))
                list(DataLoader(make(transform=np.sum, targets=None), 7))
            loader = DataLoader(unnamed, 7, collate_fn=list)
            first = list(loader)
        with pytest.warns(HeadraceWarning, match="set_epoch") as caught:
            assert list(loader) == first
            list(loader)
        assert len(caught) == 1

    def test_another_thread_is_warned_of(self, make: Any) -> None:
        dataset = make(transform=Draws(), targets=None)
        messages: list[str] = []

        def load() -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dataset.__getitems__([1, 2])
                messages.extend(str(warning.message) for warning in caught)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        assert any("thread beside the main one" in message for message in messages)
