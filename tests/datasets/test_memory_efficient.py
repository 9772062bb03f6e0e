"""MemoryEfficientDataset: any dataset keeps headrace's laws once it is wrapped, and stays what
it was.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
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
    BudgetError,
    ConfigError,
    DataNotFoundError,
    HDF5Dataset,
    ImageDataset,
    MemoryBudget,
    MemoryEfficientDataset,
    MemoryMonitor,
    SampleError,
    Source,
    create_dataloader,
    open_dataset,
)
from headrace.datasets.finished import PackedSample
from headrace.memory.anonymous import SharedInt
from headrace.testing import DatasetContract
from headrace.testing.contract import RandomProbe, same
from tests.data.make import make_photos
from tests.testing.test_contract import bad_photos

# Without a loader nobody names the epoch, and here samples are read over and over.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*draw the same numbers in each epoch:headrace.HeadraceWarning"
    ),
    pytest.mark.quick_every(8),
]

MODES = ["lazy", "eager", "cached", "streaming"]
MAP_MODES = MODES[:3]


class Unusual(Dataset[Any]):
    """Values that pickle changes or refuses."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "duration": np.array([index, 7], ">m8[s]"),
            "time": np.array(index, ">M8[ns]"),
            "view": memoryview(np.arange(6, dtype=np.int16).reshape(2, 3) + index),
            "nested": torch.nested.nested_tensor([torch.arange(3), torch.arange(index)]),
            "sparse": torch.eye(3).to_sparse() * index,
        }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.quick_every(3)
def test_unusual_values_arrive_as_they_are(mode: str, num_workers: int) -> None:
    """In each mode, by workers too: byte orders of times, views of memory, nested and sparse
    tensors.
    """

    def shown(sample: dict[str, Any]) -> list[Any]:
        view = sample["view"]
        times = [(sample[name].dtype.str, sample[name].tolist()) for name in ("duration", "time")]
        parts = [part.tolist() for part in sample["nested"].unbind()]
        return [
            *times,
            view.format,
            view.shape,
            view.tolist(),
            parts,
            sample["sparse"].is_sparse,
            sample["sparse"].to_dense().tolist(),
        ]

    dataset = MemoryEfficientDataset(Unusual(), loading_mode=mode, progress=False)
    loader = create_dataloader(
        dataset, batch_size=2, shuffle=False, num_workers=num_workers, collate_fn="list"
    )
    expected = [shown(Unusual()[index]) for index in range(4)]
    for _ in range(2):
        assert [shown(sample) for batch in loader for sample in batch] == expected


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


class Dicts(Arrays):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index)), "name": f"n{index}"}


class Batches(Arrays):
    """Answers batches too."""

    def __init__(self, n: int = 40, bad: Sequence[int] = ()) -> None:
        super().__init__(n, bad)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [super(Batches, self).__getitem__(i) for i in indices]


class Forgetful(Batches):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return (
            super().__getitems__(indices)[1:] if len(indices) > 1 else super().__getitems__(indices)
        )


class Dice(Dataset[Any]):
    """Draws from every generator there is, its own too."""

    def __init__(self, n: int = 40) -> None:
        self.n, self.rng, self.more = (
            n,
            np.random.default_rng(),
            [random.Random(), torch.Generator(), np.random.RandomState()],
        )

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        own = [
            self.rng.random(),
            self.more[0].random(),
            float(torch.rand(1, generator=self.more[1])),
            self.more[2].rand(),
        ]
        return [index, random.random(), float(np.random.rand()), float(torch.rand(1)), *own]


class DiceInBatches(Dice):
    """Draws for a whole batch at once, now and then."""

    def __init__(self, n: int = 40, sides: Sequence[int] | None = None) -> None:
        super().__init__(n)
        self.sides, self.batches = sides, 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.batches += 1
        return [self[i] if self.sides is None or i in self.sides else [i] for i in indices]


class OneGenerator(DiceInBatches):
    """Draws from one generator only."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def __getitem__(self, index: int) -> Any:
        drawn = {
            "random": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(1).item(),
            "Generator": self.rng.random,
            "Random": self.more[0].random,
            "torch.Generator": lambda: torch.rand(1, generator=self.more[1]).item(),
            "RandomState": self.more[2].rand,
        }[self.which]()
        return [index, float(drawn)]


class LateDice(Dice):
    """Makes its generator when it is first read, as one does to have another in each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Any = None

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


class Closable(Arrays):
    closed = 0

    def close(self) -> None:
        self.closed += 1


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class Numbers(Source):
    def __init__(self, n: int = 30) -> None:
        self.n, self.reads = n, SharedInt()

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Sequence[int]) -> list[int]:
        self.reads.value += len(indices)
        return [int(i) for i in indices]

    def blocks(self) -> Any:
        return np.full(self.n // 5, 5)

    def fingerprint(self) -> str:
        return f"numbers {self.n}"


class OwnFormat(BaseDataset):
    """A format of a user's: it decodes, presents, assembles, and holds generators beside its
    transforms.
    """

    fork_safe = False
    collate = "list"

    def __init__(self, n: int = 30, **options: Any) -> None:
        self.rng, self.classes = np.random.default_rng(), ["a", "b"]
        super().__init__(Numbers(n), targets=np.arange(n) % 2, **options)

    def decode(self, record: int) -> Any:
        return np.array([record, record**2])

    def to_input(self, value: Any) -> Any:
        return torch.from_numpy(value)

    def make_sample(self, value: Any, target: Any) -> Any:
        return {"value": value, "target": target}

    def held_nbytes(self) -> int:
        return 16 * len(self.sample_source)

    def sample_nbytes(self) -> int:
        return 24


class Pairs(OwnFormat):
    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        return value, f"target {index} of {int(value[0])}"


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


class Spoils:
    """A transform that writes into its input."""

    def __call__(self, value: Any) -> Any:
        before = copy.deepcopy(value)
        value *= 0
        return before


def negative(target: int) -> int:
    return -target


def noisy(x: Any, y: Any) -> tuple[Any, Any]:
    return x + random.random(), y


def first(sample: Any) -> Any:
    return sample[0]


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


def tensors_of_all_kinds() -> list[torch.Tensor]:
    wide, complex_ = torch.arange(10_000.0).reshape(100, 100), torch.tensor([1 + 2j, 3.0])
    return [
        *(
            torch.arange(4).to(d)
            for d in (
                torch.uint8,
                torch.int64,
                torch.float16,
                torch.bfloat16,
                torch.float64,
                torch.bool,
            )
        ),
        *(
            torch.tensor(3.5),
            torch.empty(0, 3),
            torch.empty(2, 0, dtype=torch.int32),
            torch.tensor([-0.0, float("nan")]),
        ),
        *(wide, wide.T, wide[3, ::7], wide[3, ::99][:1], wide[:1].expand(5, 100)),
        *(complex_, complex_.conj(), complex_.conj().imag, complex_[:1].conj().imag),
        *(
            torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True),
            torch.nn.Parameter(torch.ones(3)),
        ),
    ]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a dense tensor whose strides are what they look like."""
    return (
        tensor.detach()
        .to_dense()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
    )


def arrays_of_all_kinds() -> list[Any]:
    return [
        *(
            np.float32(2.5),
            np.arange(5),
            np.zeros((0, 3)),
            np.array(1.0),
            np.arange(5000.0),
            np.arange(5000, dtype=">i4"),
        ),
        *(
            np.asfortranarray(np.ones((3, 4))),
            np.asfortranarray(np.ones((30, 40))),
            np.ones((40, 60))[:, ::2],
        ),
        *(
            np.array(["a", "bcd"]),
            np.array([None, 1], object),
            np.datetime64("2020-01-01"),
            np.zeros(2, [("a", "i4"), ("b", "f8")]),
        ),
    ]


def things_of_all_kinds() -> list[Any]:
    wide = torch.arange(10_000.0).reshape(100, 100)
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    nested = {"a": [wide, (1, {"b": np.arange(300.0)})], 3: None}
    return [
        nested,
        Pair(wide[0], b"bytes"),
        Boxed(wide[1]),
        [wide, wide],
        image,
        "text",
        b"bytes",
        10**30,
        1.5,
        True,
        None,
    ]


def samples_of(dataset: Any) -> list[Any]:
    """All samples, by index."""
    if not isinstance(dataset, IterableDataset):
        return [dataset[i] for i in range(len(dataset))]
    return dataset.__getitems__(list(range(len(dataset))))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.random.default_rng(1).random((24, 7)), np.arange(24) * 2
    return path


# --- the laws -------------------------------------------------------------------------------------


@pytest.mark.slow
class TestPathContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, photos: Path) -> None:
        self.path = photos

    def make(self, **options: Any) -> BaseDataset:
        return MemoryEfficientDataset(
            self.path, image_size=(24, 32), transform_input="numpy", **options
        )

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        return MemoryEfficientDataset(
            bad_photos(self.path.parent / "bad-photos-wrapped"), image_size=32, **options
        ), [2, 13]


@pytest.mark.slow
class TestForeignContract(DatasetContract):
    def make(self, **options: Any) -> BaseDataset:
        return MemoryEfficientDataset(Arrays(42), **options)

    def make_bad(self, **options: Any) -> tuple[BaseDataset, list[int]]:
        return MemoryEfficientDataset(Arrays(42, bad=[7, 30]), **options), [7, 30]


# --- a path ---------------------------------------------------------------------------------------


@pytest.mark.slow
class TestPath:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "options",
        [{}, {"image_size": (20, 30)}, {"image_size": 16, "hold": "encoded", "normalize": False}],
    )
    def test_samples_are_those_of_open_dataset(
        self, make: Any, tiny_photos: Path, mode: str, options: dict[str, Any]
    ) -> None:
        photos = tiny_photos
        for transform in ({}, {"transform": RandomProbe()}, {"target_transform": negative}):
            with open_dataset(
                photos, loading_mode=mode, progress=False, seed=3, **options, **transform
            ) as plain:
                dataset = make(photos, loading_mode=mode, seed=3, **options, **transform)
                for epoch in (0, 1):
                    plain.set_epoch(epoch)
                    dataset.set_epoch(epoch)
                    assert same(samples_of(dataset), samples_of(plain))

    def test_it_holds_what_the_format_would_hold(self, make: Any, photos: Path) -> None:
        for options in (
            {},
            {"transform": RandomProbe()},
            {"image_size": 16},
            {"image_size": 16, "hold": "encoded"},
        ):
            with open_dataset(photos, loading_mode="cached", **options) as plain:
                dataset = make(photos, **options)
                assert (
                    dataset.holds_encoded is plain.holds_encoded
                    and dataset.held_nbytes() == plain.held_nbytes()
                )
                assert dataset.sample_nbytes() == plain.sample_nbytes()
                assert dataset[3] is not None and plain[3] is not None
                held, wanted = dataset.mode.get([3])[0], plain.mode.get([3])[0]
                assert same(held, wanted)

    @pytest.mark.parametrize("mode", MODES)
    def test_rows_of_hdf5(self, make: Any, rows: Path, mode: str) -> None:
        dataset = make(str(rows), loading_mode=mode, dataset_name="x", target_name="y")
        assert same(samples_of(dataset), samples_of(HDF5Dataset(rows, "x", target_name="y")))
        assert (
            dataset.targets.tolist() == list(range(0, 48, 2))
            and dataset.fingerprint == HDF5Dataset(rows, "x", target_name="y").fingerprint
        )
        assert dataset.blocks() is None or dataset.blocks().sum() == 24

    def test_paths_of_all_kinds(self, make: Any, photos: Path) -> None:
        folders = sorted(p for p in photos.iterdir() if p.is_dir())
        with open_dataset(folders, targets=None) as plain:
            assert same(samples_of(make(folders, targets=None)), samples_of(plain))
        assert len(make(tuple(folders), targets=None)) == 24
        assert (
            len(make(f"{photos}/*/*"))
            == len(make(f"file://{photos}"))
            == len(make(data_path=photos))
            == 24
        )

    def test_it_stands_for_the_format(self, make: Any, photos: Path) -> None:
        dataset, plain = make(photos), ImageDataset(photos)
        assert dataset.classes == plain.classes and dataset.class_to_idx == plain.class_to_idx
        assert (
            dataset.targets.tolist() == plain.targets.tolist()
            and dataset.fingerprint == plain.fingerprint
        )
        assert dataset.source_of(5) == plain.source_of(5) and dataset.loading_mode == "cached"
        assert dataset.held_as() == plain.held_as()

    def test_targets_may_be_replaced(self, make: Any, photos: Path) -> None:
        dataset = make(photos)
        dataset.targets = np.arange(24) + 100
        assert dataset[7][1] == 107 and dataset[5:][2][1] == 107

    def test_a_state_fits_the_format(self, photos: Path) -> None:
        with closing(
            create_dataloader(MemoryEfficientDataset(photos), batch_size=4, num_workers=0)
        ) as loader:
            iterator = iter(loader)
            next(iterator)
            state = loader.state_dict()
            wanted = next(iterator)
            del iterator
        with closing(create_dataloader(ImageDataset(photos), batch_size=4, num_workers=0)) as other:
            other.load_state_dict(state)
            assert same(next(iter(other)), wanted)

    def test_what_can_not_be_opened(self, tmp_path: Path, photos: Path) -> None:
        with pytest.raises(DataNotFoundError, match="nowhere"):
            MemoryEfficientDataset(tmp_path / "nowhere")
        with pytest.raises(DataNotFoundError, match="empty"):
            MemoryEfficientDataset([])
        with pytest.raises(ConfigError, match="image_sise"):
            MemoryEfficientDataset(photos, image_sise=3)
        with pytest.raises(ConfigError, match="transforms"):
            MemoryEfficientDataset(photos, transform=first, transforms=noisy)
        with pytest.raises(ConfigError, match="cache_policy"):
            MemoryEfficientDataset(photos, cache_policy="none")

    def test_the_budget_counts(self, photos: Path) -> None:
        gc.collect()  # a budget is the process's
        with pytest.raises(BudgetError, match="eager"):
            MemoryEfficientDataset(
                photos, max_memory_usage="100kB", loading_mode="eager", progress=False
            )
        with MemoryEfficientDataset(photos, max_memory_usage="3MB", image_size=64) as dataset:
            samples_of(dataset)
            stats = dataset.mode.stats()
            assert 0 < stats["held_bytes"] <= 3_000_000 and dataset.budget.limit == 3_000_000


# --- a dataset of headrace's ----------------------------------------------------------------------


@pytest.mark.slow
class TestOfHeadraces:
    @pytest.mark.parametrize("mode", MODES)
    def test_samples_are_its_own(self, make: Any, mode: str) -> None:
        inner = OwnFormat(transform=RandomProbe(), seed=9, return_index=True)
        dataset = make(inner, loading_mode=mode)
        assert same(samples_of(dataset), samples_of(inner)) and [
            s["index"] for s in samples_of(dataset)
        ] == list(range(30))

    @pytest.mark.parametrize("mode", MODES)
    def test_generators_that_it_holds_draw_the_same(self, make: Any, mode: str) -> None:
        class Augmenting(OwnFormat):
            def __init__(self, **options: Any) -> None:
                self.first, self.second = np.random.default_rng(), random.Random()
                super().__init__(transform=self.augment, **options)

            def augment(self, value: Any) -> Any:
                return (
                    float(value[0]),
                    self.second.random(),
                    self.first.random(),
                    self.rng.random(),
                    random.random(),
                )

        inner = Augmenting()
        for wrapped in (inner, inner[4:20]):
            assert samples_of(make(wrapped, loading_mode=mode)) == samples_of(wrapped)

    def test_transforms_given_here(self, make: Any, photos: Path) -> None:
        inner = ImageDataset(photos, image_size=16)
        dataset = make(inner, transform=RandomProbe(), target_transform=negative)
        sample, target = dataset[23]
        assert same(sample["value"], inner[23][0]) and target == -inner[23][1]
        assert (
            inner.sample_nbytes()
            and dataset.sample_nbytes() is None
            and make(inner).sample_nbytes() == inner.sample_nbytes()
        )
        assert inner.transform is None and torch.is_tensor(inner[0][0])

    @pytest.mark.parametrize("name", ["transform", "target_transform", "transforms"])
    def test_transforms_in_both_places(self, name: str) -> None:
        for own in ({"transform": first}, {"transforms": noisy}, {"target_transform": negative}):
            with pytest.raises(
                ConfigError, match=rf"^{name}: the OwnFormat has transforms already"
            ):
                MemoryEfficientDataset(OwnFormat(**own), **{name: first})

    @pytest.mark.parametrize("mode", MODES[1:])
    def test_its_samples_are_not_held_twice(self, mode: str) -> None:
        with (
            OwnFormat(loading_mode=mode, progress=False) as inner,
            pytest.raises(ConfigError, match=rf"'{mode}'.*second time.*'lazy'"),
        ):
            MemoryEfficientDataset(inner)

    def test_what_it_brings_along(self, make: Any) -> None:
        own = {"seed": 5, "on_error": "skip", "return_index": True, "hold": "encoded"}
        dataset = make(OwnFormat(**own))
        assert (dataset.seed, dataset.on_error, dataset.return_index, dataset.holds_encoded) == (
            5,
            "skip",
            True,
            True,
        )
        inner = OwnFormat(**own)
        dataset = make(inner, seed=6, on_error="raise", return_index=False, hold="decoded")
        assert (dataset.seed, dataset.on_error, dataset.return_index, dataset.holds_encoded) == (
            6,
            "raise",
            False,
            False,
        )
        dataset[2]
        assert same(dataset.mode.get([2])[0], np.array([2, 4])) and inner.holds_encoded
        assert (
            dataset.fork_safe is False
            and dataset.collate == "list"
            and dataset.classes == ["a", "b"]
        )
        assert not hasattr(dataset, "class_to_idx")

    @pytest.mark.parametrize("mode", MODES)
    def test_a_view(self, make: Any, mode: str) -> None:
        inner = OwnFormat(transform=RandomProbe(), return_index=True)
        view = inner.subset([9, 3, 3, 28, 7, 1])[:5]
        reads = inner.sample_source.reads
        wanted = samples_of(view)
        before = reads.value
        dataset = make(view, loading_mode=mode)
        assert same(samples_of(dataset), wanted) and len(dataset) == 5
        assert reads.value - before == 5  # of the view, and not of the whole
        # of all samples of the whole
        assert inner.held_nbytes() == 480 and dataset.held_nbytes() is None
        assert (
            dataset.fingerprint == view.fingerprint
            and dataset.source_of(3) == view.source_of(3) == "Numbers[28]"
        )
        assert (
            list(dataset.targets) == list(view.targets)
            and dataset.blocks().tolist() == view.blocks().tolist()
        )
        assert same(samples_of(dataset.subset([4, 1])), samples_of(view.subset([4, 1])))

    def test_a_view_names_what_can_not_be_read(self, make: Any, tmp_path: Path) -> None:
        files = sorted(
            p
            for p in make_photos(tmp_path / "p", classes=("noise",), per_class=4).rglob("*")
            if p.is_file()
        )
        files[2].write_bytes(b"no image")
        dataset = make(ImageDataset(tmp_path / "p")[1:])
        with pytest.raises(SampleError, match=rf"sample 1 can't be decoded: {files[2]}"):
            dataset[1]
        skipping = make(ImageDataset(tmp_path / "p", on_error="skip")[1:])
        assert (
            len(skipping.__getitems__([0, 1, 2])) == 2
            and skipping.sample_reader.take_report()["skipped"] == 1
        )

    @pytest.mark.parametrize("mode", MODES)
    def test_pairs_of_its_own(self, make: Any, mode: str) -> None:
        inner = Pairs()[5:]
        dataset = make(inner, loading_mode=mode)
        assert same(samples_of(dataset), samples_of(inner))
        assert [s["target"] for s in samples_of(dataset[2:4])] == ["target 2 of 7", "target 3 of 8"]

    def test_one_of_these_again(self, make: Any) -> None:
        inner = make(Dice(), loading_mode="lazy", transform=RandomProbe())
        assert same(samples_of(make(inner)), samples_of(inner))
        assert (
            samples_of(make(make(Arrays(), loading_mode="lazy"), target_transform=negative))[5][1]
            == -2
        )


# --- a foreign dataset ----------------------------------------------------------------------------


class TestForeign:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("foreign", [Arrays, Dicts, Batches, Forgetful])
    def test_samples_are_its_own(self, make: Any, mode: str, foreign: Any) -> None:
        wanted = (
            [Arrays.__getitem__(foreign(), i) for i in range(40)]
            if foreign is not Dicts
            else [Dicts()[i] for i in range(40)]
        )
        dataset = make(foreign(), loading_mode=mode)
        for _ in range(2):
            assert same(samples_of(dataset), wanted)
        assert same(dataset.__getitems__([3, 3, 1]), [wanted[3], wanted[3], wanted[1]])

    @pytest.mark.parametrize(("mode", "reads"), [("eager", 40), ("cached", 40), ("lazy", 80)])
    def test_it_is_held(self, make: Any, mode: str, reads: int) -> None:
        foreign = Arrays()
        dataset = make(foreign, loading_mode=mode)
        for _ in range(2):
            samples_of(dataset)
        assert foreign.reads.value == reads and not dataset.sample_source.thread_safe

    def test_tuples_of_two(self, make: Any) -> None:
        dataset = make(Arrays(), transform=np.sum, target_transform=negative)
        assert dataset[7] == (57.0, -1)
        assert make(Arrays(), return_index=True)[7][1:] == (1, 7)
        joint = make(Arrays(), transforms=noisy)
        assert joint[7][1] == 1 and 7 < joint[7][0][0, 0] < 8 and same(joint[7], joint[7])

    def test_other_samples_are_inputs_as_a_whole(self, make: Any) -> None:
        samples = [{"a": 1}, [1, 2], (1, 2, 3), (1,), (), Pair(1, 2), 5, "text", None, (1, None)]
        dataset = make(Anything(*samples), transform=lambda v: ("seen", v))
        assert [s for i, s in enumerate(dataset) if i < 9] == [("seen", s) for s in samples[:9]]
        assert dataset[9] == (("seen", 1), None)

    @pytest.mark.parametrize("option", [{"target_transform": negative}, {"transforms": noisy}])
    def test_a_target_that_is_not_there(self, make: Any, option: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="sample 3 is no tuple of two"):
            make(Dicts(), **option)[3]

    @pytest.mark.parametrize("mode", MODES)
    def test_everything_comes_back_as_it_was(self, make: Any, mode: str) -> None:
        samples = [*tensors_of_all_kinds(), *arrays_of_all_kinds(), *things_of_all_kinds()]
        dataset = make(Anything(*samples), loading_mode=mode)
        for _ in range(2):
            for wanted, found in zip(samples, samples_of(dataset), strict=True):
                if isinstance(wanted, torch.Tensor):
                    assert (
                        wanted.layout == found.layout
                        and wanted.requires_grad == found.requires_grad
                    )
                    assert type(found) is type(wanted)
                    wanted, found = (plain(t) for t in (wanted, found))
                elif isinstance(wanted, Boxed):
                    assert type(found) is Boxed
                    wanted, found = wanted.x, found.x
                elif isinstance(wanted, Image.Image):
                    wanted, found = np.asarray(wanted), np.asarray(found)
                elif isinstance(wanted, np.ndarray) and wanted.dtype == object:
                    wanted, found = wanted.tolist(), found.tolist()
                assert type(found) is type(wanted) and same(wanted, found), wanted

    def test_a_tensor_that_stands_twice_in_a_sample_is_one(self) -> None:
        one = torch.ones(200)
        first, second = PackedSample.of([one, one]).open()
        assert first is second

    @pytest.mark.parametrize("mode", MODES)
    def test_transforms_may_write(self, make: Any, mode: str) -> None:
        tensors = TensorDataset(torch.arange(1.0, 31).reshape(10, 3), torch.arange(10))
        arrays = Anything(*(np.full(n, 1.0) for n in (3, 10_000)))
        for foreign, options in (
            (tensors, {"transform": Spoils(), "target_transform": Spoils()}),
            (arrays, {"transform": Spoils()}),
        ):
            dataset = make(foreign, loading_mode=mode, **options)
            for _ in range(3):
                assert same(samples_of(dataset), [foreign[i] for i in range(len(foreign))])
        assert tensors.tensors[0][0, 0] == 1 and arrays.samples[1][0] == 1

    def test_a_sample_is_a_copy_at_once(self, make: Any) -> None:
        """A dataset may use its buffer again for the next sample."""

        class Reusing(Arrays):
            buffer = np.zeros(4)

            def __getitem__(self, index: int) -> Any:
                self.buffer[:] = index
                return self.buffer

        for mode in MODES:
            assert [s.tolist() for s in samples_of(make(Reusing(), loading_mode=mode))] == [
                [i] * 4 for i in range(40)
            ]

    def test_a_view_of_a_tensor_takes_its_own_bytes_only(self, make: Any) -> None:
        tensors = TensorDataset(torch.zeros(1000, 256), torch.zeros(1000))
        assert PackedSample.of(tensors[5]).nbytes < 2000
        dataset = make(tensors)
        samples_of(dataset)
        stats = dataset.mode.stats()
        assert stats["held"] == 1000 and 1_024_000 < stats["held_bytes"] < 2_000_000
        assert 1_024_000 < dataset.sample_reader.take_report()["bytes_read"] < 2_000_000

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_what_can_not_be_pickled_is_named(self, make: Any, mode: str) -> None:
        foreign = Anything(*[torch.ones(2)] * 3, (torch.ones(2), Local()))
        with pytest.raises(
            SampleError,
            match=r"sample 3 can't be read: Anything\[3\].*tuple of Tensor, Local.*stays here",
        ) as caught:
            make(foreign, loading_mode=mode)[3]
        assert (
            type(caught.value.__cause__) is TypeError
            and type(caught.value.__cause__.__cause__) is ValueError
        )
        with pytest.raises(MemoryError):  # which is no fault of the sample
            PackedSample.of(Exhausted())
        for sample, name in (
            (Local(), "Local"),
            ({"a": Local()}, "dict of Local"),
            (lambda: 0, "function"),
        ):
            with pytest.raises(TypeError, match=f"{name} is not"):
                PackedSample.of(sample)
        skipping = make(foreign, loading_mode=mode, on_error="skip")
        assert len(skipping.__getitems__([2, 3])) == 1

    @pytest.mark.parametrize("mode", MAP_MODES)
    @pytest.mark.parametrize("foreign", [Arrays, Batches])
    def test_its_errors_are_of_samples(self, make: Any, mode: str, foreign: Any) -> None:
        with pytest.raises(
            SampleError, match=rf"sample 7 can't be read: {foreign.__name__}\[7\]: there is no 7"
        ) as caught:
            make(foreign(bad=[7]), loading_mode=mode).__getitems__([6, 7])
        assert type(caught.value.__cause__) is OSError
        skipping = make(foreign(bad=[7]), loading_mode=mode, on_error="skip")
        assert (
            len(skipping.__getitems__([6, 7, 8])) == 2
            and skipping.sample_reader.take_report()["skipped"] == 1
        )
        instead = make(
            foreign(bad=[7]),
            loading_mode=mode,
            on_error=lambda i, path, error: (i, path, str(error)),
        )
        assert instead[7] == (7, f"{foreign.__name__}[7]", "there is no 7")

    @pytest.mark.parametrize(
        "data_path",
        [
            None,
            3,
            object(),
            Stream(),
            iter([1]),
            {"a": 1},
            Arrays,
            DataLoader(Arrays()),
            np.array(3),
            {1, 2},
        ],
    )
    def test_what_is_no_dataset(self, data_path: Any) -> None:
        with pytest.raises(ConfigError, match="data_path"):
            MemoryEfficientDataset(data_path)

    def test_options_of_a_format_need_a_path(self) -> None:
        for data in (Arrays(), OwnFormat()):
            with pytest.raises(ConfigError, match="image_size, color: an option for paths"):
                MemoryEfficientDataset(data, image_size=3, color="L")

    def test_lists_and_arrays_are_datasets_too(self, make: Any) -> None:
        assert make([torch.ones(1), torch.zeros(1)])[1] == 0 and make(np.arange(12).reshape(4, 3))[
            2
        ].tolist() == [6, 7, 8]
        assert len(make(Arrays(0))) == 0 and samples_of(make(Arrays(0), loading_mode="eager")) == []

    def test_what_it_says_of_itself(self, make: Any, photos: Path) -> None:
        class Rich(Arrays):
            classes, class_to_idx, targets = ["a"], {"a": 0}, torch.arange(40)

        dataset = make(Rich())
        assert (
            dataset.classes == ["a"]
            and dataset.class_to_idx == {"a": 0}
            and dataset.targets.tolist() == list(range(40))
        )
        # a sample's target is the sample's
        assert dataset[5][1] == 2 and dataset[5:9].targets.tolist() == [5, 6, 7, 8]
        for targets in (None, list(range(39)), "a" * 40, torch.tensor(1), {1: 2}):
            Rich.targets = targets  # type: ignore[assignment]
            assert make(Rich()).targets is None
        inside = Subset(OwnFormat(), [1])
        assert (
            make(inside).fork_safe is False
            and make(ConcatDataset([Arrays(), inside])).fork_safe is False
        )
        assert make(ConcatDataset([Arrays(), Subset(ImageDataset(photos), [1])])).fork_safe is True

    def test_fingerprints(self, make: Any) -> None:
        class Named(Arrays):
            fingerprint = "mine"

        assert make(Named()).fingerprint == "mine" and make(Named())[1:].fingerprint != "mine"
        prints = [
            make(d).fingerprint
            for d in (Arrays(), Arrays(41), Dicts(), Subset(Arrays(), range(40)))
        ]
        assert len(set(prints)) == 4 and all(len(p) == 32 for p in prints)
        assert make(Arrays(bad=[3]), loading_mode="lazy", seed=1).fingerprint == prints[0]
        assert make(Named()).held_as() == make(Named()).held_as() != make(Named(), seed=3).held_as()
        with pytest.raises(ConfigError, match=r"shared='machine'.*Arrays.*fingerprint"):
            make(Arrays(), shared="machine")

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["eager", "cached"])
    def test_shared_by_the_ranks_of_a_machine(
        self, make: Any, tmp_path: Path, photos: Path, mode: str
    ) -> None:
        class Named(Arrays):
            fingerprint = "mine"

        for data in (photos, OwnFormat()[3:], Named()):
            dataset = make(data, loading_mode=mode, shared="machine", cache_dir=tmp_path)
            for _ in range(2):
                assert same(samples_of(dataset), samples_of(make(data, loading_mode="lazy")))


class TestRandomForeign:
    """What a foreign dataset draws depends on (seed, index) alone."""

    @pytest.mark.parametrize(
        "foreign",
        [
            Dice,
            DiceInBatches,
            lambda: DiceInBatches(sides=[5, 17]),
            LateDice,
            lambda: Subset(Dice(), range(40)),
        ],
    )
    def test_one_value(self, make: Any, foreign: Any) -> None:
        expected = samples_of(make(foreign(), loading_mode="lazy", seed=3))
        assert expected[17] != samples_of(make(foreign(), loading_mode="lazy", seed=4))[17]
        drawn = [s[1:] for s in expected if len(s) > 1]
        assert len({tuple(s) for s in drawn}) == len(drawn)
        for mode in MODES:
            dataset = make(foreign(), loading_mode=mode, seed=3)
            for epoch in (0, 1):
                dataset.set_epoch(epoch)
                assert dataset.__getitems__(list(range(39, -1, -1))) == expected[::-1]
                assert dataset.__getitems__([17, 4, 17]) == [
                    expected[17],
                    expected[4],
                    expected[17],
                ]

    @pytest.mark.quick_every(8)
    @pytest.mark.parametrize(
        ("mode", "start"),
        [
            *((mode, "fork") for mode in MODES),
            *(pytest.param(mode, "spawn", marks=pytest.mark.slow) for mode in ("lazy", "cached")),
        ],
    )
    @pytest.mark.parametrize("foreign", [DiceInBatches, LateDice])
    def test_in_workers(self, make: Any, mode: str, start: str, foreign: Any) -> None:
        expected = samples_of(make(foreign(), loading_mode="lazy"))
        dataset = make(foreign(), loading_mode=mode)
        options: dict[str, Any] = {
            "batch_size": 6,
            "num_workers": 2,
            "multiprocessing_context": start,
            "collate_fn": "list",
            "seed": 77,
        }
        with closing(create_dataloader(dataset, **options)) as loader:
            for _ in range(2):
                assert sorted(s for batch in loader for s in batch) == expected

    @pytest.mark.parametrize(
        "which",
        ["random", "numpy", "torch", "Generator", "Random", "torch.Generator", "RandomState"],
    )
    def test_whichever_generator_it_draws_from(self, make: Any, which: str) -> None:
        expected = samples_of(make(OneGenerator(which), loading_mode="lazy"))
        assert make(OneGenerator(which)).__getitems__(list(range(40))) == expected

    def test_reading_leaves_no_trace(self, make: Any) -> None:
        def states() -> list[Any]:
            own = [
                foreign.rng.bit_generator.state,
                foreign.more[0].getstate(),
                foreign.more[1].get_state().tolist(),
            ]
            return [
                random.getstate(),
                np.random.get_state()[1].tolist(),
                torch.get_rng_state().tolist(),
                *own,
            ]

        for foreign in (Dice(), DiceInBatches()):
            before = states()
            make(foreign, loading_mode="eager")
            make(foreign).__getitems__([3, 4])
            assert states() == before

    def test_batches_are_asked_for_while_nothing_is_drawn(self, make: Any) -> None:
        foreign = Batches()
        make(foreign).__getitems__([3, 1, 2])
        make(Subset(foreign, [7, 8, 9])).__getitems__([2, 1])
        assert foreign.calls == [[3, 1, 2], [9, 8]]
        dice = DiceInBatches()
        dataset = make(dice)
        dataset.__getitems__([3, 1, 2])
        assert dice.batches == 4
        dataset.__getitems__([8, 9])
        assert dice.batches == 6  # no second try

    def test_a_torch_subset_answers_batches_if_what_it_is_of_does(self, make: Any) -> None:
        class Counted(Dice):
            reads = 0

            def __getitem__(self, index: int) -> Any:
                self.reads += 1
                return super().__getitem__(index)

        foreign = Counted()
        make(Subset(Subset(foreign, range(40)), range(20))).__getitems__([3, 1, 2])
        assert foreign.reads == 3  # as a batch they would have been read in vain first

    def test_batches_of_which_a_sample_is_lost(self, make: Any) -> None:
        class Loses(Batches):
            def __getitems__(self, indices: list[int]) -> list[Any]:
                return []

        with pytest.raises(
            SampleError, match=r"sample 3 can't be read: .*__getitems__ gave 0 samples for 1"
        ):
            make(Loses())[3]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("workers", [0, 1])
    def test_headraces_datasets_inside_are_in_epoch_0(
        self, make: Any, mode: str, workers: int
    ) -> None:
        inner = OwnFormat(transform=RandomProbe(), seed=1)
        inner.set_epoch(4)
        plain = OwnFormat(transform=RandomProbe(), seed=42)
        dataset = make(Subset(inner, range(30)), loading_mode=mode)
        with closing(
            create_dataloader(dataset, batch_size=5, num_workers=workers, collate_fn="list", seed=7)
        ) as loader:
            loader.set_epoch(3)
            found = {int(s["value"]["value"][0]): s for batch in loader for s in batch}
        assert same([found[i] for i in range(30)], samples_of(plain))

    def test_skipping_inside_becomes_an_error_here(self, make: Any, tmp_path: Path) -> None:
        files = sorted(
            p
            for p in make_photos(tmp_path / "p", classes=("noise",), per_class=4).rglob("*")
            if p.is_file()
        )
        files[2].write_bytes(b"no image")
        dataset = make(Subset(ImageDataset(tmp_path / "p", on_error="skip"), range(4)))
        with pytest.raises(
            SampleError, match=r"sample 2 can't be read: Subset\[2\]: none of the 1 samples"
        ):
            dataset.__getitems__([1, 2])


# --- its life -------------------------------------------------------------------------------------


class TestLife:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "copied", [lambda d: pickle.loads(pickle.dumps(d)), copy.deepcopy, copy.copy]
    )
    def test_copies(self, make: Any, mode: str, copied: Any) -> None:
        for data in (Dice(), OwnFormat(transform=RandomProbe()), OwnFormat()[3:9]):
            dataset = make(data, loading_mode=mode)
            wanted = samples_of(dataset)
            with copied(dataset) as other:
                assert type(other) is type(dataset) and repr(other) == repr(dataset)
                assert same(samples_of(other), wanted)
        assert isinstance(make(Dice(), loading_mode=mode), IterableDataset) is (mode == "streaming")

    def test_a_pickle_holds_no_samples(self, make: Any) -> None:
        dataset = make(TensorDataset(torch.zeros(10, 1000)))
        empty = len(pickle.dumps(dataset))
        samples_of(dataset)
        dataset.memory_monitor.start_monitoring()
        assert len(pickle.dumps(dataset)) < empty + 1000

    @pytest.mark.parametrize("mode", MODES)
    def test_close_gives_back(self, photos: Path, mode: str) -> None:
        gc.collect()
        before = MemoryBudget().reserved
        for data in (photos, ImageDataset(photos), ImageDataset(photos)[2:9], Arrays()):
            dataset = MemoryEfficientDataset(data, loading_mode=mode, progress=False)
            for _ in range(2):
                assert len(samples_of(dataset)) == len(dataset)
                assert (MemoryBudget().reserved > before) is (mode in ("eager", "cached"))
                with dataset[1:3]:
                    pass  # closing a view leaves the whole alone
                assert (MemoryBudget().reserved > before) is (mode in ("eager", "cached"))
                dataset.close()
                dataset.close()
                assert MemoryBudget().reserved == before

    def test_close_closes_what_was_opened_here_alone(self, rows: Path) -> None:
        foreign = Closable()
        with MemoryEfficientDataset(foreign) as dataset:
            dataset[0]
        assert foreign.closed == 0
        given = HDF5Dataset(rows, "x")
        for data, stays_open in ((given, True), (given[3:], True), (rows, False)):
            options = {"dataset_name": "x"} if data is rows else {}
            with MemoryEfficientDataset(data, **options) as dataset:
                dataset[0]
                files = dataset._inner.sample_source._opened.files.descriptors
                assert len(files._open) == 1
            assert (len(files._open) == 1) is stays_open
        given.close()

    def test_views(self, make: Any) -> None:
        foreign = Dice()
        dataset = make(foreign, transform=RandomProbe(), loading_mode="eager")
        one, two = dataset.split(0.5)
        assert len(one) == len(two) == 20
        found = {s["value"][0]: s for s in [*samples_of(one), *samples_of(two)]}
        assert same([found[float(i)] for i in range(40)], samples_of(dataset))

    def test_repr(self, make: Any, photos: Path, rows: Path) -> None:
        for dataset in (
            make(photos, max_memory_usage="1GB", image_size=8, seed=3),
            make(str(rows), loading_mode="lazy", dataset_name="x"),
            make(HDF5Dataset(str(rows), "x"), max_memory_usage=0.5, loading_mode="eager"),
        ):
            from pathlib import PosixPath  # noqa: F401  # which a repr names

            again = eval(repr(dataset))
            assert (
                repr(again) == repr(dataset)
                and len(again) == len(dataset)
                and same(again[2], dataset[2])
            )
            again.close()
        text = (
            "MemoryEfficientDataset(<Arrays of 40 samples>, loading_mode='lazy', "
            "progress=False).subset(<2 indices>)  # 2 samples"
        )
        assert (
            repr(MemoryEfficientDataset(Arrays(), loading_mode="lazy", progress=False)[:2]) == text
        )

    def test_explain(self, make: Any, photos: Path) -> None:
        for data, said in (
            (photos, "it wraps ImageDataset, opened from its path: what it would hold is held"),
            (OwnFormat()[2:], "it wraps a view of OwnFormat: what it would hold is held"),
            (
                Arrays(),
                "it wraps Arrays: its finished samples are held; random transforms belong in "
                "transform= here",
            ),
        ):
            dataset = make(data)
            dataset[0]
            lines = dataset.explain().splitlines()
            assert (
                lines[1] == said
                and lines[0].startswith("MemoryEfficientDataset")
                and "cached" in lines[2]
            )
            assert "held 1" in dataset.explain() and "memory budget" in dataset.explain()

    def test_memory_monitor(self, make: Any) -> None:
        dataset = make(Arrays())
        monitor = dataset.memory_monitor
        assert isinstance(monitor, MemoryMonitor) and dataset.memory_monitor is monitor
        assert monitor.get_memory_stats()["limit_gb"] > 0 and dataset[2:].memory_monitor is monitor

    @pytest.mark.parametrize("mode", MAP_MODES)
    def test_under_a_plain_dataloader(self, make: Any, mode: str) -> None:
        dataset = make(TensorDataset(torch.arange(20.0), torch.arange(20)), loading_mode=mode)
        batches = list(
            DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="fork")
        )
        assert (
            torch.cat([x for x, _ in batches]).tolist()
            == torch.cat([y for _, y in batches]).tolist()
            == list(range(20))
        )

    def test_a_loader_plans_its_buffers_and_workers(self, make: Any) -> None:
        with closing(create_dataloader(make(Arrays()), batch_size=8, num_workers=2)) as loader:
            assert sum(len(y) for _, y in loader) == 40
            assert loader.get_stats()["cache_misses"] == 40
            list(loader)
            assert loader.get_stats()["cache_hits"] == 40
