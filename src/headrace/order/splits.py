"""Random splits of a dataset: exact, seeded, each sample in exactly one part.

They follow from their arguments alone, and are the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from headrace.arguments import check_integer
from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.order.permutation import KEY_COUNT, derive_keys, permute


def split_parts(
    n: int, fractions: Sequence[float], seed: int, *, stratify: Any = None, groups: Any = None
) -> list[IntArray]:
    """Cuts the indices of `n` samples into parts at random.

    Args:
        n: number of samples.
        fractions: of the samples that each part gets; they add up to 1.
        seed: any integer.
        stratify: a label a sample: each part gets about its share of each label's samples.
        groups: a group a sample: the samples of a group stay together, so the fractions are only
            approached.

    Returns:
        For each part its indices, int64, ascending.

    Raises:
        ConfigError: an argument makes no sense, or a part would have no sample.
    """
    for fraction in fractions:
        is_number = isinstance(fraction, (int, float, np.number)) and not isinstance(fraction, bool)
        if not is_number or not 0 <= fraction <= 1:
            raise ConfigError(
                f"split: a fraction must be a number between 0 and 1, not {fraction!r}"
            )
    total = math.fsum(fractions)
    if not math.isclose(total, 1, abs_tol=1e-6):
        raise ConfigError(
            f"split: the fractions must add up to 1, and {list(fractions)!r} add up to {total:g}"
        )
    ends = [math.fsum(fractions[:number]) for number in range(1, len(fractions))]
    even = len(set(fractions)) == 1
    return _parts(n, [*ends, 1], seed, stratify, groups, even, f"split({list(fractions)!r})")


def fold_parts(
    n: int, k: int, seed: int, *, stratify: Any = None, groups: Any = None
) -> list[IntArray]:
    """`k` parts of equal size, as `split_parts` makes them."""
    k = check_integer("folds: k", k, 2)
    if k > n:
        raise ConfigError(f"folds: {n:,} samples can't be cut into {k} folds: use a smaller k")
    ends = [Fraction(end, k) for end in range(1, k + 1)]
    return _parts(n, ends, seed, stratify, groups, True, f"folds({k})")


def _parts(
    n: int,
    ends: Sequence[float | Fraction],
    seed: int,
    stratify: Any,
    groups: Any,
    even: bool,
    call: str,
) -> list[IntArray]:
    """For each part its indices. `even`: all parts were asked to be equal."""
    seed = check_integer("seed", seed)
    order = permute(np.arange(n), n, derive_keys("split", seed, n, count=KEY_COUNT))
    labels = np.zeros(n, np.int64)
    grouped = ""
    if stratify is not None:
        labels = _codes(stratify, n, "stratify")
    if groups is not None:
        members = _codes(groups, n, "groups")
        part_of = _grouped(order, ends, members, labels)
        grouped = f" in {members.max(initial=-1) + 1:,} groups"
    else:
        cuts = [round(n * end) for end in ends]
        parts_in_order = np.repeat(np.arange(len(cuts)), np.diff(cuts, prepend=0))
        if stratify is not None:
            order = order[np.argsort(labels[order], kind="stable")]
            parts_in_order = _spread(cuts, seed, even)
        part_of = np.empty(n, np.int64)
        part_of[order] = parts_in_order
    parts = [np.flatnonzero(part_of == part) for part in range(len(ends))]
    for number, part in enumerate(parts):
        if n and not len(part):
            raise ConfigError(
                f"{call} of {n:,} samples{grouped} leaves none for part {number}: use other "
                "fractions, or fewer parts"
            )
    return parts


def _codes(given: Any, n: int, name: str) -> IntArray:
    """Labels or groups as numbers from 0."""
    values = np.asarray(given)
    if values.ndim != 1 or len(values) != n:
        raise ConfigError(
            f"{name} must hold one label for each of the {n:,} samples, and has the shape "
            f"{list(values.shape)}"
        )
    try:
        codes = np.unique(values, return_inverse=True)[1]
    except TypeError:
        codes = None
    # NumPy makes '7' of 7 beside a text
    if codes is None or (values.dtype.kind == "U" and not all(isinstance(x, str) for x in given)):
        raise ConfigError(
            f"{name} must hold labels of one kind, all texts or all numbers, and holds "
            f"{', '.join(sorted({type(label).__name__ for label in given}))}"
        )
    return codes.astype(np.int64)


def _spread(cuts: Sequence[int], seed: int, even: bool) -> IntArray:
    """The part of each place in a row of samples that is sorted by labels, so that each part has
    its count, and about its share of each label's samples: one more or less, or where three parts
    and more are not equal, a few. Equal parts take turns.

    Args:
        cuts: where the parts would end if they were taken one after the other.
        seed: any integer.
        even: whether all parts were asked to be equal, so that sizes differ by rounding alone.
    """
    n = cuts[-1]
    parts = len(cuts)
    counts = np.diff(cuts, prepend=0)
    shift = int(derive_keys("stratify", seed, n, count=1)[0])
    if even or counts.max() == counts.min():
        turns = (np.arange(n) + shift) % parts
        # the turns that come once more than others go to the larger parts
        by_size = np.argsort(-counts, kind="stable")
        by_turns = np.argsort(-np.bincount(turns, minlength=parts), kind="stable")
        part_of_turn: IntArray = by_size[np.argsort(by_turns)]
        return part_of_turn[turns]
    part_of = np.full(n, parts - 1)
    left = np.arange(n)
    for part, count in enumerate(counts[:-1].tolist()):
        # each takes places at equal distances of those that the ones before have left
        size = max(1, len(left))
        is_own = np.diff((np.arange(len(left) + 1) * count + shift % size) // size) > 0
        part_of[left[is_own]] = part
        left = left[~is_own]
    return part_of


def _grouped(
    order: IntArray, ends: Sequence[float | Fraction], groups: IntArray, labels: IntArray
) -> IntArray:
    """The part of each sample: the largest groups first, each goes where most is missing of its
    samples of each label.
    """
    n_groups = int(groups.max(initial=-1)) + 1
    n_labels = int(labels.max(initial=-1)) + 1
    pairs, counts = np.unique(groups * n_labels + labels, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(n_groups + 1) * n_labels)
    labelled = np.bincount(labels, minlength=n_labels)
    missing = np.outer(np.diff([0.0, *map(float, ends)]), labelled)
    weight = 1 / labelled
    # where each group comes in the random order
    _, first = np.unique(groups[order], return_index=True)
    by_size = np.lexsort((first, -np.bincount(groups, minlength=n_groups)))
    part_of = np.empty(n_groups, np.int64)
    is_empty = np.ones(len(ends), bool)
    for done, group in enumerate(by_size.tolist()):
        own = slice(bounds[group], bounds[group + 1])
        of = pairs[own] % n_labels
        lacks = missing[:, of] @ (counts[own] * weight[of])
        if n_groups - done <= is_empty.sum():  # the last groups go where there is none
            lacks[~is_empty] = -np.inf
        part = int(lacks.argmax())
        part_of[group] = part
        missing[part, of] -= counts[own]
        is_empty[part] = False
    return part_of[groups]
