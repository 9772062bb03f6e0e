"""How does a batch get onto a device?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def move_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """The batch with all its tensors on a device; what is no tensor stays as it is.

    Dicts, lists, tuples, named tuples and dataclasses are gone through and keep their types. A copy runs asynchronously only
    where it is safe to use its source again: from pinned memory to a CUDA device.
    """
    return _move(batch, torch.device(device))


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda" and value.device.type == "cpu" and value.is_pinned())
    if isinstance(value, Mapping):
        moved = {k: _move(v, device) for k, v in value.items()}
        if type(value) is dict:
            return moved
        try:
            return type(value)(moved)  # type: ignore[call-arg]
        except TypeError:  # a mapping with a constructor of its own
            return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(v, device) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_move(v, device) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _move(getattr(value, f.name), device) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value
