"""Numbers of batches and steps are those that a loop would count."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
)

from headrace import (
    ConfigError,
    Loader,
    MultiDataLoader,
    get_epoch_length,
    get_train_dataloader_steps,
    get_val_dataloader_steps,
)
from tests.loader.datasets import Stream

FUNCTIONS = (get_epoch_length, get_train_dataloader_steps, get_val_dataloader_steps)


def loader_of(data: int | Stream, **options: Any) -> Loader:
    dataset = range(data) if isinstance(data, int) else data
    return Loader(dataset, num_workers=0, **options)


def counted(batches: int, accumulate: int) -> int:
    """The steps that a loop takes which accumulates gradients."""
    steps = 0
    for batch in range(batches):
        steps += (batch + 1) % accumulate == 0 or batch + 1 == batches
    return steps


@pytest.mark.slow
@given(
    st.integers(1, 60),
    st.integers(1, 7),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_they_are_what_a_loop_counts(
    n: int, size: int, world: int, drop_last: bool, pad: bool, accumulate: int, rank: int
) -> None:
    if not pad and n < world:
        return
    options: dict[str, Any] = {"batch_size": size, "world_size": world, "rank": rank % world}
    options |= {"drop_last": drop_last, "pad": pad}
    loader = loader_of(n, **options)
    batches = sum(1 for _ in loader)
    assert get_epoch_length(loader) == get_val_dataloader_steps(loader) == batches
    accumulated = min(accumulate, max(1, batches))
    steps = counted(batches, accumulate)
    assert steps == counted(batches, accumulated)
    expected = (size * world * accumulated, steps, accumulated)
    assert get_train_dataloader_steps(loader, accumulate=accumulate) == expected


def test_golden_numbers_of_steps() -> None:
    eight: dict[str, Any] = {"batch_size": 32, "world_size": 8, "rank": 3}
    for n, options, accumulate, expected in (
        (1000, {"batch_size": 32}, 1, (32, 32, 1)),
        (1000, {"batch_size": 32, "drop_last": True}, 1, (32, 31, 1)),
        (1000, {"batch_size": 32}, 4, (128, 8, 4)),
        (1000, eight, 1, (256, 4, 1)),
        (1000, {**eight, "drop_last": True}, 2, (512, 2, 2)),
        (10, {"batch_size": 4}, 8, (12, 1, 3)),
        (0, {"batch_size": 4}, 2, (4, 0, 1)),
    ):
        loader = loader_of(n, **options)
        assert get_train_dataloader_steps(loader, accumulate=accumulate) == expected


def test_without_a_length_one_must_be_given() -> None:
    torch_s: Any = DataLoader(Stream(10), batch_size=4)
    for loader in (loader_of(Stream(10), batch_size=4), torch_s):
        for function in FUNCTIONS:
            with pytest.raises(ConfigError, match=r"Stream.*length="):
                function(loader)
        assert get_epoch_length(loader, 3) == get_val_dataloader_steps(loader, 3) == 3
        assert get_train_dataloader_steps(loader, 3, 2) == (8, 2, 2)


def test_torch_dataloaders() -> None:
    data: Any = range(10)
    loader: Any = DataLoader(data, batch_size=4, drop_last=True)
    assert get_train_dataloader_steps(loader, accumulate=2) == (8, 1, 2)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 3, 0))
    assert get_train_dataloader_steps(loader) == (6, 2, 1)
    batches = BatchSampler(SequentialSampler(data), 4, True)
    torch_s: Any = DataLoader(data, batch_sampler=batches)
    for loader in (torch_s, loader_of(10, batch_sampler=batches)):
        assert get_train_dataloader_steps(loader) == (4, 2, 1)


def test_batches_of_unknown_size() -> None:
    for loader in (loader_of(5, batch_size=None), loader_of(9, batch_sampler=[[0, 1], [2]])):
        assert get_epoch_length(loader) == len(loader)
        with pytest.raises(ConfigError, match="size"):
            get_train_dataloader_steps(loader)


def test_several_loaders() -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "rank": 0, "world_size": 2}
    multi = MultiDataLoader({"a": range(10), "b": range(4)}, **options)
    assert get_train_dataloader_steps(multi, accumulate=2) == (16, 2, 2)
    assert get_epoch_length(multi) == len(list(multi)) == 3
    assert get_epoch_length(multi, 9) == 9
    loaders = {"a": loader_of(10, batch_size=4), "b": loader_of(8, batch_size=4)}
    mixed = MultiDataLoader(loaders, steps=7)
    assert get_train_dataloader_steps(mixed) == (4, 7, 1)
    unequal = MultiDataLoader({"a": loader_of(4, batch_size=2), "b": loader_of(4, batch_size=3)})
    assert get_epoch_length(unequal) == 4
    with pytest.raises(ConfigError, match=r"\(2, 3|3, 2"):
        get_train_dataloader_steps(unequal)


def test_steps_of_a_sanity_check() -> None:
    loader = loader_of(10, batch_size=4)
    for steps, expected in ((0, 3), (1, 1), (2, 2), (9, 3)):
        assert get_val_dataloader_steps(loader, sanity_steps=steps) == expected
    assert get_val_dataloader_steps(None) == get_val_dataloader_steps(None, sanity_steps=2) == 0


def test_what_makes_no_sense_is_refused() -> None:
    loader: Any = loader_of(10, batch_size=4)
    for function in FUNCTIONS:
        with pytest.raises(ConfigError, match="not a TensorDataset"):
            function(TensorDataset(torch.zeros(8)))
        with pytest.raises(ConfigError, match="length must be an integer"):
            function(loader.config, loader)
    for wrong in (-1, 1.5, "2", True):
        for function, name in (
            (get_epoch_length, "length"),
            (get_train_dataloader_steps, "accumulate"),
            (get_val_dataloader_steps, "sanity_steps"),
        ):
            with pytest.raises(ConfigError, match=name):
                function(loader, **{name: wrong})
    with pytest.raises(ConfigError, match="accumulate"):
        get_train_dataloader_steps(loader, accumulate=0)
