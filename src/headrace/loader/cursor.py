"""The epoch that is next, and where the user stands in it.

NOTE [ epochs and positions ]

* `set_epoch(e)` names the epoch of the next iterator; without it each iterator takes the epoch after the last one's.
* The position is the number of batches of the current epoch that the user has received. `state_dict()` holds both; between
  `set_epoch` and the next iterator, the named epoch and 0.
* After `load_state_dict` the next iterator goes on at the position. `set_epoch` with the loaded epoch keeps it (also at the
  epoch's end: nothing is left then), with another epoch drops it. A state saved at the end of an epoch, without `set_epoch`, goes on
  with the next epoch.
* An iterator that is left early leaves its position in `state_dict()`; the next iterator begins the next epoch.
* An epoch is at its end when the user has been told so (`StopIteration`). A state that was saved after the last batch and before that goes
  on with what is left, which is nothing: a loop over the rest of that epoch ends at once, as it would have. torchdata has it so too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar


class Position(NamedTuple):
    """The position of one loader."""

    epoch: int
    batches: int


P = TypeVar("P", bound=Any)  # a position, which has an epoch


class Cursor(Generic[P]):
    """The position of a loader, or of several that make one epoch; see NOTE [ epochs and positions ].

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
        self.next_epoch, self._is_named = int(epoch), True
        if self.loaded is not None and self.loaded.epoch != self.next_epoch:
            self.loaded = None

    def start(self) -> bool:
        """Moves to the position of an iterator that begins now. True if it goes on where a state was loaded."""
        loaded, self.loaded = self.loaded, None
        goes_on = loaded is not None and loaded.epoch == self.next_epoch
        self.at = loaded if loaded is not None and goes_on else self._begin(self.next_epoch)
        self.next_epoch, self._is_named = self.at.epoch + 1, False
        return goes_on

    def load(self, position: P, has_ended: bool) -> None:
        """Goes on at a saved position; with the next epoch where that one has ended."""
        self.loaded = self.at = position
        self.next_epoch, self._is_named = position.epoch + has_ended, False

    @property
    def is_at_next(self) -> bool:
        """True if the state is that of the next epoch, which was named, and no longer that of the last one."""
        return self.loaded is None and self._is_named and (self.next_epoch != self.at.epoch or self.running is None)

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
