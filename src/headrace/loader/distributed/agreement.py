"""Checks that all ranks build the same loader.

Where seed, data or options differ, each rank takes its share of another order: samples are lost and doubled, or a rank has a batch more
than the others and waits for them for ever. Nothing else would say so.

NOTE [ agreement of ranks ]

* Only where torch.distributed is up and says what rank and world size are: with `rank=` and `world_size=` given, the ranks may be those of
  a group, or of data that is shared out already. Only for headrace's own orders: a sampler of the user's is his.
* No collective: it would hang where one rank alone builds a loader (to validate on rank 0). Each rank leaves what its loader depends on in
  the store of the process group, and looks whether another one has left something else. It never waits for a rank. So the first rank
  to come finds nothing yet, and looks again: when an epoch begins, and at its 2nd, 6th, 14th, ... batch, until all have been heard. A
  training that is synchronous can't get to its second batch before all ranks have built their loaders.
* "The same" loader of another rank is the one built at the same place of the program, by its whole call stack, and as often there.
  So a loader that one rank alone has is compared with nothing, and the others are not counted wrongly.
* A look is a few round trips of 0.1 ms, of a size that does not depend on the number of ranks. It is done in a thread, which is left behind
  if the store does not answer: its own calls have no time limit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from headrace.errors import ConfigError, warn
from headrace.loader.torch_private import default_store
from headrace.order import World

logger: logging.Logger = logging.getLogger("headrace.loader")

PATIENCE = 10.0
"""Seconds that the store is given to answer."""

_SHOWN = 8  # ranks that are listed one by one
_built: Counter[str] = Counter()  # loaders of this process, by their place in the program
_silent: list[object] = []  # the store that did not answer: it is not asked again


class Agreement:
    """What the batches of all ranks together depend on, compared with the same loader of the other ranks. Without facts nothing is."""

    def __init__(self, facts: Mapping[str, Any] | None, world: World) -> None:
        self._rank, self._size = world.rank, world.world_size
        self._is_settled = facts is None or self._size == 1
        self._complaint = ""
        self._looks = 0
        self._has_said = False
        if facts is not None and not self._is_settled:
            self._facts = json.dumps({name: repr(value) for name, value in facts.items()})
            site = _call_site()
            self._key = f"headrace/{self._size}/{site}/{_built[site]}"
            _built[site] += 1

    def look(self) -> None:
        """Compares with what the other ranks have said so far; asks the store at the 1st, 2nd, 4th, 8th, ... call only.

        Raises:
            ConfigError: they differ; the message says in what, and on which ranks.
        """
        if self._is_settled:
            return
        self._looks += 1
        if not self._complaint and self._looks & (self._looks - 1) == 0:
            store = _store(self._rank, self._size)
            if store is not None:
                self._ask(store)
        if self._complaint:
            raise ConfigError(self._complaint)

    def _ask(self, store: Any) -> None:
        """Asks a store that may be gone, or may not answer."""
        if any(store is other for other in _silent):
            self._is_settled = True
            return
        has_returned, error = _within(PATIENCE, lambda: self._exchange(store))
        if has_returned and error is None:
            return
        self._is_settled = True
        if error is not None and self._has_said:  # it was there: the process that holds it has ended
            logger.info("the store of the process group is gone, what the other ranks said of their loaders stays unknown: %s", error)
            return
        if error is None:
            _silent.append(store)
        why = f"did not answer within {PATIENCE:g} s" if error is None else f"failed: {error}"
        warn(f"the store of the process group {why}; that all ranks build the same loader has not been checked")

    def _exchange(self, store: Any) -> None:
        key = self._key
        if self._has_said:
            heard = store.add(f"{key}/heard", 0)
        else:
            store.set(f"{key}/{self._rank}", self._facts)
            first = store.compare_set(f"{key}/first", "", self._facts).decode()
            if first and first != self._facts:
                store.set(f"{key}/objection", str(self._rank))
            heard = store.add(f"{key}/heard", 1)  # after the objection: who has heard all has heard that too
            self._has_said = True
        if store.check([f"{key}/objection"]):
            names = {rank: f"{key}/{rank}" for rank in range(self._size)}
            self._complaint = _describe({r: json.loads(store.get(name)) for r, name in names.items() if store.check([name])}, self._size)
        self._is_settled = not self._complaint and heard >= self._size


def _call_site() -> str:
    """Where in the program a loader is built: the same on all machines, whatever folder the program lies in."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        lines.append(f"{os.path.basename(code.co_filename)}:{code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _store(rank: int, world_size: int) -> Any:
    """The store of the process group; None without one, or where its ranks are others than the loader's."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        return None
    return default_store(dist)


def _within(seconds: float, ask: Callable[[], None]) -> tuple[bool, Exception | None]:
    """Calls a function that may block for ever; gives whether it returned in time, and what it raised."""
    done: list[Exception | None] = []

    def run() -> None:
        try:
            ask()
        except Exception as error:  # of torch, of a store of the user's
            done.append(error)
        else:
            done.append(None)

    thread = threading.Thread(target=run, name="headrace-agreement", daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(done), done[0] if done else None


def _describe(facts_of: dict[int, dict[str, str]], world_size: int) -> str:
    differing = []
    for name in dict.fromkeys(name for facts in facts_of.values() for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in facts_of.items():
            ranks.setdefault(facts.get(name, "not there"), []).append(rank)
        if len(ranks) > 1:
            differing.append(f"{name} is " + ", ".join(f"{value} on {_listed(where)}" for value, where in ranks.items()))
    heard = "" if len(facts_of) == world_size else f" (of {world_size} ranks {len(facts_of)} have been heard so far)"
    return (
        f"the ranks build different loaders: {'; '.join(differing)}{heard}. Their shares don't belong together: samples would be lost and "
        "doubled. Use the same data and options on every rank; where they differ on purpose (data that is shared out already: rank=0, "
        "world_size=1), pass rank= and world_size="
    )


def _listed(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {first}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
