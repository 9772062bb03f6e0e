"""A worker has its first batch prefetched before it is asked for it, and before it looks ahead."""

import os
from pathlib import Path
from typing import Any

from tests.testing.test_contract import SquareDataset

OPTIONS: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "shuffle": "block"}


class Noted(SquareDataset):
    """Notes in a file which steps each process has prefetched, and which batches were made."""

    def __init__(self, path: Path) -> None:
        super().__init__(loading_mode="streaming")
        self.path = path

    def _note(self, *words: Any) -> None:
        with open(self.path, "a") as file:
            file.write(" ".join(map(str, [os.getpid(), *words])) + "\n")

    def prefetch(self, key: Any, steps: range, batches: Any) -> None:
        self._note("prefetch", key, steps.start, steps.step)

    def __getitems__(self, indices: Any) -> Any:
        self._note("made")
        return super().__getitems__(indices)


def by_worker(path: Path) -> list[list[str]]:
    said: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        pid, _, rest = line.partition(" ")
        said.setdefault(pid, []).append(rest)
    return sorted(said.values())


def test_workers_begin_before_they_are_asked(make_loader: Any, tmp_path: Path) -> None:
    dataset = Noted(tmp_path / "notes")
    loader = make_loader(dataset, **OPTIONS)
    assert sum(map(len, loader)) == len(dataset)
    for worker, said in enumerate(by_worker(dataset.path)):
        assert said[:2] == [f"prefetch 0 {worker} 2"] * 2
        assert said[2] == f"prefetch 0 {worker + 2} 2"
    loader.set_epoch(3)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    dataset = Noted(tmp_path / "resumed")
    resumed = make_loader(dataset, **OPTIONS)
    resumed.load_state_dict(loader.state_dict())
    iterator = iter(resumed)
    for _ in range(2):  # a batch of each worker
        next(iterator)
    for step, said in zip((3, 4), by_worker(dataset.path), strict=True):
        assert said[:2] == [f"prefetch 3 {step} 2"] * 2
