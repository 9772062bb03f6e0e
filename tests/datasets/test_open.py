"""open_dataset: which dataset opens a path."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import zarr

from headrace import (
    EpisodeDataset,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    SparseDataset,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
    open_dataset,
    pack,
    read_rows,
    write_index,
)
from headrace.errors import ConfigError, DataNotFoundError, FormatError
from tests.data.make import make_shards
from tests.datasets.text.test_text import write

SHARDS = (4, 3)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write(make_shards(tmp_path / "shards", SHARDS), {"README.md": "which are shards"})


def test_tar_files_are_streamed(shards: Path) -> None:
    names = sorted(str(path) for path in shards.glob("*.tar"))
    for data_path in (
        shards,
        names[0],
        names,
        f"{shards}/*",
        names[0].replace("000", "{000..001}"),
    ):
        with open_dataset(data_path) as dataset:
            assert isinstance(dataset, StreamingDataset) and len(dataset) == (
                4 if data_path == names[0] else sum(SHARDS)
            )
    with pytest.raises(FormatError, match="unpack"):
        open_dataset(write(shards.parent / "packed", {"a.tar.gz": b"x"}))


@pytest.mark.parametrize("mode", ["lazy", "cached"])
def test_tar_files_in_other_modes(shards: Path, mode: str) -> None:
    with MemoryEfficientDataset(shards, loading_mode=mode, progress=False) as dataset:
        assert [sample["__key__"] for sample in dataset] == [
            sample["__key__"] for sample in (dataset[n] for n in range(sum(SHARDS)))
        ]


def test_hidden_files_do_not_decide(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        {"a.txt": "text", "._a.jpg": "", ".ipynb_checkpoints/b.jpg": "", ".cache/0.tar": ""},
    )
    assert type(open_dataset(folder)) is TextDataset


@pytest.mark.parametrize("saved", ["data-00000-of-00001.arrow", "train/0000.parquet"])
def test_tables_of_huggingface_are_no_texts(saved: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = write(
        tmp_path / "saved",
        {"dataset_info.json": "{}", "state.json": "{}", "README.md": "", saved: b""},
    )
    with pytest.raises(FormatError, match=f"{saved} is empty"):
        open_dataset(folder)
    with pytest.raises(
        FormatError, match=r"saved holds tables, and else no more .*: use TableDataset"
    ):
        TextDataset(folder)
    write(folder, {"notes.txt": "texts come first where others than those lie there"})
    assert type(open_dataset(folder)) is TextDataset


def test_a_folder_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"there are 2 \.h5: use HDF5Dataset"):
        ImageDataset(write(tmp_path / "arrays", {"a.h5": "", "b.h5": ""}))
    with pytest.raises(DataNotFoundError, match=r"there is 1 \.jpg: use ImageDataset"):
        TextDataset(write(tmp_path / "images", {"a/b.jpg": ""}))
    with pytest.raises(DataNotFoundError, match=r"there is 1 \.jsonl: use TextDataset"):
        ImageDataset(write(tmp_path / "texts", {"a.jsonl": json.dumps({"text": "x"})}))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train/one.txt", "train/two.txt", ".cache/a.jpg"), TextDataset),
        (("a/1.txt", "a/2.jpg"), ImageDataset),
        (("0.tar", "1.tar"), StreamingDataset),
        (("deep/arrays.zarr/zarr.json",), ZarrDataset),
        (("a/1.unknown",), ImageDataset),
    ],
)
def test_a_remote_folder_is_opened_by_what_lies_in_it(
    names: tuple[str, ...], expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fsspec.filesystem("memory")
    server.rm("/opened", recursive=True) if server.exists("/opened") else None
    for name in names:
        server.pipe_file(f"/opened/{name}", b"text")
    opened: list[type] = []
    for cls in {ImageDataset, TextDataset, StreamingDataset, ZarrDataset}:
        monkeypatch.setattr(
            cls, "__init__", lambda self, *args, **options: opened.append(type(self))
        )
    open_dataset("memory://opened")
    assert opened == [expected]


def write_arrays(folder: Path, *names: str) -> Path:
    """Files of six rows: as their names say in HDF5 or Zarr."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".zarr"):
            zarr.open_group(folder / name, mode="w").create_array(
                "data", data=np.arange(12).reshape(6, 2)
            )
        else:
            with h5py.File(folder / name, "w") as file:
                file["data"] = np.arange(12).reshape(6, 2)
    return folder


OPENED: dict[str, Callable[[Any], Any]] = {
    "open_dataset": open_dataset, "sparse": SparseDataset, "episodes": EpisodeDataset,
    "read_rows": lambda path: read_rows(path, "data", [0]),
}  # fmt: skip


class TestHDF5BesideZarr:
    @pytest.mark.parametrize("opens", OPENED.values(), ids=OPENED)
    def test_both_are_named(self, opens: Callable[[Any], Any], tmp_path: Path) -> None:
        folder = write_arrays(tmp_path / "runs", "b.zarr", "a.h5", "c/d.h5")
        for path in (folder, f"{folder}/*"):
            files = "2 HDF5 files" if path == folder else "1 HDF5 file"
            wanted = (
                f"{path} holds {files} (a.h5) and 1 Zarr store (b.zarr), and a dataset reads one "
                "kind: pass a glob such as "
            )
            with pytest.raises(
                ConfigError,
                match=re.escape(
                    f"{wanted}'{folder}/*.h5' or '{folder}/*.zarr', or use HDF5Dataset or"
                ),
            ):
                opens(path)

    def test_relative_paths_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(write_arrays(tmp_path, "a.h5", "b.zarr"))
        for path, wanted in ((".", r"'\./\*\.h5'"), ("*", r"'\*\.h5'")):
            with pytest.raises(ConfigError, match=f"pass a glob such as {wanted}"):
                open_dataset(path)

    def test_what_the_message_says_helps(self, tmp_path: Path) -> None:
        folder = write_arrays(tmp_path / "runs", "a.h5", "b.zarr")
        for opened, cls in (
            (open_dataset(f"{folder}/*.h5"), HDF5Dataset),
            (open_dataset(f"{folder}/*.zarr"), ZarrDataset),
            (HDF5Dataset(folder), HDF5Dataset),
            (ZarrDataset(folder), ZarrDataset),
        ):
            with opened:
                assert type(opened) is cls and len(opened) == 6

    def test_what_is_no_data_does_not_count(self, tmp_path: Path) -> None:
        folder = write_arrays(tmp_path / "runs", "a.h5", "c.h5", ".cache.zarr", "deep/b.zarr")
        write_index(folder / "a.h5")
        with open_dataset(folder) as dataset:  # ZarrDataset finds no store deeper than that
            assert type(dataset) is HDF5Dataset and len(dataset) == 12
        with open_dataset(write_arrays(tmp_path / "stores", "a.zarr", "b.zarr")) as dataset:
            assert type(dataset) is ZarrDataset and len(dataset) == 12
        with open_dataset(pack(folder / "a.h5", tmp_path / "packed", format="zarr")) as dataset:
            assert type(dataset) is ZarrDataset and len(dataset) == 6

    def test_what_comes_before_both_is_opened(self, tmp_path: Path) -> None:
        folder = write(
            write_arrays(tmp_path / "runs", "a.h5", "b.zarr"),
            {"notes.txt": "documented: texts come first"},
        )
        assert type(open_dataset(folder)) is TextDataset
