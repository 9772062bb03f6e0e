"""Measures what counting costs: hooks and statistics of a batch, beside the batch itself.

    python benchmarks/monitoring.py [--batches 2000]

The smallest batches are the worst case, so these are: 32 rows of 64 floats, sample by sample, with
a transform. Everything that counts is called by itself, as often as a batch calls it; the best of
five rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace import BaseDataset, Source, create_dataloader
from headrace.monitor.stats import LoadingStats, slow_stages, times_of

BATCH = 32


class Rows(Source):
    """Rows in memory."""

    def __init__(self, count: int) -> None:
        self._rows = np.zeros((count, 64), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Any) -> list[Any]:
        return [self._rows[index] for index in indices]

    def fingerprint(self) -> str:
        return f"rows:{len(self)}"


def best(function: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    batches = given.batches
    dataset = BaseDataset(Rows(batches * BATCH), transform=np.copy)
    loader = create_dataloader(dataset, batch_size=BATCH, num_workers=0)
    whole = best(lambda: [None for _ in loader]) / batches
    reader, counts = (
        dataset.sample_reader,
        {
            "read_seconds": 1e-4,
            "decode_seconds": 1e-4,
            "transform_seconds": 1e-4,
            "work_seconds": 1e-3,
        },
    )
    report = {
        "epoch": 0,
        "step": 0,
        "samples": BATCH,
        "pid": 1,
        "began": 0.0,
        "counts": counts,
    }
    hooks = [lambda times: None, slow_stages(1.0, lambda slow: None)]
    stats = LoadingStats()

    def count() -> None:
        for _ in range(batches):
            for name in ("read_seconds", "decode_seconds", "transform_seconds"):
                reader.count_seconds(name, time.perf_counter())
            reader.take_report()
            time.process_time()
            time.process_time()
            stats.add_report(counts)
            stats.add_batch(BATCH, 0.0, 1e-3)
            times = times_of(report, 0.0, 0.0, 0.0)
            for hook in hooks:
                hook(times)

    counting = best(count) / batches
    if given.json:
        print(
            json.dumps(
                {
                    "batch_us": whole * 1e6,
                    "counting_us": counting * 1e6,
                    "share": counting / whole,
                    "of_10_ms": counting / 0.010,
                }
            )
        )
        return
    share = f"{counting * 1e6:.1f} us ({counting / whole:.1%})"
    print(
        f"a batch of {BATCH} rows of 256 bytes, in process: {whole * 1e6:,.0f} us, of which "
        f"counting takes {share}"
    )
    print(f"of a batch of 10 ms, {counting / 0.010:.2%}")


if __name__ == "__main__":
    main()
