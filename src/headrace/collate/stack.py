"""Stacks samples of equal shape into a batch, in the ring slot if there is one, and names the
fields of nested samples.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from headrace.casting import as_torch_lays_out
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import field_of, is_dense, keys_of, rebuilt

Field = str | int
"""A key, a position or the name of an attribute; "outer.inner" for a nested field."""
_SHOWN = 30  # fields in a message


class Step(NamedTuple):
    """One step of a path to a field."""

    text: str
    """As in messages: ``['key']``, ``[0]`` or ``.name``."""
    names: tuple[str, ...]
    """The names that users may give; a field of a named tuple has its position and its name."""


FieldPath = tuple[Step, ...]
"""The path to a field: the steps from the sample through dicts, tuples and dataclasses."""


def at_path(path: FieldPath) -> str:
    """The path in messages: " at ['key'][0]", or "" for the sample itself."""
    if not path:
        return ""
    return f" at {''.join(step.text for step in path)}"


def step_to(value: Any, key: Any) -> Step:
    """The step to the item of a container at one of its `keys_of`."""
    if isinstance(key, dataclasses.Field):
        return Step(f".{key.name}", (key.name,))
    if isinstance(value, Mapping):
        return Step(f"[{key!r}]", (str(key),))
    return Step(f"[{key}]", (str(key), *getattr(value, "_fields", ())[key : key + 1]))


def shown_fields(value: Any) -> str:
    """The fields of a container, for messages."""
    keys = keys_of(value)
    if not keys:
        return f"no fields, in a {type(value).__name__}"
    names = [repr(step_to(value, key).names[-1]) for key in islice(keys, _SHOWN)]
    return f"the fields {', '.join(names)}, in a {type(value).__name__}"


def field_names(given: Field | Iterable[Field], argument: str) -> list[str]:
    """The names of one or several fields that the user passed as an argument.

    Raises:
        ConfigError: a name is neither a key nor a position.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    names: list[str] = []
    for name in given:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            what = type(name).__name__
            raise ConfigError(f"{argument} must be keys or positions in a sample, not a {what}")
        names.append(str(name))
    return names


def field_at(sample: Any, names: Iterable[str]) -> tuple[FieldPath, Any] | None:
    """The path of nested names in a sample, and the value there. None: there is no such field."""
    path: FieldPath = ()
    for name in names:
        for key in keys_of(sample) or ():
            step = step_to(sample, key)
            if name in step.names:
                path += (step,)
                sample = field_of(sample, key)
                break
        else:
            return None
    return path, sample


def named_paths(sample: Any, names: Iterable[str], argument: str) -> dict[FieldPath, str]:
    """The names of fields by their paths.

    Raises:
        ConfigError: the sample has no such field; the message lists its fields.
    """
    paths: dict[FieldPath, str] = {}
    for name in names:
        found = field_at(sample, [name]) or field_at(sample, name.split("."))
        if found is None:
            has = shown_fields(sample)
            raise ConfigError(f"{argument}: the samples have no field {name!r}; a sample has {has}")
        paths[found[0]] = name
    return paths


Batch: TypeAlias = torch.Tensor | Mapping[Any, Any] | Sequence[Any]
"""A batch: a tensor, or tensors and lists in the structure of the samples."""

Special = Callable[[list[Any], FieldPath], Any]
"""Makes the batch of the values at a path, or returns `USUAL`."""
USUAL: Any = object()
_OR = 'or pass collate_fn="list" or a function of your own'
_ONE_SHAPE = (
    'Give all one shape (ImageDataset: image_size=), pad sequences (collate_fn="pad"), ' + _OR
)
_NUMBERS = (bool, int, float)
_LONG = "gG"  # NumPy's codes of long doubles, real and complex, which torch does not have


def list_collate(samples: Sequence[Any]) -> list[Any]:
    """Returns the samples as a list, unchanged, for example for images of different sizes."""
    return list(samples)


def stack_collate(samples: Sequence[Any]) -> Any:
    """Stacks samples and keeps their structure and dtypes.

    Tensors and arrays [...] become tensors [batch, ...]. Numbers become tensors [batch] (int64,
    float64, bool, as in torch's `default_collate`). Dicts, tuples, named tuples, lists and
    dataclasses keep their type, with batched fields. Everything else (strings, None, objects)
    becomes a list. PIL images are refused, and so are inputs (samples, and first items of tuples)
    that are None.

    Raises:
        CollateError: shapes, dtypes or structures differ, or a transform is incomplete; the message
            names the samples, the field and the remedies.
    """
    return stack_tree(list(samples))


def stack_tree(
    samples: list[Any],
    special: Special | None = None,
    remedy: str = _ONE_SHAPE,
    path: FieldPath = (),
) -> Any:
    """Stacks samples like `stack_collate`, but calls `special` first at each path, from the samples
    inwards.

    Args:
        samples: at least one sample.
        special: makes the batch of the values at some paths.
        remedy: the remedy in an error about shapes.
        path: path of `samples` inside whole samples.

    Raises:
        ConfigError: there is no sample.
        CollateError: see `stack_collate`.
    """
    if not samples:
        raise ConfigError("a batch has no sample: check the batch_sampler")
    if special is not None:
        made = special(samples, path)
        if made is not USUAL:
            return made
    return stack_inside(samples, path, special, remedy)


def stack_inside(
    values: list[Any], path: FieldPath, special: Special | None = None, remedy: str = _ONE_SHAPE
) -> Any:
    """The batch of the values at a path; `special` is called for their fields only."""
    first = values[0]
    are_scalars = isinstance(first, (*_NUMBERS, np.generic))
    # NumPy's alone keep their dtype
    if are_scalars and not all(isinstance(value, np.generic) for value in values):
        plain = [value.item() if isinstance(value, np.generic) else value for value in values]
        if all(isinstance(value, _NUMBERS) for value in plain):
            return _stack_numbers(plain, path)
    if is_numeric(first):
        values = [from_array(value) if is_numeric(value) else value for value in values]
    if isinstance(values[0], torch.Tensor):
        check_alike(values, path, remedy)
        out = None
        if is_dense(values[0]):
            out = empty((len(values), *values[0].shape), values[0].dtype)
        return torch.stack(values, out=out)
    keys = keys_of(first)
    if keys is None:
        _check_listed(values, path)
        return values
    for number, value in enumerate(values):
        if keys_of(value) != keys:
            has = f" has {shown_fields(value)}, "
            raise _refused(path, number, has, 0, f" has {shown_fields(first)}. {remedy}")
    columns = []
    for key in keys:
        if isinstance(key, dataclasses.Field):
            column = [getattr(value, key.name) for value in values]
        else:
            column = [value[key] for value in values]
        columns.append(stack_tree(column, special, remedy, (*path, step_to(first, key))))
    return rebuilt(first, keys, columns)


def _stack_numbers(values: list[Any], path: FieldPath) -> torch.Tensor:
    dtype = None
    if any(isinstance(value, float) for value in values):
        dtype = torch.float64
    try:
        return torch.tensor(values, dtype=dtype, device="cpu")
    except (RuntimeError, ValueError, OverflowError):
        worst = max(values, key=abs)
        is_large = f" is {worst}, which does not fit into a tensor. Give smaller numbers, or texts"
        raise _refused(path, values.index(worst), f"{is_large}, {_OR}") from None


def check_alike(tensors: list[Any], path: FieldPath, remedy: str, axis: int = 0) -> None:
    """Raises a CollateError for the first value that is not a tensor, or whose dtype, or shape from
    an axis on, differs from that of the first.
    """
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            advice = f"Give all a value of one type there, {_OR}"
        elif tensor.is_nested:
            advice = f"Give the parts of nested tensors as a list, {_OR}"
        elif tensor.shape != first.shape and tensor.shape[axis:] != first.shape[axis:]:
            advice = remedy
        elif tensor.dtype != first.dtype:
            wide = torch.promote_types(tensor.dtype, first.dtype)
            advice = (
                "Give all one dtype: cast them in the dataset or its transform, with "
                f".to({wide}) (or dtype= where the dataset is made)"
            )
        else:
            continue
        is_ = f" is {shape_of(tensor)}, "
        raise _refused(path, number, is_, 0, f" is {shape_of(first)}. {advice}")


def _check_listed(values: list[Any], path: FieldPath) -> None:
    """Raises a CollateError for values that must not become a list: PIL images and inputs that are
    None (from incomplete transforms), long doubles, and what would be stacked.
    """
    # a target or a field may well be None
    is_input = not path or (len(path) == 1 and path[0].names[0] == "0")
    if is_input and all(value is None for value in values):
        raise _refused(
            path,
            0,
            " is None, and so is the whole batch: the transform (or __getitem__) returned nothing; "
            f"end it with a return of the value, {_OR}",
        )
    # there is no PIL image if Pillow was never imported
    pillow = sys.modules.get("PIL.Image")
    for number, value in enumerate(values):
        is_ = f" is {shape_of(value)}"
        if pillow is not None and isinstance(value, pillow.Image):
            advice = "End the transform with PILToTensor(), or pass transform_input='tensor'"
            raise _refused(path, number, f" is a PIL image. {advice}, {_OR}")
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char in _LONG:
            advice = 'a long double: cast it by .astype("float64") or "complex128"'
            raise _refused(path, number, f"{is_}, {advice}, {_OR}")
        is_array = isinstance(value, np.ndarray) and is_numeric(value)
        # otherwise the order of the samples would decide whether this is an error
        if is_array or isinstance(value, torch.Tensor) or keys_of(value) is not None:
            other = f" is {shape_of(values[0])}. Give all a value of one type there, {_OR}"
            raise _refused(path, number, f"{is_}, ", 0, other)


def _refused(path: FieldPath, *parts: str | int) -> CollateError:
    """The error of values at a path; integers are positions of samples."""
    return CollateError(f"samples of one batch can't be stacked{at_path(path)}: ", *parts)


def is_numeric(value: Any) -> bool:
    """True for a NumPy array or scalar of numbers that torch supports."""
    return (
        isinstance(value, (np.ndarray, np.generic))
        and value.dtype.kind in "biufc"
        and value.dtype.char not in _LONG
    )


def gathered(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Gathers rows of a tensor, as if they were stacked: [len(rows), ...]."""
    out = None
    if is_dense(tensor):
        out = empty((len(rows), *tensor.shape[1:]), tensor.dtype)
    return torch.index_select(tensor, 0, rows, out=out)


def from_array(array: Any) -> torch.Tensor:
    """A NumPy array or scalar as a tensor; it shares the memory if byte order, strides and
    writability allow that.
    """
    array = as_torch_lays_out(np.asarray(array))
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)


def owned(value: Any) -> Any:
    """A copy of a tensor or array in the batch's buffer, as a tensor; anything else unchanged."""
    if is_numeric(value):
        value = from_array(value)
    if not is_dense(value):
        return value
    return empty(tuple(value.shape), value.dtype).copy_(value)


def shape_of(value: Any) -> str:
    """Dtype and shape, or the name of the type, for messages."""
    if isinstance(value, torch.Tensor) and value.is_nested:  # it may have no shape
        return "a nested tensor"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(type(value).__name__)
