"""Zarr stores behind URLs are what they are on a disk, in every mode, by few requests."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs.numcodecs
from zarr.codecs import Crc32cCodec, ZstdCodec

from headrace import ConfigError, DataNotFoundError, MissingNameError, SampleError, ZarrDataset
from headrace.errors import AccessError, FileChangedError, FormatError
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

N = 40
ROWS = np.random.default_rng(0).integers(-1000, 1000, (N, 6, 5)).astype("i4")
CHECKED = [ZstdCodec(), Crc32cCodec()]
ARRAYS: dict[str, Any] = {
    "raw of a row": {"chunks": (1, 6, 5), "compressors": None},
    "raw": {"chunks": (4, 6, 5), "compressors": None},
    "zstd": {"chunks": (4, 6, 5), "compressors": [ZstdCodec()]},
    "cut": {"chunks": (4, 3, 5), "compressors": [ZstdCodec()]},
    "shards": {"chunks": (2, 6, 5), "shards": (8, 6, 5), "compressors": [ZstdCodec()]},
    "raw shards": {"chunks": (2, 6, 5), "shards": (8, 6, 5), "compressors": None},
    "checked": {"chunks": (2, 6, 5), "shards": (8, 6, 5), "compressors": CHECKED},
    "checked files": {"chunks": (4, 6, 5), "compressors": [Crc32cCodec()]},
    "index first": {"chunks": (2, 6, 5), "shards": {"shape": (8, 6, 5), "index_location": "start"}},
    "by zarr-python": {
        "chunks": (4, 6, 5),
        "filters": [zarr.codecs.numcodecs.Delta(dtype="<i4")],
        "compressors": None,
    },
}


def zipped(folder: Path, name: str, store: str, method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(folder / name, "w", method) as file:
        for path in sorted((folder / store).rglob("*")):
            if path.is_file():
                file.write(path, str(path.relative_to(folder / store)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    root = zarr.open_group(folder / "a.zarr", mode="w")
    for name, how in ARRAYS.items():
        root.create_array(name, shape=ROWS.shape, dtype="i4", **how)[...] = ROWS
    root.create_array("y", shape=(N,), dtype="i8", chunks=(7,))[...] = np.arange(N)
    for name, shards in (("sparse", None), ("sparse shards", (8, 6, 5))):
        sparse: Any = {"chunks": (4, 6, 5), "shards": shards, "fill_value": 7}
        root.create_array(name, shape=ROWS.shape, dtype="i4", **sparse)[8:12] = ROWS[8:12]
    old = zarr.open_group(folder / "b.zarr", mode="w", zarr_format=2)
    zlib: Any = {"chunks": (4, 6, 5), "compressors": numcodecs.Zlib(1)}
    old.create_array("x", shape=ROWS.shape, dtype="i4", **zlib)[...] = ROWS
    zarr.create_array(folder / "one.zarr", data=ROWS, chunks=(8, 6, 5))
    for version in (2, 3):
        group = zarr.open_group(folder / f"named{version}.zarr", mode="w", zarr_format=version)
        group.create_array("inner/only", shape=(3,), dtype="u1", chunks=(2,))[...] = [1, 2, 3]
        zarr.consolidate_metadata(group.store)
    zipped(folder, "a.zarr.zip", "a.zarr")
    zipped(folder, "packed.zip", "one.zarr", zipfile.ZIP_DEFLATED)
    return folder


@pytest.fixture
def far(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    made: list[ZarrDataset] = []

    def make(store: str, *args: Any, at: str = "", **options: Any) -> ZarrDataset:
        options = {"cache_dir": tmp_path / "cache", "deadline": 30, **options}
        made.append(ZarrDataset(f"{at or server.url}/{store}", *args, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def check_rows(dataset: ZarrDataset, near: ZarrDataset) -> None:
    assert len(dataset) == len(near) and dataset.fingerprint == near.fingerprint
    assert np.array_equal(dataset.blocks(), near.blocks())
    for indices in ([*range(N)], [5, 3, 39, 3], [0]):
        assert same(dataset.__getitems__(indices), near.__getitems__(indices))


# -- the same


@pytest.mark.parametrize("disk", [None, pytest.param("10MB", marks=pytest.mark.slow)])
def test_rows_are_those_of_the_disk(folder: Path, far: Any, disk: str | None) -> None:
    for name in ARRAYS:
        near = ZarrDataset(folder / "a.zarr", name, target_name="y")
        for _ in range(2):  # the second time by what was kept
            check_rows(far("a.zarr", name, target_name="y", disk_cache_size=disk), near)
        near.close()
    for store, array in (("b.zarr", "x"), ("one.zarr", None)):
        check_rows(far(store, array), ZarrDataset(folder / store, array))


def test_in_a_zip_file(folder: Path, far: Any) -> None:
    for name in ("raw", "shards", "index first", "by zarr-python", "sparse", "sparse shards"):
        near = ZarrDataset(folder / "a.zarr", name, target_name="y")
        for _ in range(2):
            dataset = far("a.zarr.zip", name, target_name="y")
            check_rows(dataset, near)
        if name == "shards":
            assert dataset.explain().count("ranges + zstd out of shards") == 1
        local = ZarrDataset(folder / "a.zarr.zip", name, target_name="y")
        assert same(list(local), list(near))
    check_rows(far("packed.zip"), ZarrDataset(folder / "one.zarr"))


# -- few requests


def test_opening_takes_few_requests(server: RangeServer, far: Any) -> None:
    dataset = far("a.zarr", "checked")
    assert {Path(name).name for name, _, _ in server.counts()["ranges"]} == {"zarr.json"}
    assert np.array_equal(dataset[0], ROWS[0])
    assert len(server.counts()["ranges"]) == 2  # the index of its shard, and its chunk
    assert np.array_equal(dataset[3], ROWS[3])
    assert len(server.counts()["ranges"]) == 1
    assert np.array_equal(pickle.loads(pickle.dumps(dataset))[39], ROWS[39])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_chunk_files_and_blocks_of_shards_are_fetched_once(
    server: RangeServer, far: Any, make_loader: Any, workers: int
) -> None:
    for name, blocks, shards in (("zstd", 10, 0), ("checked", 20, 5)):
        dataset = far("a.zarr", name, loading_mode="streaming")
        loader = make_loader(dataset, batch_size=4, num_workers=workers, interleave=2, turns=2)
        server.counts()
        assert sum(map(len, loader)) == N
        counts = server.counts()
        of_shards = shards * max(1, workers)  # each process reads the indices that it needs
        assert blocks <= len(counts["ranges"]) <= blocks + of_shards + 2 * 2 - 1
        assert counts["requests"] <= len(counts["ranges"]) + of_shards
        loader.close()


# -- what is missing, replaced, damaged


def test_missing_chunks(far: Any) -> None:
    for name in ("sparse", "sparse shards"):
        for disk in (None, "1MB"):
            dataset = far("a.zarr", name, missing="error", disk_cache_size=disk)
            assert np.array_equal(dataset[9], ROWS[9])
            with pytest.raises(SampleError, match=rf"chunk \(0, 0, 0\) of '{name}'"):
                dataset[0]


def test_names(folder: Path, far: Any) -> None:
    for version in (2, 3):
        assert len(far(f"named{version}.zarr")) == 3
        with pytest.raises(MissingNameError, match="'inner/only'"):
            far(f"named{version}.zarr", "x")
    for names in ([], ["x"]):
        with pytest.raises(MissingNameError, match="names of its arrays are not known"):
            far("a.zarr", *names)
    with pytest.raises(MissingNameError, match=r"'none'.*'checked'"):
        far("a.zarr", "none", at=f"file://{folder}")


def test_what_is_no_store(server: RangeServer, far: Any, folder: Path) -> None:
    (folder / "text.zip").write_text("no zip file")
    for store, error in (
        ("nothing.zarr", DataNotFoundError),
        ("nothing.zip", DataNotFoundError),
        ("text.zip", FormatError),
    ):
        with pytest.raises(error, match=store):
            far(store)
    with pytest.raises(ConfigError):
        ZarrDataset([f"{server.url}/a.zarr", str(folder / "a.zarr")], "zstd")
    with pytest.raises(DataNotFoundError, match=r"none\*\.zarr"):
        far("none*.zarr", at=f"file://{folder}")


def test_who_may_not_read_a_chunk_is_told_so(server: RangeServer, far: Any) -> None:
    """And gets no fill values for it."""
    # a file of its own, or a shard
    for name, kind in (("zstd", SampleError), ("sparse", SampleError), ("checked", AccessError)):
        server.set(faults={})
        dataset = far("a.zarr", name)
        server.set(faults={"403": 1})
        with pytest.raises(kind, match="access is denied"):
            dataset[0]


@pytest.fixture
def changing(folder: Path) -> Iterator[Path]:
    """A store of one array of shards, to be changed."""
    place = folder / "changing.zarr"
    zarr.create_array(place, data=ROWS, **ARRAYS["checked"])
    yield place
    shutil.rmtree(place)


def test_a_replaced_shard_is_an_error_until_reopened(changing: Path, far: Any) -> None:
    dataset = far("changing.zarr")
    assert np.array_equal(dataset[0], ROWS[0])
    zarr.open_array(changing)[8:16] = 1
    assert np.array_equal(dataset[20], ROWS[20])
    with pytest.raises((SampleError, FileChangedError), match="has been replaced"):
        dataset[8]
    dataset = far("changing.zarr")
    assert (dataset[8] == 1).all()
    zarr.open_array(changing)[...] = ROWS + 1  # the same metadata
    assert np.array_equal(np.stack(far("changing.zarr").__getitems__([*range(N)])), ROWS + 1)


@pytest.mark.parametrize(
    ("at", "lost", "said"),
    [(-9, 8, r"c/1/0/0, the index of the shard"), (5, 2, r"chunk \(4, 0, 0\)")],
    ids=["index", "chunk"],
)
def test_a_shard_that_is_damaged(changing: Path, far: Any, at: int, lost: int, said: str) -> None:
    """There it is an error; on the way it is fetched again."""
    shard = changing / "c" / "1" / "0" / "0"
    content = bytearray(shard.read_bytes())
    content[at] ^= 1
    shard.write_bytes(content)
    for mode in ("lazy", "streaming"):
        dataset = far("changing.zarr", on_error="skip", loading_mode=mode)
        with pytest.raises(SampleError, match=said):
            dataset.__getitems__([8])
        assert len(dataset.__getitems__([0, 8, 9, 10])) == (1 if lost == 8 else 2)
        assert len(list(dataset)) == N - lost
    content[at] ^= 1
    shard.write_bytes(content)
    assert np.array_equal(far("changing.zarr")[8], ROWS[8])


def test_wrong_bytes_on_the_way_are_fetched_again(server: RangeServer, far: Any) -> None:
    for store, name in (("a.zarr", "checked"), ("a.zarr", "checked files"), ("a.zarr.zip", "zstd")):
        dataset = far(store, name)
        assert np.array_equal(dataset[0], ROWS[0])
        server.set(faults={"wrong": 1}, most=1)
        assert np.array_equal(dataset[5], ROWS[5])
        assert server.counts()["faults"] == {"wrong": 1}
