"""An index of very many files stays small, and a further worker costs next to nothing."""

from __future__ import annotations

import gc
import multiprocessing
import resource
from typing import Any

import fsspec
import psutil
import pytest

from headrace import ImageDataset

CLASS_SIZE = 1000
LIMIT = 100  # bytes a sample, beside the bytes of its path


def name_of(number: int) -> str:
    return f"n{number // CLASS_SIZE:08d}/image_{number:08d}.JPEG"


class MadeUp(fsspec.AbstractFileSystem):
    """A file system that only lists: ``madeup://1000`` holds a thousand files."""

    protocol = "madeup"
    cachable = False
    listed = 0

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "directory", "size": 0}

    def find(self, path: str, *_: Any, **__: Any) -> list[str]:
        type(self).listed += 1
        return [f"{path}/{name_of(i)}" for i in range(int(path))]


fsspec.register_implementation("madeup", MadeUp, clobber=True)


def held_bytes() -> int:
    """What would be free again if this process ended."""
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def work(dataset: ImageDataset, pipe: Any) -> None:
    """In a worker: what a sampler and an error message ask for."""
    n = len(dataset)
    for index in range(0, n, max(1, n // 50)):
        dataset.source_of(index)
    pipe.send((n, MadeUp.listed, held_bytes()))


def worker_of(dataset: ImageDataset, method: str) -> tuple[int, int, int]:
    """Its samples, how often it has listed, and what it holds."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    with ours, theirs:
        worker = context.Process(target=work, args=(dataset, theirs))
        worker.start()
        found: tuple[int, int, int] = ours.recv()
        worker.join()
    return found


@pytest.mark.nightly
def test_ten_million_files_and_a_further_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    n, tiny = 10_000_000, ImageDataset("madeup://10")
    worker_of(tiny, "fork")  # what the first worker makes the parent load
    before = held_bytes()
    monkeypatch.setattr(MadeUp, "listed", 0)
    dataset = ImageDataset(f"madeup://{n}")
    path_bytes = n * len(name_of(0))
    assert (held_bytes() - before - path_bytes) / n < LIMIT
    assert len(dataset.classes) == n // CLASS_SIZE and MadeUp.listed == 1
    for method in ("fork", "spawn"):
        length, listed, held = worker_of(dataset, method)
        assert held - worker_of(tiny, method)[2] < 5_000_000
        assert length == n and listed == (1 if method == "fork" else 0)  # it was built once
    assert (held_bytes() - before - path_bytes) / n < LIMIT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 << 30
