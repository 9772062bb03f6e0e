"""Torch's private APIs: what is there is found, and what is missing has a public substitute."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headrace import HeadraceWarning, WorkerError, create_dataloader
from headrace.loader import torch_private
from headrace.testing.contract import same
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.filterwarnings("ignore:torch .* lacks")


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
    without = SimpleNamespace(distributed_c10d=object())
    assert torch_private.default_store(without) is None


def test_what_is_missing_is_named_with_the_versions_tried(lacking: None) -> None:
    with pytest.warns(HeadraceWarning, match=r"_gone, .* 2\."):
        assert not torch_private.has_worker_internals()


@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_by_public_apis_alone(lacking: None, persistent: bool) -> None:
    twin = create_dataloader(SquareDataset(), batch_size=4, num_workers=0)
    with create_dataloader(
        SquareDataset(), batch_size=4, num_workers=2, persistent_workers=persistent
    ) as loader:
        for _ in range(2):
            assert same(list(loader), list(twin))
        next(iter(loader))
        state = loader.state_dict()
        loader.close()
        loader.load_state_dict(state)
        twin.load_state_dict(state)
        assert same(list(loader), list(twin))


def test_a_death_by_public_apis_alone(lacking: None) -> None:
    with create_dataloader(
        SquareDataset(), batch_size=1, num_workers=1, prefetch_factor=1
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        os.kill(*loader._pids, signal.SIGKILL)
        with pytest.raises(WorkerError, match="epoch 0"):
            list(iterator)
        assert len(list(loader)) == len(SquareDataset()), "the next iterator has new workers"


def test_a_death_that_torch_tells_elsewhere(lacking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's handler of SIGCHLD raises between any two instructions, as here after a batch has
    come.
    """

    def killed(pids: object) -> None:
        raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed.")

    with create_dataloader(SquareDataset(), batch_size=1, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)  # after which memory is counted
        with monkeypatch.context() as patch, pytest.raises(WorkerError, match="epoch 0"):
            patch.setattr(loader._stats, "look", killed)
            next(iterator)
        assert list(iterator) == [], "the epoch has ended"
        assert len(list(loader)) == len(SquareDataset())


def test_a_worker_takes_its_dataset_as_this_torch_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plain(kind: int, dataset: object) -> None: ...

    def held(kind: int, dataset_holder: object) -> None: ...

    for loop, given in ((plain, "data"), (held, ["data"])):
        monkeypatch.setattr(torch_private, "worker_loop", loop)
        assert torch_private.worker_dataset("data") == given
