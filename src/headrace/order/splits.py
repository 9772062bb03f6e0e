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
from headrace.sorting import distinct


def split_parts(
    n: int, fractions: Sequence[float], seed: int, *, stratify: Any = None, groups: Any = None
) -> list[IntArray]:
    """Cuts the indices of `n` samples into parts at random.

    Args:
        n: number of samples.
        fractions: of the samples that each part gets; they add up to 1.
        seed: any integer.
        stratify: a label a sample: each part gets its share of each label's samples, to within one
            sample.
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
    if stratify is not None:
        labels = _codes(stratify, n, "stratify")
    if groups is not None:
        part_of = _grouped(order, ends, _codes(groups, n, "groups"), labels)
    else:
        cuts = [round(n * end) for end in ends]
        parts_in_order = np.repeat(np.arange(len(cuts)), np.diff(cuts, prepend=0))
        if stratify is not None:
            order = order[np.argsort(labels[order], kind="stable")]
            parts_in_order = _spread(cuts, seed, np.bincount(labels), even)
        part_of = np.empty(n, np.int64)
        part_of[order] = parts_in_order
    parts = [np.flatnonzero(part_of == part) for part in range(len(ends))]
    for number, part in enumerate(parts):
        if n and not len(part):
            grouped = ""
            if groups is not None:
                grouped = f" in {len(distinct(_codes(groups, n, 'groups'))):,} groups"
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


def _spread(cuts: Sequence[int], seed: int, labelled: IntArray, even: bool) -> IntArray:
    """The part of each place in a row of samples that is sorted by labels, so that each part has
    its count, and its share of each label's samples to within one. Equal parts take turns.

    Args:
        cuts: where the parts would end if they were taken one after the other.
        seed: any integer.
        labelled: how many samples have each label.
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
    if parts == 2:
        of_first: IntArray = np.diff((np.arange(n + 1) * counts[0] + shift % n) // n)
        return 1 - of_first
    table = _rounded(labelled, counts)
    return np.repeat(np.tile(np.arange(parts), len(labelled)), table.ravel())


def _rounded(rows: IntArray, columns: IntArray) -> IntArray:
    """A table [rows, columns] of counts with these sums, each the product of its sums over the
    total, rounded up or down.

    Such a table exists (Cox, A constructive procedure for unbiased controlled rounding, 1987): as
    long as some fractions are left, there is a circle of cells that have one, two a row and two a
    column; along it they are raised and lowered in turns until one of them is whole.
    """
    total = int(columns.sum())
    table, rest = np.divmod(np.outer(rows, columns), total)
    left: list[list[int]] = rest.tolist()
    in_row = [dict.fromkeys(np.flatnonzero(row).tolist()) for row in rest]
    in_column = [dict.fromkeys(np.flatnonzero(column).tolist()) for column in rest.T]
    for start in range(len(rows)):
        while in_row[start]:
            circle = _circle(start, in_row, in_column)
            by = min(
                *(total - left[row][column] for row, column in circle[::2]),
                *(left[row][column] for row, column in circle[1::2]),
            )
            for row, column in circle:
                left[row][column] += by
                by = -by
                if left[row][column] in (0, total):
                    table[row, column] += left[row][column] // total
                    del in_row[row][column]
                    del in_column[column][row]
    return table


def _circle(
    row: int, in_row: list[dict[int, None]], in_column: list[dict[int, None]]
) -> list[tuple[int, int]]:
    """Cells with fractions, of which two lie in each row and each column that they touch, one after
    the other. No row and no column has a single one, since their sums are whole.

    Args:
        row: where to begin.
        in_row: the columns of the cells in each row.
        in_column: the rows of the cells in each column.
    """
    path: list[tuple[int, int]] = []
    rows: dict[int, int] = {}  # where on the path each was left
    columns: dict[int, int] = {}
    column = -1
    while row not in rows:
        rows[row] = len(path)
        column = next(other for other in in_row[row] if other != column)
        path.append((row, column))
        if column in columns:
            return path[columns[column] :]
        columns[column] = len(path)
        row = next(other for other in reversed(in_column[column]) if other != row)
        path.append((row, column))
    return path[rows[row] :]


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
