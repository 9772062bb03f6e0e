"""TFRecord files: those of the package tfrecord 1.14.6, damaged ones, and files on a server."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    ConfigError,
    FormatError,
    ImageDataset,
    MissingNameError,
    SampleError,
    create_dataloader,
    open_dataset,
)
from headrace.datasets.columns import ColumnsDataset
from headrace.formats.tfrecord import INDEX
from headrace.io.array_file import array_bytes
from headrace.testing.contract import DatasetContract, same
from tests.data.make import image_bytes, make_tfrecord
from tests.datasets.remote_contract import RemoteDatasetContract

DATA = Path(__file__).parents[1] / "data/tfrecord"
EXPECTED = json.loads((DATA / "expected.json").read_text())


def write(folder: Path) -> Path:
    """Two files of 11 and 13 records."""
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number in range(24):
        x = np.float32([number, 0.5])
        rows.append({"name": b"wheel %d" % number, "x": x, "id": np.array([number - 3, 1 << 40])})
    make_tfrecord(folder / "a.tfrecord", rows[:11])
    make_tfrecord(folder / "b.tfrecord", rows[11:])
    return folder


@pytest.mark.slow
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _written(self, tmp_path: Path) -> None:
        self.folder = write(tmp_path / "data")

    def make(self, **options: Any) -> ColumnsDataset:
        return ColumnsDataset(self.folder, **options)

    def make_bad(self, **options: Any) -> tuple[ColumnsDataset, list[int]]:
        write(self.folder)
        data = bytearray((self.folder / "b.tfrecord").read_bytes())
        data[data.index(b"wheel 20")] ^= 1
        (self.folder / "b.tfrecord").write_bytes(data)
        return self.make(**options), [20]


@pytest.mark.slow
class TestRemote(RemoteDatasetContract):
    names = ("a.tfrecord", "b.tfrecord")

    def write(self, folder: Path) -> None:
        write(folder)

    def make(self, paths: list[str], **options: Any) -> ColumnsDataset:
        return ColumnsDataset(paths, **options)


@pytest.mark.slow
class TestCompressed(TestRemote):
    """They are read from copies, of the version that the files had."""

    names = ("a.tfrecord.gz", "b.tfrecord.gz")
    has_index_beside = is_versioned = False

    def write(self, folder: Path) -> None:
        for path in write(folder).glob("*.tfrecord"):
            path.with_suffix(".tfrecord.gz").write_bytes(gzip.compress(path.read_bytes()))


def test_examples_are_those_of_its_own_library() -> None:
    for mode in ("lazy", "eager", "cached"):
        with open_dataset(
            DATA / "examples/*.tfrecord-*", loading_mode=mode, progress=False
        ) as data:
            assert len(data) == len(EXPECTED["examples"])
            for got, said in zip(data, EXPECTED["examples"], strict=True):
                assert got["name"] == base64.b64decode(said["name"])
                assert got["image/encoded"].shape == (3, 4, 3)
                assert got["label"].tolist() == said["label"] and got["ids"].tolist() == said["ids"]
                assert torch.equal(got["x"], torch.tensor(said["x"]))
    images = ImageDataset(
        DATA / "examples/*.tfrecord-*", column="image/encoded", targets="label", image_size=4
    )
    assert images[2][0].shape == (3, 4, 4) and images[2][1] == -1


def test_sequences_are_stacked() -> None:
    for got, said in zip(open_dataset(DATA / "sequences"), EXPECTED["sequences"], strict=True):
        assert {name: value.tolist() for name, value in got.items()} == said


def test_numbers_of_every_length(tmp_path: Path) -> None:
    values = np.array([0, 1, 127, 128, -1, 2**63 - 1, -(2**63), *(1 << n for n in range(63))])
    path = make_tfrecord(tmp_path / "a.tfrecord", [{"n": values}, {"n": values[:0]}])
    data = open_dataset(path, columns="n")
    assert data[0].tolist() == values.tolist() and not len(data[1])
    many = np.tile(values, 4_000)  # in several pieces
    again = open_dataset(make_tfrecord(tmp_path / "b.tfrecord", [{"n": many}]), columns="n")
    assert np.array_equal(again[0], many)


def test_damage_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "data") / "a.tfrecord"
    whole = path.read_bytes()
    for data, said in (
        (whole[:-5], "cut short"),
        (whole[:70], "cut short"),
        (whole[:3] + b"\x09" + whole[4:], "byte 0"),
        (b"no record, whatever its name says", "byte 0"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=said):
            open_dataset(path)
    path.write_bytes(whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:])
    with open_dataset(path) as data, pytest.raises(SampleError, match="checksum"):
        data[10]


@pytest.mark.parametrize("length", [0x0178, 0x9C78, 0xDA78, 0x8B1F])
def test_a_length_that_looks_compressed(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    for size in range(length - 40, length):
        make_tfrecord(path, [{"a": bytes(size)}])
        if int.from_bytes(path.read_bytes()[:8], "little") == length:
            break
    assert len(open_dataset(path)[0]["a"]) == size


def test_numbered_files_of_tfds(tmp_path: Path, memory: Any) -> None:
    for name in ("dataset_info.json", "features.json", "label.labels.txt"):
        (tmp_path / name).write_text("{}")
    names = [f"photos-train.tfrecord-{number:05d}-of-00003" for number in range(3)]
    for number in (0, 2):
        make_tfrecord(tmp_path / names[number], [{"n": np.array([number])}] * 2)
    (tmp_path / names[1]).write_bytes(b"")
    for path in tmp_path.iterdir():
        memory.pipe_file(f"/tfds/{path.name}", path.read_bytes())
    for where in (tmp_path, tmp_path / "*tfrecord*", "memory://tfds"):
        assert [int(one["n"]) for one in open_dataset(where)] == [0, 0, 2, 2]
    (tmp_path / names[1]).write_bytes(b"no record")
    for where in (tmp_path, tmp_path / "*tfrecord*"):
        with pytest.raises(FormatError, match=names[1]):
            open_dataset(where)
    (tmp_path / names[1].replace("train", "test")).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"\(test, train\).*photos-test\.tfrecord\*'"):
        open_dataset(tmp_path)


def test_an_index_beside_that_lies(tmp_path: Path, memory: Any) -> None:
    data = (write(tmp_path / "data") / "a.tfrecord").read_bytes()
    memory.pipe_file("/lies/a.tfrecord", data)
    lies: list[tuple[list[int], bytes, int]] = [([], b"{}", 0), ([9, 3], b"{}", 0)]
    lies += [([0, len(data)], names, 0) for names in (b"[1]", b'{"id": "pkl"}', b"[" * 100_000)]
    for number, (edges, names, steps) in enumerate([*lies, ([0, len(data)], b"{}", 2)]):
        arrays = [np.array(edges, np.int64), np.frombuffer(names, np.uint8), np.arange(steps)]
        index = array_bytes(arrays, INDEX.about(len(data)), INDEX.types)
        memory.pipe_file("/lies/a.tfrecord.index", index)
        with pytest.raises(FormatError, match="write_index"):
            open_dataset("memory://lies/a.tfrecord", cache_dir=tmp_path / str(number))


def test_a_feature_that_is_missing(tmp_path: Path) -> None:
    """As `tf.io.parse_example` gives features of any length: of numbers none."""
    image = image_bytes(np.zeros((2, 3, 3), np.uint8))
    numbers = {"n": np.array([1, 2]), "x": np.float32([3])}
    whole = {"a": b"1", "image": image, "steps/image": [image] * 2, **numbers}
    path = make_tfrecord(tmp_path / "a.tfrecord", [whole] * 20 + [{"a": b"2"}])
    data = open_dataset(path)
    no_numbers = {"n": torch.zeros(0, dtype=torch.int64), "x": torch.zeros(0)}
    assert data[20].keys() == data[3].keys()
    assert same(data[20], {**data[20], "a": b"2", "image": None, "steps/image": None, **no_numbers})
    assert [one.shape for one in (data[3]["image"], *data[3]["steps/image"])] == [(3, 2, 3)] * 3
    batch = next(iter(create_dataloader(open_dataset(path, columns="a"), shuffle=False)))
    assert batch[19:] == [b"1", b"2"]
    with pytest.raises(MissingNameError, match="'b'"):
        open_dataset(path, columns="b")


def in_two(data: bytes) -> bytes:
    return gzip.compress(data[:99]) + gzip.compress(data[99:])


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress, in_two])
def test_compressed_files(compress: Any, tmp_path: Path, memory: Any, monkeypatch: Any) -> None:
    folder = write(tmp_path / "data")
    plain = list(open_dataset(folder))
    monkeypatch.setattr("headrace.formats.source.block_length", lambda _: 100)
    blocks = open_dataset(folder).blocks().tolist()
    path = folder / "b.tfrecord"
    path.write_bytes(compress(path.read_bytes()))
    for name in ("a.tfrecord", "b.tfrecord"):
        memory.pipe_file(f"/packed/{name}", (folder / name).read_bytes())
    for where in (folder, "memory://packed"):
        with open_dataset(where, cache_dir=tmp_path / "cache") as data:
            assert same(list(data), plain) and data.blocks().tolist() == blocks
            assert data.source_of(12).endswith("b.tfrecord, record 1")
    monkeypatch.setattr(zlib, "decompressobj", None)  # it is decompressed once
    for mode in ("eager", "cached"):
        options: Any = {"loading_mode": mode, "cache_dir": tmp_path / "cache", "progress": False}
        with open_dataset(folder, **options) as data:
            loader = create_dataloader(data, batch_size=24, shuffle=False, num_workers=2)
            assert next(iter(loader))["id"][:, 0].tolist() == list(range(-3, 21))
            loader.close()


def test_damage_of_compressed_files(tmp_path: Path) -> None:
    path = write(tmp_path / "data") / "a.tfrecord"
    whole = path.read_bytes()
    packed = gzip.compress(whole)
    for data, said in (
        (packed[:-20], "cut short"),
        (packed[:-8] + bytes(4) + packed[-4:], "decompressed"),
        (gzip.compress(whole[:-5]), "cut short"),
        (gzip.compress(bytes(1 << 24)), "byte 0"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=rf"a\.tfrecord.*{said}"):
            open_dataset(path, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*plain*"))
