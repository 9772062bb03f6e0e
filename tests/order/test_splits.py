"""Splits: exact, seeded, each sample in exactly one part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from headrace import ConfigError
from headrace.order.splits import fold_parts, split_parts

SEEDS = st.integers(-(2**70), 2**70)
GOLDEN = [2, 4, 5]
UNEVEN = [[1.0], [0.8, 0.2], [0.7, 0.15, 0.15], [0.1, 0.2, 0.3, 0.4]]
FRACTIONS = st.sampled_from([*UNEVEN, [0.5, 0.5], [0.25] * 4, [1 / 3] * 3])


def parts_or_none(*args: Any, **options: Any) -> list[np.ndarray[Any, Any]] | None:
    """None where a part would have no sample, which is refused."""
    try:
        return split_parts(*args, **options)
    except ConfigError as error:
        assert "leaves none for part" in str(error)
        return None


def assert_exactly_once(parts: list[np.ndarray[Any, Any]], n: int) -> None:
    assert np.sort(np.concatenate(parts)).tolist() == list(range(n))
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in parts)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), FRACTIONS, SEEDS)
# parts of almost the same size, which were not asked to be equal
@example([0, 0, 1, 1, 1, 2], [0.1, 0.2, 0.3, 0.4], 0)
def test_stratified_parts_have_their_share_of_labels(
    labels: list[int], fractions: list[float], seed: int
) -> None:
    n = len(labels)
    parts = parts_or_none(n, fractions, seed, stratify=labels)
    plain = parts_or_none(n, fractions, seed)
    if parts is None or plain is None:
        assert parts is plain
        return
    assert_exactly_once(parts, n)
    assert [len(part) for part in parts] == [len(part) for part in plain]
    assert_exactly_once(plain, n)
    assert all(
        abs(len(part) - n * fraction) <= 1 for part, fraction in zip(plain, fractions, strict=True)
    )
    is_even = len(set(fractions)) == 1
    most = 1 if is_even or len(fractions) < 3 else 2
    for label, count in Counter(labels).items():
        for part, fraction in zip(parts, fractions, strict=True):
            share = count * (fraction if is_even else len(part) / n)
            assert abs(sum(labels[i] == label for i in part) - share) < most


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), FRACTIONS, SEEDS, st.booleans())
def test_groups_stay_together(
    groups: list[int], fractions: list[float], seed: int, stratified: bool
) -> None:
    labels = [group % 3 for group in groups] if stratified else None
    parts = parts_or_none(len(groups), fractions, seed, groups=groups, stratify=labels)
    if len(set(groups)) < len(fractions):
        assert parts is None
        return
    assert parts is not None
    assert_exactly_once(parts, len(groups))
    assert sum(len({groups[i] for i in part}) for part in parts) == len(set(groups))


@given(st.integers(2, 40), st.integers(2, 7), SEEDS, st.booleans())
def test_folds_are_equal_and_whole(n: int, k: int, seed: int, stratified: bool) -> None:
    labels = [i % 3 for i in range(n)] if stratified else None
    if k > n:
        with pytest.raises(ConfigError):
            fold_parts(n, k, seed, stratify=labels)
        return
    parts = fold_parts(n, k, seed, stratify=labels)
    assert_exactly_once(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for label in range(3 if labels else 0):
        counts = [sum(labels[i] == label for i in part) for part in parts]
        assert max(counts) - min(counts) <= 1


def test_groups_of_many_sizes_come_near_the_fractions() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(200), rng.integers(1, 20, 200))
    labels = rng.integers(0, 5, 200)[groups]
    for stratify in (None, labels):
        parts = split_parts(len(groups), [0.7, 0.15, 0.15], 0, groups=groups, stratify=stratify)
        shares = np.array([len(part) / len(groups) for part in parts])
        assert np.abs(shares - [0.7, 0.15, 0.15]).max() < 0.02
    for label in range(5):
        of_label = [(labels[part] == label).mean() for part in parts]
        assert max(of_label) - min(of_label) < 0.05


def test_a_split_in_two_is_what_it_was() -> None:
    """Golden: an upgrade must not move samples from training to validation."""
    first, second = split_parts(10, [0.3, 0.7], 42)
    assert first.tolist() == GOLDEN
    assert second.tolist() == sorted(set(range(10)) - set(GOLDEN))


def test_bad_arguments() -> None:
    for fractions, options, named in (
        ([0.5, 0.6], {}, "1.1"),
        ([True, 0.0], {}, "True"),
        ([1.0, 0.0], {}, "part 1"),
        ([0.5, 0.5], {"stratify": [1, 2]}, r"stratify .* \[2\]"),
        ([0.5, 0.5], {"stratify": [None, 1] * 5}, "stratify"),
        ([0.5, 0.5], {"groups": ["7", 7] * 5}, "groups"),
        ([0.5, 0.5], {"groups": [1] * 10}, "1 groups"),
    ):
        with pytest.raises(ConfigError, match=named):
            split_parts(10, fractions, 0, **options)
        for k in (1, 0, 2.5, True, 11):
            with pytest.raises(ConfigError, match="folds"):
                fold_parts(10, k, 0)  # type: ignore[arg-type]
