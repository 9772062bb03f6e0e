"""How are samples of one shape stacked into a batch?

Straight into the batch's buffer: `headrace.memory.ring.empty` gives a tensor inside the ring slot where there is one.
"""

from __future__ import annotations

import copy
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
    if _is_numeric(first):
        return _stack_tensors([torch.from_numpy(_native(np.asarray(v))) if _is_numeric(v) else v for v in values], place)
    if isinstance(first, (bool, int, float)) and all(isinstance(v, (bool, int, float)) for v in values):
        return _stack_numbers(values, place)
    if isinstance(first, Mapping):
        keys = list(first)
        for number, value in enumerate(values):
            if not isinstance(value, Mapping) or set(value) != set(keys):
                is_ = f"has the keys {sorted(map(str, value))}" if isinstance(value, Mapping) else f"is {_shape_of(value)}"
                raise _differs(place, f"sample {number} {is_}, the first has the keys {sorted(map(str, keys))}")
        fields = {key: _stack([v[key] for v in values], f"{place}[{key!r}]") for key in keys}
        return fields if type(first) is dict else like_mapping(first, fields)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*_columns(values, place))
    if isinstance(first, (tuple, list)):
        columns = _columns(values, place)
        try:
            return type(first)(columns)
        except TypeError:  # a tuple of certain things only, such as torch.Size
            return tuple(columns) if isinstance(first, tuple) else columns
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return _stack_dataclass(values, place)
    return values


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc"


def _stack_numbers(values: list[Any], place: str) -> torch.Tensor:
    dtype = torch.float64 if any(isinstance(v, float) for v in values) else None
    try:
        return torch.tensor(values, dtype=dtype)
    except (RuntimeError, ValueError, OverflowError):
        worst = max(values, key=abs)
        raise _differs(place, f"{worst} does not fit into a tensor") from None


def _stack_dataclass(values: list[Any], place: str) -> Any:
    first = values[0]
    for number, value in enumerate(values):
        if type(value) is not type(first):
            raise _differs(place, f"sample {number} is {_shape_of(value)}, the first is {_shape_of(first)}")
    batch = copy.copy(first)  # its constructor made a sample, and may refuse a batch
    for field in dataclasses.fields(first):
        column = _stack([getattr(value, field.name) for value in values], f"{place}.{field.name}")
        object.__setattr__(batch, field.name, column)  # of a frozen one too
    return batch


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
