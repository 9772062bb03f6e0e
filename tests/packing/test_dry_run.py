"""`dry_run=True` says what would be packed, and writes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace import ImageDataset, pack
from headrace.cli.main import main
from headrace.errors import ConfigError, DataNotFoundError, TargetExistsError

SHARD = 16_000


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_plan_is_that_of_the_pack(photos: Path, tmp_path: Path) -> None:
    out = pack(photos, tmp_path / "out", shard_size=SHARD, part="0/2")
    before = tree(tmp_path)
    plan = pack(photos, out, shard_size=SHARD, dry_run=True)
    assert plan.text == (tmp_path / "out/plan.json").read_bytes()
    with pytest.raises(TargetExistsError):
        pack(photos, out, shard_size=2 * SHARD, dry_run=True)
    assert pack(photos, out, shard_size=2 * SHARD, overwrite=True, dry_run=True).parts < plan.parts
    assert tree(tmp_path) == before


def test_what_pack_would_refuse(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "there.h5").touch()
    rows: list[tuple[Any, str, Any, str]] = [
        (photos, "there.h5", TargetExistsError, "there.h5"),
        (photos, "no/out", DataNotFoundError, "no"),
        (ImageDataset(photos).subset([]), "a.h5", ConfigError, "no samples to pack"),
    ]
    for source, name, error, word in rows:
        with pytest.raises(error, match=word):
            pack(source, tmp_path / name, dry_run=True)


def test_the_command(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pack", str(photos), str(tmp_path / "out"), "--shard-size", "16kB", "--dry-run"]
    assert main(command) == 0
    text = capsys.readouterr().out
    for word in ("24 samples", "parts:", "nothing was written"):
        assert word in text
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 24 and os.listdir(tmp_path) == []
