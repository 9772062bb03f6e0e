"""Measures what an index of very many files costs. Run as a process of its own by test_scale.py.

Arguments: the number of files. It prints a line of JSON: bytes a sample, and bytes that a further
worker takes. The names are made up, by a file system that only lists.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

import fsspec
import psutil

from headrace import ImageDataset

CLASS_SIZE = 1000


def name_of(number: int) -> str:
    return f"n{number // CLASS_SIZE:08d}/image_{number:08d}.JPEG"


class MadeUp(fsspec.AbstractFileSystem):
    """``madeup://1000`` holds a thousand files."""

    protocol = "madeup"
    cachable = False
    listed = 0

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "type": "directory", "size": 0}

    def find(
        self,
        path: str,
        maxdepth: Any = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        type(self).listed += 1
        return [f"{path}/{name_of(i)}" for i in range(int(path))]


fsspec.register_implementation("madeup", MadeUp, clobber=True)


def held() -> int:
    """Bytes that would be free again if this process ended."""
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def work(dataset: ImageDataset, pipe: Connection) -> None:
    """In a worker: what a sampler and an error message ask for."""
    n = len(dataset)
    paths = [dataset.source_of(i) for i in range(0, n, max(1, n // 50))]
    pipe.send((n, paths[-1], MadeUp.listed, held()))


def worker_of(dataset: ImageDataset, method: str) -> tuple[int, str, int, int]:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    with ours, theirs:
        worker = context.Process(target=work, args=(dataset, theirs))
        worker.start()
        said: tuple[int, str, int, int] = ours.recv()
        worker.join()
    return said


def main() -> None:
    n = int(sys.argv[1])
    tiny = ImageDataset("madeup://10")
    worker_of(tiny, "fork")  # what the first worker makes the parent load
    before, MadeUp.listed = held(), 0
    dataset = ImageDataset(f"madeup://{n}")
    taken = held() - before
    names = sum(len(name) for name in dataset.sample_source.listing.names)
    said: dict[str, Any] = {
        "path_bytes": names / n,
        "bytes_a_sample": (taken - names) / n,
        "classes": len(dataset.classes),
    }
    for method in ("fork", "spawn"):
        length, _, listed, large = worker_of(dataset, method)
        small = worker_of(tiny, method)[-1]
        said[method] = {"more": large - small, "length": length, "listed": listed}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    said |= {"listed": MadeUp.listed, "after_workers": (held() - before - names) / n, "peak": peak}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
