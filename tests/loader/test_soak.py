"""Loaders of all kinds that are left early, iterated twice at once, closed and resumed, round after
round: each batch is right, kept ones stay what they are, and nothing grows.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch

from headrace import create_dataloader
from headrace.testing.contract import MODES, same
from tests.loader import soak_data as data

EVENTS = ("whole", "early", "twins", "resumed", "closed")
ROUNDS, LOOKS = 200, 20


@contextlib.contextmanager
def opened(spec: data.Spec, mode: str, options: dict[str, Any]) -> Iterator[Any]:
    dataset = data.open_data(spec, mode)
    with create_dataloader(dataset, **options) as loader:
        yield loader
    if hasattr(dataset, "close"):
        dataset.close()


def spoil(batch: Any) -> None:
    """Writes into the tensors of a batch."""
    for part in batch if isinstance(batch, (list, tuple)) else [batch]:
        if isinstance(part, torch.Tensor):
            part.fill_(99)


def play(rng: random.Random, folder: str) -> None:
    """Three epochs of a dataset and a loader, each with an event."""
    spec = data.draw_spec(rng, folder, rng.choice(data.HOW))
    world = rng.choice((1, 1, 2))
    options = {
        "batch_size": rng.randint(1, max(1, min(9, spec.n // 2))),
        "seed": spec.seed,
        "shuffle": rng.choice((True, False, "block")),
        "collate_fn": rng.choice((None, "list")),
        "world_size": world,
        "rank": rng.randrange(world),
        "enable_monitoring": rng.random() < 0.5,
    }
    here = {**options, "num_workers": 0}
    there = {**options, **data.draw_workers(rng, rng.choice((0, 1, 2, 2)), "fork")}
    with opened(spec, "lazy", here) as twin, opened(spec, rng.choice(MODES), there) as loader:
        for epoch in range(3):
            event = rng.choice(EVENTS)
            expected = list(twin)
            iterator = iter(loader)
            kept = list(itertools.islice(iterator, rng.randint(0, len(expected))))
            rest = expected[len(kept) :]
            if event == "resumed":
                state = json.loads(json.dumps(loader.state_dict()))
                assert (state["epoch"], state["batches"]) == (epoch, len(kept))
                with opened(spec, rng.choice(MODES), here) as other:
                    other.load_state_dict(state)
                    assert same(list(other), rest), spec
            elif event == "twins":
                loader.set_epoch(epoch)
                for batch, wanted in zip(itertools.islice(loader, 3), expected, strict=False):
                    assert same(batch, wanted), spec
            elif event == "closed":
                loader.close()
            if event != "early":
                for wanted in rest:
                    batch = next(iterator)
                    assert same(batch, wanted), (event, spec)
                    spoil(batch)
                assert next(iterator, None) is None
            del iterator
            assert same(kept, expected[: len(kept)]), (event, spec)


def held() -> tuple[int, ...]:
    """Memory of this process; its descriptors, threads and children; objects of headrace's."""
    gc.collect()
    process = psutil.Process()
    objects = sum(str(type(one).__module__).startswith("headrace.") for one in gc.get_objects())
    counts = len(os.listdir("/proc/self/fd")), threading.active_count(), objects
    return process.memory_full_info().uss, len(process.children(recursive=True)), *counts


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_a_soak_finds_nothing(tmp_path: Path) -> None:
    data.make_files(tmp_path)
    looks = []
    for number in range(ROUNDS):
        play(random.Random(f"soak {number}"), str(tmp_path))
        if (number + 1) % (ROUNDS // LOOKS) == 0:
            looks.append(held())
    memory, *counts = zip(*looks, strict=True)
    # malloc keeps what is fragmented: the limit does not grow with the time
    assert median(memory[-6:]) - median(memory[3:9]) < 24 << 20, memory
    for count in counts:
        assert min(count[-6:]) <= max(count[3:9]), count
