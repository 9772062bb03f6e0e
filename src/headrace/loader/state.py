"""Saved states: checks of a loader's, and the states of the user's datasets and iterators.

NOTE [ states of datasets ]

* A dataset with `state_dict` and `load_state_dict`, and an iterator of an iterable dataset with
  both, is asked for its state right after each batch, in the process that made the batch. The state
  is pickled at once, so that it can't change, and travels with the batch. So a loader's state
  belongs to the batches that the user received, however far workers have prefetched. Objects
  without these methods are not asked, and cost nothing.
* Before the first batch nothing has been asked yet. Without workers the dataset of this process is
  asked then: one that is its own iterator may be at its end when the state is loaded.
* On resume, each worker gets its own state back with its first request: the dataset first, then its
  iterator is created, then the iterator gets its state. The first batch is made by the worker whose
  turn it was. Workers before it get an idle request, which makes no batch.
* A new epoch has a new iterator, which starts at the beginning. If the previous epoch was
  abandoned, the state of its iterator is not restored, nor that of an iterable dataset whose
  iterator has no state (it must then contain the position). Other states of datasets are restored,
  except if workers live for one epoch only: then each epoch starts with the dataset as it is in the
  main process.
* When an iterator ends, the dataset is asked once more ("at_end"), since it may count epochs. It
  gets this state back before the next epoch's iterator is created. If that iterator is at its end
  at once, the state contained the position, and the next one is used.
* The random numbers of such an iterator depend on (seed, epoch, step), not on what was drawn
  before.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

from headrace.errors import StateError, warn
from headrace.order import BatchRequest
from headrace.order.ranks import are_counts, differences

VERSION = 1
# parameters of an order
_ORDER = ["shuffle", "seed", "interleave", "turns", "blocks", "workers"]
_ORDER += ["num_samples", "weights", "classes", "replacement", "lengths"]


def check_state(
    state: Any,
    fingerprint: str,
    length: int | None,
    order: dict[str, Any],
    world_size: int,
    strict: bool,
) -> None:
    """Checks that this is a state, of this dataset and of this order.

    Raises:
        StateError: it does not fit. The message holds both values.
    """
    check_version(state, "batches", "a headrace loader")
    numbers = [state.get(name) for name in ("epoch", "batches", "global_batch")]
    skipped = state.get("skipped_samples") or []
    is_sound = (
        are_counts([*numbers, state.get("skipped", 0)])
        and isinstance(state.get("fingerprint"), str)
        and state.get("ended") in (None, True, False)
        and isinstance(skipped, list)
        and all(isinstance(entry, dict) for entry in skipped)
        and all({"index", "path", "error"} <= entry.keys() for entry in skipped)
    )
    if not is_sound:
        raise StateError("load_state_dict: the state is damaged: it is not what state_dict() gave")
    if state["fingerprint"] != fingerprint or state.get("length") != length:
        message = (
            "load_state_dict: the state is of another dataset: its fingerprint is "
            f"{state['fingerprint']} ({state.get('length')} samples), this dataset's {fingerprint} "
            f"({length} samples)"
        )
        if strict or state.get("length") != length:
            raise StateError(
                f"{message}. Use the same files (none added, removed or renamed) and dataset "
                "options, such as max_length"
            )
        warn(f"{message}; strict=False: continuing anyway")
    differing = differences(state, {name: order.get(name) for name in _ORDER})
    if differing:
        raise StateError(
            f"load_state_dict: the state is of another order: {differing}. Build the loader as it "
            "was (blocks: over the same data in the same layout), or start the epoch again"
        )
    saved = state["global_batch"]
    if saved != order["global_batch"]:
        remedy = f"use batch_size={saved // world_size}"
        if saved % world_size:
            remedy = f"use a world size that divides {saved}"
        raise StateError(
            f"load_state_dict: the state was saved with a global batch of {saved}, this loader "
            f"has {order['global_batch']} (batch_size x world_size): {remedy}"
        )


def check_version(state: Any, name: str, door: str) -> None:
    """Raises a StateError for what is no state, or of a version that is not known; each has an
    entry of this name.
    """
    if not isinstance(state, dict) or "version" not in state or name not in state:
        raise StateError(
            f"load_state_dict: this is not a state of {door}: pass what its state_dict() returned"
        )
    version = state["version"]
    if type(version) is not int or version != VERSION:
        raise StateError(
            f"load_state_dict: the state has version {version!r}, this headrace knows {VERSION}: "
            "upgrade it, or pass what its state_dict() returned"
        )


def is_stateful(part: Any) -> bool:
    """True if it has a state of its own, as torchdata's StatefulDataLoader understands it."""
    load = getattr(part, "load_state_dict", None)
    return callable(load) and callable(getattr(part, "state_dict", None))


def asked(dataset: Any, iterator: Any = None, at_end: bool = False) -> bytes | str | None:
    """Returns the states of a dataset and of its iterator, pickled; an error as text; None if
    neither has a state.

    An error is not raised: who never asks the loader for its state has nothing to do with it. At
    the end of an iterator its own state is of no use any more.
    """
    try:
        parts: dict[str, Any] = {}
        if iterator is not dataset and is_stateful(dataset):
            parts["dataset"] = dataset.state_dict()
        if is_stateful(iterator) and (iterator is dataset or not at_end):
            parts["iterator"] = iterator.state_dict()
        if not parts:
            return None
        if at_end:
            parts["at_end"] = True
        return pickle.dumps(parts)
    except Exception as error:
        return (
            f"the state of {type(dataset).__name__} can't be saved: {type(error).__name__}: {error}"
        )


def iterator_of(dataset: Any, parts: dict[str, Any]) -> Iterator[Any]:
    """Returns a new iterator at the position of these parts, which `asked` pickled; one of the next
    epoch if they are of an iterator's end.
    """
    at_end = "at_end" in parts
    # One that is its own iterator may keep its state when its iterator is made, until the next one
    # is, or begin anew there.
    is_own = "dataset" not in parts and "iterator" in parts and (at_end or is_stateful(dataset))
    if is_own:
        try:
            load_state(dataset, parts["iterator"], dataset)
        except StateError:
            raise
        except Exception:  # it may make in `iter` what it loads its state into, as torchdata allows
            iter(dataset)
            load_state(dataset, parts["iterator"], dataset)
            if not at_end:
                return dataset  # type: ignore[no-any-return]
    elif "dataset" in parts:
        load_state(dataset, parts["dataset"], dataset)
    iterator: Iterator[Any] = iter(dataset)
    if "iterator" not in parts or at_end:
        return iterator
    if not (is_own and pickle.dumps(dataset.state_dict()) == pickle.dumps(parts["iterator"])):
        load_state(iterator, parts["iterator"], dataset)
    return iterator


def load_state(part: Any, state: Any, dataset: Any) -> None:
    """Loads the state of a dataset, or of its iterator."""
    if not is_stateful(part):
        what = "" if part is dataset else "the iterator of "
        raise StateError(
            f"load_state_dict: the state includes that of {what}{type(dataset).__name__}, which "
            "has no load_state_dict now: build the dataset as it was"
        )
    part.load_state_dict(state)


class States:
    """The states of each worker's dataset and iterator that were reported last, within an epoch.

    Args:
        workers, world_size, rank: of the job; a state fits no other one.
        is_stream: True for a foreign iterable dataset.

    Attributes:
        step: requests of a stream that have come back, with a batch or without.
    """

    def __init__(self, workers: int, world_size: int, rank: int, is_stream: bool) -> None:
        self._workers = max(1, workers)
        self._job = {"workers": self._workers, "world_size": world_size, "rank": rank}
        self._is_stream = is_stream
        self._reported: list[bytes | str | None] = [None] * self._workers
        self._ended = [False] * self._workers
        self._turn = 0
        self.step: int = 0
        self._pending: set[int] = set()  # workers that have not got back what they reported

    def __bool__(self) -> bool:
        """True if any worker has reported a state."""
        return any(state is not None for state in self._reported)

    def _begun(self, workers: int) -> States:
        """Returns empty states for the same rank and dataset."""
        return States(workers, self._job["world_size"], self._job["rank"], self._is_stream)

    def note(self, report: dict[str, Any]) -> None:
        """Notes the report of a batch that the user receives, or of a worker that has ended."""
        worker = report["worker"]
        self._turn = (worker + 1) % self._workers
        self._ended[worker] = bool(report.get("is_through"))
        if self._is_stream:
            self.step = report["step"] + 1
        state = report.get("state")
        if state is not None:
            self._reported[worker] = state

    def of_next_epoch(self, workers: int, lives_on: bool) -> States:
        """Returns the states that another epoch begins with; `lives_on`: True if workers outlive
        an epoch.
        """
        other = self._begun(workers)
        if lives_on and other._workers == self._workers:
            for worker, state in enumerate(self._reported):
                if isinstance(state, bytes) and self._is_stream:
                    parts = pickle.loads(state)
                    if "at_end" not in parts:  # without the position
                        dataset = {"dataset": parts.get("dataset"), "at_end": True}
                        state = pickle.dumps(dataset) if len(parts) > 1 else None
                other._reported[worker] = state
                if worker in self._pending and other._reported[worker] is not None:
                    other._pending.add(worker)
        return other

    def before_first_batch(self, dataset: Any) -> States:
        """Returns the state of a dataset in this process that has made no batch yet."""
        other = self._begun(self._workers)
        state = asked(dataset)
        # else it may make in `iter` what its state is of, and then begins anew by itself
        if isinstance(state, bytes):
            other._reported = [state]
        return other

    def to_new_processes(self) -> None:
        """Marks what has to be sent to new workers."""
        for worker, state in enumerate(self._reported):
            if state is not None or self._ended[worker]:
                self._pending.add(worker)

    def onto(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Yields the requests of an epoch; the first one of each worker carries its state."""
        first = next(requests, None) if self._pending else None
        if first is None:
            yield from requests
            return
        rest = itertools.chain([first], requests)
        idle = self._turn
        for worker in range(self._workers):
            request: BatchRequest | None
            if worker < idle:
                request = BatchRequest(first, first.seed, first.epoch, first.step, is_idle=True)
            else:
                request = next(rest, None)
            if request is None:
                return
            if worker in self._pending:
                self._pending.discard(worker)
                state = self._reported[worker]
                given = state if isinstance(state, bytes) else None
                if self._ended[worker]:
                    parts = {} if given is None else pickle.loads(given)
                    given = pickle.dumps({**(parts if "at_end" in parts else {}), "ended": True})
                request.given = given
            yield request
        yield from rest

    def as_dict(self) -> dict[str, Any]:
        """Returns the states as an entry of the loader's state.

        Raises:
            StateError: a `state_dict` of the user's has raised, or what it gave can't be pickled.
        """
        states: list[Any] = []
        for worker, state in enumerate(self._reported):
            if isinstance(state, str):
                raise StateError(
                    f"state_dict: {state} (asked in worker {worker} after its last batch that was "
                    "received)"
                )
            states.append(None if state is None else pickle.loads(state))
        turn = {"turn": self._turn, "step": self.step, "ended": list(self._ended)}
        return {**self._job, **turn, "states": states}

    def loaded(self, state: Any, strict: bool) -> States:
        """Returns the states of a saved entry; empty ones if it doesn't fit and `strict` is False.

        Raises:
            StateError: it is damaged; or of another number of workers or ranks, or of another rank.
        """
        other = self._begun(self._workers)
        if state is None:
            return other
        if not _is_right(state):
            raise StateError(
                "load_state_dict: the state is damaged: its entry 'dataset' is not what "
                "state_dict() returned"
            )
        differing = differences(state, self._job)
        if differing:
            text = (
                "load_state_dict: the state includes those of the dataset, one per worker and "
                f"rank, and {differing}"
            )
            if strict:
                raise StateError(
                    f"{text}: use the same, and the state of this rank; or pass strict=False to "
                    "go on without them"
                )
            warn(f"{text}; strict=False: the dataset begins without its state")
            return other
        for worker, parts in enumerate(state["states"]):
            other._reported[worker] = None if parts is None else pickle.dumps(parts)
        other._ended = list(state["ended"])
        other._turn = state["turn"]
        other.step = state["step"]
        other.to_new_processes()
        return other


def _is_right(state: Any) -> bool:
    """True if `States.as_dict` may have returned it."""
    try:
        numbers = [state[name] for name in ("workers", "world_size", "rank", "turn", "step")]
        return (
            are_counts(numbers)
            and state["turn"] < state["workers"] == len(state["states"]) == len(state["ended"])
            and all(parts is None or isinstance(parts, dict) for parts in state["states"])
        )
    except (TypeError, KeyError):
        return False
