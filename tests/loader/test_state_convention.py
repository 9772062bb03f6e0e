"""A loader's state means what torchdata's StatefulDataLoader means by it.

What that does was found out by running it (torchdata 0.11), with map-style and iterable datasets, 0
and 2 workers, persistent or not. It is the same here at each moment: before the first batch, after
some while workers are ahead, after the last one and after StopIteration; loaded twice, into a
loader that has run, and while an iterator is under way. docs/moving.md lists the differences.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from headrace import HeadraceWarning, StateError

N, BATCH = 20, 3


def me() -> tuple[int, int]:
    """The number of this worker, and of all."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Plain(Dataset[Any]):
    """A map-style dataset without a state."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return index, random.random()


class Counting(Plain):
    """A map-style dataset that counts the samples that it gave, process by process."""

    def __init__(self) -> None:
        self.given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return index, me()[0], self.given

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "worker": me()[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["worker"] == me()[0], "the state of another worker"
        self.given = state["given"]


class Steps:
    """An iterator over a worker's share, with a state; it counts what it really made."""

    def __init__(self) -> None:
        self.at, self.made = 0, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        worker, workers = me()
        number = self.at * workers + worker
        if number >= N:
            raise StopIteration
        self.at, self.made = self.at + 1, self.made + 1
        return number, random.random(), float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "worker": me()[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["worker"] == me()[0], "the state of another worker"
        self.at = state["at"]


class Stream(IterableDataset[Any]):
    """Without a state; with random numbers of its own, too."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        return ((*item, np.random.rand(), self.generator.random()) for item in Steps())


class StatefulIterator(IterableDataset[Any]):
    """The iterator has the state."""

    def __iter__(self) -> Iterator[Any]:
        return Steps()


class StatefulStream(IterableDataset[Any]):
    """The dataset has the state; its iterator is a generator."""

    def __init__(self) -> None:
        self.start = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        steps = Steps()
        steps.at, self.start = self.start, 0
        for item in steps:
            self.at = steps.at
            yield item

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.at = state["at"]


class Forgetting(Steps, IterableDataset[Any]):
    """It is its own iterator, and each `iter` begins at the beginning."""

    def __iter__(self) -> Any:
        self.at = 0
        return self


class Keeping(Forgetting):
    """It is its own iterator, and the first `iter` after a state was loaded keeps it."""

    has_loaded = False

    def __iter__(self) -> Any:
        if not self.has_loaded:
            self.at = 0
        self.has_loaded = False
        return self

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.has_loaded = True


class Both(IterableDataset[Any]):
    """Dataset and iterator have states: the dataset's is the number of all samples given."""

    given = 0

    def __iter__(self) -> Any:
        return CountedSteps(self)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class CountedSteps(Steps):
    def __init__(self, dataset: Both) -> None:
        super().__init__()
        self.dataset = dataset

    def __next__(self) -> Any:
        sample = super().__next__()
        self.dataset.given += 1
        return (*sample, self.dataset.given)


class Share(IterableDataset[Any]):
    """It is its own iterator, makes its position in ``iter``, and can't load one before."""

    epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        self.position = {"at": me()[0]}
        return self

    def __next__(self) -> Any:
        number = self.position["at"]
        if number >= N:
            raise StopIteration
        self.position["at"] += me()[1]
        return number, self.epochs, random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"position": dict(self.position), "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position.update(state["position"])
        self.epochs = state["epochs"]


class Epochs(IterableDataset[Any]):
    """Its iterator is a generator, which counts epochs at its end; the dataset has both counts."""

    def __init__(self) -> None:
        self.at = self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(me()[0] + self.at * me()[1], N, me()[1]):
            self.at += 1
            yield number, self.epochs, random.random()
        self.at = 0
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epochs = state["at"], state["epochs"]


class Own(StatefulStream):
    """It is its own iterator, and never begins anew."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at >= N:
            raise StopIteration
        self.at += 1
        return self.at


HOW: dict[str, dict[str, Any]] = {
    "alone": {"num_workers": 0},
    "lasting": {"num_workers": 2},
    "fresh": {"num_workers": 2, "persistent_workers": False},
}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def loader_of(loader_of: Any) -> Any:
    return functools.partial(
        loader_of, batch_size=BATCH, collate_fn="list", enable_monitoring=False
    )


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


def states_of(loader: Any) -> Iterator[tuple[int, int, Any]]:
    """Epoch, number of batches and state at each moment of two epochs; the last one of each,
    after StopIteration, has a batch too many.
    """
    for epoch in range(2):
        iterator = iter(loader)
        yield epoch, 0, copied(loader.state_dict())
        for batches in itertools.count(1):
            end = next(iterator, None) is None
            yield epoch, batches, copied(loader.state_dict())
            if end:
                break


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((make, "alone") for make in (Plain, Stream, StatefulStream, Both, Share, Epochs)),
        *(slow(make, "alone") for make in (Counting, StatefulIterator, Forgetting, Keeping)),
        (StatefulIterator, "lasting"),
        *(slow(make, "lasting") for make in (Plain, Stream, StatefulStream, Share, Counting)),
        *(slow(make, "lasting") for make in (Forgetting, Keeping, Both, Epochs)),
        *(slow(make, "fresh") for make in (Plain, StatefulIterator, StatefulStream, Keeping)),
    ],
)
def test_a_state_of_any_moment_is_gone_on_with(loader_of: Any, make: Any, how: str) -> None:
    """20 samples in batches of 3: two workers end at different steps."""
    whole, loader = (loader_of(make(), **HOW[how]) for _ in range(2))
    epochs = [list(whole) for _ in range(4)]
    other_seed = list(loader_of(make(), seed=6, **HOW[how]))
    samples = [sample for epoch in [*epochs, other_seed] for batch in epoch for sample in batch]
    drawn = [value for sample in samples for value in sample if isinstance(value, float)]
    assert len(set(drawn)) == len(drawn), "random numbers come again"
    last = len(epochs[0])
    for epoch, batches, state in states_of(loader):
        if how != "alone" and (epoch, batches) not in [
            (0, 1),
            (0, last - 1),
            (0, last + 1),
            (1, 0),
            (1, 2),
            (1, last),
        ]:
            continue
        other = loader_of(make(), **HOW[how])
        other.load_state_dict(state)
        assert other.state_dict() == state
        moment = f"epoch {epoch}, batch {batches}"
        if batches <= last:
            assert list(other) == epochs[epoch][batches:], moment
        assert [list(other), list(other)] == epochs[epoch + 1 : epoch + 3], moment
        other.close()


BOTH_KINDS = pytest.mark.parametrize(
    ("make", "how"),
    [(Plain, "alone"), (StatefulIterator, "lasting"), slow(StatefulIterator, "fresh")],
)


@BOTH_KINDS
def test_loading_counts_for_the_next_iterator(loader_of: Any, make: Any, how: str) -> None:
    whole, loader, other = (loader_of(make(), **HOW[how]) for _ in range(3))
    epochs = [list(whole) for _ in range(2)]
    states = [state for _, _, state in itertools.islice(states_of(loader), 4)]
    kept = copy.deepcopy(states)
    other.load_state_dict(states[1])
    other.load_state_dict(states[1])
    assert list(other) == epochs[0][1:], "loaded twice"
    other.load_state_dict(states[1])
    other.load_state_dict(states[3])
    assert list(other) == epochs[0][3:], "the last one counts, and the loader has run before"
    running = iter(other)
    assert next(running) == epochs[1][0]
    other.load_state_dict(states[3])
    assert next(running) == epochs[1][1], "an iterator that is under way goes on"
    assert other.state_dict() == states[3]
    del running
    assert list(other) == epochs[0][3:]
    assert states == kept, "loading has changed the states"
    with pytest.raises(StateError):
        other.load_state_dict({})


@BOTH_KINDS
def test_asking_changes_nothing(loader_of: Any, make: Any, how: str) -> None:
    loader, other = (loader_of(make(), **HOW[how]) for _ in range(2))
    before = loader.state_dict()
    assert loader._pool is None, "asking has started workers"
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    assert loader.state_dict() == state
    rest = list(iterator)
    assert state == kept, "a state changes while the loader goes on"
    other.load_state_dict(before)
    assert list(other)[1:] == rest
    next(iter(loader))
    assert list(loader) == [list(other) for _ in range(2)][1], "whole after an early break"


def test_own_iterator_before_the_first_batch(loader_of: Any) -> None:
    for made, is_begun in itertools.product((0, 2), (False, True)):
        dataset = Own()
        dataset.at = made
        loader = loader_of(dataset, num_workers=0)
        iterator = iter(loader) if is_begun else None
        state = copied(loader.state_dict())
        expected = list(loader if iterator is None else iterator)
        assert list(itertools.chain(*expected)) == list(range(made + 1, N + 1))
        for other in (dataset, Own()):
            resumed = loader_of(other, num_workers=0)
            resumed.load_state_dict(state)
            assert list(resumed) == expected, (made, is_begun)


# -- states of datasets and iterators


def test_collate_fn_gets_each_sample_without_a_batch_size(loader_of: Any) -> None:
    for make in (Plain, Stream):
        loader = loader_of(make(), batch_size=None, collate_fn=torch.tensor)
        for _ in range(2):
            samples = list(loader)
            assert len(samples) == N and all(type(sample) is torch.Tensor for sample in samples)


class SpiedStream(StatefulIterator):
    def __iter__(self) -> Any:
        return SpiedSteps()


class SpiedSteps(Steps):
    def __next__(self) -> Any:
        return (*super().__next__(), self.made)


def test_nothing_is_made_again(loader_of: Any) -> None:
    loader, other = (loader_of(SpiedStream(), num_workers=2) for _ in range(2))
    list(itertools.islice(loader, 2))
    other.load_state_dict(loader.state_dict())
    made = [sample[-1] for batch in other for sample in batch]
    assert max(made) == N // 2 - BATCH, "batches were replayed"


def test_new_workers_get_what_the_old_ones_said(loader_of: Any) -> None:
    whole, loader = (loader_of(Counting(), num_workers=2) for _ in range(2))
    expected = [list(whole) for _ in range(2)]
    first = list(loader)
    loader.close()
    assert [first, list(loader)] == expected


@pytest.mark.parametrize("make", [Counting, Both])
def test_another_epoch_keeps_a_dataset_s_state(loader_of: Any, make: Any) -> None:
    loader, other = loader_of(make()), loader_of(make())
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    other.set_epoch(3)
    assert other.state_dict()["batches"] == 0
    iter(other)  # which is left before its first batch
    assert next(iter(other))[0][-1] == BATCH + 1


def test_a_dataset_s_state_is_asked_of_no_one_else(loader_of: Any) -> None:
    for dataset in (Plain(), Stream(), Subset(Counting(), range(8))):
        loader = loader_of(dataset)
        next(iter(loader))
        assert "dataset" not in loader.state_dict()


def test_states_of_another_job_are_refused(loader_of: Any) -> None:
    job = {"num_workers": 0, "rank": 0, "world_size": 2}
    loader = loader_of(Counting(), **job)
    next(iter(loader))
    state = loader.state_dict()
    for options, message in (
        ({"num_workers": 2}, "workers was 1, is 2"),
        ({"rank": 1}, "rank was 0, is 1"),
        ({"world_size": 1, "batch_size": 2 * BATCH}, "world_size was 2, is 1"),
    ):
        other = loader_of(Counting(), **{**job, **options})
        before = other.state_dict()
        with pytest.raises(StateError, match=message):
            other.load_state_dict(state)
        assert other.state_dict() == before
        with pytest.warns(HeadraceWarning, match=message):
            other.load_state_dict(state, strict=False)
        assert next(iter(other))[0][2] == 1, "it begins without its state"


class Unsayable(Counting):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")


class Unpicklable(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: None}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_dict_that_raises_does_so_when_asked_for(loader_of: Any, workers: int) -> None:
    for make, message in ((Unsayable, "Unsayable.*no state today"), (Unpicklable, "Unpicklable")):
        loader = loader_of(make(), num_workers=workers)
        assert len(list(loader)) == 7
        with pytest.raises(StateError, match=f"{message}.*worker 0"):
            loader.state_dict()


class OddError(Exception):
    """It is made of two arguments, and pickle passes one."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class Unloadable(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise OddError(7, "a state of long ago")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_load_state_dict_keeps_its_type(loader_of: Any, workers: int) -> None:
    loader, other = (loader_of(Unloadable(), num_workers=workers) for _ in range(2))
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(OddError, match="7: a state of long ago") as unloadable:
        list(other)
    assert "batch 1" in unloadable.value.__notes__[-1]


def test_a_dataset_that_has_lost_its_methods_is_named(loader_of: Any) -> None:
    for saved, without in (
        (Counting(), Plain()),
        (StatefulIterator(), Stream()),
        (StatefulStream(), Stream()),
    ):
        loader, other = loader_of(saved), loader_of(without)
        next(iter(loader))
        state = {**loader.state_dict(), "fingerprint": other.fingerprint}
        if isinstance(without, Plain):
            with pytest.raises(StateError, match="Plain"):
                other.load_state_dict(state)
            continue
        other.load_state_dict(state)
        iterator = iter(other)
        with pytest.raises(StateError, match="Stream"):
            next(iterator)
        assert list(iterator) == [], "the stream begins anew after the error"


def test_a_damaged_state_of_a_dataset_is_refused(loader_of: Any) -> None:
    loader = loader_of(StatefulIterator())
    next(iter(loader))
    state = loader.state_dict()
    damaged: list[Any] = [3, [], {}]
    for change in (
        {"workers": 2},
        {"workers": "1"},
        {"turn": 1},
        {"turn": -1},
        {"step": None},
        {"states": [3]},
        {"states": []},
    ):
        damaged.append({**state["dataset"], **change})
    for part in damaged:
        with pytest.raises(StateError, match="damaged"):
            loader.load_state_dict({**state, "dataset": part})
        assert loader.state_dict() == state, part


class Once(Stream):
    fails = False

    def __iter__(self) -> Iterator[Any]:
        if self.fails:
            raise OSError("no connection")
        return super().__iter__()


def test_failing_iterator_gives_no_items_of_the_last(loader_of: Any) -> None:
    dataset = Once()
    loader = loader_of(dataset)
    next(iter(loader))
    dataset.fails = True
    iterator = iter(loader)
    with pytest.raises(OSError, match="no connection"):
        next(iterator)
    assert list(iterator) == []
