"""Verbs that open data share their options, and a hint names a flag only where the verb has it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from headrace import TextDataset
from headrace.cli.main import main

pytestmark = pytest.mark.usefixtures("own_cache")


def png(number: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), 20 * number, np.uint8)).save(data, "png")
    return data.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of images, labelled records, and photos one of which is broken."""
    images = [{"bytes": png(number), "path": f"{number}.png"} for number in range(6)]
    pq.write_table(pa.table({"image": images, "label": [0, 1] * 3}), tmp_path / "images.parquet")
    (tmp_path / "records.jsonl").write_text(
        "".join(f'{{"text": "mill {n}", "kind": "k{n % 2}"}}\n' for n in range(6))
    )
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(4):
        (tmp_path / "photos" / "a" / f"{number}.png").write_bytes(
            png(number) if number else b"no image"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_images_of_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["images.parquet", "--image-column", "image", "--target-name", "label", "--json"]
    assert main(["preview", "-o", "a.png", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["facts"]["batch"] == "(float32 [6, 3, 224, 224], int64 [6])"
    assert {one["caption"] for one in shown["samples"]} == {"0", "1"}
    assert main(["info", *options]) == 0
    assert "target_name='label'" in json.loads(capsys.readouterr().out)["opens_as"]
    assert main(["pack", "images.parquet", "a.h5"]) == 2
    assert "--image-column" in capsys.readouterr().err


def test_texts_of_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"text": ["a", "mill", "turns"], "label": [0, 1, 0]}), "texts.parquet")
    assert main(["pack", "texts.parquet", "a.h5"]) == 2
    assert "read one of texts by --text-column" in capsys.readouterr().err
    options = ["texts.parquet", "--text-column", "text", "--target-name", "label"]
    assert main(["preview", *options, "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    captions = {one["text"]: one["caption"] for one in samples}
    assert captions == {"a": "0", "mill": "1", "turns": "0"}
    assert main(["pack", *options, "a.h5"]) == 0
    assert "3 samples" in capsys.readouterr().out
    with TextDataset("a.h5") as packed:
        texts = [packed.tokenizer.decode(packed[number]["input_ids"]) for number in range(3)]
        assert texts == ["a", "mill", "turns"]
        assert [packed[number]["labels"] for number in range(3)] == [0, 1, 0]


def test_labelled_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["records.jsonl", "--target-field", "kind", "--json"]
    assert main(["preview", *options]) == 0
    assert {one["caption"] for one in json.loads(capsys.readouterr().out)["samples"]} == {
        "k0",
        "k1",
    }
    assert main(["info", *options]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == {"k0": 3, "k1": 3}
    assert main(["profile", "records.jsonl", "--target-field", "none"]) == 1
    assert main(["pack", "images.parquet", "a.h5", "--unit", "line"]) == 2
    assert "unit is an option for texts, and here are tables" in capsys.readouterr().err


def test_hints_name_flags_of_the_verb(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "photos", "-o", "a.png"]) == 1
    assert "pass --skip-bad" in capsys.readouterr().err
    assert main(["preview", "photos", "-o", "a.png", "--skip-bad", "-q"]) == 0
    assert main(["bench", "photos", "--seconds", "1"]) == 1  # it has no such flag
    assert "--skip-bad" not in capsys.readouterr().err
