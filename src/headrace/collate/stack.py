"""Stacks samples of equal shape into a batch, directly in the ring slot if there is one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from headrace.casting import as_torch_lays_out
from headrace.collate.fields import FieldPath, Step, at_path
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import like_mapping

Batch: TypeAlias = torch.Tensor | Mapping[Any, Any] | Sequence[Any]
"""A batch: a tensor, or tensors and lists in the structure of the samples."""

Special = Callable[[list[Any], FieldPath], Any]
"""Makes the batch of the values at a path, or returns `USUAL`."""
USUAL: Any = object()
_LONG = "gG"  # NumPy's codes of long doubles, real and complex


def list_collate(samples: Sequence[Any]) -> list[Any]:
    """Returns the samples as a list, unchanged, for example for models that take images of
    different sizes.
    """
    return list(samples)


def stack_collate(samples: Sequence[Any]) -> Any:
    """Stacks samples and keeps their structure and dtypes.

    Tensors and arrays [...] become tensors [batch, ...]. Numbers become tensors [batch] (int64,
    float64, bool, as in torch's `default_collate`). Dicts, tuples, named tuples, lists and
    dataclasses keep their type, with batched fields. Everything else (texts, None, objects) becomes
    a list. PIL images are refused, and so are inputs (samples, and first elements of tuples) that
    are None.

    Raises:
        CollateError: shapes, dtypes or structures differ, or a transform is incomplete; the message
            names the samples, the field and the remedies.
    """
    return stack_tree(list(samples))


_ONE_SHAPE = (
    'Give all one shape (ImageDataset: image_size=), pad sequences (collate_fn="pad"), or pass '
    'collate_fn="list" or a function of your own'
)


def stack_tree(
    samples: list[Any],
    special: Special | None = None,
    remedy: str = _ONE_SHAPE,
    path: FieldPath = (),
) -> Any:
    """Stacks samples as `stack_collate` does, but `special` is asked first at each path, from the
    samples inwards.

    Args:
        samples: at least one.
        special: makes the batch of the values at some paths.
        remedy: what an error proposes where shapes differ.
        path: where in its sample each of `samples` lies, if it is a part of one.

    Raises:
        ConfigError: there is no sample, or what `stack_collate` raises.
    """
    if not samples:
        raise ConfigError(
            "a batch needs a sample at least, and got none: look at the batch_sampler"
        )
    return _stack(samples, path, special, remedy)


def _stack(values: list[Any], path: FieldPath, special: Special | None, remedy: str) -> Any:
    made = USUAL if special is None else special(values, path)
    return stack_inside(values, path, special, remedy) if made is USUAL else made


def stack_inside(values: list[Any], path: FieldPath, special: Special | None, remedy: str) -> Any:
    """The batch of the values at a path, where `special` is asked only for what lies inside of
    them.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        return _stack_tensors(values, path, remedy)
    if isinstance(first, (bool, int, float, np.generic)) and _are_mixed_numbers(values):
        values = [v.item() if isinstance(v, np.generic) else v for v in values]
        first = values[0]
    if is_numeric(first):
        return _stack_tensors([from_array(v) if is_numeric(v) else v for v in values], path, remedy)
    if isinstance(first, (bool, int, float)) and all(
        isinstance(v, (bool, int, float)) for v in values
    ):
        return _stack_numbers(values, path)
    if isinstance(first, Mapping):
        keys = list(first)
        for number, value in enumerate(values):
            if not isinstance(value, Mapping) or set(value) != set(keys):
                is_ = (
                    f"has the keys {sorted(map(str, value))}"
                    if isinstance(value, Mapping)
                    else f"is {shape_of(value)}"
                )
                parts = (
                    number,
                    f" {is_}, ",
                    0,
                    f" has the keys {sorted(map(str, keys))}. Give all the same keys, {_OR}",
                )
                raise CollateError(*_cannot(path), *parts)
        fields = {
            key: _stack(
                [v[key] for v in values], (*path, Step(f"[{key!r}]", (str(key),))), special, remedy
            )
            for key in keys
        }
        return fields if type(first) is dict else like_mapping(first, fields)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*_columns(values, path, special, remedy))
    if isinstance(first, (tuple, list)):
        columns = _columns(values, path, special, remedy)
        try:
            return type(first)(columns)
        except TypeError:  # a tuple of certain things only, such as torch.Size
            return tuple(columns) if isinstance(first, tuple) else columns
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return _stack_dataclass(values, path, special, remedy)
    _refuse_unfinished(values, path)
    for number, value in enumerate(values):
        # else the order of the samples would decide whether this is an error
        if _is_stacked(value):
            raise _unlike(number, value, first, path, remedy)
    return values


def _is_stacked(value: Any) -> bool:
    """True of what is no batch as a list of values."""
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return (
        isinstance(value, (torch.Tensor, Mapping, tuple, list))
        or is_object
        or (isinstance(value, np.ndarray) and is_numeric(value))
    )


def _are_mixed_numbers(values: list[Any]) -> bool:
    """True if all are numbers, some of Python and some of NumPy."""
    kinds = {type(value) for value in values}
    are_numbers = all(
        issubclass(kind, (bool, int, float))
        or (
            issubclass(kind, np.generic)
            and np.dtype(kind).kind in "biuf"
            and np.dtype(kind).char not in _LONG
        )
        for kind in kinds
    )
    return are_numbers and 0 < sum(issubclass(kind, np.generic) for kind in kinds) < len(kinds)


def _refuse_unfinished(values: list[Any], path: FieldPath) -> None:
    """Raises a CollateError for PIL images and inputs that are None (transforms that lack their
    last step), and for long doubles.
    """
    for place, value in enumerate(values):
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char in _LONG:
            other = "complex128" if value.dtype.kind == "c" else "float64"
            raise CollateError(
                *_cannot(path),
                place,
                f" is {shape_of(value)}, a long double, which torch does not have. Cast it in the "
                "dataset or its transform, with "
                f'.astype("{other}"), {_OR}',
            )
    number = next(
        (number for number, value in enumerate(values) if isinstance(value, Image.Image)), None
    )
    if number is not None:
        image = values[number]
        raise CollateError(
            number,
            f"{at_path(path)} is a PIL image ({image.mode}, {image.width} x {image.height}), "
            "which can't be "
            "stacked: end the transform with torchvision's v2.ToImage() or PILToTensor(), or pass "
            "ImageDataset "
            "transform_input='tensor'; to keep PIL images, pass collate_fn='list' or a function "
            "of your own",
        )
    # a target or a field may well be None
    is_input = not path or (len(path) == 1 and path[0].names[0] == "0")
    if is_input and all(value is None for value in values):
        raise CollateError(
            0,
            f"{at_path(path)} is None, and so are all others of the batch: the transform (or the "
            "dataset's __getitem__) returned "
            "nothing; end it with a return of the value, or pass collate_fn='list' or a function "
            "of your own",
        )


def is_numeric(value: Any) -> bool:
    """True for a NumPy array or scalar of numbers that torch has."""
    return (
        isinstance(value, (np.ndarray, np.generic))
        and value.dtype.kind in "biufc"
        and value.dtype.char not in _LONG
    )


def _stack_numbers(values: list[Any], path: FieldPath) -> torch.Tensor:
    dtype = torch.float64 if any(isinstance(v, float) for v in values) else None
    try:
        return torch.tensor(values, dtype=dtype, device="cpu")
    except (RuntimeError, ValueError, OverflowError):
        worst = max(values, key=abs)
        parts = (
            values.index(worst),
            f" is {worst}, which does not fit into a tensor. Give smaller numbers, or texts, {_OR}",
        )
        raise CollateError(*_cannot(path), *parts) from None


def _stack_dataclass(
    values: list[Any], path: FieldPath, special: Special | None, remedy: str
) -> Any:
    first = values[0]
    for number, value in enumerate(values):
        if type(value) is not type(first):
            raise _unlike(number, value, first, path, remedy)
    batch = copy.copy(first)  # its constructor made a sample, and may refuse a batch
    for field in dataclasses.fields(first):
        inside = (*path, Step(f".{field.name}", (field.name,)))
        column = _stack([getattr(value, field.name) for value in values], inside, special, remedy)
        object.__setattr__(batch, field.name, column)  # of a frozen one too
    return batch


def _columns(values: list[Any], path: FieldPath, special: Special | None, remedy: str) -> list[Any]:
    width, names = len(values[0]), getattr(values[0], "_fields", None)
    for number, value in enumerate(values):
        if not isinstance(value, (tuple, list)) or len(value) != width:
            is_ = (
                f"has {len(value)}" if isinstance(value, (tuple, list)) else f"is {shape_of(value)}"
            )
            raise CollateError(
                *_cannot(path), number, f" {is_}, ", 0, f" has {width} fields. ", remedy
            )
    steps = [
        Step(f"[{i}]", (str(i),) if names is None else (str(i), names[i])) for i in range(width)
    ]
    return [
        _stack([v[i] for v in values], (*path, step), special, remedy)
        for i, step in enumerate(steps)
    ]


def _stack_tensors(tensors: list[Any], path: FieldPath, remedy: str) -> torch.Tensor:
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.is_nested:
            raise CollateError(
                *_cannot(path), number, f" is a nested tensor: give its parts as a list, {_OR}"
            )
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.shape != first.shape
            or tensor.dtype != first.dtype
        ):
            raise _unlike(number, tensor, first, path, remedy)
    return torch.stack(
        tensors, out=empty((len(tensors), *first.shape), first.dtype) if _is_plain(first) else None
    )


def gathered(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What stacking the rows of a tensor gives, [len(rows), ...], by one gather."""
    shape = (len(rows), *tensor.shape[1:])
    out = empty(shape, tensor.dtype) if _is_plain(tensor) else None
    return torch.index_select(tensor, 0, rows, out=out)


def from_array(array: Any) -> torch.Tensor:
    """A NumPy array or scalar as a tensor, over the same memory where torch takes that without a
    warning: in the machine's byte order, writable, with strides that torch has.
    """
    array = as_torch_lays_out(np.asarray(array))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def owned(value: Any) -> Any:
    """A copy of a tensor or an array in the batch's buffer, as a tensor; else the value."""
    tensor = from_array(value) if is_numeric(value) else value
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor) if _is_plain(tensor) else tensor


def _is_plain(value: Any) -> bool:
    """True for a tensor that can lie in a ring slot."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
    )


def shape_of(value: Any) -> str:
    """Dtype and shape, or the name of the type, for messages."""
    if isinstance(value, torch.Tensor) and value.is_nested:  # its shape may be none
        return "a nested tensor"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(type(value).__name__)


_OR = 'or pass collate_fn="list" or a function of your own'


def _cannot(path: FieldPath) -> tuple[str]:
    return (f"samples of one batch can't be stacked{at_path(path)}: ",)


def _unlike(number: int, value: Any, first: Any, path: FieldPath, remedy: str) -> CollateError:
    """The error of a sample whose value is of another shape (which has that remedy), dtype or
    type than the first sample's.
    """
    parts = *_cannot(path), number, f" is {shape_of(value)}, ", 0, f" is {shape_of(first)}. "
    if not (isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor)):
        return CollateError(*parts, f"Give all a value of one type there, {_OR}")
    if value.shape != first.shape:
        return CollateError(*parts, remedy)
    return CollateError(*parts, one_dtype(value.dtype, first.dtype))


def one_dtype(one: torch.dtype, other: torch.dtype) -> str:
    """The remedy where the dtypes of two samples differ."""
    wide = torch.promote_types(one, other)
    return (
        f"Give all one dtype: cast them in the dataset or its transform, with .to({wide}) "
        "(HDF5Dataset, ZarrDataset: dtype=)"
    )
