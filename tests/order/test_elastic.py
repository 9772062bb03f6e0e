"""World sizes share the same global batches, and each goes on from any step of any other.

With pad=False the last two steps may begin elsewhere: where the tail is smaller than the world
size, the full batch before it hands its last samples over (with a batch size of 1 it takes the tail
in). A state from there is refused where no step of the other world size begins at its place.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

import pytest

from headrace.errors import StateError
from headrace.order import EpochOrder, OrderSampler

WORLDS = (1, 2, 3, 4, 6)
LENGTHS = (0, 1, 5, 11, 12, 13, 29)
SHUFFLES: tuple[Any, ...] = (False, True, "block")
CASES = [(drop_last, pad) for drop_last in (False, True) for pad in (False, True)]


def blocks_of(n: int) -> list[int]:
    """Blocks of uneven sizes: 7, 1, 0, 4, 2, 7, 1, ..., and what is left."""
    sizes: list[int] = []
    while (left := n - sum(sizes)) > 0:
        sizes.append(min(left, (7, 1, 0, 4, 2)[len(sizes) % 5]))
    return sizes


@functools.cache
def order_of(n: int, shuffle: Any, global_batch: int) -> EpochOrder:
    how: dict[str, Any] = {"seed": 3, "epoch": 2, "interleave": 3, "turns": 2}
    return EpochOrder(n, shuffle=shuffle, blocks=blocks_of(n), global_batch=global_batch, **how)


def worlds_of(global_batch: int) -> list[int]:
    return [world_size for world_size in WORLDS if global_batch % world_size == 0]


def dealt(parts: list[list[int]]) -> list[int]:
    """The samples of all ranks in the order of their positions: the ranks in turn."""
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


def is_too_short(n: int, world_size: int, drop_last: bool, pad: bool) -> bool:
    """True if a rank gets no sample, where nothing may be repeated."""
    return 0 < n < world_size and not pad and not drop_last


def cuts_of(n: int, world_size: int, drop_last: bool, pad: bool, global_batch: int) -> list[int]:
    """Where steps begin, and the end of the last: see the module's docstring."""
    full, tail = divmod(n, global_batch)
    cuts = [step * global_batch for step in range(full + 1)]
    if drop_last or tail == 0:
        return cuts
    cuts.append(n)
    if not pad and tail < world_size:
        if world_size == global_batch:
            del cuts[-2]
        else:
            cuts[-2] -= world_size
    return cuts


@pytest.mark.parametrize(("drop_last", "pad"), CASES)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_resume_from_any_world_size_on_any_other(shuffle: Any, drop_last: bool, pad: bool) -> None:
    """By samplers of a plain DataLoader, through their states."""
    for n, global_batch in [(n, 12) for n in LENGTHS] + [(13, 6), (16, 6)]:
        fitting = worlds_of(global_batch)
        worlds = [world for world in fitting if not is_too_short(n, world, drop_last, pad)]
        samplers = {w: samplers_of(n, shuffle, w, drop_last, pad, global_batch) for w in worlds}
        order, tried = list(order_of(n, shuffle, global_batch)), list[Any]()
        for before in worlds:
            cuts = cuts_of(n, before, drop_last, pad, global_batch)
            states = [state_at(samplers[before][-1], step) for step in range(len(cuts))]
            of_rank_0 = [state_at(samplers[before][0], step) for step in range(len(cuts))]
            assert states == of_rank_0, "ranks have different states"
            for after in worlds:
                theirs = cuts_of(n, after, drop_last, pad, global_batch)
                for place, state in zip(cuts, states, strict=True):
                    assert state["samples"] == place
                    if (after, state) in tried:
                        continue  # another world size has saved the very same
                    tried.append((after, state))
                    if place not in theirs:
                        assert not pad
                        assert not drop_last
                        assert place >= theirs[-2 if global_batch == after else -3]
                        with pytest.raises(StateError, match=rf"after {place} samples"):
                            samplers[after][0].load_state_dict(state)
                        continue
                    for sampler in samplers[after]:
                        sampler.load_state_dict(state)
                    padding = -n % after if pad and not drop_last and place < n else 0
                    rest = order[place : theirs[-1]] + [order[i % n] for i in range(padding)]
                    assert dealt([list(sampler) for sampler in samplers[after]]) == rest


def samplers_of(
    n: int, shuffle: Any, world_size: int, drop_last: bool, pad: bool, global_batch: int
) -> list[OrderSampler]:
    how: dict[str, Any] = {"seed": 3, "interleave": 3, "turns": 2, "blocks": blocks_of(n)}
    how |= {"shuffle": shuffle, "batch_size": global_batch // world_size}
    how |= {"world_size": world_size, "drop_last": drop_last, "pad": pad}
    samplers = [OrderSampler(n, rank=rank, **how) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(2)
    return samplers


def state_at(sampler: OrderSampler, step: int) -> dict[str, Any]:
    """The state after the indices of so many batches."""
    count = sum(len(sampler.batches.batch(s)) for s in range(step))
    assert len(list(islice(sampler, count))) == count
    return sampler.state_dict()
