"""Packing of datasets of the user's own: what their steps give comes out of the file, bit for
bit.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from headrace import (
    BaseDataset,
    HDF5Dataset,
    MemoryEfficientDataset,
    Source,
    ZarrDataset,
    pack,
    verify,
)
from headrace.errors import ConfigError, FormatError, HeadraceWarning, SampleError
from headrace.packing.options import StoreOptions
from headrace.packing.run import pack_dataset
from headrace.storage.hdf5.packed import packed_info

RNG = np.random.default_rng(0)
ROWS = RNG.random((40, 3, 2)).astype(np.float32)


class Records(Source):
    """Records of any kind, in memory."""

    def __init__(self, records: Sequence[Any], thread_safe: bool = True) -> None:
        self.records, self.thread_safe = records, thread_safe

    def __len__(self) -> int:
        return len(self.records)

    def read(self, indices: Sequence[int]) -> list[Any]:
        records = [self.records[index] for index in indices]
        if any(isinstance(record, str) and record == "broken" for record in records):
            raise ValueError("a broken record")
        return records

    def fingerprint(self) -> str:
        return f"records-{len(self)}"


class Decoded(BaseDataset):
    """The bytes of a row to the row."""

    def decode(self, record: bytes) -> Any:
        return np.frombuffer(record, np.float32).reshape(3, 2)


class Split(Decoded):
    """A target that the value holds."""

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        return value, int(value.sum() > 3)


class Samples(Dataset[Any]):
    """A map-style dataset that is not headrace's."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def records_of(rows: Any = ROWS) -> Records:
    return Records([row.tobytes() for row in rows])


def fail(value: Any) -> Any:
    raise AssertionError("a transform was called")


def opened(out: Path, targets: bool = False) -> HDF5Dataset:
    assert verify(out, progress=False).ok and os.listdir(out.parent) == [out.name]
    return HDF5Dataset(out, target_name="targets" if targets else None)


@pytest.mark.parametrize("mode", ["lazy", "eager", "streaming"])
def test_own_dataset_round_trip(tmp_path: Path, mode: Any) -> None:
    targets = np.arange(40, dtype=np.int16)
    source = Decoded(
        records_of(), targets=targets, transform=fail, target_transform=fail, loading_mode=mode
    )
    packed = opened(pack(source, tmp_path / "out.h5", workers=3), targets=True)
    assert len(packed) == 40 and packed.fingerprint == source.fingerprint
    for index in range(40):
        row, target = packed[index]
        assert (
            row.dtype == torch.float32
            and row.numpy().tobytes() == ROWS[index].tobytes()
            and target == index
        )
    assert packed.targets.dtype == np.int16


def test_same_dataset_gives_same_bytes(tmp_path: Path) -> None:
    first = pack(Split(records_of()), tmp_path / "a.h5", workers=1).read_bytes()
    assert first == pack(Split(records_of()), tmp_path / "b.h5", workers=4).read_bytes()
    assert first == pack(tmp_path / "a.h5", tmp_path / "c.h5").read_bytes()


def test_targets_of_split_target_and_views(tmp_path: Path) -> None:
    view = Split(records_of()).subset([7, 3, 3, 20])
    packed = opened(pack(view, tmp_path / "out.h5"), targets=True)
    assert [int(target) for _, target in packed] == [
        int(ROWS[index].sum() > 3) for index in (7, 3, 3, 20)
    ]
    assert [row.numpy().tobytes() for row, _ in packed] == [
        ROWS[index].tobytes() for index in (7, 3, 3, 20)
    ]


def test_overridden_decode_of_hdf5_dataset(tmp_path: Path) -> None:
    class Halves(HDF5Dataset):
        def decode(self, record: Any) -> Any:
            return record[:2] / 2

    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    with h5py.File(tmp_path / "in" / "in.h5", "w") as file:
        file["data"] = ROWS
    for name, source in {
        "cast": HDF5Dataset(tmp_path / "in" / "in.h5", dtype="f8"),
        "own": Halves(tmp_path / "in" / "in.h5"),
    }.items():
        out = pack(source, tmp_path / "out" / f"{name}.h5")
        packed = HDF5Dataset(out)
        assert verify(out).ok and all(
            torch.equal(packed[index], torch.as_tensor(source[index])) for index in range(40)
        )


def test_zarr_and_wrapped_datasets(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr.save(str(tmp_path / "in.zarr"), ROWS)
    source = ZarrDataset(tmp_path / "in.zarr")
    for number, dataset in enumerate(
        (source, MemoryEfficientDataset(source), MemoryEfficientDataset(Samples(list(ROWS))))
    ):
        out = pack(dataset, tmp_path / f"{number}.h5")
        with h5py.File(out) as file:
            assert file["data"][:].tobytes() == ROWS.tobytes()


@pytest.mark.parametrize("dtype", ["u1", "i8", "f2", "?", "c8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4)])
def test_torch_datasets(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    data = RNG.integers(0, 2, (9, *shape)).astype(dtype)
    source = TensorDataset(torch.from_numpy(data), torch.arange(9) / 3)
    packed = opened(pack(source, tmp_path / "out.h5"), targets=True)
    for (row, target), (expected, wanted) in zip(packed, source, strict=True):
        assert torch.equal(row, expected) and row.dtype == expected.dtype and target == wanted


def test_dicts_are_rows_of_named_fields(tmp_path: Path) -> None:
    samples = [
        {"x": ROWS[i], "is_even": i % 2 == 0, "inner": {"y": torch.tensor([i, -i])}}
        for i in range(9)
    ]
    packed = opened(
        pack(
            Samples([(sample, float(i)) for i, sample in enumerate(samples)]), tmp_path / "out.h5"
        ),
        targets=True,
    )
    for i, (sample, target) in enumerate(packed):
        assert sorted(sample) == ["inner", "is_even", "x"] and target == float(i)
        assert sample["x"].numpy().tobytes() == ROWS[i].tobytes() and bool(sample["is_even"]) == (
            i % 2 == 0
        )
        assert sample["inner"]["y"].tolist() == [i, -i]


def test_arrays_of_any_length(tmp_path: Path) -> None:
    samples = [np.full((length, 2), length, np.int32) for length in (3, 0, 1, 7)]
    out = pack(Samples([(sample, len(sample)) for sample in samples]), tmp_path / "out.h5")
    info = packed_info(out)
    assert info is not None and (info.kind, info.store, info.version) == ("array", "ragged", 2)
    packed = opened(out, targets=True)
    for (row, target), expected in zip(packed, samples, strict=True):
        assert (
            row.shape == expected.shape
            and row.numpy().tobytes() == expected.tobytes()
            and target == len(expected)
        )
    assert pack(packed.subset([3, 1]), tmp_path / "again.h5").exists()
    assert [len(row) for row in HDF5Dataset(tmp_path / "again.h5")] == [7, 0]


def test_no_samples(tmp_path: Path) -> None:
    assert len(opened(pack(Samples([]), tmp_path / "out.h5"))) == 0


def test_random_samples_are_drawn_once(tmp_path: Path) -> None:
    class Noise(Samples):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(3)

    packed = opened(pack(Noise(range(5)), tmp_path / "out.h5"))
    assert len({tuple(row.tolist()) for row in packed}) == 5


@pytest.mark.parametrize("thread_safe", [True, False])
def test_samples_that_may_be_left_out(tmp_path: Path, thread_safe: bool) -> None:
    records = [row.tobytes() for row in ROWS]
    records[5], records[30] = b"short", "broken"  # type: ignore[assignment]
    source = Decoded(Records(records, thread_safe), targets=range(40), on_error="skip")
    with pytest.warns(
        HeadraceWarning,
        match="2 of 40 samples can't be read and were left out: sample 5 .*sample 30 ",
    ):
        out = pack(source, tmp_path / "out.h5")
    assert [target for _, target in opened(out, targets=True)] == [
        i for i in range(40) if i not in (5, 30)
    ]
    with pytest.raises(SampleError, match="sample 5 can't be decoded"):
        pack(Decoded(Records(records, thread_safe)), tmp_path / "out.h5", overwrite=True)
    with (
        pytest.raises(SampleError, match="none of 1 samples can be read"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        pack(source.subset([5]), tmp_path / "out.h5", overwrite=True)


def test_values_that_change_between_passes(tmp_path: Path) -> None:
    class Growing(Samples):
        calls = 0

        def __getitem__(self, index: int) -> Any:
            self.calls += 1
            return np.zeros(3 if self.calls <= len(self) else 4)

    with pytest.raises(
        SampleError, match=r"Growing\[0\] changed while it was packed: 24 bytes .*32"
    ):
        pack(Growing(range(3)), tmp_path / "out.h5")
    assert os.listdir(tmp_path) == []


def test_flipped_bytes_are_found(tmp_path: Path) -> None:
    out = pack(Samples([{"x": row} for row in ROWS]), tmp_path / "out.h5")
    with h5py.File(out, "r+") as file:
        offset = file["data"].id.get_offset()
    data = bytearray(out.read_bytes())
    data[offset + 24 * 7] ^= 1
    out.write_bytes(data)
    assert [index for index, *_ in verify(out, progress=False).bad] == [7]
    with pytest.raises(FormatError, match="wrong checksum"):
        HDF5Dataset(out).sample_source.read([7])


ZEROS = np.zeros(3)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [ZEROS, None],
            r"sample 1 can't be packed: it is None\. Packing takes arrays.*convert it in decode, "
            r"or in __getitem__",
        ),
        (
            [ZEROS, "text"],
            r"sample 1 can't be packed with the others: it is str, and they are arrays",
        ),
        ([[1, 2]], r"sample 0 can't be packed: it is a list"),
        ([(ZEROS, 1, 2)], r"sample 0 can't be packed: it is a tuple.*\(input, target\) tuples"),
        ([np.array(["a"])], r"sample 0 can't be packed: it is an array of <U1"),
        ([{"x": ZEROS, "y": None}], r"sample 0, 'y', can't be packed: it is None"),
        (
            [torch.zeros(2, dtype=torch.bfloat16)],
            r"sample 0 can't be packed: .*BFloat16: convert it",
        ),
        (
            [ZEROS, ZEROS.astype("f4")],
            r"sample 1 .* with the others: it is float32 of shape \[3\], and sample 0 is float64 "
            r"of shape",
        ),
        (
            [np.zeros((3, 2)), np.zeros((3, 3))],
            r"sample 1 .*\[3, 3\], and sample 0 .*\[3, 2\]: .*only the first axis.*subset\(\)",
        ),
        ([{"x": ZEROS}, {"x": ZEROS[:2]}], r"sample 1 can't be packed with the others"),
        ([{"x": ZEROS}, {"y": ZEROS}], r"sample 1 can't be packed with the others"),
        (
            [(ZEROS, 1), (ZEROS, 1.5)],
            r"the target of sample 1 can't be packed with the others: it is float64.*give all "
            r"targets one dtype",
        ),
        (
            [(ZEROS, np.zeros(2)), (ZEROS, np.zeros(3))],
            r"the target of sample 1 can't be packed with the others",
        ),
        ([(ZEROS, "cat")], r"the target of sample 0 can't be packed: it is 'cat'"),
        ([(ZEROS, 1), (ZEROS, None)], r"1 of 2 samples have a target: give one to all, or to none"),
    ],
)
def test_samples_that_can_not_be_packed(tmp_path: Path, samples: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pack(Samples(samples), tmp_path / "out.h5")
    assert os.listdir(tmp_path) == []


def test_datasets_without_indices_and_stores(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ConfigError, match="Stream is an IterableDataset"):
        pack(Stream(), tmp_path / "out.h5")
    with pytest.raises(
        ConfigError,
        match=r"store='encoded': the samples of this dataset are arrays.*pass store='decoded'",
    ):
        pack(Samples([ZEROS]), tmp_path / "out.h5", store="encoded")
    with pytest.raises(ConfigError, match="store must be"):
        pack(Samples([ZEROS]), tmp_path / "out.h5", store="zipped")  # type: ignore[arg-type]
    assert (
        pack_dataset(Samples([ZEROS]), tmp_path / "out.h5", options=StoreOptions("decoded")).store
        == "decoded"
    )
