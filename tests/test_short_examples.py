"""The short examples run as a user runs them, each under 100 lines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import pytest

import headrace

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SHORT = (
    *(
        "own_format",
        "pack_dask",
        "stream_shards",
        "train_audio",
        "train_chats",
        "train_images",
        "train_lightning",
    ),
    *("train_mixed_precision", "train_sparse", "train_text", "train_volume"),
)
pytestmark = pytest.mark.slow


def _run(folder: Path, name: str, *options: Any, code: int = 0) -> str:
    """What an example prints; with `code` 2 its error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, EXAMPLES / f"{name}.py", *map(str, options)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=110)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert process.returncode == code, output + errors
    return errors if code else output


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_short_and_listed(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 160
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    # in the list of docs/start.md, and beside its subject
    assert sum(f"`examples/{name}.py`" in page for page in pages) >= 2


def test_sparse_rows_of_cells(tmp_path: Path) -> None:
    found = [
        _run(tmp_path, "train_sparse", "--epochs", 2, "--workers", 0, "--mode", mode)
        for mode in ("lazy", "cached")
    ]
    assert (
        "2,000 cells x 2,000 genes, of the kinds B cell, NK, T cell, monocyte" in found[0]
        and found[0] == found[1]
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", found[0])]
    assert losses[1] < losses[0] and float(re.findall(r"cells ([\d.]+)%", found[0])[-1]) > 60
    wrong = _run(tmp_path, "train_sparse", "nothing.h5ad", code=2)
    assert wrong.startswith("error: ") and wrong.count("\n") == 1


def test_chats_of_which_answers_are_learned(tmp_path: Path) -> None:
    found = [
        _run(tmp_path, "train_chats", "--epochs", 2, "--workers", 0, *options)
        for options in ([], ["out/chats.jsonl", "--mode", "streaming"])
    ]
    for output in found:
        (first, labels, tokens), (last, *same) = re.findall(
            r"loss ([\d.]+) of ([\d,]+) labels, in ([\d,]+) tokens", output
        )
        assert float(last) < float(first) / 2 and same == [labels, tokens] == ["5,983", "34,951"]
        assert re.search(r"labels: '((one|two|three|four|five|six|seven|eight|none)\\n)+'", output)
    assert len((EXAMPLES / "train_chats.py").read_text(encoding="utf-8").splitlines()) < 160
    wrong = _run(tmp_path, "train_chats", "nothing.jsonl", code=2)
    assert wrong.startswith("error: ") and wrong.count("\n") == 1


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    output = _run(tmp_path, "own_format", "--workers", 2)
    assert output.count(": yes\n") == 4 and "NO" not in output
    (tmp_path / "cut.bin").write_bytes(b"x" * 1500)
    assert "are no whole number of records" in _run(tmp_path, "own_format", "cut.bin", code=1)


def test_shards_from_a_server(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    output = _run(tmp_path, "stream_shards", "--images", 64, "--workers", 1)
    assert (
        "64 samples, 4 batches" in output
        and "stopped after batch 2, went on: 64 samples, each exactly once: yes" in output
    )
    assert int(re.findall(r"answered (\d+) requests", output)[0]) > 4
    assert _run(tmp_path, "stream_shards", tmp_path / "nothing.tar", code=2).startswith("error: ")


def test_sounds_of_different_lengths(tmp_path: Path) -> None:
    output = _run(tmp_path, "train_audio", "--epochs", 2, "--workers", 0)
    padding = [float(share) for share in re.findall(r"([\d.]+)% of the values are padding", output)]
    assert padding[1] < padding[0] / 2
    assert float(re.findall(r"right ([\d.]+)%", output)[-1]) > 90
    with wave.open(str(next((tmp_path / "out/sounds/a4").iterdir()))) as file:
        assert file.getframerate() == 8000


def test_mixed_precision_without_a_gpu_is_said(tmp_path: Path) -> None:
    options = ["--images", 48, "--size", 32, "--epochs", 1, "--workers", 0]
    output = _run(tmp_path, "train_mixed_precision", *options)
    assert re.search(r"^device: (cpu \(no GPU here: bfloat16 on the CPU|cuda \()", output)
    assert "scores torch.bfloat16, weights torch.float32, batch on c" in output
    wrong = _run(tmp_path, "train_mixed_precision", "nothing", code=2)
    assert wrong.startswith("error: ") and wrong.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "package"), [("train_lightning", "lightning"), ("pack_dask", "distributed")]
)
def test_what_is_not_installed_is_said(name: str, package: str, tmp_path: Path) -> None:
    program = (
        f"import sys, runpy; sys.modules[{package!r}] = None; sys.path.insert(0, "
        f"{str(EXAMPLES)!r}); runpy.run_path(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, EXAMPLES / f"{name}.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and re.fullmatch(
        r"error: this example needs \w+: pip install .*\n", done.stderr
    )


@pytest.mark.integration
def test_lightning_resumes_to_the_last_bit(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    output = _run(tmp_path, "train_lightning", "--images", 90, "--epochs", 2, "--workers", 0)
    assert "stopped after 2, resumed for 8: the same losses to the last bit: yes" in output


@pytest.mark.integration
def test_packing_on_dask_survives_a_killed_worker(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    output = _run(tmp_path, "pack_dask", "--images", 240)
    assert "killed worker" in output and re.search(r"(\d+) of \1 parts done, joined", output)
    assert len(headrace.ImageDataset(tmp_path / "out/packed")) == 240
