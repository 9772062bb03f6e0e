"""The code of README.md and of the guides runs as it stands there, and README.md stays short."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from tests.data.make import make_photos, make_shards

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("start", "loader", "collating", "sampling", "order", "own_format", "memory", "images")


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the pages read: photographs, drawings, arrays, shards, texts."""
    folder = tmp_path_factory.mktemp("data")
    make_photos(folder / "photos" / "train", per_class=50)
    make_photos(folder / "photos" / "val", per_class=5)
    make_photos(folder / "drawings", per_class=20)
    make_shards(folder / "shards", (20, 5, 0, 30))
    np.random.default_rng(0).integers(0, 256, (256, 3073), dtype=np.uint8).tofile(folder / "data_batch_1.bin")
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{"a" * number}"}}\n' for number in range(1, 200)))
    (folder / "books").mkdir()
    (folder / "books" / "mill.txt").write_text("the mill wheel turns\n" * 100)
    (folder / "runs").mkdir()
    for path in (folder / "runs" / "a.h5", folder / "runs" / "b.h5", folder / "run.h5"):
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=np.zeros((20, 8, 8, 3), np.uint8), chunks=(4, 8, 8, 3), compression="gzip")
            file["image"], file["labels"], file["label"] = file["images"], np.arange(20), np.arange(20)
            file["caption"] = [f"caption {number}" for number in range(20)]
    root = zarr.open_group(folder / "volume.zarr", mode="w")
    for name, dtype in (("raw", "u2"), ("labels", "u1")):
        root.create_array(name, shape=(80, 100, 120), dtype=dtype, chunks=(32, 32, 32), shards=(64, 64, 64))[...] = 1
    return folder


@pytest.fixture
def run(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs blocks of a page one after the other in a folder, and gives their names; closes what they made."""
    opened: list[Any] = []

    def run_in(folder: Path, page: str, code: list[str]) -> dict[str, Any]:
        monkeypatch.chdir(folder)
        names: dict[str, Any] = {"__name__": "page"}
        for block in code:
            exec(compile(block, page, "exec"), names)
            opened.extend(value for value in names.values() if hasattr(value, "load_state_dict") and not isinstance(value, type))
        return names

    yield run_in
    for loader in opened:
        loader.close()
        if hasattr(loader, "dataset"):
            loader.dataset.close()


@pytest.mark.slow
@pytest.mark.quick_every(3)
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_guide_runs(page: str, data: Path, run: Any) -> None:
    code = blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    names = run(data, f"docs/{page}.md", code)
    if page == "own_format":
        images, labels = next(iter(names["loader"]))
        assert images.shape == (128, 3, 32, 32) and images.dtype == torch.uint8 and labels.dtype == torch.int64
    if page == "order":
        assert names["step"] == 1 and names["other"].state_dict()["epoch"] == 3
        (data / "state.pt").unlink()


@pytest.mark.slow
@pytest.mark.quick_every(1)
def test_the_program_of_the_readme_prints_what_it_says(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    importlib.import_module("make_photos").make_photos(tmp_path / "photos" / "train")
    sys.modules.pop("make_photos")
    (program,), (output,) = blocks(README), blocks(README, "text")
    assert len(program.splitlines()) <= 12
    capsys.readouterr()
    run(tmp_path, "README.md", [program])
    assert capsys.readouterr().out == output


def test_the_readme_is_short() -> None:
    """What is longer belongs on a page; each of the eight points has a number and a link."""
    assert len(README.splitlines()) <= 160 and len(README.split()) <= 800
    lines = README.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("pip install"))
    assert start < 25 and any("<picture>" in line for line in lines[:start])
    points = README.partition("## What it does\n")[2].partition("\n\n**Where it loses")[0].strip().splitlines()
    assert len(points) == 8
    numbers = r"\d|once|twice|two|four|billion"
    for point in points:
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", point.removeprefix("* "))
        assert len(text.split()) <= 15 and "](" in point and re.search(numbers, text), point


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings. GitHub and mkdocs give these headings the same anchors."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert "://" in link or (target.exists() and (not anchor or anchor in _anchors(target))), link
