"""How headrace and its peers read rows of a sparse matrix.

Each function is a contestant (see `common.py`), as the peer's own documentation shows it first,
over the files of a `Cells`.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import torch
from isal import isal_zlib

import headrace

BATCH, WHOLE = 64, 1 << 60
FEW = 8
"""Chunks of each array that are inflated for one item of the limit."""
Runs = Iterator[Callable[[], tuple[int, dict[str, float]]]]


@dataclass(frozen=True)
class Cells:
    """Files of the same cells, and how they are read."""

    h5ad: str
    store: str
    """A Zarr store as annbatch lays it out, or its collection of such."""
    plates: int
    layout: str
    """ "dense" or "csr": what a batch is."""
    workers: int
    seconds: float
    """After which an epoch is left by those that read rows one by one."""


def timed(
    cells: Cells, batches: Iterable[tuple[Any, Any]], least: int = 0
) -> tuple[int, dict[str, float]]:
    """Goes through batches of rows and the numbers of their plates: how many rows, and the mean
    entropy of the plates of a batch in bits.

    An epoch that takes longer than `cells.seconds` is left, but not before `least` rows: what is
    read together counts as a whole.
    """
    count, entropies, end = 0, list[float](), time.perf_counter() + cells.seconds
    for rows, plates in batches:
        count += rows.shape[0]
        (rows[:, ::997] if cells.layout == "dense" else rows.values()[::997]).sum()
        shares = np.bincount(np.asarray(plates, np.int64), minlength=cells.plates) / len(plates)
        entropies.append(float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum()))
        if time.perf_counter() > end and count >= least:
            break
    return count, {"entropy": float(np.mean(entropies))}


def repeated(epoch: Callable[[], tuple[int, dict[str, float]]]) -> Runs:
    while True:
        yield epoch


# -- headrace


def ours(cells: Cells, path: str, shuffle: bool | str) -> Runs:
    """Under a block shuffle a batch draws from 64 blocks, so that batches are mixed as well as
    those of scDataset.
    """
    dataset = headrace.SparseDataset(path, targets="plate", layout=cells.layout)  # type: ignore[arg-type]
    mixing = {"interleave": 64, "turns": max(1, cells.workers)} if shuffle == "block" else {}
    loader = headrace.create_dataloader(
        dataset, batch_size=BATCH, shuffle=shuffle, num_workers=cells.workers, **mixing
    )
    try:
        yield from repeated(lambda: timed(cells, loader, WHOLE))
    finally:
        loader.close()


# -- the limit of compressed files


class Inflated:
    """The stored chunks of `X`, a few of `indices` and `data` at a time, each inflated once and
    forgotten: what an epoch can't do without.

    Items are numbers of values.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file = path, -1
        with h5py.File(path) as file:
            self.cells = len(file["X/indptr"]) - 1
            arrays = [file["X/indices"], file["X/data"]]
            self.values, height = arrays[1].shape[0], arrays[1].chunks[0]
            self._nbytes = [height * array.dtype.itemsize for array in arrays]
            self._places: list[list[tuple[int, int]]] = [[], []]
            for array, places in zip(arrays, self._places, strict=True):
                array.id.chunk_iter(
                    lambda chunk, places=places: places.append((chunk.byte_offset, chunk.size))
                )
        self._starts = range(0, len(self._places[1]), FEW)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> int:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDONLY)
        count = 0
        for places, nbytes in zip(self._places, self._nbytes, strict=True):
            for offset, size in places[self._starts[number] : self._starts[number] + FEW]:
                count += len(
                    isal_zlib.decompress(os.pread(self._file, size, offset), zlib.MAX_WBITS, nbytes)
                )
        return count // 8


def inflating(cells: Cells, path: str) -> Runs:
    """Each chunk of a file by gzip, once an epoch, by igzip, in as many processes as there are
    workers; nothing is made of it.
    """
    from torch.utils.data import DataLoader

    chunks = Inflated(path)
    loader = DataLoader(
        chunks, batch_size=None, num_workers=cells.workers, persistent_workers=cells.workers > 0
    )  # type: ignore[arg-type]

    def epoch() -> tuple[int, dict[str, float]]:
        count, end = 0, time.perf_counter() + cells.seconds
        for values in loader:
            count += values
            if time.perf_counter() > end:
                break
        return round(min(count, chunks.values) * chunks.cells / chunks.values), {}

    yield from repeated(epoch)


# -- others


def to_layout(matrix: Any, layout: str) -> torch.Tensor:
    """A SciPy CSR matrix as a batch."""
    if layout == "dense":
        return torch.from_numpy(matrix.toarray())
    parts = (
        torch.from_numpy(matrix.indptr),
        torch.from_numpy(matrix.indices),
        torch.from_numpy(matrix.data),
    )
    return torch.sparse_csr_tensor(*parts, size=matrix.shape, check_invariants=False)


class FromSciPy:
    """Makes batches of what scDataset hands out."""

    def __init__(self, layout: str) -> None:
        self._layout = layout

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Any]:
        return to_layout(batch.X.tocsr(), self._layout), np.asarray(batch.obs["plate"].cat.codes)


def fetch_into_memory(collection: Any, indices: Any) -> Any:
    """Sorted rows of a backed AnnData, in memory."""
    return collection[indices].to_memory()


def sc_dataset(cells: Cells, block: int, fetch: int) -> Runs:
    """scDataset over a backed AnnData, with the blocks and the fetch factor of its paper."""
    import anndata
    from scdataset import BlockShuffling, scDataset
    from torch.utils.data import DataLoader

    backed = anndata.read_h5ad(cells.h5ad, backed="r")
    dataset = scDataset(
        backed, BlockShuffling(block_size=block), batch_size=BATCH, fetch_factor=fetch,
        fetch_callback=fetch_into_memory, batch_transform=FromSciPy(cells.layout),
    )  # fmt: skip
    loader = DataLoader(dataset, batch_size=None, num_workers=cells.workers)
    yield from repeated(lambda: timed(cells, loader, BATCH * fetch * max(1, cells.workers)))


def annbatch_loader(cells: Cells, chunk: int, preload: int) -> Runs:
    """annbatch's own loader over its own store, with the codecs of zarrs where they are
    installed; it has threads, and no workers.
    """
    import annbatch
    import zarr

    try:
        import zarrs  # noqa: F401

        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    except ImportError:
        pass
    loader = annbatch.Loader(
        batch_size=BATCH,
        chunk_size=chunk,
        preload_nchunks=preload,
        shuffle=True,
        rng=np.random.default_rng(0),
        to="torch",
    ).use_collection(annbatch.DatasetCollection(cells.store, mode="r"))

    def batches() -> Iterator[tuple[Any, Any]]:
        for batch in loader:
            rows = batch["X"]
            yield (
                rows.to_dense() if cells.layout == "dense" else rows,
                np.asarray(batch["obs"]["plate"].cat.codes),
            )

    yield from repeated(lambda: timed(cells, batches(), WHOLE))


def ann_loader(cells: Cells) -> Runs:
    """anndata's AnnLoader over a backed AnnData; it gives dense rows."""
    import anndata
    from anndata.experimental import AnnLoader

    backed = anndata.read_h5ad(cells.h5ad, backed="r")
    loader = AnnLoader(backed, batch_size=BATCH, shuffle=True, num_workers=0)

    def batches() -> Iterator[tuple[Any, Any]]:
        for batch in loader:
            rows = batch.X if cells.layout == "dense" else torch.as_tensor(batch.X).to_sparse_csr()
            yield (
                rows,
                np.asarray([int(str(name).removeprefix("plate")) for name in batch.obs["plate"]]),
            )

    yield from repeated(lambda: timed(cells, batches()))
