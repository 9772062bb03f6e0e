"""Few combinations of several factors that hold every pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence


def covering(
    combinations: Sequence[tuple[Hashable, ...]], strength: int = 2
) -> list[tuple[Hashable, ...]]:
    """Those of the combinations that hold each set of `strength` values that any of them holds.

    Greedy, the most fruitful first; the same result each time.
    """
    factors = range(len(combinations[0]))
    columns = list(itertools.combinations(factors, strength))

    def parts(combination: tuple[Hashable, ...]) -> set[tuple[Hashable, ...]]:
        return {(chosen, *(combination[c] for c in chosen)) for chosen in columns}

    missing = set().union(*map(parts, combinations))
    left = list(combinations)
    chosen = []
    while missing:
        best = max(left, key=lambda combination: len(parts(combination) & missing))
        missing -= parts(best)
        left.remove(best)
        chosen.append(best)
    return chosen
