"""Random splits of a dataset: exact, seeded, each sample in exactly one part.

They depend on nothing but their arguments, and are the same on every rank.
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
        fractions: fraction of the samples in each part; they add up to 1.
        seed: any integer.
        stratify: one label per sample; each part gets about its fraction of each label.
        groups: one group per sample; a group stays in one part, so fractions are approximate.

    Returns:
        The ascending indices of each part, int64.

    Raises:
        ConfigError: an argument is invalid, or a part would be empty.
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
    """The indices of each part. `even`: the parts have equal fractions."""
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
    """The part of each sample in a row that is sorted by labels. Each part gets its exact number
    of samples, and its fraction of each label to within one sample, or to within a few for three or
    more unequal parts. Equal parts take turns.

    Args:
        cuts: ends of the parts if they were consecutive.
        seed: any integer.
        even: True if the parts have equal fractions, so that sizes differ by rounding only.
    """
    n = cuts[-1]
    parts = len(cuts)
    counts = np.diff(cuts, prepend=0)
    shift = int(derive_keys("stratify", seed, n, count=1)[0])
    if even or counts.max() == counts.min():
        turns = (np.arange(n) + shift) % parts
        # the larger parts get the turns that come once more than others
        by_size = np.argsort(-counts, kind="stable")
        by_turns = np.argsort(-np.bincount(turns, minlength=parts), kind="stable")
        part_of_turn: IntArray = by_size[np.argsort(by_turns)]
        return part_of_turn[turns]
    part_of = np.full(n, parts - 1)
    left = np.arange(n)
    for part, count in enumerate(counts[:-1].tolist()):
        # each takes places at equal distances among the remaining ones
        size = max(1, len(left))
        is_own = np.diff((np.arange(len(left) + 1) * count + shift % size) // size) > 0
        part_of[left[is_own]] = part
        left = left[~is_own]
    return part_of


def _grouped(
    order: IntArray, ends: Sequence[float | Fraction], groups: IntArray, labels: IntArray
) -> IntArray:
    """The part of each sample. Groups are placed by size, the largest first, each in the part that
    lacks most of its labels.
    """
    n_groups = int(groups.max(initial=-1)) + 1
    n_labels = int(labels.max(initial=-1)) + 1
    pairs, counts = np.unique(groups * n_labels + labels, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(n_groups + 1) * n_labels)
    labelled = np.bincount(labels, minlength=n_labels)
    missing = np.outer(np.diff([0.0, *map(float, ends)]), labelled)
    weight = 1 / labelled
    # position of each group in the random order
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
