"""What a sample is: the steps from a stored record to a decoded value, and from there to input
and target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.arguments import check_callable
from headrace.collate.vision import Normalization
from headrace.dtypes import AnyArray, ArraySpec
from headrace.errors import ConfigError, SampleError

if TYPE_CHECKING:
    from headrace.core.batcher import BatchReader, Collating
    from headrace.core.dataset import BaseDataset

Failed = Callable[[int, str, Exception], SampleError]
"""Raises or returns the error of a sample, given its position in the batch, a few words ("can't
be decoded"), and the cause.
"""


class Decoder:
    """Defines the samples of a dataset. A dataset, its views and datasets that wrap it share one
    decoder, which never changes.

    `decode` turns a record into a value of its final size, deterministically; modes may cache it.
    `split_target` splits the value into input and target, `to_input` makes the input that
    transforms receive, and `make_sample` joins input and target to a sample.

    If inputs are arrays of one spec and have no transforms, they are written directly into their
    batch by `draw` and `write_input`, which together do the same as `to_input`. A FormatError in
    any of these means that the sample can't be decoded.
    """

    decodes_batches = False
    """True if the records of a batch are decoded together, by `decode_batch`."""
    stores_values = True
    """True if a record is its own value, so that it may be read directly into a batch."""
    splits_targets = False
    """True if a value contains its target, or if targets come from anywhere but the dataset's
    `targets`.
    """
    makes_plain_samples = True
    """True if a sample is its input, or a tuple of input and target."""
    always_pairs = False
    """True if a sample is a pair even without targets."""
    draws = False
    """True if `draw` draws random numbers."""
    casts_to: np.dtype[Any] | None = None
    """The dtype that the numbers of a record are cast to, if decoding does nothing else."""
    copies = True
    """True if an input equals its value, bit for bit."""

    # -- from record to value

    def decode(self, record: Any) -> Any:
        """Decodes a record, deterministically and to its final size. Default: the record itself."""
        return record

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        """Decodes the records of a batch.

        Args:
            items: the number of each sample in its source, and its record.
            failed: called for a sample that can't be decoded; its result replaces the value.
        """
        raise NotImplementedError

    def value_spec(self) -> ArraySpec | None:
        """Shape and dtype of all values, if they are arrays of one kind and known in advance."""
        return None

    # -- from value to sample

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        """Splits a value into input value and target. Default: the value, and a copy of its
        entry in the dataset's `targets`.
        """
        if dataset.targets is None:
            return value, None
        return value, plain_target(dataset.targets[index])

    def to_input(self, value: Any) -> Any:
        """Converts an input value to what the transform receives. Without a transform this is the
        sample's input. Default: the value itself, writable.
        """
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return value.copy()
        return value

    def to_pair(self, value: Any, target: Any) -> tuple[Any, Any]:
        """Converts input value and target to what transforms receive, perhaps with random numbers
        that both share. Default: `to_input`, and the target itself.
        """
        return self.to_input(value), target

    def make_sample(self, value: Any, target: Any, has_target: bool) -> Any:
        """Makes a sample of input and target. Default: a tuple of both, or the input alone."""
        return (value, target) if has_target else value

    def packed_value(self, value: Any) -> Any:
        """What `headrace.pack` stores of an input value: an array, bytes or str. Default: the value
        itself.

        Raises:
            ConfigError: it can't be packed.
        """
        return value

    # -- from value to a row of a batch

    def input_spec(self, value: ArraySpec) -> ArraySpec | None:
        """Shape and dtype of the input of such a value. None: inputs are not arrays, or
        `write_input` can't write them.
        """
        return value

    def draw(self, value: Any) -> Any:
        """Draws the random numbers for one value. Called in the order of the samples, with
        generators seeded for this sample.
        """
        return None

    def write_input(self, value: Any, drawn: Any, out: AnyArray) -> None:
        """Writes the input of a value into its row of a batch. Default: a copy. May run in
        several threads at once.
        """
        np.copyto(out, value)

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, ArraySpec | None] | None:
        """For values that hold input and target: the specs of the rows of inputs and of targets;
        of the latter None if a batch lists them. None: `collating` needs samples, or values hold no
        target.
        """
        return None

    def placed(self, target: Any, drawn: Any) -> Any:
        """Applies the draws for an input to the target of its pair."""
        return target

    def sample_nbytes(self) -> int | None:
        """Bytes of one sample without transforms. None: unknown, or they differ between samples."""
        return None

    # -- variants

    def with_transform(self, transform: Any) -> tuple[Decoder, Callable[[Any], Any] | None]:
        """Returns the decoder of a dataset with another transform, and the part of the transform
        that the dataset must call.
        """
        return self, chained(transform)

    def unnormalized(self) -> tuple[Decoder, Normalization] | None:
        """The same decoder, but with images as uint8 [C, H, W], and how a device normalises them.
        None: inputs are not images, or are not normalised.
        """
        return None

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        """A faster way of making batches that only this decoder has. None: it does not fit the
        dataset or the collate function.
        """
        return None


def overriding(dataset: BaseDataset, base: Decoder, overridden: frozenset[str]) -> Decoder:
    """A copy of a dataset's decoder with the steps that its class overrides, and without its own
    ways of making batches, which would bypass these.

    Args:
        dataset: the dataset, or a view of it.
        base: its own decoder.
        overridden: names of the methods that its class overrides.
    """
    decoder = copy.copy(base)
    steps: dict[str, Any] = {}
    for name in ("pair_rows", "unnormalized", "own_reader"):
        steps[name] = lambda *_: None
    # no bound methods of its own: the cycle would keep the dataset, and what it holds, alive
    if "decode" in overridden:
        steps |= {"decode": dataset.decode, "value_spec": lambda: None}
        steps |= {"decodes_batches": False, "stores_values": False, "casts_to": None}
        steps["packed_value"] = lambda value: value
    if "value_spec" in overridden:
        steps["value_spec"] = partial(_said_spec, dataset)
    if "split_target" in overridden:
        steps |= {"splits_targets": True, "packed_value": lambda value: value}
    if "to_input" in overridden:
        steps |= {"to_input": dataset.to_input, "copies": False, "input_spec": lambda value: None}
        steps["to_pair"] = lambda value, target: (dataset.to_input(value), target)
    if "make_sample" in overridden:
        steps["makes_plain_samples"] = False
    vars(decoder).update(steps)
    return decoder


def _said_spec(dataset: BaseDataset) -> ArraySpec | None:
    spec = dataset.value_spec()
    return None if spec is None else ArraySpec(*spec)


def plain_target(target: Any) -> Any:
    """A target as users of PyTorch expect it: a Python number, not a NumPy scalar; of what may
    be written to, a copy.
    """
    if isinstance(target, np.generic):
        return target.item()
    if target is None or isinstance(target, (int, float, str, bytes)):
        return target
    return copy.deepcopy(target)


class Chain:
    """Callables, one after the other: of an input, or of input and target."""

    def __init__(self, steps: Iterable[Callable[..., Any]]) -> None:
        self.steps: list[Callable[..., Any]] = list(steps)

    def __call__(self, value: Any, *target: Any) -> Any:
        for step in self.steps:
            if target:
                value, *target = step(value, *target)
            else:
                value = step(value)
        return (value, *target) if target else value


def chained(transform: Any, name: str = "transform") -> Any:
    """A callable, or a list or tuple of these, as one callable; None where there is none. (`name`:
    of the argument, for messages.)

    Raises:
        ConfigError: it is something else.
    """
    if transform is None:
        return None
    steps = transform if isinstance(transform, (list, tuple)) else [transform]
    for step in steps:
        if not callable(step):
            raise ConfigError(f"{name} must be a callable, or a list of callables, not {step!r}")
        check_callable(name, step)
    if not steps:
        return None
    if len(steps) == 1:
        return steps[0]
    return Chain(steps)
