"""A path means the same files in every dataset, in `open_dataset` and in `write_index`."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import zarr
from PIL import Image

from headrace import (
    ConfigError,
    DataNotFoundError,
    HDF5Dataset,
    ImageDataset,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
    open_dataset,
)
from tests.data.make import make_tar
from tests.servers.ranges import RangeServer


def _png(path: Path, number: int) -> None:
    Image.new("L", (2, 2), number).save(path)


def _txt(path: Path, number: int) -> None:
    path.write_text(str(number))


def _jsonl(path: Path, number: int) -> None:
    path.write_text(json.dumps({"number": number}) + "\n")


def _h5(path: Path, number: int) -> None:
    with h5py.File(path, "w") as file:
        file["data"] = np.array([[number]])


def _zarr(path: Path, number: int) -> None:
    zarr.create_array(str(path), data=np.array([[number]]))


def _tar(path: Path, number: int) -> None:
    make_tar(path, [("sample.txt", b"%d" % number)])


def _of_pixels(sample: Any) -> int:
    return int(sample[0][0, 0, 0])


def code_points(text: str) -> list[int]:
    return list(map(ord, text))


def _of_text(sample: Any) -> int:
    return int("".join(map(chr, sample["input_ids"].tolist())))


def _of_row(sample: Any) -> int:
    return int(sample[0])


class Format(NamedTuple):
    ending: str
    write: Callable[[Path, int], None]
    open: Callable[..., Any]
    number: Callable[[Any], int]
    """Of a sample: which file it is of."""
    options: Any = MappingProxyType({})

    def numbers(self, path: Any, opens: Any = None, **options: Any) -> list[int]:
        with (opens or self.open)(path, **self.options, **options) as dataset:
            return sorted(self.number(sample) for sample in dataset)


PIXELS: Any = {"image_size": None, "normalize": False, "targets": None}
TOKENS: Any = {"tokenizer": code_points}
LINES: Any = {**TOKENS, "unit": "line"}
FORMATS = {
    "images": Format(".png", _png, ImageDataset, _of_pixels, PIXELS),
    "texts": Format(".txt", _txt, TextDataset, _of_text, TOKENS),
    "lines": Format(".txt", _txt, TextDataset, _of_text, LINES),
    "hdf5": Format(".h5", _h5, HDF5Dataset, _of_row),
    "zarr": Format(".zarr", _zarr, ZarrDataset, _of_row),
    "tar": Format(".tar", _tar, StreamingDataset, lambda sample: int(sample["txt"])),
    "jsonl shards": Format(".jsonl", _jsonl, StreamingDataset, lambda sample: sample["number"]),
    "txt shards": Format(".txt", _txt, StreamingDataset, int),
    "hdf5 shards": Format(".h5", _h5, StreamingDataset, _of_row),
    "zarr shards": Format(".zarr", _zarr, StreamingDataset, _of_row),
}
EXPRESSIONS: list[tuple[list[str], list[int]]] = [
    (["part-001{end}"], [1]),
    (["part-002{end}", "part-000{end}"], [0, 2]),
    ([""], [0, 1, 2]),
    (["part-00[12]{end}"], [1, 2]),
    (["part-*"], [0, 1, 2]),
    (["**/part-*{end}"], [0, 1, 2]),
    (["part-{{000..001}}{end}"], [0, 1]),
    (["part-00{{2,0}}{end}"], [0, 2]),
    (["part-{{000,00[12]}}{end}"], [0, 1, 2]),
    (["part-00[2]{end}", "part-{{000..001}}{end}"], [0, 1, 2]),
]


def places(folder: Path, entries: list[str], ending: str) -> list[list[Any]]:
    """An expression as paths, as Path objects and as URLs."""
    names = [entry.format(end=ending) for entry in entries]
    urls: list[Any] = [f"{folder.as_uri()}/{name}" for name in names]
    return [[str(folder / name) for name in names], [folder / name for name in names], urls]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of three files of each format, a hidden one and one of another kind."""
    made, parent = {}, tmp_path_factory.mktemp("formats")
    for name, one in FORMATS.items():
        made[name] = folder = parent / name.replace(" ", "-")
        folder.mkdir()
        for number in range(3):
            one.write(folder / f"part-{number:03d}{one.ending}", number)
        one.write(folder / f".part-003{one.ending}", 3)
        (folder / "notes.dat").write_bytes(b"of no kind")
    return made


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.quick_every(2)
def test_an_expression_means_the_same_files(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    one, folder = FORMATS[name], folders[name]
    ways = [one.open]
    if one.open is not StreamingDataset or name == "tar":
        ways.append(open_dataset)
    for turn, (entries, expected) in enumerate(EXPRESSIONS):
        for number, place in enumerate(places(folder, entries, one.ending)):
            if name != "texts" and number != turn % 3:
                continue  # one resolver
            path = place if len(place) > 1 else place[0]
            for opens in ways:
                assert one.numbers(path, opens, cache_dir=tmp_path) == expected, path


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["images"].parent


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.quick_every(2)
def test_queries_caches_and_missing_files(
    folders: dict[str, Path], server: RangeServer, tmp_path: Path, name: str
) -> None:
    one, folder = FORMATS[name], folders[name]
    at = f"{server.url}/{folder.name}"
    files = [f"part-{number:03d}{one.ending}" for number in range(3)]
    urls = [f"{at}/{files[number]}?signature=a/b.{number}" for number in (2, 0)]
    assert one.numbers(urls, cache_dir=tmp_path) == [0, 2]
    if one.open is not StreamingDataset or name == "tar":
        assert one.numbers(urls, open_dataset, cache_dir=tmp_path) == [0, 2]
    if one.ending != ".zarr":
        url = f"simplecache::{folder.as_uri()}/{files[1]}"
        assert one.numbers(url, cache_dir=tmp_path) == [1]
    with pytest.raises(ConfigError):
        one.open([f"{folder}/{files[0]}", f"{folder.as_uri()}/{files[1]}"])
    for missing in ("part-7*", "part-{7,8}", "none"):
        with pytest.raises(DataNotFoundError):
            one.open([folder / files[0], folder / (missing + one.ending)])


@pytest.mark.parametrize("name", ["images", "tar", "hdf5"])
def test_members_of_an_archive(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    one = FORMATS[name]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for path in folders[name].glob("part-*"):
            file.write(path, f"inside/{path.name}")
    archive = f"::{(tmp_path / 'all.zip').as_uri()}"
    for inside, expected in (("001", [1]), ("*", [0, 1, 2]), ("{000..001}", [0, 1])):
        url = f"zip://inside/part-{inside}{one.ending}{archive}"
        assert one.numbers(url, cache_dir=tmp_path) == expected
