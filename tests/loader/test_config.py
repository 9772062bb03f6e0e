"""Options that a config refuses, the values that a loader chooses, and what it says before the
first worker starts.
"""

import dataclasses
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from headrace import (
    BudgetError,
    ConfigError,
    DataLoaderConfig,
    HeadraceWarning,
    ImageDataset,
    Loader,
    create_dataloader,
)
from headrace.loader.config import is_path
from headrace.memory import limits
from headrace.memory.limits import Cores
from headrace.order import World
from tests.loader.datasets import Stream
from tests.testing.test_contract import SquareDataset

INDICES = list(range(10))


def test_a_bad_value_names_its_field() -> None:
    for field, values in {
        "batch_size": (0, -1, True, "8", 2.0),
        "seed": ("7", None, 1.5, True),
        "shuffle": ("blok", "True", 2, 1.0, [True]),
        "num_workers": (-1, "2", True, 1.0),
        "prefetch_factor": (0, -2, "2"),
        "interleave": (0, "64", True),
        "turns": (0, -12, 1.5),
        "rank": (-1, "0", True),
        "world_size": (0, "2"),
        "pin_memory": ("cuda", 1),
        "persistent_workers": ("yes", 0),
        "drop_last": (None, "False", 1),
        "pad": (None, 0),
        "collate_fn": (3, ["list"]),
        "sampler": (5, True),
        "batch_sampler": (5, True),
        "device": ("gpu", "cuda:x", 1.5),
        "memory_format": ("channels_last", torch.channels_last_3d),
        "max_memory_usage": ("much", "5 apples", 0, -1, 1.5, True, [1]),
        "multiprocessing_context": ("thread", 3),
        "worker_init_fn": ("init", 3),
        "generator": (7, "7"),
        "timeout": (-1, "1", None, True, float("nan")),
        "enable_monitoring": (None, "no"),
        "log_loading_stats": (None, 1),
    }.items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"\b{field}\b"):
                DataLoaderConfig(**{field: value})
            with pytest.raises(ValueError, match=rf"\b{field}\b"):
                create_dataloader(INDICES, **{"num_workers": 0, field: value})


def test_options_that_exclude_each_other() -> None:
    for options in (
        {"shuffle": True, "sampler": [[0]]},
        {"shuffle": "block", "batch_sampler": [[0]]},
        {"sampler": [0], "batch_sampler": [[0]]},
        {"drop_last": True, "batch_sampler": [[0]]},
        {"memory_format": torch.channels_last},
        {"weights": [1], "balanced": True},
        {"weights": [1], "sampler": [0]},
        {"weights": [1], "shuffle": True},
        {"balanced": True, "shuffle": "block"},
        {"sampler": [0], "num_samples": 3},
        {"batch_sampler": [[0]], "num_samples": 3},
        {"replacement": False},
        {"bucket_by_length": True, "weights": [1]},
        {"bucket_by_length": True, "shuffle": False},
        {"bucket_by_length": True, "shuffle": "block"},
        {"bucket_by_length": [3], "num_samples": 2},
        {"num_samples": 0},
        {"num_samples": 2.0},
        {"balanced": "yes"},
        {"replacement": None},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            DataLoaderConfig(**options)
    assert DataLoaderConfig(shuffle=False, sampler=[0]).shuffle is False


def test_a_rank_outside_of_its_world_is_refused() -> None:
    for rank, world_size in ((0, None), (None, 2), (2, 2), (5, 3)):
        with pytest.raises(ConfigError, match="rank"):
            create_dataloader(INDICES, num_workers=0, rank=rank, world_size=world_size)


def test_integers_of_numpy_are_plain_ones() -> None:
    integers = DataLoaderConfig(batch_size=np.int64(4), seed=np.uint8(3))
    for value, expected in ((integers.batch_size, 4), (integers.seed, 3)):
        assert value == expected and type(value) is int


def test_train_and_eval() -> None:
    train, evaluation = DataLoaderConfig.train(batch_size=8), DataLoaderConfig.eval(batch_size=8)
    for config, expected in ((train, True), (evaluation, False)):
        assert (config.shuffle, config.drop_last, config.pad) == (expected,) * 3
        assert config.batch_size == 8
    assert DataLoaderConfig.train(shuffle="block", drop_last=False).shuffle == "block"
    assert DataLoaderConfig.eval(pad=True).pad is True
    assert DataLoaderConfig.train(sampler=[0, 1]).shuffle in (None, False)
    assert DataLoaderConfig.train(batch_sampler=[[0, 1]]).drop_last is False


def test_it_is_frozen() -> None:
    config = DataLoaderConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch_size = 3  # type: ignore[misc]
    changed = config.with_(batch_size=3)
    assert (changed.batch_size, config.batch_size) == (3, 32)


def test_overrides_win_over_the_config() -> None:
    config = DataLoaderConfig(batch_size=4, seed=7, num_workers=0, drop_last=True)
    for batch_size in (5, None):
        loader = create_dataloader(INDICES, config, batch_size=batch_size, drop_last=False)
        assert loader.batch_size == loader.config.batch_size == batch_size
        assert (loader.config.seed, loader.config.drop_last) == (7, False)
    assert config.batch_size == 4


# -- what is chosen

PLENTY, SCARCE = 64 << 30, 3 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the cores, the free memory and the number of local ranks that the builder sees."""

    def set_up(cores: int, available: int = PLENTY, ranks: int = 1) -> None:
        class Budget:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.available = available

        world = World(0, ranks, 0, ranks, "a test")
        monkeypatch.setattr("headrace.loader.config.cores", lambda: Cores(cores))
        monkeypatch.setattr("headrace.loader.config.MemoryBudget", Budget)
        monkeypatch.setattr("headrace.loader.loader.detect_world", lambda *_: world)

    return set_up


def workers_of(dataset: Any, **options: Any) -> Loader:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return create_dataloader(dataset, batch_size=4, **options)


class NotForkSafe(SquareDataset):
    fork_safe = False


# -- number of workers


def test_workers_follow_a_quota_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(limits, "cpu_quota", lambda *_: Cores(4, "cgroup v2 /pod cpu.max"))
    loader = workers_of(SquareDataset())
    assert loader.num_workers <= 3
    assert "4 usable cores (cgroup v2 /pod cpu.max)" in loader.explain()


def test_the_number_of_workers_follows_cores_and_ranks(machine: Any) -> None:
    for cores, ranks, expected in (
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 3),
        (11, 1, 8),
        (64, 1, 8),
        (16, 4, 3),
        (2, 8, 1),
        (64, 8, 6),
    ):
        machine(cores, ranks=ranks)
        loader = workers_of(SquareDataset())
        assert loader.config.num_workers == loader.num_workers == expected, (cores, ranks)
        assert f"{cores} usable cores" in loader.explain()
        assert f"{ranks} local ranks" in loader.explain()
    for cores, expected in ((64, 2), (2, 1)):
        machine(cores, SCARCE)
        loader = workers_of(SquareDataset())
        assert loader.num_workers == expected
        assert ("less than 4.3 GB" in loader.explain()) == (cores == 64)


def test_what_is_in_memory_needs_no_workers(machine: Any) -> None:
    machine(64)
    with SquareDataset(loading_mode="eager", progress=False) as eager:
        for dataset in (TensorDataset(torch.zeros(9)), eager, eager.subset(range(9))):
            loader = workers_of(dataset)
            assert loader.num_workers == 0
            assert "in memory" in loader.explain()
    with SquareDataset(loading_mode="cached") as cached:
        assert workers_of(cached).num_workers == 8


class Blocks(SquareDataset):
    def blocks(self) -> Any:
        return np.ones(256, np.int64)  # 8 lanes a turn, 24 turns


def test_with_blocks_the_number_of_workers_divides_the_turns(machine: Any) -> None:
    for cores, turns, expected in ((64, 12, 6), (7, 12, 4), (64, 8, 8), (64, 7, 7), (64, 1, 1)):
        machine(cores)
        loader = workers_of(SquareDataset(), shuffle="block", turns=turns)
        assert loader.num_workers == expected, (cores, turns)
        # a full shuffle has no turns
        assert workers_of(SquareDataset(), turns=turns).num_workers == min(8, int(0.75 * cores))
    assert workers_of(Blocks().subset(np.arange(256) % 32), shuffle="block").num_workers == 8
    assert workers_of(SquareDataset(), shuffle="block", num_workers=5).num_workers == 5, "given"


def test_a_stream_of_one_s_own_comes_once(machine: Any) -> None:
    machine(16)
    loader = workers_of(Stream(10))
    assert torch.cat(list(loader)).tolist() == list(range(10))
    assert loader.config.num_workers == 0 and "each worker would" in loader.explain()
    assert workers_of(Stream(10), num_workers=2).config.num_workers == 2


# -- the other values


def test_worker_options_without_workers_warn() -> None:
    for option, value in (
        ("prefetch_factor", 4),
        ("persistent_workers", True),
        ("timeout", 3.0),
        ("multiprocessing_context", "spawn"),
    ):
        for make in (create_dataloader, Loader):
            with pytest.warns(HeadraceWarning, match=option) as warned:
                loader = make(SquareDataset(), num_workers=0, **{option: value})
            assert [w.filename for w in warned] == [__file__], "the user's line"
            assert not getattr(loader.config, option)
        assert len(list(loader)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        create_dataloader(SquareDataset(), num_workers=0, pin_memory=False, **options)
        create_dataloader(SquareDataset(), num_workers=1)


def test_memory_is_pinned_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(HeadraceWarning, match="pin_memory=True") as warned:
        loader = create_dataloader(SquareDataset(), num_workers=0, pin_memory=True)
    assert [w.filename for w in warned] == [__file__]
    assert loader.config.pin_memory is False and loader.pin_memory is False
    assert create_dataloader(SquareDataset(), num_workers=0).config.pin_memory is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, expected in ((None, True), ("cuda:1", True), ("cpu", False), ("meta", False)):
        loader = create_dataloader(SquareDataset(), num_workers=0, device=device)
        assert loader.config.pin_memory is expected, device


class Kilobytes:
    def __call__(self, value: Any) -> torch.Tensor:
        return torch.zeros(10_000, dtype=torch.uint8)


def test_pinned_batches_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slot's batch lies in a pinned buffer too, and torch rounds those up to a power of
    two.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    dataset = SquareDataset(transform=Kilobytes(), max_memory_usage="20MB")
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4, "device": "meta"}
    batch = 37 * 10_000
    for pin_memory, pinned in ((False, 0), (True, 1 << 19)):
        loader = create_dataloader(dataset, batch_size=37, pin_memory=pin_memory, **options)
        loader._memory.reserve_measured(loader.config, batch)
        making = 20_000_000 // 20 + batch * 3 // 2
        assert dataset.budget.reserved == (2 * 4 + 2) * (batch + pinned) + 2 * making
        loader.close()


def test_the_start_method() -> None:
    def method(dataset: Any, **options: Any) -> str:
        loader = create_dataloader(dataset, num_workers=1, **options)
        return loader.multiprocessing_context.get_start_method()

    assert method(SquareDataset()) == "fork"
    for dataset in (
        NotForkSafe(),
        Subset(NotForkSafe(), [0]),
        ConcatDataset([SquareDataset(), NotForkSafe()]),
    ):
        assert method(dataset) == "forkserver"
    assert method(NotForkSafe(), multiprocessing_context="fork") == "fork"
    spawn = multiprocessing.get_context("spawn")
    assert method(SquareDataset(), multiprocessing_context=spawn) == "spawn"
    assert "fork_safe = False" in create_dataloader(NotForkSafe(), num_workers=1).explain()


def test_the_default_order() -> None:
    lazy, streaming = SquareDataset(), SquareDataset(loading_mode="streaming")
    for dataset, options, expected in (
        (lazy, {}, True),
        (streaming, {}, "block"),
        (streaming, {"shuffle": False}, False),
        (streaming, {"shuffle": True}, True),
        (lazy, {"sampler": [3, 1]}, False),
        (lazy, {"batch_sampler": [[3, 1]]}, False),
        (TensorDataset(torch.zeros(3)), {}, True),
    ):
        loader = create_dataloader(dataset, num_workers=0, **options)
        assert loader.config.shuffle == expected, options
    for options in ({"sampler": [3, 1]}, {"batch_sampler": [[3, 1]]}):
        for dataset in (lazy, streaming):
            loader = create_dataloader(dataset, num_workers=0, **options)
            assert [batch[:, 0].tolist() for batch in loader] == [[3, 1]]


# -- the budget


def images(photos: Path, **options: Any) -> ImageDataset:
    return ImageDataset(photos, image_size=64, normalize=False, **options)


BATCH = 8 * (3 * 64 * 64 + 8)  # bytes of a batch of 8 such images and their targets


def room_for(workers: int, prefetch: int) -> int:
    """A budget that such batches fill: slots, and half a batch beside them (and 5 % of the
    budget) in each process.
    """
    making = max(1, workers)
    slots = workers * prefetch + 2
    return int((BATCH * slots + making * BATCH * 0.5) / (1 - making / 20)) + 9


def test_workers_and_prefetch_are_lowered_to_fit(photos: Path) -> None:
    for asked, budget, expected in (
        ((2, 2), room_for(2, 2), (2, 2)),
        ((2, 4), room_for(2, 3) - BATCH, (2, 2)),
        ((2, 2), room_for(1, 1), (1, 1)),
        ((2, 2), room_for(0, 1), (0, None)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HeadraceWarning)
            loader = create_dataloader(
                images(photos),
                batch_size=8,
                num_workers=asked[0],
                prefetch_factor=asked[1],
                max_memory_usage=budget,
            )
        warned = [w for w in caught if w.category is HeadraceWarning]
        assert [w.filename for w in warned] == [__file__] * (asked != expected), expected
        assert (loader.num_workers, loader.prefetch_factor) == expected
        assert ("lowered" in loader.explain()) == (asked != expected)
        assert loader.persistent_workers == (expected[0] > 0)
        loader.close()
    assert len(list(loader)) == 3


def test_a_batch_above_the_budget_is_refused_with_the_numbers(photos: Path) -> None:
    options: dict[str, Any] = {"batch_size": 8, "num_workers": 0}
    with pytest.raises(BudgetError, match=r"batch of 8.*98\.4 kB"):
        create_dataloader(images(photos), max_memory_usage=BATCH, **options)
    with pytest.raises(BudgetError):
        create_dataloader(images(photos, max_memory_usage=BATCH), **options)
    small = images(photos, max_memory_usage=BATCH)
    assert len(create_dataloader(small, max_memory_usage=0.5, **options)) == 3


# -- what can't travel


class Unpicklable(SquareDataset):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.handle = lambda: None


def test_what_cannot_be_pickled_is_named_before_a_worker_starts() -> None:
    for dataset, options, part in (
        (Unpicklable(), {}, "dataset"),
        (SquareDataset(transform=lambda value: value), {}, "dataset"),
        (SquareDataset(), {"collate_fn": lambda _: None}, "collate_fn"),
        (SquareDataset(), {"worker_init_fn": lambda _: None}, "worker_init_fn"),
    ):
        for start in ("spawn", "forkserver"):
            options = {**options, "num_workers": 1, "multiprocessing_context": start}
            with pytest.raises(ConfigError, match=f"{part}.*{start}") as refused:
                create_dataloader(dataset, **options)
            assert "lambda" in str(refused.value) and "num_workers=0" in str(refused.value)
        # needs no pickle
        create_dataloader(dataset, **{**options, "multiprocessing_context": "fork"})


class Scaled:
    """A transform that holds a large array, which pickle passes on as a buffer."""

    def __init__(self) -> None:
        self.scale = np.ones(1 << 18)

    def __call__(self, value: Any) -> Any:
        return value * self.scale[0]


class Shared(Dataset[int]):
    """Holds what multiprocessing shares with processes that it starts."""

    def __init__(self, context: Any) -> None:
        self.value, self.queue = context.Value("i", 7), context.Queue()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.value.value)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_shared_values_travel_to_workers(make_loader: Any, start: str) -> None:
    options = {"num_workers": 1, "multiprocessing_context": start}
    loader = make_loader(Shared(multiprocessing.get_context(start)), **options)
    assert next(iter(loader)).tolist() == [7] * 4
    with pytest.raises(ConfigError, match=r"made for forked processes.*get_context"):
        make_loader(Shared(multiprocessing.get_context("fork")), **options)


def test_large_arrays_can_be_pickled() -> None:
    dataset = SquareDataset(transform=Scaled())
    create_dataloader(dataset, num_workers=1, multiprocessing_context="spawn")


def test_an_unknown_collator_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"collate_fn.*'pile'.*default.*list"):
        create_dataloader(SquareDataset(), collate_fn="pile", num_workers=0)


# -- paths


def test_a_path_takes_keywords_of_both(photos: Path) -> None:
    options: dict[str, Any] = {"image_size": 16, "normalize": False, "loading_mode": "cached"}
    loader = create_dataloader(photos, batch_size=5, num_workers=0, seed=3, **options)
    assert isinstance(loader.dataset, ImageDataset) and loader.dataset.loading_mode == "cached"
    assert loader.dataset.seed == loader.config.seed == 3
    images, targets = next(iter(loader))
    assert images.shape == (5, 3, 16, 16) and images.dtype == torch.uint8 and targets.shape == (5,)
    loader.close()
    loader.dataset.close()
    config = DataLoaderConfig(max_memory_usage="77MB", seed=5)
    loader = create_dataloader(photos, config, num_workers=0, image_size=16)
    assert loader.dataset.budget.limit == 77_000_000 and loader.dataset.seed == 5


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_all_forms_of_paths_are_paths(photos: Path) -> None:
    several = [photos / "circle", photos / "noise"]
    for path in (str(photos), photos, Home(photos), [str(photos)], several):
        loader = create_dataloader(path, num_workers=0, image_size=16)
        assert isinstance(loader.dataset, ImageDataset)
    assert not any(is_path(other) for other in ([], [1, 2], [photos, 1]))
    loader = create_dataloader(np.arange(6), batch_size=3, num_workers=0, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
