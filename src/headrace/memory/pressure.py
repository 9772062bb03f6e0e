"""Detects memory pressure: how much is to be released although the budget is kept.

A budget is measured once. Others allocate later: a neighbour in the same container, the training itself. So what can be read again
is given back while the headroom is small, and things get slower instead of killed (law 5).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.memory.limits import Limit, common_limits, tightest

PERIOD = 1.0
"""Seconds between two looks, which cost a tenth of a millisecond or more."""
_LOW, _LOW_BYTES, _LOW_OF_HEADROOM = 0.05, 1 << 30, 0.1


class PressureWatch:
    """Says how much to give back.

    Memory is short when the headroom under the tightest limit is below `low`: 5 % of the limit, at most 1 GiB, and at most a tenth of
    the headroom that was there when this was made.

    Args:
        limits: those at the start; None: they are measured now.
    """

    def __init__(self, limits: Sequence[Limit] | None = None) -> None:
        start = tightest(common_limits() if limits is None else limits)
        self.low: int = int(min(_LOW * start.total, _LOW_BYTES, _LOW_OF_HEADROOM * start.headroom))

    def excess(self) -> int:
        """Bytes that are to be given back, so that twice `low` is free; if negative, bytes that may be taken; 0 between."""
        headroom = tightest(common_limits()).headroom
        if headroom < self.low:
            return 2 * self.low - headroom
        return min(0, 2 * self.low - headroom)
