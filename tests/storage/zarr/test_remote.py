"""Zarr stores behind URLs are what they are on a disk, in every mode, by few requests."""

from __future__ import annotations

import itertools
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numcodecs
import numpy as np
import pytest
import torch
import zarr
import zarr.codecs.numcodecs
from zarr.codecs import Crc32cCodec, ZstdCodec

from headrace import (
    ConfigError,
    DataNotFoundError,
    MissingNameError,
    SampleError,
    StreamingDataset,
    ZarrDataset,
    open_dataset,
)
from headrace.errors import AccessError, FileChangedError, FormatError, RemoteError
from headrace.io.index import index_bytes
from headrace.io.remote import client as client_module
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles, below, with_index
from headrace.storage.zarr import shards as zarr_shards
from headrace.storage.zarr.shards import INDEX, indexed
from headrace.storage.zarr.stores import ZarrUrl
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

N = 40
ROWS = np.random.default_rng(0).integers(-1000, 1000, (N, 6, 5)).astype("i4")
VOLUME = np.random.default_rng(1).integers(-500, 500, (2, 9, 11, 13)).astype("i2")
LABELS = np.random.default_rng(2).integers(0, 5, (9, 11, 13)).astype("u1")
ARRAYS: dict[str, Any] = {
    "raw of a row": {"chunks": (1, 6, 5), "compressors": None},
    "raw": {"chunks": (4, 6, 5), "compressors": None},
    "zstd": {"chunks": (4, 6, 5), "compressors": [ZstdCodec()]},
    "cut": {"chunks": (4, 3, 5), "compressors": [ZstdCodec()]},
    "shards": {"chunks": (2, 6, 5), "shards": (8, 6, 5), "compressors": [ZstdCodec()]},
    "raw shards": {"chunks": (2, 6, 5), "shards": (8, 6, 5), "compressors": None},
    "checked": {
        "chunks": (2, 6, 5),
        "shards": (8, 6, 5),
        "compressors": [ZstdCodec(), Crc32cCodec()],
    },
    "checked files": {"chunks": (4, 6, 5), "compressors": [Crc32cCodec()]},
    "index first": {"chunks": (2, 6, 5), "shards": {"shape": (8, 6, 5), "index_location": "start"}},
    "by zarr-python": {
        "chunks": (4, 6, 5),
        "filters": [zarr.codecs.numcodecs.Delta(dtype="<i4")],
        "compressors": None,
    },
}


def some_slow(quick: Sequence[Any], every: Iterable[Any]) -> list[Any]:
    """All of them, of which only a few run with the quick tests."""
    return [one if one in quick else pytest.param(*one, marks=pytest.mark.slow) for one in every]


def write(folder: Path) -> None:
    root = zarr.open_group(folder / "a.zarr", mode="w")
    for name, how in ARRAYS.items():
        shards = how.get("shards")
        if isinstance(shards, dict):  # create_array has no word for the index's place
            codec = zarr.codecs.ShardingCodec(
                chunk_shape=how["chunks"], index_location=shards["index_location"]
            )
            array = zarr.create_array(
                root.store,
                name=name,
                shape=ROWS.shape,
                dtype="i4",
                chunks=shards["shape"],
                serializer=codec,
                compressors=None,
            )
        else:
            array = root.create_array(name, shape=ROWS.shape, dtype="i4", **how)
        array[...] = ROWS
    root.create_array("y", shape=(N,), dtype="i8", chunks=(7,))[...] = np.arange(N)
    for name, shards in (("sparse", None), ("sparse shards", (8, 6, 5))):
        array = root.create_array(
            name, shape=ROWS.shape, dtype="i4", chunks=(4, 6, 5), shards=shards, fill_value=7
        )
        array[8:12] = ROWS[8:12]
    root.create_array(
        "volume", shape=VOLUME.shape, dtype="i2", chunks=(1, 4, 5, 6), shards=(2, 8, 10, 12)
    )[...] = VOLUME
    root.create_array("labels", shape=LABELS.shape, dtype="u1", chunks=(4, 4, 4))[...] = LABELS
    old = zarr.open_group(folder / "b.zarr", mode="w", zarr_format=2)
    old.create_array(
        "x", shape=ROWS.shape, dtype="i4", chunks=(4, 6, 5), compressors=numcodecs.Zlib(1)
    )[...] = ROWS
    zarr.create_array(folder / "one.zarr", data=ROWS, chunks=(8, 6, 5))
    for version in (2, 3):
        group = zarr.open_group(folder / f"named{version}.zarr", mode="w", zarr_format=version)
        group.create_array("inner/only", shape=(3,), dtype="u1", chunks=(2,))[...] = [1, 2, 3]
        zarr.consolidate_metadata(group.store)
    with zipfile.ZipFile(folder / "a.zarr.zip", "w", zipfile.ZIP_STORED) as file:
        for path in sorted((folder / "a.zarr").rglob("*")):
            if path.is_file():
                file.write(path, str(path.relative_to(folder / "a.zarr")))
    with zipfile.ZipFile(folder / "packed.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted((folder / "one.zarr").rglob("*")):
            if path.is_file():
                file.write(path, str(path.relative_to(folder / "one.zarr")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    write(made)
    return made


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a process has waited for answers, however many requests each time, since the
    last call.
    """
    count, together = [0], client_module.together

    async def counted(*args: Any) -> Any:
        count[0] += 1
        return await together(*args)

    monkeypatch.setattr(client_module, "together", counted)

    def taken() -> int:
        found, count[0] = count[0], 0
        return found

    return taken


@pytest.fixture
def far(server: RangeServer, tmp_path: Path) -> Iterator[Any]:
    made: list[ZarrDataset] = []

    def make(store: str, *args: Any, at: str = "", **options: Any) -> ZarrDataset:
        made.append(
            ZarrDataset(
                f"{at or server.url}/{store}",
                *args,
                **{"cache_dir": tmp_path / "cache", "deadline": 30, **options},
            )
        )
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return all(map(same, found, expected))
    return torch.equal(found, expected) if torch.is_tensor(expected) else bool(found == expected)


def check_rows(dataset: ZarrDataset, near: ZarrDataset) -> None:
    assert len(dataset) == len(near) and dataset.fingerprint == near.fingerprint
    assert np.array_equal(dataset.blocks(), near.blocks())
    for some in ([*range(N)], [5, 3, 39, 3], [0]):
        assert all(map(same, dataset.__getitems__(some), near.__getitems__(some)))


# -- the same


@pytest.mark.quick_every(4)
@pytest.mark.parametrize(
    ("name", "disk"),
    some_slow(
        [("raw", None), ("zstd", "10MB"), ("index first", None), ("by zarr-python", None)],
        itertools.product(ARRAYS, [None, "10MB"]),
    ),
)
def test_rows_are_those_of_the_disk(folder: Path, far: Any, name: str, disk: str | None) -> None:
    near = ZarrDataset(folder / "a.zarr", name, target_name="y")
    for _ in range(2):  # the second time by what was kept
        check_rows(far("a.zarr", name, target_name="y", disk_cache_size=disk), near)
    near.close()


@pytest.mark.parametrize("store", ["b.zarr", "one.zarr"])
def test_version_2_and_an_array_that_is_the_store(folder: Path, far: Any, store: str) -> None:
    near = ZarrDataset(folder / store, "x" if store == "b.zarr" else None)
    check_rows(far(store, "x" if store == "b.zarr" else None), near)


@pytest.mark.parametrize(
    ("name",),
    some_slow(
        [("shards",), ("sparse",)], [(name,) for name in [*ARRAYS, "sparse", "sparse shards"]]
    ),
)
def test_in_a_zip_file(folder: Path, far: Any, name: str) -> None:
    near = ZarrDataset(folder / "a.zarr", name, target_name="y")
    dataset = far("a.zarr.zip", name, target_name="y")
    check_rows(dataset, near)
    if name == "shards":
        assert dataset.explain().count("ranges + zstd out of shards") == 1
    check_rows(far("a.zarr.zip", name, target_name="y"), near)
    assert all(
        same(a, b)
        for a, b in zip(
            ZarrDataset(folder / "a.zarr.zip", name, target_name="y"), near, strict=True
        )
    )


def test_in_a_zip_file_that_is_compressed(far: Any) -> None:
    dataset = far("packed.zip")
    assert "zarr-python: a zip file that is compressed itself" in dataset.explain()
    assert all(same(dataset[index], torch.from_numpy(ROWS[index])) for index in (0, 39, 17))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_in_a_zip_file_below_a_folder(folder: Path, far: Any, method: int) -> None:
    with zipfile.ZipFile(folder / f"rooted{method}.zip", "w", method) as file:
        for path in sorted((folder / "one.zarr").rglob("*")):
            file.write(path, str(path.relative_to(folder)))
    dataset = far(f"rooted{method}.zip")
    assert all(same(dataset[index], torch.from_numpy(ROWS[index])) for index in (0, 39, 17))


def test_strings_and_several_volumes(
    folder: Path, server: RangeServer, far: Any, tmp_path: Path
) -> None:
    words = [f"word {number}" for number in range(9)]
    zarr.create_array(folder / "words.zarr", shape=(9,), chunks=(4,), dtype="string")[...] = words
    assert list(far("words.zarr")) == words
    zarr.create_array(folder / "second.zarr", data=VOLUME[:, :6], chunks=(1, 4, 5, 6))
    near = [
        ZarrDataset(folder / "a.zarr", "volume", patch_shape=4),
        ZarrDataset(folder / "second.zarr", patch_shape=4),
    ]
    zarr.create_array(folder / "first.zarr", data=VOLUME, chunks=(2, 4, 5, 6))
    both = ZarrDataset(
        [f"{server.url}/{name}.zarr" for name in ("first", "second")],
        patch_shape=4,
        cache_dir=tmp_path,
    )
    assert all(same(a, b) for a, b in zip(both, itertools.chain(*near), strict=True))


def test_heads_of_a_zip_file_that_its_directory_does_not_tell(folder: Path, far: Any) -> None:
    """Longer ones than the directory says, and gaps."""
    with zipfile.ZipFile(folder / "odd.zip", "w", zipfile.ZIP_STORED) as file:
        for path in sorted((folder / "one.zarr").rglob("*")):
            if path.is_file():
                info = zipfile.ZipInfo(str(path.relative_to(folder / "one.zarr")))
                info.extra = b"\x99\x99\x04\x00abcd"
                file.writestr(info, path.read_bytes())
                info.extra = b""  # what the directory says
                file.fp.write(b"gap")  # type: ignore[union-attr]
                file.start_dir = file.fp.tell()  # type: ignore[union-attr]
    dataset = far("odd.zip")
    assert all(same(dataset[index], torch.from_numpy(ROWS[index])) for index in (0, 39, 17))


@pytest.mark.parametrize(
    ("name", "mode"),
    some_slow(
        [
            ("sparse", "streaming"),
            ("raw", "streaming"),
            ("sparse shards", "streaming"),
            ("checked", "eager"),
            ("zstd", "cached"),
        ],
        itertools.product(
            ["zstd", "checked", "sparse", "sparse shards", "raw", "by zarr-python"],
            ["lazy", "eager", "cached", "streaming"],
        ),
    ),
)
def test_every_mode_in_a_loader(
    folder: Path, far: Any, make_loader: Any, mode: str, name: str
) -> None:
    for shuffle in (True, "block"):
        options: dict[str, Any] = {"target_name": "y", "loading_mode": mode, "return_index": True}
        loaders = [
            make_loader(dataset, batch_size=6, num_workers=0, shuffle=shuffle, seed=3)
            for dataset in (
                far("a.zarr", name, **options),
                ZarrDataset(folder / "a.zarr", name, **options),
            )
        ]
        for _ in range(2):
            found, expected = (
                [[part.clone() for part in batch] for batch in loader] for loader in loaders
            )
            assert len(found) == 7 and all(
                same(tuple(a), tuple(b)) for a, b in zip(found, expected, strict=True)
            )
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize(
    ("name", "method"),
    some_slow(
        [("checked", "fork"), ("by zarr-python", "fork")],
        itertools.product(["checked", "by zarr-python"], ["fork", "spawn"]),
    ),
)
def test_in_two_workers_after_the_parent_has_read(
    far: Any, make_loader: Any, name: str, method: str
) -> None:
    dataset = far("a.zarr", name, loading_mode="streaming", return_index=True)
    assert same(next(iter(dataset))[0].shape, (6, 5))
    loader = make_loader(dataset, batch_size=6, num_workers=2, multiprocessing_context=method)
    found = {
        int(index): row
        for rows, indices in loader
        for row, index in zip(rows, indices, strict=True)
    }
    assert sorted(found) == [*range(N)] and all(
        np.array_equal(found[index], ROWS[index]) for index in range(N)
    )
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True, "block"])
@pytest.mark.parametrize("name", [*ARRAYS, "sparse", "sparse shards"])
def test_every_array_in_two_workers(
    folder: Path, far: Any, make_loader: Any, name: str, shuffle: Any
) -> None:
    near = ZarrDataset(folder / "a.zarr", name, target_name="y")
    for mode, disk in (
        ("lazy", None),
        ("cached", "10MB"),
        ("streaming", None),
        ("streaming", "10MB"),
    ):
        dataset = far(
            "a.zarr",
            name,
            target_name="y",
            loading_mode=mode,
            disk_cache_size=disk,
            return_index=True,
        )
        loader = make_loader(
            dataset, batch_size=6, num_workers=2, shuffle=shuffle, multiprocessing_context="fork"
        )
        given = [(rows.clone(), targets.clone(), indices) for rows, targets, indices in loader]
        assert sorted(int(index) for _, _, indices in given for index in indices) == [*range(N)]
        for rows, targets, indices in given:
            for row, target, index in zip(rows, targets, indices, strict=True):
                assert same((row, target), near[int(index)])
        loader.close()


@pytest.mark.parametrize(
    ("edges", "mode"),
    some_slow([("pad", "streaming")], itertools.product(["drop", "pad"], ["lazy", "streaming"])),
)
def test_patches(folder: Path, far: Any, make_loader: Any, mode: str, edges: str) -> None:
    options: dict[str, Any] = {
        "patch_shape": (4, 4, 5),
        "stride": 3,
        "edges": edges,
        "loading_mode": mode,
    }
    for shuffle in (True, "block"):
        near = ZarrDataset(folder / "a.zarr", "volume", target_name="labels", **options)
        dataset = far("a.zarr", "volume", target_name="labels", **options)
        assert dataset.fingerprint == near.fingerprint and np.array_equal(
            dataset.blocks(), near.blocks()
        )
        loaders = [
            make_loader(one, batch_size=5, num_workers=0, shuffle=shuffle)
            for one in (dataset, near)
        ]
        for found, expected in zip(*loaders, strict=True):
            assert all(map(same, found, expected))
        assert mode != "streaming" or dataset.sample_source.files.bytes_prefetched == 0
        for loader in loaders:
            loader.close()


def test_memory_and_file_urls(folder: Path, far: Any) -> None:
    near = ZarrDataset(folder / "a.zarr", "checked", target_name="y")
    memory = fsspec.filesystem("memory")
    memory.put(str(folder / "a.zarr"), "/zarr-far/a.zarr", recursive=True)
    memory.put(str(folder / "a.zarr.zip"), "/zarr-far/a.zarr.zip")
    try:
        for at in ("memory://zarr-far", f"file://{folder}"):
            for _ in range(2):
                check_rows(far("a.zarr", "checked", target_name="y", at=at), near)
            check_rows(far("a.zarr.zip", "checked", target_name="y", at=at), near)
            with pytest.raises(
                MissingNameError,
                match=r"has no array 'none'; it has: 'volume', .*'by zarr-python', .* and 5 more",
            ):
                far("a.zarr", "none", at=at)
    finally:
        memory.rm("/zarr-far", recursive=True)


def test_several_stores(folder: Path, far: Any, server: RangeServer) -> None:
    near = ZarrDataset([folder / "a.zarr", folder / "b.zarr"][:1] * 2, "zstd", target_name="y")
    dataset = ZarrDataset([f"{server.url}/a.zarr"] * 2, "zstd", target_name="y")
    assert (
        dataset.fingerprint == near.fingerprint
        and same(dataset[N + 3], near[N + 3])
        and dataset.targets.tolist() == [*range(N)] * 2
    )
    dataset.close()
    glob = far("one*.zarr", at=f"file://{folder}")
    assert len(glob) == N and same(glob[7], torch.from_numpy(ROWS[7]))
    assert isinstance(open_dataset(f"{server.url}/one.zarr"), ZarrDataset)


def test_a_streaming_dataset(server: RangeServer, folder: Path, tmp_path: Path) -> None:
    urls = [f"{server.url}/a.zarr", f"{server.url}/a.zarr.zip"]
    dataset = StreamingDataset(
        urls, dataset_name="checked", target_name="y", seed=5, cache_dir=tmp_path
    )
    near = StreamingDataset(
        [str(folder / "a.zarr"), str(folder / "a.zarr.zip")],
        dataset_name="checked",
        target_name="y",
        seed=5,
    )
    assert len(dataset) == 2 * N and dataset.fingerprint == near.fingerprint
    assert all(same(found, expected) for found, expected in zip(dataset, near, strict=True))
    dataset.close()


# -- few requests


def test_opening_with_an_index_takes_three_round_trips(
    server: RangeServer, far: Any, trips: Any
) -> None:
    far("a.zarr", "checked").close()
    trips(), server.counts()
    dataset = far("a.zarr", "checked")
    assert trips() == 3  # metadata; is the index of these? are some shards?
    server.counts()
    assert np.array_equal(dataset[0], ROWS[0]) and trips() == 1
    assert len(server.counts()["ranges"]) == 1
    assert far("a.zarr", "zstd") and trips() == 1


def test_chunk_files_and_blocks_of_shards_are_fetched_once(
    server: RangeServer, far: Any, make_loader: Any
) -> None:
    for name, blocks, most in (("zstd", 10, 2), ("checked", 20, 0)):
        for workers in {0, most}:
            dataset = far("a.zarr", name, loading_mode="streaming")
            loader = make_loader(dataset, batch_size=4, num_workers=workers, interleave=2, turns=2)
            server.counts()
            assert sum(map(len, loader)) == N
            counts = server.counts()
            assert blocks <= len(counts["ranges"]) <= blocks + 2 * 2 - 1
            assert counts["requests"] == len(counts["ranges"])
            loader.close()


def test_a_bytes_window_holds_whole_files(far: Any) -> None:
    dataset = far("a.zarr", "zstd", loading_mode="streaming")
    source = dataset.sample_source
    assert source.byte_ranges(np.arange(8)).size == 2
    source.files.prefetch([source.byte_ranges(np.arange(8))])
    assert source.files.bytes_prefetched > 0
    assert np.array_equal(source.read([0, 7])[1], ROWS[7]) and source.files.bytes_prefetched == 0


def test_many_shard_indices_are_read_together(
    far: Any, trips: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_shards, "_MADE", 3)
    dataset = far("a.zarr", "checked")
    trips()
    assert all(
        np.array_equal(found, expected)
        for found, expected in zip(dataset.__getitems__([*range(N)]), ROWS, strict=True)
    )
    assert trips() == 3  # versions, indices, chunks
    dataset = far("a.zarr", "checked", loading_mode="streaming")
    trips()
    assert len(list(dataset)) == N
    assert dataset.sample_source.locating_needs_io and trips() <= 2 + 20


def test_an_index_that_was_written_elsewhere(
    folder: Path, server: RangeServer, far: Any, trips: Any, tmp_path: Path
) -> None:
    url = f"file://{folder}/a.zarr"
    files = RemoteFiles(url, RemoteOptions(cache_dir=tmp_path / "other"))
    urls = [one for one in indexed(ZarrUrl(url, files)) if "/checked/" in one]
    arrays = INDEX.make(files, urls[0])
    beside = folder / "a.zarr" / "checked" / "zarr.json.index"
    beside.write_bytes(index_bytes(arrays, INDEX, files.version(urls[0]).size))
    files.close()
    try:
        trips()
        dataset = far("a.zarr", "checked")
        assert trips() == 3  # metadata; is there an index? the index
        server.counts()
        assert np.array_equal(dataset[39], ROWS[39])
        # of the one shard: its version, a chunk
        assert trips() == 2 and server.counts()["requests"] == 2
        arrays[0][:] += 1
        beside.write_bytes(
            index_bytes(arrays, INDEX, (folder / "a.zarr" / "checked" / "zarr.json").stat().st_size)
        )
        with pytest.raises(
            (SampleError, FileChangedError),
            match="by the index that was written of it: it has been replaced",
        ):
            far("a.zarr", "checked", cache_dir=tmp_path / "none")[0]
    finally:
        beside.unlink()


# -- what is missing, replaced, damaged


@pytest.mark.quick_every(1)
def test_missing_chunks(far: Any) -> None:
    for name in ("sparse", "sparse shards"):
        for disk in (None, "1MB"):
            dataset = far("a.zarr", name, missing="error", disk_cache_size=disk)
            assert np.array_equal(dataset[9], ROWS[9])
            with pytest.raises(
                SampleError, match=rf"chunk \(0, 0, 0\) of '{name}' is missing, and missing='error'"
            ):
                dataset[0]


def test_names(far: Any) -> None:
    for version in (2, 3):
        assert len(far(f"named{version}.zarr")) == 3
        with pytest.raises(MissingNameError, match="has no array 'x'; it has: 'inner/only'"):
            far(f"named{version}.zarr", "x")
    with pytest.raises(
        MissingNameError,
        match=(
            r"a.zarr: the names of its arrays are not known.*name one as dataset_name, or "
            r"consolidate"
        ),
    ):
        far("a.zarr")
    with pytest.raises(
        MissingNameError, match="has no array 'x'; the names of its arrays are not known"
    ):
        far("a.zarr", "x")


def test_what_is_no_store(server: RangeServer, far: Any, folder: Path) -> None:
    with pytest.raises(
        DataNotFoundError,
        match=(
            r"nothing.zarr: there is no Zarr store: none of zarr.json, .zgroup and .zarray is "
            r"found"
        ),
    ):
        far("nothing.zarr")
    with pytest.raises(DataNotFoundError, match=r"nothing.zip: there is no such file"):
        far("nothing.zip")
    (folder / "text.zip").write_text("no zip file")
    with pytest.raises(FormatError, match=r"text.zip is damaged, or holds what zipfile can't read"):
        far("text.zip")
    with pytest.raises(ConfigError, match="mixes URLs and local paths"):
        ZarrDataset([f"{server.url}/a.zarr", str(folder / "a.zarr")], "zstd")
    with pytest.raises(DataNotFoundError, match=r"nothing matches file://.*none\*\.zarr"):
        far("none*.zarr", at=f"file://{folder}")
    server.set(faults={"403": 1})
    with pytest.raises(AccessError, match="access is denied"):
        far("a.zarr", "zstd")
    server.set(faults={"503": 1})
    with pytest.raises(RemoteError, match="the server says 503"):
        far("a.zarr", "zstd", retries=0)


@pytest.mark.parametrize("name", ["zstd", "checked", "sparse"])
def test_who_may_not_read_a_chunk_is_told_so(server: RangeServer, far: Any, name: str) -> None:
    """And gets no fill values for it."""
    dataset = far("a.zarr", name)
    server.set(faults={"403": 1})
    # a file of its own, or a shard
    with pytest.raises(SampleError if name != "checked" else AccessError, match="access is denied"):
        dataset[0]


@pytest.fixture
def changing(folder: Path) -> Iterator[Path]:
    """A store of one array of shards, to be changed."""
    place = folder / "changing.zarr"
    zarr.create_array(
        place,
        data=ROWS,
        chunks=(2, 6, 5),
        shards=(8, 6, 5),
        compressors=[ZstdCodec(), Crc32cCodec()],
    )
    yield place
    shutil.rmtree(place)


def test_replaced_shard_is_an_error_until_reopened(changing: Path, far: Any) -> None:
    dataset = far("changing.zarr")
    assert np.array_equal(dataset[0], ROWS[0])
    zarr.open_array(changing)[8:16] = 1
    assert np.array_equal(dataset[20], ROWS[20])
    with pytest.raises(
        (SampleError, FileChangedError), match="the file has been replaced since it was opened"
    ):
        dataset[8]
    assert np.array_equal(far("changing.zarr")[8], np.ones((6, 5)))


def test_shards_are_looked_at_when_a_store_is_opened_again(changing: Path, far: Any) -> None:
    far("changing.zarr").close()
    zarr.open_array(changing)[...] = ROWS + 1  # the same metadata
    dataset = far("changing.zarr")
    assert all(
        np.array_equal(found, row + 1)
        for found, row in zip(dataset.__getitems__([*range(N)]), ROWS, strict=True)
    )


def test_a_shard_that_was_missing_and_is_written(changing: Path, far: Any) -> None:
    (changing / "c" / "2" / "0" / "0").unlink()
    assert not far("changing.zarr")[16].any()
    zarr.open_array(changing)[16:24] = 5
    assert (far("changing.zarr")[16] == 5).all()


def test_a_metadata_file_that_is_replaced_begins_a_new_index(changing: Path, far: Any) -> None:
    assert len(far("changing.zarr")) == N
    shutil.rmtree(changing)
    zarr.create_array(changing, data=ROWS[:24], chunks=(4, 6, 5), shards=(8, 6, 5))
    dataset = far("changing.zarr")
    assert len(dataset) == 24 and np.array_equal(dataset[23], ROWS[23])


@pytest.mark.parametrize("place", ["index", "chunk"])
def test_a_shard_that_is_damaged(changing: Path, server: RangeServer, far: Any, place: str) -> None:
    """There it is an error; on the way it is fetched again."""
    shard = changing / "c" / "1" / "0" / "0"
    content = bytearray(shard.read_bytes())
    content[-9 if place == "index" else 5] ^= 1
    shard.write_bytes(content)
    said = (
        r"c/1/0/0, the index of the shard: wrong checksum"
        if place == "index"
        else r"chunk \(4, 0, 0\).*wrong checksum \(crc32c\)"
    )
    for mode in ("lazy", "streaming"):
        dataset = far("changing.zarr", on_error="skip", loading_mode=mode)
        with pytest.raises(SampleError, match=said):
            dataset.__getitems__([8])
        assert len(dataset.__getitems__([0, 8, 9, 10])) == (1 if place == "index" else 2)
        assert len(list(dataset)) == (N - 8 if place == "index" else N - 2)
    content[-9 if place == "index" else 5] ^= 1
    shard.write_bytes(content)
    assert np.array_equal(far("changing.zarr")[8], ROWS[8])


@pytest.mark.parametrize(
    ("store", "name", "disk"),
    [
        ("a.zarr", "checked", None),
        ("a.zarr", "checked files", None),
        ("a.zarr", "checked files", "10MB"),
        ("a.zarr.zip", "checked", None),
        ("a.zarr.zip", "zstd", None),
    ],
)
def test_wrong_bytes_on_the_way_are_fetched_again(
    server: RangeServer, far: Any, store: str, name: str, disk: str | None
) -> None:
    dataset = far(store, name, disk_cache_size=disk)
    server.set(faults={"wrong": 0.4})
    for index in range(0, N, 2):
        for _ in range(30):  # wrong again and again is an error
            try:
                found = dataset[index]
            except SampleError as error:
                assert "checksum" in str(error)
                continue
            assert np.array_equal(found, ROWS[index])
            break
        else:
            raise AssertionError("always wrong")
    assert server.counts()["faults"]["wrong"] > 0 and dataset.sample_reader.counts["refetched"] > 0


def test_labels_of_an_image(tmp_path: Path) -> None:
    """OME-NGFF 0.5: levels by voxel size, and labels of other voxels."""
    root = zarr.open_group(tmp_path / "i.zarr", mode="w")
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]

    def levels(scales: list[float]) -> dict[str, Any]:
        datasets = [
            {
                "path": str(number),
                "coordinateTransformations": [{"type": "scale", "scale": [scale] * 3}],
            }
            for number, scale in enumerate(scales)
        ]
        return {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}

    root.attrs["ome"] = levels([1.0, 2.0])
    for number, size in enumerate((16, 8)):
        data = np.arange(size**3, dtype="u2").reshape((size,) * 3)
        root.create_array(
            str(number), shape=data.shape, dtype="u2", chunks=(4,) * 3, shards=(8,) * 3
        )[...] = data
    cells = root.create_group("labels/cells")
    cells.attrs["ome"] = levels([0.5])
    data = np.random.default_rng(0).integers(0, 9, (32,) * 3).astype("u1")
    cells.create_array("0", shape=data.shape, dtype="u1", chunks=(8,) * 3)[...] = data
    options: dict[str, Any] = {"target_name": "cells", "patch_shape": (4, 4, 4), "scale": 2.0}
    near = ZarrDataset(tmp_path / "i.zarr", **options)
    dataset = ZarrDataset(f"file://{tmp_path}/i.zarr", **options, cache_dir=tmp_path / "cache")
    assert dataset.voxel_size == near.voxel_size and dataset.axes == near.axes and len(dataset) == 8
    assert (
        dataset.sample_source.is_remote and dataset.sample_source.byte_ranges(np.arange(8)).size > 0
    )
    assert all(same(dataset[index], near[index]) for index in range(8))
    dataset.close()


@pytest.mark.parametrize(
    ("url", "name", "found"),
    [
        ("s3://b/a.zarr", "x/c/0", "s3://b/a.zarr/x/c/0"),
        ("s3://b/a.zarr/", "x", "s3://b/a.zarr/x"),
        ("https://h/a.zarr?key=1", "x", "https://h/a.zarr/x?key=1"),
        ("simplecache::s3://b/a.zarr", "x", "simplecache::s3://b/a.zarr/x"),
        ("zip://::s3://b/a.zip", "x", "zip:///x::s3://b/a.zip"),
    ],
)
def test_urls_below_a_store(url: str, name: str, found: str) -> None:
    assert below(url, name) == found and with_index(found).count(".index") == 1
