"""How does a batch get onto a device?"""

from __future__ import annotations

from typing import Any

import torch

from headrace.memory.tree import map_tensors


def move_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The batch with all its tensors on a device; what is no tensor stays as it is.

    Dicts, lists, tuples, named tuples and dataclasses are gone through and keep their types. A copy runs asynchronously only
    where it is safe to use its source again: from pinned memory to a CUDA device.
    """
    target = torch.device(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        is_safe = target.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
        return tensor.to(target, non_blocking=is_safe)

    return map_tensors(batch, move)
