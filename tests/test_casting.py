"""Casts give what torch gives, whatever the shape, and however many numbers are cast at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.casting import as_array, as_tensor, cast, cast_into, dtype_named, known_dtype
from headrace.dtypes import BFLOAT16
from headrace.errors import ConfigError

HALVES = [torch.bfloat16, torch.float16]
# halfway between two numbers of 16 bits
TIES = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
EDGES = np.array(
    [0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 6e-8, 65504, 65519, 1e30, *TIES], np.float32
)


def bits(array: Any) -> Any:
    return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize("half", HALVES)
def test_numbers_are_cast_as_torch_casts_them(half: torch.dtype) -> None:
    drawn = abs(np.random.default_rng(3).normal(0, 60, (3, 7)))
    for name in ("f4", "f8", "f2", "u1", "i1", "u2", "i2", "i4", "i8", "u8", "bool"):
        numbers = (drawn if name.startswith("u") else -drawn).astype(name)
        made = as_tensor(cast(numbers, dtype_named(half)))  # type: ignore[arg-type]
        assert made.shape == (3, 7)
        assert torch.equal(made.float(), torch.from_numpy(numbers).to(half).float()), name


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("count", [1, 33, 70001])
def test_bits_do_not_depend_on_the_number_of_values(half: torch.dtype, count: int) -> None:
    numbers = np.resize(np.append(EDGES, np.float32(np.nan)), count)
    dtype = dtype_named(half)
    assert dtype is not None
    together = bits(cast(numbers, dtype))
    alone = np.concatenate(
        [bits(cast(numbers[at : at + 1], dtype)) for at in range(min(count, 64))]
    )
    assert (together[: len(alone)] == alone).all() and (
        together == np.resize(together[:15], count)
    ).all()
    if count >= len(EDGES):
        assert (together[: len(EDGES)] == bits(as_array(torch.from_numpy(EDGES).to(half)))).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("f2"), np.dtype("f4")])
def test_values_of_any_layout_and_none(dtype: np.dtype[Any]) -> None:
    numbers = np.random.default_rng(4).normal(size=(4, 6)).astype(np.float32)
    frozen = numbers.copy()
    frozen.flags.writeable = False
    expected = cast(numbers, dtype)
    for values in (
        frozen,
        np.asfortranarray(numbers),
        numbers.astype(">f4"),
        np.repeat(numbers, 2, 1)[:, ::2],
    ):
        out = np.empty(values.shape, dtype)
        cast_into(values, out)
        assert out.tobytes() == expected.tobytes()
    alone = cast(np.float32(1.5), dtype)
    assert alone.shape == () and cast(np.empty((0, 3), np.float32), dtype).shape == (0, 3)
    assert alone.tobytes() == cast(np.full(1, 1.5, np.float32), dtype).tobytes()


def test_tensors_and_arrays_share_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    array = as_array(tensor)
    cast_into(np.full((2, 3), 2.5), array)
    assert array.dtype == BFLOAT16 and (tensor == 2.5).all()
    back = as_tensor(array)
    assert isinstance(back, torch.Tensor) and back.dtype == torch.bfloat16
    assert back.data_ptr() == tensor.data_ptr()


def test_names_of_dtypes() -> None:
    names: list[Any] = [torch.bfloat16, "bfloat16", BFLOAT16, torch.float16, ">f4", complex, None]
    dtypes = [BFLOAT16, BFLOAT16, BFLOAT16, *map(np.dtype, ("f2", "f4", "c16")), None]
    for given, expected in zip(names, dtypes, strict=True):
        assert dtype_named(given) == expected
        assert expected is None or known_dtype(expected) is not None
    refused = ["flat", torch.float8_e4m3fn, torch.complex32, "U3", object, "M8[s]", [("a", "f4")]]
    for given in refused:
        with pytest.raises(ConfigError, match="pass one that both have"):
            dtype_named(given)
