"""A training job that is killed and resumed: run as a process of its own by test_kill.py.

Arguments: path mode workers steps_before_death state_out [state_in] [rank world_size batch_size].
It prints a line "epoch step digest-of-the-batch" a batch, and saves its state after each.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch

from headrace import ImageDataset, create_dataloader
from headrace.testing.contract import RandomProbe

EPOCHS = 3


class Augment(RandomProbe):
    def __call__(self, value: Any) -> Any:
        drawn = super().__call__(value)
        return {**drawn, "value": torch.from_numpy(drawn["value"].copy())}


def digest(batch: Any) -> str:
    inputs, targets = batch
    digest = hashlib.blake2b(digest_size=12)
    for tensor in (inputs["value"], inputs["draws"], targets):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    path, mode, workers, until, state_out = sys.argv[1:6]
    state_in, rank, world_size, batch_size = [
        *sys.argv[6:],
        *["", "0", "1", "4"][len(sys.argv[6:]) :],
    ]
    dataset = ImageDataset(
        path, image_size=(20, 28), transform=Augment(), transform_input="numpy", loading_mode=mode
    )
    loader = create_dataloader(
        dataset,
        batch_size=int(batch_size),
        shuffle=True,
        seed=11,
        num_workers=int(workers),
        rank=int(rank),
        world_size=int(world_size),
    )
    if state_in:
        with open(state_in) as file:
            loader.load_state_dict(json.load(file))
    received = 0
    while True:
        epoch = loader.state_dict()["epoch"] if state_in and not received else loader.next_epoch
        if epoch >= EPOCHS:
            break
        for batch in loader:
            received += 1
            state = loader.state_dict()
            with open(state_out + ".part", "w") as file:
                json.dump(state, file)
            os.replace(state_out + ".part", state_out)
            print(state["epoch"], state["batches"], digest(batch), flush=True)
            if received == int(until):
                print("WAITING", *(str(pid) for pid in sorted(loader._pids)), flush=True)
                sys.stdin.readline()  # killed here
    loader.close()


if __name__ == "__main__":
    main()
