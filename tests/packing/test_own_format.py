"""The dataset of docs/own_format.md packs, and trains from the pack as from its file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import HDF5Dataset, create_dataloader, pack, verify
from headrace.packing import pack_status

PAGE = Path(__file__).parents[2] / "docs" / "own_format.md"
RECORDS = np.random.default_rng(3).integers(0, 256, (60, 3073), dtype=np.uint8)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, as the page has it, beside a file of 60 records; its last line has run."""
    RECORDS.tofile(tmp_path / "data_batch_1.bin")
    monkeypatch.chdir(tmp_path)
    block = next(
        code
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "class Cifar(" in code
    )
    names: dict[str, Any] = {}
    exec(block, names)
    with names.pop("loader") as loader, loader.dataset:
        assert sum(len(images) for images, _ in loader) == 60
    return names["Cifar"]


@pytest.mark.quick_every(4)
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
@pytest.mark.parametrize("parts", [False, True])
def test_cifar_trains_from_its_pack(cifar: Any, tmp_path: Path, mode: str, parts: bool) -> None:
    out = pack(
        cifar("data_batch_1.bin"), tmp_path / "packed", **({"shard_size": "50kB"} if parts else {})
    )
    assert verify(out).ok and (not parts or pack_status(out).parts == 4)

    def epochs(dataset: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # rows of a packed file share blocks, and records of a source that says nothing do not
        shuffle: Any = mode != "streaming"
        with (
            dataset,
            create_dataloader(
                dataset, batch_size=16, seed=7, shuffle=shuffle, num_workers=0
            ) as loader,
        ):
            return [
                (images.clone(), targets.clone()) for _ in range(2) for images, targets in loader
            ]

    def step(weights: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights = weights.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(
            images.flatten(1).float() / 255 @ weights, targets % 10
        )
        return (weights - 0.1 * torch.autograd.grad(loss, weights)[0]).detach()

    trained = []
    opened = HDF5Dataset(out, target_name="targets", loading_mode=mode)
    assert opened.fingerprint == "cifar-60" and opened.targets.tolist() == RECORDS[:, 0].tolist()
    for dataset in (cifar("data_batch_1.bin", loading_mode=mode), opened):
        trained.append(epochs(dataset))
    assert len(trained[0]) == len(trained[1]) == 8
    weights = [torch.zeros(3072, 10), torch.zeros(3072, 10)]
    for number, batches in enumerate(zip(*trained, strict=True)):
        (images, targets), (others, theirs) = batches
        assert (
            torch.equal(images, others)
            and torch.equal(targets, theirs)
            and targets.dtype == theirs.dtype
        ), number
        weights = [step(own, *batch) for own, batch in zip(weights, batches, strict=True)]
    assert torch.equal(*weights) and weights[0].abs().sum() > 0


def test_the_pack_holds_plain_rows(cifar: Any, tmp_path: Path) -> None:
    """Also for who reads it with another program: rows of pixels, and labels."""
    out = pack(cifar("data_batch_1.bin"), tmp_path / "out.h5")
    with h5py.File(out) as file:
        assert (
            file["data"].shape == (60, 3, 32, 32)
            and file["data"][:].tobytes() == RECORDS[:, 1:].tobytes()
        )
        assert file["targets"][:].tolist() == RECORDS[:, 0].tolist()
