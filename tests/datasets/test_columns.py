"""A container of another package opens, packs and resumes as headrace's own do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import ImageDataset, TextDataset, create_dataloader, open_dataset
from headrace.datasets.columns import ColumnsDataset
from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.formats import registry
from headrace.testing.contract import DatasetContract, same

EXAMPLE = Path(__file__).parents[2] / "examples/own_container"
X = np.arange(96, dtype=np.float32).reshape(24, 4)
Y = np.arange(24)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example as pip installs it."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE / "mill_files", site / "mill_files")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in found.items())
        for group, found in project["entry-points"].items()
    ]
    installed = site / "mill_files-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mill-files\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("\n".join(points))
    return site


@pytest.fixture
def mill(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, installed."""
    monkeypatch.syspath_prepend(site)
    registry.installed_formats.cache_clear()
    import mill_files  # type: ignore[import-not-found]

    yield mill_files
    registry.installed_formats.cache_clear()


def write(mill: Any, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    mill.write_mill(folder / "a.mill", {"x": X[:7], "y": Y[:7]})
    mill.write_mill(folder / "b.mill", {"x": X[7:], "y": Y[7:]})
    return folder


class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _installed(self, mill: Any, tmp_path: Path) -> None:
        self.folder = write(mill, tmp_path / "data")

    def make(self, **options: Any) -> ColumnsDataset:
        return ColumnsDataset(self.folder, **options)

    def make_bad(self, **options: Any) -> tuple[ColumnsDataset, list[int]]:
        size = (self.folder / "a.mill").stat().st_size + (len(Y) - 14) * (16 + 8)
        os.truncate(self.folder / "b.mill", size - 16)  # the last two rows of y
        return self.make(**options), [22, 23]


def test_opens_in_every_mode_and_by_url(mill: Any, tmp_path: Path, memory: Any) -> None:
    folder = write(mill, tmp_path / "data")
    (folder / "b.mill").rename(folder / "b.bin")
    for name in ("a.mill", "b.bin"):
        memory.pipe_file(f"/mill/{name}", (folder / name).read_bytes())
    # by its name, by its content, by a URL
    places = (folder / "a.mill", folder / "b.bin", "memory://mill/a.mill")
    for place, rows in zip(places, (range(7), range(7, 24), range(7)), strict=True):
        for mode in ("lazy", "eager", "cached", "streaming"):
            dataset = open_dataset(place, loading_mode=mode, progress=False)
            assert type(dataset).__name__ == "ColumnsDataset"
            wanted = [{"x": torch.from_numpy(X[row]), "y": torch.tensor(row)} for row in rows]
            loader = create_dataloader(dataset, batch_size=1, num_workers=0, shuffle=False)
            got = [{"x": batch["x"][0], "y": batch["y"][0]} for batch in loader]
            assert same(got, wanted)
    assert same(open_dataset(folder / "a.mill", columns="x")[3], torch.from_numpy(X[3]))


@pytest.mark.slow
def test_commands(mill: Any, site: Path, tmp_path: Path) -> None:
    write(mill, tmp_path / "data")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = json.loads(run("info", "data", "--json"))
    assert shown["samples"] == 24 and [column["name"] for column in shown["columns"]] == ["x", "y"]
    run("pack", "data", "packed.h5", "--no-progress")
    run("verify", "packed.h5")
    run("preview", "data", "--output", "sheet.png")
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    with open_dataset(tmp_path / "packed.h5") as packed, open_dataset(tmp_path / "data") as data:
        assert same(list(packed), list(data))


def test_what_is_wrong_is_said(mill: Any, site: Path, tmp_path: Path) -> None:
    folder = write(mill, tmp_path / "data")
    with pytest.raises(MissingNameError, match=r"'z'.*'x', 'y'"):
        open_dataset(folder, columns="z")
    for dataset_class in (ImageDataset, TextDataset):
        with pytest.raises(MissingNameError, match=r"'z'.*'x', 'y'"):
            dataset_class(folder, column="z")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(FormatError, match="TextDataset"):
        ColumnsDataset(tmp_path / "a.txt")
    (tmp_path / "unknown").write_bytes(b"\0")
    with pytest.raises(FormatError, match=r"unknown.*mill files"):
        open_dataset(tmp_path / "unknown")
    points = site / "mill_files-1.0.dist-info/entry_points.txt"
    right = points.read_text()
    for wrong in ("mill_files:MISSING", "mill_files:write_mill"):
        points.write_text(right.replace("mill_files:FORMAT", wrong))
        registry.installed_formats.cache_clear()
        try:
            with pytest.raises(ConfigError, match=wrong):
                open_dataset(tmp_path / "unknown")
        finally:
            points.write_text(right)
