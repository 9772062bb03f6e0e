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
        if (
            isinstance(fraction, bool)
            or not isinstance(fraction, (int, float, np.number))
            or not 0 <= fraction <= 1
        ):
            raise ConfigError(
                f"split: a fraction must be a number between 0 and 1, not {fraction!r}"
            )
    if not math.isclose(total := math.fsum(fractions), 1, abs_tol=1e-6):
        raise ConfigError(
            f"split: the fractions must add up to 1, and {list(fractions)!r} add up to {total:g}"
        )
    ends = [math.fsum(fractions[: number + 1]) for number in range(len(fractions) - 1)]
    return _parts(
        n,
        [*ends, 1],
        seed,
        stratify,
        groups,
        f"split({list(fractions)!r})",
        even=len(set(fractions)) == 1,
    )


def fold_parts(
    n: int, k: int, seed: int, *, stratify: Any = None, groups: Any = None
) -> list[IntArray]:
    """`k` parts of equal size, as `split_parts` makes them."""
    k = check_integer("folds: k", k, 2)
    if k > n:
        raise ConfigError(f"folds: {n:,} samples can't be cut into {k} folds: use a smaller k")
    return _parts(
        n,
        [Fraction(end, k) for end in range(1, k + 1)],
        seed,
        stratify,
        groups,
        f"folds({k})",
        even=True,
    )


def _parts(
    n: int,
    ends: Sequence[float | Fraction],
    seed: int,
    stratify: Any,
    groups: Any,
    call: str,
    *,
    even: bool,
) -> list[IntArray]:
    labels = None if stratify is None else _codes(stratify, n, "stratify")
    members = None if groups is None else _codes(groups, n, "groups")
    order = (
        permute(np.arange(n), n, derive_keys("split", seed, n, count=KEY_COUNT))
        if n
        else np.arange(0)
    )
    cuts = [round(n * end) for end in ends]
    part_of = np.repeat(np.arange(len(cuts)), np.diff(cuts, prepend=0))
    if members is not None:
        part_of = _grouped(order, ends, members, labels)
    else:
        if labels is not None:
            order = order[np.argsort(labels[order], kind="stable")]
            part_of = _spread(cuts, seed, np.bincount(labels), even=even)
        part_of[order] = part_of.copy()
    parts = [np.flatnonzero(part_of == part) for part in range(len(cuts))]
    for number, part in enumerate(parts):
        if n and not len(part):
            grouped = "" if members is None else f" in {int(members.max()) + 1:,} groups"
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
    if values.dtype.kind == "U" and not all(isinstance(label, str) for label in given):
        raise ConfigError(
            f"{name} holds texts and other values, of which '7' and 7 would become one: give all "
            "as texts, or all as numbers"
        )
    try:
        codes = np.unique(values, return_inverse=True)[1]
    except TypeError:
        raise ConfigError(
            f"{name} must hold labels of one kind (numbers or texts), which can be sorted, not "
            "objects"
        ) from None
    return codes.astype(np.int64)


def _spread(cuts: Sequence[int], seed: int, labelled: IntArray, *, even: bool) -> IntArray:
    """The part of each place in a row of samples that is sorted by labels, so that each part has
    its count, and its share of each label's samples to within one. Equal parts take turns.

    Args:
        cuts: where the parts would end if they were taken one after the other.
        seed: any integer.
        labelled: how many samples have each label.
        even: whether all parts were asked to be equal, so that sizes differ by rounding alone.
    """
    n, parts = cuts[-1], len(cuts)
    counts = np.diff(cuts, prepend=0)
    shift = int(derive_keys("stratify", seed, n, count=1)[0])
    if parts and (even or counts.max() == counts.min()):
        turns = (np.arange(n) + shift) % parts
        # what is left over at the end goes to these
        larger_first = np.argsort(-counts, kind="stable")
        order_of_turns = larger_first[
            np.argsort(np.argsort(-np.bincount(turns, minlength=parts), kind="stable"))
        ]
        return order_of_turns[turns]
    if parts > 2:
        return np.repeat(
            np.tile(np.arange(parts), len(labelled)), _rounded(labelled, counts).ravel()
        )
    is_first = np.diff((np.arange(n + 1) * counts[0] + shift % n) // n) > 0
    return np.where(is_first, 0, 1)


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
    in_row: list[list[int]] = [np.flatnonzero(one).tolist() for one in rest]
    in_column: list[list[int]] = [np.flatnonzero(one).tolist() for one in rest.T]
    for start in range(len(left)):
        while in_row[start]:
            circle = _circle(start, in_row, in_column, left, total)
            raised, lowered = circle[::2], circle[1::2]
            by = min(
                *(total - left[row][column] for row, column in raised),
                *(left[row][column] for row, column in lowered),
            )
            for cells, step in ((raised, by), (lowered, -by)):
                for row, column in cells:
                    left[row][column] += step
                    if left[row][column] in (0, total):
                        table[row, column] += left[row][column] // total
                        in_row[row].remove(column)
    return table.astype(np.int64)


def _circle(
    row: int, in_row: list[list[int]], in_column: list[list[int]], left: list[list[int]], total: int
) -> list[tuple[int, int]]:
    """Cells with fractions, of which two lie in each row and each column that they touch, one after
    the other. No row and no column has a single one, since their sums are whole.

    Args:
        row: where to begin.
        in_row: the columns of the cells in each row.
        in_column: the rows of the cells in each column, and of some that have no fraction any more:
            they are removed here.
        left, total: the fractions.
    """

    def other_row(column: int, row: int) -> int:
        """The last cell of a column that is not in that row."""
        rows, own = in_column[column], False
        while rows[-1] == row or left[rows[-1]][column] in (0, total):
            own = rows.pop() == row or own
        found = rows[-1]
        if own:
            rows.append(row)
        return found

    path, last = list[tuple[int, int]](), -1
    rows, columns = dict[int, int](), dict[int, int]()  # where on the path each of them was left
    while row not in rows:
        rows[row] = len(path)
        column = next(one for one in in_row[row] if one != last)
        path.append((row, column))
        if column in columns:
            return path[columns[column] :]
        columns[column], last = len(path), column
        row = other_row(column, row)
        path.append((row, column))
    return path[rows[row] :]


def _grouped(
    order: IntArray, ends: Sequence[float | Fraction], groups: IntArray, labels: IntArray | None
) -> IntArray:
    """The part of each sample: the largest groups first, each goes where most is missing of its
    samples (or of their labels).
    """
    labels = np.zeros(len(groups), np.int64) if labels is None else labels
    n_groups, n_labels = int(groups.max(initial=-1)) + 1, int(labels.max(initial=-1)) + 1
    pairs, counts = np.unique(groups * n_labels + labels, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(n_groups + 1) * n_labels)
    missing = np.outer(np.diff([0.0, *map(float, ends)]), np.bincount(labels, minlength=n_labels))
    weight = 1 / np.bincount(labels, minlength=n_labels)
    # where each group comes in the random order
    _, first = np.unique(groups[order], return_index=True)
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
