"""A training job that saves its state when SIGTERM comes: run as a process of its own by
test_signals.py.

Arguments: method state. It prints a line "batch indices" a batch, and "handler number pid" where a
handler runs. With a state it goes on from there. It goes on for ten batches after SIGTERM, and
exits in the middle of an epoch, while its workers still live.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import FrameType

from torch.utils.data import Dataset

from headrace import create_dataloader

BATCHES, MORE = 40, 10


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def main() -> None:
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        print("handler", number, os.getpid(), flush=True)
        came.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    method, path = sys.argv[1:]
    loader = create_dataloader(
        Slow(), batch_size=2, shuffle=True, seed=3, num_workers=2, multiprocessing_context=method
    )
    if os.path.exists(path):
        with open(path) as file:
            loader.load_state_dict(json.load(file))
    batches, left = iter(loader), MORE
    for batch in batches:
        print("batch", *batch.tolist(), flush=True)
        if signal.SIGTERM in came:
            left -= 1
        if not left:
            break
    with open(path, "w") as file:
        json.dump(loader.state_dict(), file)
    print("workers", *loader._pids, flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
