"""The examples run, as a user runs them."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MODES = ("lazy", "eager", "cached", "streaming")
TINY = ["--image-size", "32", "--batch-size", "8", "--workers", "0"]
ALONE = ["--workers", "0"]


def run_example(folder: Path, name: str, *options: Any, code: int = 0) -> str:
    """What an example prints."""
    caches = {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, options)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **caches},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.quick_every(1)
def test_examples_are_short_and_listed() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    helpers = {"two_nodes", "ledger", "report_modes", "serve_shards"}
    long = {"train_multinode", "stream_multinode"}
    for path in EXAMPLES.glob("*.py"):
        if path.stem not in helpers | long and not path.stem.startswith("make_"):
            assert len(path.read_text(encoding="utf-8").splitlines()) < 160, path
            # in the list of docs/start.md, and beside its subject
            assert sum(f"`examples/{path.name}`" in page for page in pages) >= 1, path


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("train_clone", ["--epochs", 3, *ALONE], "of unseen episodes"),
        ("train_text", ["--steps", 30, "--length", 64, *ALONE], "perplexity of unseen blocks"),
        ("train_masks", ["--size", 32, "--epochs", 4, *ALONE], "."),
        ("train_boxes", ["--size", 32, "--epochs", 4, *ALONE], "."),
        ("train_sparse", ["--epochs", 2, *ALONE], "2,000 cells x 2,000 genes, of the kinds B cell"),
        ("train_chats", ["--epochs", 2, *ALONE], "of 5,983 labels, in 34,951 tokens"),
        ("train_audio", ["--epochs", 2, *ALONE], "% of the values are padding"),
        (
            "train_mixed_precision",
            ["--images", 48, "--size", 32, "--epochs", 1, *ALONE],
            "scores torch.bfloat16, weights torch.float32",
        ),
        ("own_format", ["--workers", 2], r"(.*: yes\n){4}"),
        (
            "stream_shards",
            ["--images", 64, "--workers", 1],
            "stopped after batch 2, went on: 64 samples, each exactly once: yes",
        ),
    ],
)
def test_an_example_runs(name: str, options: list[Any], said: str, tmp_path: Path) -> None:
    if name == "stream_shards":
        pytest.importorskip("aiohttp")
    output = run_example(tmp_path, name, *options)
    assert re.search(said, output), output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) < 2 or losses[-1] < losses[0]


def test_training_on_patches_of_a_volume(tmp_path: Path, scripts: Any) -> None:
    volume = scripts("make_volume").make_volume(tmp_path / "a.zarr", (24, 64, 96))
    options = ["--patch", 8, 16, 16, "--epochs", 2, *ALONE]
    output = run_example(tmp_path, "train_volume", volume, *options)
    first, second = (float(loss) for loss in re.findall(r" loss ([\d.]+) ", output))
    assert second < first


@pytest.mark.parametrize(
    "command",
    [
        *("train_images a", "train_volume a.zarr", "train_text a", "train_masks a a"),
        *("train_boxes a a", "train_sparse a.h5ad", "train_chats a.jsonl"),
        *("train_mixed_precision a", "stream_shards a.tar"),
    ],
)
def test_an_error_is_one_line(
    command: str,
    deterministic_torch: None,
    scripts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / f"{sys.argv[0]}.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "package"), [("train_lightning", "lightning"), ("pack_dask", "distributed")]
)
def test_what_is_not_installed_is_said(name: str, package: str, tmp_path: Path) -> None:
    program = (
        f"import sys, runpy; sys.modules[{package!r}] = None; sys.path.insert(0, "
        f"{str(EXAMPLES)!r}); runpy.run_path(sys.argv[1])"
    )
    command = [sys.executable, "-c", program, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and re.fullmatch(r"error: .*: pip install .*\n", done.stderr)


@pytest.mark.integration
@pytest.mark.nightly
def test_lightning_resumes_to_the_last_bit(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    output = run_example(tmp_path, "train_lightning", "--images", 90, "--epochs", 2, *ALONE)
    assert "stopped after 2, resumed for 8: the same losses to the last bit: yes" in output


@pytest.mark.integration
@pytest.mark.nightly
def test_packing_on_dask_survives_a_killed_worker(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    output = run_example(tmp_path, "pack_dask", "--images", 240)
    assert "killed worker" in output and re.search(r"(\d+) of \1 parts done, joined", output)
    assert len(headrace.ImageDataset(tmp_path / "out/packed")) == 240


# -- examples/train_images.py


@pytest.fixture
def example(deterministic_torch: None, scripts: Any) -> Any:
    return scripts("train_images")


@pytest.fixture
def run(
    example: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Trains on photographs with these options; the losses of the epochs that it printed."""

    def losses(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["train_images.py", str(photos), *TINY, *options])
        assert example.main() == 0
        return re.findall(r"loss (\S+)", capsys.readouterr().out)

    return losses


# after the second and the last of three batches
@pytest.mark.parametrize("images", [16, 24])
def test_ctrl_c_saves_a_state_from_which_another_mode_goes_on(
    example: Any,
    run: Callable[..., list[str]],
    images: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, add = str(tmp_path / "state.pt"), example.Epoch.add

    def stop(epoch: Any, *batch: Any) -> None:
        add(epoch, *batch)
        if epoch.images == images:
            signal.raise_signal(signal.SIGINT)

    whole = run("--epochs", "2")
    monkeypatch.setattr(example.Epoch, "add", stop)
    with pytest.raises(SystemExit, match="130"):
        run("--epochs", "2", "--state", state)
    capsys.readouterr()
    monkeypatch.setattr(example.Epoch, "add", add)
    rest = whole[1:] if images == 24 else whole
    assert run("--epochs", "2", "--mode", "eager", "--state", state) == rest
