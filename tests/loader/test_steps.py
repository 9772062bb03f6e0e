"""Numbers of batches and steps are those that a loop would count."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from headrace import (
    ConfigError,
    Loader,
    MultiDataLoader,
    get_epoch_length,
    get_train_dataloader_steps,
    get_val_dataloader_steps,
)


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def loader_of(n: int, **options: Any) -> Loader:
    return Loader(range(n), num_workers=0, **options)


def counted(batches: int, accumulate: int) -> int:
    """The steps that a loop takes which accumulates gradients."""
    steps = 0
    for batch in range(batches):
        steps += (batch + 1) % accumulate == 0 or batch + 1 == batches
    return steps


@pytest.mark.slow
@settings(deadline=None)
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
    loader = loader_of(
        n, batch_size=size, world_size=world, rank=rank % world, drop_last=drop_last, pad=pad
    )
    batches = sum(1 for _ in loader)
    assert get_epoch_length(loader) == get_val_dataloader_steps(loader) == batches
    other = loader_of(
        100, batch_size=size, world_size=world, rank=rank % world, drop_last=drop_last, pad=pad
    )
    assert get_epoch_length(other, samples=n) == batches
    global_batch, steps, accumulated = get_train_dataloader_steps(loader, accumulate=accumulate)
    assert accumulated == min(accumulate, max(1, batches))
    assert global_batch == size * world * accumulated
    assert steps == counted(batches, accumulate) == counted(batches, accumulated)
    assert get_train_dataloader_steps(other, accumulate=accumulate, samples=n) == (
        global_batch,
        steps,
        accumulated,
    )


@pytest.mark.parametrize(
    ("n", "options", "accumulate", "expected"),
    [
        (1000, {"batch_size": 32}, 1, (32, 32, 1)),
        (1000, {"batch_size": 32, "drop_last": True}, 1, (32, 31, 1)),
        (1000, {"batch_size": 32}, 4, (128, 8, 4)),
        (1000, {"batch_size": 32, "drop_last": True}, 4, (128, 8, 4)),
        (1000, {"batch_size": 32, "world_size": 8, "rank": 3}, 1, (256, 4, 1)),
        (1000, {"batch_size": 32, "world_size": 8, "rank": 3, "drop_last": True}, 2, (512, 2, 2)),
        (10, {"batch_size": 4}, 8, (12, 1, 3)),
        (0, {"batch_size": 4}, 2, (4, 0, 1)),
    ],
)
def test_some_numbers(
    n: int, options: dict[str, Any], accumulate: int, expected: tuple[int, int, int]
) -> None:
    assert get_train_dataloader_steps(loader_of(n, **options), accumulate=accumulate) == expected


def test_without_a_length_one_must_be_given() -> None:
    for loader in (
        Loader(Stream(10), batch_size=4, num_workers=0),
        DataLoader(Stream(10), batch_size=4),
    ):
        for function in (get_epoch_length, get_train_dataloader_steps, get_val_dataloader_steps):
            with pytest.raises(ConfigError, match=r"Stream.*pass length=.*samples="):
                function(loader)
        assert (
            get_epoch_length(loader, samples=10)
            == get_val_dataloader_steps(loader, samples=10)
            == len(list(loader))
            == 3
        )
        assert get_train_dataloader_steps(loader, accumulate=2, samples=10) == (8, 2, 2)
    dropping = Loader(Stream(10), batch_size=4, num_workers=0, drop_last=True)
    assert get_epoch_length(dropping, samples=10) == len(list(dropping)) == 2
    assert (
        get_epoch_length(
            Loader(Stream(10), batch_size=4, num_workers=0, rank=0, world_size=2), samples=21
        )
        == 3
    )


def test_accumulation_by_the_name_of_trainers() -> None:
    loader = loader_of(64, batch_size=4)
    expected = get_train_dataloader_steps(loader, accumulate=3)
    assert (
        get_train_dataloader_steps(loader, gradient_accumulation_steps=3) == expected == (12, 6, 3)
    )
    with pytest.raises(ConfigError, match="pass one of them"):
        get_train_dataloader_steps(loader, accumulate=2, gradient_accumulation_steps=3)


def test_a_config_in_the_place_of_the_loader() -> None:
    loader = loader_of(64)
    for function in (get_epoch_length, get_train_dataloader_steps, get_val_dataloader_steps):
        for config in (loader.config, {"batch_size": 4}):
            with pytest.raises(ConfigError, match="pass the loader first, and no config"):
                function(config, loader)  # type: ignore[arg-type]


def test_length_is_batches_and_samples_are_samples() -> None:
    loader = loader_of(64, batch_size=32)
    assert get_epoch_length(loader) == 2
    assert (
        get_epoch_length(loader, length=1000)
        == get_val_dataloader_steps(loader, length=1000)
        == 1000
    )
    assert (
        get_epoch_length(loader, samples=1000)
        == get_val_dataloader_steps(loader, samples=1000)
        == 32
    )
    assert (
        get_train_dataloader_steps(loader, 1000, 4) == (128, 250, 4)
        and get_train_dataloader_steps(loader, samples=1000)[1] == 32
    )
    for function in (get_epoch_length, get_train_dataloader_steps, get_val_dataloader_steps):
        with pytest.raises(ConfigError, match=r"length= and samples= are given"):
            function(loader, length=3, samples=3)


def test_torch_dataloaders() -> None:
    assert get_train_dataloader_steps(
        DataLoader(range(10), batch_size=4, drop_last=True), accumulate=2
    ) == (8, 1, 2)  # type: ignore[arg-type]
    sampler = DistributedSampler(range(10), 3, 0)  # type: ignore[arg-type]
    loader = DataLoader(range(10), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    assert (
        get_train_dataloader_steps(loader) == (6, 2, 1)
        and get_epoch_length(loader, samples=10) == len(list(loader)) == 2
    )
    batches = BatchSampler(SequentialSampler(range(10)), 4, True)
    for loader in (
        DataLoader(range(10), batch_sampler=batches),
        loader_of(10, batch_sampler=batches),
    ):  # type: ignore[arg-type]
        assert (
            get_train_dataloader_steps(loader) == (4, 2, 1)
            and get_epoch_length(loader, samples=11) == 2
        )


def test_the_environment_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert get_train_dataloader_steps(DataLoader(Stream(3), batch_size=2), samples=17) == (8, 3, 1)
    assert get_train_dataloader_steps(loader_of(17, batch_size=2)) == (8, 3, 1)


def test_batches_of_unknown_size() -> None:
    for loader in (loader_of(5, batch_size=None), loader_of(9, batch_sampler=[[0, 1], [2]])):
        assert get_epoch_length(loader) == len(loader)
        with pytest.raises(ConfigError, match="size of a batch is not known"):
            get_train_dataloader_steps(loader)
    assert get_epoch_length(Loader(Stream(3), batch_size=None, num_workers=0), samples=7) == 7


def test_several_loaders() -> None:
    multi = MultiDataLoader(
        {"a": range(10), "b": range(4)}, batch_size=4, num_workers=0, rank=0, world_size=2
    )
    assert (
        get_train_dataloader_steps(multi, accumulate=2) == (16, 2, 2)
        and get_epoch_length(multi) == len(list(multi)) == 3
    )
    with pytest.raises(ConfigError, match="steps="):
        get_epoch_length(multi, samples=9)
    assert get_epoch_length(multi, 9) == 9
    torches = MultiDataLoader(
        {"a": DataLoader(range(10), batch_size=4), "b": loader_of(8, batch_size=4)}, steps=7
    )  # type: ignore[arg-type]
    assert get_train_dataloader_steps(torches) == (4, 7, 1)
    unequal = MultiDataLoader({"a": loader_of(4, batch_size=2), "b": loader_of(4, batch_size=3)})
    assert get_epoch_length(unequal) == 4
    with pytest.raises(ConfigError, match=r"different sizes.*2, 3"):
        get_train_dataloader_steps(unequal)


def test_validation() -> None:
    loader = loader_of(10, batch_size=4)
    assert [get_val_dataloader_steps(loader, sanity_steps=steps) for steps in (0, 1, 2, 9)] == [
        3,
        1,
        2,
        3,
    ]
    assert get_val_dataloader_steps(None) == get_val_dataloader_steps(None, sanity_steps=2) == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, "2", True])
def test_what_makes_no_sense_is_refused(wrong: Any) -> None:
    loader = loader_of(10, batch_size=4)
    with pytest.raises(ConfigError, match="length must be"):
        get_epoch_length(loader, wrong)
    with pytest.raises(ConfigError, match="samples must be"):
        get_epoch_length(loader, samples=wrong)
    for accumulate in (wrong, 0):
        with pytest.raises(ConfigError, match="accumulate must be"):
            get_train_dataloader_steps(loader, accumulate=accumulate)
    with pytest.raises(ConfigError, match="sanity_steps must be"):
        get_val_dataloader_steps(loader, sanity_steps=wrong)
