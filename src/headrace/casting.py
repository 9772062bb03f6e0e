"""Casts arrays to the numbers that torch has: bfloat16 too, which NumPy does not have (`BFLOAT16`).

bfloat16, and float16 of float32, are cast by torch: to the nearest, halves to even. Other numbers
become float32 on their way to bfloat16, as `torch.Tensor.to` does it.
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
"""What users pass as `dtype`."""
FLOAT32: np.dtype[Any] = np.dtype(np.float32)
# elements that torch casts in the calling thread: of more, its own threads take part, and wait for
# each other
_STRETCH = 1 << 15


@functools.cache
def known_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Torch's dtype of that kind; None: it has none."""
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
    """The dtype of numbers that a user asks for, in the machine's byte order; of torch.bfloat16
    `BFLOAT16`.

    Raises:
        ConfigError: it is none, or torch has no such numbers.
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
        raise ConfigError(f"dtype={dtype!r} is no NumPy dtype: {error}; {_REMEDY}") from error
    if named.name == "bfloat16":  # that of ml_dtypes
        return BFLOAT16
    if known_dtype(named) is None:
        raise ConfigError(f"dtype={dtype!r}: NumPy and torch have no such numbers; {_REMEDY}")
    return named


def normalized_dtype(dtype: DTypeArgument | None) -> np.dtype[Any]:
    """The dtype of normalised images that a user asks for; of None float32.

    Raises:
        ConfigError: it is another one than float32, float16 and bfloat16.
    """
    named = dtype_named(dtype) or FLOAT32
    if named not in (FLOAT32, np.dtype(np.float16), BFLOAT16):
        raise ConfigError(
            f"dtype={dtype!r}: normalised images are torch.float32, torch.float16 or "
            "torch.bfloat16: pass one of these"
        )
    return named


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The contiguous tensor as an array over the same memory; of bfloat16 one of `BFLOAT16`."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.uint16).numpy().view(BFLOAT16)


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor | npt.NDArray[Any]:
    """The array as a tensor, over the same memory where it can be, if torch has its dtype; else
    the array in the machine's byte order.
    """
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    array = as_torch_lays_out(array)
    try:
        return torch.from_numpy(array)
    except TypeError:
        return array


def as_torch_lays_out(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy of it, in the machine's byte order and with strides that torch has.

    A field of a compound keeps the stride of the compound even along an axis of one element.
    """
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    itemsize = max(1, array.itemsize)
    for stride in array.strides:  # of each sample: `any` takes three times as long
        if stride < 0 or stride % itemsize:
            return array.copy()
    return array


def cast(values: npt.NDArray[Any] | np.generic, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A copy of the numbers as another dtype."""
    out = np.empty(values.shape, dtype)
    cast_into(np.asarray(values), out)
    return out


def cast_into(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Writes numbers into an array of their shape, which is contiguous, as its dtype."""
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
