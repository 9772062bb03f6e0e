"""Checks that all ranks build the same loader, and begin the same epochs at the same position.

Where seed, data or options differ, each rank takes its share of another order: samples are lost and
doubled, or a rank has a batch more than the others and waits for them for ever. So it is where one
rank alone resumes, or names another epoch. Nothing else would say so.

NOTE [ agreement of ranks ]

* Only where torch.distributed is up and says what rank and world size are: with `rank=` and
  `world_size=` given, the ranks may be those of a group, or of data that is shared out already.
  Only for headrace's own orders: a sampler of the user's is his.
* No collective: it would hang where one rank alone builds a loader (to validate on rank 0). Each
  rank leaves what its loader depends on in the store of the process group, and looks whether
  another one has left something else. It never waits for a rank. So the first rank to come finds
  nothing yet, and looks again: when an epoch begins, and at its 2nd, 6th, 14th, ... batch, until
  all have been heard. A training that is synchronous can't get to its second batch before all ranks
  have built their loaders.
* "The same" loader of another rank is the one built at the same place of the program, by its whole
  call stack, and as often there. So a loader that one rank alone has is compared with nothing, and
  the others are not counted wrongly.
* Epochs are compared by their number on each rank: the first one with the first one, and so on. An
  epoch that a rank left after its first batch (to look at one) does not count: its next one is
  compared instead.
* Two ranks that each have a loader which the other lacks are warned of it, once both have received
  batches: most likely it is one loader, built at two places. One rank's loader alone is no reason.
* A look is a few round trips of 0.1 ms, of a size that does not depend on the number of ranks. It
  is done in a thread, which is left behind if the store does not answer: its own calls have no time
  limit.
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
_LINES = 3  # of the call stack that are shown
_LOST = "Their shares don't belong together: samples would be lost and doubled"
_SAME_LOADER = (
    "Use the same data and options on every rank; where they differ on purpose (data that is "
    "shared out already: rank=0, world_size=1), "
    "pass rank= and world_size="
)
_SAME_EPOCH = (
    "Load the same checkpoint, pass set_epoch the same epoch, run the same code, and iterate "
    "equally often on every rank; for a loop of "
    "one rank alone make a loader of its own"
)
_built: Counter[str] = Counter()  # loaders of this process, by their place in the program
_silent: list[object] = []  # the store that did not answer: it is not asked again


class Agreement:
    """What the batches of all ranks together depend on, compared with the same loader of the other
    ranks. Without facts nothing is.

    Attributes:
        is_asked: True if anything is compared.
    """

    def __init__(self, facts: Mapping[str, Any] | None, world: World) -> None:
        self._rank, self._size = world.rank, world.world_size
        self.is_asked: bool = facts is not None and self._size > 1
        self._looks = 0
        self._epochs = 0  # that count
        self._batches = 0  # of the current one
        self._warning = ""
        self._listed = 0  # the number of this loader among those that not all ranks have
        self._met = 0  # of these, how many are known
        if facts is not None and self.is_asked:
            site, self._line = _call_site()
            self._key = f"headrace/{self._size}/{site}/{_built[site]}"
            _built[site] += 1
            self._loader = _Question(
                self._key, self._key, facts, "the ranks build different loaders", _SAME_LOADER
            )
            self._epoch: _Question | None = None

    def begin(self, facts: Mapping[str, Any]) -> None:
        """An epoch begins: what it depends on is compared too.

        Raises:
            ConfigError: as `look`.
        """
        self._epochs += self._batches > 1
        self._looks, self._batches = 1, 0
        key = f"{self._key}/epoch/{self._epochs}"
        is_known = self._epoch is not None and self._epoch.key == key and self._epoch.has_said
        self._epoch = _Question(
            key,
            f"{self._key}/epochs",
            facts,
            "the ranks begin different epochs",
            _SAME_EPOCH,
            is_known,
        )
        self.look()

    def received(self) -> None:
        """The user gets a batch.

        Raises:
            ConfigError: as `look`.
        """
        if self.is_asked:
            self._batches += 1
            self.look()

    def ended(self) -> None:
        """The epoch has come to its end, however short."""
        self._batches = max(self._batches, 2)

    def look(self) -> None:
        """Compares with what the other ranks have said so far; asks the store at the 1st, 2nd, 4th,
        8th, ... call only.

        Raises:
            ConfigError: they differ; the message says in what, and on which ranks.
        """
        if not self.is_asked:
            return
        self._looks += 1
        if self._looks & (self._looks - 1) == 0 and not all(
            question.is_settled for question in self._questions()
        ):
            store = _store(self._rank, self._size)
            if store is not None:
                self._ask(store)
        for question in self._questions():
            if question.complaint:
                raise ConfigError(question.complaint)
        if self._warning:
            warning, self._warning = self._warning, ""
            warn(warning)

    def _questions(self) -> list[_Question]:
        return [self._loader] if self._epoch is None else [self._loader, self._epoch]

    def _ask(self, store: Any) -> None:
        """Asks a store that may be gone, or may not answer."""
        if any(store is other for other in _silent):
            self.is_asked = False
            return
        has_returned, error = _within(PATIENCE, lambda: self._exchange(store))
        if has_returned and error is None:
            return
        self.is_asked = False
        # it was there: the process that holds it has ended
        if error is not None and self._loader.has_said:
            logger.info(
                "the store of the process group is gone, what the other ranks said of their "
                "loaders stays unknown: %s",
                error,
            )
            return
        if error is None:
            _silent.append(store)
        why = f"did not answer within {PATIENCE:g} s" if error is None else f"failed: {error}"
        warn(
            f"the store of the process group {why}; that all ranks build the same loader has not "
            "been checked"
        )

    def _exchange(self, store: Any) -> None:
        for question in self._questions():
            if not (question.is_settled or question.complaint):
                question.exchange(store, self._rank, self._size)
        if self._batches and not self._loader.is_settled:
            self._meet(store)

    def _meet(self, store: Any) -> None:
        """Lists this loader among those that not all ranks have, and looks for one that this
        rank lacks on a rank that lacks this one.
        """
        alone = f"headrace/{self._size}/alone"
        if not self._listed:
            self._listed = store.add(alone, 1)
            store.set(f"{alone}/{self._listed}", json.dumps([self._rank, self._key, self._line]))
        while self._met < store.add(alone, 0) and store.check([f"{alone}/{self._met + 1}"]):
            self._met += 1
            rank, key, line = json.loads(store.get(f"{alone}/{self._met}"))
            if (
                rank != self._rank
                and not store.check([f"{key}/{self._rank}"])
                and not store.check([f"{self._key}/{rank}"])
            ):
                self._warning = (
                    f"rank {self._rank} reads from a loader made at {self._line}, which rank "
                    f"{rank} does not have, and rank {rank} from "
                    f"one made at {line}, which rank {self._rank} does not have. Loaders made at "
                    "different lines are not compared: make a "
                    "loader that the ranks share at the same line on each of them"
                )
                self._loader.is_settled = True
                return


class _Question:
    """Some facts of a loader, asked of all ranks.

    Args:
        key: where the ranks meet.
        told: where each rank leaves its facts, the last ones in place of those before.
        facts: what must be equal.
        subject, remedy: how the error begins and ends.
        has_said: True if this rank has been heard there before.
    """

    def __init__(
        self,
        key: str,
        told: str,
        facts: Mapping[str, Any],
        subject: str,
        remedy: str,
        has_said: bool = False,
    ) -> None:
        self.key, self._told, self._subject, self._remedy = key, told, subject, remedy
        self._facts = json.dumps({name: repr(value) for name, value in facts.items()})
        self.has_said: bool = has_said
        self._has_compared = False
        self.is_settled: bool = False
        self.complaint: str = ""

    def exchange(self, store: Any, rank: int, size: int) -> None:
        """Says the facts, where that is not done, and looks for those of other ranks."""
        if not self._has_compared:
            store.set(f"{self._told}/{rank}", json.dumps([self.key, self._facts]))
            first = store.compare_set(f"{self.key}/first", "", self._facts).decode()
            if first and first != self._facts:
                store.set(f"{self.key}/objection", str(rank))
            self._has_compared = True
        # after the objection: who has heard all has heard that too
        heard = store.add(f"{self.key}/heard", int(not self.has_said))
        self.has_said = True
        if store.check([f"{self.key}/objection"]):
            self.complaint = self._describe(self._all_facts(store, size), size)
        self.is_settled = not self.complaint and heard >= size

    def _all_facts(self, store: Any, size: int) -> dict[int, dict[str, str]]:
        """What has been said so far, by rank."""
        facts_of = {}
        for rank in range(size):
            name = f"{self._told}/{rank}"
            if store.check([name]):
                key, facts = json.loads(store.get(name))
                if key == self.key:
                    facts_of[rank] = json.loads(facts)
        return facts_of

    def _describe(self, facts_of: dict[int, dict[str, str]], world_size: int) -> str:
        differing = []
        for name in dict.fromkeys(name for facts in facts_of.values() for name in facts):
            ranks: dict[str, list[int]] = {}
            for rank, facts in facts_of.items():
                ranks.setdefault(facts.get(name, "not there"), []).append(rank)
            if len(ranks) > 1:
                differing.append(
                    f"{name} is "
                    + ", ".join(f"{value} on {_listed(where)}" for value, where in ranks.items())
                )
        heard = (
            ""
            if len(facts_of) == world_size
            else f" (of {world_size} ranks {len(facts_of)} have been heard so far)"
        )
        text = "; ".join(differing) or "those that differed go on with another epoch already"
        return f"{self._subject}: {text}{heard}. {_LOST}. {self._remedy}"


def _call_site() -> tuple[str, str]:
    """Where in the program a loader is built: a key, the same on all machines, whatever folder
    the program lies in; and its last lines.
    """
    lines, own = [], []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = os.path.basename(code.co_filename)
        lines.append(f"{name}:{code.co_qualname}:{frame.f_lineno}")
        if not frame.f_globals.get("__name__", "").startswith("headrace."):
            own.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return hashlib.blake2b(
        "\n".join(lines).encode(), digest_size=16
    ).hexdigest(), ", called at ".join(own[:_LINES])


def _store(rank: int, world_size: int) -> Any:
    """The store of the process group; None without one, or where its ranks are others than the
    loader's.
    """
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or (
        dist.get_rank(),
        dist.get_world_size(),
    ) != (rank, world_size):
        return None
    return default_store(dist)


def _within(seconds: float, ask: Callable[[], None]) -> tuple[bool, Exception | None]:
    """Calls a function that may block for ever; gives whether it returned in time, and what it
    raised.
    """
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


def _listed(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {first}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
