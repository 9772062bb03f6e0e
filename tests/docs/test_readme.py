"""The figures of README.md are those of the pages that they were measured for, rounded."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = {  # by page and section: what README.md says, the line with the figure, and the figure
    ("benchmark_tables", "Images: files to batches"): [
        (
            "{1.7} times as fast as the best of eight peers",
            "float32 normalised: headrace lazy / best peer |",
            "1.71",
        )
    ],
    ("benchmark_tables", "HDF5 and Zarr: random rows of chunked arrays"): [
        ("up to {24} x h5py", "| 128 a chunk, raw, 28 kB | 24", "24"),
        ("{36} x zarr-python", "1 a chunk, raw, 28 kB |  |", "36"),
        ("{27} x its fused pipeline", "raw, 28 kB: headrace / zarr-python, fused pipeline |", "27"),
    ],
    ("benchmark_tables", "Shards of other libraries"): [
        ("JPEG {3.4} x LitData's own speed", "| JPEG in LitData's chunks: headrace /", "3.38"),
        ("{3.6} x MosaicML's", "| JPEG in MDS: headrace /", "3.65"),
    ],
    ("benchmark_tables", "Texts"): [
        (
            "{2.0} times as fast as HF datasets",
            "| lines: headrace, 0 workers to HF datasets |",
            "1.97",
        )
    ],
    ("benchmark_tables", "Streaming from a server"): [
        (
            "shuffled at {75} % of the network's speed",
            "shuffled, 20 ms: headrace, HDF5 / limit |",
            "0.75",
        ),
        ("WebDataset {40} %", "shuffled, 20 ms: WebDataset / limit |", "0.40"),
    ],
    ("benchmark_tables", "Order: which sample is next"): [
        ("among a billion samples in {564} us", "| headrace OrderSampler | 534 us |", "564")
    ],
    ("benchmark_tables", "Memory"): [("at most {99} % of it", "| 99 % |", "99")],
    ("benchmark_tables", "Packing"): [
        ("re-encodes {2.8} times as fast as FFCV's writer", "| jpeg: headrace / FFCV |", "2.82")
    ],
    ("benchmark_tables", "From memory"): [
        ("({0.75} of the speed of float32)", "| bfloat16 / float32 |", "0.75")
    ],
    ("benchmark_tables", "Tables"): [
        ("({0.63} of pyarrow's scan)", "in each epoch, to pyarrow's scan, its threads |", "0.63")
    ],
}


def test_figures_of_the_readme_were_measured() -> None:
    for (page, section), rows in FIGURES.items():
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
        for words, beginning, figure in rows:
            assert re.sub(r"[{}]", "", words) in " ".join(README.split())
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
    listed = [re.findall(r"{(.*)}", row[0])[0] for rows in FIGURES.values() for row in rows]
    assert sorted(numbers) == sorted(listed)
