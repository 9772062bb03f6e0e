"""Measures how well a block shuffle mixes, beside a full shuffle.

    python benchmarks/shuffling.py [--seeds 5] [--json] [--write]

Two measures, those of scDataset (D'Ascenzo and Cultrera di Montesano, arXiv:2506.01883): the
entropy of the labels of a batch, in bits, and what a model learns. The data are sorted by class,
the worst case. Entropies follow from the order alone, so they are the same on each machine, and
stand beside what the formula predicts. A small network (64 -> 128 -> 100, ReLU, SGD with momentum)
is trained for three epochs on made points, one Gaussian a class, and tested on others: cross
entropy, and macro F1 as in scDataset.

`--write` puts the figures into `results/shuffling.json` and draws the chart (`shuffling_chart.py`);
`run_all.py --write` makes docs/benchmark_tables.md of them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import shuffling_chart
import torch
from common import machine, say
from doc_forms import shuffling as tables
from torch import nn

from headrace.order import EpochOrder

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "results" / "shuffling.json"
CLASSES = 100
SAMPLES = CLASSES * 10_240
"""Of the measured entropies."""
CHUNKS, INTERLEAVES, BATCHES = (16, 64, 256, 1024), (1, 4, 16, 32, 64), (64, 256)
TRAINED, TESTED, FEATURES, HIDDEN, EPOCHS, CHUNK, BATCH = (
    CLASSES * 1_280,
    CLASSES * 100,
    64,
    128,
    3,
    64,
    64,
)
Row = dict[str, Any]


def turns_of(blocks: int, interleave: int) -> int:
    """The most turns, up to 12, that leave a block a lane."""
    return next(
        turns for turns in (12, 6, 4, 3, 2, 1) if turns * interleave <= blocks or turns == 1
    )


def order_of(
    samples: int, chunk: int, interleave: int, batch: int, seed: int = 0, epoch: int = 0
) -> EpochOrder:
    """A block shuffle of equal chunks, as of HDF5 and Zarr."""
    blocks, turns = np.full(samples // chunk, chunk), turns_of(samples // chunk, interleave)
    keys = {"seed": seed, "epoch": epoch, "aligned": True}
    return EpochOrder(
        samples,
        shuffle="block",
        blocks=blocks,
        global_batch=batch,
        interleave=interleave,
        turns=turns,
        **keys,
    )


# -- entropy


def measured(order: EpochOrder, batch: int, classes: int = CLASSES) -> float:
    """The mean entropy of the classes of a batch, in bits, over the full batches of an epoch of
    samples that are sorted by class.
    """
    batches = len(order) // batch
    labels = (order[: batches * batch] // (len(order) // classes)).reshape(batches, batch)
    counts = np.bincount(
        (np.arange(batches)[:, None] * classes + labels).ravel(), minlength=batches * classes
    ).reshape(batches, classes)
    shares = counts / batch
    return float((shares * np.log2(1 / np.where(shares > 0, shares, 1))).sum(axis=1).mean())


def drawn(batch: int, chunk: int, interleave: int) -> int:
    """The chunks that a batch draws from, each equally often.

    Of each of its `interleave` lanes a batch takes the next ``batch / interleave`` samples. Where
    these divide a chunk, or chunks them, they lie in as few chunks as may be; elsewhere some lie in
    one more, and a batch is mixed a little better.
    """
    return min(batch, min(interleave, batch) * max(1, batch // (interleave * chunk)))


def predicted(draws: int, chunks: int, classes: int = CLASSES) -> float:
    """The expected entropy, in bits, of `draws` different chunks, of which each class has the same
    number of `chunks`.

    E[H] = log2(draws) - E[log2(1 + B)], where B, the other chunks drawn of a chunk's own class, is
    hypergeometric: draws - 1 of chunks - 1, of which chunks / classes - 1 are of that class.
    """
    same, others = chunks // classes - 1, chunks - chunks // classes
    total = math.comb(chunks - 1, draws - 1)
    chances = (
        (found, math.comb(same, found) * math.comb(others, draws - 1 - found) / total)
        for found in range(min(same, draws - 1) + 1)
    )
    return math.log2(draws) - sum(chance * math.log2(1 + found) for found, chance in chances)


def entropies() -> list[Row]:
    """A row a batch size, chunk size and interleave; the chunks of a full shuffle are its
    samples.
    """
    rows = []
    for batch in BATCHES:
        full = EpochOrder(SAMPLES, seed=0)
        rows.append(
            {
                "batch": batch,
                "chunk": 1,
                "measured": measured(full, batch),
                "predicted": predicted(batch, SAMPLES),
            }
        )
        for chunk in CHUNKS:
            for interleave in INTERLEAVES:
                say(f"batch {batch}, chunk {chunk}, interleave {interleave}")
                order = order_of(SAMPLES, chunk, interleave, batch)
                guess = predicted(drawn(batch, chunk, interleave), SAMPLES // chunk)
                row = {
                    "interleave": interleave,
                    "measured": measured(order, batch),
                    "predicted": guess,
                }
                rows.append({"batch": batch, "chunk": chunk, **row})
    return rows


# -- training


def points(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of all classes, sorted by class; the middles of the classes are the same for every
    seed.
    """
    middles = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * 0.45
    labels = torch.arange(CLASSES).repeat_interleave(samples // CLASSES)
    return middles[labels] + torch.randn(
        samples, FEATURES, generator=torch.Generator().manual_seed(seed)
    ), labels


def trained(interleave: int | None, shuffle: Any, seed: int) -> tuple[float, float]:
    """Cross entropy and macro F1 of the test points after training in an order; the network
    begins alike in all orders.
    """
    inputs, labels = points(TRAINED, 2 * seed + 1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    steps = EPOCHS * TRAINED // BATCH
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(EPOCHS):
        if interleave is None:
            order = EpochOrder(TRAINED, shuffle=shuffle, seed=seed, epoch=epoch)
        else:
            order = order_of(TRAINED, CHUNK, interleave, BATCH, seed, epoch)
        for indices in torch.from_numpy(order[:]).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[indices]), labels[indices]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        inputs, labels = points(TESTED, 2 * seed + 2)
        scores = model(inputs)
        return float(nn.functional.cross_entropy(scores, labels)), macro_f1(
            scores.argmax(1), labels
        )


def macro_f1(guesses: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean of the classes' F1."""
    hits = torch.bincount(labels[guesses == labels], minlength=CLASSES).double()
    sizes = torch.bincount(guesses, minlength=CLASSES) + torch.bincount(labels, minlength=CLASSES)
    return float((2 * hits / sizes).mean())


def trainings(seeds: int) -> list[Row]:
    """A row an order: what each seed gave."""
    orders: list[tuple[str, int | None, Any]] = [("full shuffle", None, True)]
    orders += [
        (f"block, interleave {interleave}", interleave, "block")
        for interleave in reversed(INTERLEAVES)
    ]
    orders.append(("stored order", None, False))
    rows = []
    for name, interleave, shuffle in orders:
        found = []
        for seed in range(seeds):
            say(f"training: {name}, seed {seed}")
            found.append(trained(interleave, shuffle, seed))
        rows.append(
            {
                "order": name,
                "interleave": interleave,
                "loss": [loss for loss, _ in found],
                "f1": [f1 for _, f1 in found],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each order (5)")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument(
        "--write", action="store_true", help="write results/shuffling.json and the chart"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = {
        "date": time.strftime("%d %B %Y").lstrip("0"),
        "machine": machine(()),
        "entropy": entropies(),
    }
    data["training"] = trainings(given.seeds)
    if given.write:
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        shuffling_chart.draw(data)
    print(json.dumps(data, indent=1) if given.json else "\n".join(tables(data)))


if __name__ == "__main__":
    main()
