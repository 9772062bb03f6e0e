"""Texts read and tokenised a batch at a time are what each of them is by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import CharTokenizer, SampleError, TextDataset
from headrace.testing.contract import same

LINES = ["the mill", "", "wheel  ", "\U0001d510ühle", "a\x00b", "\u202eabc", "é"]


class Alone(CharTokenizer):
    """The same ids, text by text."""


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize("characters", [None, "abcdehilmtw é"])
def test_lines_together_and_alone(tmp_path: Path, characters: str | None, mode: str) -> None:
    (tmp_path / "in.txt").write_bytes("\r\n".join(LINES).encode())
    options: dict[str, Any] = {
        "unit": "line",
        "max_length": 6,
        "cache_dir": tmp_path / "kept",
        "loading_mode": mode,
    }
    together = TextDataset(tmp_path / "in.txt", tokenizer=CharTokenizer(characters), **options)
    # the long way, sample by sample
    alone = TextDataset(
        tmp_path / "in.txt", tokenizer=Alone(characters), return_index=True, **options
    )
    transformed = TextDataset(
        tmp_path / "in.txt", tokenizer=Alone(characters), transform=lambda sample: sample, **options
    )
    with together, alone, transformed:
        wanted = [CharTokenizer(characters)(line[:6]).tolist() for line in LINES]
        order = [3, 0, 6, 1, 1, 5, 2, 4]
        found = together.__getitems__(order)
        assert [sample["input_ids"].tolist() for sample in found] == [
            wanted[index] for index in order
        ]
        assert all(
            same(a["input_ids"], b["input_ids"])
            for a, b in zip(found, alone.__getitems__(order), strict=True)
        )
        assert all(same(a, b) for a, b in zip(found, transformed.__getitems__(order), strict=True))
        found[0]["input_ids"][:] = 0  # samples are writable, and don't share their memory
        assert (
            together.__getitems__(order)[0]["input_ids"].tolist() == wanted[3]
            and found[1]["input_ids"].tolist() == wanted[0]
        )
        assert all(
            sample["input_ids"].untyped_storage().nbytes() == 8 * len(sample["input_ids"])
            for sample in found
        )


def test_a_bad_line_among_good_ones(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"one\ntw\xffo\nthree\n")
    with (
        TextDataset(tmp_path / "in.txt", unit="line") as lines,
        pytest.raises(SampleError, match=r"line 2: byte 0xff at offset 6"),
    ):
        lines.__getitems__([0, 1, 2])
    with TextDataset(tmp_path / "in.txt", unit="line", on_error="skip") as lines:
        found = lines.__getitems__([0, 1, 2])
        assert [lines.tokenizer.decode(sample["input_ids"]) for sample in found] == ["one", "three"]
