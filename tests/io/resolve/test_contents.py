"""Messages say what a folder holds, and which class reads it; hidden files and folders stay out."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from headrace import (
    HDF5Dataset,
    ImageDataset,
    SparseDataset,
    StreamingDataset,
    TableDataset,
    TextDataset,
    ZarrDataset,
)
from headrace.errors import DataNotFoundError, FormatError
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.contents import READERS, summary_of
from tests.io.resolve.scanning import scan
from tests.io.resolve.test_scan import names, touch

HIDDEN = (
    "__MACOSX/1.jpg",
    ".git/a.jpg",
    ".ipynb_checkpoints/b.jpg",
    "cats/.cache/c.jpg",
    "._x.jpg",
    "cats/._y.jpg",
    "cats/.nfs0001.jpg",
)


def test_readers_are_the_classes_that_there_are() -> None:
    classes = (
        ImageDataset,
        TextDataset,
        HDF5Dataset,
        SparseDataset,
        ZarrDataset,
        StreamingDataset,
        TableDataset,
    )
    assert list(READERS) == [cls.__name__ for cls in classes]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ["a/1.jpg", "a/2.JPG", "b/3.jpg", "notes.pdf"],
            "there are 3 .jpg and 1 .pdf: use ImageDataset",
        ),
        (["a.jsonl.gz", "b.jsonl.gz"], "there are 2 .jsonl.gz: use TextDataset"),
        (["train.h5"], "there is 1 .h5: use HDF5Dataset"),
        (["raw.zarr/zarr.json", "raw.zarr/c/0"], "there is 1 .zarr: use ZarrDataset"),
        (["0.tar", "1.tar"], "there are 2 .tar: use StreamingDataset"),
        (["a.mp4", "b"], "there are 1 without an ending and 1 .mp4: is the path right?"),
        ([".hidden.jpg"], "nothing else is there: is the path right?"),
    ],
)
def test_a_folder_of_another_kind_says_what_is_there(
    files: list[str], said: str, tmp_path: Path
) -> None:
    memory = fsspec.filesystem("memory")
    for name in files:
        memory.pipe_file(f"/contents/{name}", b"x")
    try:
        for server, folder in (
            (None, str(touch(tmp_path, *files))),
            (RemoteFiles("memory://contents", RemoteOptions()), "memory://contents"),
        ):
            with pytest.raises(DataNotFoundError) as error:
                scan(folder, (".xyz",), server)
            assert str(error.value).startswith(f"no file under {folder} ends in any of .xyz; ")
            # there a store is its files
            assert str(error.value).endswith(said) or (server is not None and ".zarr" in said)
    finally:
        memory.rm("/contents", recursive=True)


def test_a_glob_without_a_match_says_no_more(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    with pytest.raises(
        DataNotFoundError,
        match=r"^nothing matches .*\*\.jpg \(working folder: .*\): is the path right\?$",
    ):
        scan(str(tmp_path / "*.jpg"), (".jpg", ".png"))
    with pytest.raises(
        DataNotFoundError, match=r"ends in any of \.jpg; there is 1 \.png: use ImageDataset"
    ):
        scan(str(tmp_path / "*"), (".jpg",))


@pytest.mark.parametrize(
    "files",
    [
        ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"],
        [
            "dataset_dict.json",
            *(f"{part}/{name}" for part in "ab" for name in ("state.json", "data.arrow")),
        ],
        ["README.md", "dataset_infos.json", "data/train-00000.parquet"],
    ],
)
def test_what_is_beside_tables_is_no_text(files: list[str], tmp_path: Path) -> None:
    touch(tmp_path / "saved", *files)
    for cls in (TextDataset, ImageDataset):
        with pytest.raises((FormatError, DataNotFoundError), match="use TableDataset"):
            cls(tmp_path / "saved")
    assert len(TextDataset(tmp_path / "saved" / files[0])) == 1  # named itself it is a text


def test_readme_alone_is_a_text(tmp_path: Path) -> None:
    assert len(TextDataset(touch(tmp_path, "README.md", "state.json"))) == 2
    assert summary_of(["x.parquet"]).startswith("there is 1 .parquet: use TableDataset")


class TestHidden:
    def test_files_and_folders_do_not_count(self, tmp_path: Path) -> None:
        touch(tmp_path, "cats/1.jpg", *HIDDEN)
        (tmp_path / ".link.jpg").symlink_to("cats/1.jpg")
        found = scan(tmp_path, (".jpg",))
        assert names(found) == ["cats/1.jpg"] and found.folders == ("cats",)
        assert names(scan(str(tmp_path / "**/*.jpg"), (".jpg",))) == ["cats/1.jpg"]
        assert ImageDataset(tmp_path).classes == ["cats"]

    def test_count_where_they_are_named(self, tmp_path: Path) -> None:
        touch(tmp_path, "cats/1.jpg", *HIDDEN)
        assert names(scan(tmp_path / ".git", (".jpg",))) == ["a.jpg"]
        assert names(scan(tmp_path / "._x.jpg", (".jpg",))) == ["._x.jpg"]
        assert names(scan(str(tmp_path / "cats" / ".*" / "*.jpg"), (".jpg",))) == [".cache/c.jpg"]

    def test_of_a_server(self) -> None:
        memory = fsspec.filesystem("memory")
        for name in ("cats/1.jpg", *HIDDEN):
            memory.pipe_file(f"/hidden/{name}", b"x")
        server = RemoteFiles("memory://hidden", RemoteOptions())
        try:
            for url, wanted in {
                "memory://hidden": ["cats/1.jpg"],
                "memory://hidden/**/*.jpg": ["cats/1.jpg"],
                "memory://hidden/.git": ["a.jpg"],
                "memory://hidden/._x.jpg": ["._x.jpg"],
                "memory://hidden/cats/.*/*.jpg": [".cache/c.jpg"],
            }.items():
                found = scan(url, (".jpg",), server)
                assert names(found) == wanted
                assert all(not folder.startswith(".") or "/.*/" in url for folder in found.folders)
        finally:
            memory.rm("/hidden", recursive=True)

    def test_a_kept_listing_has_none(self, tmp_path: Path) -> None:
        touch(tmp_path / "data", "cats/1.jpg", *HIDDEN)
        for _ in range(2):
            assert names(scan(tmp_path / "data", (".jpg",), cache_dir=str(tmp_path / "kept"))) == [
                "cats/1.jpg"
            ]
