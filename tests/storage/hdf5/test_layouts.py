"""Layouts that are kept give the same datasets without h5py, and none of files that changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset, StreamingDataset
from headrace.errors import FileChangedError, FormatError
from headrace.storage.hdf5.remote import RemoteHDF5
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

N = 60
NAMES = ("a.h5", "b.h5", "c.h5")


def write(path: Path, seed: int = 0) -> None:
    draws = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["raw"] = draws.integers(0, 256, (N, 40), np.uint8)
        packed = draws.integers(0, 9, (N, 70), np.int32)
        how: Any = {"compression": "gzip", "shuffle": True}
        file.create_dataset("packed", data=packed, chunks=(8, 70), **how)
        sparse = file.create_dataset("sparse", (N, 4), np.float64, chunks=(1, 4), fillvalue=2.5)
        sparse[5] = seed
        sums = draws.integers(0, 9, (N, 7), np.int16)
        file.create_dataset("sums", data=sums, chunks=(16, 7), fletcher32=True)
        file["big"] = draws.integers(0, 9, (N, 3)).astype(">i4")
        library = draws.integers(0, 9, (N, 40), np.int32)
        file.create_dataset("library", data=library, chunks=(16, 40), compression="lzf")
        file["texts"] = [f"text {number}" for number in range(N)]
        file["targets"] = np.arange(N) + 100 * seed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server serves; each test has files of its own in it."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture
def shards(folder: Path, tmp_path: Path) -> Path:
    made = folder / tmp_path.name
    made.mkdir()
    for seed, name in enumerate(NAMES):
        write(made / name, seed)
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What h5py opened, of a server."""
    paths, before = list[str](), RemoteHDF5.open

    def noted(self: RemoteHDF5, path: str) -> Any:
        paths.append(path)
        return before(self, path)

    monkeypatch.setattr(RemoteHDF5, "open", noted)
    return paths


@pytest.fixture
def far_of(server: RangeServer, shards: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(name: Any, of: Any = HDF5Dataset, names: Any = NAMES, **options: Any) -> Any:
        urls = [f"{server.url}/{shards.name}/{one}" for one in names]
        made.append(of(urls, dataset_name=name, cache_dir=tmp_path / "cache", **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def kept(tmp_path: Path, kind: str = "layout") -> list[Path]:
    return list((tmp_path / "cache").glob(f"headrace-hdf5-{kind}-*"))


def test_kept_layouts_give_the_same(
    far_of: Any, shards: Path, tmp_path: Path, opened: list[str]
) -> None:
    indices = [0, 5, N + 5, 3 * N - 1, 17]
    layouts = 0
    for name in ("raw", "packed", "sparse", "sums", "big", ["raw", "packed"]):
        target = "targets" if name in ("packed", "big") else None
        layouts += 1
        near = HDF5Dataset([shards / one for one in NAMES], name, target_name=target)
        for attempt in range(2):
            opened.clear()
            far = far_of(name, target_name=target)
            assert bool(opened) != bool(attempt) and len(kept(tmp_path)) == layouts, name
            assert far.fingerprint == near.fingerprint
            assert np.array_equal(far.blocks(), near.blocks()) and len(far) == 3 * N
            ways = [
                way.replace("ranges", "pread") for way in far.sample_source.describe().ways.values()
            ]
            assert ways == list(near.sample_source.describe().ways.values())
            assert same(far.__getitems__(indices), near.__getitems__(indices))
            assert target is None or np.array_equal(far.targets, near.targets)
        near.close()
    opened.clear()
    far_of("raw", names=NAMES[:2])
    assert opened and len(kept(tmp_path)) == layouts + 1
    source = far_of("raw").sample_source.sources[1]
    assert source.column("targets").tolist() == [*range(100, 100 + N)] and source.has_column("big")


def test_what_is_not_read_directly_has_no_layout(
    far_of: Any, tmp_path: Path, opened: list[str]
) -> None:
    cases: list[tuple[str, Any]] = [
        ("library", {}),
        ("texts", {}),
        ("raw", {"direct": False}),
        ("raw", {"axis": 1}),
        ("raw", {"target_name": "texts"}),
    ]
    for name, options in cases:
        for _ in range(2):
            opened.clear()
            far_of(name, **options)[3]
            assert opened and not kept(tmp_path), (name, options)


def test_damaged_layouts_are_not_used(far_of: Any, tmp_path: Path, opened: list[str]) -> None:
    first = far_of("raw")[2 * N]
    (file,) = kept(tmp_path)
    whole = bytearray(file.read_bytes())
    whole[4096] ^= 1
    for content in (bytes(whole), bytes(whole[:-9]), b""):
        file.write_bytes(content)
        opened.clear()
        assert same(far_of("raw")[2 * N], first) and opened


def test_a_bad_file_among_others_leaves_nothing_running(
    far_of: Any, shards: Path, tmp_path: Path
) -> None:
    """The index of the one before it is kept; what is on its way is not waited for."""
    (shards / "b.h5").write_bytes(b"no HDF5 file" * 100)
    with pytest.raises(FormatError, match=r"http://.*/b\.h5"):
        far_of("raw")
    assert len(kept(tmp_path, "index")) == 1 and not kept(tmp_path)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("headrace-keep")]


@pytest.mark.falls_back
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_shard_replaced_while_it_streams(
    far_of: Any, shards: Path, make_loader: Any, workers: int
) -> None:
    """It was opened by its layout."""
    far_of("raw", of=StreamingDataset)
    for name in ("a.h5", "c.h5"):
        far = far_of("raw", of=StreamingDataset)
        write(shards / name, 9)
        loader = make_loader(far, batch_size=4, num_workers=workers, shuffle="block")
        with pytest.raises(FileChangedError, match=rf"http://.*/{name}"):
            list(loader)
        far_of("raw", of=StreamingDataset)
