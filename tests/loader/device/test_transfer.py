"""Batches reach their device, whatever their structure."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headrace import create_dataloader, move_to_device
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
        {"a": t, "b": {"c": t, "name": "n"}},
        [t, "text", None, 3],
        (t, [t, (t,)]),
        Point(t, 2),
        Row(t, "r"),
        Example(t, "e", [t]),
        Frozen(t),
        OrderedDict(a=t, b="x"),
        UserDict({"a": t}),
        [{"deep": ({"deeper": [Point(t, (t, "s"))]},)}],
        torch.zeros(0),
        t.to_sparse(),
    ]


@pytest.mark.parametrize("number", range(len(structures())))
@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("meta")])
def test_all_tensors_are_moved_and_all_types_kept(number: int, device: Any) -> None:
    value = structures()[number]
    moved = move_to_device(value, device)
    assert devices(moved) == {torch.device(device).type}
    assert type(moved) is type(value)
    assert devices(value) == {"cpu"}
    if device == "cpu" and not (isinstance(value, torch.Tensor) and value.is_sparse):
        assert str(moved) == str(value)


@pytest.mark.parametrize(
    "value",
    ["text", None, 3, 2.5, b"bytes", np.arange(3), {"a": ["b"]}, (), [], {}, range(3), object()],
)
def test_what_is_no_tensor_stays(value: Any) -> None:
    moved = move_to_device(value, "meta")
    assert moved is value or moved == value


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = torch.zeros(3)
    assert move_to_device(tensor, "cpu") is tensor


def test_torch_s_own_tuples_pass() -> None:
    size, found = torch.Size([2, 3]), torch.arange(6.0).reshape(2, 3).max(1)
    moved = move_to_device({"size": size, "found": found}, "meta")
    assert moved["size"] == size and devices(list(moved["found"])) == {"meta"}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(("target", "expected"), [("cpu", False), ("meta", False), ("cuda", True)])
def test_a_copy_is_asynchronous_only_from_pinned_memory_to_cuda(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, target: str, expected: bool
) -> None:
    calls = []

    class Spy:
        device = torch.device("cpu")

        def is_pinned(self) -> bool:
            return pinned

        def to(self, device: Any, non_blocking: bool) -> str:
            calls.append(non_blocking)
            return "moved"

    monkeypatch.setattr(device_module, "map_tensors", lambda value, function: function(value))
    assert move_to_device(Spy(), target) == "moved"
    assert calls == [expected and pinned]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_s_device(workers: int) -> None:
    loader = create_dataloader(
        SquareDataset(return_index=True), batch_size=5, num_workers=workers, device="meta"
    )
    assert loader.config.pin_memory is False
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 9
        for values, indices in batches:
            assert values.device.type == indices.device.type == "meta" and values.shape[1] == 2
    assert loader.get_stats()["transfer_time"] > 0
    assert (loader.epoch, loader.state_dict()["batches"]) == (1, 9)
    loader.close()


@pytest.fixture
def cuda_loader() -> Iterator[Any]:
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(
            create_dataloader(
                SquareDataset(), **{"batch_size": 4, "shuffle": False, "num_workers": 0, **options}
            )
        )
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.mark.cuda
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches(cuda_loader: Any, workers: int) -> None:
    expected = list(cuda_loader(pin_memory=False))
    loader = cuda_loader(num_workers=workers)
    assert loader.config.pin_memory is True
    kept = list(loader)
    assert all(batch.is_pinned() for batch in kept)
    list(loader)
    assert same(kept, expected)
    unpinned = cuda_loader(num_workers=workers, pin_memory=False)
    assert not any(batch.is_pinned() for batch in unpinned)


@pytest.mark.cuda
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_batches_on_a_cuda_device(cuda_loader: Any, workers: int, pin_memory: bool) -> None:
    expected = list(cuda_loader(pin_memory=False))
    for device in ("cuda", 0, torch.device("cuda", 0)):
        loader = cuda_loader(num_workers=workers, pin_memory=pin_memory, device=device)
        for _ in range(2):
            batches = []
            for batch in loader:
                assert batch.device == torch.device("cuda", 0)
                batches.append(batch)
                torch.cuda._sleep(2_000_000)  # the copies queue up behind this
            assert same([batch.cpu() for batch in batches], expected)


@pytest.mark.cuda
def test_an_error_passes_the_pinning_thread(cuda_loader: Any) -> None:
    loader = create_dataloader(SquareDataset(bad=[5]), batch_size=4, shuffle=False, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(OSError, match="sample 5"):
        next(iterator)
    assert next(iterator)[:, 0].tolist() == [8, 9, 10, 11]
    loader.close()
