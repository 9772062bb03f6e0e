"""Nested values: maps their tensors, and pickles them with the bytes of arrays apart."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

_NUMPY: dict[torch.dtype, Any] = {
    torch.from_numpy(np.empty(0, name)).dtype: np.dtype(name)
    for name in ("bool", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
}  # in the machine's byte order
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `function` applied to all its tensors; what is no tensor stays as it is.

    Dicts, lists, tuples, named tuples and dataclasses are gone through and keep their types.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    keys = keys_of(value)
    if keys is None:
        return value
    items = [map_tensors(field_of(value, key), function) for key in keys]
    return rebuilt(value, keys, items)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in the order of `map_tensors`."""
    tensors: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(value, add)
    return tensors


def keys_of(value: Any) -> Any:
    """The keys, positions or `dataclasses.Field` of what a container holds, equal where containers
    are alike; None: it is none.
    """
    if isinstance(value, (tuple, list)):
        return range(len(value))
    if isinstance(value, Mapping):
        return value.keys()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.fields(value)
    return None


def field_of(value: Any, key: Any) -> Any:
    """What a container holds at one of its `keys_of`."""
    if isinstance(key, dataclasses.Field):
        return getattr(value, key.name)
    return value[key]


def rebuilt(example: Any, keys: Any, items: list[Any]) -> Any:
    """A container of the example's type with other items at its `keys_of`."""
    if isinstance(example, Mapping):
        return like_mapping(example, dict(zip(keys, items, strict=True)))
    if dataclasses.is_dataclass(example):
        made: Any = copy.copy(example)  # its constructor may refuse what it did not make
        for key, item in zip(keys, items, strict=True):
            object.__setattr__(made, key.name, item)  # of a frozen one too
        return made
    if hasattr(example, "_fields"):
        return type(example)(*items)
    try:
        return type(example)(items)
    except TypeError:  # a tuple of certain things only, such as torch.Size
        return tuple(items)


def like_mapping(example: Mapping[Any, Any], fields: dict[Any, Any]) -> Any:
    """The fields as a mapping of the example's type; as a dict where that has a constructor of
    its own.
    """
    if type(example) is dict:
        return fields
    try:
        if not isinstance(example, MutableMapping):
            return type(example)(fields)  # type: ignore[call-arg]
        made = copy.copy(example)  # keeps what else it has, as a defaultdict its factory
        if not (isinstance(example, dict) or hasattr(type(example), "__copy__")):
            # the copy shares the dict inside
            for name, value in vars(made).items():
                if isinstance(value, MutableMapping):
                    vars(made)[name] = copy.copy(value)
        made.update(fields)
        return made
    except TypeError:
        return fields


# -- pickles


class _Pickler(pickle.Pickler):
    """Takes the bytes of plain tensors out of the pickle, as NumPy's arrays do by themselves."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            if value.layout in SPARSE:
                # torch's own rebuilding keeps each of them in a list for ever
                return rebuild_sparse, sparse_parts(value)
            if is_dense(value):
                return _reduced(value)
        if kind is np.ndarray and value.dtype.kind in "mM" and not value.dtype.isnative:
            # NumPy pickles times in the machine's byte order
            return np.ndarray.view, (value.view(value.dtype.str[0] + "i8"), value.dtype)
        if kind is memoryview:
            return memoryview, (np.asarray(value),)
        return NotImplemented


def encode(value: Any, take: Callable[[pickle.PickleBuffer], object]) -> bytes:
    """Pickles a value. `take` gets the bytes of each array and tensor, which stay outside where it
    returns something false; `pickle.loads(pickled, buffers=...)` needs those then.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=take).dump(value)
    return stream.getvalue()


def copied(value: Any) -> Any:
    """A copy of a value, which shares no memory with it; its arrays may be written to."""
    buffers: list[bytearray] = []
    pickled = encode(value, lambda buffer: buffers.append(bytearray(buffer.raw())))
    return pickle.loads(pickled, buffers=buffers)


def is_dense(value: Any) -> bool:
    """True for a plain tensor of this machine's memory whose bytes are all that there is of it."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return False
    if value.device.type != "cpu" or value.is_nested:
        return False
    return not (value.requires_grad or value.is_quantized)


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor takes its own bytes, and not those of the storage that it is a view of."""
    data = tensor.resolve_conj().resolve_neg()
    strides = None
    if not data.is_contiguous():
        # A dense layout such as channels_last is kept; what overlaps or has holes is copied.
        dense = torch.empty_like(data)
        if dense.stride() != data.stride():
            data = dense.copy_(data)
        strides = data.stride()
        data = data.as_strided((data.numel(),), (1,))
    if data.dtype not in _NUMPY:
        # NumPy gives an empty array a stride of 0
        data = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
    buffer = pickle.PickleBuffer(data.numpy().data)
    return tensor_over, (buffer, tensor.dtype, tuple(tensor.shape), strides)


def tensor_over(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor over the bytes of a buffer, which it keeps alive."""
    if not len(buffer):
        return torch.empty(shape, dtype=dtype, device="cpu")
    known = _NUMPY.get(dtype)
    if known is not None:
        made = torch.from_numpy(np.ndarray(shape, known, buffer))  # the fastest way
    else:
        made = torch.frombuffer(buffer, dtype=dtype).view(shape)
    if strides is not None:
        made = made.as_strided(shape, strides)
    return made


def sparse_parts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The arguments with which `rebuild_sparse` makes a sparse tensor again."""
    data = tensor.detach()
    is_coalesced = None
    parts: tuple[torch.Tensor, ...]
    if tensor.layout is torch.sparse_coo:
        parts = (data._indices(), data._values())
        is_coalesced = tensor.is_coalesced()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (data.crow_indices(), data.col_indices(), data.values())
    else:
        parts = (data.ccol_indices(), data.row_indices(), data.values())
    return tensor.layout, parts, tuple(tensor.shape), is_coalesced, tensor.requires_grad


def rebuild_sparse(
    layout: torch.layout,
    parts: tuple[Any, ...],
    shape: tuple[int, ...],
    coalesced: bool | None,
    grad: bool,
) -> torch.Tensor:
    """A sparse tensor of its parts."""
    options: dict[str, Any] = {"device": parts[-1].device, "check_invariants": False}
    if layout is torch.sparse_coo:
        made = torch.sparse_coo_tensor(parts[0], parts[1], shape, is_coalesced=coalesced, **options)
    else:
        made = torch.sparse_compressed_tensor(
            parts[0], parts[1], parts[2], shape, layout=layout, **options
        )
    return made.requires_grad_(grad)
