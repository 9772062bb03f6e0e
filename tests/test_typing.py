"""What type checkers and editors see of a user's script."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import headrace
from headrace import (
    BaseDataset,
    EpisodeDataset,
    HDF5Dataset,
    ImageDataset,
    LoadingMode,
    RemoteOptions,
    SparseDataset,
    StreamingDataset,
    TableDataset,
    TextDataset,
    ZarrDataset,
)
from headrace.core.options import CommonOptions, ModeName
from headrace.io.remote.options import DEADLINE, RETRIES, RemoteKeywords

VALID = """\
from typing import Any, assert_type

import torch
from torch.utils.data import DataLoader, TensorDataset

from headrace import DataLoaderConfig, DataModule, HDF5Dataset, ImageDataset, Loader, LoadingMode
from headrace import MultiDataLoader, StreamingDataset, TextDataset, VisionCollator, ZarrDataset
from headrace import create_dataloader, open_dataset, suggest_num_workers

dataset = ImageDataset(
    "photos", image_size=64, loading_mode="cached", hold="encoded", on_error="skip", color="L"
)
assert_type(dataset, ImageDataset)
assert_type(dataset[0:3], ImageDataset)
assert_type(dataset.subset([1]), ImageDataset)
train, val = dataset.split(0.8)
assert_type(train, ImageDataset)
with TextDataset("books", unit="line", loading_mode=LoadingMode.EAGER) as texts:
    assert_type(texts, TextDataset)
volume = ZarrDataset(
    "volume.zarr", patch_shape=(64, 64), edges="pad", pad="edge", missing="error",
    cache_policy="lru", shared="machine",
)
shards = StreamingDataset("shards/part-{000..003}.tar", on_error=lambda index, path, error: None)

loader = create_dataloader(
    train, batch_size=64, shuffle="block", num_workers=2, weights=None, device=torch.device("cpu"),
    pad=False,
)
assert_type(loader, Loader)
plain: DataLoader[Any] = loader
numbers: Loader[int] = Loader([1, 2])
assert_type(next(iter(numbers)), int)
for images, targets in loader:
    print(images.shape, targets, len(loader), loader.dataset.targets, loader.epoch)
loader.load_state_dict(loader.state_dict())
options: dict[str, Any] = {"batch_size": 8}
config = DataLoaderConfig.train(batch_size=4)
create_dataloader("photos", config, image_size=64, loading_mode="lazy", pad=True, seed=3)
create_dataloader(["a.h5", "b.h5"], dataset_name="images", **options)
tensors = TensorDataset(torch.zeros(3))
create_dataloader(tensors, collate_fn=VisionCollator("cifar10"), batch_sampler=[[0, 1], [2]])
create_dataloader([torch.zeros(3)], shuffle=None)
MultiDataLoader(
    {"a": "photos", "b": val}, "weighted", weights={"a": 1, "b": 2}, epoch_length="max",
    batch_size=4, image_size=32,
)
module = DataModule(open_dataset("photos", image_size=8), val_split=0.1, drop_last=True)
workers: int = suggest_num_workers(HDF5Dataset("rows.h5", dtype="float32"), batch_size=4)
"""
WRONG = """\
import headrace
from headrace import DataLoaderConfig, ImageDataset, TextDataset, ZarrDataset, create_dataloader

dataset = ImageDataset("photos")
dataset = ImageDataset("photos", loading_mode="eagre")  # wrong
dataset.fold(3)  # wrong
create_dataloader(dataset, batch_size=4)
create_dataloader(dataset, 64)  # wrong
create_dataloader(ImageDataset, batch_size=64)  # wrong
TextDataset("books", unit="lines")  # wrong
ZarrDataset("volume.zarr", patch_shape=(8, 8), edges="padded")  # wrong
ImageDataset("photos", on_error="ignore")  # wrong
DataLoaderConfig(batch_size="4")  # wrong
for image, target in dataset.subset([1])[0:1].targts:  # wrong
    print(image)
"""
MARKED = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}
SOURCE = Path(headrace.__file__).parents[1]


def checked(tool: str, script: str, folder: Path) -> set[int]:
    """The lines of a script that a checker finds errors in, as in a user's own project: with the
    checker's own defaults.
    """
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed (extra `dev`)")
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    if SOURCE.name != "site-packages":
        environment["MYPYPATH"] = str(SOURCE)
    of_pyright = ["--outputjson", "--pythonpath", sys.executable]
    of_mypy = ["--output=json", "--cache-dir=../mypy", "--follow-imports=silent"]
    options = of_pyright if tool == "pyright" else of_mypy
    command = [sys.executable, "-m", tool, *options, path.name]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    print(done.stdout)
    if tool == "pyright":
        found = json.loads(done.stdout)["generalDiagnostics"]
        return {one["range"]["start"]["line"] + 1 for one in found}
    return {json.loads(line)["line"] for line in done.stdout.splitlines() if line[:1] == "{"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["pyright", "mypy"])
def test_planted_mistakes_alone_are_found(tool: str, tmp_path: Path) -> None:
    assert checked(tool, VALID, tmp_path) == set()
    assert checked(tool, WRONG, tmp_path) == MARKED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_public_types_are_known_to_pyright(tmp_path: Path) -> None:
    """At least nine of ten public symbols have a type that every checker finds alike."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed (extra `dev`)")
    # --verifytypes asks the first python on it
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = ["--verifytypes", "headrace", "--ignoreexternal", "--outputjson"]
    command = [sys.executable, "-m", "pyright", *options]
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    score = json.loads(done.stdout)["typeCompleteness"]["completenessScore"]
    assert score >= 0.9, f"{score:.1%}"


FORMATS = (
    ImageDataset,
    TextDataset,
    HDF5Dataset,
    EpisodeDataset,
    ZarrDataset,
    SparseDataset,
    TableDataset,
)


def test_options_are_declared_as_the_code_has_them() -> None:
    hints = get_type_hints(BaseDataset.__init__)
    parameters = inspect.signature(BaseDataset.__init__).parameters
    own = ("self", "source", "sample_decoder", "targets", "transform", "loading_mode")
    shared = {name: hints[name] for name in parameters if name not in own}
    assert get_type_hints(CommonOptions) == shared
    assert set(get_args(ModeName)) == {mode.value for mode in LoadingMode}
    for name in ("subset", "split", "__enter__"):  # views keep their class
        assert "Self" in inspect.get_annotations(getattr(BaseDataset, name))["return"], name


def test_remote_options_are_declared_once() -> None:
    assert set(get_type_hints(RemoteKeywords)) | {"cache_dir"} == {
        field.name for field in dataclasses.fields(RemoteOptions)
    }
    for one in (*FORMATS, StreamingDataset, headrace.write_index):
        if one is SparseDataset:
            continue
        assert not set(inspect.signature(one).parameters) & set(get_type_hints(RemoteKeywords))
        assert "retries:" not in (one.__doc__ or "") and "RemoteOptions" in (one.__doc__ or "")
    text = inspect.getdoc(RemoteOptions) or ""
    assert f"after the first ({RETRIES})" in text and f"seconds ({DEADLINE:g})" in text


def test_remote_options_are_checked_for_local_paths_too(tmp_path: Path) -> None:
    values: dict[str, Any] = {"retries": -1, "deadline": 0, "storage_options": "key", "retrys": 3}
    cached: dict[str, Any] = {"disk_cache_size": "much", "cache_dir": "s3://bucket"}
    doors: list[Any] = [*FORMATS, StreamingDataset, headrace.open_dataset]
    rows = [(door, *row) for door in doors for row in (values | cached).items()]
    rows += [(headrace.write_index, *row) for row in values.items()]
    for door, name, value in rows:
        with pytest.raises(headrace.ConfigError, match=name):
            door(tmp_path, **{name: value})
