"""What the recipes of docs/trainers.md are run with: data, a model, and a book of what the model
has seen.

Each training process appends a line of JSON for each batch to ``$BOOK/rank<r>.jsonl``. With
``$STOP_AT`` it fails as that training step begins, counted over the life of the process, as a
machine does that is lost.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

SIZES = {"train": 37, "val": 13}
_FEATURES = 5


class Interrupted(RuntimeError): ...


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that know their index, with noise that is drawn anew in each epoch."""

    def __init__(self, name: str) -> None:
        self._n, self._noise = SIZES[name], 0.1 if name == "train" else 0.0
        self._inputs = torch.randn(
            self._n, _FEATURES, generator=torch.Generator().manual_seed(len(name))
        )

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = self._inputs[index]
        return {
            "index": torch.tensor(index),
            "inputs": inputs + self._noise * torch.rand(_FEATURES),
            "labels": inputs.sum(),
        }


class Net(torch.nn.Module):
    """A model that writes down what it is given, and what it is."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._layers = torch.nn.Sequential(
                torch.nn.Linear(_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )
        self._steps = 0
        atexit.register(lambda: _write({"end": self._digest()}))

    def forward(
        self, index: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if self.training and str(self._steps) == os.environ.get("STOP_AT"):
            raise Interrupted(f"before step {self._steps}")
        self._steps += self.training
        _write({"train" if self.training else "val": index.tolist(), "weights": self._digest()})
        outputs = self._layers(inputs)[:, 0]
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "outputs": outputs}

    def _digest(self) -> str:
        values = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        return hashlib.blake2b(values, digest_size=8).hexdigest()


make_dataset, make_model = Numbers, Net


def _write(line: dict[str, Any]) -> None:
    with (Path(os.environ["BOOK"]) / f"rank{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
