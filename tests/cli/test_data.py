"""Verbs that open data share their options, and a hint names a flag only where the verb has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace import TextDataset
from headrace.cli.main import main
from tests.datasets.table.test_table import encoded

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command prints as JSON."""

    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_images_of_a_table(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    images = [{"bytes": encoded(number), "path": f"{number}.png"} for number in range(6)]
    pq.write_table(pa.table({"image": images, "label": [0, 1] * 3}), "images.parquet")
    options = ["images.parquet", "--column", "image", "--targets", "label"]
    shown = told("preview", "-o", "a.png", *options)
    assert shown["batch"] == "(float32 [6, 3, 224, 224], int64 [6])"
    assert {one["caption"] for one in shown["samples"]} == {"0", "1"}
    for flags, word in (([], "--column"), (["--unit", "line"], "unit")):
        assert main(["pack", "images.parquet", "a.h5", *flags]) == 2
        assert word in capsys.readouterr().err


def test_texts_of_a_table(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"text": ["a", "mill", "turns"], "label": [0, 1, 0]}), "texts.parquet")
    assert main(["pack", "texts.parquet", "a.h5"]) == 2
    assert "--column" in capsys.readouterr().err
    options = ["texts.parquet", "--column", "text", "--target-field", "label"]
    samples = told("preview", *options)["samples"]
    captions = {one["text"]: one["caption"] for one in samples}
    assert captions == {"a": "0", "mill": "1", "turns": "0"}
    assert told("pack", *options, "a.h5")["samples"] == 3
    with TextDataset("a.h5") as packed:
        samples = [packed[number] for number in range(3)]
        texts = [packed.tokenizer.decode(sample["input_ids"]) for sample in samples]
        assert texts == ["a", "mill", "turns"]
        assert [sample["labels"] for sample in samples] == [0, 1, 0]


def test_labelled_records(told: Any) -> None:
    rows = [{"text": f"mill {number}", "kind": f"k{number % 2}"} for number in range(6)]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["records.jsonl", "--target-field", "kind"]
    assert {one["caption"] for one in told("preview", *options)["samples"]} == {"k0", "k1"}
    assert told("info", *options)["classes"] == {"k0": 3, "k1": 3}
    assert main(["profile", "records.jsonl", "--target-field", "none"]) == 1


def test_hints_name_flags_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos").mkdir()
    for number in range(4):
        Path(f"photos/{number}.png").write_bytes(encoded(number) if number else b"no image")
    preview = ["preview", "photos", "-o", "a.png"]
    assert main(preview) == 1 and "pass --on-error skip" in capsys.readouterr().err
    assert main([*preview, "--on-error", "skip", "-q"]) == 0
    assert main(["bench", "photos", "--seconds", "1"]) == 1  # it has no such flag
    assert "--on-error" not in capsys.readouterr().err
