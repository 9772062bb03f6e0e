"""The outputs that the guides show are those of the programs above them; numbers that vary from
run to run are masked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import ConfigError, ImageDataset, create_dataloader
from headrace.cli.main import main as headrace_main
from headrace.loader import data as loader_data
from tests.data.make import make_photos
from tests.loader.test_agreement import loader, ranks
from tests.test_examples import TINY
from tests.test_multinode import NEEDS_NETWORKS

ROOT = Path(__file__).parents[2]
LEFT_OUT = {
    "architecture: parent   Loader.__iter__": "a diagram of calls",
    "architecture:   storage/    Source": "a diagram of the chain",
    "order: lane(p) = (p div global_batch)": "a formula",
    "shuffling: L = min(m, interleave": "a formula",
    "shuffling: E[H] = log2(L)": "a formula",
    "start:   WHERE                 WHAT": "a diagram of the parts",
}
"""Blocks that no program prints, by page and beginning. docs/misuses.md and docs/cli.md are
compared by tests of their own.
"""
MACHINE = (
    r"^num_workers|^(memory|  reserved|  it is|  the limit)|^(lazy|eager|cached|streaming) "
    r"|^(parts|room|time|layout|/data/packed):"
)
"""Lines whose numbers are those of the machine, of other samples or of the moment."""


def shown(page: str, beginning: str, language: str = "text") -> str:
    """The block of a page that begins so."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (block,) = (block for of, block in blocks if of == language and block.startswith(beginning))
    return str(block)


def pattern(block: str, varying: str) -> re.Pattern[str]:
    """What an output must have in it to be that of the block.

    A line "..." stands for any lines, and "..." inside of a line for any text; numbers of lines in
    which `varying` is found may be others, and sizes have other units.
    """
    lines = []
    for line in block.splitlines():
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
            continue
        masked = re.search(varying, line) is not None
        parts = []
        for part in re.split(r"(\.\.\.|\d[\d,.]*(?: [kMGT]?B\b)?| {2,})", line):
            if part == "...":
                parts.append(".*")
            elif masked and part[:1].isdigit():
                parts.append(r"\d[\d,.]*" + (r" [kMGT]?B\b" if part.endswith("B") else ""))
            else:
                parts.append(
                    " +" if masked and part.isspace() and len(part) > 1 else re.escape(part)
                )
        lines.append("".join(parts) + r"\n")
    return re.compile("".join(lines))


def check(block: str, printed: str, varying: str = r"(?!)") -> None:
    """The output is that of the block; a failure shows both."""
    assert pattern(block, varying).search(printed), (
        f"the page shows\n{block}\nand the program prints\n{printed}"
    )


@pytest.fixture
def photos(tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`photos/train` in the current folder, with 150 photographs."""
    monkeypatch.chdir(tmp_path)
    return make_photos(tmp_path / "photos" / "train", per_class=50)


def test_every_text_block_is_compared_or_listed() -> None:
    """By name: a new block of a page needs a test here, or a reason."""
    source = Path(__file__).read_text(encoding="utf-8")
    found = set()
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.stem == "misuses":
            continue
        text = page.read_text(encoding="utf-8")
        names = re.findall(rf'shown\("{page.stem}", "([^"]+)"', source)
        for block in re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            listed = [name for name in LEFT_OUT if f"{page.stem}: {block}".startswith(name)]
            assert len(listed) + sum(map(block.startswith, names)) == 1, f"{page.name}: {block}"
            found |= set(listed)
    assert found == set(LEFT_OUT)


@pytest.mark.slow
def test_what_a_loader_chose(
    photos: Path, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run("loader", "loader = create_dataloader(dataset, batch_size=64, seed=7)\n")
    check(shown("loader", "batch_size   "), capsys.readouterr().out, MACHINE)


@pytest.fixture
def run() -> Callable[[str, str], None]:
    """Runs the first Python block of a page, which has this line."""

    def run_in(page: str, line: str) -> None:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        block = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
        assert line in block
        names = {"__name__": "page"}
        exec(compile(block, f"docs/{page}.md", "exec"), names)
        for name in ("loader", "dataset"):
            names[name].close()  # type: ignore[attr-defined]

    return run_in


def mixup(samples: list[object]) -> list[object]:
    return samples


def test_where_images_are_normalised(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: "cpu" passes for one here."""
    monkeypatch.setattr(loader_data, "is_accelerator", lambda device: device is not None)
    printed = ""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "device": "cpu"}
    with ImageDataset(photos) as dataset:
        for collate_fn in (None, mixup):
            with create_dataloader(dataset, collate_fn=collate_fn, **options) as made:
                printed += "".join(re.findall(r"^images:.*\n", made.explain(), re.MULTILINE))
    check(shown("loader", "images: uint8"), printed.replace("until cpu", "until cuda"))


def test_a_broken_sample(photos: Path) -> None:
    path = photos / "circle" / "circle_000.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with ImageDataset("photos/train") as dataset, pytest.raises(Exception) as raised:
        dataset[0]
    check(shown("loader", "SampleError"), f"{type(raised.value).__name__}: {raised.value}\n")


@pytest.mark.slow
def test_ranks_with_another_seed() -> None:
    block = " ".join(shown("multinode", "ConfigError: the ranks").split()) + "\n"

    def body(rank: int, barrier: Callable[[], None]) -> str:
        built, said = None, ""
        for turn in (0, 2, 3, 1):  # one after the other, so that all have been heard
            if turn == rank:
                try:
                    built = loader(seed=8 if rank == 1 else 7)
                except ConfigError as error:
                    said = str(error)
            barrier()
        return said or str(len(list(built or ())))

    for said in ranks(4, body):
        check(block, f"ConfigError: {said}\n")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@NEEDS_NETWORKS
def test_the_demonstration_of_two_nodes(tmp_path: Path) -> None:
    options = ["--demo", "--device", "cpu", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "examples" / "train_multinode.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    check(shown("multinode", "life 1: two nodes"), done.stdout, "rank|step|life|node")


@pytest.mark.slow
def test_the_table_of_a_training(tmp_path: Path) -> None:
    """With fewer and smaller photographs than the page's."""
    options = ["--all-modes", "--images", "24", *TINY]
    command = [sys.executable, str(ROOT / "examples" / "train_images.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(shown("start", "mode       epoch 1"), done.stdout, f"{MACHINE}|^mode")


@pytest.mark.slow
def test_what_would_be_packed(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of fewer photographs than the page's, in smaller parts, some of which have a sample more
    than others.
    """
    (photos / "circle" / "circle_000.jpg").unlink()
    command, _, output = shown("packing", "$ headrace pack", "").partition("\n")
    headrace_main(command.replace("10MB", "500kB").split()[2:])
    check(output, capsys.readouterr().out.replace(str(photos.parents[1]), "/data"), MACHINE)
