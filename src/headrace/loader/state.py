"""The position of a loader, and its saved state: the parameters of the order, and the number of
global batches that the user received.

NOTE [ epochs and positions ]

* `set_epoch(e)` sets the epoch of the next iterator. Without it, each iterator uses the epoch after
  the last one.
* The position is the number of batches of the current epoch that the user received. `state_dict()`
  contains both. Between `set_epoch` and the next iterator it contains the new epoch and 0.
* After `load_state_dict` the next iterator continues at the position. `set_epoch` with the loaded
  epoch keeps the position (also at the end of the epoch: nothing is left then); with another epoch
  it drops the position. A state saved at the end of an epoch, without `set_epoch`, continues with
  the next epoch.
* If an iterator can't be made, the next attempt begins at the same position.
* An iterator that is abandoned leaves its position in `state_dict()`. The next iterator starts the
  next epoch.
* An epoch ends when the user has received `StopIteration`. A state saved after the last batch but
  before that continues with what is left, which is nothing: a loop over the rest of the epoch ends
  at once. torchdata behaves the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.arguments import check_integer
from headrace.errors import StateError, warn

VERSION = 1
_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("version", "epoch", "batches", "seed", "global_batch", "skipped"), (int,)),
    **dict.fromkeys(("length", "samples", "interleave", "turns", "num_samples"), (int, _NONE)),
    **dict.fromkeys(("weights", "classes", "lengths"), (str, _NONE)),
    **{
        "fingerprint": (str,),
        "shuffle": (bool, str),
        "replacement": (bool, _NONE),
        "skipped_samples": (list,),
        "ended": (bool,),
    },
}
_WHERE_MISSING = {"skipped": 0, "skipped_samples": [], "ended": False}
# orders that a state can't make another loader take over
_OWN = ("sampler", "batch_sampler", "iterable", "weights", "balanced")
_SHUFFLES = (False, True, "block", *_OWN)
_FIXED = ("num_samples", "weights", "classes", "replacement", "lengths")
_LEAST = {
    "version": 1,
    "epoch": 0,
    "batches": 0,
    "skipped": 0,
    "length": 0,
    "samples": 0,
    "global_batch": 1,
    "interleave": 1,
    "turns": 1,
}
_COMPARED = ("shuffle", "seed", "interleave", "turns", "workers")


class Position(NamedTuple):
    """The position of one loader."""

    epoch: int
    batches: int


P = TypeVar("P", bound=Any)  # a position, which has an epoch


class Cursor(Generic[P]):
    """The position of a loader, or of several that make one epoch; see NOTE [ epochs and positions
    ].

    Args:
        begin: makes the position at the beginning of an epoch.

    Attributes:
        at: the position of the current iterator, or of the last one.
        next_epoch: the epoch of the next iterator.
        loaded: the position that the next iterator goes on at, if a state was loaded.
    """

    def __init__(self, begin: Callable[[int], P]) -> None:
        self._begin = begin
        self.at: P = begin(0)
        self.next_epoch: int = 0
        self.loaded: P | None = None
        self._is_named = False
        self._running: weakref.ref[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch of the next iterator."""
        self.next_epoch, self._is_named = check_integer("epoch", epoch), True
        if self.loaded is not None and self.loaded.epoch != self.next_epoch:
            self.loaded = None

    def start(self) -> bool:
        """Moves to the position of an iterator that begins now. True if it goes on where a state
        was loaded.
        """
        loaded, self.loaded = self.loaded, None
        goes_on = loaded is not None and loaded.epoch == self.next_epoch
        self.at = loaded if loaded is not None and goes_on else self._begin(self.next_epoch)
        self.next_epoch, self._is_named = self.at.epoch + 1, False
        return goes_on

    @contextmanager
    def starting(self) -> Iterator[bool]:
        """`start`, which is undone where the iterator can't be made: the next attempt begins at
        the same position.
        """
        before = self.loaded, self.at, self.next_epoch, self._is_named
        try:
            yield self.start()
        except BaseException:
            self.loaded, self.at, self.next_epoch, self._is_named = before
            raise

    def load(self, position: P, has_ended: bool) -> None:
        """Goes on at a saved position; with the next epoch where that one has ended."""
        self.loaded = self.at = position
        self.next_epoch, self._is_named = position.epoch + has_ended, False

    @property
    def is_at_next(self) -> bool:
        """True if the state is that of the next epoch, which was named, and no longer that of
        the last one.
        """
        return (
            self.loaded is None
            and self._is_named
            and (self.next_epoch != self.at.epoch or self.running is None)
        )

    @property
    def position(self) -> P:
        """The position that a state saved now holds."""
        if self.loaded is not None:
            return self.loaded
        return self._begin(self.next_epoch) if self.is_at_next else self.at

    @property
    def running(self) -> Any:
        """The iterator that is under way; None without one."""
        running = None if self._running is None else self._running()
        return None if running is None or running.is_done else running

    @running.setter
    def running(self, iterator: Any) -> None:
        self._running = None if iterator is None else weakref.ref(iterator)


def check_data(state: Any, fingerprint: str, length: int | None, strict: bool) -> None:
    """Checks that this is a state, and of this dataset.

    Raises:
        StateError: no state; of a later version, or of other data. The message holds both
            fingerprints.
    """
    _check_form(state)
    if state["fingerprint"] != fingerprint:
        message = (
            "load_state_dict: the state is of another dataset: its fingerprint is "
            f"{state['fingerprint']} ({state['length']} samples), "
            f"this dataset's {fingerprint} ({length} samples)"
        )
        if strict or state["length"] != length:
            raise StateError(f"{message}. Were files added, removed or renamed?")
        warn(f"{message}; strict=False: continuing anyway")
    elif state["length"] != length:
        raise StateError(
            f"load_state_dict: the state is of {state['length']} samples, this dataset has "
            f"{length}: samples were added or removed, or the "
            "state is damaged"
        )


def _check_form(state: Any) -> None:
    if not isinstance(state, dict) or "version" not in state or "batches" not in state:
        raise StateError(
            "load_state_dict: this is no state of a headrace loader: pass what "
            "loader.state_dict() returned"
        )
    version = state["version"]
    if type(version) is int and version > VERSION:
        raise StateError(
            f"load_state_dict: the state has version {version}, this headrace knows {VERSION}: "
            "upgrade it"
        )
    for name, types in _TYPES.items():
        value = state.get(name, _WHERE_MISSING.get(name))
        is_too_small = name in _LEAST and type(value) is int and value < _LEAST[name]
        if (
            type(value) not in types
            or is_too_small
            or (name == "shuffle" and value not in _SHUFFLES)
        ):
            raise StateError(f"load_state_dict: the state is damaged: its {name} is {value!r}")
    for entry in state.get("skipped_samples", []):
        if not (isinstance(entry, dict) and {"index", "path", "error"} <= entry.keys()):
            raise StateError(
                f"load_state_dict: the state is damaged: its skipped_samples have {entry!r:.80}"
            )


def check_order(
    state: dict[str, Any], parameters: dict[str, Any], world_size: int, strict: bool
) -> dict[str, Any]:
    """The parameters of its order that a loader must take over from a state ({} where they are the
    same).

    Raises:
        StateError: it is of another order. The message holds both values.
    """
    differing = {
        k: state.get(k) for k in parameters if k in _COMPARED and state.get(k) != parameters[k]
    }
    message = ", ".join(f"{k} was {v!r}, is {parameters[k]!r}" for k, v in differing.items())
    kinds = {state["shuffle"], parameters["shuffle"]}
    if "workers" in differing or (len(kinds) > 1 and not kinds.isdisjoint(_OWN)):
        raise StateError(
            f"load_state_dict: the state is of another order: {message}. Build the loader as it was"
        )
    if others := [k for k in _FIXED if state.get(k) != parameters.get(k)]:
        had = ", ".join(f"{k} was {state.get(k)!r}, is {parameters.get(k)!r}" for k in others)
        raise StateError(
            f"load_state_dict: the state is of another order: {had}. Build the loader as it was"
        )
    if state.get("global_batch") != parameters["global_batch"]:
        saved = state.get("global_batch")
        if isinstance(saved, int) and saved % world_size == 0:
            remedy = f"use batch_size={saved // world_size}"
        else:
            remedy = f"use a world size that divides {saved}"
        raise StateError(
            f"load_state_dict: the state was saved with a global batch of {saved}, this loader "
            f"has {parameters['global_batch']} "
            f"(batch_size x world_size): {remedy}"
        )
    if state.get("shuffle") == parameters["shuffle"] and state.get("blocks") != parameters.get(
        "blocks"
    ):
        raise StateError(
            "load_state_dict: the samples are stored in other blocks than when the state was "
            "saved (the same data in another layout?), "
            "and shuffle='block' depends on them: use the former layout, or start the epoch again"
        )
    if differing and strict:
        raise StateError(
            f"load_state_dict: the state is of another order: {message}. Build the loader as it "
            "was, or pass strict=False to adopt "
            "the saved order"
        )
    return differing


def check_samples(state: dict[str, Any], samples: int | None) -> None:
    """Compares the samples that lie before the position, where the last batches of an epoch depend
    on the number of ranks.

    Raises:
        StateError: this loader would lose or repeat samples.
    """
    if state.get("samples") != samples:
        raise StateError(
            f"load_state_dict: {state.get('samples')} samples of the epoch were received when the "
            "state was saved, this loader would go "
            f"on after {samples}: with pad=False the last batches of an epoch depend on the "
            "number of ranks; resume with the saved one"
        )
