"""Options that a config refuses, and what it says then."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from headrace import ConfigError, DataLoaderConfig, Loader, create_dataloader

INDICES = list(range(10))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("batch_size", bad) for bad in (0, -1, True, "8", 2.0)],
        *[("seed", bad) for bad in ("7", None, 1.5, True)],
        *[("shuffle", bad) for bad in ("blok", "True", 2, 1.0, [True])],
        *[("num_workers", bad) for bad in (-1, "2", True, 1.0)],
        *[("prefetch_factor", bad) for bad in (0, -2, "2")],
        *[("interleave", bad) for bad in (0, "64", True)],
        *[("turns", bad) for bad in (0, -12, 1.5)],
        *[("rank", bad) for bad in (-1, "0", True)],
        *[("world_size", bad) for bad in (0, "2")],
        *[("pin_memory", bad) for bad in ("cuda", 1)],
        *[("persistent_workers", bad) for bad in ("yes", 0)],
        *[("drop_last", bad) for bad in (None, "False", 1)],
        *[("pad", bad) for bad in (None, 0)],
        *[("collate_fn", bad) for bad in (3, ["list"])],
        *[("sampler", bad) for bad in (5, True)],
        *[("batch_sampler", bad) for bad in (5, True)],
        *[("device", bad) for bad in ("gpu", "cuda:x", 1.5)],
        *[("max_memory_usage", bad) for bad in ("much", "5 apples", 0, -1, 1.5, True, [1])],
        *[("multiprocessing_context", bad) for bad in ("thread", 3)],
        *[("worker_init_fn", bad) for bad in ("init", 3)],
        *[("generator", bad) for bad in (7, "7")],
        *[("timeout", bad) for bad in (-1, "1", None, True, float("nan"))],
        *[("enable_monitoring", bad) for bad in (None, "no")],
        *[("log_loading_stats", bad) for bad in (None, 1)],
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\b{field}\b") as refused:
        DataLoaderConfig(**{field: value})
    assert isinstance(refused.value, ValueError)
    with pytest.raises(ConfigError, match=rf"\b{field}\b"):
        create_dataloader(INDICES, **{"num_workers": 0, field: value})


@pytest.mark.parametrize("shuffle", [True, "block"])
@pytest.mark.parametrize("field", ["sampler", "batch_sampler"])
def test_shuffle_and_a_sampler_exclude_each_other(shuffle: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=r"shuffle.*sampler"):
        DataLoaderConfig(shuffle=shuffle, **{field: [[0]]})
    assert DataLoaderConfig(shuffle=False, **{field: [[0]]}).shuffle is False


def test_two_samplers_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="sampler and batch_sampler"):
        DataLoaderConfig(sampler=[0], batch_sampler=[[0]])


def test_drop_last_has_no_meaning_with_a_batch_sampler() -> None:
    with pytest.raises(ConfigError, match=r"drop_last.*batch_sampler"):
        DataLoaderConfig(drop_last=True, batch_sampler=[[0]])


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2), (2, 2), (5, 3)])
def test_a_rank_outside_of_its_world_is_refused(rank: Any, world_size: Any) -> None:
    with pytest.raises(ConfigError, match="rank"):
        create_dataloader(INDICES, num_workers=0, rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("is_train", "train()"),
        ("generator_seed", "seed"),
        ("custom_sampler", "sampler"),
        ("pin_memory_device", "device"),
        ("memory_efficient", "loading_mode='cached'"),
        ("num_replicas", "world_size"),
        ("is_training", "train()"),
        ("custom_batch_sampler", "batch_sampler"),
        ("non_blocking", "device"),
        ("rng", "seed"),
        ("weighted_sampler", "weights"),
        ("iterations_per_epoch", "num_samples"),
        ("data_collator", "collate_fn"),
        ("task_spec", "collate_fn"),
        ("required_memory", "max_memory_usage"),
    ],
)
def test_an_old_word_gets_the_new_one(word: str, instead: str) -> None:
    for make in (
        lambda **words: DataLoaderConfig(**words),
        lambda **words: DataLoaderConfig().with_(**words),
        lambda **words: DataLoaderConfig.train(**words),
        lambda **words: DataLoaderConfig.eval(**words),
        lambda **words: create_dataloader(INDICES, **words),
        lambda **words: Loader(INDICES, **words),
        lambda **words: create_dataloader("there/is/nothing/here", **words),
    ):
        with pytest.raises(ConfigError) as refused:
            make(**{word: True})
        assert word in str(refused.value) and instead in str(refused.value)


def test_an_unknown_word_gets_the_nearest_field() -> None:
    for make in (
        DataLoaderConfig,
        DataLoaderConfig.train,
        lambda **words: create_dataloader(INDICES, **words),
    ):
        with pytest.raises(ConfigError, match="batchsize") as refused:
            make(batchsize=3)
        assert str(refused.value).endswith("has no 'batchsize': did you mean batch_size?")
        with pytest.raises(
            ConfigError, match=r"has no 'xyz': it has balanced, batch_sampler, .*world_size"
        ):
            make(xyz=3)


def test_good_values_pass() -> None:
    generator = torch.Generator()
    config = DataLoaderConfig(
        batch_size=None,
        shuffle="block",
        num_workers=0,
        seed=-(2**70),
        interleave=1,
        turns=1,
        rank=0,
        world_size=1,
        device="cpu",
        max_memory_usage="1.5GiB",
        multiprocessing_context="spawn",
        generator=generator,
        timeout=0.5,
        collate_fn="list",
    )
    assert config.generator is generator and config.seed == -(2**70)
    assert DataLoaderConfig(device=torch.device("meta")).device == torch.device("meta")
    assert (
        DataLoaderConfig(device="cpu", memory_format=torch.channels_last).memory_format
        is torch.channels_last
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"device": "cpu", "memory_format": "channels_last"},
            "memory_format must be torch.channels_last, torch.contiguous_format or None",
        ),
        (
            {"device": "cpu", "memory_format": torch.channels_last_3d},
            "memory_format must be torch.channels_last, torch.contiguous_format",
        ),
        (
            {"memory_format": torch.channels_last},
            "has a meaning with device= only.*images.to\\(memory_format=torch.channels_last\\)",
        ),
    ],
)
def test_memory_formats(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataLoaderConfig(**options)
    assert DataLoaderConfig(max_memory_usage=0.5).max_memory_usage == 0.5


def test_train_and_eval() -> None:
    train, evaluation = DataLoaderConfig.train(batch_size=8), DataLoaderConfig.eval(batch_size=8)
    assert (train.shuffle, train.drop_last, train.pad, train.batch_size) == (True, True, True, 8)
    assert (evaluation.shuffle, evaluation.drop_last, evaluation.pad, evaluation.batch_size) == (
        False,
        False,
        False,
        8,
    )
    assert DataLoaderConfig.train(shuffle="block", drop_last=False).shuffle == "block"
    assert DataLoaderConfig.eval(pad=True).pad is True


def test_train_with_a_sampler_needs_no_shuffle() -> None:
    assert DataLoaderConfig.train(sampler=[0, 1]).shuffle in (None, False)
    assert DataLoaderConfig.train(batch_sampler=[[0, 1]]).drop_last is False


def test_integers_of_numpy_are_integers() -> None:
    config = DataLoaderConfig(batch_size=np.int64(4), seed=np.uint8(3))
    assert (config.batch_size, config.seed) == (4, 3) and type(config.batch_size) is type(
        config.seed
    ) is int


def test_it_is_frozen() -> None:
    config = DataLoaderConfig()
    for change in (lambda: setattr(config, "batch_size", 3), lambda: delattr(config, "batch_size")):
        with pytest.raises(
            dataclasses.FrozenInstanceError, match=r"config.with_\(batch_size=...\)"
        ):
            change()
    changed = config.with_(batch_size=3)
    assert (changed.batch_size, config.batch_size) == (3, 32)


def test_overrides_win_over_the_config() -> None:
    config = DataLoaderConfig(batch_size=4, seed=7, num_workers=0, drop_last=True)
    loader = create_dataloader(INDICES, config, batch_size=5, drop_last=False)
    assert (loader.config.batch_size, loader.config.seed, loader.config.drop_last) == (5, 7, False)
    assert loader.batch_size == 5
    assert config.batch_size == 4


def test_none_as_an_override_is_an_override() -> None:
    loader = create_dataloader(
        INDICES, DataLoaderConfig(batch_size=4, num_workers=0), batch_size=None
    )
    assert loader.batch_size is None and len(loader) == 10
