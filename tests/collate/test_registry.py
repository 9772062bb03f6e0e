"""Names of collate functions."""

import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import ConfigError, TextCollator, VisionCollator, collators, list_collate, pad_collate
from headrace.collate import stack_collate
from headrace.collate.registry import Collators
from headrace.testing.contract import same
from tests.collate.tokenizers import HuggingFace
from tests.testing.test_contract import SquareDataset


@pytest.fixture
def registry() -> Collators:
    return Collators()


@pytest.fixture
def global_registry() -> Iterator[Collators]:
    """The registry of all, put back after the test."""
    before = dict(collators._entries)
    yield collators
    collators._entries.clear()
    collators._entries.update(before)


def test_what_is_there() -> None:
    entries = {entry.name: entry for entry in collators.list()}
    assert entries["default"].function is stack_collate and entries["list"].function is list_collate
    assert all(entry.description for entry in entries.values())
    assert collators.get("default") is stack_collate
    modalities = [entries[name].modality for name in ("text", "vision", "pad")]
    assert modalities == ["text", "image", None]
    made = [type(collators.get(name)) for name in ("pad", "text", "vision", "image")]
    assert made == [pad_collate, TextCollator, VisionCollator, VisionCollator]


class Times:
    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def __call__(self, samples: list[int]) -> list[int]:
        return [sample * self.factor for sample in samples]


def test_a_class_of_collate_functions_is_made_with_the_options(registry: Collators) -> None:
    registry.register("times", modality="numbers")(Times)
    # a class too, but its instances can't be called: it is a function of the samples
    registry.register("raw")(list)
    assert registry.get("times")([1, 2]) == [1, 2]
    assert registry.get("numbers", factor=3)([1, 2]) == [3, 6]
    assert registry.get("raw") is list
    with pytest.raises(ConfigError, match=r"'times': .*'faktor'"):
        registry.get("times", faktor=3)


class Proposes(SquareDataset):
    collate = "squares"


def test_loaders_and_datasets_take_names(global_registry: Collators, loader_of: Any) -> None:
    global_registry.register("count", modality="squares")(len)
    for loader in (
        loader_of(SquareDataset(), batch_size=40, collate_fn="count"),
        loader_of(SquareDataset(), batch_size=40, collate_fn="squares"),
        loader_of(Proposes(), batch_size=40),
    ):
        assert list(loader) == [40, 2]


def test_the_last_registration_counts(registry: Collators) -> None:
    registry.register("sum", modality="sound")(sum)
    registry.register("other", modality="sound")(len)
    assert registry.get("sound") is len
    assert registry.register("sum", modality="sound", description="again")(max) is max
    assert registry.get("sum") is registry.get("sound") is max
    assert [(e.name, e.description) for e in registry.list()] == [("other", ""), ("sum", "again")]
    registry.list().clear()
    registry.register("sound")(min)
    assert registry.get("sound") is min  # a name counts before a modality


def test_options_are_bound(registry: Collators) -> None:
    registry.register("sum")(sum)
    bound = registry.get("sum", start=5)
    assert isinstance(bound, functools.partial) and bound([1, 2]) == 8
    registry.register("wrapped")(lambda *args, **kwargs: sum(*args, **kwargs))
    assert registry.get("wrapped")([1, 2]) == 3


def test_bad_names_and_functions(registry: Collators) -> None:
    for name in (3, None, ""):
        with pytest.raises(ConfigError):
            registry.register(name)(max)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        registry.register("sum")(3)  # type: ignore[arg-type]
    registry.register("b", modality="sound")(min)
    registry.register("a")(max)
    for name, named in (("pile", r"'pile'.*a, b"), ("x", "sound")):
        with pytest.raises(ConfigError, match=named):
            registry.get(name)


def test_by_name_and_pickled() -> None:
    image, ids = torch.full((3, 4, 5), 7, dtype=torch.uint8), [[1], [2, 3]]
    text = {"tokenizer": HuggingFace(), "padding": "max_length", "max_length": 8}
    given: list[tuple[str, dict[str, Any], list[Any]]] = [
        ("pad", {"padding": "max_length", "max_length": 4}, ids),
        ("text", text, ["river"]),
        ("vision", {"statistics": "cifar10", "fields": "x"}, [{"x": image}]),
    ]
    for name, options, samples in given:
        made = collators.get(name, **options)
        batch = pickle.loads(pickle.dumps(made))(samples)
        assert same(batch, type(made)(**options)(samples))
        assert same(pickle.loads(pickle.dumps(batch)), batch)


def test_detection_keeps_targets_in_lists() -> None:
    image = torch.full((3, 4, 5), 7, dtype=torch.uint8)
    targets = [{"boxes": torch.ones(n, 4)} for n in (0, 2)]
    images, listed = collators.get("detection")([(image, target) for target in targets])
    assert torch.equal(torch.as_tensor(images[1]), image)
    assert [one["boxes"].shape for one in listed] == [(0, 4), (2, 4)]
