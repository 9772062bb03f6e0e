"""Stacks samples of equal shape into a batch, directly in the ring slot if there is one, and names
the fields of nested samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image

from headrace.casting import as_torch_lays_out
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import field_of, is_dense, keys_of, rebuilt

Field = str | int
"""A key, a position or the name of an attribute; "outer.inner" for a field inside of another."""
_SHOWN = 30  # fields in a message


class Step(NamedTuple):
    """One step of the way."""

    text: str
    """As a message shows it: ``['key']``, ``[0]`` or ``.name``."""
    names: tuple[str, ...]
    """What a user may call it: a field of a named tuple has its position and its name."""


FieldPath = tuple[Step, ...]
"""The way to a field: the steps from the sample through dicts, tuples and dataclasses."""


def at_path(path: FieldPath) -> str:
    """ " at ['key'][0]"; nothing for the sample itself."""
    if not path:
        return ""
    return f" at {''.join(step.text for step in path)}"


def step_to(value: Any, key: Any) -> Step:
    """The step to what a container holds at one of its `keys_of`."""
    if isinstance(key, dataclasses.Field):
        return Step(f".{key.name}", (key.name,))
    if isinstance(value, Mapping):
        return Step(f"[{key!r}]", (str(key),))
    return Step(f"[{key}]", (str(key), *getattr(value, "_fields", ())[key : key + 1]))


def shown_fields(value: Any) -> str:
    """What a container holds, for messages."""
    keys = keys_of(value)
    if not keys:
        return f"no fields, in a {type(value).__name__}"
    names = [repr(step_to(value, key).names[-1]) for key in islice(keys, _SHOWN)]
    return f"the fields {', '.join(names)}, in a {type(value).__name__}"


def field_names(given: Field | Iterable[Field], argument: str) -> list[str]:
    """The names of a field, or of several, that the user passed as an argument.

    Raises:
        ConfigError: something else than keys and positions was given.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    names: list[str] = []
    for name in given:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise ConfigError(
                f"{argument} must hold keys (texts) or positions (integers) of a sample, not "
                f"a {type(name).__name__}"
            )
        names.append(str(name))
    return names


def field_at(sample: Any, names: Iterable[str]) -> tuple[FieldPath, Any] | None:
    """The way that names lead inside of a sample, and what lies there; None: it has no such
    field.
    """
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
    """The names of fields by the ways to them.

    Raises:
        ConfigError: the sample has no such field; the message lists those that it has.
    """
    paths: dict[FieldPath, str] = {}
    for name in names:
        found = field_at(sample, [name]) or field_at(sample, name.split("."))
        if found is None:
            raise ConfigError(
                f"{argument}: the samples have no field {name!r}; a sample has "
                f"{shown_fields(sample)}"
            )
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
_LONG = "gG"  # NumPy's codes of long doubles, real and complex, which torch has not


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
    if special is not None:
        made = special(samples, path)
        if made is not USUAL:
            return made
    return stack_inside(samples, path, special, remedy)


def stack_inside(
    values: list[Any], path: FieldPath, special: Special | None = None, remedy: str = _ONE_SHAPE
) -> Any:
    """The batch of the values at a path, where `special` is asked only for what lies inside of
    them.
    """
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
    """Raises a CollateError for the first value that is no tensor, or whose dtype or shape, from an
    axis on, is not the first one's.
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
    """Raises a CollateError for what must not be a list of values: PIL images and inputs that are
    None (transforms that lack their last step), long doubles, and what would be stacked.
    """
    # a target or a field may well be None
    is_input = not path or (len(path) == 1 and path[0].names[0] == "0")
    if is_input and all(value is None for value in values):
        raise _refused(
            path,
            0,
            " is None, and so are all others of the batch: the transform (or the dataset's "
            f"__getitem__) returned nothing; end it with a return of the value, {_OR}",
        )
    for number, value in enumerate(values):
        if isinstance(value, Image.Image):
            raise _refused(
                path,
                number,
                f" is a PIL image ({value.mode}, {value.width} x {value.height}): end the "
                "transform with torchvision's v2.ToImage() or PILToTensor(), or pass ImageDataset "
                f"transform_input='tensor'; to keep PIL images, {_OR.removeprefix('or ')}",
            )
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char in _LONG:
            raise _refused(
                path,
                number,
                f" is {shape_of(value)}, a long double, which torch does not have. Cast it in the "
                f'dataset or its transform, with .astype("float64") or "complex128", {_OR}',
            )
        is_array = isinstance(value, np.ndarray) and is_numeric(value)
        # else the order of the samples would decide whether this is an error
        if is_array or isinstance(value, torch.Tensor) or keys_of(value) is not None:
            raise _refused(
                path,
                number,
                f" is {shape_of(value)}, ",
                0,
                f" is {shape_of(values[0])}. Give all a value of one type there, {_OR}",
            )


def _refused(path: FieldPath, *parts: str | int) -> CollateError:
    """The error of values at a path; an integer is the position of a sample."""
    return CollateError(f"samples of one batch can't be stacked{at_path(path)}: ", *parts)


def is_numeric(value: Any) -> bool:
    """True for a NumPy array or scalar of numbers that torch has."""
    return (
        isinstance(value, (np.ndarray, np.generic))
        and value.dtype.kind in "biufc"
        and value.dtype.char not in _LONG
    )


def gathered(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What stacking the rows of a tensor gives, [len(rows), ...], by one gather."""
    out = None
    if is_dense(tensor):
        out = empty((len(rows), *tensor.shape[1:]), tensor.dtype)
    return torch.index_select(tensor, 0, rows, out=out)


def from_array(array: Any) -> torch.Tensor:
    """A NumPy array or scalar as a tensor, over the same memory where torch takes that without a
    warning: in the machine's byte order, writable, with strides that torch has.
    """
    array = as_torch_lays_out(np.asarray(array))
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)


def owned(value: Any) -> Any:
    """A copy of a tensor or an array in the batch's buffer, as a tensor; else the value."""
    if is_numeric(value):
        value = from_array(value)
    if not is_dense(value):
        return value
    return empty(tuple(value.shape), value.dtype).copy_(value)


def shape_of(value: Any) -> str:
    """Dtype and shape, or the name of the type, for messages."""
    if isinstance(value, torch.Tensor) and value.is_nested:  # its shape may be none
        return "a nested tensor"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(type(value).__name__)
