"""How are samples of one shape stacked into a batch?

Straight into the batch's buffer: `headrace.memory.ring.empty` gives a tensor inside the ring slot where there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import like_mapping


def list_collate(samples: Sequence[Any]) -> list[Any]:
    """The samples as a list, as they are: for models that take images of different sizes, say."""
    return list(samples)


def stack_collate(samples: Sequence[Any]) -> Any:
    """Stacks samples; structure and dtypes are kept.

    Tensors and arrays [...] become tensors [batch, ...]; numbers become tensors [batch] (int64, float64, bool, as torch's
    `default_collate` makes them); dicts, tuples, named tuples, lists and dataclasses stay what they are, with batched fields;
    everything else (texts, None, objects) becomes a list.

    Raises:
        ConfigError: shapes or structures differ; the message names the place, the shapes, and the remedies.
    """
    return _stack(list(samples), "")


def _stack(values: list[Any], place: str) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return _stack_tensors(values, place)
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        return _stack_tensors([torch.from_numpy(_native(v)) if isinstance(v, np.ndarray) else v for v in values], place)
    if isinstance(first, np.generic) and first.dtype.kind in "biufc":
        return _stack_tensors([torch.from_numpy(np.asarray(v)) for v in values], place)
    if isinstance(first, (bool, int, float)) and all(isinstance(v, (bool, int, float)) for v in values):
        dtype = torch.float64 if any(isinstance(v, float) for v in values) else None
        return torch.tensor(values, dtype=dtype)
    if isinstance(first, Mapping):
        keys = list(first)
        for number, value in enumerate(values):
            if not isinstance(value, Mapping) or set(value) != set(keys):
                raise _differs(place, f"sample {number} has the keys {sorted(map(str, value))}, the first {sorted(map(str, keys))}")
        fields = {key: _stack([v[key] for v in values], f"{place}[{key!r}]") for key in keys}
        return fields if type(first) is dict else like_mapping(first, fields)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*_columns(values, place))
    if isinstance(first, (tuple, list)):
        return type(first)(_columns(values, place))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in dataclasses.fields(first)]
        return dataclasses.replace(first, **{n: _stack([getattr(v, n) for v in values], f"{place}.{n}") for n in names})
    return values


def _columns(values: list[Any], place: str) -> list[Any]:
    width = len(values[0])
    for number, value in enumerate(values):
        if not isinstance(value, (tuple, list)) or len(value) != width:
            raise _differs(place, f"sample {number} is {_shape_of(value)}, the first has {width} fields")
    return [_stack([v[i] for v in values], f"{place}[{i}]") for i in range(width)]


def _stack_tensors(tensors: list[Any], place: str) -> torch.Tensor:
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise _differs(place, f"sample {number} is {_shape_of(tensor)}, the first is {_shape_of(first)}")
    if type(first) is not torch.Tensor or first.layout is not torch.strided or first.device.type != "cpu" or first.requires_grad:
        return torch.stack(tensors)
    return torch.stack(tensors, out=empty((len(tensors), *first.shape), first.dtype))


def _native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array that torch takes without a warning: in the machine's byte order, writable, without negative strides."""
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy()


def _shape_of(value: Any) -> str:
    return (
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(type(value).__name__)
    )


def _differs(place: str, what: str) -> ConfigError:
    where = f" at {place}" if place else ""
    return ConfigError(
        f"samples of one batch can't be stacked{where}: {what}. Give all one shape (ImageDataset: image_size=), "
        'or pass collate_fn="list" or a function of your own'
    )
