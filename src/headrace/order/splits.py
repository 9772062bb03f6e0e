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


def split_parts(n: int, fractions: Sequence[float], seed: int, *, stratify: Any = None, groups: Any = None) -> list[IntArray]:
    """Cuts the indices of `n` samples into parts at random.

    Args:
        n: number of samples.
        fractions: of the samples that each part gets; they add up to 1.
        seed: any integer.
        stratify: a label a sample: each part gets its fraction of each label's samples, as nearly as can be.
        groups: a group a sample: the samples of a group stay together, so the fractions are only approached.

    Returns:
        For each part its indices, int64, ascending.

    Raises:
        ConfigError: an argument makes no sense, or a part would have no sample.
    """
    for fraction in fractions:
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float, np.number)) or not 0 <= fraction <= 1:
            raise ConfigError(f"split: a fraction must be a number between 0 and 1, not {fraction!r}")
    if not math.isclose(total := math.fsum(fractions), 1, abs_tol=1e-6):
        raise ConfigError(f"split: the fractions must add up to 1, and {list(fractions)!r} add up to {total:g}")
    ends = [math.fsum(fractions[: number + 1]) for number in range(len(fractions) - 1)]
    return _parts(n, [*ends, 1], seed, stratify, groups, f"split({list(fractions)!r})")


def fold_parts(n: int, k: int, seed: int, *, stratify: Any = None, groups: Any = None) -> list[IntArray]:
    """`k` parts of equal size, as `split_parts` makes them."""
    k = check_integer("folds: k", k, 2)
    if k > n:
        raise ConfigError(f"folds: {n:,} samples can't be cut into {k} folds: use a smaller k")
    return _parts(n, [Fraction(end, k) for end in range(1, k + 1)], seed, stratify, groups, f"folds({k})")


def _parts(n: int, ends: Sequence[float | Fraction], seed: int, stratify: Any, groups: Any, call: str) -> list[IntArray]:
    labels = None if stratify is None else _codes(stratify, n, "stratify")
    members = None if groups is None else _codes(groups, n, "groups")
    order = permute(np.arange(n), n, derive_keys("split", seed, n, count=KEY_COUNT)) if n else np.arange(0)
    cuts = [round(n * end) for end in ends]
    part_of = np.repeat(np.arange(len(cuts)), np.diff(cuts, prepend=0))
    if members is not None:
        part_of = _grouped(order, ends, members, labels)
    else:
        if labels is not None:
            order = order[np.argsort(labels[order], kind="stable")]
            part_of = _spread(cuts, seed)
        part_of[order] = part_of.copy()
    parts = [np.flatnonzero(part_of == part) for part in range(len(cuts))]
    for number, part in enumerate(parts):
        if n and not len(part):
            grouped = "" if members is None else f" in {int(members.max()) + 1:,} groups"
            raise ConfigError(f"{call} of {n:,} samples{grouped} leaves none for part {number}: use other fractions, or fewer parts")
    return parts


def _codes(given: Any, n: int, name: str) -> IntArray:
    """Labels or groups as numbers from 0."""
    values = np.asarray(given)
    if values.ndim != 1 or len(values) != n:
        raise ConfigError(f"{name} must hold one label for each of the {n:,} samples, and has the shape {list(values.shape)}")
    try:
        codes = np.unique(values, return_inverse=True)[1]
    except TypeError:
        raise ConfigError(f"{name} must hold labels of one kind (numbers or texts), which can be sorted, not objects") from None
    return codes.astype(np.int64)


def _spread(cuts: Sequence[int], seed: int) -> IntArray:
    """The part of each place in a row of samples, so that each part has its count, and nearly its share of every part of the row: the
    first part to within one sample; the others share what it leaves in the same way. Equal parts take turns."""
    n, parts = cuts[-1], len(cuts)
    counts = np.diff(cuts, prepend=0)
    shift = int(derive_keys("stratify", seed, n, count=1)[0])
    if parts and counts.max() - counts.min() <= 1:
        turns = (np.arange(n) + shift) % parts
        larger_first = np.argsort(-counts, kind="stable")  # what is left over at the end goes to these
        order_of_turns = larger_first[np.argsort(np.argsort(-np.bincount(turns, minlength=parts), kind="stable"))]
        return order_of_turns[turns]
    part_of, rest = np.empty(n, np.int64), np.arange(n)
    for part, count in enumerate(counts.tolist()):
        steps = (np.arange(len(rest) + 1) * count + shift % max(1, len(rest))) // max(1, len(rest))
        is_picked = np.diff(steps) > 0
        part_of[rest[is_picked]], rest = part, rest[~is_picked]
    return part_of


def _grouped(order: IntArray, ends: Sequence[float | Fraction], groups: IntArray, labels: IntArray | None) -> IntArray:
    """The part of each sample: the largest groups first, each goes where most is missing of its samples (or of their labels)."""
    labels = np.zeros(len(groups), np.int64) if labels is None else labels
    n_groups, n_labels = int(groups.max(initial=-1)) + 1, int(labels.max(initial=-1)) + 1
    pairs, counts = np.unique(groups * n_labels + labels, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(n_groups + 1) * n_labels)
    missing = np.outer(np.diff([0.0, *map(float, ends)]), np.bincount(labels, minlength=n_labels))
    weight = 1 / np.bincount(labels, minlength=n_labels)
    _, first = np.unique(groups[order], return_index=True)  # where each group comes in the random order
    sizes = np.bincount(groups, minlength=n_groups)
    part_of, empty = np.empty(n_groups, np.int64), set(range(len(ends)))
    for done, group in enumerate(np.lexsort((first, -sizes)).tolist()):
        own = slice(bounds[group], bounds[group + 1])
        of, samples = pairs[own] % n_labels, counts[own]
        lacks = missing[:, of] @ (samples * weight[of])
        if n_groups - done <= len(empty):  # the last groups go where there is none
            lacks[[part for part in range(len(ends)) if part not in empty]] = -np.inf
        part = int(lacks.argmax())
        part_of[group] = part
        missing[part, of] -= samples
        empty.discard(part)
    return part_of[groups]
