"""Compares what a cache should hold, and whether workers should share it.

    python benchmarks/cache_policy.py [--samples 4000] [--held 0.1 0.5 0.9] [--workers 4] [--epochs
    6] [--json]

Hit rates, not times: the fraction of accesses from the second epoch on that find their sample, when
a part of the samples fits in all. Four caches: LRU and "keep" (what came first stays), each as one
that all workers share, and as one of its own in each worker with its share of the bytes. Four
orders: a fresh permutation each epoch, always the same order, weights (Zipf, exponent 1.1) and
uniform draws with replacement. "LRU, true" is cachetools' (exact); "LRU, headrace" is the store's
CLOCK. The limit is what no cache can pass that holds so many: the part held for the permutations,
the most frequent samples held for the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator

import cachetools
import numpy as np

import headrace
from headrace.memory.store import MISSING, SampleStore
from headrace.order.permutation import derive_keys, permute

BATCH = 32
VALUE = bytes(200)
Look = Callable[[int], bool]
"""An access: was the sample held? It is offered to the cache if not."""


def true_lru(samples: int, room: int) -> Look:
    cache: cachetools.LRUCache[int, bool] = cachetools.LRUCache(max(1, room))

    def look(index: int) -> bool:
        hit = cache.get(index, False)
        cache[index] = True
        return hit

    return look


def of_headrace(policy: str) -> Callable[[int, int], Look]:
    def make(samples: int, room: int) -> Look:
        store = SampleStore(samples, max(1, room) * SampleStore.nbytes_of(VALUE), policy)

        def look(index: int) -> bool:
            hit = store.get(index) is not MISSING
            if not hit:
                store.put(index, VALUE)
            return hit

        return look

    return make


CACHES = {
    "keep, headrace": of_headrace("keep"),
    "LRU, headrace": of_headrace("lru"),
    "LRU, true": true_lru,
}


def epochs(order: str, samples: int, count: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, samples + 1) ** 1.1
    ranked = rng.permutation(samples)
    for epoch in range(count):
        if order == "shuffled":
            yield permute(np.arange(samples), samples, derive_keys("cache_policy", epoch, count=8))
        elif order == "sequential":
            yield np.arange(samples)
        elif order == "weighted":
            yield ranked[rng.choice(samples, samples, p=weights / weights.sum())]
        else:
            yield rng.integers(0, samples, samples)


def hit_rate(
    make: Callable[[int, int], Look],
    order: str,
    samples: int,
    room: int,
    workers: int,
    shared: bool,
    count: int,
) -> float:
    looks = (
        [make(samples, room)] * workers
        if shared
        else [make(samples, room // workers) for _ in range(workers)]
    )
    hits = accesses = 0
    for epoch, indices in enumerate(epochs(order, samples, count)):
        for step, start in enumerate(range(0, samples, BATCH)):
            look = looks[step % workers]  # torch deals batches to workers in turn
            found = sum(look(i) for i in indices[start : start + BATCH].tolist())
            if epoch:
                hits, accesses = hits + found, accesses + len(indices[start : start + BATCH])
    return hits / accesses


def limit_of(order: str, samples: int, room: int) -> float:
    if order != "weighted":
        return room / samples
    weights = 1 / np.arange(1, samples + 1) ** 1.1
    return float(weights[:room].sum() / weights.sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument(
        "--held",
        type=float,
        nargs="+",
        default=[0.1, 0.5, 0.9],
        help="the part of the samples that fits",
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = []
    for held in given.held:
        room = round(held * given.samples)
        for order in ("shuffled", "sequential", "weighted", "with replacement"):
            one = {"held": held, "order": order, "limit": limit_of(order, given.samples, room)}
            for name, make in CACHES.items():
                for who, shared in (("shared", True), ("a worker", False)):
                    one[f"{name}, {who}"] = hit_rate(
                        make, order, given.samples, room, given.workers, shared, given.epochs
                    )
            found.append(one)
    said = {
        "samples": given.samples,
        "workers": given.workers,
        "epochs": given.epochs,
        "headrace": headrace.__version__,
    }
    if given.json:
        print(
            json.dumps(
                {
                    **said,
                    "python": platform.python_version(),
                    "numpy": np.__version__,
                    "rows": found,
                },
                indent=2,
            )
        )
        return
    names = [name for name in found[0] if name not in ("held", "order", "limit")]
    heads = [name.split(", ") for name in names]
    for line in range(3):
        print(
            " " * 26
            + "".join(f"{head[line]:>10}" for head in heads)
            + (f"{'limit':>10}" if line == 2 else "")
        )
    for one in found:
        print(
            f"{one['held']:>6.0%} {one['order']:<19}"
            + "".join(f"{one[name]:>10.1%}" for name in names)
            + f"{one['limit']:>10.1%}"
        )
    print("\nhit rates from the second epoch on; " + ", ".join(f"{k} {v}" for k, v in said.items()))


if __name__ == "__main__":
    main()
