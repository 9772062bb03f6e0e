"""Where the files of a pack go: a folder, or a prefix of a store."""

from __future__ import annotations

from pathlib import Path

from headrace import ImageDataset, open_dataset, pack
from headrace.packing import pack_status
from headrace.packing.destination import FolderDestination


def test_a_file_vanishes_while_sizes_are_taken(tmp_path: Path) -> None:
    """Another job renames its temporary file between the listing and the look at it: what is
    there counts all the same.
    """
    for folder in (tmp_path, tmp_path / "below"):
        folder.mkdir(exist_ok=True)
        (folder / "part.h5").write_bytes(b"12")
        (folder / ".part.h5.1234.part").symlink_to("gone")
    destination = FolderDestination(tmp_path)
    assert destination.sizes()["part.h5"] == 2 and destination.sizes("below") == {
        "below/part.h5": 2
    }
    assert (
        FolderDestination(tmp_path / "missing").sizes()
        == FolderDestination(tmp_path / "missing").sizes("below")
        == {}
    )


def test_a_file_url_is_a_folder_of_this_machine(photos: Path, tmp_path: Path) -> None:
    for kind in ("hdf5", "zarr"):
        out = pack(photos, f"file://{tmp_path}/{kind}", shard_size="16kB", format=kind)
        assert Path(out) == tmp_path / kind and pack_status(f"file://{tmp_path}/{kind}").joined
        assert open_dataset(out).fingerprint == ImageDataset(photos).fingerprint
