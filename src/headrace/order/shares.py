"""Detects that another library shares out one rank's samples to the ranks once more.

Trainers put shards of their own on top of what they are given, as Accelerate's `prepare` does. Each
rank would then get a part of its part, and the rest would be lost without a word. What goes through
an order can be seen on the stack: the samplers, datasets and loaders around it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.utils.data

from headrace.errors import ConfigError

_KINDS = (torch.utils.data.Sampler, torch.utils.data.DataLoader, torch.utils.data.IterableDataset)
# whose loaders, and iterators over them, are of other classes besides
_LIBRARIES = ("accelerate.", "torch.utils.data.")
_COUNTS = ("num_processes", "num_replicas", "world_size")
REMEDY = (
    "Accelerate: prepare model and optimizer alone, and let "
    "create_dataloader(device=accelerator.device) move the batches"
)


def check_shared_once(own: object, world_size: int) -> None:
    """Call it in a method of what is gone through, or below one, before its first index.

    Args:
        own: that object: a sampler, a batch sampler or an iterable dataset.
        world_size: number of ranks that it is one's share of.

    Raises:
        ConfigError: what goes through it shares it out once more.
    """
    if world_size < 2:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is not own:
        frame = frame.f_back
    for asker in askers(own, frame):
        # Accelerate's dispatcher knows the number by its state
        for holder in (asker, getattr(asker, "state", None)):
            for name in _COUNTS:
                ranks = getattr(holder, name, None)
                if type(ranks) is int and ranks > 1:
                    raise ConfigError(
                        f"samples would be lost: {type(own).__name__} is one rank's share, of "
                        f"{world_size}, and {type(asker).__name__} shares it out to {ranks} "
                        f"processes again. {REMEDY}; or make it with rank=0 and world_size=1 "
                        "(docs/trainers.md)"
                    )


def askers(own: object, frame: FrameType | None) -> Iterator[Any]:
    """Samplers, datasets and loaders that go through an object of headrace's, the nearest first, up
    to what is headrace's again.

    Args:
        own: that object.
        frame: of its method that runs.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("headrace."):
            if frame.f_locals.get("self") is not own:
                return
        elif _may_be_asker(frame, module):
            asker = frame.f_locals.get("self")
            is_of_library = type(asker).__module__.startswith(_LIBRARIES)
            if asker is not own and (is_of_library or isinstance(asker, _KINDS)):
                yield asker
        frame = frame.f_back


def _may_be_asker(frame: FrameType, module: str) -> bool:
    """Looks at the code first: `f_locals` holds on to values, which in a training loop are
    batches.
    """
    if frame.f_code.co_name in ("__iter__", "__next__") or module.startswith(_LIBRARIES):
        return True
    cls = frame.f_globals.get(frame.f_code.co_qualname.partition(".")[0])
    return isinstance(cls, type) and issubclass(cls, _KINDS)
