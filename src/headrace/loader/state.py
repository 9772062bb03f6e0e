"""Epochs and positions of a loader, and the checks of a saved state.

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
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.arguments import check_integer
from headrace.errors import StateError, warn

VERSION = 1
_NONE = type(None)
# orders that a state can't make another loader take over
_OWN = ("sampler", "batch_sampler", "iterable", "weights", "balanced")
_SHUFFLES = (False, True, "block", *_OWN)
_ADOPTED = ("shuffle", "seed", "interleave", "turns")
_FIXED = ("workers", "num_samples", "weights", "classes", "replacement", "lengths")
# integers of a state, and the least that each may be; the second ones may be None
_INTEGERS = {"version": 1, "epoch": 0, "batches": 0, "global_batch": 1}
_OPTIONAL = {"length": 0, "samples": 0, "skipped": 0, "interleave": 1, "turns": 1}
_OTHERS: dict[str, tuple[type, ...]] = {
    "fingerprint": (str,),
    "seed": (int,),
    "shuffle": (bool, str),
    "skipped_samples": (list, _NONE),
    "ended": (bool, _NONE),
}


class Position(NamedTuple):
    """The position of one loader."""

    epoch: int
    batches: int


P = TypeVar("P", bound=Any)  # a position, which has an epoch


class LoaderState(Generic[P]):
    """The position of a loader, or of several that make one epoch; see NOTE [ epochs and positions
    ].

    Args:
        begin: makes the position at the beginning of an epoch.

    Attributes:
        at: the position of the current iterator, or of the last one.
        next_epoch: the epoch of the next iterator.
        loaded: the position that the next iterator goes on at, if a state was loaded.
        end: where an epoch has ended.
    """

    def __init__(self, begin: Callable[[int], P]) -> None:
        self._begin = begin
        self.at: P = begin(0)
        self.next_epoch: int = 0
        self.loaded: P | None = None
        self.end: P | None = None
        self._is_named = False
        self._running: weakref.ref[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch of the next iterator."""
        self.next_epoch = check_integer("epoch", epoch)
        self._is_named = True
        if self.loaded is not None and self.loaded.epoch != self.next_epoch:
            self.loaded = None

    @property
    def goes_on(self) -> bool:
        """True if the next iterator goes on where a state was loaded."""
        return self.loaded is not None and self.loaded.epoch == self.next_epoch

    def start(self) -> P:
        """Moves to the position of an iterator that begins now, which it returns."""
        loaded = self.loaded if self.goes_on else None
        self.at = self._begin(self.next_epoch) if loaded is None else loaded
        self.loaded = None
        self.next_epoch = self.at.epoch + 1
        self._is_named = False
        return self.at

    def load(self, position: P, has_ended: bool) -> None:
        """Goes on at a saved position; with the next epoch where that one has ended."""
        self.loaded = self.at = position
        self.end = position if has_ended else None
        self.next_epoch = position.epoch + has_ended
        self._is_named = False

    @property
    def is_at_next(self) -> bool:
        """True if the state is that of the next epoch, which was named, and no longer that of
        the last one.
        """
        if self.loaded is not None or not self._is_named:
            return False
        return self.next_epoch != self.at.epoch or self.running is None

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
    check_version(state, VERSION, "batches", "a headrace loader")
    damaged = [name for name, types in _OTHERS.items() if type(state.get(name)) not in types]
    for name, least in (*_INTEGERS.items(), *_OPTIONAL.items()):
        value = state.get(name)
        if value is None and name in _OPTIONAL:
            continue
        if type(value) is not int or value < least:
            damaged.append(name)
    if not damaged and state["shuffle"] not in _SHUFFLES:
        damaged.append("shuffle")
    if damaged:
        name = damaged[0]
        raise StateError(
            f"load_state_dict: the state is damaged: its {name} is {state.get(name)!r}"
        )
    for entry in state.get("skipped_samples") or []:
        if not (isinstance(entry, dict) and {"index", "path", "error"} <= entry.keys()):
            raise StateError(
                f"load_state_dict: the state is damaged: its skipped_samples have {entry!r:.80}"
            )
    if state["fingerprint"] == fingerprint and state["length"] == length:
        return
    message = (
        "load_state_dict: the state is of another dataset: its fingerprint is "
        f"{state['fingerprint']} ({state['length']} samples), this dataset's {fingerprint} "
        f"({length} samples)"
    )
    if strict or state["length"] != length:
        raise StateError(f"{message}. Were files added, removed or renamed?")
    warn(f"{message}; strict=False: continuing anyway")


def check_version(state: Any, known: int, name: str, door: str) -> None:
    """Raises a StateError for what is no state, or of a version that is not known; each has an
    entry of this name.
    """
    if not isinstance(state, dict) or "version" not in state or name not in state:
        raise StateError(
            f"load_state_dict: this is no state of {door}: pass what its state_dict() returned"
        )
    version = state["version"]
    if type(version) is not int or version < 1:
        raise StateError(f"load_state_dict: the state is damaged: its version is {version!r}")
    if version > known:
        raise StateError(
            f"load_state_dict: the state has version {version}, this headrace knows {known}: "
            "upgrade it"
        )


def check_order(
    state: dict[str, Any], own: dict[str, Any], world_size: int, strict: bool
) -> dict[str, Any]:
    """The parameters of its order that a loader must take over from a state ({} where they are the
    same).

    Raises:
        StateError: it is of another order. The message holds both values.
    """
    compared = [*_FIXED, *(name for name in _ADOPTED if name in own)]
    differing = [name for name in compared if state.get(name) != own.get(name)]
    text = ", ".join(f"{name} was {state.get(name)!r}, is {own.get(name)!r}" for name in differing)
    is_other = "shuffle" in differing and not {state["shuffle"], own["shuffle"]}.isdisjoint(_OWN)
    if is_other or not set(_FIXED).isdisjoint(differing):
        raise StateError(
            f"load_state_dict: the state is of another order: {text}. Build the loader as it was"
        )
    saved = state["global_batch"]
    if saved != own["global_batch"]:
        remedy = f"use batch_size={saved // world_size}"
        if saved % world_size:
            remedy = f"use a world size that divides {saved}"
        raise StateError(
            f"load_state_dict: the state was saved with a global batch of {saved}, this loader "
            f"has {own['global_batch']} (batch_size x world_size): {remedy}"
        )
    if "shuffle" not in differing and state.get("blocks") != own.get("blocks"):
        raise StateError(
            "load_state_dict: the samples are stored in other blocks than when the state was "
            "saved (the same data in another layout?), and shuffle='block' depends on them: use "
            "the former layout, or start the epoch again"
        )
    if differing and strict:
        raise StateError(
            f"load_state_dict: the state is of another order: {text}. Build the loader as it "
            "was, or pass strict=False to adopt the saved order"
        )
    return {name: state.get(name) for name in differing}


def check_samples(state: dict[str, Any], samples: int | None) -> None:
    """Compares the samples that lie before the position, where the last batches of an epoch depend
    on the number of ranks.

    Raises:
        StateError: this loader would lose or repeat samples.
    """
    if state.get("samples") != samples:
        raise StateError(
            f"load_state_dict: {state.get('samples')} samples of the epoch were received when the "
            f"state was saved, this loader would go on after {samples}: with pad=False the last "
            "batches of an epoch depend on the number of ranks; resume with the saved one"
        )
