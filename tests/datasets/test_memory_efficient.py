"""MemoryEfficientDataset: any dataset keeps headrace's laws, and stays what it was."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from headrace import (
    BaseDataset,
    ConfigError,
    DataNotFoundError,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    SampleError,
    open_dataset,
)
from headrace.datasets.memory_efficient import copy_of
from headrace.memory import MemoryBudget
from headrace.memory.anonymous import SharedInt
from headrace.testing import DatasetContract
from headrace.testing.contract import RandomProbe, same
from tests.core.test_base import Squares
from tests.data.make import make_photos

# Without a loader nobody names the epoch, and here samples are read over and over.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*draw the same numbers in each epoch:headrace.HeadraceWarning"
)

MODES = ["lazy", "eager", "cached", "streaming"]
MAP_MODES = MODES[:3]


# --- what is wrapped ------------------------------------------------------------------------------


class Arrays(Dataset[Any]):
    """Sample i is an array of it and a number; some can't be had."""

    def __init__(self, n: int = 40, bad: Sequence[int] = ()) -> None:
        self.n, self.bad = n, set(bad)
        self.reads = SharedInt()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.reads.value += 1
        if index in self.bad:
            raise OSError(f"there is no {index}")
        return np.arange(index, index + 6.0).reshape(2, 3), index % 3


class Batches(Arrays):
    """Answers batches too."""

    def __init__(self, n: int = 40, bad: Sequence[int] = ()) -> None:
        super().__init__(n, bad)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [super(Batches, self).__getitem__(i) for i in indices]


class Forgetful(Batches):
    """Loses the first sample of a batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = super().__getitems__(indices)
        return samples[1:] if len(indices) > 1 else samples


class Dice(Dataset[Any]):
    """Draws from every generator there is, its own too."""

    def __init__(self, n: int = 40) -> None:
        self.n = n
        self.rng = np.random.default_rng()
        self.more: list[Any] = [random.Random(), torch.Generator(), np.random.RandomState()]

    def __len__(self) -> int:
        return self.n

    def draws(self) -> dict[str, Callable[[], float]]:
        """By the name of each generator what draws from it."""
        return {
            "random": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(1).item(),
            "Generator": self.rng.random,
            "Random": self.more[0].random,
            "torch.Generator": lambda: torch.rand(1, generator=self.more[1]).item(),
            "RandomState": self.more[2].rand,
        }

    def __getitem__(self, index: int) -> Any:
        return [index, *(float(draw()) for draw in self.draws().values())]


class DiceInBatches(Dice):
    """Draws for a whole batch at once, for all of its samples or for some."""

    def __init__(self, sides: Sequence[int] | None = None) -> None:
        super().__init__()
        self.sides = sides

    def __getitem__(self, index: int) -> Any:
        if self.sides is not None and index not in self.sides:
            return [index]
        return super().__getitem__(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class LateDice(Dice):
    """Makes its generator when it is first read, as one does to have another in each worker."""

    late: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.late is None:
            self.late = np.random.default_rng()
        return [index, self.late.random()]


class Anything(Dataset[Any]):
    """Gives the samples that it was given."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Named(Arrays):
    fingerprint = "mine"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OwnFormat(BaseDataset):
    """It decodes, presents, assembles, and holds a generator beside its transforms."""

    fork_safe = False
    collate = "list"

    def __init__(self, n: int = 30, **options: Any) -> None:
        self.rng, self.classes = np.random.default_rng(), ["a", "b"]
        super().__init__(Squares(n, (), {}), targets=np.arange(n) % 2, **options)

    def decode(self, record: str) -> Any:
        return np.array([int(record), int(record) ** 2])

    def to_input(self, value: Any) -> Any:
        return torch.from_numpy(value)

    def make_sample(self, value: Any, target: Any) -> Any:
        return {"value": value, "target": target}

    def held_nbytes(self) -> int:
        return 16 * len(self.sample_source)


class Pairs(OwnFormat):
    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        return value, f"target {index} of {int(value[0])}"


class Augmenting(OwnFormat):
    """Its transform is a method that draws from generators that it holds."""

    def __init__(self) -> None:
        self.first, self.second = np.random.default_rng(), random.Random()
        super().__init__(transform=self.augment)

    def augment(self, value: Any) -> Any:
        own = [self.second.random(), self.first.random(), self.rng.random()]
        return [float(value[0]), *own, random.random()]


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Boxed:
    x: Any


class Local:
    """Can't be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("stays here")


class Exhausted:
    def __reduce__(self) -> Any:
        raise MemoryError


def spoiling(value: Any) -> Any:
    """A transform that writes into its input."""
    before = copy.deepcopy(value)
    value *= 0
    return before


def negative(target: int) -> int:
    return -target


def noisy(x: Any, y: Any) -> tuple[Any, Any]:
    return x + random.random(), y


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes datasets, and closes them at the end."""
    made: list[Any] = []

    def maker(*args: Any, **options: Any) -> Any:
        made.append(MemoryEfficientDataset(*args, progress=False, **options))
        return made[-1]

    yield maker
    for dataset in made:
        dataset.close()


def samples_of(dataset: Any) -> list[Any]:
    """All samples, by index."""
    if not isinstance(dataset, IterableDataset):
        return [dataset[i] for i in range(len(dataset))]
    return dataset.__getitems__(list(range(len(dataset))))  # type: ignore[no-any-return]


def damaged_photos(folder: Path) -> Path:
    """Four images, of which the third can't be decoded; returns that one's path."""
    photos = make_photos(folder / "p", classes=("noise",), per_class=4)
    files = sorted(path for path in photos.rglob("*") if path.is_file())
    files[2].write_bytes(b"no image")
    return files[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.random.default_rng(1).random((24, 7))
        file["y"] = np.arange(24) * 2
    return path


# --- the laws -------------------------------------------------------------------------------------


@pytest.mark.slow
class TestForeignContract(DatasetContract):
    def make(self, **options: Any) -> BaseDataset:
        return MemoryEfficientDataset(Arrays(42), **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        return MemoryEfficientDataset(Arrays(42, bad=[7, 30]), **options), [7, 30]


# --- a path ---------------------------------------------------------------------------------------


def test_a_path_is_what_open_dataset_opens(make: Any, tiny_photos: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("lazy", {"transform": RandomProbe()}),
        ("eager", {"image_size": (20, 30), "target_transform": negative}),
        ("cached", {"image_size": 16, "hold": "encoded", "normalize": False}),
        ("cached", {"image_size": 16, "transform": RandomProbe(), "max_memory_usage": "3MB"}),
        ("streaming", {}),
    ]
    for mode, options in cases:
        options = {"loading_mode": mode, "seed": 3, **options}
        dataset = make(tiny_photos, **options)
        with open_dataset(tiny_photos, progress=False, **options) as plain:
            for epoch in (0, 1):
                plain.set_epoch(epoch)
                dataset.set_epoch(epoch)
                assert same(samples_of(dataset), samples_of(plain)), options
            for name in ("classes", "class_to_idx", "fingerprint", "loading_mode", "holds_encoded"):
                assert getattr(dataset, name) == getattr(plain, name), name
            assert dataset.budget.limit == plain.budget.limit
            assert dataset.targets.tolist() == plain.targets.tolist()
            assert dataset.source_of(2) == plain.source_of(2)
            for name in ("held_nbytes", "sample_nbytes", "held_as"):
                assert getattr(dataset, name)() == getattr(plain, name)(), name
            if mode == "cached":
                assert same(dataset.held.get([3]), plain.held.get([3])), "held in another way"


def test_arguments_that_are_refused(tmp_path: Path, tiny_photos: Path) -> None:
    own = OwnFormat(transform=negative)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tiny_photos, {"image_sise": 3}, "image_sise"),
        (tiny_photos, {"transform": negative, "transforms": noisy}, "transforms"),
        (tiny_photos, {"cache_policy": "none"}, "cache_policy"),
        (Arrays(), {"image_size": 3, "color": "L"}, "image_size, color"),
        (OwnFormat(), {"image_size": 3}, "image_size"),
        (Arrays(), {"shared": "machine"}, "fingerprint"),
        (OwnFormat(loading_mode="cached"), {}, "'cached'.*'lazy'"),
        *(
            (own, {name: negative}, name)
            for name in ("transform", "target_transform", "transforms")
        ),
    ]
    nothing = [None, 3, object(), Stream(), iter([1]), {"a": 1}, Arrays, DataLoader(Arrays())]
    cases += [(data, {}, "data_path") for data in (*nothing, np.array(3), {1, 2})]
    for data, options, named in cases:
        with pytest.raises(ConfigError, match=named):
            MemoryEfficientDataset(data, **options)
    for data, named in ((tmp_path / "nowhere", "nowhere"), ([], "empty")):
        with pytest.raises(DataNotFoundError, match=named):
            MemoryEfficientDataset(data)


# --- a dataset of headrace's ----------------------------------------------------------------------


class TestOfHeadraces:
    def test_samples_are_its_own(self, make: Any) -> None:
        inner = OwnFormat(transform=RandomProbe(), seed=9, return_index=True)
        again = make(Dice(), loading_mode="lazy", transform=RandomProbe())
        pairs = Pairs()[5:]
        for mode in MODES:
            for wrapped in (inner, pairs, Augmenting(), Augmenting()[4:20], again):
                assert same(samples_of(make(wrapped, loading_mode=mode)), samples_of(wrapped)), mode
        assert [sample["target"] for sample in make(pairs)[2:4]] == [
            "target 7 of 7",
            "target 8 of 8",
        ]

    def test_transforms_given_here(self, make: Any, tiny_photos: Path) -> None:
        inner = ImageDataset(tiny_photos, image_size=16)
        dataset = make(inner, transform=RandomProbe(), target_transform=negative)
        sample, target = dataset[3]
        assert same(sample["value"], inner[3][0]) and target == -inner[3][1]
        assert dataset.sample_nbytes() is None
        assert make(inner).sample_nbytes() == inner.sample_nbytes() > 0
        assert inner.transform is None and torch.is_tensor(inner[0][0])

    def test_what_it_brings_along(self, make: Any) -> None:
        names = ("seed", "on_error", "return_index", "holds_encoded")
        inner = OwnFormat(seed=5, on_error="skip", return_index=True, hold="encoded")
        dataset = make(inner)
        assert [getattr(dataset, name) for name in names] == [5, "skip", True, True]
        assert dataset.fork_safe is False
        assert dataset.collate == "list" and dataset.classes == ["a", "b"]
        assert not hasattr(dataset, "class_to_idx")
        dataset = make(inner, seed=6, on_error="raise", return_index=False, hold="decoded")
        assert [getattr(dataset, name) for name in names] == [6, "raise", False, False]
        dataset[2]
        assert same(dataset.held.get([2])[0], np.array([2, 4])) and inner.holds_encoded

    def test_a_view(self, make: Any) -> None:
        inner = OwnFormat(transform=RandomProbe(), return_index=True)
        view = inner.subset([9, 3, 3, 28, 7, 1])[:5]
        wanted, reads = samples_of(view), inner.sample_source.reads
        for mode in MODES:
            before = reads.value
            dataset = make(view, loading_mode=mode)
            assert same(samples_of(dataset), wanted)
            assert 4 <= reads.value - before <= 5, "of the view, and not of the whole"
            assert dataset.fingerprint == view.fingerprint
            assert dataset.source_of(3) == view.source_of(3) == "Squares[28]"
            assert list(dataset.targets) == list(view.targets)
            assert dataset.blocks().tolist() == view.blocks().tolist()
            assert same(samples_of(dataset.subset([4, 1])), samples_of(view.subset([4, 1])))

    def test_a_view_names_what_can_not_be_read(self, make: Any, tmp_path: Path) -> None:
        bad = damaged_photos(tmp_path)
        with pytest.raises(SampleError, match=rf"sample 2 of the whole dataset .*{bad}"):
            make(ImageDataset(tmp_path / "p")[1:])[1]
        skipping = make(ImageDataset(tmp_path / "p", on_error="skip")[1:])
        assert len(skipping.__getitems__([0, 1, 2])) == 2
        assert skipping.sample_reader.take_report()["skipped"] == 1


# --- a foreign dataset ----------------------------------------------------------------------------


def tensors_of_all_kinds() -> list[torch.Tensor]:
    wide = torch.arange(10_000.0).reshape(100, 100)
    complex_ = torch.tensor([1 + 2j, 3.0])
    kinds = (torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.bool)
    plain = [torch.arange(4).to(kind) for kind in kinds]
    empty = [torch.tensor(3.5), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int32)]
    views = [wide, wide.T, wide[3, ::7], wide[3, ::99][:1], wide[:1].expand(5, 100)]
    conjugates = [complex_.conj(), complex_.conj().imag, complex_[:1].conj().imag]
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True)
    odd = [torch.tensor([-0.0, float("nan")]), sparse, torch.nn.Parameter(torch.ones(3))]
    return [*plain, *empty, *views, *conjugates, *odd]


def arrays_of_all_kinds() -> list[Any]:
    plain = [np.float32(2.5), np.zeros((0, 3)), np.array(1.0), np.arange(5000, dtype=">i4")]
    columns = [np.asfortranarray(np.ones(shape)) for shape in ((3, 4), (30, 40))]
    texts = [np.array(["a", "bcd"]), np.array([None, 1], object)]
    times = [np.datetime64("2020-01-01"), np.array([7], ">m8[s]"), np.array(7, ">M8[ns]")]
    odd = [np.ones((40, 60))[:, ::2], np.zeros(2, [("a", "i4"), ("b", "f8")])]
    return [*plain, *columns, *texts, *times, *odd]


def things_of_all_kinds() -> list[Any]:
    wide = torch.arange(10_000.0).reshape(100, 100)
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    nested = {"a": [wide, (1, {"b": np.arange(300.0)})], 3: None}
    view = memoryview(np.arange(6, dtype=np.int16).reshape(2, 3))
    ragged = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)])
    plain = ["text", b"bytes", 10**30, 1.5, True, None]
    return [nested, Pair(wide[0], b"bytes"), Boxed(wide[1]), [wide], image, view, ragged, *plain]


def comparable(value: Any) -> Any:
    """What `same` compares, of values that it doesn't."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return [part.tolist() for part in value.unbind()]
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense().resolve_conj().resolve_neg()
        kept = [str(value.layout), value.requires_grad, type(value)]
        return [*kept, dense.clone(memory_format=torch.contiguous_format)]
    if isinstance(value, Boxed):
        return value.x
    if isinstance(value, Image.Image):
        return np.asarray(value)
    if isinstance(value, memoryview):
        return value.format, value.shape, value.tolist()
    if isinstance(value, np.ndarray) and value.dtype == object:
        return value.tolist()
    return value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_everything_comes_back_as_it_was(make: Any, loader_of: Any) -> None:
    samples = [*tensors_of_all_kinds(), *arrays_of_all_kinds(), *things_of_all_kinds()]
    for mode in MODES:
        dataset = make(Anything(*samples), loading_mode=mode)
        loader = loader_of(dataset, shuffle=False, collate_fn="list")
        for _ in range(2):  # the second from memory
            found = [sample for batch in loader for sample in batch]
            for wanted, one in zip(samples, found, strict=True):
                assert type(one) is type(wanted), wanted
                assert same(comparable(one), comparable(wanted)), (mode, wanted)


class TestForeign:
    def test_samples_are_held_and_its_own(self, make: Any) -> None:
        wanted = [Arrays()[i] for i in range(40)]
        for mode, reads in (("eager", 40), ("cached", 40), ("lazy", 80), ("streaming", None)):
            for kind in (Arrays, Batches, Forgetful):
                foreign = kind()
                dataset = make(foreign, loading_mode=mode)
                for _ in range(2):
                    assert same(samples_of(dataset), wanted), (mode, kind)
                if reads is not None and kind is not Forgetful:
                    assert foreign.reads.value == reads, (mode, kind)
                assert same(dataset.__getitems__([3, 3, 1]), [wanted[3], wanted[3], wanted[1]])
        assert not dataset.sample_source.thread_safe

    def test_tuples_of_two_are_input_and_target(self, make: Any) -> None:
        assert make(Arrays(), transform=np.sum, target_transform=negative)[7] == (57.0, -1)
        assert make(Arrays(), return_index=True)[7][1:] == (1, 7)
        joint = make(Arrays(), transforms=noisy)
        assert joint[7][1] == 1 and 7 < joint[7][0][0, 0] < 8 and same(joint[7], joint[7])
        samples = [{"a": 1}, [1, 2], (1, 2, 3), (1,), (), Pair(1, 2), 5, "text", None, (1, None)]
        dataset = make(Anything(*samples), transform=lambda value: ("seen", value))
        assert list(dataset)[:9] == [("seen", sample) for sample in samples[:9]]
        assert dataset[9] == (("seen", 1), None)
        for option in ({"target_transform": negative}, {"transforms": noisy}):
            with pytest.raises(ConfigError, match="sample 3"):
                make(Anything(*samples), **option)[3]

    def test_transforms_may_write(self, make: Any) -> None:
        tensors = TensorDataset(torch.arange(1.0, 31).reshape(10, 3), torch.arange(10))
        arrays = Anything(*(np.full(n, 1.0) for n in (3, 10_000)))
        for mode in MODES:
            both = make(tensors, loading_mode=mode, transform=spoiling, target_transform=spoiling)
            alone = make(arrays, loading_mode=mode, transform=spoiling)
            for _ in range(3):
                assert same(samples_of(both), [tensors[i] for i in range(10)]), mode
                assert same(samples_of(alone), list(arrays.samples)), mode
        assert tensors.tensors[0][0, 0] == 1 and arrays.samples[1][0] == 1

    def test_a_sample_is_a_copy_at_once(self, make: Any) -> None:
        """A dataset may use its buffer again for the next sample."""

        class Reusing(Arrays):
            buffer = np.zeros(4)

            def __getitem__(self, index: int) -> Any:
                self.buffer[:] = index
                return self.buffer

        for mode in MODES:
            samples = samples_of(make(Reusing(), loading_mode=mode))
            assert [sample.tolist() for sample in samples] == [[i] * 4 for i in range(40)], mode

    def test_a_held_sample_has_its_own_bytes_once(self, make: Any) -> None:
        one = torch.ones(200)
        first, second = copy_of([one, one])
        assert first is second
        dataset = make(TensorDataset(torch.zeros(1000, 256), torch.zeros(1000)))
        empty = len(pickle.dumps(dataset))
        samples_of(dataset)
        stats = dataset.held.stats()
        assert stats["held"] == 1000 and 1_024_000 < stats["held_bytes"] < 2_000_000
        assert 1_024_000 < dataset.sample_reader.take_report()["bytes_read"] < 2_000_000
        assert len(pickle.dumps(dataset)) < empty + 1000, "a pickle holds samples"

    def test_what_can_not_be_pickled_is_named(self, make: Any) -> None:
        foreign = Anything(*[torch.ones(2)] * 3, (torch.ones(2), Local()))
        for mode in MAP_MODES:
            with pytest.raises(SampleError, match=r"Anything\[3\].* the tuple \(") as caught:
                make(foreign, loading_mode=mode)[3]
            assert type(caught.value.__cause__.__cause__) is ValueError  # type: ignore[union-attr]
            skipping = make(foreign, loading_mode=mode, on_error="skip")
            assert len(skipping.__getitems__([2, 3])) == 1
        with pytest.raises(MemoryError):  # which is no fault of the sample
            copy_of(Exhausted())
        for sample, name in ((Local(), "Local"), ({"a": Local()}, "the dict .*Local")):
            with pytest.raises(TypeError, match=name):
                copy_of(sample)
        with pytest.raises(TypeError, match="function"):
            copy_of(lambda: 0)

    def test_lists_and_arrays_are_datasets_too(self, make: Any) -> None:
        assert make([torch.ones(1), torch.zeros(1)])[1] == 0
        assert make(np.arange(12).reshape(4, 3))[2].tolist() == [6, 7, 8]
        assert samples_of(make(Arrays(0), loading_mode="eager")) == []

    def test_what_it_says_of_itself(self, make: Any, tiny_photos: Path) -> None:
        class Rich(Arrays):
            classes, class_to_idx, targets = ["a"], {"a": 0}, torch.arange(40)

        dataset = make(Rich())
        assert dataset.classes == ["a"] and dataset.class_to_idx == {"a": 0}
        assert dataset.targets.tolist() == list(range(40))
        assert dataset[5][1] == 2, "a sample's target is the sample's"
        assert dataset[5:9].targets.tolist() == [5, 6, 7, 8]
        for targets in (None, list(range(39)), "a" * 40, torch.tensor(1), {1: 2}):
            Rich.targets = targets  # type: ignore[assignment]
            assert make(Rich()).targets is None, targets
        unsafe = Subset(OwnFormat(), [1])
        assert make(ConcatDataset([Arrays(), unsafe])).fork_safe is False
        safe = Subset(ImageDataset(tiny_photos), [1])
        assert make(ConcatDataset([Arrays(), safe])).fork_safe is True

    def test_fingerprints(self, make: Any) -> None:
        assert make(Named()).fingerprint == "mine" != make(Named())[1:].fingerprint
        different = (Arrays(), Arrays(41), Batches(), Subset(Arrays(), range(40)))
        assert len({make(foreign).fingerprint for foreign in different}) == 4
        alike = make(Arrays(bad=[3]), loading_mode="lazy", seed=1)
        assert alike.fingerprint == make(Arrays()).fingerprint
        assert make(Named()).held_as() == make(Named()).held_as() != make(Named(), seed=3).held_as()


class TestRandomForeign:
    """What a foreign dataset draws depends on (seed, index) alone."""

    def test_one_value(self, make: Any) -> None:
        kinds = [Dice(), DiceInBatches(), DiceInBatches(sides=[5, 17]), LateDice()]
        for foreign in (*kinds, Subset(Dice(), range(40))):
            expected = samples_of(make(foreign, loading_mode="lazy", seed=3))
            assert expected[17] != samples_of(make(foreign, loading_mode="lazy", seed=4))[17]
            drawn = [tuple(sample[1:]) for sample in expected if len(sample) > 1]
            assert len(set(drawn)) == len(drawn)
            for mode in MODES:
                dataset = make(foreign, loading_mode=mode, seed=3)
                for epoch in (0, 1):
                    dataset.set_epoch(epoch)
                    assert dataset.__getitems__(list(range(39, -1, -1))) == expected[::-1]
                    found = dataset.__getitems__([17, 4, 17])
                    assert found == [expected[17], expected[4], expected[17]], mode

    def test_in_workers(self, make: Any, loader_of: Any) -> None:
        expected = samples_of(make(LateDice(), loading_mode="lazy"))
        dataset = make(LateDice(), loading_mode="lazy")
        loader = loader_of(dataset, num_workers=2, collate_fn="list")
        for _ in range(2):
            assert sorted(s for batch in loader for s in batch) == expected

    def test_reading_leaves_no_trace(self, make: Any) -> None:
        for foreign in (Dice(), DiceInBatches()):

            def states(dice: Dice = foreign) -> str:
                shared = [random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()]
                own = [dice.rng.bit_generator.state, dice.more[0].getstate()]
                return str([*shared, *own, dice.more[1].get_state().tolist()])

            before = states()
            make(foreign, loading_mode="eager")
            make(foreign).__getitems__([3, 4])
            assert states() == before

    def test_headraces_datasets_inside_are_in_epoch_0(self, make: Any, loader_of: Any) -> None:
        inner = OwnFormat(transform=RandomProbe(), seed=1)
        inner.set_epoch(4)
        expected = samples_of(OwnFormat(transform=RandomProbe(), seed=42))
        for mode in MODES:
            dataset = make(Subset(inner, range(30)), loading_mode=mode)
            loader = loader_of(dataset, collate_fn="list")
            loader.set_epoch(3)
            found = {int(s["value"]["value"][0]): s for batch in loader for s in batch}
            assert same([found[i] for i in range(30)], expected), mode

    def test_skipping_inside_becomes_an_error_here(self, make: Any, tmp_path: Path) -> None:
        damaged_photos(tmp_path)
        dataset = make(Subset(ImageDataset(tmp_path / "p", on_error="skip"), range(4)))
        with pytest.raises(SampleError, match=r"sample 2 .*Subset\[2\]"):
            dataset.__getitems__([1, 2])


# --- its life -------------------------------------------------------------------------------------


def is_open(path: Path) -> bool:
    return str(path) in {file.path for file in psutil.Process().open_files()}


class TestLife:
    def test_what_it_shows(self, make: Any) -> None:
        dataset = make(Arrays())
        dataset[0]
        assert "held 1" in dataset.explain()
        assert dataset.memory_monitor is dataset[2:].memory_monitor

    def test_close_gives_back(self, tiny_photos: Path) -> None:
        gc.collect()
        before = MemoryBudget().reserved
        for mode in MODES:
            holds = mode in ("eager", "cached")
            for data in (tiny_photos, ImageDataset(tiny_photos)[1:], Arrays()):
                dataset = MemoryEfficientDataset(data, loading_mode=mode, progress=False)
                for _ in range(2):
                    assert len(samples_of(dataset)) == len(dataset)
                    with dataset[1:3]:
                        pass  # closing a view leaves the whole alone
                    assert (MemoryBudget().reserved > before) is holds
                    dataset.close()
                    dataset.close()
                    assert MemoryBudget().reserved == before

    def test_close_closes_what_was_opened_here_alone(self, rows: Path) -> None:
        class Closable(Arrays):
            def close(self) -> None:
                pytest.fail("it is its user's")

        with MemoryEfficientDataset(Closable()) as dataset:
            dataset[0]
        given = HDF5Dataset(rows, "x")
        for data, stays_open in ((given, True), (given[3:], True), (rows, False)):
            options = {"dataset_name": "x"} if data is rows else {}
            with MemoryEfficientDataset(data, **options) as dataset:
                dataset[0]
                assert is_open(rows)
            assert is_open(rows) is stays_open
            given.close()

    def test_close_frees_a_large_view_that_went_to_workers(
        self, rows: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.core.dataset.is_spawning", lambda: True)
        monkeypatch.setattr("headrace.core.dataset.SHARED_FROM", 1)
        with HDF5Dataset(rows, "x") as given:
            dataset = MemoryEfficientDataset(given[3:], loading_mode="eager")
            text = repr(dataset)
            dataset.__getstate__()
            assert repr(dataset) == text
            dataset.close()
            assert dataset.held is None
