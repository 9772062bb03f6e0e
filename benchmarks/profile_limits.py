"""Tests whether `profile_dataloader` finds a limit that was planted, and keeps its predictions.

    python benchmarks/profile_limits.py [--runs 10] [--seconds 24] [--only NAME ...] [--json]

Seven loaders are each held back by one thing: a disk that waits, a server that does, a decoder and
a transform that compute (the latter in Python, with the interpreter's lock), too few workers, a
slow step, and a slow collate function. Three more are not held back by data. Each is profiled with
``apply=True`` in a process of its own; a run counts as right where the planted limit is the one
that is named, and its best prediction as kept where the measured gain differs from it by at most 20
%.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import torch
from folders import temporary_folder
from stream_server import StreamServer, tell

from headrace import BaseDataset, HDF5Dataset, Source, create_dataloader, profile_dataloader
from headrace.collate import stack_collate

SAMPLES, BATCH, BYTES = 1024, 16, 30_000


class Records(Source):
    """Records that are computed, after a wait as long as a disk of that speed takes."""

    def __init__(self, wait: float) -> None:
        self._wait = wait

    def __len__(self) -> int:
        return SAMPLES

    def read(self, indices: Any) -> list[Any]:
        if self._wait:
            time.sleep(self._wait * len(indices))
        return [np.full(BYTES, index % 251, np.uint8).tobytes() for index in indices]

    def fingerprint(self) -> str:
        return f"planted:{SAMPLES}"


def compute(seconds: float) -> None:
    """Computes in C, without the interpreter's lock for most of it: the time is the processor's,
    whatever else runs.
    """
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        _NOISE @ _NOISE


def compute_in_python(seconds: float) -> None:
    """The same in Python, with the lock."""
    until = time.thread_time() + seconds
    total = 0
    while time.thread_time() < until:
        for number in range(200):
            total += number * number


_NOISE = np.ones((64, 64), np.float32)


class Planted(BaseDataset):
    """Samples whose reading and decoding take as long as is said."""

    def __init__(self, read: float = 0.0, decode: float = 0.0, transform: Any = None) -> None:
        self._decode_seconds = decode
        super().__init__(Records(read), transform=transform)

    def decode(self, record: Any) -> Any:
        if self._decode_seconds:
            compute(self._decode_seconds)
        return np.frombuffer(record, np.uint8)[:3072].astype(np.float32)


def slow_transform(value: Any) -> Any:
    compute_in_python(0.002)
    return value + 1


def slow_collate(samples: list[Any]) -> Any:
    compute_in_python(0.03)
    return stack_collate(samples)


def step_of(seconds: float) -> Callable[[Any], None]:
    """A step that waits, as for a GPU."""
    return lambda batch: time.sleep(seconds)


def planted(name: str) -> tuple[Any, Any]:
    """The loader and the step of a case."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": 2}
    if name == "read":
        return create_dataloader(Planted(read=0.002), **options), step_of(0.006)
    if name == "decode":
        return create_dataloader(Planted(decode=0.002), **options), step_of(0.006)
    if name == "transform":
        return create_dataloader(Planted(transform=slow_transform), **options), step_of(0.006)
    if name == "workers":
        return create_dataloader(Planted(decode=0.001), **{**options, "num_workers": 1}), step_of(
            0.010
        )
    if name == "step":
        return create_dataloader(Planted(decode=0.0002), **options), step_of(0.030)
    if name == "collate":
        return create_dataloader(Planted(), collate_fn=slow_collate, **options), step_of(0.006)
    if name == "idle-one":
        return create_dataloader(Planted(decode=0.0003), **{**options, "num_workers": 1}), step_of(
            0.025
        )
    if name == "idle-reading":
        return create_dataloader(Planted(read=0.0005), **options), step_of(0.020)
    if name == "idle-memory":
        return create_dataloader(Planted(), **{**options, "num_workers": 0}), step_of(0.060)
    raise SystemExit(f"no such case: {name}")


LIMITS = ("read", "server", "decode", "transform", "workers", "step", "collate")
IDLE = ("idle-one", "idle-reading", "idle-memory")


@contextlib.contextmanager
def served() -> Iterator[tuple[Any, Any]]:
    """Random rows of an HDF5 file on a server that waits 25 ms before each answer, and gives 20
    MB a second.
    """
    torch.set_num_threads(1)
    with temporary_folder() as folder:
        bucket = Path(folder) / "data"
        bucket.mkdir()
        with h5py.File(bucket / "rows.h5", "w") as file:
            file["data"] = np.random.default_rng(0).integers(0, 255, (SAMPLES, BYTES), np.uint8)
        with StreamServer(folder) as server:
            tell(server.url, latency=0.025, bandwidth=20e6)
            with HDF5Dataset(f"{server.url}/data/rows.h5", cache_dir=folder) as dataset:
                yield create_dataloader(dataset, batch_size=BATCH, num_workers=1), step_of(0.006)


def run_one(name: str, seconds: float) -> dict[str, Any]:
    with served() if name == "server" else contextlib.nullcontext(planted(name)) as (loader, step):
        profile = profile_dataloader(loader, step, seconds, apply=True)
    wanted = "step" if name in IDLE else "read" if name == "server" else name
    tried = next((one for one in profile.advice if one.measured is not None), None)
    kept = tried is not None and abs(tried.measured / tried.predicted - 1) <= 0.2
    return {
        "case": name,
        "named": profile.limit,
        "right": profile.limit == wanted,
        "advice": None if tried is None else tried.name,
        "predicted": profile.most_gain if tried is None else tried.predicted,
        "measured": None if tried is None else tried.measured,
        "spread": None if tried is None else tried.spread,
        # where nothing is to be gained, that is the prediction: the loop is as fast as the step
        # with data from memory
        "kept": abs((profile.most_gain or math.inf) - 1) <= 0.2 if wanted == "step" else kept,
        "seconds": profile.seconds,
        "text": str(profile),
    }


def computed() -> float:
    """Seconds that the machine's cores have computed."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--only", nargs="+", choices=(*LIMITS, *IDLE), default=(*LIMITS, *IDLE))
    parser.add_argument("--json", action="store_true", help="a document a run")
    parser.add_argument("--text", action="store_true", help="each profile as text")
    parser.add_argument(
        "--idle", action="store_true", help="wait before each run until the machine is idle"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(given.one, given.seconds)))
        return
    results = []
    for _ in range(given.runs):
        for name in given.only:
            command = [sys.executable, __file__, "--one", name, "--seconds", str(given.seconds)]
            if given.idle:
                while psutil.cpu_percent(2.0) > 10.0 * len(psutil.Process().cpu_affinity() or [0]):
                    pass
            began, busy, own = time.perf_counter(), computed(), sum(os.times()[2:4])
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            others = (computed() - busy - (sum(os.times()[2:4]) - own)) / (
                time.perf_counter() - began
            )
            if done.returncode:
                raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr}")
            result = json.loads(done.stdout.splitlines()[-1])
            result["others"] = others
            results.append(result)
            if given.json:
                print(json.dumps(result), flush=True)
                continue
            gained = "-" if result["measured"] is None else f"x{result['measured']:.2f}"
            marks = (
                f"{'right' if result['right'] else 'WRONG'}, "
                f"{'kept' if result['kept'] else 'MISSED'}"
            )
            told = (
                f"{result['case']:<13} named {result['named']:<10} {marks:<15} "
                f"{result['advice'] or '':<13}"
            )
            beside = f"{result['seconds']:.1f} s, {others:.1f} cores busy with others"
            print(
                f"{told} predicted x{result['predicted']:.2f} measured {gained}  {beside}",
                flush=True,
            )
            if given.text:
                print(result["text"], "\n", flush=True)
    if given.json:
        return
    limits = [result for result in results if result["case"] in LIMITS]
    idle = [result for result in results if result["case"] in IDLE]
    for what, some in (("planted limits", limits), ("loaders that are fast enough", idle)):
        if some:
            right, kept = (sum(result[name] for result in some) for name in ("right", "kept"))
            longest = max(result["seconds"] for result in some)
            print(
                f"{what}: {right} of {len(some)} named, {kept} of {len(some)} predictions kept, "
                f"{longest:.1f} s at most"
            )


if __name__ == "__main__":
    main()
