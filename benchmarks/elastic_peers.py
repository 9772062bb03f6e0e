"""How the peers of `elastic.py` save their position, and resume with other ranks or workers.

Each is used as its own documentation shows it. Samples are their own numbers, so that it can be
counted which of them came; each peer has them in the format that it reads. `open` runs in the
process of a rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED, UNREADABLE, SHARDS = 7, 123, 48
"""The seed of all orders, the sample that can't be read where one can't, and the parts that
peers with parts divide the data into.
"""
BILLION, FILE_ROWS = 1_000_000_000, 1_000_000
"""Rows of the large data, and of each of its files where it has files: one file under a thousand
names.
"""


@dataclass(frozen=True)
class Life:
    """A job from its start to its end.

    Attributes:
        ranks: processes that train.
        batch_size: samples a batch of a rank.
        workers: processes a rank that load; 0: none.
        stop: batches a rank after which it saves its state and ends; None: the end of the epoch.
        dies: rank 1 is killed (SIGKILL) when all ranks have saved, and then the others, instead of
            an orderly end.
        skips: sample `UNREADABLE` can't be read, and is to be skipped.
        samples: of an epoch.
    """

    ranks: int
    batch_size: int
    workers: int = 0
    stop: int | None = None
    dies: bool = False
    skips: bool = False
    samples: int = 968

    @property
    def global_batch(self) -> int:
        return self.ranks * self.batch_size


@dataclass(frozen=True)
class Opened:
    """A loader: its batches, as the samples' numbers (None where the data doesn't tell), and
    what gives its state.
    """

    batches: Iterable[Any]
    state: Callable[[], Any]


class UnreadableError(ValueError):
    """A sample that can't be decoded."""


def decoded(number: int, skips: bool) -> int:
    """A sample of its record, as a decoder of the user's would make it."""
    if skips and number == UNREADABLE:
        raise UnreadableError(f"sample {number} can't be decoded")
    return number


class Peer(ABC):
    """A library.

    Attributes:
        name: what the table says.
        package: the distribution that must be installed; None: headrace itself.
        start: how the processes of its ranks are started.
        every_rank: whether the states of all ranks must be kept to go on.
        has_files: whether it reads files, which `write` writes.
        modules: what the process that forks the ranks, or the fork server, imports: else each rank
            imports it again.
        scale: what its data of 10^9 rows are.
    """

    name: str
    package: str | None = None
    start = "fork"
    every_rank = False
    has_files = False
    modules: tuple[str, ...] = ()
    scale = "10^9 numbers, without a file"

    def write(self, folder: Path, samples: int) -> None:
        """Writes the data in the peer's format; called in a process of its own."""
        raise NotImplementedError

    @abstractmethod
    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        """The loader of a rank, which goes on at a state that `deal` gave it; None: at the
        beginning.
        """

    def deal(self, states: list[Any], ranks: int) -> list[Any]:
        """What each rank of the next life loads, of what the ranks of the last one have saved:
        rank 0's state.
        """
        return [states[0]] * ranks


class Headrace(Peer):
    name, modules = "headrace", ("headrace",)

    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        from headrace import create_dataloader

        world = {"rank": rank, "world_size": life.ranks}
        loader = create_dataloader(
            self.dataset(folder, life),
            batch_size=life.batch_size,
            num_workers=life.workers,
            seed=SEED,
            **world,
        )
        if state is not None:
            loader.load_state_dict(state)
        return Opened((batch.tolist() for batch in loader), loader.state_dict)

    def dataset(self, folder: Path, life: Life) -> Any:
        from headrace import BaseDataset, Source

        class Numbers(Source):
            def __len__(self) -> int:
                return life.samples

            def read(self, indices: Sequence[int]) -> list[Any]:
                return list(indices)

            def fingerprint(self) -> str:
                return f"numbers:{life.samples}"

        class Decoded(BaseDataset):
            def decode(self, record: Any) -> Any:
                return decoded(record, life.skips)

        return Decoded(Numbers(), on_error="skip" if life.skips else "raise")


class Mosaic(Peer):
    """MDS shards on the local disk. The dataset is told the batch size too, which its order
    follows from.
    """

    name, package, has_files = "MosaicML Streaming", "mosaicml-streaming", True
    scale = "an index of 1,000 shards of 10^6 numbers"

    def write(self, folder: Path, samples: int) -> None:
        from peers import _import_streaming

        streaming = _import_streaming()
        rows = min(samples, FILE_ROWS)
        size = 1 << 30 if samples == BILLION else 256
        with streaming.MDSWriter(
            out=str(folder / "mds"), columns={"id": "int"}, size_limit=size
        ) as shards:
            for number in range(rows):
                shards.write({"id": number})
        if samples == BILLION:
            index = json.loads((folder / "mds" / "index.json").read_text())
            (shard,) = index["shards"]
            index["shards"] = [
                _named(folder / "mds", shard, number) for number in range(samples // rows)
            ]
            (folder / "mds" / "index.json").write_text(json.dumps(index))

    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        from peers import _import_streaming

        streaming = _import_streaming()

        class Decoded(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
            def __getitem__(self, at: int) -> Any:
                sample = super().__getitem__(at)
                return {"id": decoded(sample["id"], life.skips)}

        dataset = Decoded(
            local=str(folder / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=life.batch_size
        )
        loader = streaming.StreamingDataLoader(
            dataset, batch_size=life.batch_size, num_workers=life.workers
        )
        if state is not None:
            loader.load_state_dict(state)
        return Opened((batch["id"].tolist() for batch in loader), loader.state_dict)


def _named(folder: Path, shard: dict[str, Any], number: int) -> dict[str, Any]:
    """An entry for one more shard, which is the first one under another name."""
    first = shard["raw_data"]["basename"]
    name = f"copy.{number:05}.mds"
    if not (folder / name).exists():
        os.link(folder / first, folder / name)
    return {**shard, "raw_data": {**shard["raw_data"], "basename": name}}


class LitData(Peer):
    """Chunks on the local disk; `drop_last=True`, as its documentation says for training."""

    name, package, has_files = "LitData", "litdata", True
    scale = "an index of 1,000 chunks of 10^6 numbers"

    def write(self, folder: Path, samples: int) -> None:
        import litdata
        from litdata.streaming.writer import BinaryWriter

        if samples < BILLION:
            litdata.optimize(
                fn=int,
                inputs=list(range(samples)),
                output_dir=str(folder / "chunks"),
                chunk_size=20,
                num_workers=1,
            )
            # `optimize` sets "spawn" for the whole process
            multiprocessing.set_start_method(None, force=True)
        else:
            # what `optimize` writes with, without its processes
            chunk = BinaryWriter(str(folder / "chunks"), chunk_size=FILE_ROWS)
            for number in range(FILE_ROWS):
                chunk.add_item(number, number)
            chunk.done()
            chunk.merge()
            index = json.loads((folder / "chunks" / "index.json").read_text())
            (entry,) = index["chunks"]
            for number in range(1, samples // FILE_ROWS):
                name = f"copy-{number}.bin"
                os.link(folder / "chunks" / entry["filename"], folder / "chunks" / name)
                index["chunks"].append({**entry, "filename": name})
            (folder / "chunks" / "index.json").write_text(json.dumps(index))

    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        import litdata

        options = {"transform": functools.partial(decoded, skips=True)} if life.skips else {}
        dataset = litdata.StreamingDataset(
            str(folder / "chunks"), shuffle=True, drop_last=True, seed=SEED, **options
        )
        loader = litdata.StreamingDataLoader(
            dataset, batch_size=life.batch_size, num_workers=life.workers
        )
        if state is not None:
            loader.load_state_dict(state)
        return Opened((batch.tolist() for batch in loader), loader.state_dict)


class TheirShards(Headrace):
    """headrace, on the files of another library."""

    has_files = True
    library: Peer
    data: str
    column: str

    def write(self, folder: Path, samples: int) -> None:
        self.library.write(folder, samples)

    def dataset(self, folder: Path, life: Life) -> Any:
        from headrace import ColumnsDataset

        class Decoded(ColumnsDataset):
            def decode(self, record: Any) -> Any:
                return decoded(int(super().decode(record)), life.skips)

        on_error = "skip" if life.skips else "raise"
        return Decoded(folder / self.data, columns=self.column, on_error=on_error)


class MosaicByHeadrace(TheirShards):
    name, package, library = "headrace, MDS shards", "mosaicml-streaming", Mosaic()
    data, column, scale = "mds", "id", Mosaic.scale


class LitDataByHeadrace(TheirShards):
    name, package, library = "headrace, LitData's chunks", "litdata", LitData()
    data, column, scale = "chunks", "value", LitData.scale


class Grain(Peer):
    """`ElasticIterator`, which is there for other numbers of shards."""

    name, package = "Grain", "grain"

    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        import grain
        from grain.experimental import ElasticIterator
        from grain.multiprocessing import MultiprocessingOptions
        from grain.sharding import ShardOptions

        dataset = grain.MapDataset.range(life.samples).shuffle(seed=SEED)
        if life.skips:
            dataset = dataset.filter(lambda number: number != UNREADABLE)
        workers = MultiprocessingOptions(num_workers=life.workers) if life.workers else None
        shards = ShardOptions(shard_index=rank, shard_count=life.ranks)
        iterator = iter(
            ElasticIterator(dataset, life.global_batch, shards, multiprocessing_options=workers)
        )
        if state is not None:
            iterator.set_state(state)
        return Opened((batch.tolist() for batch in iterator), iterator.get_state)


class Lance(Peer):
    """LanceDB's `StreamingDataset`. `SHARDS` splits, a multiple of all numbers of ranks and
    workers but 7.
    """

    name, package, has_files = "LanceDB", "lancedb", True
    start, every_rank = "forkserver", True  # its threads don't live through a fork
    modules = ("lancedb.streaming",)
    scale = "a table of 10^9 bytes"

    def write(self, folder: Path, samples: int) -> None:
        import lancedb
        import pyarrow as pa

        kind = pa.int8() if samples == BILLION else pa.int64()

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, samples, FILE_ROWS):
                numbers = pa.array(
                    [0] * FILE_ROWS
                    if samples == BILLION
                    else range(start, min(samples, start + FILE_ROWS)),
                    kind,
                )
                yield pa.record_batch([numbers], names=["id"])

        lancedb.connect(str(folder / "lance")).create_table(
            "numbers", batches(), schema=pa.schema([("id", kind)])
        )

    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        import lancedb
        from lancedb.streaming import StreamingDataLoader, StreamingDataset

        table = lancedb.connect(str(folder / "lance")).open_table("numbers")
        world = {"rank": rank, "world_size": life.ranks, "num_splits": SHARDS}
        skips: Any = (
            {"transform": _decoded_rows, "on_transform_error": "skip"} if life.skips else {}
        )
        dataset = StreamingDataset(table, shuffle_seed=SEED, **world, **skips)
        if state is not None:
            dataset.load_state_dict(state)
        context = {"multiprocessing_context": "forkserver"} if life.workers else {}
        loader = StreamingDataLoader(
            dataset, batch_size=life.batch_size, num_workers=life.workers, **context
        )
        return Opened((batch["id"].tolist() for batch in loader), dataset.state_dict)

    def deal(self, states: list[Any], ranks: int) -> list[Any]:
        from lancedb.streaming import StreamingDataset

        return [StreamingDataset.merge_state_dicts(states)] * ranks


def _decoded_rows(batch: Any) -> list[dict[str, int]]:
    return [{"id": decoded(number, True)} for number in batch.column("id").to_pylist()]


class Tables(Peer):
    """HF datasets: `split_dataset_by_node` of an iterable dataset, and torchdata's
    `StatefulDataLoader`.

    The map-style dataset is shuffled, so that no shuffle buffer is lost. There is no way from the
    states of some ranks to those of other ones: each rank loads the state of the rank of its
    number, or of that number modulo the ranks that there were.
    """

    name, package = "HF datasets", "datasets"
    every_rank = True
    scale = "a table of 10^9 bytes in memory, 1 MB of them stored"

    def table(self, samples: int) -> Any:
        import numpy as np
        import pyarrow as pa
        from datasets import Dataset

        if samples < BILLION:
            return Dataset.from_dict({"id": list(range(samples))})
        part = pa.array(np.zeros(FILE_ROWS, np.int8))
        return Dataset(pa.table({"id": pa.chunked_array([part] * (samples // FILE_ROWS))}))

    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        table = self.table(life.samples)
        dataset = table.shuffle(seed=SEED).to_iterable_dataset(num_shards=SHARDS)
        if life.skips:
            dataset = dataset.filter(_is_readable)
        dataset = split_dataset_by_node(dataset, rank=rank, world_size=life.ranks)
        loader = StatefulDataLoader(dataset, batch_size=life.batch_size, num_workers=life.workers)
        if state is not None:
            loader.load_state_dict(state)
        return Opened((batch["id"].tolist() for batch in loader), loader.state_dict)

    def deal(self, states: list[Any], ranks: int) -> list[Any]:
        return [states[rank % len(states)] for rank in range(ranks)]


def _is_readable(row: dict[str, int]) -> bool:
    with contextlib.suppress(UnreadableError):
        decoded(row["id"], True)
        return True
    return False


class Stateful(Peer):
    """torchdata: `StatefulDataLoader` and `StatefulDistributedSampler` over any map-style
    dataset. States as in `Tables`.
    """

    name, package = "torchdata", "torchdata"
    every_rank = True

    def open(self, folder: Path, life: Life, rank: int, state: Any) -> Opened:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        dataset: Any = _Decoding(life.samples) if life.skips else range(life.samples)
        sampler = StatefulDistributedSampler(dataset, num_replicas=life.ranks, rank=rank, seed=SEED)
        loader = StatefulDataLoader(
            dataset, batch_size=life.batch_size, sampler=sampler, num_workers=life.workers
        )
        if state is not None:
            loader.load_state_dict(state)
        return Opened((batch.tolist() for batch in loader), loader.state_dict)

    def deal(self, states: list[Any], ranks: int) -> list[Any]:
        return [states[rank % len(states)] for rank in range(ranks)]


class _Decoding:
    """A map-style dataset of numbers, of which one can't be decoded."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return decoded(index, True)


PEERS: tuple[Peer, ...] = (
    Headrace(),
    MosaicByHeadrace(),
    LitDataByHeadrace(),
    Mosaic(),
    LitData(),
    Grain(),
    Lance(),
    Tables(),
    Stateful(),
)
