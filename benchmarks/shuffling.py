"""How well does a block shuffle mix, beside a full shuffle?

    python benchmarks/shuffling.py [--seeds 5] [--json] [--write]
    python benchmarks/shuffling.py --page

Two measures, those of scDataset (D'Ascenzo and Cultrera di Montesano, arXiv:2506.01883): the
entropy of the labels of a batch, in bits, and what a model learns. The data are sorted by class,
the worst case. Entropies follow from the order alone, so they are the same on each machine, and
stand beside what the formula predicts. A small network (64 -> 128 -> 100, ReLU, SGD with momentum)
is trained for three epochs on made points, one Gaussian a class, and tested on others: cross
entropy, and macro F1 as in scDataset.

`--write` puts the figures into `results/shuffling.json`; `--page` runs nothing, and puts those
figures into docs/shuffling.md and draws the chart (`shuffling_chart.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, say
from pages import put
from torch import nn

from headrace.order import EpochOrder

ROOT = Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "benchmarks" / "results" / "shuffling.json", ROOT / "docs" / "shuffling.md"
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


# -- the tables


def entropy_table(data: Row, batch: int) -> str:
    """Measured beside predicted, a row a chunk size, a column an interleave."""
    rows = [row for row in data["entropy"] if row["batch"] == batch]
    cells = {
        (row["chunk"], row.get("interleave")): f"{row['measured']:.2f} ({row['predicted']:.2f})"
        for row in rows
    }
    lines = [
        "| samples a chunk | "
        f"{' | '.join(f'interleave {interleave}' for interleave in INTERLEAVES)} |"
    ]
    lines.append(f"|--:|{'--:|' * len(INTERLEAVES)}")
    lines += [
        f"| {chunk:,} | {' | '.join(cells[chunk, interleave] for interleave in INTERLEAVES)} |"
        for chunk in CHUNKS
    ]
    return "\n".join(
        [
            *lines,
            f"| full shuffle | {' | '.join([cells[1, None]] + [''] * (len(INTERLEAVES) - 1))} |",
        ]
    )


def training_table(data: Row) -> str:
    """Loss and macro F1, medians with the lowest and highest of the seeds, and the median
    difference of each seed to a full shuffle.
    """
    full = data["training"][0]
    lines = ["| order | test loss | to a full shuffle, same seed | macro F1 |", "|---|--:|--:|--:|"]
    for row in data["training"]:
        apart = [loss - other for loss, other in zip(row["loss"], full["loss"], strict=True)]
        change = (
            ""
            if row is full
            else f"{statistics.median(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})"
        )
        lines.append(
            f"| {row['order']} | {_spread(row['loss'])} | {change} | {_spread(row['f1'])} |"
        )
    return "\n".join(lines)


def _spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):.3f} ({min(figures):.3f} to {max(figures):.3f})"


def where(data: Row) -> str:
    """Where it ran, in a line."""
    found = data["machine"]
    seeds = len(data["training"][0]["loss"])
    return (
        f"{data['date']}; {seeds} seeds; Python {found['python']}, torch {found['torch']}, NumPy "
        f"{found['numpy']}; {found['cpu']}."
    )


def page(text: str, data: Row) -> str:
    """docs/shuffling.md with the tables of these figures."""
    parts = {f"batches of {batch}": entropy_table(data, batch) for batch in BATCHES}
    for name, part in (parts | {"training": training_table(data), "where": where(data)}).items():
        text = put(text, name, part)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each order (5)")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.add_argument(
        "--write", action="store_true", help="write the figures into results/shuffling.json"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="run nothing: write the figures that are there into docs/shuffling.md",
    )
    given = parser.parse_args()
    if given.page:
        import shuffling_chart

        data = json.loads(DATA.read_text(encoding="utf-8"))
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")
        shuffling_chart.draw(data)
        return
    torch.set_num_threads(1)
    data = {
        "date": time.strftime("%d %B %Y").lstrip("0"),
        "machine": machine(()),
        "entropy": entropies(),
    }
    data["training"] = trainings(given.seeds)
    if given.write:
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    tables = [*(entropy_table(data, batch) for batch in BATCHES), training_table(data)]
    print(json.dumps(data, indent=1) if given.json else "\n\n".join([where(data), *tables]))


if __name__ == "__main__":
    main()
