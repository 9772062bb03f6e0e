"""The figures of README.md are those of the pages that they were measured for, rounded."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = [  # what README.md says, the line of a section with the figure, and the figure
    (
        "{1.8} times as fast as the best of eight peers",
        "benchmarks",
        "Images: files to batches",
        "Ratios, medians",
        "1.80",
    ),
    (
        "up to {35} x h5py",
        "benchmarks",
        "HDF5 and Zarr: random rows of chunked arrays",
        "| 128 a chunk, raw |",
        "34.95",
    ),
    (
        "{52} x zarr-python",
        "benchmarks",
        "HDF5 and Zarr: random rows of chunked arrays",
        "| version 3, shards of 256, 1 a chunk, raw |",
        "51.90",
    ),
    (
        "{2.5} times as fast as HF datasets",
        "benchmarks",
        "Texts",
        "| | the page cache | 428,000 lines/s |",
        "2.48",
    ),
    (
        "shuffled at {90} % of the network's speed",
        "benchmarks",
        "Streaming from a server",
        "| **headrace, HDF5** |",
        "0.90",
    ),
    ("WebDataset {44} %", "benchmarks", "Streaming from a server", "| WebDataset |", "0.44"),
    (
        "among a billion samples in {0.5} ms",
        "benchmarks",
        "Order: which sample is next",
        "| **headrace `OrderSampler`** |",
        "0.54",
    ),
    ("at most {93} % of it", "memory", "What was measured", "| | cached | 0 | 467 MB |", "93"),
    (
        "re-encodes {2.5} times as fast as FFCV's writer",
        "benchmarks",
        "Packing",
        "| headrace, one file | 2,230",
        "2.51",
    ),
    (
        "({0.62} of the speed of float32)",
        "benchmarks",
        "From memory",
        "**bfloat16 costs time",
        "0.62",
    ),
    (
        "({0.89} of pyarrow's scan)",
        "benchmarks",
        "Tables",
        "| blocks: headrace, 2 workers, to pyarrow's scan, its threads |",
        "0.89",
    ),
]


def test_figures_of_the_readme_were_measured() -> None:
    for words, page, section, beginning, figure in FIGURES:
        assert re.sub(r"[{}]", "", words) in " ".join(README.split())
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
        line = next(line for line in text.splitlines() if beginning in line)
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", line), line
        told = re.findall(r"{(.*)}", words)[0]
        is_share = told.isdigit() and "%" in words and "." in figure
        measured = float(figure) * (100 if is_share else 1)
        assert round(measured, len(told.partition(".")[2])) == float(told), words


def test_every_figure_of_the_readme_is_listed() -> None:
    """A new figure needs a row here."""
    said = README.partition("## What it does\n")[2].partition("\n## ")[0]
    numbers = re.findall(
        r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)", re.sub(r"\]\([^)]*\)|about 20 lines|5 GB", "", said)
    )
    listed = [re.findall(r"{(.*)}", row[0])[0] for row in FIGURES]
    assert sorted(numbers) == sorted(listed)
