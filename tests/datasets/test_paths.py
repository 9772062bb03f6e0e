"""A path means the same files in every dataset, in `open_dataset` and in `write_index`."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
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
    write_index,
)
from tests.servers.ranges import RangeServer

PIXELS: Any = {"image_size": None, "normalize": False, "targets": None}


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
    data = str(number).encode()
    with tarfile.open(path, "w") as file:
        member = tarfile.TarInfo("sample.txt")
        member.size = len(data)
        file.addfile(member, io.BytesIO(data))


class Format(NamedTuple):
    ending: str
    write: Callable[[Path, int], None]
    open: Callable[..., Any]
    number: Callable[[Any], int]
    """Of a sample: which file it is of."""
    options: Any = MappingProxyType({})

    def numbers(self, dataset: Any) -> list[int]:
        with dataset:
            return [self.number(sample) for sample in dataset]


def _of_text(sample: Any) -> int:
    return int("".join(map(chr, sample["input_ids"].tolist())))


FORMATS = {
    "images": Format(".png", _png, ImageDataset, lambda sample: int(sample[0][0, 0, 0]), PIXELS),
    "texts": Format(
        ".txt", _txt, TextDataset, _of_text, {"tokenizer": lambda text: list(map(ord, text))}
    ),
    "lines": Format(
        ".txt",
        _txt,
        TextDataset,
        _of_text,
        {"tokenizer": lambda text: list(map(ord, text)), "unit": "line"},
    ),
    "hdf5": Format(".h5", _h5, HDF5Dataset, lambda sample: int(sample[0])),
    "zarr": Format(".zarr", _zarr, ZarrDataset, lambda sample: int(sample[0])),
    "tar": Format(".tar", _tar, StreamingDataset, lambda sample: int(sample["txt"])),
    "jsonl shards": Format(
        ".jsonl", _jsonl, StreamingDataset, lambda sample: int(sample["number"])
    ),
    "txt shards": Format(".txt", _txt, StreamingDataset, int),
    "hdf5 shards": Format(".h5", _h5, StreamingDataset, lambda sample: int(sample[0])),
    "zarr shards": Format(".zarr", _zarr, StreamingDataset, lambda sample: int(sample[0])),
}
EXPRESSIONS: dict[str, tuple[Any, set[int]]] = {
    "a file": ("part-001{end}", {1}),
    "a list": (["part-002{end}", "part-000{end}"], {0, 2}),
    "a folder": ("", {0, 1, 2}),
    "a glob": ("part-00[12]{end}", {1, 2}),
    "a glob of all": ("part-*", {0, 1, 2}),
    "a recursive glob": ("**/part-*{end}", {0, 1, 2}),
    "braces": ("part-{{000..001}}{end}", {0, 1}),
    "names in braces": ("part-00{{2,0}}{end}", {0, 2}),
    "braces and a glob": ("part-{{000,00[12]}}{end}", {0, 1, 2}),
    "a list of all forms": (["part-00[2]{end}", "part-{{000..001}}{end}"], {0, 1, 2}),
}
WHERE: dict[str, Callable[[Path, str], Any]] = {
    "paths": lambda folder, name: str(folder / name),
    "Path objects": lambda folder, name: folder / name,
    "URLs": lambda folder, name: f"{folder.as_uri()}/{name}",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of three files of each format, a hidden one and one of another kind."""
    made = {}
    for name, one in FORMATS.items():
        made[name] = folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        for number in range(3):
            one.write(folder / f"part-{number:03d}{one.ending}", number)
        one.write(folder / f".part-003{one.ending}", 3)
        (folder / "notes.dat").write_bytes(b"of no kind")
    return made


@pytest.mark.quick_every(4)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_an_expression_means_the_same_files(
    folders: dict[str, Path], tmp_path: Path, name: str, expression: str, where: str
) -> None:
    one, (given, expected) = FORMATS[name], EXPRESSIONS[expression]
    entries = [given] if isinstance(given, str) else given
    paths = [WHERE[where](folders[name], entry.format(end=one.ending)) for entry in entries]
    path = paths[0] if isinstance(given, str) else paths
    assert set(one.numbers(one.open(path, cache_dir=tmp_path, **one.options))) == expected
    is_its_own = one.open is not StreamingDataset or name == "tar"
    # URLs are told by names
    if is_its_own and (
        where in ("paths", "Path objects") or expression not in ("a folder", "a glob of all")
    ):
        assert set(one.numbers(open_dataset(path, cache_dir=tmp_path, **one.options))) == expected


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("name", ["tar", "jsonl shards", "hdf5"])
def test_of_indices_too(
    folders: dict[str, Path], tmp_path: Path, name: str, expression: str
) -> None:
    folder, one, (given, expected) = tmp_path / "data", FORMATS[name], EXPRESSIONS[expression]
    shutil.copytree(folders[name], folder)
    entries = [given] if isinstance(given, str) else given
    for paths in (
        [str(folder / entry.format(end=one.ending)) for entry in entries],
        [f"{folder.as_uri()}/{entry.format(end=one.ending)}" for entry in entries],
    ):
        written = {Path(path.removeprefix("file://")).name for path in write_index(paths)}
        assert written == {f"part-{number:03d}{one.ending}.index" for number in expected}


@pytest.mark.parametrize("name", FORMATS)
def test_a_query_is_no_part_of_a_name(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    one = FORMATS[name]
    with RangeServer(folders[name]) as server:
        urls = [
            f"{server.url}/part-{number:03d}{one.ending}?signature=a/b.{number}"
            for number in (2, 0)
        ]
        options = {"cache_dir": tmp_path, **one.options}
        assert sorted(one.numbers(one.open(urls, **options))) == [0, 2]
        if one.open is not StreamingDataset or name == "tar":
            assert sorted(one.numbers(open_dataset(urls, **options))) == [0, 2]


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.ending != ".zarr"])
def test_through_a_cache_of_fsspec(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    one = FORMATS[name]
    url = f"simplecache::{folders[name].as_uri()}/part-001{one.ending}"
    assert one.numbers(one.open(url, cache_dir=tmp_path, **one.options)) == [1]


@pytest.mark.parametrize("name", ["images", "texts", "tar", "hdf5"])
def test_members_of_an_archive(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    one = FORMATS[name]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for number in range(3):
            file.write(
                folders[name] / f"part-{number:03d}{one.ending}",
                f"inside/part-{number:03d}{one.ending}",
            )
    archive = f"::{(tmp_path / 'all.zip').as_uri()}"
    for inside, expected in (
        ("part-001{}", [1]),
        ("part-*{}", [0, 1, 2]),
        ("part-{{000..001}}{}", [0, 1]),
    ):
        url = f"zip://inside/{inside.format(one.ending)}{archive}"
        assert sorted(one.numbers(one.open(url, cache_dir=tmp_path, **one.options))) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_refused(folders: dict[str, Path], name: str) -> None:
    one, folder = FORMATS[name], folders[name]
    with pytest.raises(ConfigError, match=r"^(data_path|urls) mixes URLs and local paths"):
        one.open([f"{folder}/part-000{one.ending}", f"{folder.as_uri()}/part-001{one.ending}"])
    for missing in ("part-7*" + one.ending, "part-{7,8}" + one.ending, "none" + one.ending):
        with pytest.raises(DataNotFoundError):
            one.open([folder / f"part-000{one.ending}", folder / missing])
