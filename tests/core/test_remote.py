"""Streaming loaders fetch each remote block once, ahead, and give the samples of a local one."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace import BaseDataset
from headrace.core.ahead import Ahead
from headrace.errors import HeadraceWarning, RemoteError
from headrace.formats.source import Locatable
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.testing.contract import same
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.slow

ROW, ROWS = 512, 600
BLOCKS = [37, 64, 5, 100, 94, 1, 0, 99, 120, 80]


class Rows(Locatable):
    """Rows of one file, in blocks of any size."""

    def __init__(self, url: str, far: RemoteFiles) -> None:
        self.url, self.files = url, far

    def __len__(self) -> int:
        return ROWS

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        return ByteRanges.in_file(self.url, indices * ROW, (indices + 1) * ROW)

    @property
    def stored_nbytes(self) -> int:
        return ROW * ROWS

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [
            np.frombuffer(data or b"", np.uint8).copy()
            for data in self.files.read(self.byte_ranges(np.asarray(indices)))
        ]

    def blocks(self) -> npt.NDArray[np.int64]:
        return np.array(BLOCKS, np.int64)

    def fingerprint(self) -> str:
        return "rows"


class Far(BaseDataset):
    def decode(self, record: Any) -> Any:
        return torch.from_numpy(record)


@pytest.fixture(scope="module")
def rows() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (ROWS, ROW), np.uint8)


@pytest.fixture(scope="module")
def folder(rows: npt.NDArray[np.uint8], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    (made / "rows.bin").write_bytes(rows.tobytes())
    return made


@pytest.fixture
def dataset_of(server: RangeServer) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(retries: int = 20, deadline: float = 30, **options: Any) -> Far:
            url = server.url + "/rows.bin"
            files = RemoteFiles(url, RemoteOptions(retries=retries, deadline=deadline))
            files.learn([url])
            dataset = Far(Rows(url, files), loading_mode="streaming", **options)
            return stack.enter_context(dataset)

        yield make


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("workers", [0, 3])
def test_each_block_is_fetched_once(
    server: RangeServer, dataset_of: Any, make_loader: Any, workers: int
) -> None:
    loader = make_loader(dataset_of(), batch_size=16, num_workers=workers, interleave=2, turns=6)
    server.counts()
    assert sum(map(len, loader)) == ROWS
    fetched = [(start, stop) for _, start, stop in server.counts()["ranges"]]
    assert len(fetched) <= len(BLOCKS) + 2 * 6 - 1
    edges = set((np.cumsum([0, *BLOCKS]) * ROW).tolist())
    assert {edge for part in fetched for edge in part} <= edges


class LargeRows(Rows):
    """Rows in blocks of 4 MiB, each of them filled with a byte of its own."""

    row = 16 << 10

    def __len__(self) -> int:
        return 16 * 256

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        return ByteRanges.in_file(self.url, indices * self.row, (indices + 1) * self.row)

    @property
    def stored_nbytes(self) -> int:
        return self.row * len(self)

    def blocks(self) -> npt.NDArray[np.int64]:
        return np.full(16, 256, np.int64)


@pytest.mark.parametrize("workers", [0, 2])
def test_first_batch_takes_parts_of_blocks(tmp_path: Path, make_loader: Any, workers: int) -> None:
    """They come in short requests, the rest of their blocks later, and few bytes twice."""
    values = np.random.default_rng(1).integers(0, 256, 16 * 256, np.uint8)
    (tmp_path / "rows.bin").write_bytes(np.repeat(values, LargeRows.row).tobytes())
    with RangeServer(tmp_path) as server:
        source = LargeRows(f"{server.url}/rows.bin", RemoteFiles(server.url, RemoteOptions()))
        with Far(source, loading_mode="streaming", return_index=True) as dataset:
            loader = make_loader(dataset, batch_size=32, num_workers=workers, interleave=4, turns=4)
            server.counts()
            given = [(batch[:, 0].numpy().copy(), index.numpy().copy()) for batch, index in loader]
            order = np.concatenate([index for _, index in given])
            assert np.array_equal(np.concatenate([batch for batch, _ in given]), values[order])
            loader.close()
        fetched = [(start, stop) for _, start, stop in server.counts()["ranges"]]
    assert sum(stop - start for start, stop in fetched) <= 1.05 * source.stored_nbytes
    for first in (order[: 32 * max(1, workers)] * source.row).tolist():
        assert min(stop - start for start, stop in fetched if start <= first < stop) < 2 << 20


def test_four_ranks_of_two_workers(
    server: RangeServer, dataset_of: Any, make_loader: Any, rows: npt.NDArray[np.uint8]
) -> None:
    """None waits for another: one after the other will do."""
    seen, lanes = list[int](), 4 * 2
    dataset = dataset_of(return_index=True)
    server.counts()
    options = {"batch_size": 4, "num_workers": 2, "interleave": 4, "turns": 2, "pad": False}
    for rank in range(4):
        loader = make_loader(dataset, rank=rank, world_size=4, **options)
        for batch, index in loader:
            assert np.array_equal(batch.numpy(), rows[index.numpy()])
            seen += index.tolist()
        loader.close()
    assert sorted(seen) == list(range(ROWS))
    assert len(server.counts()["ranges"]) <= len(BLOCKS) + lanes - 1


def test_what_is_ahead_stays_in_its_window(dataset_of: Any, make_loader: Any) -> None:
    dataset = dataset_of(max_memory_usage="60MB")
    dataset.value_source.find(Ahead).window = 40_000
    loader = make_loader(dataset, batch_size=16, num_workers=0, interleave=2, turns=1)
    far = dataset.sample_source.files
    most = max(ROW * size for size in BLOCKS)
    for _ in loader:
        assert far.bytes_prefetched < 40_000 + 2 * most
    assert far.bytes_prefetched == 0


def test_without_room_for_blocks_each_batch_fetches_its_own(
    server: RangeServer, dataset_of: Any, make_loader: Any
) -> None:
    dataset = dataset_of()
    dataset.budget._usage = 300_000
    dataset.value_source.find(Ahead).window = 0
    with pytest.warns(HeadraceWarning, match="one by one"):
        loader = make_loader(dataset, batch_size=4, num_workers=0, interleave=10, turns=1)
    server.counts()
    assert sum(map(len, loader)) == ROWS
    assert len(server.counts()["ranges"]) >= len(loader)


@pytest.mark.quick_every(1)
def test_an_epoch_left_early(dataset_of: Any, make_loader: Any) -> None:
    loader = make_loader(dataset_of(), batch_size=16, num_workers=0)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        if epoch:
            next(iter(loader))
        else:
            epochs.append([batch.clone() for batch in loader])
    assert same(*epochs)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(
    ("fault", "deadline", "on_error", "workers", "said"),
    [("503", 20, "skip", 0, "3 attempts .* 503"), ("hang", 1, "raise", 2, ".* in time")],
)
def test_when_the_server_is_gone_it_says_so(
    server: RangeServer,
    dataset_of: Any,
    make_loader: Any,
    on_error: str,
    workers: int,
    fault: str,
    deadline: float,
    said: str,
    monkeypatch: Any,
) -> None:
    """Not that samples are bad, and not after a deadline for each of them."""
    monkeypatch.setattr("headrace.io.remote.client._WAIT", 0.002)
    dataset = dataset_of(retries=2, deadline=deadline, on_error=on_error)
    loader = make_loader(dataset, batch_size=16, num_workers=workers)
    server.set(faults={fault: 1})
    with pytest.raises(RemoteError, match=rf"rows.bin, bytes .*: {said}"):
        next(iter(loader))
