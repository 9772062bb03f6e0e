"""Makes a text in which words follow one another by rules, so that a language model has something
to learn.

python examples/make_text.py out/mill.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

PARTS = (
    ("the", "an old", "every", "no"),
    ("wheel", "miller", "river", "sluice"),
    ("turns", "waits for", "carries", "hears"),
    ("the stone", "the water", "the grain", "the night"),
    ("slowly.", "again.", "at dawn.", "by itself."),
)


def make_text(path: Path, lines: int = 10_000) -> Path:
    """Writes `lines` sentences of about 30 characters to `path`, unless it is there, the same at
    every call; gives `path`.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        picks = torch.randint(
            4, (lines, len(PARTS)), generator=torch.Generator().manual_seed(0)
        ).tolist()
        sentences = [
            " ".join(words[pick] for words, pick in zip(PARTS, row, strict=True)) for row in picks
        ]
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text("\n".join(sentences) + "\n", encoding="utf-8")
        unfinished.replace(path)
    return path


if __name__ == "__main__":
    print(make_text(Path(sys.argv[1])))
