"""Compares how fast a large text is indexed, and how fast random lines and blocks of tokens come
out of it.

    python benchmarks/text.py [--work DIR] [--gb 5] [--tokens 200] [--workers N] [--rounds 5]
    [--only NAME ...] [--json]

The benchmark writes a text of lines of about 100 bytes (5 GB are 50 million) into DIR, and keeps it
there. Sections:

index: the places of all lines, found and written to a table in a new `cache_dir`, beside ``cat FILE
> /dev/null``; once with the file not in the system's memory, as one that nobody has read yet, and
once out of it. What the table takes on disk, and the indexing process in memory beyond what it had
before, is printed below.

lines: random lines in batches of 64, a character a token, padded to the longest of the batch: int64
input_ids, attention_mask and labels (-100 at padding). headrace's loader with its defaults beside
HF datasets, whose builder "text" has made an Arrow file of the text before; its batches are made by
the same tokenizer, called once a batch, and torch's ``pad_sequence``: the fastest way that we know.

blocks: random blocks of 1,024 tokens as int64 [64, 1024], out of uint16 (`--tokens` million of
them). The limit is a loop over a bare ``np.memmap``, as small language models are often fed: a cast
and a stack of 64 slices. LitData's TokensLoader and HF datasets read the same tokens. headrace
gives the number of each token's document besides.

A turn is as many batches as take a second, or a whole index.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import forget, prepared, work_folder
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import headrace

BATCH, LENGTH, SECONDS, LINE = 64, 1024, 1.0, 100
DRAWN = 1 << 16
"""Lines or blocks that are drawn for an epoch of HF datasets, before it is timed."""
PIECE = 1 << 16
Runs = Iterator[Callable[[], int]]


@dataclass(frozen=True)
class Job:
    """Where the files lie."""

    work: Path
    nbytes: int
    tokens: int
    workers: int = 0

    @property
    def lines(self) -> Path:
        return self.work / f"lines-{self.nbytes}" / "lines.txt"

    @property
    def packed(self) -> Path:
        return self.work / f"tokens-{self.tokens}" / "tokens.h5"

    @property
    def bare(self) -> Path:
        return self.work / f"tokens-{self.tokens}" / "tokens.bin"


def some_lines(random: np.random.Generator, count: int) -> bytes:
    """Lines of 50 to 150 bytes, their ends included."""
    letters = random.integers(97, 123, (count, 150), np.uint8)
    letters[random.random((count, 150), np.float32) < 0.16] = 32
    lengths = random.integers(50, 151, count)
    columns = np.arange(150)
    letters[np.arange(count), lengths - 1] = 10
    return letters[columns < lengths[:, None]].tobytes()


def write_lines(folder: Path, nbytes: int) -> None:
    random, written = np.random.default_rng(0), 0
    with open(folder / "lines.txt", "wb") as file:
        while written < nbytes:
            written += file.write(some_lines(random, PIECE))


def write_tokens(folder: Path, tokens: int) -> None:
    """Tokens of lines, as headrace packs them, and as a file of nothing but uint16."""
    write_lines(folder, tokens)
    with headrace.TextDataset(
        folder / "lines.txt", unit="line", cache_dir=folder / "kept", progress=False
    ) as lines:
        headrace.pack(lines, folder / "tokens.h5", progress=False)
    with h5py.File(folder / "tokens.h5") as file, open(folder / "tokens.bin", "wb") as bare:
        rows = file["data"]
        for start in range(0, len(rows), 1 << 24):
            bare.write(rows[start : start + (1 << 24)].tobytes())
    (folder / "lines.txt").unlink()
    shutil.rmtree(folder / "kept")


def turns(batches: Callable[[], Iterable[Any]], count: Callable[[Any], int]) -> Runs:
    """Batches for a second; begun anew where they end, and going on in the next turn, so that
    starting is not what is measured.
    """

    def forever() -> Iterator[Any]:
        while True:
            yield from batches()

    source = forever()

    def run() -> int:
        done, end = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            done += count(next(source))
        return done

    while True:
        yield run


# -- the index


def cat(job: Job, cold: bool) -> Runs:
    def run() -> int:
        with open(os.devnull, "wb") as nothing:
            subprocess.run(["cat", str(job.lines)], stdout=nothing, check=True)
        return job.lines.stat().st_size // 1_000_000

    while True:
        if cold:
            forget(job.lines)
        yield run


class Peak(threading.Thread):
    """The most memory that this process has while a block runs, beyond what it had before; files
    that it maps don't count.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done, self._before, self.most = threading.Event(), _own_memory(), 0

    def run(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, _own_memory() - self._before)

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def _own_memory() -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(rows["RssAnon"].split()[0]) + int(rows["RssShmem"].split()[0])) * 1024


def index(job: Job, cold: bool) -> Runs:
    kept = job.work / "index"
    while True:
        shutil.rmtree(kept, ignore_errors=True)
        if cold:
            forget(job.lines)
        said: dict[str, Any] = {}

        def run(said: dict[str, Any] = said) -> int:
            with Peak() as peak:
                dataset = headrace.TextDataset(
                    job.lines, unit="line", cache_dir=kept, progress=False
                )
            said.update(lines=len(dataset), peak=peak.most)
            dataset.close()
            return job.lines.stat().st_size // 1_000_000

        yield run
        said["bytes"] = sum(file.stat().st_size for file in kept.iterdir())
        (job.work / "index.json").write_text(json.dumps(said))


# -- random lines


def our_lines(job: Job) -> Runs:
    dataset = headrace.TextDataset(
        job.lines, unit="line", max_length=None, cache_dir=job.work / "kept", progress=False
    )
    loader = headrace.create_dataloader(dataset, batch_size=BATCH, num_workers=job.workers)
    try:
        yield from turns(lambda: loader, lines_of)
    finally:
        loader.close()


def _offline(job: Job) -> Any:
    os.environ["HF_HUB_OFFLINE"], os.environ["HF_HOME"] = "1", str(job.work / "huggingface")
    import datasets

    datasets.disable_progress_bars()
    return datasets


class Padded:
    """HF's collate function: the lines of a batch to padded ids."""

    def __init__(self) -> None:
        self.tokenizer = headrace.CharTokenizer()

    def __call__(self, samples: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        ids = self.tokenizer.encode_together([sample["text"] for sample in samples])
        rows = pad_sequence([torch.from_numpy(row) for row in ids], batch_first=True).long()
        is_token = rows != 0  # no character has that id
        return {
            "input_ids": rows,
            "attention_mask": is_token.long(),
            "labels": rows.masked_fill(~is_token, -100),
        }


def lines_of(batch: dict[str, torch.Tensor]) -> int:
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    assert (
        ids.shape == mask.shape == labels.shape
        and ids.dtype == mask.dtype == labels.dtype == torch.int64
    )
    return len(ids)


class Drawn:
    """A sampler of random indices, drawn anew in each epoch; torch's own would draw a
    permutation of all lines first.
    """

    def __init__(self, length: int) -> None:
        self._length, self._random = length, np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.integers(0, self._length, DRAWN).tolist())

    def __len__(self) -> int:
        return DRAWN


def hf_dataset(job: Job) -> Any:
    """The lines as HF datasets have them; made where it has not made them yet."""
    return _offline(job).load_dataset(
        "text", data_files=str(job.lines), split="train", cache_dir=str(job.work / "huggingface")
    )


def hf_lines(job: Job) -> Runs:
    dataset = hf_dataset(job)
    sampler: Any = Drawn(len(dataset))
    options: dict[str, Any] = {
        "num_workers": job.workers,
        "persistent_workers": job.workers > 0,
        "collate_fn": Padded(),
    }
    loader = DataLoader(dataset, BATCH, sampler=sampler, **options)
    yield from turns(lambda: loader, lines_of)


# -- blocks


def rows_of(batch: Any) -> int:
    ids = batch["input_ids"] if isinstance(batch, dict) else batch
    ids[:, ::256].sum()
    return int(ids.numel()) // 1000


def our_blocks(job: Job) -> Runs:
    dataset = headrace.TextDataset(job.packed, max_length=LENGTH, packing=True)
    loader = headrace.create_dataloader(dataset, batch_size=BATCH, num_workers=job.workers)
    try:
        yield from turns(lambda: loader, rows_of)
    finally:
        loader.close()


def bare_memmap(job: Job) -> Runs:
    data: npt.NDArray[np.uint16] = np.memmap(job.bare, np.uint16, "r")

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(1000):
            places = torch.randint(len(data) - LENGTH, (BATCH,))
            yield torch.stack(
                [
                    torch.from_numpy(data[place : place + LENGTH].astype(np.int64))
                    for place in places
                ]
            )

    yield from turns(batches, rows_of)


def _pieces(start: int, path: str) -> Iterator[torch.Tensor]:
    data: npt.NDArray[np.uint16] = np.memmap(path, np.uint16, "r")
    yield torch.from_numpy(data[start : start + PIECE * LENGTH].copy())


def litdata_tokens(job: Job) -> Runs:
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # or it asks PyPI for a newer one
    import functools
    import multiprocessing

    import litdata

    def write(folder: Path) -> None:
        litdata.optimize(
            fn=functools.partial(_pieces, path=str(job.bare)),
            inputs=list(range(0, job.bare.stat().st_size // 2, PIECE * LENGTH)),
            output_dir=str(folder),
            chunk_size=LENGTH * 8192,
            item_loader=litdata.TokensLoader(),
            num_workers=1,
        )

    folder = prepared(job.work, f"litdata-{job.tokens}", write)
    # `optimize` sets "spawn" for the whole process
    multiprocessing.set_start_method(None, force=True)
    dataset = litdata.StreamingDataset(
        str(folder), item_loader=litdata.TokensLoader(block_size=LENGTH), shuffle=True
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=job.workers)
    yield from turns(lambda: loader, lambda batch: rows_of(batch.long()))


def hf_blocks(job: Job) -> Runs:
    datasets = _offline(job)

    def rows() -> Iterator[dict[str, Any]]:
        data: npt.NDArray[np.uint16] = np.memmap(job.bare, np.uint16, "r")
        for start in range(0, len(data) - LENGTH + 1, LENGTH):
            yield {"input_ids": data[start : start + LENGTH]}

    def write(folder: Path) -> None:
        features = datasets.Features(
            {"input_ids": datasets.Sequence(datasets.Value("uint16"), length=LENGTH)}
        )
        datasets.Dataset.from_generator(
            rows, features=features, cache_dir=str(folder / "cache")
        ).save_to_disk(str(folder / "blocks"))
        shutil.rmtree(folder / "cache")

    dataset = datasets.load_from_disk(
        str(prepared(job.work, f"hf-blocks-{job.tokens}", write) / "blocks")
    )
    dataset.set_format("torch", dtype=torch.int64)
    options: dict[str, Any] = {"num_workers": job.workers, "persistent_workers": job.workers > 0}
    loader = DataLoader(dataset, BATCH, shuffle=True, **options)
    yield from turns(lambda: loader, rows_of)


# -- the tables


def sections(job: Job, workers: int) -> dict[str, list[Section]]:
    def of(runs: Callable[[Job], Runs], *packages: str) -> Iterator[Contestant]:
        for number in dict.fromkeys((0, workers)):
            name = f"{_NAMES[runs.__name__]}, {number} workers"
            yield Contestant(name, runs, (Job(job.work, job.nbytes, job.tokens, number),), packages)

    by_line = [*of(our_lines), *of(hf_lines, "datasets")]
    hf = tuple(one.name for one in by_line if "HF" in one.name)
    limit = "bare np.memmap (limit)"
    by_block = [
        *of(our_blocks),
        Contestant(limit, bare_memmap, (job,)),
        *of(litdata_tokens, "litdata"),
        *of(hf_blocks, "datasets"),
    ]
    lit, hf_b = (
        tuple(one.name for one in by_block if name in one.name) for name in ("LitData", "HF")
    )
    ours = list(dict.fromkeys(f"headrace, {number} workers" for number in (0, workers)))
    where = {"from the disk": True, "from the page cache": False}
    return {
        "index": [
            Section(
                f"index of a text of {job.nbytes / 1e9:g} GB, {place}",
                "MB/s",
                "cat FILE > /dev/null",
                [
                    Contestant("headrace, index", index, (job, cold)),
                    Contestant("cat FILE > /dev/null", cat, (job, cold)),
                ],
                [
                    Ratio(
                        f"index, {place}: headrace to cat",
                        "headrace, index",
                        ("cat FILE > /dev/null",),
                    )
                ],
            )
            for place, cold in where.items()
        ],
        "lines": [
            Section(
                f"random lines of it, batches of {BATCH}",
                "lines/s",
                hf[0],
                by_line,
                [Ratio(f"lines: {name} to HF datasets", name, hf) for name in ours],
            )
        ],
        "blocks": [
            Section(
                f"random blocks of {LENGTH:,} tokens, batches of {BATCH}",
                "ktokens/s",
                limit,
                by_block,
                [
                    Ratio(f"blocks: {name} to {whom}", name, others)
                    for name in ours
                    for whom, others in (
                        ("a bare memmap", (limit,)),
                        ("LitData's TokensLoader", lit),
                        ("HF datasets", hf_b),
                    )
                ],
            )
        ],
    }


_NAMES = dict.fromkeys(("our_lines", "our_blocks"), "headrace") | dict.fromkeys(
    ("hf_lines", "hf_blocks"), "HF datasets"
)
_NAMES["litdata_tokens"] = "LitData"


def main() -> int:
    parser = argparse.ArgumentParser(description="Texts: index, random lines, blocks of tokens.")
    parser.add_argument(
        "--work", help="folder for the files, which stay there; without: a temporary one"
    )
    parser.add_argument("--gb", type=float, default=5.0, help="of the text (5)")
    parser.add_argument(
        "--tokens", type=float, default=200, metavar="MILLION", help="of the blocks (200)"
    )
    parser.add_argument(
        "--section",
        nargs="+",
        choices=("index", "lines", "blocks"),
        default=["index", "lines", "blocks"],
    )
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        job = Job(work, int(given.gb * 1e9), int(given.tokens * 1e6))
        if {"index", "lines"} & set(given.section):
            prepared(work, job.lines.parent.name, lambda folder: write_lines(folder, job.nbytes))
        if "blocks" in given.section:
            prepared(work, job.packed.parent.name, lambda folder: write_tokens(folder, job.tokens))
        chosen = [
            s
            for name, some in sections(job, given.workers).items()
            if name in given.section
            for s in some
        ]
        (work / "index.json").unlink(missing_ok=True)
        task = (
            f"{job.nbytes / 1e9:g} GB of lines of {LINE} bytes, {job.tokens / 1e6:.0f} million "
            "tokens"
        )
        run_sections(chosen, given, task)
        if (work / "index.json").exists():
            said = json.loads((work / "index.json").read_text())
            text = (
                f"index: {said['lines']:,} lines, {said['bytes'] / said['lines']:.3f} bytes a "
                "line on disk, "
                f"{said['peak'] / 1e6:.1f} MB of memory at its peak"
            )
            print(text, file=sys.stderr if given.json else sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
