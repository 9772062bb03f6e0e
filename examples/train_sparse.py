"""Trains a linear classifier of cells on the sparse rows of an .h5ad file, which is read in place.

python examples/train_sparse.py  # a file of its own: cells of four kinds, by 2,000 genes
# AnnData's: counts in X (CSR), a column of obs with categories
python examples/train_sparse.py cells.h5ad --target kind
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

from headrace import HeadraceError, SparseDataset, create_dataloader, seed_everything

KINDS = ("B cell", "NK", "T cell", "monocyte")


def make_cells(path: Path, cells: int = 2000, genes: int = 2000) -> Path:
    """Writes what AnnData would write of counts, 5 % of them not zero; each kind has 40 genes
    that it expresses more often.
    """
    draws, counts, kinds = np.random.default_rng(0), [], []
    for number in range(cells):
        chances = np.full(genes, 0.05)
        chances[40 * (number % len(KINDS)) :][:40] = 0.25
        counts.append(draws.poisson(2, genes) * (draws.random(genes) < chances))
        kinds.append(number % len(KINDS))
    rows, columns = np.nonzero(counts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        matrix, obs, var = (file.create_group(name) for name in ("X", "obs", "var"))
        matrix.attrs.update(
            {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (cells, genes)}
        )
        matrix["data"], matrix["indices"] = (
            np.array(counts, "f4")[rows, columns],
            columns.astype("i4"),
        )
        matrix["indptr"] = np.searchsorted(rows, np.arange(cells + 1)).astype("i4")
        for frame, index, order in (
            (obs, [f"cell {n}" for n in range(cells)], ["kind"]),
            (var, [f"gene {n}" for n in range(genes)], []),
        ):
            frame.attrs.update(
                {
                    "encoding-type": "dataframe",
                    "encoding-version": "0.2.0",
                    "_index": "_index",
                    "column-order": order,
                }
            )
            frame["_index"] = np.array(index, object)
        kind = obs.create_group("kind")
        kind.attrs.update(
            {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
        )
        kind["codes"], kind["categories"] = np.array(kinds, "i1"), np.array(KINDS, object)
    return path


def train(given: argparse.Namespace) -> None:
    seed_everything(7)
    path = given.path or make_cells(Path("out") / "cells.h5ad")
    dataset = SparseDataset(path, targets=given.target, dtype="float32", loading_mode=given.mode)
    print(
        f"{path}: {dataset.shape[0]:,} cells x {dataset.shape[1]:,} genes, of the kinds "
        f"{', '.join(dataset.classes)}"
    )
    labelled = dataset.subset(dataset.targets >= 0)  # -1: no category
    seen, unseen = labelled.split(0.8, seed=7, stratify=True)
    loader = create_dataloader(seen, batch_size=64, num_workers=given.workers, seed=7)
    measured = create_dataloader(unseen, batch_size=64, num_workers=given.workers, shuffle=False)
    model = nn.Linear(dataset.shape[1], len(dataset.classes))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(given.epochs):
        losses, values = [], 0
        for cells, kinds in loader:  # float32 [64, genes], int64 [64]
            values += int(cells.count_nonzero())
            loss = nn.functional.cross_entropy(model(cells.log1p()), kinds)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        with torch.no_grad():
            right = sum(
                int((model(cells.log1p()).argmax(1) == kinds).sum()) for cells, kinds in measured
            )
        print(
            f"epoch {epoch + 1}: loss {np.mean(losses):.4f}   {values:,} counts read   right of "
            f"unseen cells {right / len(unseen):.1%}"
        )
    loader.close()
    measured.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="without: a file is made, in ./out")
    parser.add_argument("--target", default="kind", help="a column of obs")
    parser.add_argument("--mode", default="lazy", help="lazy, eager, cached or streaming")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int)
    try:
        train(parser.parse_args())
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
