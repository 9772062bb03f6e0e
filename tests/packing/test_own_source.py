"""A pack onto its own source is refused, whatever it is called."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset

from headrace import HDF5Dataset, MemoryEfficientDataset
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.packing import pack
from tests.data.make import make_photos

refused = partial(pytest.raises, ConfigError, match="a part of the data to pack")


class OwnReader(Dataset[Any]):
    """A dataset of the user's, whose file headrace does not open."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return np.zeros(3, np.float32)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an HDF5 file by three names, and photos by two."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("v1.h5", "w") as file:
        file["features"] = np.zeros((5, 3), np.float32)
        file["labels"] = np.arange(5)
    os.symlink("v1.h5", "link.h5")
    os.link("v1.h5", "hard.h5")
    make_photos(tmp_path / "photos", ("noise", "circle"), 2)
    os.symlink("photos", "album")
    return tmp_path


def test_pack_onto_its_own_file(here: Path) -> None:
    before = (here / "v1.h5").read_bytes()
    features = HDF5Dataset("v1.h5", "features")
    for dst in ("v1.h5", "link.h5", "hard.h5", "./photos/../v1.h5", here / "v1.h5"):
        for dry_run in (False, True):
            with refused():
                pack(features, dst, overwrite=True, dry_run=dry_run)
    wrapped = [
        *(features[:2], MemoryEfficientDataset(features)),
        *(ConcatDataset([features, features]), OwnReader("v1.h5")),
    ]
    for dataset in wrapped:
        with refused():
            pack(dataset, "v1.h5", overwrite=True)
    with h5py.File("v1.h5") as file, refused():
        pack(OwnReader(file["labels"]), "v1.h5", overwrite=True)
    command = ["pack", "v1.h5", "link.h5", "--dataset-name", "features", "--overwrite", "-q"]
    assert main(command) == 2
    assert (here / "v1.h5").read_bytes() == before
    for _ in range(2):  # another file is replaced as ever
        pack(features, "new.h5", overwrite=True)


def test_pack_into_its_own_folder(here: Path) -> None:
    for src, dst in (("photos", "photos/a.h5"), ("album", "photos/a.h5"), ("photos", "album/a.h5")):
        with refused():
            pack(src, dst)
    for dst in ("photos", "photos/parts"):
        with refused():
            pack("photos", dst, shard_size="1KB")
    photo = next(here.glob("photos/*/*.[jJ]*"))
    assert main(["pack", str(photo), str(photo), "--overwrite"]) == 2
    assert main(["preview", str(photo), "-o", "./photos/../" + os.path.relpath(photo)]) == 2
    assert photo.read_bytes().startswith(b"\xff\xd8")


def test_repack_onto_a_pack_of_parts(here: Path, memory: Any) -> None:
    pack("photos", "parts", shard_size="1KB")
    before = sorted(os.listdir("parts"))
    shutil.copytree("parts", "copy")
    for src in ("parts", "parts/manifest.json", "parts/part-*.h5"):
        with refused():
            pack(src, "parts", shard_size="1GB", overwrite=True)
    assert sorted(os.listdir("parts")) == before
    pack("parts", "copy", shard_size="1GB", overwrite=True)
    memory.pipe_file("/own/a.txt", b"a text")
    with refused():
        pack("memory://own", "memory://own/parts", shard_size="1GB")
    pack("photos", "memory://pack", shard_size="1KB")
    before = dict(memory.store)
    anew: dict[str, Any] = {"shard_size": "1GB", "overwrite": True}
    with refused():
        pack("memory://pack/manifest.json", "memory://pack", **anew)
    assert memory.store == before


def test_pack_onto_the_archive_of_its_files(here: Path) -> None:
    archive = shutil.make_archive("photos", "zip", "photos")
    before = Path(archive).read_bytes()
    for dst in (archive, "photos.zip"):
        with refused():
            pack(f"zip://**/*.jpg::{archive}", dst, overwrite=True)
    assert Path(archive).read_bytes() == before
