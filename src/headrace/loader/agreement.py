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
  nothing yet, and looks again: when an epoch begins, and at its 2nd, 6th, 14th, ... batch. A
  training that is synchronous can't get to its second batch before all ranks
  have built their loaders.
* "The same" loader of another rank is the one built at the same place of the program, by its whole
  call stack, and as often there. So a loader that one rank alone has is compared with nothing, and
  the others are not counted wrongly.
* Epochs are compared by their number on each rank: the first one with the first one, and so on. An
  epoch that a rank left after its first batch (to look at one) does not count: its next one is
  compared instead.
* A look is a few round trips of 0.1 ms, of a size that does not depend on the number of ranks. It
  is done in a thread, which is left behind if the store does not answer: its own calls have no time
  limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from headrace.errors import ConfigError, warn
from headrace.order import World

PATIENCE = 10.0
"""Seconds that the store is given to answer."""

_LOST = "Their shares don't belong together: samples would be lost and doubled"
_LOADERS = "the ranks build different loaders"
_EPOCHS = "the ranks begin different epochs"
_REMEDIES = {
    _LOADERS: (
        "Use the same data and options on every rank; where they differ on purpose (data that is "
        "shared out already: rank=0, world_size=1), pass rank= and world_size="
    ),
    _EPOCHS: (
        "Load the same checkpoint, pass set_epoch the same epoch, run the same code, and iterate "
        "equally often on every rank; for a loop of one rank alone make a loader of its own"
    ),
}
_built: Counter[str] = Counter()  # loaders of this process, by their place in the program
_silent: list[object] = []  # stores that did not answer, or failed: they are not asked again


class Agreement:
    """What the batches of all ranks together depend on, compared with the same loader of the other
    ranks.
    """

    def __init__(self, facts: Mapping[str, Any], world: World) -> None:
        self._world = world
        site = _call_site()
        self._key = f"headrace/{world.world_size}/{site}/{_built[site]}"
        _built[site] += 1
        # that of the loader, and of the current epoch
        self._questions = [_Question(_LOADERS, self._key, self._key, facts)]
        self._looks = 0
        self._epochs = 0  # that count
        self._batches = 0  # of the current one

    def begin(self, facts: Mapping[str, Any]) -> None:
        """An epoch begins: what it depends on is compared too.

        Raises:
            ConfigError: as `look`.
        """
        self._epochs += self._batches > 1
        self._batches = 0
        self._looks = 1
        key = f"{self._key}/epoch/{self._epochs}"
        self._questions[1:] = [_Question(_EPOCHS, key, f"{self._key}/epochs", facts)]
        self.look()

    def received(self) -> None:
        """The user gets a batch.

        Raises:
            ConfigError: as `look`.
        """
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
        self._looks += 1
        is_turn = self._looks & (self._looks - 1) == 0
        store = _store(self._world) if is_turn else None
        if store is None or any(store is other for other in _silent):
            return
        answers: list[str | Exception] = []

        def ask() -> None:
            try:
                for question in self._questions:
                    answers.append(question.exchange(store, self._world))
            except Exception as error:  # of torch, of a store of the user's
                answers.append(error)

        # the store may not answer: then the thread is left behind
        thread = threading.Thread(target=ask, name="headrace-agreement", daemon=True)
        thread.start()
        thread.join(PATIENCE)
        complaint = next((text for text in answers if isinstance(text, str) and text), None)
        if complaint is not None:
            raise ConfigError(complaint)
        failures = [error for error in answers if isinstance(error, Exception)]
        if not failures and not thread.is_alive():
            return
        _silent.append(store)
        # one that was there is gone with the process that held it, which has ended
        if not failures or not self._questions[0].has_said:
            why = f"failed: {failures[0]}" if failures else f"did not answer within {PATIENCE:g} s"
            warn(
                f"the store of the process group {why}; that all ranks build the same loader "
                "has not been checked"
            )


class _Question:
    """Some facts of a loader, asked of all ranks.

    Args:
        subject: how the error begins.
        key: where the ranks meet.
        told: where each rank leaves its facts, the last ones in place of those before.
        facts: what must be equal.
    """

    def __init__(self, subject: str, key: str, told: str, facts: Mapping[str, Any]) -> None:
        self.has_said: bool = False
        self._subject = subject
        self._key = key
        self._told = told
        self._facts = json.dumps({name: repr(value) for name, value in facts.items()})

    def exchange(self, store: Any, world: World) -> str:
        """Says the facts, where that is not done, and gives what is to be said of other ranks."""
        objection = f"{self._key}/objection"
        if not self.has_said:
            store.set(f"{self._told}/{world.rank}", json.dumps([self._key, self._facts]))
            first = store.compare_set(f"{self._key}/first", "", self._facts).decode()
            if first and first != self._facts:
                store.set(objection, str(world.rank))
            self.has_said = True
        if store.check([objection]):
            return self._describe(store, world.world_size)
        return ""

    def _describe(self, store: Any, size: int) -> str:
        ranks_of: dict[str, dict[str, list[int]]] = {}  # name -> value -> ranks
        for rank in range(size):
            told = f"{self._told}/{rank}"
            key, facts = json.loads(store.get(told)) if store.check([told]) else ("", "")
            if key == self._key:
                for name, value in json.loads(facts).items():
                    ranks_of.setdefault(name, {}).setdefault(value, []).append(rank)
        differing = []
        for name, values in ranks_of.items():
            if len(values) > 1:
                each = ", ".join(f"{value} on {_listed(ranks)}" for value, ranks in values.items())
                differing.append(f"{name} is {each}")
        text = "; ".join(differing) or "those that differed go on with another epoch already"
        return f"{self._subject}: {text}. {_LOST}. {_REMEDIES[self._subject]}"


def _call_site() -> str:
    """Where in the program a loader is built: a key, the same on all machines, whatever folder
    the program lies in.
    """
    frames = traceback.walk_stack(None)
    lines = [f"{os.path.basename(f.f_code.co_filename)}:{line}" for f, line in frames]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _store(world: World) -> Any:
    """The store of the process group; None without one, or where its ranks are others than the
    loader's.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.world_size):
        return None
    find = getattr(dist.distributed_c10d, "_get_default_store", None)  # private to torch
    return None if find is None else find()


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}" if len(ranks) <= 8 else f"ranks {shown} and {len(ranks) - 8} more"
