"""StreamingDataset: each sample of its shards once, in an order that follows from their layout."""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
import zstandard

from headrace import (
    ConfigError,
    HDF5Dataset,
    ImageDataset,
    RandomResizedCrop,
    SampleError,
    StreamingDataset,
    pack,
)
from headrace.core import dataset as base
from headrace.core.options import LoadingMode
from headrace.errors import DataNotFoundError, FormatError, StateError
from headrace.formats.resolve.resolver import expand_braces
from headrace.order.lanes import interleave_for
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.make import make_photos, make_shards, make_tar

UNEVEN = (7, 0, 1, 14, 2, 13)


class Lazily(StreamingDataset):
    """The same samples in another mode, for comparisons."""

    _in_mode = LoadingMode.LAZY


class Eagerly(StreamingDataset):
    _in_mode = LoadingMode.EAGER


class Cachingly(StreamingDataset):
    _in_mode = LoadingMode.CACHED


IN_MODE = {"streaming": StreamingDataset, "lazy": Lazily, "eager": Eagerly, "cached": Cachingly}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small shards have several."""
    monkeypatch.setattr("headrace.formats.source.LONGEST", 10 << 10)
    monkeypatch.setattr("headrace.formats.source.block_length", lambda _: 100)


@pytest.mark.quick_every(4)
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / "contract-shards"
        if not self.path.exists():
            make_shards(self.path, UNEVEN)

    def make(self, **options: Any) -> Any:
        cls = IN_MODE[str(options.pop("loading_mode", "streaming"))]
        return cls(self.path, buffer_size=6, **options)

    def make_bad(self, **options: Any) -> tuple[Any, list[int]]:
        members = [(f"{number:02d}.cls", b"%d" % number) for number in range(24)]
        for number in (2, 13):
            members[number] = (f"{number:02d}.png", b"\x89PNG no image")
        path = make_tar(self.path.with_name("contract-bad.tar"), members)
        cls = IN_MODE[str(options.pop("loading_mode", "streaming"))]
        return cls(path, **options), [2, 13]

    def test_law_3_a_state_of_other_data_is_refused(self) -> None:
        other = make_shards(self.path.with_name("other-shards"), (3, 4))
        state = self._loader(self.make()).state_dict()
        with pytest.raises(StateError, match=state["fingerprint"]):
            self._loader(StreamingDataset(other)).load_state_dict(state)


# --- exactly once, on any number of ranks and workers ---------------------------------------------


def number_of(sample: Any) -> int:
    return int(sample["cls"] if "cls" in sample else sample["number"])


def numbers(dataset: Any) -> list[int]:
    return [number_of(sample) for sample in dataset]


def test_a_plain_dataloader_gives_all_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and workers without processes; each rank gets as many samples."""

    def of_worker(dataset: Any, worker: int, workers: int) -> list[int]:
        info = SimpleNamespace(id=worker, num_workers=workers, dataset=None)
        monkeypatch.setattr(base, "get_worker_info", lambda: info)
        return numbers(dataset)

    for counts in (UNEVEN, (0, 0, 5), (0, 0)):
        dataset = StreamingDataset(make_shards(tmp_path / str(counts), counts))
        n = sum(counts)
        for ranks in (1, 2, 4):
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            seen: list[list[int]] = []
            for rank in range(ranks):
                monkeypatch.setenv("RANK", str(rank))
                seen.append(of_worker(dataset, 0, 1))
                parts = [of_worker(dataset, worker, 3) for worker in range(3)]
                assert sorted(number for part in parts for number in part) == sorted(seen[-1])
            assert [len(part) for part in seen] == [-(-n // ranks)] * ranks
            assert set().union(*seen) == set(range(n))


# --- what a sample is -----------------------------------------------------------------------------


def array_file(save: Callable[..., Any], *values: Any, **named: Any) -> bytes:
    out = io.BytesIO()
    save(out, *values, **named)
    return out.getvalue()


def test_members_are_decoded_by_their_extension(tmp_path: Path, tiny_photos: Path) -> None:
    members = {
        "jpg": next(tiny_photos.rglob("*.jpg")).read_bytes(),
        "cls": b"7\n",
        "txt": "Mühle".encode(),
        "json": b'{"a": [1, 2]}',
        "npy": array_file(np.save, np.arange(6.0).reshape(2, 3)),
        "npz": array_file(np.savez, x=np.arange(3)),
        "seg.png": b"mask",
        "pickle": pickle.dumps(1),
        "bin": b"\0\1",
        "json.gz": gzip.compress(b"[3]"),
        "x.txt.zst": zstandard.compress(b"four"),
        "nii.gz": gzip.compress(b"voxels"),
    }
    named = [(f"some/one.{name}", data) for name, data in members.items()]
    path = make_tar(tmp_path / "a.tar", named)
    (sample,) = StreamingDataset(path, decode={"seg.png": bytes.decode})
    assert sample["jpg"].dtype == torch.uint8
    assert sample["jpg"].shape == (3, 12, 16)
    assert sample["npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert sample["npz"]["x"].tolist() == [0, 1, 2]
    plain = {
        "cls": 7,
        "txt": "Mühle",
        "json": {"a": [1, 2]},
        "pickle": pickle.dumps(1),  # nothing is run
        "bin": b"\0\1",
        "seg.png": "mask",
        "json.gz": [3],
        "x.txt.zst": "four",
        "nii.gz": b"voxels",
        "__key__": "some/one",
        "__url__": str(path),
    }
    assert {name: sample[name] for name in plain} == plain
    # decoders of one's own come first
    own = {".JPG": None, "png": len, "bin": list, "txt": len, "gz": None}
    (sample,) = StreamingDataset(path, decode=own)
    assert [sample[name] for name in ("jpg", "nii.gz")] == [members["jpg"], members["nii.gz"]]
    assert sample["x.txt.zst"] == 4
    assert (sample["seg.png"], sample["bin"], sample["cls"]) == (4, [0, 1], 7)
    (raw,) = StreamingDataset(path, decode=False)
    assert {name: raw[name] for name in members} == members


def test_a_member_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [("a.cls", b"1"), ("b.cls", b"one")])
    with pytest.raises(SampleError, match=r"a\.tar, sample 'b': member 'cls'"):
        list(StreamingDataset(path))
    assert numbers(StreamingDataset(path, on_error="skip")) == [1]
    (tmp_path / "a.jsonl").write_text('{"number": 1}\n{broken\n')
    with pytest.raises(SampleError, match=r"a\.jsonl"):
        list(StreamingDataset(tmp_path / "a.jsonl"))
    assert numbers(StreamingDataset(tmp_path / "a.jsonl", on_error="skip")) == [1]
    stand_in = StreamingDataset(path, on_error=lambda index, where, error: {"cls": -1})
    assert sorted(numbers(stand_in)) == [-1, 1]
    bomb = gzip.compress(bytes(64 << 20))
    for data, why in ((bomb, "its content of .* is too large"), (bomb[:99], ".* is cut short")):
        path = make_tar(tmp_path / "c.tar", [("c.json.gz", data)])
        with pytest.raises(SampleError, match=rf"c\.tar, sample 'c': member 'json\.gz': {why}"):
            list(StreamingDataset(path, max_memory_usage="40MB"))


def test_lines(tmp_path: Path) -> None:
    for ending, compress in (("jsonl", gzip.compress), ("txt", zstandard.compress)):
        folder = make_shards(tmp_path / ending, UNEVEN, ending)
        for path in list(folder.iterdir()):
            packed = {"jsonl": ".gz", "txt": ".zst"}[ending]
            path.with_name(path.name + packed).write_bytes(compress(path.read_bytes()))
            path.unlink()
        dataset = StreamingDataset(folder, cache_dir=tmp_path / "kept")
        samples = list(dataset)
        found = [one["number"] if ending == "jsonl" else int(one[5:]) for one in samples]
        assert sorted(found) == list(range(37)) != found
        assert len(dataset.blocks()) > 5 and dataset.blocks().sum() == 37


def test_blank_lines_belong_to_no_block(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{n}\n" + "\n" * (n % 3) for n in range(200)))
    (tmp_path / "b.jsonl").write_text("\n\n\n")
    (tmp_path / "c.jsonl").write_text("200\n")
    lazy = Lazily([tmp_path / f"{name}.jsonl" for name in "abc"])
    assert list(lazy) == list(range(201))
    start = 0
    for size in lazy.blocks().tolist():
        indices = range(start, start + size)
        assert len({lazy.sample_source.offset_of(index) // 100 for index in indices}) == 1
        start += size
    assert start == 201


def test_arrays_come_as_their_datasets_give_them(tmp_path: Path, make_loader: Any) -> None:
    rows = np.arange(60, dtype="f4").reshape(20, 3)
    for number, part in enumerate(np.split(rows, [13])):
        labels = np.arange(len(part))
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("rows", data=part, chunks=(4, 3), compression="gzip")
            file["labels"] = labels
        root = zarr.open_group(tmp_path / f"{number}.zarr", mode="w")
        root.create_array("rows", data=part, chunks=(4, 3))
        root.create_array("labels", data=labels, chunks=(4,))
    names: dict[str, Any] = {"dataset_name": "rows", "target_name": "labels"}
    for pattern in ("*.h5", "{0,1}.zarr"):
        dataset = StreamingDataset(str(tmp_path / pattern), **names)
        samples = sorted(dataset, key=lambda sample: float(sample[0][0]))
        assert np.array_equal(torch.stack([row for row, _ in samples]), rows)
        assert [label for _, label in samples] == [*range(13), *range(7)]
    # through whole batches: what is decoded there goes straight into its row
    options: dict[str, Any] = {"batch_size": 8, "num_workers": 0, "shuffle": False}
    streams = make_loader(StreamingDataset(tmp_path / "0.h5", **names), **options)
    assert same(
        list(streams), list(make_loader(HDF5Dataset(tmp_path / "0.h5", **names), **options))
    )
    for path in tmp_path.glob("*.h5"):
        path.unlink()
    assert len(StreamingDataset(tmp_path, dataset_name="rows")) == 20  # a folder of stores


def test_packed_images_come_as_images(tmp_path: Path, tiny_photos: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.h5", "b.h5"):
        pack(ImageDataset(tiny_photos), folder / name, progress=False)
    crop = RandomResizedCrop(8)
    for transform in (None, crop, [crop, lambda image: torch.tensor(image.size)]):
        dataset = StreamingDataset(folder, transform=transform)
        twin = ImageDataset(folder / "a.h5", transform=transform)
        ordered = Lazily(folder, transform=transform)
        assert dataset.classes == twin.classes
        assert same([ordered[index] for index in range(4)], [*twin])
        assert [ordered[index + 4][1] for index in range(4)] == [target for _, target in twin]
        samples = list(dataset)
        assert len(samples) == 8
        assert samples[0][0].shape == twin[0][0].shape
    other = make_photos(tmp_path / "other", classes=("noise",), per_class=1)
    pack(ImageDataset(other), folder / "c.h5", progress=False)
    with pytest.raises(FormatError, match="classes, sizes"):
        StreamingDataset(folder)


# --- order ----------------------------------------------------------------------------------------


def test_open_blocks_hold_the_shuffle_buffer() -> None:
    for mixed, samples, blocks, expected in (
        (1000, 100_000, 5000, 64),
        (1000, 10**6, 100, 1),
        (100, 1000, 1000, 128),
        (10**6, 10**6, 100, 64),
        (5, 0, 0, 1),
    ):
        assert interleave_for(mixed, samples, blocks) == expected
        least = 1 << (min(8, max(1, blocks)).bit_length() - 1)
        assert interleave_for(mixed, samples, blocks, least=8) == max(expected, least)


# --- what users see -------------------------------------------------------------------------------


def test_bad_arguments(tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "shards", (2,))
    wrong: list[Any] = [("buffer_size", 0), ("loading_mode", "lazy"), ("shared", "machine")]
    wrong += [("decode", 3), ("decode", {"jpg": 3})]
    for option, value in (*wrong, ("dataset_name", "rows"), ("target_name", "rows")):
        with pytest.raises(ConfigError, match=option):
            StreamingDataset(folder, **{option: value})


def test_shards_that_are_none_or_of_several_kinds(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"\.tar"):
        StreamingDataset(tmp_path)
    folder = make_shards(tmp_path / "shards", (2,))
    make_shards(folder, (1, 1), "jsonl")
    with pytest.raises(ConfigError, match=r"part-000\.tar.*'\*\.tar'"):
        StreamingDataset(folder)
    with pytest.raises(ConfigError, match="decode"):
        StreamingDataset(folder / "*.jsonl", decode=False)
    for name in ("a.bin", "a.tar.gz"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(FormatError, match=name):
            StreamingDataset(tmp_path / name)


def test_braces(tmp_path: Path) -> None:
    for pattern, names in (
        ("a-{08..010}.tar", ["a-008.tar", "a-009.tar", "a-010.tar"]),
        ("{1..9..4}-{5..0..2}", ["1-5", "1-3", "1-1", "5-5", "5-3", "5-1", "9-5", "9-3", "9-1"]),
        ("{x{1,2},y}", ["x1", "y", "x2"]),
        ("{one}-{}", ["{one}-{}"]),
    ):
        assert expand_braces(pattern) == names
    with pytest.raises(ConfigError, match="1,000,000"):
        expand_braces("{0..9999}-{0..9999}.tar")
    path = make_tar(tmp_path / "{1,2}.tar", [("a.cls", b"1")])  # part of a name
    assert len(StreamingDataset(str(path))) == 1
