"""Batches reach their device, whatever their structure."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headrace import move_to_device
from headrace.loader import device as device_module
from headrace.testing.contract import same
from tests.testing.test_contract import SquareDataset

Point = namedtuple("Point", "x y")


class Row(NamedTuple):
    tensor: torch.Tensor
    name: str


@dataclasses.dataclass
class Example:
    image: torch.Tensor
    name: str
    area: torch.Tensor = dataclasses.field(init=False)
    rest: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.area = self.image * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor


def devices(value: Any) -> set[str]:
    """The devices of all tensors in a structure."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if hasattr(value, "values"):
        value = list(value.values())
    return set().union(*map(devices, value)) if isinstance(value, (list, tuple)) else set()


def structures() -> list[Any]:
    t = torch.arange(6.0).reshape(2, 3)
    return [
        t,
        [t, "text", None, 3],
        (t, [t, (t,)]),
        Point(t, 2),
        Row(t, "r"),
        Example(t, "e", [t]),
        Frozen(t),
        OrderedDict(a=t, b="x"),
        UserDict({"a": t}),
        [{"deep": ({"deeper": [Point(t, (t, "s"))]},)}],
        t.to_sparse(),
    ]


def test_all_tensors_are_moved_and_all_types_kept() -> None:
    for value in structures():
        for device in ("cpu", torch.device("meta")):
            moved = move_to_device(value, device)
            assert devices(moved) == {torch.device(device).type} and type(moved) is type(value)
            assert devices(value) == {"cpu"}
        copied = move_to_device(value, "cpu")
        assert str(copied) == str(value) or value.is_sparse
    tensor = structures()[0]
    assert move_to_device(tensor, "cpu") is tensor


def test_what_is_no_tensor_stays() -> None:
    for value in ("text", None, 2.5, b"bytes", np.arange(3), {"a": ["b"]}, (), {}, range(3)):
        moved = move_to_device(value, "meta")
        assert moved is value or moved == value
    size, found = torch.Size([2, 3]), torch.arange(6.0).reshape(2, 3).max(1)
    moved = move_to_device({"size": size, "found": found}, "meta")
    assert moved["size"] == size and devices(list(moved["found"])) == {"meta"}


class Spy:
    """A tensor of the CPU that notes how it is copied."""

    device = torch.device("cpu")

    def __init__(self, pinned: bool) -> None:
        self.pinned, self.calls = pinned, list[bool]()

    def is_pinned(self) -> bool:
        return self.pinned

    def to(self, device: Any, non_blocking: bool) -> None:
        self.calls.append(non_blocking)


def test_a_copy_is_asynchronous_only_from_pinned_memory_to_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_module, "map_tensors", lambda value, function: function(value))
    for pinned in (False, True):
        for target in ("cpu", "meta", "cuda"):
            spy = Spy(pinned)
            move_to_device(spy, target)
            assert spy.calls == [pinned and target == "cuda"], target


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_s_device(make_loader: Any, workers: int) -> None:
    dataset = SquareDataset(return_index=True)
    loader = make_loader(dataset, batch_size=5, num_workers=workers, device="meta")
    assert loader.config.pin_memory is False
    batches = list(loader)
    assert len(batches) == 9
    for values, indices in batches:
        assert values.device.type == indices.device.type == "meta" and values.shape[1] == 2
    assert loader.get_stats()["transfer_time"] > 0
    assert loader.state_dict()["batches"] == 9


@pytest.mark.cuda
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches(make_loader: Any, workers: int) -> None:
    options = {"batch_size": 4, "shuffle": False}
    expected = list(make_loader(SquareDataset(), num_workers=0, pin_memory=False, **options))
    loader = make_loader(SquareDataset(), num_workers=workers, **options)
    assert loader.config.pin_memory is True
    kept = list(loader)
    assert all(batch.is_pinned() for batch in kept)
    list(loader)
    assert same(kept, expected)
    unpinned = make_loader(SquareDataset(), num_workers=workers, pin_memory=False, **options)
    assert not any(batch.is_pinned() for batch in unpinned)


@pytest.mark.cuda
def test_an_error_passes_the_pinning_thread(make_loader: Any) -> None:
    loader = make_loader(SquareDataset(bad=[5]), batch_size=4, shuffle=False, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(OSError, match="sample 5"):
        next(iterator)
    assert next(iterator)[:, 0].tolist() == [8, 9, 10, 11]
