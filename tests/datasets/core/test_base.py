"""BaseDataset: a sample is the same by every way of access, and a format of one's own is as good
as ours.
"""

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
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from headrace import (
    BaseDataset,
    ConfigError,
    HDF5Dataset,
    HeadraceWarning,
    ImageDataset,
    LoadingMode,
    MemoryBudget,
    SampleError,
    Source,
)
from headrace.datasets.memory_efficient import MemoryEfficientDataset
from headrace.memory.anonymous import SharedInt
from headrace.order.request import BatchRequest

pytestmark = pytest.mark.quick_every(6)

MODES = ["lazy", "eager", "cached", "streaming"]
MAP_MODES = MODES[:3]


# --- a format of one's own ------------------------------------------------------------------------


class Squares(Source):
    """Record i is the text of i."""

    def __init__(
        self,
        n: int,
        broken: Sequence[int] = (),
        block: int | None = None,
        failing: dict[int, Exception] | None = None,
    ) -> None:
        self.n, self.broken, self.block, self.failing = n, tuple(broken), block, failing or {}
        self.reads = SharedInt()

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Sequence[int]) -> list[str]:
        self.reads.value += len(indices)
        if bad := set(indices) & set(self.broken):
            raise OSError(f"no record {min(bad)}")
        for index in set(indices) & set(self.failing):
            raise self.failing[index]
        return [str(i) for i in indices]

    def blocks(self) -> Any:
        return None if self.block is None else np.full(self.n // self.block, self.block)

    def fingerprint(self) -> str:
        return f"squares:{self.n}"


class SquaresDataset(BaseDataset):
    """Sample i is [i, i^2], its target -i. A record "7" may be made undecodable."""

    def __init__(
        self,
        n: int = 30,
        *,
        broken: Sequence[int] = (),
        undecodable: int | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("targets", -np.arange(n))
        failing = options.pop("failing", None)
        super().__init__(Squares(n, broken, failing=failing), progress=False, **options)
        self.undecodable = undecodable  # an attribute that is set after super().__init__()

    def decode(self, record: str) -> np.ndarray[Any, Any]:
        number = int(record)
        if number == self.undecodable:
            raise ValueError("not a square\nat all")
        return np.array([number, number**2])


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_a_dataset_opens_no_descriptor_of_its_own() -> None:
    first = SquaresDataset()
    before = len(os.listdir("/proc/self/fd"))
    datasets = [SquaresDataset() for _ in range(60)]
    assert len(os.listdir("/proc/self/fd")) == before and first.epoch == datasets[-1].epoch == 0


class Draws:
    """A transform that draws from every generator there is, the global ones and its own."""

    def __init__(self) -> None:
        self.own = [np.random.default_rng(), random.Random()]
        self.torch = {"generator": torch.Generator()}

    def __call__(self, value: Any) -> tuple[float, ...]:
        return (
            float(value[0]),
            random.random(),
            float(np.random.rand()),
            float(torch.rand(1)),
            float(self.own[0].random()),
            self.own[1].random(),
            float(torch.rand(1, generator=self.torch["generator"])),
        )


class SelfAugmenting(SquaresDataset):
    """Its transform is a method of its own, and draws from a generator that it holds."""

    def __init__(self, **options: Any) -> None:
        self.rng = np.random.default_rng()
        super().__init__(transform=self.augment, **options)

    def augment(self, value: Any) -> float:
        return float(value[0] + self.rng.random())


class LooksAtOnce(SquaresDataset):
    """Reads a sample before its constructor is through."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first = self[0]


class Together(SquaresDataset):
    """Says that records are decoded together, and not how."""

    decodes_together = True


class Pair(NamedTuple):
    value: Any
    target: Any


def first_of(sample: Any) -> int:
    return int(sample[0][0])


def numbers(dataset: Any) -> list[int]:
    """Which samples come, in their order."""
    return [first_of(sample) for sample in dataset]


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
    def test_decode_batch_defaults_to_one_by_one(self, make: Any) -> None:
        dataset = make(cls=Together, undecodable=4, on_error="skip")
        assert numbers(dataset.__getitems__([5, 4, 3])) == [5, 3] and first_of(dataset[6]) == 6
        with pytest.raises(SampleError, match=r"sample 4 can't be decoded: .*not a square"):
            make(cls=Together, undecodable=4)[4]

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_random_access(self, make: Any, mode: str) -> None:
        dataset = make(loading_mode=mode)
        assert isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)
        for _ in range(2):
            for index in (0, 7, 29, -1, -30, np.int64(4), torch.tensor(5)):
                value, target = dataset[index]
                wanted = int(index) % 30
                assert (
                    value.tolist() == [wanted, wanted**2]
                    and target == -wanted
                    and type(target) is int
                )
            assert [first_of(s) for s in dataset.__getitems__([3, 3, 0])] == [3, 3, 0]
            assert numbers(dataset) == list(range(30))
        assert len(dataset) == 30 and dataset.__getitems__([]) == []

    @pytest.mark.parametrize("mode", MAP_MODES)
    @pytest.mark.parametrize("index", [30, -31, 10**9])
    def test_outside(self, make: Any, mode: str, index: int) -> None:
        with pytest.raises(IndexError, match="30 samples"):
            make(loading_mode=mode)[index]

    @pytest.mark.parametrize("index", ["a", [1, 2], 1.5, None, np.array([1, 2])])
    def test_no_index(self, make: Any, index: Any) -> None:
        with pytest.raises(TypeError):
            make()[index]

    @pytest.mark.parametrize("mode", MODES)
    def test_all_samples_come_in_each_mode(self, make: Any, mode: str) -> None:
        dataset = make(200, loading_mode=mode)
        for _ in range(2):
            assert sorted(numbers(dataset)) == list(range(200))
        assert {first_of(s): s[1] for s in dataset} == {i: -i for i in range(200)}

    @pytest.mark.parametrize("mode", MODES)
    def test_no_samples_at_all(self, make: Any, mode: str) -> None:
        dataset = make(0, loading_mode=mode)
        assert len(dataset) == 0 and list(dataset) == []
        assert len(dataset.subset([])) == 0 and [len(part) for part in dataset.split(0.5)] == [0, 0]

    def test_without_targets_a_sample_is_the_value(self, make: Any) -> None:
        assert make(targets=None)[3].tolist() == [3, 9]

    @pytest.mark.parametrize("hold", ["encoded", "decoded"])
    @pytest.mark.parametrize("mode", ["eager", "cached"])
    def test_hold(self, make: Any, mode: str, hold: str) -> None:
        dataset = make(loading_mode=mode, hold=hold)
        for _ in range(2):
            assert numbers(dataset) == list(range(30))
        held = dataset.mode.get([4])[0]
        assert held == "4" if hold == "encoded" else held.tolist() == [4, 16]
        assert dataset.sample_source.reads.value == 30

    @pytest.mark.parametrize(
        "wrong",
        [
            {"loading_mode": "fast"},
            {"hold": "both"},
            {"on_error": "ignore"},
            {"cache_policy": "fifo"},
            {"transforms": print, "transform": print},
            {"transforms": print, "target_transform": print},
        ],
    )
    def test_arguments_that_make_no_sense(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SquaresDataset(**wrong)

    @pytest.mark.parametrize("n", [29, 31])
    def test_as_many_targets_as_samples(self, n: int) -> None:
        with pytest.raises(ConfigError, match="targets"):
            SquaresDataset(targets=list(range(n)))


class TestViews:
    def test_slices(self, make: Any) -> None:
        dataset = make()
        for part in (
            slice(3, 9),
            slice(None, None, -1),
            slice(-4, None),
            slice(5, 5),
            slice(2, 100, 7),
        ):
            view = dataset[part]
            assert numbers(view) == list(range(30))[part] and len(view) == len(range(30)[part])
            assert [s[1] for s in view] == [-i for i in range(30)[part]]

    @pytest.mark.parametrize(
        "kind", [list, tuple, np.array, torch.tensor, lambda i: np.array(i, np.int32)]
    )
    def test_subsets(self, make: Any, kind: Any) -> None:
        view = make().subset(kind([4, 2, -1, 2]))
        assert numbers(view) == [4, 2, 29, 2] and list(view.targets) == [-4, -2, -29, -2]
        assert first_of(view[-2]) == 29 and [first_of(s) for s in view.__getitems__([3, 0])] == [
            2,
            4,
        ]

    def test_a_mask(self, make: Any) -> None:
        mask = np.arange(30) % 7 == 3
        for given in (mask, mask.tolist(), torch.from_numpy(mask)):
            assert numbers(make().subset(given)) == [3, 10, 17, 24]

    @pytest.mark.parametrize(
        "n",
        [29, 31],
    )
    def test_a_mask_of_another_length(self, make: Any, n: int) -> None:
        with pytest.raises((IndexError, ConfigError)):
            make().subset([True] * n)

    def test_fractions_are_no_indices(self, make: Any) -> None:
        with pytest.raises((IndexError, TypeError, ConfigError)):
            make().subset([1.7])

    def test_of_views(self, make: Any) -> None:
        dataset = make()
        view = dataset.subset([9, 7, 5, 3, 1])[1:].subset([-1, 0]).subset([1, 0, 1])
        assert numbers(view) == [7, 1, 7] and view.targets.tolist() == [-7, -1, -7]
        assert view.source_of(1) == dataset.source_of(1) == "Squares[1]"
        with pytest.raises(IndexError, match="3 samples"):
            view[3]

    @pytest.mark.parametrize("indices", [[30], [-31], [0, 10**12]])
    def test_outside(self, make: Any, indices: list[int]) -> None:
        with pytest.raises(IndexError, match="30 samples"):
            make().subset(indices)

    def test_targets_may_be_a_list(self, make: Any) -> None:
        view = make(targets=[{"i": i} for i in range(30)]).subset([3, 2])
        assert view.targets == [{"i": 3}, {"i": 2}] and view[1][1] == {"i": 2}

    @pytest.mark.parametrize("fraction", [0.1, 1 / 3, 0.5, 0.99])
    def test_split(self, make: Any, fraction: float) -> None:
        dataset = make(100)
        one, two = dataset.split(fraction)
        assert len(one) == round(100 * fraction) and len(one) + len(two) == 100
        assert sorted(numbers(one) + numbers(two)) == list(range(100))
        assert numbers(one) == sorted(numbers(one)) and numbers(two) == sorted(numbers(two))
        assert numbers(dataset.split(fraction)[0]) == numbers(one)
        assert numbers(dataset.split(fraction, seed=1)[0]) != numbers(one)

    @pytest.mark.parametrize("fraction", [0, 1, 1.0, 0.004, [1.0, 0.0]])
    def test_split_that_leaves_a_part_empty(self, make: Any, fraction: Any) -> None:
        with pytest.raises(
            ConfigError,
            match=r"split\(\[.*\]\) of 100 samples leaves none for part \d: use other fractions",
        ):
            make(100).split(fraction)

    def test_split_into_several_parts(self, make: Any) -> None:
        dataset = make(100, targets=[i % 4 for i in range(100)])
        parts = dataset.split([0.7, 0.15, 0.15], seed=3)
        assert [len(part) for part in parts] == [70, 15, 15] and sorted(
            number for part in parts for number in numbers(part)
        ) == list(range(100))
        assert numbers(parts[0]) == numbers(dataset.split(0.7, seed=3)[0])
        train, val = dataset.split(0.8, stratify=True)
        assert (
            np.bincount(val.targets).tolist() == [5] * 4
            and np.bincount(train.targets).tolist() == [20] * 4
        )
        groups = [i // 10 for i in range(100)]
        train, val = dataset.split(0.8, groups=groups)
        assert len(val) == 20 and len({i // 10 for i in numbers(val)}) == 2

    def test_folds(self, make: Any) -> None:
        dataset = make(30, targets=[i % 3 for i in range(30)])
        folds = dataset[:25].folds(5, stratify=True)
        assert sorted(number for _, val in folds for number in numbers(val)) == list(range(25))
        assert all(
            sorted(numbers(train) + numbers(val)) == list(range(25)) and len(val) == 5
            for train, val in folds
        )
        assert all(np.bincount(val.targets).min() >= 1 for _, val in folds)

    def test_stratify_needs_targets(self, make: Any) -> None:
        with pytest.raises(ConfigError, match=r"stratify=True: this .* has no targets"):
            make(targets=None).split(0.5, stratify=True)

    @pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
    def test_split_into_nothing_possible(self, make: Any, fraction: float) -> None:
        with pytest.raises(ConfigError, match="fraction"):
            make().split(fraction)

    @pytest.mark.parametrize("mode", ["eager", "cached"])
    def test_share_what_is_held(self, make: Any, mode: str) -> None:
        dataset = make(loading_mode=mode)
        one, two = dataset.split(0.5)
        assert sorted(numbers(one) + numbers(two) + numbers(one)) == sorted(
            list(range(30)) + numbers(one)
        )
        assert numbers(dataset) == list(range(30)) and dataset.sample_source.reads.value == 30

    @pytest.mark.parametrize("come_by", ["closed", "unpickled"])
    def test_share_what_is_held_again(self, make: Any, come_by: str) -> None:
        dataset = make(loading_mode="eager")
        if come_by == "closed":
            dataset.close()
        else:
            dataset = pickle.loads(pickle.dumps(dataset))
        before = dataset.sample_source.reads.value
        one, two = dataset.split(0.5)
        assert sorted(numbers(one) + numbers(two)) == numbers(dataset) == list(range(30))
        assert dataset.sample_source.reads.value - before == 30

    def test_have_fingerprints_of_their_own(self, make: Any) -> None:
        dataset = make()
        views = [
            dataset,
            dataset[1:],
            dataset[:29],
            dataset.subset([0, 2]),
            dataset.subset([2, 0]),
            dataset[:0],
        ]
        assert len({view.fingerprint for view in views}) == len(views)
        assert make(loading_mode="cached")[1:].fingerprint == dataset[1:].fingerprint
        assert dataset[:].fingerprint == dataset[0:30].fingerprint

    def test_know_their_blocks(self) -> None:
        dataset = BaseDataset(Squares(24, block=4))
        assert dataset.blocks().tolist() == [4] * 6
        assert dataset[2:10].blocks().tolist() == [2, 4, 2]
        assert dataset.subset([0, 1, 8, 2, 3]).blocks().tolist() == [2, 1, 2]
        assert dataset[:0].blocks().tolist() == []

    def test_of_a_stream_are_streams(self, make: Any) -> None:
        view = make(loading_mode="streaming")[10:20]
        assert isinstance(view, IterableDataset) and sorted(numbers(view)) == list(range(10, 20))
        view.mode.close()


class TestSamples:
    def test_return_index(self, make: Any) -> None:
        assert make(return_index=True)[3][1:] == (-3, 3)
        value, index = make(return_index=True, targets=None)[-1]
        assert value.tolist() == [29, 841] and index == 29
        assert make(return_index=True, transform=lambda v: [1], targets=None)[5] == ([1], 5)
        assert [s[2] for s in make(return_index=True).subset([9, 8])] == [0, 1]

    def test_return_index_of_other_structures(self) -> None:
        class Dicts(SquaresDataset):
            def make_sample(self, value: Any, target: Any) -> Any:
                return {"value": int(value[0]), "target": target}

        class Named(SquaresDataset):
            def make_sample(self, value: Any, target: Any) -> Any:
                return Pair(int(value[0]), target)

        assert Dicts(return_index=True)[4] == {"value": 4, "target": -4, "index": 4}
        assert Named(return_index=True)[4] == (Pair(4, -4), 4)

    def test_transforms(self, make: Any) -> None:
        assert make(transform=sum)[3] == (12, -3)
        assert make(target_transform=abs)[3][1] == 3
        assert make(transform=sum, target_transform=abs)[3] == (12, 3)
        assert make(transforms=lambda v, t: (t, int(v[1])))[3] == (-3, 9)
        assert make(target_transform=str, targets=None, transform=sum)[3] == 12

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_a_transform_may_write_into_its_input(self, make: Any, mode: str) -> None:
        def spoil(value: Any) -> Any:
            value += 1000
            return int(value[0])

        dataset = make(loading_mode=mode, transform=spoil)
        for _ in range(3):
            assert [s[0] for s in dataset.__getitems__([4, 4, 5])] == [1004, 1004, 1005]

    @pytest.mark.parametrize(
        "targets",
        [
            lambda: [{"boxes": [1]}] * 30,
            lambda: [[[1]]] * 30,
            lambda: np.ones((30, 4)),
            lambda: torch.ones(30, 4),
        ],
        ids=["dicts", "nested lists", "array", "tensor"],
    )
    def test_a_transform_may_write_into_its_target(self, make: Any, targets: Any) -> None:
        def spoil(value: Any, target: Any) -> Any:
            if isinstance(target, dict):
                target["boxes"].append(2)
            elif isinstance(target, list):
                target[0].append(2)
            else:
                target += 1
            return value, str(target)

        dataset = make(targets=targets(), transforms=spoil)
        assert dataset[3][1] == dataset[3][1]

    def test_an_error_in_a_transform_says_where(self, make: Any) -> None:
        def fails(value: Any) -> Any:
            raise RuntimeError("too dark")

        for options in (
            {"transform": fails},
            {"target_transform": fails},
            {"transforms": lambda v, t: fails(v)},
        ):
            with pytest.raises(RuntimeError, match="too dark") as caught:
                # it is not the sample's fault: nothing is skipped
                make(**options, on_error="skip")[-2]
            assert str(caught.value) == "too dark"
            assert any(
                "sample 28" in note and "Squares[28]" in note for note in caught.value.__notes__
            )

    def test_source_of(self, make: Any) -> None:
        assert make().source_of(3) == "Squares[3]" and make().source_of(-1) == "Squares[29]"
        with pytest.raises(IndexError):
            make().source_of(30)


class TestSeeds:
    def by_every_way(self, make: Any, seed: int, epoch: int) -> list[Any]:
        """Sample 5, by all ways to it."""
        found: list[Any] = []
        for mode in MODES:
            dataset = make(transform=Draws(), targets=None, loading_mode=mode, seed=seed)
            dataset.set_epoch(epoch)
            if mode == "streaming":
                found += [s for s in dataset if s[0] == 5]
                continue
            found += [
                dataset[5],
                dataset[-25],
                dataset.__getitems__([1, 5, 2])[1],
                dataset.__getitems__([5, 5])[1],
            ]
            found += [dataset.subset([7, 5])[1], dataset[3:8][2], dataset[5]]
            found += [pickle.loads(pickle.dumps(dataset))[5], copy.deepcopy(dataset)[5]]
            found.append(dataset.__getitems__(BatchRequest([0, 5], seed, epoch, step=3))[1])
        return found

    def test_one_sample_has_one_draw_by_all_ways(self, make: Any) -> None:
        found = self.by_every_way(make, seed=3, epoch=2)
        assert len(found) == 31 and len(set(found)) == 1 and found[0][0] == 5
        assert len(set(found[0])) == 7

    def test_draws_differ_by_seed_epoch_index_and_k(self, make: Any) -> None:
        dataset = make(transform=Draws(), targets=None)
        requests = [
            BatchRequest([5, 6], s, e, draws=[k, k]) for s in (0, 1) for e in (0, 1) for k in (0, 1)
        ]
        samples = [s for t in requests for s in dataset.__getitems__(t)]
        assert all(len({s[i] for s in samples}) == 16 for i in range(1, 7))

    def test_global_generators_are_put_back(self, make: Any) -> None:
        dataset, transform = make(transform=Draws(), targets=None), Draws()
        dataset.transform = transform

        def states() -> list[Any]:
            own = [
                transform.own[0].bit_generator.state,
                transform.own[1].getstate(),
                transform.torch["generator"].get_state().tolist(),
            ]
            return [
                random.getstate(),
                np.random.get_state()[1].tolist(),
                torch.get_rng_state().tolist(),
                *own,
            ]

        before = states()
        dataset[3]
        dataset.__getitems__([1, 2])
        assert states() == before

    def test_they_are_put_back_after_an_error_too(self, make: Any) -> None:
        def fails(value: Any) -> Any:
            random.random()
            raise RuntimeError("fails")

        before = random.getstate()
        with pytest.raises(RuntimeError):
            make(transform=fails)[0]
        assert random.getstate() == before

    def test_generators_that_a_dataset_holds_are_seeded(self, make: Any) -> None:
        one, two = make(cls=SelfAugmenting), make(cls=SelfAugmenting)
        assert [one[i] for i in (3, 4, 3)] == [two[i] for i in (3, 4, 3)]
        assert one[3] == one.subset([3])[0] and one[3] != one[4]

    @pytest.mark.parametrize("copied", [lambda d: pickle.loads(pickle.dumps(d)), copy.deepcopy])
    def test_a_dataset_whose_transform_is_its_own_method_travels(
        self, make: Any, copied: Any
    ) -> None:
        dataset = make(cls=SelfAugmenting)
        other = copied(dataset)
        assert other[3] == dataset[3] and other.transform.__self__ is other

    def test_workers_draw_the_same(self, make: Any) -> None:
        dataset = make(transform=Draws(), targets=None, seed=9)
        alone = [dataset[i] for i in range(30)]
        loader = DataLoader(
            dataset, batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context="fork"
        )
        assert [s for batch in loader for s in batch] == alone
        assert [
            s for batch in DataLoader(dataset, batch_size=7, collate_fn=list) for s in batch
        ] == alone


class TestErrors:
    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_raise(self, make: Any, mode: str) -> None:
        for options, message, cause in (
            (
                {"broken": [7]},
                r"sample 7 can't be read: Squares\[7\]: no record 7; fix or remove it, or pass "
                r"on_error=\"skip\"",
                OSError,
            ),
            (
                {"undecodable": 7},
                r"sample 7 can't be decoded: Squares\[7\]: not a square",
                ValueError,
            ),
        ):
            with pytest.raises(SampleError, match=message) as caught:
                make(loading_mode=mode, **options).__getitems__([6, 7, 8])
            assert type(caught.value.__cause__) is cause
            assert type(pickle.loads(pickle.dumps(caught.value))) is SampleError

    def test_an_error_is_one_line(self, make: Any) -> None:
        with pytest.raises(SampleError, match="not a square at all") as caught:
            make(undecodable=7)[7]
        assert "\n" not in str(caught.value)

    def test_of_a_view_names_both_datasets(self, make: Any) -> None:
        with pytest.raises(
            SampleError, match=r"sample 7 of the whole dataset can't be read: Squares\[7\]"
        ):
            make(broken=[7])[5:9][2]

    def test_an_error_holds_nothing_in_a_circle(self, make: Any) -> None:
        dataset = make(broken=[7])
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(SampleError) as caught:
                dataset[7]
            error = weakref.ref(caught.value)
            del caught
            assert error() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_skip(self, make: Any, mode: str) -> None:
        dataset = make(loading_mode=mode, broken=[7, 9], undecodable=4, on_error="skip")
        for _ in range(2):
            dataset.sample_reader.take_report()
            assert [first_of(s) for s in dataset.__getitems__([3, 4, 7, 8])] == [3, 8]
            report = dataset.sample_reader.take_report()
            assert report["skipped"] == 2
            assert [(i, path) for i, path, _ in report["skipped_samples"]] == [
                (4, "Squares[4]"),
                (7, "Squares[7]"),
            ]
            assert (
                "can't be decoded" in report["skipped_samples"][0][2]
                and "no record 7" in report["skipped_samples"][1][2]
            )
        with pytest.raises(
            SampleError, match="none of the 2 samples of a batch can be read; the first: sample 9"
        ):
            dataset.__getitems__([9, 7])
        with pytest.raises(SampleError, match="sample 7"):
            dataset[7]
        assert first_of(dataset[8]) == 8

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_a_callable(self, make: Any, mode: str) -> None:
        asked = []

        def instead(index: int, path: str, error: Exception) -> Any:
            asked.append((index, path, type(error)))
            return np.array([index, 0]), None

        dataset = make(loading_mode=mode, broken=[7], undecodable=4, on_error=instead)
        for _ in range(2):
            asked.clear()
            assert [int(s[0][0]) for s in dataset.__getitems__([4, 5, 7])] == [4, 5, 7]
            assert asked == [(4, "Squares[4]", ValueError), (7, "Squares[7]", OSError)]
        assert first_of(dataset[7]) == 7

    def test_an_error_of_the_callable_comes_through(self, make: Any) -> None:
        def instead(index: int, path: str, error: Exception) -> Any:
            raise LookupError(f"nothing for {index}") from error

        with pytest.raises(LookupError, match="nothing for 7"):
            make(broken=[7], on_error=instead)[7]

    def test_errors_of_a_view_are_counted_by_its_own_indices(self, make: Any) -> None:
        view = make(broken=[7], on_error="skip").subset([8, 7])
        view.__getitems__([0, 1])
        assert [
            (i, path) for i, path, _ in view.sample_reader.take_report()["skipped_samples"]
        ] == [(1, "Squares[7]")]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_under_a_plain_loader(self, make: Any, workers: int) -> None:
        context = "fork" if workers else None
        raising = DataLoader(
            make(broken=[7]), batch_size=5, num_workers=workers, multiprocessing_context=context
        )
        with pytest.raises(SampleError, match="sample 7 can't be read"):
            list(raising)
        del raising
        skipping = DataLoader(
            make(broken=[7], on_error="skip"),
            batch_size=5,
            num_workers=workers,
            multiprocessing_context=context,
        )
        assert [len(targets) for _, targets in skipping] == [5, 4, 5, 5, 5, 5]


class TestLife:
    def test_repr_is_the_call(self) -> None:
        for dataset in (
            SquaresDataset(5),
            SquaresDataset(
                n=7,
                undecodable=3,
                loading_mode="cached",
                cache_size="1MB",
                seed=1,
                return_index=True,
                targets=None,
            ),
            SquaresDataset(
                5,
                loading_mode=LoadingMode.STREAMING,
                max_memory_usage=0.5,
                hold="encoded",
                cache_policy="keep",
            ),
        ):
            again = eval(repr(dataset))
            assert repr(again) == repr(dataset) and type(again) is type(dataset)
            assert again.loading_mode is dataset.loading_mode and len(again) == len(dataset)
            assert f"# {len(dataset)} samples" in repr(dataset)
            again.close()
            dataset.close()

    def test_repr_of_a_view_and_of_secrets(self) -> None:
        class Remote(BaseDataset):
            def __init__(
                self, data_path: Any, *, storage_options: Any = None, **options: Any
            ) -> None:
                super().__init__(Squares(3), **options)

        text = repr(
            Remote(
                ["s3://alice:hunter2@b/k?t=TOKEN", "s3://b/l"],
                storage_options={"secret": "s3cr3t"},
                seed=1,
            )[1:]
        )
        assert text == (
            "Remote(['s3://b/k', 's3://b/l'], storage_options={...}, seed=1).subset(<2 "
            "indices>)  # 2 samples"
        )

    def test_explain(self, make: Any) -> None:
        dataset = make(loading_mode="cached")
        dataset[0]
        assert (
            "30 samples" in dataset.explain()
            and "cached" in dataset.explain()
            and "held 1" in dataset.explain()
        )
        for mode in ("lazy", "streaming", "eager"):
            assert mode in make(loading_mode=mode).explain()

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", MODES)
    def test_close_and_use_again(self, make: Any, mode: str) -> None:
        before = MemoryBudget().reserved
        dataset = make(200, loading_mode=mode)
        for _ in range(2):
            assert sorted(numbers(dataset)) == list(range(200))
            dataset.close()
            dataset.close()
            gc.collect()
            assert MemoryBudget().reserved == before

    @pytest.mark.parametrize("mode", MODES)
    def test_as_a_context(self, mode: str) -> None:
        before = MemoryBudget().reserved
        with SquaresDataset(200, loading_mode=mode) as dataset:
            assert sorted(numbers(dataset)) == list(range(200))
        assert MemoryBudget().reserved == before and dataset._mode is None

    def test_closing_a_view_leaves_the_whole_alone(self, make: Any) -> None:
        dataset = make(loading_mode="eager")
        with dataset[3:5] as view:
            assert numbers(view) == [3, 4]
        assert numbers(dataset) == list(range(30)) and dataset.sample_source.reads.value == 30

    def test_what_nobody_holds_gives_its_memory_back(self) -> None:
        before = MemoryBudget().reserved
        dataset = SquaresDataset(loading_mode="eager")
        view = dataset[3:]
        assert MemoryBudget().reserved > before
        del dataset
        gc.collect()
        assert numbers(view) == list(range(3, 30)) and MemoryBudget().reserved > before
        del view
        gc.collect()
        assert MemoryBudget().reserved == before

    def test_attributes_set_by_a_subclass_after_its_super_call(self) -> None:
        """Eager reads once the outermost constructor is through, so that decode finds all
        attributes.
        """
        assert numbers(SquaresDataset(8, loading_mode="eager")) == list(range(8))

    def test_a_subclass_that_reads_in_its_constructor_fills_once(self, make: Any) -> None:
        assert make(cls=LooksAtOnce, loading_mode="eager").sample_source.reads.value == 30

    @pytest.mark.quick_every(6)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "copied", [lambda d: pickle.loads(pickle.dumps(d)), copy.deepcopy, copy.copy]
    )
    def test_copies(self, make: Any, mode: str, copied: Any) -> None:
        dataset = make(200, loading_mode=mode, transform=Draws())
        dataset.set_epoch(3)
        with copied(dataset) as other:
            assert (
                type(other) is type(dataset)
                and other.epoch == 3
                and other.fingerprint == dataset.fingerprint
            )
            assert sorted(other) == sorted(dataset)
            if copied is not copy.copy:
                other.set_epoch(4)
                assert dataset.epoch == 3

    def test_the_signature_is_the_constructors(self) -> None:
        import inspect

        assert list(inspect.signature(SquaresDataset).parameters) == [
            "n",
            "broken",
            "undecodable",
            "options",
        ]


class TestStreaming:
    def test_is_an_iterable_dataset_exactly_in_that_mode(self, make: Any) -> None:
        for mode in MODES:
            dataset = make(loading_mode=mode)
            assert isinstance(dataset, IterableDataset) is (mode == "streaming")
            assert (
                isinstance(dataset, SquaresDataset) and type(dataset).__name__ == "SquaresDataset"
            )
            assert (
                type(dataset).__module__ == SquaresDataset.__module__
                and type(dataset).__doc__ == SquaresDataset.__doc__
            )
        one, two = make(loading_mode="streaming"), make(loading_mode="STREAMING")
        assert type(one) is type(two)
        assert not issubclass(SquaresDataset, IterableDataset)

    def test_has_no_random_access(self, make: Any) -> None:
        with pytest.raises(TypeError, match=r"streaming.*no random access.*'lazy'"):
            make(loading_mode="streaming")[0]

    def test_an_epoch_is_shuffled_by_seed_and_epoch(self, make: Any) -> None:
        dataset = make(300, loading_mode="streaming", seed=1)
        first = numbers(dataset)
        assert numbers(dataset) == first != list(range(300))
        dataset.set_epoch(1)
        second = numbers(dataset)
        dataset.set_epoch(0)
        assert numbers(dataset) == first != second
        assert numbers(make(300, loading_mode="streaming", seed=2)) != first

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_ranks_share_an_epoch(
        self, make: Any, monkeypatch: pytest.MonkeyPatch, ranks: int
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        parts = []
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            parts.append(numbers(make(200, loading_mode="streaming")))
        counts = Counter(n for part in parts for n in part)
        assert set(counts) == set(range(200)) and len({len(part) for part in parts}) == 1
        assert counts.total() == -(-200 // ranks) * ranks  # padded to a multiple, and no more


def epochs_of(loader: DataLoader[Any], dataset: Any, epochs: Sequence[int]) -> list[list[Any]]:
    found = []
    for epoch in epochs:
        dataset.set_epoch(epoch)
        found.append([sample for batch in loader for sample in batch])
    return found


class TestPlainDataLoader:
    @pytest.mark.quick_every(8)
    # more workers than cores
    @pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("workers", [0, 1, 2, 3])
    def test_each_sample_comes_once(self, make: Any, mode: str, workers: int) -> None:
        dataset = make(200, loading_mode=mode)
        loader = DataLoader(
            dataset,
            batch_size=16,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        for _ in range(2):
            batches = list(loader)
            found = torch.cat([values for values, _ in batches])
            assert sorted(found[:, 0].tolist()) == list(range(200))
            assert (found[:, 1] == found[:, 0] ** 2).all()
            assert (torch.cat([targets for _, targets in batches]) == -found[:, 0]).all()

    @pytest.mark.parametrize("mode", ["lazy", "streaming"])
    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_persistent_workers_see_the_epoch(self, make: Any, mode: str, method: str) -> None:
        dataset = make(200, loading_mode=mode, transform=Draws(), targets=None)
        loader = DataLoader(
            dataset,
            16,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context=method,
            collate_fn=list,
            shuffle=False,
        )
        zero, one, again = epochs_of(loader, dataset, [0, 1, 0])
        assert zero == again and not set(zero) & set(one)
        assert sorted(s[0] for s in zero) == sorted(s[0] for s in one) == list(range(200))
        alone = make(200, loading_mode="lazy", transform=Draws(), targets=None)
        assert sorted(zero) == [alone[i] for i in range(200)]

    def test_shuffled_with_batch_sizes_of_all_kinds(self, make: Any) -> None:
        for size in (1, 7, 30, 100):
            loader = DataLoader(
                make(), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(0)
            )
            assert sorted(torch.cat([t for _, t in loader]).tolist()) == list(range(-29, 1))
        assert [first_of(s) for s in DataLoader(make(), batch_size=None)] == list(range(30))

    def test_inside_a_torch_subset(self, make: Any) -> None:
        loader = DataLoader(Subset(make(), [4, 2, 9]), batch_size=2)
        assert [t.tolist() for _, t in loader] == [[-4, -2], [-9]]


@pytest.mark.parametrize("base", [BaseDataset, ImageDataset])
def test_a_constructor_that_calls_no_base_class(base: Any) -> None:
    class Forgetful(base):  # type: ignore[misc]
        def __init__(self, path: str) -> None:
            self.path = path

    with pytest.raises(
        ConfigError,
        match=r"Forgetful.__init__ does not call that of its base class.*super\(\).__init__",
    ):
        Forgetful("a")


def test_our_own_formats_are_such_datasets() -> None:
    assert issubclass(ImageDataset, BaseDataset) and issubclass(HDF5Dataset, BaseDataset)


class Draw:
    def __call__(self, value: Any) -> Any:
        return random.random()


class TestRepeats:
    """Under a plain DataLoader nobody but the user knows which epoch it is."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_are_warned_of_once(self, make: Any, workers: int) -> None:
        dataset = make(transform=Draw(), targets=None)
        loader = DataLoader(
            dataset, 7, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first = [v for batch in loader for v in batch.tolist()]
        if workers:  # which warn on their own streams
            return
        with pytest.warns(
            HeadraceWarning, match=r"call dataset.set_epoch\(epoch\) before each one"
        ) as caught:
            again = [v for batch in loader for v in batch.tolist()]
            list(loader)
        assert len(caught) == 1 and again == first

    @pytest.mark.parametrize("how", ["named", "not random", "without a transform"])
    def test_need_no_warning(self, make: Any, how: str) -> None:
        dataset = make(
            transform={"named": Draw(), "not random": np.sum, "without a transform": None}[how],
            targets=None,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for epoch in range(3):
                if how == "named":
                    dataset.set_epoch(epoch)
                list(DataLoader(dataset, 7))

    def test_another_thread_is_warned_of(self, make: Any) -> None:
        dataset = make(transform=Draw(), targets=None)
        seen: list[Any] = []

        def load() -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dataset.__getitems__([1, 2])
                seen.extend(str(w.message) for w in caught)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        assert any("thread beside the main one" in text for text in seen)


class Holder:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, value: Any) -> Any:
        return float(self.rng.random())


class EqualHolder(Holder):
    def __eq__(self, other: object) -> bool:
        return type(other) is EqualHolder

    __hash__ = None  # type: ignore[assignment]


class LateHolder:
    rng: Any = None

    def __call__(self, value: Any) -> Any:
        if self.rng is None:
            self.rng = np.random.default_rng()
        return float(self.rng.random())


class TestGenerators:
    def test_of_a_transform_that_is_set_later(self, make: Any) -> None:
        dataset = make(transform=Holder(), targets=None)
        first = [dataset[i] for i in range(5)]
        dataset.transform = Holder()
        assert [dataset[i] for i in range(5)] == first == [dataset[i] for i in range(5)]

    def test_of_a_transform_that_equals_the_one_before(self, make: Any) -> None:
        dataset = make(transform=EqualHolder(), targets=None)
        first = [dataset[i] for i in range(5)]
        dataset.transform = EqualHolder()
        assert [dataset[i] for i in range(5)] == first == [dataset[i] for i in range(5)]

    def test_that_are_made_at_the_first_call(self, make: Any) -> None:
        one, two = (
            make(transform=LateHolder(), targets=None),
            make(transform=LateHolder(), targets=None),
        )
        assert (
            [one[i] for i in range(5)] == [two[i] for i in range(5)] == [one[i] for i in range(5)]
        )
        assert len({one[i] for i in range(5)}) == 5


class TestMachineTrouble:
    @pytest.mark.quick_every(9)
    @pytest.mark.parametrize(
        "kind",
        [
            (MemoryError, "no more"),
            (OSError, errno.EMFILE, "Too many open files"),
            (OSError, errno.ENOSPC, "No space left on device"),
            (RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
        ],
        ids=["memory", "files", "disk", "torch"],
    )
    @pytest.mark.parametrize("on_error", ["raise", "skip"])
    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_is_no_reason_to_leave_a_sample_out(
        self, make: Any, mode: str, on_error: Any, kind: tuple[Any, ...]
    ) -> None:
        with pytest.raises(kind[0], match=kind[-1]) as caught:
            make(loading_mode=mode, on_error=on_error, failing={7: kind[0](*kind[1:])})[7]
        assert not isinstance(caught.value, SampleError)
        assert "may be sound" in caught.value.__notes__[0]


class TestSkippingOneByOne:
    @pytest.mark.quick_every(4)
    @pytest.mark.parametrize("mode", MODES)
    def test_a_loop_leaves_them_out(self, make: Any, mode: str) -> None:
        dataset = make(loading_mode=mode, broken=[7, 9], on_error="skip")
        assert sorted(first_of(s) for s in dataset) == [i for i in range(30) if i not in (7, 9)]
        assert dataset.sample_reader.take_report()["skipped"] == 2

    def test_an_index_is_an_error_with_a_remedy(self, make: Any) -> None:
        with pytest.raises(
            SampleError,
            match=(
                r"none of the 1 samples .* sample 7 can't be read.*; use a larger batch_size, or "
                r"an"
            ),
        ):
            make(broken=[7], on_error="skip")[7]


def test_a_list_of_transforms(photos: Any) -> None:
    dataset = ImageDataset(
        photos, image_size=8, transform=[np.asarray, lambda image: image.mean(axis=2), np.shape]
    )
    assert dataset[3][0] == (8, 8)
    assert ImageDataset(photos, image_size=8, transform=[])[3][0].shape == (3, 8, 8)
    with pytest.raises(
        ConfigError, match="transform must be a callable, or a list of callables, and 5 is none"
    ):
        ImageDataset(photos, image_size=8, transform=[np.asarray, 5])
    rows = MemoryEfficientDataset(list(range(10)), transform=[float, str])
    assert rows[3] == "3.0"
    with pytest.raises(ConfigError, match="'flip' is none"):
        MemoryEfficientDataset(list(range(10)), transform="flip")


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


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_bad_samples_hold_no_memory(
    make: Any, make_loader: Any, traced: None, mode: str, workers: int
) -> None:
    kept: list[Any] = []
    on_error = (
        "skip" if workers else lambda index, path, error: kept.append(error) or (np.array([0]), 0)
    )
    before = tracemalloc.get_traced_memory()[0]
    dataset = make(16, cls=Heavy, loading_mode=mode, on_error=on_error, max_memory_usage="50MB")
    loader = make_loader(
        dataset, batch_size=8, num_workers=workers, persistent_workers=bool(workers), shuffle=False
    )
    for _ in range(10):
        most = max(int(values.max()) for values, _ in loader)
    assert max(most, tracemalloc.get_traced_memory()[0]) - before < 3 << 20
    assert workers or [str(error) for error in kept] == ["half an image"] * 80
