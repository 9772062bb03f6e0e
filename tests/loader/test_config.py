"""Options that a config refuses, and what it says then."""

import dataclasses

import numpy as np
import pytest
import torch

from headrace import ConfigError, DataLoaderConfig, create_dataloader

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
