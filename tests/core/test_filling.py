"""A batch by any way is the one that its single samples make; each dataset has its way."""

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
from headrace.core.batcher import Batcher, Collating
from headrace.dtypes import ArraySpec
from headrace.formats.source import RowSource, Source
from headrace.memory.store import HeldRows
from headrace.order import BatchRequest
from headrace.testing.contract import same


class Arrays(Source):
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: Any) -> list[Any]:
        return [np.array(self.array[i]) for i in indices]

    def fingerprint(self) -> str:
        return "arrays"


ROWS = np.random.default_rng(0).integers(0, 99, (20, 4, 4), np.uint8)
ZEROS = np.zeros((20, 4), np.float32)


def held(array: np.ndarray[Any, Any], cls: type[BaseDataset] = BaseDataset, **options: Any) -> Any:
    """A dataset of rows that eager holds."""
    return cls(Arrays(array), **{"loading_mode": "eager", "progress": False, **options})


def way_of(dataset: BaseDataset) -> Batcher:
    return Batcher(dataset, Collating(stack_collate))


def made_slowly(dataset: BaseDataset, indices: list[int]) -> tuple[Any, bool]:
    """A batch, and whether its samples were made one by one."""
    with mock.patch.object(
        Batcher, "of_samples", autospec=True, side_effect=Batcher.of_samples
    ) as slow:
        made = way_of(dataset).make(BatchRequest(indices, 42, 0))
    assert made.samples == len(indices)
    assert not dataset.sample_reader.take_report().get("fallbacks")
    return made.batch, slow.called


def assert_filled(dataset: BaseDataset, indices: list[int], by_filling: bool = True) -> None:
    batch, is_slow = made_slowly(dataset, indices)
    assert is_slow is not by_filling
    assert same(batch, stack_collate([dataset[i] for i in indices]))


class TestFromMemory:
    def test_of_every_dtype(self) -> None:
        for dtype in ("u1", "i1", "<u2", "<u8", "<f2", "<f8", "<c8", "?"):
            rows = (np.random.default_rng(0).random((20, 3, 5)) * 100).astype(dtype)
            for array in (rows, rows[:, 0, 0]):
                with held(array, targets=np.arange(20)) as dataset:
                    assert_filled(dataset, [3, 19, 0, 3])
        with held(ROWS.astype(">i4")) as dataset:
            assert_filled(dataset, [3, 19, 0, 3], by_filling=False)

    def test_of_every_kind_of_targets(self) -> None:
        for mode in ("eager", "cached", "lazy"):
            for targets in (
                None,
                np.arange(60, dtype=np.float32).reshape(20, 3),
                [f"t{i}" for i in range(20)],
                list(range(20)),
                np.arange(20) % 2 == 0,
                *(np.arange(20).astype(kind) for kind in ("int8", "uint16", "uint64", "float64")),
            ):
                with held(ROWS, targets=targets, loading_mode=mode) as dataset:
                    if mode == "cached":
                        assert_filled(dataset, [3, 7], by_filling=False)
                        list(dataset)
                    assert_filled(dataset, [3, 19, 0, 7], by_filling=mode != "lazy")
                    assert_filled(dataset.subset([5, 3, 1]), [2, 0], by_filling=mode != "lazy")

    def test_what_is_given_back_meanwhile_is_read_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = held(np.arange(80).reshape(20, 4), loading_mode="cached")
        list(dataset)
        copy_to = HeldRows.copy_to

        def torn(rows: HeldRows, out: torch.Tensor) -> None:
            dataset.held.store.adjust(1 << 20)
            copy_to(rows, out)

        monkeypatch.setattr(HeldRows, "copy_to", torn)
        batch, is_slow = made_slowly(dataset, [1, 2])
        assert is_slow
        assert batch.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert dataset[1].tolist() == [4, 5, 6, 7]


class Squared(BaseDataset):
    def decode(self, record: Any) -> Any:
        return np.square(record, dtype=np.float32)

    def value_spec(self) -> Any:
        return (4,), np.dtype(np.float32)


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

        for kind in (Presents, Pairs, Assembles):
            assert made_slowly(held(ZEROS, kind), [1, 2])[1], kind
        for options in (
            {"transform": np.negative},
            {"target_transform": repr},
            {"return_index": True},
        ):
            assert made_slowly(held(ZEROS, **options), [1])[1], options

    def test_one_that_says_what_its_values_are(self, make_loader: Callable[..., Any]) -> None:
        rows = np.arange(80, dtype=np.float32).reshape(20, 4)
        dataset = Squared(Arrays(rows), targets=np.arange(20))
        assert_filled(dataset, [3, 19, 0])
        for workers in (0, 2):
            for values, targets in make_loader(dataset, batch_size=8, num_workers=workers):
                assert (values[:, 0] == (4.0 * targets) ** 2).all()

    def test_one_that_says_what_is_not_so(self) -> None:
        class Says(BaseDataset):
            spec: Any = None

            def value_spec(self) -> Any:
                return self.spec

        for shape, dtype in (((4,), "f8"), ((2, 4), "f4"), ((1,), "f4")):
            dataset = Says(Arrays(ZEROS))
            dataset.spec = shape, np.dtype(dtype)
            with pytest.raises(ConfigError, match=r"float32 \[4\] for sample 3"):
                way_of(dataset).make(BatchRequest([3], 42, 0))

    def test_samples_that_are_numbers_or_empty(self) -> None:
        class Halves(BaseDataset):
            def value_spec(self) -> Any:
                return (), np.dtype(np.float64)

            def decode(self, record: Any) -> Any:
                return record / 2

        for mode in ("lazy", "eager"):
            batch, _ = made_slowly(held(np.arange(20.0), Halves, loading_mode=mode), [0, 1, 2])
            assert batch.tolist() == [0, 0.5, 1]
        assert made_slowly(held(np.zeros((20, 0), np.float32)), [3, 1])[0].shape == (2, 0)

    def test_a_transform_that_is_set_later_is_called(self, make_loader: Callable[..., Any]) -> None:
        dataset = held(ZEROS)
        loader = make_loader(dataset, batch_size=5, num_workers=0)
        assert not next(iter(loader)).any()
        dataset.transform = lambda value: value + 1
        assert next(iter(loader)).all()


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_images(photos: Path, mode: str) -> None:
    for options in ({}, {"normalize": False, "hold": "encoded"}, {"color": "L"}):
        images = ImageDataset(photos, image_size=32, loading_mode=mode, progress=False, **options)
        lazy = ImageDataset(photos, image_size=32, **options)  # type: ignore[arg-type]
        wrapped = MemoryEfficientDataset(lazy, loading_mode=mode, progress=False)
        for dataset in (images, wrapped):
            assert_filled(dataset, [3, 19, 0, 3])
            assert_filled(dataset, [*range(24)])
            assert_filled(dataset.subset([5, 3, 1]), [2, 0])
            assert same(dataset[7], lazy[7])
            dataset.close()


class TestFallbacks:
    """A fast way that fails is counted; the slow one makes the batch, and names the sample."""

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
    def test_counted_and_the_batch_is_the_same(self, make_loader: Any) -> None:
        for workers in (0, 1):
            rows = np.arange(80.0).reshape(20, 4)
            source = self.Failing(rows)
            options: dict[str, Any] = {"batch_size": 5, "shuffle": False, "num_workers": workers}
            for is_flaky, count in ((True, 4), (False, 0)):
                source.is_flaky = is_flaky
                loader = make_loader(BaseDataset(source), **options)
                assert np.array_equal(torch.cat(list(loader)), rows)
                assert loader.get_stats()["fallbacks"] == count

    @pytest.mark.falls_back
    def test_the_sample_at_fault_is_named(self, make_loader: Callable[..., Any]) -> None:
        source = self.Failing(np.zeros((20, 4)), bad=7)
        dataset = BaseDataset(source, on_error="skip")
        loader = make_loader(dataset, batch_size=5, shuffle=False, num_workers=0)
        assert [len(batch) for batch in loader] == [5, 4, 5, 5]
        assert loader.get_stats()["skipped_samples"][0]["index"] == 7
        with pytest.raises(SampleError, match=r"sample 7 .*never"):
            way_of(BaseDataset(source)).make(BatchRequest([6, 7]))


def lengths(text: str) -> list[int]:
    return [len(text)]


def test_the_way_is_named(photos: Path, tmp_path: Path, make_loader: Callable[..., Any]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["data"] = ZEROS
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    texts: dict[str, Any] = {"data_path": tmp_path / "a.txt", "unit": "line"}
    for dataset, way in (
        (ImageDataset(photos, image_size=32), "decoded row by row"),
        (ImageDataset(photos, image_size=32, transform=abs), "sample by sample"),
        (
            ImageDataset(photos, image_size=32, loading_mode="cached"),
            "from memory; until all samples of a batch are held, decoded row by row",
        ),
        (HDF5Dataset(tmp_path / "x.h5"), "straight from storage"),
        (TextDataset(**texts), "lines straight from storage, and padded at once"),
        (TextDataset(tokenizer=lengths, **texts), "tokenised together, and padded at once"),
    ):
        assert f"batches: {way}\n" in make_loader(dataset, batch_size=2, num_workers=0).explain()
