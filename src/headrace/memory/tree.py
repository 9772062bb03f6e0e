"""Applies a function to every tensor of a nested batch, and pickles values that torch and NumPy
don't pickle as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `function` applied to all its tensors; what is no tensor stays as it is.

    Dicts, lists, tuples, named tuples and dataclasses are gone through and keep their types.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        fields = {k: map_tensors(v, function) for k, v in value.items()}
        return fields if type(value) is dict else like_mapping(value, fields)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, function) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(v, function) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)  # not by its constructor, which may refuse what it did not make
        for field in dataclasses.fields(value):
            # of a frozen one too
            object.__setattr__(made, field.name, map_tensors(getattr(value, field.name), function))
        return made
    return value


def like_mapping(example: Mapping[Any, Any], fields: dict[Any, Any]) -> Any:
    """The fields as a mapping of the example's type; as a dict where that has a constructor of
    its own.
    """
    try:
        # a copy keeps what else it has, as a defaultdict its factory
        if isinstance(example, MutableMapping):
            made = copy.copy(example)
            # the copy shares the dict inside
            if not (isinstance(example, dict) or hasattr(type(example), "__copy__")):
                vars(made).update(
                    {
                        name: copy.copy(value)
                        for name, value in vars(made).items()
                        if isinstance(value, MutableMapping)
                    }
                )
            made.update(fields)
            return made
        return type(example)(fields)  # type: ignore[call-arg]
    except TypeError:
        return fields


def is_dense(value: Any) -> bool:
    """True for a plain tensor of this machine's memory whose bytes are all that there is of it."""
    if (
        type(value) is not torch.Tensor
        or value.layout is not torch.strided
        or value.device.type != "cpu"
    ):
        return False
    return not (value.requires_grad or value.is_quantized or value.is_nested)


def reduced(value: Any) -> Any:
    """What `pickle.Pickler.reducer_override` returns of a value, so that it arrives as it is."""
    if type(value) is torch.Tensor and value.layout in SPARSE:
        # torch's own rebuilding keeps each of them in a list for ever, and so would hold their
        # memory
        return rebuild_sparse, sparse_parts(value)
    if type(value) is np.ndarray and value.dtype.kind in "mM" and not value.dtype.isnative:
        # NumPy pickles times in the machine's byte order
        return _times, (value.view(value.dtype.str[0] + "i8"), value.dtype)
    if type(value) is memoryview:
        return memoryview, (np.asarray(value),)
    return NotImplemented


def _times(numbers: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return numbers.view(dtype)


def sparse_parts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The arguments with which `rebuild_sparse` makes a sparse tensor again."""
    data = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        parts: tuple[torch.Tensor, ...] = (data._indices(), data._values())
    else:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        lines = (
            (data.crow_indices(), data.col_indices())
            if by_row
            else (data.ccol_indices(), data.row_indices())
        )
        parts = (*lines, data.values())
    return (
        tensor.layout,
        parts,
        tuple(tensor.shape),
        tensor.is_coalesced() if len(parts) == 2 else None,
        tensor.requires_grad,
    )


def rebuild_sparse(
    layout: torch.layout,
    parts: tuple[Any, ...],
    shape: tuple[int, ...],
    coalesced: bool | None,
    grad: bool,
) -> torch.Tensor:
    """A sparse tensor of its parts."""
    if layout is torch.sparse_coo:
        indices, values = parts
        made = torch.sparse_coo_tensor(
            indices,
            values,
            size=shape,
            device=values.device,
            is_coalesced=coalesced,
            check_invariants=False,
        )
    else:
        compressed, plain, values = parts
        made = torch.sparse_compressed_tensor(
            *(compressed, plain, values),
            size=shape,
            layout=layout,
            device=values.device,
            check_invariants=False,
        )
    return made.requires_grad_(grad)
