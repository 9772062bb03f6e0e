"""Sampling: by weight, by class, a number of samples, and samplers of the user's that have a
state.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from headrace import ConfigError, DataLoaderConfig, DataModule, StateError, TextDataset
from headrace.order import (
    BalancedOrder,
    BucketedOrder,
    EpochOrder,
    OrderSampler,
    ResizedOrder,
    WeightedOrder,
)
from headrace.testing.contract import RandomProbe, same
from tests.loader.datasets import Stream
from tests.testing.test_contract import SquareDataset

N = 42  # samples of SquareDataset
WEIGHTS = np.arange(N)
LENGTHS = np.arange(N) * 7 % 13
CLASSES = np.repeat([0, 1, 2], [30, 2, 10])


class Numbers(Dataset[int]):
    def __init__(self, targets: Any = CLASSES) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


COMMON: dict[str, Any] = {"seed": 5, "global_batch": 6}
ORDERS: list[tuple[dict[str, Any], Any]] = [
    ({"weights": WEIGHTS}, WeightedOrder(WEIGHTS, **COMMON)),
    ({"weights": WEIGHTS.tolist(), "num_samples": 100}, WeightedOrder(WEIGHTS, n=100, **COMMON)),
    (
        {"weights": torch.tensor(WEIGHTS), "replacement": False},
        WeightedOrder(WEIGHTS, replacement=False, **COMMON),
    ),
    ({"balanced": True}, BalancedOrder(CLASSES, **COMMON)),
    ({"num_samples": 17}, ResizedOrder(EpochOrder(N, **COMMON), 17)),
    ({"num_samples": 100}, ResizedOrder(EpochOrder(N, **COMMON), 100)),
    (
        {"num_samples": 100, "shuffle": False},
        ResizedOrder(EpochOrder(N, shuffle=False, **COMMON), 100),
    ),
    ({"bucket_by_length": LENGTHS}, BucketedOrder(LENGTHS, **COMMON)),
    ({}, EpochOrder(N, **COMMON)),
]


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(loader: Any) -> list[int]:
    return list(itertools.chain(*numbers(loader)))


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.fixture
def loader_of(make_loader: Any) -> Any:
    def make(dataset: Any = None, **options: Any) -> Any:
        dataset = Numbers() if dataset is None else dataset
        return make_loader(dataset, **{"batch_size": 6, "num_workers": 0, "seed": 5, **options})

    return make


def test_a_loader_goes_by_the_order_and_resumes(loader_of: Any) -> None:
    """On another number of ranks, too."""
    for options, order in ORDERS:
        loader = loader_of(**options)
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            assert flat(loader) == list(order.with_epoch(epoch))
        assert len(loader) == -(-order.n // 6)
        loader.set_epoch(5)
        assert list(loader.sampler) == list(order.with_epoch(5)) and len(loader.sampler) == order.n
        two = loader_of(rank=1, world_size=2, batch_size=3, **options)
        next(iter(two))
        state = copied(two.state_dict())
        resumed = loader_of(**options)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        loader.set_epoch(0)
        assert numbers(resumed) == numbers(loader)[1:], options


def test_states_of_another_order_are_refused(loader_of: Any) -> None:
    states = [loader_of(**options).state_dict() for options, _ in ORDERS]
    for (one, state), other in itertools.permutations(enumerate(states), 2):
        options = ORDERS[other[0]][0]
        differ_in_shuffle = {one, other[0]} == {5, 6}
        for strict in (True, False):
            if strict or not differ_in_shuffle:
                with pytest.raises(StateError, match="another order"):
                    loader_of(**options).load_state_dict(state, strict=strict)


def test_a_cache_expects_what_is_drawn_again(
    loader_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, expected in (
        ({"weights": WEIGHTS}, [True]),
        ({"weights": WEIGHTS, "replacement": False}, []),
        ({}, []),
    ):
        dataset = SquareDataset(loading_mode="cached", cache_size=3)
        seen: list[bool] = []
        with monkeypatch.context() as patch:
            patch.setattr(dataset.held, "expect_skew", lambda seen=seen: seen.append(True))
            loader_of(dataset, **options)
        assert seen == expected, options


# -- classes


def test_classes_are_the_targets_of_the_dataset(loader_of: Any) -> None:
    expected = list(BalancedOrder(CLASSES, **COMMON))
    for dataset in (
        Numbers(CLASSES.tolist()),
        Numbers(torch.tensor(CLASSES)),
        Numbers(np.array(["a", "b", "c"])[CLASSES]),
        Subset(Numbers(), range(N)),
        ConcatDataset([Subset(Numbers(), range(20)), Subset(Numbers(), range(20, N))]),
    ):
        assert flat(loader_of(dataset, balanced=True)) == expected
    squares = SquareDataset()
    squares.targets = CLASSES
    view = squares.subset(range(0, N, 2))
    loader = loader_of(view, balanced=True, collate_fn="list", num_samples=30)
    targets = Counter(int(target) for batch in loader for _, target in batch)
    assert targets == {0: 10, 1: 10, 2: 10}


def test_classes_that_are_none(loader_of: Any) -> None:
    for dataset, message in (
        (TensorDataset(torch.arange(N)), "TensorDataset"),
        (ConcatDataset([Numbers(), TensorDataset(torch.arange(2))]), "ConcatDataset"),
        (Numbers([1, 2, 3]), "targets holds 3 entries for 42"),
        (Numbers(torch.rand(N)), "integers"),
    ):
        with pytest.raises(ConfigError, match=message):
            loader_of(dataset, balanced=True)


# -- what fits the dataset


def test_what_does_not_fit_the_dataset(loader_of: Any) -> None:
    for dataset, options, message in (
        (Numbers(), {"weights": [1, 2, 3]}, "weights holds 3 entries for 42"),
        (Numbers(), {"bucket_by_length": [1, 2]}, "bucket_by_length holds 2 entries for 42"),
        (Numbers(), {"bucket_by_length": True}, "Numbers"),
        (SquareDataset(), {"bucket_by_length": True}, "SquareDataset"),
        (SquareDataset(), {"bucket_by_length": 3.5}, "3.5"),
        (Stream(3), {"weights": [1]}, "weights"),
        (Stream(3), {"balanced": True}, "balanced"),
        (Stream(3), {"num_samples": 2}, "num_samples"),
        (Stream(3), {"bucket_by_length": [1]}, "bucket_by_length"),
    ):
        with pytest.raises(ConfigError, match=message):
            loader_of(dataset, **options)


def test_sampling_is_for_training() -> None:
    train = DataLoaderConfig.train(weights=[1])
    assert train.shuffle is None and train.drop_last
    assert DataLoaderConfig.train(num_samples=3).shuffle is True
    options: dict[str, Any] = {"weights": WEIGHTS, "replacement": False, "num_samples": 5}
    module = DataModule(Numbers(), Numbers(), num_workers=0, **options)
    assert flat(module.val_dataloader()) == list(range(N))
    assert len(flat(module.train_dataloader())) == 5
    module.close()


# -- lengths


def padding_of(masks: list[torch.Tensor]) -> float:
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def test_texts_of_like_length_share_a_batch(loader_of: Any, tmp_path: Path) -> None:
    """Also where other fields are longer than the texts, and lengths are no tokens."""
    sizes = np.random.default_rng(2).integers(1, 60, 200).tolist()
    rows = [{"text": "a b " * size, "other": "x" * (500 - 7 * size)} for size in sizes]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for tokenizer in (None, lambda text: [1] * (len(text) // 9 + 3)):
        texts = TextDataset(tmp_path, tokenizer=tokenizer).subset(range(1, 200))
        loader = loader_of(texts, batch_size=8, bucket_by_length=True)
        masks = [batch["attention_mask"] for _ in range(2) for batch in loader]
        plain = [batch["attention_mask"] for batch in loader_of(texts, batch_size=8)]
        assert padding_of(masks) < 0.1 < 0.3 < padding_of(plain)


class Spy:
    """A sampler without a length that notes its epochs, and how much is asked of it."""

    def __init__(self) -> None:
        self.asked = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Any:
        for index in range(N):
            self.asked += 1
            yield index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SpiedBatches(BatchSampler, Spy):  # type: ignore[misc]
    def __init__(self, sampler: Any) -> None:
        Spy.__init__(self)
        BatchSampler.__init__(self, sampler, 6, False)


def test_samplers_are_told_the_epoch_and_not_asked_ahead(loader_of: Any) -> None:
    inner = Spy()
    outer = SpiedBatches(inner)
    loader = loader_of(batch_sampler=outer)
    loader.set_epoch(4)
    next(iter(loader))
    assert inner.epochs == outer.epochs == [4] and inner.asked <= 12


# -- samplers with a state


class Stateful:
    """A sampler whose order nobody could replay: each pass goes on in a sequence of its own."""

    def __init__(self) -> None:
        self.at = self.loads = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield self.at * 5 % N
            if self.at % N == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.loads += 1


class StatefulIterator(Stateful):
    """An iterator that knows where it stands, of a sampler that doesn't."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at == N:
            raise StopIteration
        self.at += 1
        return self.at * 5 % N


class OfIterator:
    def __len__(self) -> int:
        return N

    def __iter__(self) -> StatefulIterator:
        return StatefulIterator()


class StatefulBatches(Stateful):
    def __len__(self) -> int:
        return N // 6

    def __iter__(self) -> Any:
        rest = super().__iter__()
        while batch := list(itertools.islice(rest, 6)):
            yield batch


def with_sampler(sampler: Any) -> dict[str, Any]:
    if isinstance(sampler, StatefulBatches):
        return {"batch_sampler": sampler, "batch_size": 1}
    return {"sampler": sampler}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Stateful, OfIterator, StatefulBatches])
def test_samplers_with_a_state_are_asked_for_it(loader_of: Any, make: Any, workers: int) -> None:
    expected = numbers(loader_of(**with_sampler(make())))
    loader = loader_of(num_workers=workers, **with_sampler(make()))
    resumed = loader_of(**with_sampler(make()))
    iterator = iter(loader)
    for received in range(1, 8):
        assert next(iterator).tolist() == expected[received - 1]
        state = copied(loader.state_dict())
        # what was received, not what was drawn ahead
        assert state["sampler_state"]["state"] == {"at": 6 * received}
        resumed.load_state_dict(state)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        resumed.set_epoch(0)
        assert numbers(resumed) == expected[received:]


def test_a_sampler_goes_on_without_a_replay(loader_of: Any) -> None:
    loader = loader_of(sampler=Stateful())
    next(iter(loader))
    sampler = Stateful()
    resumed = loader_of(sampler=sampler)
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert sampler.loads == 1 and sampler.at == 12


def test_positions_of_sampled_transforms_go_on_too(loader_of: Any) -> None:
    """`k` of a sample's random transforms is its position in the epoch."""
    loader, resumed = (
        loader_of(SquareDataset(transform=RandomProbe()), sampler=Stateful(), collate_fn="list")
        for _ in range(2)
    )
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 3:
            state = loader.state_dict()
    resumed.load_state_dict(state)
    assert same(list(resumed), batches[3:])


@pytest.mark.parametrize(
    ("make", "is_asked"),
    [
        (lambda: RandomSampler(range(N)), False),
        (lambda: OrderSampler(N, batch_size=3, seed=9, rank=0, world_size=1), True),
        # its state counts batches of another size
        (lambda: OrderSampler(N, batch_size=4, seed=9, rank=0, world_size=1), False),
        (lambda: OrderSampler(N, batch_size=12, seed=9, rank=0, world_size=1), False),
    ],
)
def test_a_sampler_whose_state_is_of_no_use_is_replayed(
    loader_of: Any, make: Callable[[], Any], is_asked: bool
) -> None:
    loader, resumed = loader_of(sampler=make()), loader_of(sampler=make())
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert ("sampler_state" in state) == is_asked
    resumed.load_state_dict(state)
    assert numbers(resumed) == numbers(iterator)


class BrokenSampler(Stateful):
    def state_dict(self) -> dict[str, Any]:
        raise OSError("no state today")


def test_states_of_samplers_that_make_no_sense(loader_of: Any) -> None:
    loader = loader_of(sampler=Stateful())
    next(iter(loader))
    state, fresh = loader.state_dict(), loader_of(sampler=Stateful())
    with pytest.raises(StateError, match="sampler_state is 7"):
        fresh.load_state_dict({**state, "sampler_state": 7})
    assert fresh.state_dict()["batches"] == 0, "what is refused changes nothing"
    with pytest.raises(StateError, match="range has no load_state_dict"):
        loader_of(sampler=range(N)).load_state_dict(state)
    of_iterator = loader_of(sampler=OfIterator())
    next(iter(of_iterator))
    other = loader_of(sampler=range(N))
    other.load_state_dict(of_iterator.state_dict())
    with pytest.raises(StateError, match="range_iterator has no load_state_dict"):
        next(iter(other))
    with pytest.raises(OSError, match="no state today"):
        next(iter(loader_of(sampler=BrokenSampler())))


class CountsEpochs:
    """A sampler whose order is that of an epoch in its state, which counts on at its end."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < N:
            self.at += 1
            yield order[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class BeginsAnew(CountsEpochs):
    """The same, which has no position: each pass begins at its start."""

    def __iter__(self) -> Any:
        self.at = 0
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": 0}


@pytest.mark.parametrize(
    ("make", "batch_size", "workers"),
    [(CountsEpochs, 6, 0), (CountsEpochs, 5, 2), (BeginsAnew, 5, 0)],
)
def test_a_sampler_that_counts_epochs_goes_on_with_the_next(
    loader_of: Any, make: Any, batch_size: int, workers: int
) -> None:
    options = {"drop_last": make is BeginsAnew, "num_workers": workers, "batch_size": batch_size}
    loader, saving = (loader_of(sampler=make(), **options) for _ in range(2))
    expected = [numbers(loader) for _ in range(3)]
    assert len({str(epoch) for epoch in expected}) == 3
    for epoch in range(2):
        iterator = iter(saving)
        for _ in range(len(saving)):
            next(iterator)
        last = copied(saving.state_dict())
        assert next(iterator, None) is None
        resumed = loader_of(sampler=make(), **options)
        resumed.load_state_dict(copied(saving.state_dict()))
        assert numbers(resumed) == expected[epoch + 1]
        saving.set_epoch(epoch + 1)  # before the next one begins, and when it has
        states = [copied(saving.state_dict())]
        iter(saving)
        states.append(copied(saving.state_dict()))
        assert states[0] == states[1]
        resumed.load_state_dict(states[0])
        assert resumed.state_dict() == states[0]
        assert numbers(resumed) == expected[epoch + 1]
        saving.load_state_dict(states[0])
        if make is CountsEpochs:  # nothing is left of the epoch
            resumed.load_state_dict(last)
            assert [numbers(resumed) for _ in range(2)] == [[], expected[epoch + 1]]
