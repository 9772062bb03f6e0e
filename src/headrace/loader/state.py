"""Checks the saved state of a loader.

The state is the order's parameters and the number of global batches that the user has received: a few integers (law 3).
"""

from __future__ import annotations

from typing import Any

from headrace.errors import StateError, warn

VERSION = 1
_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("version", "epoch", "batches", "seed", "global_batch", "skipped"), (int,)),
    **dict.fromkeys(("length", "samples", "interleave", "turns", "num_samples"), (int, _NONE)),
    **dict.fromkeys(("weights", "classes", "lengths"), (str, _NONE)),
    **{"fingerprint": (str,), "shuffle": (bool, str), "replacement": (bool, _NONE), "skipped_samples": (list,), "ended": (bool,)},
}
_WHERE_MISSING = {"skipped": 0, "skipped_samples": [], "ended": False}
_OWN = ("sampler", "batch_sampler", "iterable", "weights", "balanced")  # orders that a state can't make another loader take over
_SHUFFLES = (False, True, "block", *_OWN)
_FIXED = ("num_samples", "weights", "classes", "replacement", "lengths")
_COUNTS = ("batches", "skipped")
_COMPARED = ("shuffle", "seed", "interleave", "turns", "workers")


def check_data(state: Any, fingerprint: str, length: int | None, strict: bool) -> None:
    """Checks that this is a state, and of this dataset.

    Raises:
        StateError: no state; of a later version, or of other data. The message holds both fingerprints.
    """
    _check_form(state)
    if state["fingerprint"] != fingerprint:
        message = (
            f"load_state_dict: the state is of another dataset: its fingerprint is {state['fingerprint']} ({state['length']} samples), "
            f"this dataset's {fingerprint} ({length} samples)"
        )
        if strict or state["length"] != length:
            raise StateError(f"{message}. Were files added, removed or renamed?")
        warn(f"{message}; strict=False: continuing anyway")


def _check_form(state: Any) -> None:
    if not isinstance(state, dict) or "version" not in state or "batches" not in state:
        raise StateError("load_state_dict: this is no state of a headrace loader: pass what loader.state_dict() returned")
    version = state["version"]
    if type(version) is int and version > VERSION:
        raise StateError(f"load_state_dict: the state has version {version}, this headrace knows {VERSION}: upgrade it")
    for name, types in _TYPES.items():
        value = state.get(name, _WHERE_MISSING.get(name))
        if type(value) not in types or (name in _COUNTS and value < 0) or (name == "shuffle" and value not in _SHUFFLES):
            raise StateError(f"load_state_dict: the state is damaged: its {name} is {value!r}")


def check_order(state: dict[str, Any], parameters: dict[str, Any], world_size: int, strict: bool) -> dict[str, Any]:
    """The parameters of its order that a loader must take over from a state ({} where they are the same).

    Raises:
        StateError: it is of another order. The message holds both values.
    """
    differing = {k: state.get(k) for k in parameters if k in _COMPARED and state.get(k) != parameters[k]}
    message = ", ".join(f"{k} was {v!r}, is {parameters[k]!r}" for k, v in differing.items())
    kinds = {state["shuffle"], parameters["shuffle"]}
    if "workers" in differing or (len(kinds) > 1 and not kinds.isdisjoint(_OWN)):
        raise StateError(f"load_state_dict: the state is of another order: {message}. Build the loader as it was")
    if others := [k for k in _FIXED if state.get(k) != parameters.get(k)]:
        had = ", ".join(f"{k} was {state.get(k)!r}, is {parameters.get(k)!r}" for k in others)
        raise StateError(f"load_state_dict: the state is of another order: {had}. Build the loader as it was")
    if state.get("global_batch") != parameters["global_batch"]:
        saved = state.get("global_batch")
        if isinstance(saved, int) and saved % world_size == 0:
            remedy = f"use batch_size={saved // world_size}"
        else:
            remedy = f"use a world size that divides {saved}"
        raise StateError(
            f"load_state_dict: the state was saved with a global batch of {saved}, this loader has {parameters['global_batch']} "
            f"(batch_size x world_size): {remedy}"
        )
    if state.get("shuffle") == parameters["shuffle"] and state.get("blocks") != parameters.get("blocks"):
        raise StateError(
            "load_state_dict: the samples are stored in other blocks than when the state was saved (the same data in another layout?), "
            "and shuffle='block' depends on them: use the former layout, or start the epoch again"
        )
    if differing and strict:
        raise StateError(
            f"load_state_dict: the state is of another order: {message}. Build the loader as it was, or pass strict=False to adopt "
            "the saved order"
        )
    return differing


def check_samples(state: dict[str, Any], samples: int | None) -> None:
    """Compares the samples that lie before the position, where the last batches of an epoch depend on the number of ranks.

    Raises:
        StateError: this loader would lose or repeat samples.
    """
    if state.get("samples") != samples:
        raise StateError(
            f"load_state_dict: {state.get('samples')} samples of the epoch were received when the state was saved, this loader would go "
            f"on after {samples}: with pad=False the last batches of an epoch depend on the number of ranks; resume with the saved one"
        )
