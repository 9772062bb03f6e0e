"""Torch's private APIs: what is there is found, and what is missing has a public substitute."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import HeadraceWarning, WorkerError, create_dataloader
from headrace.loader import torch_private
from headrace.testing.contract import same
from tests.testing.test_contract import SquareDataset


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch without one of the methods."""
    torch_private.has_worker_internals.cache_clear()
    monkeypatch.setattr(torch_private, "_METHODS", ("_next_data", "_gone"))
    yield
    torch_private.has_worker_internals.cache_clear()


def test_this_torch_has_all() -> None:
    torch_private.has_worker_internals.cache_clear()
    assert torch_private.has_worker_internals()
    assert torch_private.default_store(SimpleNamespace(distributed_c10d=object())) is None, (
        "a torch without it"
    )


def test_what_is_missing_is_named_with_the_versions_tried(lacking: None) -> None:
    with pytest.warns(HeadraceWarning, match=r"lacks _gone, .*tried with torch 2\."):
        assert not torch_private.has_worker_internals()


@pytest.mark.quick_every(2)
@pytest.mark.filterwarnings("ignore:torch .* lacks")
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_by_public_apis_alone(lacking: None, persistent: bool) -> None:
    loader = create_dataloader(
        SquareDataset(), batch_size=4, num_workers=2, persistent_workers=persistent
    )
    twin = create_dataloader(SquareDataset(), batch_size=4, num_workers=0)
    for _ in range(2):
        assert same(list(loader), list(twin))
    iterator = iter(loader)
    next(iterator)
    del iterator
    state = loader.state_dict()
    loader.close()
    twin.load_state_dict(state)
    with create_dataloader(SquareDataset(), batch_size=4, num_workers=2) as resumed:
        resumed.load_state_dict(state)
        assert same(list(resumed), list(twin))


@pytest.mark.filterwarnings("ignore:torch .* lacks")
def test_a_death_by_public_apis_alone(lacking: None) -> None:
    with create_dataloader(
        SquareDataset(), batch_size=1, num_workers=1, prefetch_factor=1
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        os.kill(*loader._pids, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"a worker died in epoch 0"):
            list(iterator)
        assert len(list(loader)) == len(SquareDataset()), "the next iterator has new workers"


@pytest.mark.filterwarnings("ignore:torch .* lacks")
def test_a_death_that_torch_tells_elsewhere(lacking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's handler of SIGCHLD raises between any two instructions, as here after a batch has
    come.
    """

    def killed(pids: object) -> None:
        raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed.")

    with create_dataloader(SquareDataset(), batch_size=1, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)  # after which memory is counted
        with (
            monkeypatch.context() as patch,
            pytest.raises(WorkerError, match=r"a worker died in epoch 0"),
        ):
            patch.setattr(loader._stats, "look", killed)
            next(iterator)
        assert list(iterator) == [], "the epoch has ended"
        assert len(list(loader)) == len(SquareDataset())


@pytest.mark.parametrize(
    ("loop", "given"),
    [(lambda kind, dataset: None, "data"), (lambda kind, dataset_holder: None, ["data"])],
)
def test_a_worker_takes_its_dataset_as_this_torch_gives_it(
    monkeypatch: pytest.MonkeyPatch, loop: Any, given: Any
) -> None:
    monkeypatch.setattr(torch_private, "worker_loop", loop)
    assert torch_private.worker_dataset("data") == given
