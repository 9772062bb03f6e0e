"""Compares each line of each text of a folder with what Python's own `open` reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace import CharTokenizer, TextDataset, create_dataloader

NEWLINES: tuple[Any, ...] = (None, "\n", "\r", "\r\n")


def python_lines(path: str, newline: Any, encoding: str, errors: str = "strict") -> list[str]:
    """Without their ends; a mark of UTF-8 at the beginning is no part of the first."""
    with open(
        path,
        encoding="utf-8-sig" if encoding == "utf-8" else encoding,
        errors=errors,
        newline=newline or "",
    ) as file:
        return [line.removesuffix(newline) if newline else line.rstrip("\r\n") for line in file]


def differences(
    folder: str | Path, workers: int, newline: Any, encoding: str = "utf-8", **options: Any
) -> Iterator[str]:
    """What differs, in words; at last nothing, or that the numbers of lines differ."""
    errors = options.get("errors", "strict")
    dataset = TextDataset(
        folder,
        unit="line",
        max_length=None,
        newline=newline,
        encoding=encoding,
        return_index=True,
        progress=False,
        **options,
    )
    files = sorted(
        {dataset.sample_source.location(n).rpartition(", line")[0] for n in range(len(dataset))}
    )
    expected = {
        (path, number): line
        for path in files
        for number, line in enumerate(python_lines(path, newline, encoding, errors), 1)
    }
    characters, seen = CharTokenizer(), set()
    loader = create_dataloader(
        dataset, batch_size=64, num_workers=workers, seed=3, collate_fn="list"
    )
    try:
        for batch in loader:
            for sample in batch:
                path, _, number = dataset.source_of(sample["index"]).rpartition(", line ")
                place = path, int(number.replace(",", ""))
                seen.add(place)
                found = characters.decode(sample["input_ids"].tolist())
                if found != expected.get(place):
                    yield f"{path}, line {place[1]}: {found!r} instead of {expected.get(place)!r}"
    finally:
        loader.close()
        dataset.close()
    if seen != expected.keys() or len(seen) != len(dataset):
        yield (
            f"{len(dataset):,} lines, {len(seen):,} of them different ones, where there should be "
            f"{len(expected):,}"
        )
