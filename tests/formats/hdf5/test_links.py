"""Datasets whose bytes lie in another file than the one that was named."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import (
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    HeadraceError,
    MissingNameError,
)
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.hdf5.tree import OpenHDF5

DATA = np.random.default_rng(0).integers(0, 1 << 30, (20, 3), np.int32)
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "raw": {"chunks": (4, 3)},
    "gzip": {"chunks": (4, 3), "compression": "gzip"},
    "lzf": {"chunks": (4, 3), "compression": "lzf"},
}


def write_target(path: Path, data: Any = DATA, **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w", **options) as file:
        for name, layout in LAYOUTS.items():
            file.create_dataset(f"g/{name}", data=data, **layout)
        file["g/text"] = [f"row {i}" for i in range(len(data))]
        file["labels"] = data[:, 0]
    return path


@pytest.fixture
def outer(tmp_path: Path) -> Path:
    """A file that leads by links of all kinds to `parts/target.h5`; larger than it, so that its
    bytes could be taken for the target's.
    """
    write_target(tmp_path / "parts" / "target.h5", userblock_size=512)
    with h5py.File(tmp_path / "parts" / "between.h5", "w") as file:
        file["chain"] = h5py.ExternalLink("target.h5", "/g")
    with h5py.File(tmp_path / "outer.h5", "w") as file:
        file["own"] = np.arange(20_000)
        file["group"] = h5py.ExternalLink("parts/target.h5", "/g")
        file["far/chain"] = h5py.ExternalLink(str(tmp_path / "parts" / "between.h5"), "chain")
        file["soft"] = h5py.SoftLink("/far/chain")
        file["labels"] = h5py.ExternalLink("parts/target.h5", "labels")
        for name in LAYOUTS:
            file[name] = h5py.ExternalLink("parts/target.h5", f"/g/{name}")
    return tmp_path / "outer.h5"


def rows(source: HDF5Source) -> Any:
    found = np.stack(source.read(range(len(source))))
    source.close()
    return found


def test_external_links_are_read_from_their_target(outer: Path) -> None:
    for way in ("", "group/", "far/chain/", "soft/"):
        for name, direct in itertools.product(LAYOUTS, (True, False)):
            source = HDF5Source(outer, way + name, OpenHDF5(direct=direct))
            assert source.is_direct == (direct and name != "lzf")
            copy = pickle.loads(pickle.dumps(source))
            assert np.array_equal(rows(source), DATA) and np.array_equal(rows(copy), DATA)


def test_a_link_is_followed_from_where_the_file_lies(
    outer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outer.parent)
    source = HDF5Source("outer.h5", "lzf")
    (outer.parent / "elsewhere").mkdir()
    monkeypatch.chdir(outer.parent / "elsewhere")
    assert np.array_equal(rows(source), DATA)
    os.symlink(outer, "link.h5")
    assert np.array_equal(rows(HDF5Source("link.h5", "gzip")), DATA)


def test_a_target_that_has_changed_is_an_error(outer: Path) -> None:
    names = ("contiguous", "gzip", "lzf", "group/text")
    sources = [HDF5Source(outer, name) for name in names]
    for source in sources:
        source.read([3])
        source.close()
    write_target(outer.parent / "parts" / "target.h5", DATA + 1, userblock_size=512)
    for source in sources:
        with pytest.raises(FileChangedError, match=r"target\.h5"):
            source.read([4])
        source.close()


def test_a_target_that_is_gone_is_named(outer: Path) -> None:
    sources = [HDF5Source(outer, name) for name in ("lzf", "group/text")]
    for source in sources:
        source.close()
    os.remove(outer.parent / "parts" / "target.h5")
    for source in sources:
        with pytest.raises(DataNotFoundError, match=r"target\.h5, which holds .*is missing"):
            source.read([4])
        source.close()


def test_links_that_lead_nowhere_say_where(outer: Path) -> None:
    with h5py.File(outer, "r+") as file:
        file["gone"] = h5py.ExternalLink("nowhere.h5", "/x")
        file["no name"] = h5py.ExternalLink("parts/target.h5", "/g/zzz")
        file["words"] = h5py.ExternalLink("words.h5", "/x")
        file["circle"] = h5py.ExternalLink("outer.h5", "circle")
    (outer.parent / "words.h5").write_text("words")
    for name, error, said in (
        ("gone", DataNotFoundError, r"outer\.h5.*'gone'.*'nowhere\.h5'"),
        ("no name", MissingNameError, r"target\.h5.*'/?g/zzz'.*g/contiguous"),
        ("group/x/y", MissingNameError, r"target\.h5.*'/?g/x/y'"),
        ("words", FormatError, r"words\.h5"),
        ("circle", HeadraceError, "circle"),
    ):
        with pytest.raises(error, match=said):
            HDF5Dataset(outer, name)


# -- virtual datasets and external storage


def write_virtual(path: Path, source: str) -> Path:
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout(DATA.shape, DATA.dtype)
        layout[:] = h5py.VirtualSource(source, "g/gzip", DATA.shape)
        file.create_virtual_dataset("x", layout, fillvalue=-1)
    return path


def write_external(path: Path, storage: Path | str) -> Path:
    with h5py.File(path, "w") as file:
        parts = [(str(storage), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("x", data=DATA, external=parts)
    return path


FINDS = """
import sys, h5py
from headrace import HDF5Dataset, HeadraceError
for path in sys.argv[1:]:
    with h5py.File(path) as file:
        try:
            print(int(file["x"][:].sum()))
        except OSError:
            print("missing")
    try:
        print(sum(int(row.sum()) for row in HDF5Dataset(path, "x")))
    except HeadraceError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "{parts}", "/nowhere:{parts}", "${{ORIGIN}}/parts"])
def test_parts_are_found_as_hdf5_finds_them(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources of virtual datasets, with another file of that name beside or none, and external
    storage. In a process of its own, since HDF5 reads its environment once.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("only.h5", "both.h5"):
        write_target(tmp_path / "parts" / name)
    write_target(tmp_path / "both.h5", DATA + 1)
    sources = ("only.h5", "both.h5", "/nowhere/only.h5", "none.h5")
    paths = [write_virtual(tmp_path / f"{i}.h5", source) for i, source in enumerate(sources)]
    paths.append(write_external(tmp_path / "external.h5", "raw.bin"))
    if prefix:
        os.rename("raw.bin", "parts/raw.bin")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for name in ("HDF5_VDS_PREFIX", "HDF5_EXTFILE_PREFIX"):
        environment[name] = prefix.format(parts=tmp_path / "parts")
    command = [sys.executable, "-c", FINDS, *map(str, paths)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    found = run.stdout.splitlines()
    for path, by_hdf5, by_headrace in zip(paths, found[::2], found[1::2], strict=True):
        # for sources that are missing HDF5 gives the fill value
        if by_hdf5 in ("missing", str(-DATA.size)):
            assert "is missing" in by_headrace or "does not exist" in by_headrace, path
        else:
            assert by_headrace == by_hdf5, path


def test_a_part_that_has_changed_is_an_error(tmp_path: Path) -> None:
    for how in ("rewritten", "replaced", "removed"):
        target = write_target(tmp_path / "t.h5")
        source = HDF5Source(write_virtual(tmp_path / f"{how}.h5", "t.h5"), "x")
        assert np.array_equal(source.read([2])[0], DATA[2])
        if how == "rewritten":
            with h5py.File(target, "r+") as file:
                file["g/gzip"][5] = 0
        elif how == "replaced":
            os.replace(write_target(tmp_path / "b.h5", DATA + 1), target)
        else:
            os.remove(target)
        with pytest.raises((FileChangedError, DataNotFoundError), match=r"t\.h5"):
            source.read([5])
        source.close()
    storage = tmp_path / "raw.bin"
    source = HDF5Source(write_external(tmp_path / "a.h5", storage), "x")
    assert np.array_equal(source.read([2])[0], DATA[2])
    storage.write_bytes(bytes(DATA.nbytes))
    with pytest.raises(FileChangedError, match=r"raw\.bin"):
        source.read([3])
    source.close()


def test_sources_that_a_pattern_names_are_refused(tmp_path: Path) -> None:
    h5s, plist = h5py.h5s, h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5s.create_simple((30, 3), (h5s.UNLIMITED, 3))
    space.select_hyperslab((0, 0), (h5s.UNLIMITED, 1), (10, 1), (10, 3))
    plist.set_virtual(space, b"part %b.h5", b"x", h5s.create_simple((10, 3)))
    with h5py.File(tmp_path / "virtual.h5", "w", libver="latest") as file:
        space = h5s.create_simple((30, 3), (h5s.UNLIMITED, 3))
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, plist)
    with pytest.raises(FormatError, match=r"'part %b\.h5', which is not supported"):
        HDF5Source(tmp_path / "virtual.h5", "x")
