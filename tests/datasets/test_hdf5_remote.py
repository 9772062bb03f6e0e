"""Remote HDF5 files, above all packs: what is asked for, and what goes wrong on the way."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset, ImageDataset, pack
from headrace.errors import SampleError
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

N = 400


def write(path: Path, seed: int = 0) -> None:
    draws = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["raw"] = draws.integers(0, 256, (N, 40), np.uint8)
        tall = draws.integers(0, 256, (N, 3, 40), np.uint8)
        file.create_dataset("tall", data=tall, chunks=(16, 3, 40))
        packed = {"chunks": (16, 700), "compression": "gzip", "shuffle": True}
        file.create_dataset("packed", data=draws.integers(0, 9, (N, 700), np.int32), **packed)
        lzf = {"chunks": (16, 40), "compression": "lzf"}
        file.create_dataset("library", data=draws.integers(0, 9, (N, 40), np.int32), **lzf)
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

    def make(names: Any, *arguments: Any, of: Any = HDF5Dataset, **options: Any) -> Any:
        urls: Any = f"{server.url}/{names}"
        if not isinstance(names, str):
            urls = [f"{server.url}/{name}" for name in names]
        options = {"cache_dir": tmp_path / "cache", "deadline": 30, "retries": 5, **options}
        made.append(of(urls, *arguments, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.formats.source.LONGEST", 8_000)


# -- what is asked for


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "rows", "workers"),
    [("a.h5", "packed", 0), ("a.h5", "tall", 2), ("decoded.h5", None, 0), ("encoded.h5", None, 0)],
)
def test_a_streaming_epoch_asks_for_each_block_once(
    server: RangeServer, far_of: Any, make_loader: Any, name: str, rows: str | None, workers: int
) -> None:
    arguments: dict[str, Any] = {"dataset_name": rows} if rows else {"of": ImageDataset}
    far = far_of(name, loading_mode="streaming", **arguments)
    loader = make_loader(far, batch_size=4, num_workers=workers, interleave=2, turns=2)
    server.counts()
    assert sum(len(batch if rows else batch[0]) for batch in loader) == len(far)
    assert 3 < len(server.counts()["ranges"]) <= len(far.blocks()) + 2 * 2 - 1


def test_a_batch_of_many_files_is_asked_for_at_once(server: RangeServer, far_of: Any) -> None:
    far = far_of(["a.h5", "b.h5"] * 8, "raw")
    server.counts()
    far.__getitems__([number * N + 5 + number for number in range(16)])
    assert len(server.counts()["ranges"]) == 16
    far.__getitems__(range(N - 20, N + 20))
    assert len(server.counts()["ranges"]) == 2


@pytest.mark.parametrize("mode", ["lazy", "streaming"])
@pytest.mark.parametrize("names", ["packed", ["packed", "tall"]])
def test_an_epoch_over_many_files_asks_for_each_chunk_once(
    server: RangeServer, far_of: Any, make_loader: Any, names: Any, mode: str
) -> None:
    far = far_of(["a.h5", "b.h5"], names, loading_mode=mode)
    loader = make_loader(far, batch_size=8, shuffle="block", interleave=4, turns=2, num_workers=0)
    server.counts()
    assert sum(len(batch["tall"]) if names != "packed" else len(batch) for batch in loader) == 2 * N
    asked = list(map(tuple, server.counts()["ranges"]))
    assert len(set(asked)) == len(asked)
    assert far.sample_source.files.bytes_prefetched == 0


# -- what goes wrong


@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_wrong_bytes_are_fetched_again_and_then_an_error(
    server: RangeServer, far_of: Any, folder: Path, store: str
) -> None:
    far = far_of(f"{store}.h5", of=ImageDataset)
    server.set(faults={"wrong": 1})
    with pytest.raises(SampleError, match=rf"{store}\.h5, data, row 3 "):
        far[3]
    assert far.sample_reader.counts["refetched"] == 1
    # as often as it is read before it is fetched past everything that is kept
    server.set(faults={"wrong": 1}, most=2)
    with ImageDataset(folder / f"{store}.h5") as near:
        assert same(far[3], near[3])
    assert far.sample_reader.counts["refetched"] == 2
