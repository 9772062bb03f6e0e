"""Ranks of a machine hold each sample once, within bounds."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler
from zarr.storage import MemoryStore

from headrace import (
    BaseDataset,
    ConfigError,
    ImageDataset,
    ZarrDataset,
    create_dataloader,
    open_dataset,
)
from tests.formats.zarr.test_objects import filled
from tests.testing.test_contract import SquareDataset, Squares

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="files shared by a machine need Linux"
)
RANK = """
import json, sys
from headrace import ImageDataset, create_dataloader
dataset = ImageDataset(
    sys.argv[1], image_size=32, loading_mode=sys.argv[2], shared="machine", cache_dir=sys.argv[3],
    progress=False,
)
loader = create_dataloader(dataset, batch_size=2, num_workers=int(sys.argv[4]), shuffle=False)
print("READY", flush=True); sys.stdin.readline()
for _ in range(2):
    sums = [float(images.sum()) for images, _ in loader]
print(json.dumps([sums, dataset.held.stats()]), flush=True); sys.stdin.readline()
"""


def stores(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith("headrace-store")]


class Ranks:
    """Two processes of one job on one machine."""

    def __init__(self, photos: Path, mode: str, folder: Path, workers: int = 0) -> None:
        command = [sys.executable, "-c", RANK, str(photos), mode, str(folder), str(workers)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        path = os.pathsep.join(filter(None, sys.path))
        self.processes: list[Any] = []
        for rank in ("0", "1"):
            world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **world, "PYTHONPATH": path}
            self.processes.append(subprocess.Popen(command, env=environment, **pipes))
        assert [process.stdout.readline() for process in self.processes] == ["READY\n"] * 2

    def results(self) -> list[Any]:
        for process in self.processes:
            print(file=process.stdin, flush=True)
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.communicate("\n", timeout=60)
            process.stdin.close()
            process.stdout.close()


@pytest.mark.slow
@linux
@pytest.mark.parametrize(("workers", "mode"), [(1, "cached"), (0, "eager")])
def test_ranks_share_one_copy(photos: Path, tmp_path: Path, mode: str, workers: int) -> None:
    expected = ImageDataset(photos, image_size=32)
    with Ranks(photos, mode, tmp_path, workers) as ranks:
        results = ranks.results()
        assert len(stores(tmp_path)) == 1
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "shuffle": False, "world_size": 2}
    for rank, (sums, stats) in enumerate(results):
        batches = create_dataloader(expected, rank=rank, **options)
        assert sums == [float(images.sum()) for images, _ in batches]
        assert stats["held"] == stats["admitted"] <= 24
    # by both together, as the last one sees it
    assert max(stats["held"] for _, stats in results) == 24
    assert stores(tmp_path) == []


@pytest.mark.slow
@linux
@pytest.mark.parametrize("mode", ["cached", "eager"])
def test_what_killed_ranks_left_the_next_run_uses_or_removes(
    photos: Path, tmp_path: Path, mode: str
) -> None:
    with Ranks(photos, mode, tmp_path) as ranks:
        for process in ranks.processes:
            process.kill()
            process.wait()
    assert len(stores(tmp_path)) == 1
    with Ranks(photos, mode, tmp_path) as ranks:
        assert max(stats["held"] for _, stats in ranks.results()) == 24
    assert stores(tmp_path) == []


@linux
def test_only_what_is_held_alike_is_shared(tiny_photos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"image_size": 32, "loading_mode": "cached", "progress": False}
    options |= {"shared": "machine", "cache_dir": tmp_path}
    changes: list[dict[str, Any]] = [
        {"image_size": 16},
        {"color": "L"},
        {"loading_mode": "eager"},
        {"hold": "encoded"},
        {"transform": np.asarray},
    ]
    one = ImageDataset(tiny_photos, **options)
    alike = ImageDataset(tiny_photos, **{**options, "seed": 5, "normalize": False})
    with one, alike:
        assert len(stores(tmp_path)) == 1
        for change in changes:
            with ImageDataset(tiny_photos, **{**options, **change}):
                assert len(stores(tmp_path)) == 2, change
    assert stores(tmp_path) == []


@linux
def test_files_of_one_layout_are_not_mixed(tmp_path: Path, monkeypatch: Any) -> None:
    options: dict[str, Any] = {"shared": "machine", "loading_mode": "eager", "progress": False}
    options["cache_dir"] = tmp_path
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        np.save(tmp_path / f"{number}/rows.npy", np.full((3, 2), number))
    datasets: list[Any] = []
    for number in range(2):
        monkeypatch.chdir(tmp_path / f"{number}")
        datasets.append(open_dataset("rows.npy", **options))
        assert (np.stack(list(datasets[-1])) == number).all()
    with open_dataset(tmp_path / "1/rows.npy", **options):
        assert len(stores(tmp_path)) == 2
    for dataset in datasets:
        dataset.close()
    with pytest.raises(ConfigError, match=r"data_path=.* can't be compared"):
        ZarrDataset(filled(MemoryStore()), "x", **options)


def test_arguments_that_make_no_sense(tiny_photos: Path, tmp_path: Path) -> None:
    for mode in ("lazy", "streaming"):
        with pytest.raises(ConfigError, match=f"'{mode}'"):
            ImageDataset(tiny_photos, loading_mode=mode, shared="machine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shared"):
        ImageDataset(tiny_photos, shared="node")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    options: dict[str, Any] = {"loading_mode": "cached", "shared": "machine"}
    with pytest.raises(OSError, match="cache_dir"):
        ImageDataset(tiny_photos, cache_dir=tmp_path / "file", **options)


class Own(BaseDataset):
    def __init__(self, factor: Any, **options: Any) -> None:
        self.factor = factor
        super().__init__(Squares(()), **options)

    def decode(self, record: bytes) -> Any:
        factor = self.factor() if callable(self.factor) else self.factor
        return np.frombuffer(record, "<i8") * factor


@linux
def test_a_format_of_ones_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loading_mode": "cached", "shared": "machine", "cache_dir": tmp_path}
    with Own(2, **options) as one, Own(2, **options) as alike, Own(3, **options) as other:
        assert (int(one[3][0]), int(alike[3][0]), int(other[3][0])) == (6, 6, 9)
        assert alike.held.stats()["held"] == 1 and len(stores(tmp_path)) == 2
    with pytest.raises(ConfigError, match=r"factor=.*held_as\(\)"):
        Own(lambda: 2, **options)


# -- what to hold


def test_auto_takes_lru_for_weights_alone() -> None:
    for sampler, policy in (
        (WeightedRandomSampler(torch.ones(42), 42), "lru"),
        (RandomSampler(range(42), replacement=True), "keep"),
        (None, "keep"),
    ):
        for given, expected in (("auto", policy), ("keep", "keep"), ("lru", "lru")):
            with SquareDataset(loading_mode="cached", cache_policy=given) as dataset:
                create_dataloader(dataset, sampler=sampler, num_workers=0)
                is_lru = dataset.held.store.header.lru  # type: ignore[attr-defined]
                assert is_lru == (expected == "lru")


def own_memory(pid: int) -> int:
    """PSS without mapped files, whose pages count for more when other processes end."""
    own = ("Pss_Anon:", "Pss_Shmem:")
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(own))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux says so")
def test_a_thousand_epochs_leave_nothing_behind(make_loader: Any) -> None:
    me = psutil.Process()

    def taken() -> tuple[int, int, int]:
        gc.collect()  # which writes to pages that workers shared until then
        pids = [me.pid, *(child.pid for child in me.children(recursive=True))]
        return sum(map(own_memory, pids)), me.num_fds(), me.num_threads()

    with SquareDataset(loading_mode="eager", progress=False) as dataset:
        loader = make_loader(dataset, batch_size=16, num_workers=2)
        for _ in range(100):
            list(loader)
        pss, fds, threads = taken()
        for _ in range(1000):
            list(loader)
        later = taken()
        assert later[1:] == (fds, threads) and later[0] < pss + (4 << 20)
        loader.close()
