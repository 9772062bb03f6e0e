"""A loader's state means what torchdata's StatefulDataLoader means by it.

What that does was found out by running it (torchdata 0.11), with map-style and iterable datasets, 0
and 2 workers, persistent or not:

==================================  =================================  =============================
moment                              torchdata                          here
==================================  =================================  =============================
before the first batch              the whole epoch; the iterator and  the same; nothing is started
                                    the workers are started for it

after some batches, early break     the rest; this loader's next       the same
                                    epoch is whole

while workers are ahead             what the user has received         the same

after a new iter()                  the beginning of the new epoch     the same

after the last batch, before        nothing is left; then a whole      the same
StopIteration                       epoch

after StopIteration                 a whole epoch (an iterable         a whole epoch, always
                                    dataset that is its own iterator:
                                    an empty one, without workers or
                                    with persistent ones)

loaded, and asked again without     the same state                     the same
iterating

loaded twice; another one loaded    the last one counts                the same
after it

loaded into a loader that has run   the rest of the loaded one         the same

loaded while an iterator is under   that goes on as it was; the next   the same
way                                 iter() resumes

state_dict()                        changes nothing; stays as it was   the same
                                    while the loader goes on

len(loader) after loading           the whole epoch's                  the same

len(iter(loader)) after loading     the whole epoch's                  what is left: a progress
                                                                       bar's total

another number of workers           AssertionError                     goes on; StateError, with
                                                                       both numbers, where workers
                                                                       have states or shares of a
                                                                       stream of their own

load_state_dict({})                 nothing happens                    StateError: it is no state,
                                                                       and a lost one must not begin
                                                                       anew

who is asked for a state            the dataset and its iterator, in   the same, after each batch;
                                    each worker, every n steps; else   who has none is not asked
                                    batches are replayed

in which order states are given     dataset, iter(dataset), iterator;  the same; it keeps its state
back                                a dataset that is its own          through iter(), or gets it
                                    iterator after its iter()          again after it

at the end of an epoch, or before   the dataset's state of then,       the same; where it held the
the first batch of the next: a      before the next epoch's iter()     position, so that nothing
dataset that counts epochs                                             would come, the next iter()
                                                                       counts

iter() of a dataset, when a state   once                               once; twice where its
is loaded                                                              position is made in iter(),
                                                                       and its epoch is through

batch_size=None with a collate_fn   it gets each sample                the same

a worker's state                    back to the worker of the same     the same
                                    number, and the worker whose turn
                                    it was goes on

a state_dict of the user's that     instead of the batch               when the loader's state is
raises                                                                 asked for
==================================  =================================  =============================
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from headrace import HeadraceWarning, MultiDataLoader, StateError

pytestmark = pytest.mark.quick_every(4)

N, BATCH = 20, 4


def me() -> tuple[int, int]:
    """The number of this worker, and of all."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Plain(Dataset[int]):
    """A map-style dataset without a state."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return index


class Counting(Plain):
    """A map-style dataset that counts the samples that it gave, process by process."""

    def __init__(self) -> None:
        self.given = 0

    def __getitem__(self, index: int) -> tuple[int, int, int]:
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

    def __iter__(self) -> Steps:
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
    """Without a state."""

    def __iter__(self) -> Iterator[Any]:
        return (item for item in Steps())


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
    """Dataset and iterator have states: the dataset's is the number of samples that it ever
    gave, in this process.
    """

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Any:
        return Counted(self)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Counted(Steps):
    def __init__(self, dataset: Both) -> None:
        super().__init__()
        self.dataset = dataset

    def __next__(self) -> Any:
        sample = super().__next__()
        self.dataset.given += 1
        return (*sample, self.dataset.given)


class Share(IterableDataset[Any]):
    """It is its own iterator, makes its position in ``iter``, and can't load one before."""

    def __init__(self) -> None:
        self.epochs = 0

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
    """Its iterator is a generator, which counts epochs at its end; the dataset holds both
    counts.
    """

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


class Own(IterableDataset[int]):
    """It is its own iterator, and never begins anew."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at >= N:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


STREAMS = (StatefulIterator, StatefulStream, Forgetting, Keeping)
HOW = {
    "alone": {"num_workers": 0},
    "lasting": {"num_workers": 2},
    "fresh": {"num_workers": 2, "persistent_workers": False},
}


@pytest.fixture
def loader_of(loader_of: Any) -> Any:
    return functools.partial(
        loader_of, batch_size=BATCH, collate_fn="list", enable_monitoring=False
    )


def kinds(*datasets: Any) -> Any:
    """Each of the datasets in this process and with persistent workers; slow: with workers for
    one epoch.
    """
    return pytest.mark.parametrize(
        ("make", "how"),
        [
            pytest.param(
                dataset,
                HOW[how],
                id=f"{dataset.__name__}-{how}",
                marks=pytest.mark.slow if how == "fresh" else (),
            )
            for dataset in datasets
            for how in HOW
        ],
    )


class Life:
    """Two loaders of one kind, and what the first two epochs of one that is never interrupted
    are.
    """

    def __init__(self, loader_of: Any, make: Any, how: dict[str, Any]) -> None:
        self._make = lambda: loader_of(make(), **how)
        self.one, self.other = self._make(), self._make()
        self.epochs = [list(self.one) for _ in range(2)]
        self.one.set_epoch(0)

    def new(self) -> Any:
        return self._make()

    def after(self, batches: int) -> Any:
        """The first loader's iterator, after so many batches of epoch 0."""
        self.one.set_epoch(0)
        iterator = iter(self.one)
        assert [next(iterator) for _ in range(batches)] == self.epochs[0][:batches]
        return iterator

    def resumed(self, state: dict[str, Any]) -> list[Any]:
        """What another loader goes on with."""
        self.other.load_state_dict(json.loads(json.dumps(state)))
        return list(self.other)


@pytest.fixture
def life(loader_of: Any) -> Any:
    return lambda make, how: Life(loader_of, make, how)


BOTH_KINDS = kinds(Plain, StatefulIterator)


@BOTH_KINDS
def test_before_and_between_batches(life: Any, make: Any, how: Any) -> None:
    own = life(make, how)
    fresh = own.new()
    state = fresh.state_dict()
    assert fresh._pool is None, "asking has started workers"
    assert own.resumed(state) == own.epochs[0]
    for batches in (1, 2, 3):
        iterator = own.after(batches)  # workers are ahead
        assert own.resumed(own.one.state_dict()) == own.epochs[0][batches:]
        assert list(own.other) == own.epochs[1]
        del iterator
    assert list(own.one) == own.epochs[1], "after an early break the next epoch is whole"


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("made", [0, 2], ids=["at_its_beginning", "in_its_midst"])
@pytest.mark.parametrize("is_begun", [False, True])
def test_dataset_is_its_own_iterator_before_the_first_batch(
    loader_of: Any, made: int, is_begun: bool
) -> None:
    dataset = Own()
    dataset.at = made
    loader = loader_of(dataset, num_workers=0)
    iterator = iter(loader) if is_begun else None
    state = loader.state_dict()
    expected = list(loader if iterator is None else iterator)
    assert list(itertools.chain(*expected)) == list(range(made + 1, N + 1))
    for other in (dataset, Own()):
        resumed = loader_of(other, num_workers=0)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert list(resumed) == expected


@BOTH_KINDS
def test_the_end_is_where_the_user_has_been_told_of_it(life: Any, make: Any, how: Any) -> None:
    own = life(make, how)
    iterator = own.after(len(own.epochs[0]))
    state = own.one.state_dict()
    assert own.resumed(state) == []
    assert list(own.other) == own.epochs[1]
    assert list(iterator) == []
    assert own.resumed(own.one.state_dict()) == own.epochs[1]
    own.other.load_state_dict(state)
    own.other.set_epoch(1)
    assert list(own.other) == own.epochs[1]
    assert list(own.one) == own.epochs[1]


def test_resume_in_the_last_step_keeps_the_epochs(loader_of: Any) -> None:
    expected = [list(loader) for loader in [loader_of(Plain())] for _ in range(3)]
    # in the midst of epoch 1, in its last step, and in the first of epoch 2
    for stop in range(5, 11):
        loader, saved, steps = loader_of(Plain()), None, 0
        for epoch in range(3):
            for _ in loader:
                steps += 1
                if steps == stop:
                    saved = epoch, copy.deepcopy(loader.state_dict())
        assert saved is not None
        resumed = loader_of(Plain())
        resumed.load_state_dict(saved[1])
        rest = [batch for _ in range(saved[0], 3) for batch in resumed]
        assert rest == list(itertools.chain(*expected))[stop:]


def test_a_multi_loader_s_end_is_there_too(loader_of: Any) -> None:
    def make() -> Any:
        return MultiDataLoader(
            {"a": loader_of(Plain()), "b": loader_of(StatefulIterator())}, steps=7
        )

    whole = make()
    epochs = [list(whole) for _ in range(2)]
    for batches in range(8):
        loader, other = make(), make()
        iterator = iter(loader)
        assert [next(iterator) for _ in range(batches)] == epochs[0][:batches]
        state = json.loads(json.dumps(loader.state_dict()))
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert list(other) == epochs[0][batches:]
        assert list(other) == epochs[1]
    assert list(iterator) == []
    other.load_state_dict(loader.state_dict())
    assert list(other) == epochs[1]


@BOTH_KINDS
def test_loading(life: Any, make: Any, how: Any) -> None:
    own = life(make, how)
    states = []
    for batches in (1, 3):
        own.after(batches)
        states.append(own.one.state_dict())
    one, three = copy.deepcopy(states)
    other = own.other
    other.load_state_dict(one)
    assert other.state_dict() == one, "loaded, and asked again"
    other.load_state_dict(one)
    assert list(other) == own.epochs[0][1:], "loaded twice"
    other.load_state_dict(one)
    other.load_state_dict(three)
    assert list(other) == own.epochs[0][3:], "the last one counts, and the loader has run before"
    running = iter(other)
    assert next(running) == own.epochs[1][0]
    other.load_state_dict(three)
    assert next(running) == own.epochs[1][1], "an iterator that is under way goes on"
    assert other.state_dict() == three
    del running
    assert list(other) == own.epochs[0][3:]
    assert states == [one, three], "loading has changed the states"
    with pytest.raises(StateError, match="no state"):
        other.load_state_dict({})


@BOTH_KINDS
def test_asking(life: Any, make: Any, how: Any) -> None:
    own = life(make, how)
    iterator = own.after(2)
    state = own.one.state_dict()
    kept = copy.deepcopy(state)
    assert own.one.state_dict() == state
    next(iterator)
    assert state == kept, "a state changes while the loader goes on"
    again = iter(own.one)
    assert own.resumed(own.one.state_dict()) == own.epochs[1], "after a new iter()"
    assert next(again) == own.epochs[1][0]


def test_lengths(loader_of: Any) -> None:
    loader, other = loader_of(Plain()), loader_of(Plain())
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    assert len(other) == 5 and len(iter(other)) == 4


# -- states of datasets and iterators


@kinds(*STREAMS, Stream)
def test_a_stream_goes_on_from_every_batch(life: Any, make: Any, how: Any) -> None:
    own = life(make, how)
    drawn = [sample[1:] for epoch in own.epochs for batch in epoch for sample in batch]
    assert len(set(drawn)) == len(drawn) == 2 * N, "random numbers come again"
    for batches in range(len(own.epochs[0]) + 1):
        own.after(batches)
        state = own.one.state_dict()
        # datasets of before the first batch
        has_run = make is not StatefulIterator and how.get("persistent_workers", True)
        assert ("dataset" in state) == (make is not Stream and (batches > 0 or has_run))
        assert own.resumed(state) == own.epochs[0][batches:]
        assert list(own.other) == own.epochs[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "lasting"])
@pytest.mark.parametrize("make", [Share, Epochs])
def test_stream_that_counts_epochs_goes_on(loader_of: Any, make: Any, how: str) -> None:
    whole = loader_of(make(), **HOW[how])
    epochs = [list(whole) for _ in range(4)]
    counted = [{sample[1] for batch in epoch for sample in batch} for epoch in epochs]
    assert all(len(numbers) == 1 for numbers in counted) and len(set.union(*counted)) == 4
    for before, epoch in enumerate(epochs[:2]):
        for batches in range(len(epoch) + 2):  # with the last one the user has been told of the end
            loader, other = (loader_of(make(), **HOW[how]) for _ in range(2))
            assert [list(loader) for _ in range(before)] == epochs[:before]
            iterator = iter(loader)
            assert list(itertools.islice(iterator, batches)) == epoch[:batches]
            saved = json.loads(json.dumps(loader.state_dict()))
            other.load_state_dict(saved)
            assert other.state_dict() == saved
            if batches <= len(epoch):
                assert list(other) == epoch[batches:], f"epoch {before}, batch {batches}"
            assert [list(other), list(other)] == epochs[before + 1 : before + 3], (
                f"after epoch {before}, batch {batches}"
            )
            loader.close()
            other.close()


@pytest.mark.parametrize("how", ["alone", "lasting"])
@pytest.mark.parametrize("make", [Share, Epochs, StatefulStream, Keeping])
def test_worker_that_ended_first_resumes_ended(loader_of: Any, make: Any, how: str) -> None:
    """20 samples in batches of 3: the workers end at different steps, and their last batches are
    short.
    """
    options = {**HOW[how], "batch_size": 3}
    whole = loader_of(make(), **options)
    epochs = [list(whole) for _ in range(3)]
    for batches in range(len(epochs[0]) + 1):
        loader, other = (loader_of(make(), **options) for _ in range(2))
        received = list(itertools.islice(loader, batches))
        other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert received + list(other) == epochs[0]
        assert [list(other), list(other)] == epochs[1:]
        loader.close()
        other.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Plain, Stream])
def test_collate_fn_gets_each_sample_without_a_batch_size(
    loader_of: Any, make: Any, workers: int
) -> None:
    loader = loader_of(make(), batch_size=None, collate_fn=torch.tensor, num_workers=workers)
    assert all(isinstance(sample, torch.Tensor) for sample in loader)
    assert (
        len(
            [
                sample
                for sample in loader_of(
                    make(), batch_size=None, collate_fn=torch.tensor, num_workers=workers
                )
            ]
        )
        == N
    )


@pytest.mark.parametrize("how", ["alone", "lasting"])
def test_stateful_dataset_beside_a_stateful_iterator(loader_of: Any, how: str) -> None:
    whole = loader_of(Both(), **HOW[how])
    epochs = [list(whole) for _ in range(3)]
    assert max(sample[-1] for batch in epochs[2] for sample in batch) == (
        60 if how == "alone" else 30
    )
    for batches in (0, 1, 3, len(epochs[1]), None):
        loader, other = (loader_of(Both(), **HOW[how]) for _ in range(2))
        list(loader)
        received = list(itertools.islice(loader, batches))
        other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        if batches is not None:
            assert received + list(other) == epochs[1]
        assert list(other) == epochs[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_made_again(loader_of: Any, workers: int) -> None:
    class Spied(StatefulIterator):
        def __iter__(self) -> Any:
            return Spy()

    class Spy(Steps):
        def __next__(self) -> Any:
            return (*super().__next__(), self.made)

    loader, other = (loader_of(Spied(), num_workers=workers) for _ in range(2))
    for _ in zip(range(2), loader, strict=False):
        pass
    other.load_state_dict(loader.state_dict())
    made = {sample[0]: sample[-1] for batch in other for sample in batch}
    assert max(made.values()) == (12 if workers == 0 else 6), "batches were replayed"


@pytest.mark.parametrize("how", ["alone", "lasting"])
def test_a_map_style_dataset_s_state_comes_back(loader_of: Any, how: str) -> None:
    loader = loader_of(Counting(), **HOW[how])
    epochs = [list(loader) for _ in range(3)]
    for batches in (1, 2, 3, 5):
        one, other = (loader_of(Counting(), **HOW[how]) for _ in range(2))
        assert list(one) == epochs[0]
        received = (
            [batch for _, batch in zip(range(batches), one, strict=False)]
            if batches < 5
            else list(one)
        )
        assert received == epochs[1][:batches]
        state = json.loads(json.dumps(one.state_dict()))
        other.load_state_dict(state)
        assert other.state_dict() == state
        if batches < 5:
            assert list(other) == epochs[1][batches:]
        assert list(other) == epochs[2], "the dataset has lost its state between epochs"


def test_new_workers_get_what_the_old_ones_said(loader_of: Any) -> None:
    whole, loader = (loader_of(Counting(), num_workers=2) for _ in range(2))
    expected = [list(whole) for _ in range(2)]
    found = [list(loader)]
    loader.close()
    assert [*found, list(loader)] == expected


def test_another_epoch_keeps_a_map_style_dataset_s_state(loader_of: Any) -> None:
    loader, other = loader_of(Counting()), loader_of(Counting())
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    other.set_epoch(3)
    assert other.state_dict()["batches"] == 0
    assert next(iter(other))[0][2] == 5


def test_a_dataset_s_state_is_asked_of_no_one_else(loader_of: Any) -> None:
    for dataset in (Plain(), Stream(), torch.utils.data.Subset(Counting(), range(8))):
        loader = loader_of(dataset)
        next(iter(loader))
        assert "dataset" not in loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Counting, StatefulIterator])
def test_states_of_another_job_are_refused(loader_of: Any, make: Any, workers: int) -> None:
    loader = loader_of(make(), num_workers=workers, rank=0, world_size=2)
    next(iter(loader))
    state = loader.state_dict()
    for options, said in (
        ({"num_workers": 3}, f"workers was {max(1, workers)}, is 3"),
        ({"rank": 1}, "rank was 0, is 1"),
        ({"world_size": 1, "batch_size": 8}, "world_size was 2, is 1"),
    ):
        if make is StatefulIterator and "world_size" in options:
            options = {**options, "batch_size": BATCH}
        other = loader_of(make(), **{"num_workers": workers, "rank": 0, "world_size": 2, **options})
        before = other.state_dict()
        with pytest.raises(StateError, match=said):
            other.load_state_dict(state)
        assert other.state_dict() == before
        if make is Counting:
            with pytest.warns(HeadraceWarning, match=f"{said}.*without its state"):
                other.load_state_dict(state, strict=False)
            assert [sample[0] for batch in other for sample in batch]


def test_a_state_that_one_worker_saved_is_gone_on_with_by_none(loader_of: Any) -> None:
    loader, other = loader_of(StatefulIterator(), num_workers=1), loader_of(StatefulIterator())
    whole = list(loader_of(StatefulIterator()))
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    assert list(other) == whole[1:]


class Unsayable(Counting):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")


class Unpicklable(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: None}


class Unloadable(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise LookupError("a state of long ago")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "said"), [(Unsayable, "ValueError: no state today"), (Unpicklable, "can't be saved")]
)
def test_a_state_dict_that_raises_does_so_when_it_is_asked_for(
    loader_of: Any, make: Any, said: str, workers: int
) -> None:
    loader = loader_of(make(), num_workers=workers)
    assert len(list(loader)) == 5
    with pytest.raises(
        StateError, match=rf"the state of {make.__name__}.*{said}.*worker 0"
    ) as raised:
        loader.state_dict()
    assert "after its last batch" in str(raised.value)


class OddError(Exception):
    """It is made of two arguments, and pickle passes one."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class OddlyUnloadable(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise OddError(7, "a state of long ago")


@pytest.mark.parametrize("workers", [0, 1])
def test_error_while_a_state_is_loaded_keeps_its_type(loader_of: Any, workers: int) -> None:
    loader, other = (
        loader_of(OddlyUnloadable(), num_workers=workers),
        loader_of(OddlyUnloadable(), num_workers=workers),
    )
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(OddError, match="7: a state of long ago"):
        list(other)


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_load_state_dict_is_an_error(loader_of: Any, workers: int) -> None:
    loader, other = (
        loader_of(Unloadable(), num_workers=workers),
        loader_of(Unloadable(), num_workers=workers),
    )
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(LookupError, match="long ago") as raised:
        list(other)
    assert "batch 1" in raised.value.__notes__[-1]
    del raised


def test_a_dataset_that_has_lost_its_methods_is_named(loader_of: Any) -> None:
    for saved, without in (
        (Counting(), Plain()),
        (StatefulIterator(), Stream()),
        (StatefulStream(), Stream()),
    ):
        loader, other = loader_of(saved), loader_of(without)
        next(iter(loader))
        state = {**loader.state_dict(), "fingerprint": other.fingerprint}
        other.load_state_dict(state)
        iterator = iter(other)
        with pytest.raises(
            StateError, match=rf"{type(without).__name__}, which has no load_state_dict now"
        ):
            next(iterator)
        assert isinstance(without, Plain) or list(iterator) == [], (
            "the stream begins anew after the error"
        )


@pytest.mark.parametrize(
    "garbage",
    [
        3,
        [],
        {},
        {"workers": 2},
        {"workers": "1"},
        {"turn": 1},
        {"turn": -1},
        {"step": None},
        {"states": [3]},
        {"states": []},
    ],
)
def test_a_damaged_part_is_refused(loader_of: Any, garbage: Any) -> None:
    loader = loader_of(StatefulIterator())
    next(iter(loader))
    state = loader.state_dict()
    whole = not isinstance(garbage, dict) or not garbage
    with pytest.raises(StateError, match="damaged"):
        loader.load_state_dict(
            {**state, "dataset": garbage if whole else {**state["dataset"], **garbage}}
        )
    assert loader.state_dict() == state


def test_a_large_state_is_warned_of_once(loader_of: Any) -> None:
    class Large(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"worker": 0, "given": 0, "all": bytes(2 << 20)}

    loader = loader_of(Large())
    with pytest.warns(
        HeadraceWarning, match=r"the state of the dataset takes 2,\d{3},\d{3} bytes"
    ) as warned:
        list(loader)
        list(loader)
    assert len(warned) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_copy_of_a_loader_has_the_dataset_s_state(loader_of: Any, workers: int) -> None:
    loader = loader_of(StatefulIterator(), num_workers=workers)
    whole = list(loader)
    loader.set_epoch(0)
    next(iter(loader))
    other = copy.deepcopy(loader)
    assert list(other) == whole[1:]
    other.close()


def test_failing_iterator_gives_no_items_of_the_last(loader_of: Any) -> None:
    class Once(Stream):
        fails = False

        def __iter__(self) -> Iterator[Any]:
            if self.fails:
                raise OSError("no connection")
            return super().__iter__()

    dataset = Once()
    loader = loader_of(dataset)
    next(iter(loader))
    dataset.fails = True
    iterator = iter(loader)
    with pytest.raises(OSError, match="no connection"):
        next(iterator)
    assert list(iterator) == []


class FormattedError(Exception):
    """It formats its arguments, and pickle would pass it the result."""

    def __init__(self, path: str, code: int = 7) -> None:
        super().__init__(f"can't read {path} (code {code})")
        self.path = path


class Unreadable(Counting):
    def __getitem__(self, index: int) -> Any:
        raise FormattedError("/data/0.bin", 5)


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_error_that_formats_its_arguments_keeps_its_message(loader_of: Any, workers: int) -> None:
    with pytest.raises(FormattedError) as raised:
        list(loader_of(Unreadable(), num_workers=workers))
    assert (str(raised.value), raised.value.path) == (
        "can't read /data/0.bin (code 5)",
        "/data/0.bin",
    )
