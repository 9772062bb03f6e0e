"""Messages say what a folder holds, and which class reads it; hidden files and folders stay out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import ImageDataset, TextDataset
from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.formats.resolve.file_set import READERS
from tests.formats.resolve.scanning import names_of, scan, touch

HIDDEN = ["__MACOSX/1.jpg", ".git/a.jpg", "cats/.cache/c.jpg", "._x.jpg", "cats/._y.jpg"]
HIDDEN += ["cats/.nfs0001.jpg"]


def test_urls_beside_local_paths() -> None:
    with pytest.raises(ConfigError, match=r"^the paths mix URLs and local paths"):
        ImageDataset(["a.jpg", "ftp://alice:secret@host"])


def test_a_folder_of_another_kind_says_what_is_there(tmp_path: Path, memory: Any) -> None:
    assert all(hasattr(headrace, name) for name in READERS)
    for number, (files, said) in enumerate(
        [
            (
                ["a/1.jpg", "a/2.JPG", "b/3.jpg", "notes.pdf"],
                "there are 3 .jpg and 1 .pdf: use ImageDataset",
            ),
            (["a.jsonl.gz", "b.jsonl.gz"], "there are 2 .jsonl.gz: use TextDataset"),
            (["raw.zarr/zarr.json", "raw.zarr/c/0"], "there is 1 .zarr: use ZarrDataset"),
            (["a.tfrecord.gz"], "there is 1 .tfrecord.gz: use open_dataset"),
            (["x.parquet"], "there is 1 .parquet: use TableDataset"),
            (["a.mp4", "b"], "there are 1 without an ending and 1 .mp4: check the path"),
            ([".hidden.jpg"], "nothing else is there: check the path"),
        ]
    ):
        url, folder = f"memory://{number}", tmp_path / str(number)
        touch(folder, *files)
        for name in files:
            memory.pipe_file(f"/{number}/{name}", b"x")
        places = [str(folder)]
        if ".zarr" not in said:  # there a store is its files
            places.append(url)
        for place in places:
            with pytest.raises(DataNotFoundError) as error:
                scan(place, (".xyz",))
            assert str(error.value).startswith(f"no file under {place} ends in any of .xyz; ")
            assert str(error.value).endswith(said)


def test_what_is_beside_tables_is_no_text(tmp_path: Path) -> None:
    for number, files in enumerate(
        [
            ["dataset_info.json", "state.json", "data-00000-of-00001.arrow"],
            ["dataset_dict.json", "a/state.json", "a/data.arrow", "b/state.json", "b/data.arrow"],
            ["README.md", "dataset_infos.json", "data/train-00000.parquet"],
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        touch(folder / "saved", *files)
        for cls in (TextDataset, ImageDataset):
            with pytest.raises((FormatError, DataNotFoundError), match="TableDataset"):
                cls(folder / "saved")
        assert len(TextDataset(folder / "saved" / files[0])) == 1  # named itself it is a text
        assert len(TextDataset(touch(folder / "alone", "README.md", "state.json"))) == 2


class TestHidden:
    def test_files_and_folders_count_where_they_are_named(
        self, tmp_path: Path, memory: Any
    ) -> None:
        touch(tmp_path, "cats/1.jpg", *HIDDEN)
        (tmp_path / ".link.jpg").symlink_to("cats/1.jpg")
        for name in ("cats/1.jpg", *HIDDEN):
            memory.pipe_file(f"/hidden/{name}", b"x")
        for path, wanted in {
            "": ["cats/1.jpg"],
            "/**/*.jpg": ["cats/1.jpg"],
            "/.git": ["a.jpg"],
            "/._x.jpg": ["._x.jpg"],
            "/cats/.*/*.jpg": [".cache/c.jpg"],
        }.items():
            for place in (tmp_path, "memory://hidden"):
                found = scan(f"{place}{path}", (".jpg",))
                assert names_of(found) == wanted, path
                assert all(not name.startswith(".") or "/.*/" in path for name in found.folders)
        assert ImageDataset(tmp_path).classes == ["cats"]
