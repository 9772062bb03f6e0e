"""A pack onto its own source is refused, whatever it is called."""

import os
import shutil

import fsspec
import h5py
import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset

from headrace import HDF5Dataset, MemoryEfficientDataset
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.packing import pack
from tests.data.make import make_photos

REFUSED = "a part of what is packed"


class OwnReader(Dataset):
    """A dataset of the user's, whose file headrace does not open."""

    def __init__(self, file):
        self.file = file

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros(3, np.float32)


@pytest.fixture
def here(tmp_path, monkeypatch):
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


def test_pack_onto_its_own_file(here):
    before = (here / "v1.h5").read_bytes()
    features = HDF5Dataset("v1.h5", "features")
    for dst in ("v1.h5", "link.h5", "hard.h5", "./photos/../v1.h5", here / "v1.h5"):
        for dry_run in (False, True):
            with pytest.raises(ConfigError, match=REFUSED):
                pack(features, dst, overwrite=True, dry_run=dry_run)
    for dataset in (
        features[:2],
        MemoryEfficientDataset(features),
        ConcatDataset([features, features]),
        OwnReader("v1.h5"),
    ):
        with pytest.raises(ConfigError, match=REFUSED):
            pack(dataset, "v1.h5", overwrite=True)
    with h5py.File("v1.h5") as file, pytest.raises(ConfigError, match=REFUSED):
        pack(OwnReader(file["labels"]), "v1.h5", overwrite=True)
    assert (
        main(["pack", "v1.h5", "link.h5", "--dataset-name", "features", "--overwrite", "-q"]) == 2
    )
    assert (here / "v1.h5").read_bytes() == before
    for _ in range(2):  # another file is replaced as ever
        pack(features, "new.h5", overwrite=True)


def test_pack_into_its_own_folder(here):
    for src, dst in (
        ("photos", "photos/new.h5"),
        ("album", "photos/new.h5"),
        ("photos", "album/new.h5"),
    ):
        with pytest.raises(ConfigError, match=REFUSED):
            pack(src, dst)
    for dst in ("photos", "photos/parts"):
        with pytest.raises(ConfigError, match=REFUSED):
            pack("photos", dst, shard_size="1KB")
    photo = next(here.glob("photos/*/*.[jJ]*"))
    assert main(["pack", str(photo), str(photo), "--overwrite"]) == 2
    assert main(["preview", str(photo), "-o", "./photos/../" + os.path.relpath(photo)]) == 2
    assert photo.read_bytes().startswith(b"\xff\xd8")


def test_repack_onto_a_pack_of_parts(here):
    pack("photos", "parts", shard_size="1KB")
    before = sorted(os.listdir("parts"))
    shutil.copytree("parts", "copy")
    for src in ("parts", "parts/manifest.json", "parts/part-*.h5"):
        with pytest.raises(ConfigError, match=REFUSED):
            pack(src, "parts", shard_size="1GB", overwrite=True)
    assert sorted(os.listdir("parts")) == before
    pack("parts", "copy", shard_size="1GB", overwrite=True)
    fsspec.filesystem("memory").pipe_file("/own/a.txt", b"a text")
    with pytest.raises(ConfigError, match=REFUSED):
        pack("memory://own", "memory://own/parts", shard_size="1GB")
