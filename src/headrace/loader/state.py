"""Where does a loader stand, and may another one go on from there?

The state is the order's parameters and the number of global batches that the user has received: a few integers (law 3).
"""

from __future__ import annotations

from typing import Any

from headrace.errors import StateError
from headrace.loader.config import warn

VERSION = 1
_ADOPTABLE = ("shuffle", "seed", "interleave", "turns")


def make_state(
    fingerprint: str,
    length: int | None,
    parameters: dict[str, Any],
    epoch: int,
    batches: int,
    samples: int | None,
    skipped: int,
    skipped_samples: list[dict[str, Any]],
) -> dict[str, Any]:
    """The state as users save it: plain numbers and texts."""
    state = {
        "version": VERSION,
        "fingerprint": fingerprint,
        "length": length,
        **parameters,
        "epoch": epoch,
        "batches": batches,
        "samples": samples,
    }
    if skipped:
        state["skipped"], state["skipped_samples"] = skipped, skipped_samples
    return state


def check_state(
    state: Any, fingerprint: str, length: int | None, parameters: dict[str, Any], world_size: int, strict: bool
) -> dict[str, Any]:
    """The parameters of its order that a loader must take over from a state ({} where they are the same).

    Raises:
        StateError: no state; of a later version, of other data, or of another order. The message holds both values.
    """
    if not isinstance(state, dict) or "version" not in state or "batches" not in state:
        raise StateError("load_state_dict: this is no state of a headrace loader: pass what loader.state_dict() returned")
    if state["version"] > VERSION:
        raise StateError(f"load_state_dict: the state has version {state['version']}, this headrace knows {VERSION}: upgrade it")
    if state["fingerprint"] != fingerprint:
        said = (
            f"load_state_dict: the state is of another dataset: its fingerprint is {state['fingerprint']} ({state['length']} samples), "
            f"this dataset's {fingerprint} ({length} samples)"
        )
        if strict or state["length"] != length:
            raise StateError(f"{said}. Were files added, removed or renamed?")
        warn(f"{said}; strict=False: going on all the same")
    if state.get("global_batch") != parameters["global_batch"]:
        saved = state.get("global_batch")
        if isinstance(saved, int) and saved % world_size == 0:
            remedy = f"take batch_size={saved // world_size}"
        else:
            remedy = f"take a world size that divides {saved}"
        raise StateError(
            f"load_state_dict: the state was saved with a global batch of {saved}, this loader has {parameters['global_batch']} "
            f"(batch_size x world_size): {remedy}"
        )
    if state.get("shuffle") == parameters["shuffle"] and state.get("blocks") != parameters.get("blocks"):
        raise StateError(
            "load_state_dict: the samples lie in other blocks than when the state was saved (another layout of the same data?), "
            "and shuffle='block' depends on them: take the layout that it was, or begin the epoch anew"
        )
    differing = {k: state.get(k) for k in parameters if k in _ADOPTABLE and state.get(k) != parameters[k]}
    if differing and (strict or not {"sampler", "iterable"}.isdisjoint((differing.get("shuffle"), parameters["shuffle"]))):
        said = ", ".join(f"{k} was {v!r}, is {parameters[k]!r}" for k, v in differing.items())
        raise StateError(
            f"load_state_dict: the state is of another order: {said}. Build the loader as it was, or pass strict=False to take over "
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
