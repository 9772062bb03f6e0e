"""The values that a loader chooses, and what it says before the first worker starts."""

import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from headrace import (
    BudgetError,
    ConfigError,
    DataLoaderConfig,
    HeadraceWarning,
    ImageDataset,
    Loader,
    create_dataloader,
)
from headrace.loader import build, data
from headrace.memory import limits
from headrace.memory.limits import Cores
from headrace.order import World
from tests.testing.test_contract import SquareDataset

PLENTY, SCARCE = 64 << 30, 3 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the cores, the free memory and the number of local ranks that the builder sees."""

    def set_up(cores: int, available: int = PLENTY, ranks: int = 1) -> None:
        class Budget:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.available = available

        monkeypatch.setattr(build, "cores", lambda: Cores(cores))
        monkeypatch.setattr(build, "MemoryBudget", Budget)
        monkeypatch.setattr(
            "headrace.loader.loader.detect_world", lambda *_: World(0, ranks, 0, ranks, "a test")
        )

    return set_up


def workers_of(dataset: Any, **options: Any) -> Loader:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return create_dataloader(dataset, batch_size=4, **options)


# -- number of workers


def test_workers_follow_a_quota_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(limits, "_own_quota", lambda: Cores(4, "cgroup v2 /pod cpu.max"))
    loader = workers_of(SquareDataset())
    assert loader.num_workers <= 3
    assert "4 usable cores (cgroup v2 /pod cpu.max)" in loader.explain()


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 3),
        (8, 1, 6),
        (11, 1, 8),
        (64, 1, 8),
        (16, 4, 3),
        (16, 16, 1),
        (2, 8, 1),
        (64, 8, 6),
    ],
)
def test_the_number_of_workers_follows_cores_and_ranks(
    machine: Any, cores: int, ranks: int, expected: int
) -> None:
    machine(cores, ranks=ranks)
    loader = workers_of(SquareDataset())
    assert loader.config.num_workers == loader.num_workers == expected
    assert (
        f"{cores} usable cores" in loader.explain() and f"{ranks} local ranks" in loader.explain()
    )


@pytest.mark.parametrize(("cores", "expected"), [(64, 2), (3, 2), (2, 1)])
def test_scarce_memory_means_at_most_two_workers(machine: Any, cores: int, expected: int) -> None:
    machine(cores, SCARCE)
    loader = workers_of(SquareDataset())
    assert loader.num_workers == expected
    assert ("less than 4.3 GB" in loader.explain()) == (expected < int(0.75 * cores))


def test_what_is_in_memory_needs_no_workers(machine: Any) -> None:
    machine(64)
    with SquareDataset(loading_mode="eager", progress=False) as eager:
        for dataset in (TensorDataset(torch.zeros(9)), eager, eager.subset(range(9))):
            loader = workers_of(dataset)
            assert loader.num_workers == 0
            assert "in memory" in loader.explain()
    with SquareDataset(loading_mode="cached") as cached:
        assert workers_of(cached).num_workers == 8


@pytest.mark.parametrize(
    ("cores", "turns", "expected"), [(64, 12, 6), (7, 12, 4), (64, 8, 8), (64, 7, 7), (64, 1, 1)]
)
def test_with_blocks_the_number_of_workers_divides_the_turns(
    machine: Any, cores: int, turns: int, expected: int
) -> None:
    machine(cores)
    loader = workers_of(SquareDataset(), shuffle="block", turns=turns)
    assert loader.num_workers == expected
    # a full shuffle has no turns
    assert workers_of(SquareDataset(), turns=turns).num_workers == min(8, int(0.75 * cores))


def test_few_blocks_make_few_turns_and_so_few_workers(machine: Any) -> None:
    machine(cores=64)

    class Blocks(SquareDataset):
        def blocks(self) -> Any:
            return np.ones(256, np.int64)  # 8 lanes a turn, 24 turns

    assert workers_of(Blocks().subset(np.arange(256) % 32), shuffle="block").num_workers == 8


def test_a_given_number_of_workers_counts_whatever_the_turns(machine: Any) -> None:
    machine(64)
    assert workers_of(SquareDataset(), shuffle="block", num_workers=5).num_workers == 5


# -- the other values


def test_values_with_workers() -> None:
    loader = create_dataloader(SquareDataset(), num_workers=1)
    assert (loader.config.prefetch_factor, loader.config.persistent_workers) == (2, True)
    assert (loader.prefetch_factor, loader.persistent_workers) == (2, True)
    given = create_dataloader(
        SquareDataset(), num_workers=1, prefetch_factor=3, persistent_workers=False, timeout=9
    )
    assert (given.prefetch_factor, given.persistent_workers, given.timeout) == (3, False, 9)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("prefetch_factor", 4),
        ("persistent_workers", True),
        ("timeout", 3.0),
        ("multiprocessing_context", "spawn"),
    ],
)
def test_worker_options_without_workers_warn(option: str, value: Any) -> None:
    with pytest.warns(HeadraceWarning, match=f"{option}.*num_workers=0") as warned:
        loader = create_dataloader(SquareDataset(), num_workers=0, **{option: value})
    assert [w.filename for w in warned] == [__file__], "a warning should show the user's line"
    assert len(list(loader)) == 2
    assert not getattr(loader.config, option)
    with pytest.warns(HeadraceWarning, match=option) as warned:
        Loader(SquareDataset(), num_workers=0, **{option: value})
    assert [w.filename for w in warned] == [__file__]


def test_what_is_not_asked_for_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_dataloader(
            SquareDataset(),
            num_workers=0,
            prefetch_factor=None,
            persistent_workers=False,
            timeout=0,
            pin_memory=False,
        )
        create_dataloader(SquareDataset(), num_workers=1)


def test_pinned_memory_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(HeadraceWarning, match="pin_memory=True") as warned:
        loader = create_dataloader(SquareDataset(), num_workers=0, pin_memory=True)
    assert [w.filename for w in warned] == [__file__]
    assert loader.config.pin_memory is False and loader.pin_memory is False
    assert create_dataloader(SquareDataset(), num_workers=0).config.pin_memory is False


@pytest.mark.parametrize(
    ("device", "expected"),
    [(None, True), ("cuda", True), ("cuda:1", True), ("cpu", False), ("meta", False)],
)
def test_pinned_memory_with_cuda(
    monkeypatch: pytest.MonkeyPatch, device: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (
        create_dataloader(SquareDataset(), num_workers=0, device=device).config.pin_memory
        is expected
    )


@pytest.mark.parametrize(("workers", "prefetch", "slots"), [(0, 1, 2), (2, 3, 8)])
def test_pinned_batches_count_twice(workers: int, prefetch: int, slots: int) -> None:
    """Each slot's batch lies in a pinned buffer too, and torch rounds those up to a power of
    two.
    """
    memory = create_dataloader(SquareDataset(max_memory_usage="1GB"), num_workers=0)._memory
    for batch, pinned in [
        (0, 0),
        (1, 1),
        (1 << 20, 1 << 20),
        ((1 << 20) + 1, 1 << 21),
        (38_500_000, 1 << 26),
    ]:
        plain, twice = (
            memory._needed(DataLoaderConfig(pin_memory=pins), batch, workers, prefetch)
            for pins in (False, True)
        )
        assert twice - plain == slots * pinned


def test_pinned_batches_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    options: dict[str, Any] = {
        "batch_size": 37,
        "num_workers": 2,
        "prefetch_factor": 4,
        "device": "meta",
    }
    dataset = SquareDataset(transform=Kilobytes(), max_memory_usage="20MB")
    batch = 37 * 10_000
    for pin_memory in (False, True):
        loader = create_dataloader(dataset, pin_memory=pin_memory, **options)
        loader._memory.reserve_measured(loader.config, batch)
        pinned = 1 << 19 if pin_memory else 0
        assert dataset.budget.reserved == (2 * 4 + 2) * (batch + pinned) + 2 * (
            20_000_000 // 20 + batch * 3 // 2
        )
        loader.close()


class Kilobytes:
    def __call__(self, value: Any) -> torch.Tensor:
        return torch.zeros(10_000, dtype=torch.uint8)


class NotForkSafe(SquareDataset):
    fork_safe = False


def test_the_start_method() -> None:
    def method(dataset: Any, **options: Any) -> str:
        return create_dataloader(
            dataset, num_workers=1, **options
        ).multiprocessing_context.get_start_method()

    assert method(SquareDataset()) == "fork"
    assert method(NotForkSafe()) == "forkserver"
    for wrapped in (Subset(NotForkSafe(), [0]), ConcatDataset([SquareDataset(), NotForkSafe()])):
        assert method(wrapped) == "forkserver", "the dataset inside is not fork-safe"
    assert method(NotForkSafe(), multiprocessing_context="fork") == "fork"
    assert (
        method(SquareDataset(), multiprocessing_context=multiprocessing.get_context("spawn"))
        == "spawn"
    )
    assert "fork_safe = False" in create_dataloader(NotForkSafe(), num_workers=1).explain()


def test_the_default_order() -> None:
    def shuffle(dataset: Any, **options: Any) -> Any:
        return create_dataloader(dataset, num_workers=0, **options).config.shuffle

    assert shuffle(SquareDataset()) is True
    assert shuffle(SquareDataset(loading_mode="streaming")) == "block"
    assert shuffle(SquareDataset(loading_mode="streaming"), shuffle=False) is False
    assert shuffle(SquareDataset(loading_mode="streaming"), shuffle=True) is True
    assert shuffle(SquareDataset(), sampler=[3, 1]) is False
    assert shuffle(SquareDataset(), batch_sampler=[[3, 1]]) is False
    assert shuffle(TensorDataset(torch.zeros(3))) is True


@pytest.mark.parametrize("workers", [0, 1])
def test_explain_gives_a_reason_for_each_value(workers: int) -> None:
    text = create_dataloader(SquareDataset(), num_workers=workers).explain()
    names = [
        "batch_size",
        "shuffle",
        "seed",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "multiprocessing_context",
    ]
    for name in [*names, "pin_memory", "drop_last", "pad", "rank", "world_size"]:
        line = next(line for line in text.splitlines() if line.startswith(name))
        value, reason = line.split("=", 1)[1].strip().split(maxsplit=1)
        assert value and reason
        assert (
            "None" in value
            or getattr(create_dataloader(SquareDataset(), num_workers=workers).config, name)
            is not None
        )
    assert "given" not in next(
        line for line in text.splitlines() if line.startswith("multiprocessing_context")
    )


def test_explain_tells_of_padding() -> None:
    padded = create_dataloader(SquareDataset(), num_workers=0, rank=0, world_size=4)
    assert padded.padding == 2 and "2 samples come twice" in padded.explain()
    assert "come twice" not in create_dataloader(SquareDataset(), num_workers=0).explain()


# -- the budget


def images(photos: Path, **options: Any) -> ImageDataset:
    return ImageDataset(photos, image_size=64, normalize=False, **options)


BATCH = 8 * (3 * 64 * 64 + 8)  # bytes of a batch of 8 such images and their targets


def room_for(workers: int, prefetch: int) -> int:
    """A budget that such batches fill: slots, and half a batch beside them (and 5 % of the
    budget) in each process.
    """
    making = max(1, workers)
    return (
        int(
            (BATCH * (workers * prefetch + 2 if workers else 2) + making * BATCH * 0.5)
            / (1 - making / 20)
        )
        + 9
    )


def test_prefetch_is_lowered_to_fit(photos: Path) -> None:
    with pytest.warns(HeadraceWarning, match=r"prefetch_factor=4 don't fit") as warned:
        loader = create_dataloader(
            images(photos),
            batch_size=8,
            num_workers=2,
            prefetch_factor=4,
            max_memory_usage=room_for(2, 3) - BATCH,
        )
    assert [w.filename for w in warned] == [__file__]
    assert (loader.config.num_workers, loader.config.prefetch_factor, loader.prefetch_factor) == (
        2,
        2,
        2,
    )
    assert "lowered" in loader.explain()
    loader.close()


def test_workers_are_lowered_to_fit(photos: Path) -> None:
    with pytest.warns(HeadraceWarning, match=r"num_workers=2.*1 x 1"):
        loader = create_dataloader(
            images(photos), batch_size=8, num_workers=2, max_memory_usage=room_for(1, 1)
        )
    assert (loader.num_workers, loader.prefetch_factor) == (1, 1)
    loader.close()
    with pytest.warns(HeadraceWarning, match="don't fit"):
        loader = create_dataloader(
            images(photos), batch_size=8, num_workers=2, timeout=5, max_memory_usage=room_for(0, 1)
        )
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (
        0,
        None,
        False,
    )
    assert len(list(loader)) == 3


def test_a_budget_that_suffices_changes_nothing(photos: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadraceWarning)
        loader = create_dataloader(
            images(photos), batch_size=8, num_workers=2, max_memory_usage=room_for(2, 2)
        )
    assert (loader.num_workers, loader.prefetch_factor) == (2, 2)


def test_a_batch_above_the_budget_is_refused_with_the_numbers(photos: Path) -> None:
    with pytest.raises(BudgetError, match="batch_size") as refused:
        create_dataloader(images(photos), batch_size=8, num_workers=0, max_memory_usage=BATCH)
    assert (
        "98.4 kB" in str(refused.value)
        and "max_memory_usage" in str(refused.value)
        and "batch of 8" in str(refused.value)
    )


def test_the_dataset_s_budget_counts_where_the_loader_has_none(photos: Path) -> None:
    with pytest.raises(BudgetError):
        create_dataloader(images(photos, max_memory_usage=BATCH), batch_size=8, num_workers=0)
    assert (
        len(
            create_dataloader(
                images(photos, max_memory_usage=BATCH),
                batch_size=8,
                num_workers=0,
                max_memory_usage=0.5,
            )
        )
        == 3
    )


def test_a_closed_loader_gives_its_bytes_back(photos: Path) -> None:
    dataset = images(photos)
    before = dataset.budget.reserved
    loader = create_dataloader(dataset, batch_size=8, num_workers=1)
    making = BATCH // 2 + (16 << 20)
    assert dataset.budget.reserved == before + 4 * BATCH + making
    loader.close()
    assert dataset.budget.reserved == before
    loader = create_dataloader(dataset, batch_size=8, num_workers=0)
    assert dataset.budget.reserved == before + 2 * BATCH + making
    del loader
    assert dataset.budget.reserved == before


# -- what can't travel


class Unpicklable(SquareDataset):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.handle = lambda: None


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("part", ["dataset", "collate_fn", "worker_init_fn"])
def test_what_cannot_be_pickled_is_named_before_a_worker_starts(start: str, part: str) -> None:
    dataset = Unpicklable() if part == "dataset" else SquareDataset()
    options = {} if part == "dataset" else {part: lambda _: None}
    with pytest.raises(ConfigError, match=f"{part}.*{start}") as refused:
        create_dataloader(dataset, num_workers=1, multiprocessing_context=start, **options)
    assert "lambda" in str(refused.value) and "num_workers=0" in str(refused.value)
    # needs no pickle
    create_dataloader(dataset, num_workers=1, multiprocessing_context="fork", **options)


class Scaled:
    """A transform that holds a large array, which pickle passes on as a buffer."""

    def __init__(self) -> None:
        self.scale = np.ones(1 << 18)

    def __call__(self, value: Any) -> Any:
        return value * self.scale[0]


def test_large_arrays_can_be_pickled() -> None:
    create_dataloader(
        SquareDataset(transform=Scaled()), num_workers=1, multiprocessing_context="spawn"
    )


def test_a_transform_that_cannot_be_pickled_is_named_too() -> None:
    with pytest.raises(ConfigError, match="dataset can't be pickled"):
        create_dataloader(
            SquareDataset(transform=lambda v: v), num_workers=1, multiprocessing_context="spawn"
        )


# -- what makes no sense together


def test_an_unknown_collator_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"collate_fn.*'pile'.*default.*list"):
        create_dataloader(SquareDataset(), collate_fn="pile", num_workers=0)


@pytest.mark.parametrize("options", [{"batch_sampler": [[0, 1]]}, {"sampler": [0, 1]}])
@pytest.mark.parametrize("mode", ["lazy", "streaming"])
def test_a_sampler_works_in_every_mode(options: dict[str, Any], mode: str) -> None:
    loader = create_dataloader(SquareDataset(loading_mode=mode), num_workers=0, **options)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1]]


def test_a_dataset_without_length_is_named() -> None:
    class Endless(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigError, match="Endless has no length"):
        create_dataloader(Endless(), num_workers=0)
    assert [
        b.tolist()
        for b in create_dataloader(Endless(), num_workers=0, sampler=[7, 5], batch_size=2)
    ] == [[7, 5]]


# -- paths


def test_a_path_takes_keywords_of_both(photos: Path) -> None:
    loader = create_dataloader(
        photos,
        batch_size=5,
        num_workers=0,
        seed=3,
        image_size=16,
        normalize=False,
        loading_mode="cached",
    )
    assert isinstance(loader.dataset, ImageDataset)
    assert (
        loader.dataset.loading_mode == "cached" and loader.dataset.seed == loader.config.seed == 3
    )
    images, targets = next(iter(loader))
    assert images.shape == (5, 3, 16, 16) and images.dtype == torch.uint8 and targets.shape == (5,)
    loader.close()
    loader.dataset.close()


def test_all_forms_of_paths_are_paths(photos: Path) -> None:
    class Home:
        def __fspath__(self) -> str:
            return str(photos)

    for path in (str(photos), photos, Home(), [str(photos)], [photos / "circle", photos / "noise"]):
        assert isinstance(
            create_dataloader(path, num_workers=0, image_size=16).dataset, ImageDataset
        )
    assert not data.is_path([]) and not data.is_path([1, 2]) and not data.is_path([photos, 1])


def test_the_budget_given_with_a_path_is_the_dataset_s_too(photos: Path) -> None:
    loader = create_dataloader(
        photos, DataLoaderConfig(max_memory_usage="77MB", seed=5), num_workers=0, image_size=16
    )
    assert loader.dataset.budget.limit == 77_000_000 and loader.dataset.seed == 5
    loader = create_dataloader(photos, num_workers=0, image_size=16, max_memory_usage="78MB")
    assert loader.dataset.budget.limit == 78_000_000


def test_a_path_with_an_unknown_word_is_refused(photos: Path) -> None:
    with pytest.raises((TypeError, ConfigError), match="batchsize"):
        create_dataloader(photos, batchsize=3)


# -- what torch sees


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
    }.items():
        monkeypatch.setenv(name, value)
    loader = create_dataloader(SquareDataset(), num_workers=0)
    assert (loader.config.rank, loader.config.world_size) == (1, 3)
    assert "torchrun" in loader.explain()
    assert isinstance(loader.sampler, DistributedSampler)
    assert (loader.sampler.rank, loader.sampler.num_replicas) == (1, 3)
    given = create_dataloader(SquareDataset(), num_workers=0, rank=0, world_size=1)
    assert (given.config.rank, given.config.world_size) == (0, 1)


def test_a_numpy_dataset_is_no_path() -> None:
    loader = create_dataloader(np.arange(6), batch_size=3, num_workers=0, shuffle=False)
    assert [b.tolist() for b in loader] == [[0, 1, 2], [3, 4, 5]]


class Ten(IterableDataset[int]):
    """It does not divide its samples among workers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_stream_of_one_s_own_comes_once(machine: Any) -> None:
    machine(16)
    loader = workers_of(Ten())
    assert torch.cat(list(loader)).tolist() == list(range(10))
    assert (
        loader.config.num_workers == 0
        and "each worker would yield all samples of an IterableDataset" in loader.explain()
    )
    assert workers_of(Ten(), num_workers=2).config.num_workers == 2


@pytest.mark.parametrize("given", [1, 0, 3.5])
def test_lengths_that_are_none(given: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=f"bucket_by_length must be True, False or one integer a sample, not {given}",
    ):
        workers_of(SquareDataset(), num_workers=0, bucket_by_length=given)
