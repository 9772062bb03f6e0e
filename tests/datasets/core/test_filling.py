"""A batch by any way is the one that its single samples make, and each dataset has the way that
fits it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch

from headrace import (
    BaseDataset,
    ConfigError,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    SampleError,
    TextDataset,
)
from headrace.collate import stack_collate
from headrace.datasets.core.batch import BatchWay, Collating
from headrace.datasets.core.ways import SampleBySample, choose_way
from headrace.dtypes import ArraySpec
from headrace.order import BatchRequest
from headrace.storage.source import RowSource, Source

pytestmark = pytest.mark.quick_every(4)

DTYPES = [
    "u1",
    "i1",
    "<i2",
    "<u2",
    "<u4",
    "<i4",
    "<i8",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    "<c8",
    "?",
    ">i4",
]
TARGETS = [
    "int64",
    "int8",
    "uint16",
    "float32",
    "float64",
    "bool",
    "rows",
    "list",
    "none",
    "texts",
    "uint64",
]


class Arrays(Source):
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: Any) -> list[Any]:
        return [np.array(self.array[i]) for i in indices]

    def fingerprint(self) -> str:
        return "arrays"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bool((a == b).all())
        )
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def targets_of(kind: str) -> Any:
    if kind == "none":
        return None
    if kind == "rows":
        return np.arange(60, dtype=np.float32).reshape(20, 3)
    if kind == "texts":
        return [f"t{i}" for i in range(20)]
    return (
        list(range(20))
        if kind == "list"
        else (np.arange(20) % 2).astype(kind)
        if kind == "bool"
        else np.arange(20).astype(kind)
    )


def way_of(dataset: BaseDataset) -> BatchWay:
    return choose_way(dataset, Collating(stack_collate))


def made_slowly(dataset: BaseDataset, indices: list[int]) -> tuple[Any, bool]:
    """A batch, and whether its samples were made one by one."""
    with mock.patch.object(
        SampleBySample, "make", autospec=True, side_effect=SampleBySample.make
    ) as slow:
        made = way_of(dataset).make(BatchRequest(indices, 42, 0))
    assert made.samples == len(indices) and not dataset.sample_reader.take_report().get("fallbacks")
    return made.batch, slow.called


def assert_filled(dataset: BaseDataset, indices: list[int], by_filling: bool = True) -> None:
    batch, is_slow = made_slowly(dataset, indices)
    assert is_slow is not by_filling
    assert same(batch, stack_collate([dataset[i] for i in indices]))


class TestFromMemory:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_every_dtype(self, tmp_path: Path, dtype: str) -> None:
        rows = (np.random.default_rng(0).random((20, 3, 5)) * 100).astype(dtype)
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["data"], file["flat"], file["t"] = rows, rows[:, 0, 0], np.arange(20)
        for name in ("data", "flat"):
            dataset = HDF5Dataset(
                tmp_path / "x.h5", name, target_name="t", loading_mode="eager", progress=False
            )
            assert_filled(dataset, [3, 19, 0, 3], by_filling=not dtype.startswith(">"))

    @pytest.mark.parametrize("kind", TARGETS)
    @pytest.mark.parametrize("mode", ["eager", "cached", "lazy"])
    def test_of_every_kind_of_targets(self, kind: str, mode: str) -> None:
        rows = np.random.default_rng(0).integers(0, 99, (20, 4, 4), np.uint8)
        dataset = BaseDataset(
            Arrays(rows), targets=targets_of(kind), loading_mode=mode, progress=False
        )
        if mode == "cached":
            assert_filled(dataset, [3, 7], by_filling=False)
            list(dataset)
        assert_filled(dataset, [3, 19, 0, 7], by_filling=mode != "lazy")
        assert_filled(dataset.subset([5, 3, 1]), [2, 0], by_filling=mode != "lazy")

    def test_accesses_are_counted(self) -> None:
        dataset = BaseDataset(Arrays(np.zeros((20, 4))), loading_mode="eager", progress=False)
        way_of(dataset).make(BatchRequest([1, 2, 3], 42, 0))
        assert (
            dataset.sample_reader.take_report()["cache_hits"] == 3
            and dataset.mode.stats()["hits"] == 3
        )

    def test_what_is_given_back_meanwhile_is_read_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from headrace.memory.rows import Rows

        dataset = BaseDataset(Arrays(np.arange(80).reshape(20, 4)), loading_mode="cached")
        list(dataset)
        copy_to = Rows.copy_to

        def torn(rows: Rows, out: torch.Tensor) -> None:
            dataset.mode._store.release(1 << 20)  # type: ignore[attr-defined]
            copy_to(rows, out)

        monkeypatch.setattr(Rows, "copy_to", torn)
        batch, is_slow = made_slowly(dataset, [1, 2])
        assert is_slow and batch.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert [dataset[i].tolist() for i in (1, 2)] == [[4, 5, 6, 7], [8, 9, 10, 11]]


class TestFormatsOfOnesOwn:
    def test_what_overrides_a_step_is_asked_for_each_sample(self) -> None:
        class Presents(BaseDataset):
            def to_input(self, value: Any) -> Any:
                return value + 1

        class Pairs(BaseDataset):
            def split_target(self, index: int, value: Any) -> Any:
                return value, index

        class Assembles(BaseDataset):
            def make_sample(self, value: Any, target: Any) -> Any:
                return {"value": value}

        rows = np.zeros((20, 4), np.float32)
        for kind in (Presents, Pairs, Assembles):
            assert made_slowly(kind(Arrays(rows), loading_mode="eager", progress=False), [1, 2])[1]
        for options in (
            {"transform": np.negative},
            {"target_transform": repr},
            {"return_index": True},
        ):
            assert made_slowly(
                BaseDataset(Arrays(rows), loading_mode="eager", progress=False, **options), [1]
            )[1]

    def test_one_that_says_what_its_values_are(self, make_loader: Callable[..., Any]) -> None:
        class Squares(BaseDataset):
            def decode(self, record: Any) -> Any:
                return np.square(record, dtype=np.float32)

            def value_spec(self) -> Any:
                return (4,), np.dtype(np.float32)

        dataset = Squares(
            Arrays(np.arange(80, dtype=np.float32).reshape(20, 4)), targets=np.arange(20)
        )
        assert_filled(dataset, [3, 19, 0])
        for workers in (0, 2):
            for values, targets in make_loader(dataset, batch_size=8, num_workers=workers):
                assert (values[:, 0] == (4.0 * targets) ** 2).all()

    @pytest.mark.parametrize(
        "wrong",
        [
            ((4,), np.dtype(np.float64)),
            ((2, 4), np.dtype(np.float32)),
            ((1,), np.dtype(np.float32)),
        ],
        ids=str,
    )
    def test_one_that_says_what_is_not_so(self, wrong: Any) -> None:
        class Says(BaseDataset):
            def value_spec(self) -> Any:
                return wrong

        with pytest.raises(
            ConfigError,
            match=r"decode gives float32 \[4\] for sample 3, and value_spec\(\) says float",
        ):
            way_of(Says(Arrays(np.zeros((20, 4), np.float32)))).make(BatchRequest([3], 42, 0))

    def test_numbers_as_samples(self, make_loader: Callable[..., Any]) -> None:
        class Halves(BaseDataset):
            def value_spec(self) -> Any:
                return (), np.dtype(np.float64)

            def decode(self, record: Any) -> Any:
                return record / 2

        for mode in ("lazy", "eager"):
            dataset = Halves(Arrays(np.arange(20.0)), loading_mode=mode, progress=False)
            assert next(
                iter(make_loader(dataset, batch_size=3, num_workers=0, shuffle=False))
            ).tolist() == [0, 0.5, 1]

    def test_samples_that_are_empty(self, make_loader: Callable[..., Any]) -> None:
        dataset = BaseDataset(
            Arrays(np.zeros((20, 0), np.float32)), loading_mode="eager", progress=False
        )
        assert next(iter(make_loader(dataset, batch_size=8, num_workers=0))).shape == (8, 0)


@pytest.mark.quick_every(12)
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize(
    "options", [{}, {"normalize": False}, {"color": "L"}, {"hold": "encoded"}], ids=str
)
def test_images(
    photos: Path, make_loader: Callable[..., Any], mode: str, options: dict[str, Any]
) -> None:
    dataset = ImageDataset(photos, image_size=32, loading_mode=mode, progress=False, **options)
    for kind in (
        dataset,
        MemoryEfficientDataset(
            ImageDataset(photos, image_size=32, **options), loading_mode=mode, progress=False
        ),
    ):
        assert_filled(kind, [3, 19, 0, 3])
        assert_filled(kind, [*range(24)])
        assert_filled(kind.subset([5, 3, 1]), [2, 0])
        for workers in (0, 2):
            loader = make_loader(kind, batch_size=9, shuffle=False, num_workers=workers)
            images = torch.cat([images for images, _ in loader])
            assert all(torch.equal(images[i], dataset[i][0]) for i in range(24))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_user_may_write_into_a_batch(
    photos: Path, make_loader: Callable[..., Any], workers: int
) -> None:
    dataset = ImageDataset(photos, image_size=32, loading_mode="eager", progress=False)
    wanted = [dataset[i][0].clone() for i in range(24)]
    loader = make_loader(dataset, batch_size=6, shuffle=False, num_workers=workers)
    for _ in range(3):
        for number, (images, targets) in enumerate(loader):
            assert all(torch.equal(images[i], wanted[6 * number + i]) for i in range(6))
            assert targets.tolist() == dataset.targets[6 * number : 6 * number + 6].tolist()
            images.fill_(7)
            targets.fill_(-1)
    assert all(torch.equal(dataset[i][0], wanted[i]) for i in range(24))


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_images_without_targets(photos: Path, make_loader: Any, mode: str) -> None:
    dataset = ImageDataset(photos / "circle", image_size=8, loading_mode=mode)
    for _ in range(2):  # held from the second epoch on
        assert all(
            targets == [None] * len(images)
            for images, targets in make_loader(dataset, batch_size=3, num_workers=0)
        )


class TestFallbacks:
    """A fast way that fails is counted, and the batch is made by the slow one, which names the
    sample at fault.
    """

    class Failing(Arrays, RowSource):
        def __init__(self, array: np.ndarray[Any, Any], bad: int | None = None) -> None:
            super().__init__(array)
            self.bad, self.is_flaky = bad, True

        @property
        def array_spec(self) -> ArraySpec:
            return ArraySpec(self.array.shape[1:], self.array.dtype)

        def read_into(self, indices: Any, rows: Any) -> None:
            if self.is_flaky or self.bad in list(indices):
                raise OSError("not now")
            super().read_into(indices, rows)

        def read(self, indices: Any) -> list[Any]:
            if self.bad in list(indices):
                raise OSError("never")
            return super().read(indices)

    @pytest.mark.falls_back
    @pytest.mark.parametrize("workers", [0, 1])
    def test_counted_and_the_batch_is_the_same(
        self, workers: int, make_loader: Callable[..., Any]
    ) -> None:
        rows = np.arange(80.0).reshape(20, 4)
        source = self.Failing(rows)
        loader = make_loader(BaseDataset(source), batch_size=5, shuffle=False, num_workers=workers)
        assert (
            torch.equal(torch.cat(list(loader)), torch.from_numpy(rows))
            and loader.get_stats()["fallbacks"] == 4
        )
        source.is_flaky = False
        loader = make_loader(BaseDataset(source), batch_size=5, shuffle=False, num_workers=workers)
        assert (
            torch.equal(torch.cat(list(loader)), torch.from_numpy(rows))
            and loader.get_stats()["fallbacks"] == 0
        )

    @pytest.mark.falls_back
    def test_the_sample_at_fault_is_named(self, make_loader: Callable[..., Any]) -> None:
        dataset = BaseDataset(self.Failing(np.zeros((20, 4)), bad=7), on_error="skip")
        loader = make_loader(dataset, batch_size=5, shuffle=False, num_workers=0)
        assert [len(batch) for batch in loader] == [5, 4, 5, 5] and loader.get_stats()[
            "skipped_samples"
        ][0]["index"] == 7
        with pytest.raises(SampleError, match=r"sample 7 can't be read: .*never"):
            way_of(BaseDataset(self.Failing(np.zeros((20, 4)), bad=7))).make(BatchRequest([6, 7]))


def len_of(text: str) -> list[int]:
    return [len(text)]


def test_the_way_is_named(photos: Path, tmp_path: Path, make_loader: Callable[..., Any]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["data"] = np.zeros((20, 4), np.float32)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    for dataset, way in [
        (ImageDataset(photos, image_size=32), "decoded row by row"),
        (ImageDataset(photos, image_size=32, transform=abs), "sample by sample"),
        (
            ImageDataset(photos, image_size=32, loading_mode="cached"),
            "from memory; until all samples of a batch are held, decoded row by row",
        ),
        (HDF5Dataset(tmp_path / "x.h5"), "straight from storage"),
        (
            TextDataset(tmp_path / "a.txt", unit="line"),
            "lines straight from storage, and padded at once",
        ),
        (
            TextDataset(tmp_path / "a.txt", tokenizer=len_of, unit="line"),
            "tokenised together, and padded at once",
        ),
    ]:
        assert f"batches: {way}\n" in make_loader(dataset, batch_size=2, num_workers=0).explain()


def test_a_transform_that_is_set_later_is_called(make_loader: Callable[..., Any]) -> None:
    dataset = BaseDataset(Arrays(np.zeros((20, 4))), loading_mode="eager", progress=False)
    loader = make_loader(dataset, batch_size=5, num_workers=0)
    assert not next(iter(loader)).any()
    dataset.transform = lambda value: value + 1
    assert next(iter(loader)).all()
