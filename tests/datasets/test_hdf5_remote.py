"""Samples of remote HDF5 files are those of local ones, in every mode; and what becomes of what
goes wrong on the way.
"""

import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import BaseDataset, HDF5Dataset, ImageDataset, StreamingDataset, open_dataset, pack
from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceWarning,
    SampleError,
)
from headrace.io.cache.blocks import block_key
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

N = 400
NAMES = ["raw", "tall", "packed", "library", "texts", ["raw", "packed"]]
QUICK = {
    ("raw", "lazy"),
    ("tall", "cached"),
    ("packed", "streaming"),
    ("texts", "eager"),
    ("['raw', 'packed']", "streaming"),
}


def write(path: Path, seed: int = 0) -> None:
    draws = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["raw"] = draws.integers(0, 256, (N, 40), np.uint8)
        file.create_dataset(
            "tall", data=draws.integers(0, 256, (N, 3, 40), np.uint8), chunks=(16, 3, 40)
        )
        file.create_dataset(
            "packed",
            data=draws.integers(0, 9, (N, 700), np.int32),
            chunks=(16, 700),
            compression="gzip",
            shuffle=True,
        )
        file.create_dataset(
            "library",
            data=draws.integers(0, 9, (N, 40), np.int32),
            chunks=(16, 40),
            compression="lzf",
        )
        file["texts"] = [f"text {number}" for number in range(N)]
        file["targets"] = np.arange(N)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    made = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("a.h5", "b.h5")):
        write(made / name, seed)
    for store in ("encoded", "decoded"):
        pack(ImageDataset(photos, image_size=32), made / f"{store}.h5", store=store, workers=1)
    return made


@pytest.fixture
def far_of(server: RangeServer, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(name: Any, *arguments: Any, of: Any = HDF5Dataset, **options: Any) -> Any:
        urls = [f"{server.url}/{one}" for one in ([name] if isinstance(name, str) else name)]
        options = {"cache_dir": tmp_path / "cache", "deadline": 30, "retries": 5, **options}
        made.append(of(urls[0] if isinstance(name, str) else urls, *arguments, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.storage.blocks.LONGEST", 8_000)


def epoch_of(loader: Any) -> list[Any]:
    """Copies: a batch lies in a buffer that is used again."""
    return [pickle.loads(pickle.dumps(batch)) for batch in loader]


# -- one value, one order


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(
            name,
            mode,
            id=f"{name}-{mode}",
            marks=() if (str(name), mode) in QUICK else pytest.mark.slow,
        )
        for name in NAMES
        for mode in ("lazy", "cached", "eager", "streaming")
    ],
)
def test_samples_are_those_of_near_files(
    far_of: Any, folder: Path, make_loader: Any, name: Any, mode: str
) -> None:
    far = far_of(["a.h5", "b.h5"], name, target_name="targets", loading_mode=mode)
    near = HDF5Dataset([folder / "a.h5", folder / "b.h5"], name, target_name="targets")
    assert (
        len(far) == len(near)
        and far.fingerprint == near.fingerprint
        and np.array_equal(far.blocks(), near.blocks())
    )
    for shuffle in (True, "block"):
        options = {
            "batch_size": 32,
            "shuffle": shuffle,
            "num_workers": 0,
            "interleave": 2,
            "turns": 2,
        }
        assert same(epoch_of(make_loader(far, **options)), epoch_of(make_loader(near, **options)))
    near.close()


@pytest.mark.parametrize(
    ("mode", "context"),
    [
        ("streaming", "fork"),
        pytest.param("lazy", "fork", marks=pytest.mark.slow),
        *[
            pytest.param(mode, "spawn", marks=pytest.mark.slow)
            for mode in ("lazy", "cached", "streaming")
        ],
    ],
)
@pytest.mark.parametrize(
    "name", ["packed", "library", pytest.param("texts", marks=pytest.mark.slow)]
)
def test_workers_read_the_same(
    far_of: Any, folder: Path, make_loader: Any, name: str, mode: str, context: str
) -> None:
    far, near = (
        far_of("a.h5", name, target_name="targets", loading_mode=mode),
        HDF5Dataset(folder / "a.h5", name, target_name="targets"),
    )
    options = {"batch_size": 32, "shuffle": "block", "interleave": 2, "turns": 2}
    found = epoch_of(make_loader(far, num_workers=2, multiprocessing_context=context, **options))
    assert same(found, epoch_of(make_loader(near, num_workers=0, **options)))
    near.close()


@pytest.mark.quick_every(8)
@pytest.mark.parametrize(
    "mode",
    [
        "streaming",
        *[pytest.param(mode, marks=pytest.mark.slow) for mode in ("lazy", "cached", "eager")],
    ],
)
@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_packed_images(
    far_of: Any, folder: Path, make_loader: Any, small_blocks: None, store: str, mode: str
) -> None:
    far, near = (
        far_of(f"{store}.h5", of=ImageDataset, loading_mode=mode),
        ImageDataset(folder / f"{store}.h5"),
    )
    assert (
        far.classes == near.classes
        and far.fingerprint == near.fingerprint
        and np.array_equal(far.targets, near.targets)
    )
    assert np.array_equal(far.blocks(), near.blocks()) and len(far.blocks()) > 3
    assert [where.rpartition("/")[2] for where, _ in far.samples] == [
        where.rpartition("/")[2] for where, _ in near.samples
    ]
    for shuffle in (False, "block"):
        options = {
            "batch_size": 5,
            "shuffle": shuffle,
            "num_workers": 0,
            "interleave": 2,
            "turns": 2,
        }
        assert same(epoch_of(make_loader(far, **options)), epoch_of(make_loader(near, **options)))
    near.close()


@pytest.mark.quick_every(1)
def test_open_dataset_finds_the_kind(far_of: Any, folder: Path) -> None:
    assert isinstance(far_of("encoded.h5", of=open_dataset), ImageDataset)
    far = far_of("a.h5", of=open_dataset, dataset_name="raw")
    assert isinstance(far, HDF5Dataset) and torch.equal(
        far[7], HDF5Dataset(folder / "a.h5", "raw")[7]
    )


def test_several_packed_files_are_one_dataset(far_of: Any, folder: Path) -> None:
    near = ImageDataset(folder / "encoded.h5", image_size=16)
    for of in (ImageDataset, open_dataset):
        far = far_of(["encoded.h5", "encoded.h5"], of=of, image_size=16, loading_mode="cached")
        assert len(far) == 48 and np.array_equal(far.targets, [*near.targets, *near.targets])
        assert same([far[3], far[27]], [near[3], near[3]])
    with pytest.raises(FormatError, match=r"decoded\.h5 and .*encoded\.h5 can't be one dataset"):
        far_of(["encoded.h5", "decoded.h5"], of=ImageDataset)
    near.close()


def test_streaming_datasets_of_shards(server: RangeServer, folder: Path, tmp_path: Path) -> None:
    reach = {"cache_dir": tmp_path, "deadline": 30}
    for names, options in (
        (["b.h5", "a.h5"], {"dataset_name": "packed", "target_name": "targets"}),
        (["encoded.h5"], {}),
    ):
        with (
            StreamingDataset([f"{server.url}/{name}" for name in names], **options, **reach) as far,
            StreamingDataset(
                [folder / name for name in names], **options, cache_dir=tmp_path
            ) as near,
        ):
            assert len(far) == len(near) and far.fingerprint == near.fingerprint
            assert same(list(itertools.islice(far, 20)), list(itertools.islice(near, 20)))


@pytest.mark.quick_every(1)
def test_folders_and_globs_of_other_file_systems(folder: Path, memory: Any, tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        memory.pipe(f"/runs/x/{name}", (folder / name).read_bytes())
    memory.pipe("/runs/notes.txt", b"no HDF5")
    near = HDF5Dataset(str(folder / "[ab].h5"), "packed")
    for url in (
        "memory://runs",
        "memory://runs/*/*.h5",
        "memory://runs/**/*.h5",
        ["memory://runs/x/a.h5", "memory://runs/x/b.h5"],
    ):
        with HDF5Dataset(url, "packed", cache_dir=tmp_path) as far:
            assert (
                len(far) == 2 * N
                and far.fingerprint == near.fingerprint
                and torch.equal(far[N + 3], near[N + 3])
            )
    with HDF5Dataset((folder / "a.h5").as_uri(), "packed", cache_dir=tmp_path) as far:
        assert torch.equal(far[3], near[3])
    near_last = near[N + 3]
    near.close()
    with HDF5Dataset(f"{folder.as_uri()}/[ab].h5", "packed", cache_dir=tmp_path) as far:
        assert torch.equal(far[N + 3], near_last)
    with pytest.raises(DataNotFoundError, match=r"nothing matches memory://runs/none\*"):
        HDF5Dataset("memory://runs/none*", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="more than one file system"):
        HDF5Dataset(["memory://runs/x/a.h5", "https://host/b.h5"])


# -- what is asked for


def test_opening_with_an_index_is_one_round_trip(server: RangeServer, far_of: Any) -> None:
    for attempt in range(2):
        server.counts()
        far_of(["a.h5", "b.h5"], "packed", target_name="targets", loading_mode="streaming")
        counts = server.counts()
        assert bool(counts["ranges"]) != bool(attempt)
    assert counts["requests"] == 2  # versions of two files, at once


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "rows"),
    [("packed", "packed"), ("tall", "tall"), ("decoded.h5", None), ("encoded.h5", None)],
)
def test_a_streaming_epoch_asks_for_each_block_once(
    server: RangeServer,
    far_of: Any,
    make_loader: Any,
    small_blocks: None,
    name: str,
    rows: str | None,
    workers: int,
) -> None:
    far = (
        far_of("a.h5", rows, loading_mode="streaming")
        if rows
        else far_of(name, of=ImageDataset, loading_mode="streaming")
    )
    loader = make_loader(far, batch_size=4, num_workers=workers, interleave=2, turns=2)
    server.counts()
    assert sum(len(batch if rows else batch[0]) for batch in loader) == len(far)
    assert 3 < len(server.counts()["ranges"]) <= len(far.blocks()) + 2 * 2 - 1


def test_a_batch_of_many_files_is_asked_for_at_once(server: RangeServer, far_of: Any) -> None:
    far = far_of(["a.h5", "b.h5"] * 8, "raw")
    asked: list[Any] = []
    prefetcher = far.sample_source.files._prefetcher
    fetch = prefetcher._fetch
    prefetcher._fetch = lambda ranges, urgent: (asked.append(ranges.size), fetch(ranges, urgent))[1]
    server.counts()
    far.__getitems__([number * N + 5 + number for number in range(16)])
    assert len(asked) == 16 and len(server.counts()["ranges"]) == 16
    far.__getitems__(range(N - 20, N + 20))
    assert len(server.counts()["ranges"]) == 2


# -- what goes wrong


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_wrong_bytes_are_fetched_again_and_then_an_error(
    server: RangeServer, far_of: Any, folder: Path, store: str
) -> None:
    far, near = far_of(f"{store}.h5", of=ImageDataset), ImageDataset(folder / f"{store}.h5")
    server.set(faults={"wrong": 1})
    with pytest.raises(SampleError, match=rf"{store}\.h5, data, row 3 .*: wrong checksum"):
        far[3]
    assert far.sample_reader.counts["refetched"] == 1
    # as often as it is read before it is fetched past everything that is kept
    server.set(faults={"wrong": 1}, most=2)
    assert same(far[3], near[3])
    assert far.sample_reader.counts["refetched"] == 2
    near.close()


@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_wrong_bytes_do_not_stay_on_the_disk(
    server: RangeServer, far_of: Any, folder: Path, tmp_path: Path, store: str
) -> None:
    far, near = (
        far_of(f"{store}.h5", of=ImageDataset, disk_cache_size="10MB"),
        ImageDataset(folder / f"{store}.h5"),
    )
    start = int(far.sample_source.byte_ranges(np.array([9])).start[0]) + 5
    content = (folder / f"{store}.h5").read_bytes()
    wrong = content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :]
    files = far.sample_source.files
    cache = files.cache
    url = far._arguments["data_path"]
    block = block_key(files.place, (url, 0), files.version(url))
    assert cache.get(block) == content
    cache.put(block, wrong)
    far.sample_source._opened.close()
    for count in (1, 1, 1):  # once fetched again, and no more
        assert same(
            [far[number] for number in range(len(near))],
            [near[number] for number in range(len(near))],
        )
        assert far.sample_reader.counts["refetched"] == count
    near.close()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_an_epoch_with_wrong_bytes_is_right(
    server: RangeServer,
    far_of: Any,
    folder: Path,
    make_loader: Any,
    small_blocks: None,
    store: str,
    workers: int,
) -> None:
    far = far_of(f"{store}.h5", of=ImageDataset, loading_mode="streaming")
    options = {"batch_size": 4, "interleave": 2, "turns": 2, "shuffle": "block"}
    loader = make_loader(far, num_workers=workers, **options)
    near = make_loader(ImageDataset(folder / f"{store}.h5"), num_workers=0, **options)
    # else one worker may fetch again while the other has not met its first
    most = 1 if workers else 4
    server.set(faults={"wrong": 1}, most=most)
    assert same(epoch_of(loader), epoch_of(near))
    assert server.counts()["faults"]["wrong"] == most


# -- what is shown, and given back


def test_a_dataset_that_was_closed_reads_on(server: RangeServer, far_of: Any, folder: Path) -> None:
    for name in ("packed", "library"):
        far, near = far_of("a.h5", name), HDF5Dataset(folder / "a.h5", name)
        for _ in range(2):
            assert same(far[5], near[5])
            far.close()
        copy = pickle.loads(pickle.dumps(far))
        assert same(copy[6], near[6])
        copy.close()
        near.close()


def test_a_cache_folder_that_cannot_be_written_to(
    server: RangeServer, far_of: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(HeadraceWarning, match="is not kept .* so every start makes it anew"):
        far = far_of("a.h5", "packed", cache_dir=tmp_path / "file")
    assert len(far[3]) == 700


@pytest.mark.slow
class TestContract(DatasetContract):
    """headrace's laws, of rows that h5py reads beside such that are read by ranges."""

    @pytest.fixture(autouse=True)
    def _data(self, server: RangeServer, folder: Path, tmp_path: Path) -> None:
        with h5py.File(folder / "few.h5", "w") as file:
            rows = np.random.default_rng(3).integers(0, 255, (37, 5, 4), dtype=np.uint8)
            file.create_dataset("direct", data=rows, chunks=(4, 5, 4), compression="gzip")
            file.create_dataset("library", data=rows, chunks=(4, 5, 4), compression="lzf")
            file["labels"] = np.arange(37) % 4
        self.url, self.cache = server.url + "/few.h5", tmp_path / "cache"

    def make(self, **options: Any) -> BaseDataset:
        return HDF5Dataset(
            self.url,
            ["direct", "library"],
            target_name="labels",
            **{"cache_dir": self.cache, **options},
        )
