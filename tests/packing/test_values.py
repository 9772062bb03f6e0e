"""Packing of arrays and of datasets of one's own: what their steps give comes out of the file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from headrace import (
    BaseDataset,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    Source,
    StreamingDataset,
    ZarrDataset,
    create_dataloader,
    open_dataset,
    pack,
    verify,
)
from headrace.errors import BudgetError, ConfigError, FormatError, HeadraceWarning, SampleError
from headrace.formats.hdf5.files import packed_info
from headrace.packing import pack_status
from tests.data.make import make_tar
from tests.packing.shared import images, plain, samples_of

pytestmark = pytest.mark.quick_every(2)

RNG = np.random.default_rng(7)
ROWS = RNG.random((30, 2, 3)).astype(np.float32)
LABELS = np.arange(30, dtype=np.int16) % 4


class Records(Source):
    """Records of any kind, in memory."""

    def __init__(self, records: Sequence[Any], thread_safe: bool = True) -> None:
        self.records, self.thread_safe = records, thread_safe

    def __len__(self) -> int:
        return len(self.records)

    def read(self, indices: Sequence[int]) -> list[Any]:
        records = [self.records[index] for index in indices]
        if "broken" in records:
            raise ValueError("a broken record")
        return records

    def fingerprint(self) -> str:
        return f"records-{len(self)}"


class Decoded(BaseDataset):
    """The bytes of a row to the row."""

    def decode(self, record: bytes) -> Any:
        return np.frombuffer(record, np.float32).reshape(2, 3)


class Split(Decoded):
    """A target that the value holds."""

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        return value, int(value.sum() > 3)


class Labelled(Decoded):
    """Targets that the dataset looks up by the number of the sample."""

    labels = range(100, 100 + len(ROWS))

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        return value, self.labels[index]


class Samples(Dataset[Any]):
    """A map-style dataset that is not headrace's."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def own(kind: type[BaseDataset] = Decoded, **options: Any) -> BaseDataset:
    return kind(Records([row.tobytes() for row in ROWS]), **options)


def fail(value: Any) -> Any:
    raise AssertionError("a transform was called")


def pieces(samples: Any) -> list[Any]:
    """Input and target of each sample, as what can be compared."""
    return [plain(sample if isinstance(sample, tuple) else (sample, None)) for sample in samples]


def check(source: Any, folder: Path, expected: Any = None, kind: Any = None) -> tuple[Path, Path]:
    """Packs to one file and to about four parts, and compares samples and fingerprints."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    wanted = pieces(samples_of(source) if expected is None else expected)
    options = {"target_name": "targets"} if wanted[0][1] is not None else {}
    one = pack(source, folder / "one.h5")
    with h5py.File(one) as file:
        shard_size = max(1, file["data"].nbytes // 4)
    parts = pack(source, folder / "parts", shard_size=shard_size)
    assert pack_status(parts).parts > 1
    for path in (one, parts):
        assert verify(path, progress=False).ok
        with kind(path) if kind else HDF5Dataset(path, **options) as packed:
            assert pieces(samples_of(packed)) == wanted
            if isinstance(source, BaseDataset):
                assert packed.fingerprint == source.fingerprint
    return one, parts


# --- datasets of one's own ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lazy", "eager", "streaming"])
def test_own_datasets_without_their_transforms(mode: Any, tmp_path: Path) -> None:
    source = own(targets=LABELS, transform=fail, target_transform=fail, loading_mode=mode)
    one, _ = check(source, tmp_path, expected=zip(ROWS, LABELS.tolist(), strict=True))
    with HDF5Dataset(one, target_name="targets") as packed:
        assert packed.targets.dtype == np.int16


def test_split_targets_and_views(tmp_path: Path) -> None:
    check(own(Split), tmp_path)
    check(own(Split).subset([7, 3, 3, 20]), tmp_path)


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("how", [{}, {"shard_size": 200}, {"shard_size": 200, "processes": 2}])
def test_targets_by_number_in_parts(how: dict[str, Any], tmp_path: Path) -> None:
    """Also behind a sample that is left out."""
    records: list[Any] = [row.tobytes() for row in ROWS]
    records[5] = b"short"
    source = Labelled(Records(records), on_error="skip")
    with pytest.warns(HeadraceWarning, match="can't be read"):
        out = pack(source, tmp_path / "out", **how)
    with open_dataset(out, target_name="targets") as packed:
        assert list(packed.targets) == [label for label in Labelled.labels if label != 105]
    view = MemoryEfficientDataset(own(Labelled)).subset([7, 3])
    with open_dataset(pack(view, tmp_path / "view", **how), target_name="targets") as packed:
        assert list(packed.targets) == [107, 103]


def test_wrapped_datasets(photos: Path, tmp_path: Path) -> None:
    """Images in one stay images; of torch's own views they are arrays."""
    whole = images(photos)
    held = MemoryEfficientDataset(whole.subset(range(20)))
    views = {
        "own": (MemoryEfficientDataset(own(targets=LABELS)), None),
        "images": (MemoryEfficientDataset(photos, image_size=(20, 30), normalize=False), images),
        "subsets": (held.subset([*range(7, 19), 3]), images),
        "torch": (ConcatDataset([Subset(whole, [3, 1]), whole.subset([9, 8, 2])]), None),
    }
    for source, kind in views.values():
        check(source, tmp_path, kind=kind)


SAMPLES: dict[str, list[Any]] = {
    "pairs": [(torch.from_numpy(row), int(n)) for row, n in zip(ROWS, LABELS, strict=True)],
    "any length": [np.arange(n % 7) for n in range(30)],
    "numbers": [float(n) for n in range(60)],
    "dicts": [
        ({"x": row, "inner": {"n": np.int16(n)}, "is_even": n % 2 == 0}, np.array([n, -n]))
        for n, row in enumerate(ROWS)
    ],
    "bytes": [bytes(range(n)) for n in range(30)],
    "bytes of one length": [b"%02d mills" % n for n in range(30)],
    "bytes with targets": [(bytes([n] * (n % 4)), n) for n in range(60)],
    "no bytes": [b"", *[b"12345678"] * 30],
    "str with targets": [(f"wheel {n} \U0001f600\0", float(n)) for n in range(30)],
}


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("what", SAMPLES)
def test_torch_datasets(what: str, tmp_path: Path) -> None:
    source = Samples(SAMPLES[what])
    check(source, tmp_path)
    joined = ConcatDataset([Subset(source, range(9)), Subset(source, [*range(9, 30), 1, 0])])
    check(joined, tmp_path)


def test_bytes_and_str_open_as_such(tmp_path: Path) -> None:
    out = pack(Samples(["é", "mill"]), tmp_path / "out.h5")
    with open_dataset(out) as packed, HDF5Dataset(out, encoding=None) as as_bytes:
        assert list(packed) == ["é", "mill"] and list(as_bytes) == ["é".encode(), b"mill"]
        (batch,) = create_dataloader(packed, batch_size=2, shuffle=False, num_workers=0)
        assert batch == ["é", "mill"] and packed.fingerprint == as_bytes.fingerprint
    info = packed_info(out)
    assert info is not None and (info.store, info.values) == ("ragged", "str")
    pack(Samples([b"x"]), tmp_path / "bytes.h5")
    with pytest.raises(FormatError, match="str here, and of bytes there"):
        HDF5Dataset([tmp_path / "bytes.h5", out])


# --- files of arrays ------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["rows"] = ROWS
        file["labels"] = LABELS
        file["swapped"] = ROWS.astype(">f4")
        file["half"] = ROWS.astype(np.float16)
        file["group/inner/flags"] = ROWS[:, 0, 0] > 0.5
        file.create_dataset("compressed", data=ROWS, chunks=(4, 2, 2), compression="gzip")
        compound = np.zeros(30, [("n", "i8"), ("row", "f4", (3,))])
        compound["n"] = LABELS
        file["compound"] = compound
        texts = [f"mill {'wheel ' * (n % 3)}{n} é" for n in range(30)]
        file.create_dataset("texts", data=texts, dtype=h5py.string_dtype())
        file.create_dataset("fixed", data=np.array([b"%d" % n for n in range(30)], "S8"))
        vlen = file.create_dataset("vlen", (30,), h5py.vlen_dtype(np.int32))
        for n in range(30):
            vlen[n] = np.arange(n % 5)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["rows"] = ROWS[::-1] * 2
        file["labels"] = LABELS[::-1]
    return tmp_path / "in.h5"


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    "name",
    [
        *("swapped", "group/inner/flags", "compressed", "compound", "texts", "fixed", "vlen"),
        ("rows", "half"),
    ],
)
def test_datasets_of_hdf5(name: Any, rows: Path, tmp_path: Path) -> None:
    names = list(name) if isinstance(name, tuple) else name
    with HDF5Dataset(rows, names, target_name="labels") as source:
        check(source, tmp_path)
    with HDF5Dataset(rows, names) as source:
        check(source, tmp_path)


def test_views_casts_and_several_files(rows: Path, tmp_path: Path) -> None:
    class Halves(HDF5Dataset):
        def decode(self, record: Any) -> Any:
            return record[:1] / 2

    named: dict[str, Any] = {"target_name": "labels"}
    sources = {
        "cast": HDF5Dataset(rows, "rows", dtype="f8", **named).subset([5, 3, 29, 3, *range(20)]),
        "halves": Halves(rows, "rows"),
        "files": HDF5Dataset([rows, rows.with_name("other.h5")], "rows", **named),
    }
    for source in sources.values():
        with source:
            check(source, tmp_path)


def test_a_pack_is_packed_again_by_its_path(rows: Path, tmp_path: Path) -> None:
    """From one file and from parts, with the targets."""
    with HDF5Dataset(rows, "vlen", target_name="labels") as source:
        one, parts = check(source, tmp_path)
    for number, path in enumerate((one, parts, [one], str(parts / "*.h5"))):
        assert pack(path, tmp_path / f"{number}.h5").read_bytes() == one.read_bytes()


def test_what_is_no_array_of_hdf5(rows: Path, tmp_path: Path) -> None:
    fields = HDF5Dataset(rows, ["rows", "texts"])
    targets = HDF5Dataset(rows, "rows", target_name="texts")
    for source, message in ((fields, "sample 0, 'texts'"), (targets, "these targets")):
        with source, pytest.raises(ConfigError, match=message):
            pack(source, tmp_path / "out.h5")


def test_targets_that_do_not_fit_memory(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "in.zarr", mode="w")
    for name in ("raw", "labels"):
        group.create_array(name, data=np.zeros((60, 60), np.int64), chunks=(30, 30))
    options: dict[str, Any] = {"target_name": "labels", "patch_shape": (30, 30), "stride": 1}
    with (
        ZarrDataset(tmp_path / "in.zarr", "raw", max_memory_usage="5MB", **options) as source,
        pytest.raises(BudgetError, match=r"961 samples take 6\.9 MB"),
    ):
        pack(source, tmp_path / "out.h5")


# --- shards ---------------------------------------------------------------------------------------


def test_members_of_a_tar(photos: Path, tmp_path: Path) -> None:
    """The bytes of images and their classes, of a subclass that says so; others are told to."""

    class Photos(StreamingDataset):
        def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
            return value["jpg"], int(value["cls"])

    expected = [(path.read_bytes(), n % 3) for n, path in enumerate(sorted(photos.rglob("*.jpg")))]
    members = []
    for number, (image, label) in enumerate(expected):
        members += [(f"{number:04d}.jpg", image), (f"{number:04d}.cls", b"%d" % label)]
    make_tar(tmp_path / "in.tar", members)
    with Photos(tmp_path / "in.tar", decode=False) as source:
        check(source, tmp_path, expected)
    for source in (tmp_path / "in.tar", StreamingDataset(tmp_path / "in.tar")):
        with pytest.raises(ConfigError, match="split_target"):
            pack(source, tmp_path / "out.h5")


def test_shards_of_hdf5_and_texts(photos: Path, tmp_path: Path) -> None:
    lines = [f"line {number} é" for number in range(30)]
    records = [{"x": number, "y": number / 2} for number in range(30)]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    shards: list[tuple[Path, list[Any], Any]] = [
        (tmp_path / "in.txt", lines, None),
        (tmp_path / "in.jsonl", records, None),
        (pack(Samples(list(ROWS)), tmp_path / "rows.h5"), list(ROWS), None),
        (pack(photos, tmp_path / "images.h5"), samples_of(ImageDataset(photos)), ImageDataset),
    ]
    for path, expected, kind in shards:
        with StreamingDataset(path) as source:
            check(source, tmp_path, expected, kind)


# --- what can't be packed -------------------------------------------------------------------------


@pytest.mark.parametrize("thread_safe", [True, False])
def test_samples_that_may_be_left_out(thread_safe: bool, tmp_path: Path) -> None:
    records: list[Any] = [row.tobytes() for row in ROWS]
    records[5], records[20] = b"short", "broken"
    source = Decoded(Records(records, thread_safe), targets=range(30), on_error="skip")
    with pytest.warns(HeadraceWarning, match=r"2 of 30 .*sample 5 .*sample 20 "):
        out = pack(source, tmp_path / "out.h5")
    with HDF5Dataset(out, target_name="targets") as packed:
        assert [target for _, target in packed] == [i for i in range(30) if i not in (5, 20)]
    with pytest.raises(SampleError, match="sample 5 "):
        pack(Decoded(Records(records, thread_safe)), tmp_path / "out.h5", overwrite=True)
    with pytest.raises(SampleError, match="none of 1 samples"):
        pack(source.subset([5]), tmp_path / "out.h5", overwrite=True)


def test_values_that_change_between_passes(tmp_path: Path) -> None:
    class Growing(Samples):
        calls = 0

        def __getitem__(self, index: int) -> Any:
            self.calls += 1
            return np.zeros(3 if self.calls <= len(self) else 4)

    whole = pack(Growing(range(3)), tmp_path / "out.h5")  # in one pass
    assert HDF5Dataset(whole)[2].shape == (3,)
    with pytest.raises(ConfigError, match=r"sample 0 .* \[4\], and a sample of the other parts"):
        pack(Growing(range(3)), tmp_path / "out", shard_size=1000)


ZEROS = np.zeros(3)
REFUSED: list[tuple[list[Any], str]] = [
    ([ZEROS, None], "sample 1 .* it is None"),
    ([ZEROS, "text"], "sample 1 .* it is str, and sample 0 is float64"),
    ([b"x", "x"], "sample 1 .* it is str, and sample 0 is bytes"),
    ([b"x", np.frombuffer(b"x", np.uint8)], "sample 1 .* uint8 of .* and sample 0 is bytes"),
    (["\ud800"], "sample 0 .* UTF-8"),
    ([[1, 2]], "sample 0 .* a list"),
    ([(ZEROS, 1, 2)], "sample 0 .* a tuple"),
    ([np.array(["a"])], "sample 0 .* <U1"),
    ([{"x": ZEROS, "y": None}], "sample 0, 'y'"),
    ([{"x": "mill"}], "sample 0, 'x'.* it is 'mill"),
    ([torch.zeros(2, dtype=torch.bfloat16)], "sample 0 .*bfloat16"),
    ([ZEROS, ZEROS.astype("f4")], r"sample 1 .* float32 of shape \[3\], .* float64 of shape"),
    ([np.zeros((3, 2)), np.zeros((3, 3))], r"sample 1 .*\[3, 3\], and sample 0 .*\[3, 2\]"),
    ([{"x": ZEROS}, {"x": ZEROS[:2]}], "sample 1 "),
    ([{0: ZEROS, "x": ZEROS}], "sample 0 .* not 0:"),
    ([{"x": {"": ZEROS}}], "sample 0, 'x', .* not '':"),
    ([{"x": {}}], "sample 0, 'x'"),
    ([{"x": ZEROS}, {"y": ZEROS}], "sample 1 "),
    ([(ZEROS, 1), (ZEROS, 1.5)], "target of sample 1 .* float64"),
    ([(ZEROS, np.zeros(2)), (ZEROS, np.zeros(3))], "target of sample 1 "),
    ([(ZEROS, "cat")], "target of sample 0 .* 'cat'"),
    ([(ZEROS, {"a": 1}), (ZEROS, {"b": 1})], "target of sample 1"),
    ([(ZEROS, {"a": 1, "name": "oak"})], "target of sample 0, 'name'"),
    ([(ZEROS, {"a": {"b": 1}})], "column 'a'"),
    ([(ZEROS, {"": 1})], "target of sample 0.* not '':"),
    ([(ZEROS, 1), (ZEROS, None)], "1 of 2 samples have a target"),
]


@pytest.mark.parametrize("shard_size", [None, 10])
def test_samples_that_can_not_be_packed(shard_size: int | None, tmp_path: Path) -> None:
    for samples, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            pack(Samples(samples), tmp_path / "out", shard_size=shard_size)
        assert shard_size or os.listdir(tmp_path) == []


def test_integers_that_no_dtype_holds_are_refused(tmp_path: Path) -> None:
    """NumPy would round them."""
    source = own(targets=[*range(29), 2**63 + 1])
    with pytest.raises(ConfigError, match="numbers of one dtype"):
        pack(source, tmp_path / "out.h5")


def test_streams_and_options_of_others(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ConfigError, match="a dataset with __getitem__"):
        pack(Stream(), tmp_path / "out.h5")
    for options in ({"store": "jpeg"}, {"check": "header"}, {"end_token": 1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            pack(Samples([ZEROS]), tmp_path / "out.h5", **options)
    with HDF5Dataset(pack(Samples([]), tmp_path / "out.h5")) as packed:
        assert len(packed) == 0
