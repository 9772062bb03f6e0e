"""What a loader says to trainers that take its sampler, or ask whether it is prepared."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from headrace import ConfigError, HeadraceWarning, create_dataloader

DATA: Any = list(range(41))


@pytest.fixture
def in_a_world_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def loader_of(**options: Any) -> Any:
    return create_dataloader(DATA, **{"batch_size": 4, "num_workers": 0, **options})


def drawn(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_the_sampler_is_of_the_loader_s_next_epoch() -> None:
    loader = loader_of()
    for epoch in (0, 1, 5, 2):
        loader.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # looking is free
            shown = list(loader.batch_sampler)
        assert shown == drawn(loader)
    assert list(loader.batch_sampler) == drawn(loader)  # of epoch 3


def test_another_loader_of_its_sampler_is_said() -> None:
    loader = loader_of()
    loader.set_epoch(2)
    with pytest.warns(HeadraceWarning, match="another DataLoader"):
        taken = drawn(DataLoader(DATA, batch_sampler=loader.batch_sampler))
    assert taken == drawn(loader)


def test_another_loader_of_headrace_s_is_not() -> None:
    loader = loader_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_sampler = drawn(loader_of(sampler=loader.sampler))
        by_batches = drawn(loader_of(batch_sampler=loader.batch_sampler))
    assert by_sampler == by_batches == drawn(loader)


class SkipBatchSampler(BatchSampler):
    """Accelerate's, in short."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.batches, 2, None)


def test_batches_that_another_loader_skips_are_refused() -> None:
    with pytest.raises(ConfigError, match="load_state_dict"):
        drawn(DataLoader(DATA, batch_sampler=SkipBatchSampler(loader_of().batch_sampler)))


# -- Accelerate's question


OWN_ORDER: list[dict[str, Any]] = [
    {"sampler": RandomSampler(DATA)},
    {"batch_sampler": [[1], [2]]},
    {"rank": 0, "world_size": 1},
]


def test_alone_every_loader_counts_as_prepared() -> None:
    for options in ({}, *OWN_ORDER):
        with pytest.warns(HeadraceWarning, match="moves no batches"):
            assert loader_of(**options)._is_accelerate_prepared is True


@pytest.mark.usefixtures("in_a_world_of_two")
def test_a_loader_that_moves_its_batches_needs_no_words() -> None:
    loader = loader_of(device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader._is_accelerate_prepared is True
        loader._is_accelerate_prepared = True  # as prepare does
        assert len(drawn(loader)) == len(loader) == 6


@pytest.mark.usefixtures("in_a_world_of_two")
def test_a_loader_that_is_not_shared_out_is_left_to_accelerate() -> None:
    for options in OWN_ORDER:
        with pytest.warns(HeadraceWarning, match="Accelerate shards this loader"):
            assert loader_of(**options)._is_accelerate_prepared is False


# -- the world


def test_a_loader_that_was_made_alone_is_refused_among_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader, mine = loader_of(), loader_of(rank=0, world_size=1)
    assert len(drawn(loader)) == 11
    with monkeypatch.context() as patch:
        for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
            patch.setattr(torch.distributed, name, lambda value=value: value)
        with pytest.raises(ConfigError, match=r"rank 0 of 1 .* rank 1 of 2"):
            iter(loader)
        assert len(drawn(mine)) == 11  # by the user's own words
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        assert len(drawn(loader_of())) == 6
    assert len(drawn(loader)) == 11


@pytest.mark.usefixtures("in_a_world_of_two")
def test_a_launcher_s_word_counts_whatever_group_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of()
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert len(drawn(loader)) == 6
