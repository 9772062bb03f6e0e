"""Casts arrays to dtypes of torch, also to bfloat16, which NumPy does not have (`BFLOAT16`).

torch casts to bfloat16, and float32 to float16: to the nearest, ties to even. Other numbers become
float32 on their way to bfloat16, as in `torch.Tensor.to`.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from headrace.dtypes import BFLOAT16
from headrace.errors import ConfigError

DTypeArgument: TypeAlias = npt.DTypeLike | torch.dtype
"""The type of an argument `dtype`."""
FLOAT32: np.dtype[Any] = np.dtype(np.float32)
# elements that torch casts in the calling thread; more take threads, which wait for each other
_STRETCH = 1 << 15


@functools.cache
def known_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """The torch dtype of a NumPy dtype. None: torch has no such dtype."""
    if dtype == BFLOAT16:
        return torch.bfloat16
    if not dtype.isnative or dtype.kind not in "biufc":
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        return None


_REMEDY = "pass one that both have, such as 'float32', or torch.bfloat16"


def dtype_named(dtype: DTypeArgument | None) -> np.dtype[Any] | None:
    """The NumPy dtype of an argument `dtype`, in native byte order; `BFLOAT16` for torch.bfloat16.

    Raises:
        ConfigError: it is not a dtype, or torch has no such dtype.
    """
    if dtype is None:
        return None
    if dtype is torch.bfloat16 or (isinstance(dtype, str) and dtype == "bfloat16"):
        return BFLOAT16
    try:
        if isinstance(dtype, torch.dtype):
            named = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        else:
            named = np.dtype(dtype).newbyteorder("=")
    except TypeError as error:
        raise ConfigError(f"dtype={dtype!r} is not a dtype: {error}; {_REMEDY}") from error
    if named.name == "bfloat16":  # of ml_dtypes
        return BFLOAT16
    if known_dtype(named) is None:
        raise ConfigError(f"dtype={dtype!r}: torch has no such dtype; {_REMEDY}")
    return named


def normalized_dtype(dtype: DTypeArgument | None) -> np.dtype[Any]:
    """The dtype of normalised images; float32 for None.

    Raises:
        ConfigError: it is not float32, float16 or bfloat16.
    """
    named = dtype_named(dtype) or FLOAT32
    if named not in (FLOAT32, np.dtype(np.float16), BFLOAT16):
        kinds = "torch.float32, torch.float16 or torch.bfloat16"
        raise ConfigError(f"dtype={dtype!r}: for normalised images pass {kinds}")
    return named


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A contiguous tensor as an array in the same memory; bfloat16 becomes `BFLOAT16`."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.uint16).numpy().view(BFLOAT16)


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor | npt.NDArray[Any]:
    """An array as a tensor, in the same memory if possible. If torch does not have its dtype, the
    array in native byte order.
    """
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    array = as_torch_lays_out(array)
    try:
        return torch.from_numpy(array)
    except TypeError:
        return array


def as_torch_lays_out(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy, in native byte order and with strides that torch supports.

    A field of a compound has the stride of the compound even along an axis of one element.
    """
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    itemsize = max(1, array.itemsize)
    for stride in array.strides:  # called for each sample: `any` takes three times as long
        if stride < 0 or stride % itemsize:
            return array.copy()
    return array


def cast(values: npt.NDArray[Any] | np.generic, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Copies numbers to another dtype."""
    out = np.empty(values.shape, dtype)
    cast_into(np.asarray(values), out)
    return out


def cast_into(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Writes numbers into a contiguous array of the same shape, in its dtype."""
    if out.dtype != BFLOAT16 and not (out.dtype == np.float16 and values.dtype == np.float32):
        np.copyto(out, values, casting="unsafe")
        return
    numbers = np.require(values, np.float32, ("C", "W"))
    source = torch.from_numpy(numbers.reshape(-1))
    target = as_tensor(out.reshape(-1))
    assert isinstance(target, torch.Tensor)
    stretch = _STRETCH
    if torch.get_num_threads() == 1:
        stretch = max(1, len(source))
    for to, part in zip(target.split(stretch), source.split(stretch), strict=True):
        to.copy_(part)
