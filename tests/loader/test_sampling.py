"""Sampling: by weight, by class, a number of samples, and samplers of the user's that have a
state.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from headrace import (
    ConfigError,
    DataLoaderConfig,
    DataModule,
    OrderSampler,
    StateError,
    TextDataset,
)
from headrace.order import BalancedOrder, BucketedOrder, EpochOrder, ResizedOrder, WeightedOrder
from headrace.testing.contract import RandomProbe
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(6)

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


ORDERS: dict[str, dict[str, Any]] = {
    "weights": {"weights": WEIGHTS},
    "weights, more": {"weights": WEIGHTS.tolist(), "num_samples": 100},
    "weights, without replacement": {"weights": torch.tensor(WEIGHTS), "replacement": False},
    "balanced": {"balanced": True},
    "fewer": {"num_samples": 17},
    "more": {"num_samples": 100},
    "bucketed": {"bucket_by_length": LENGTHS},
    "more, in order": {"num_samples": 100, "shuffle": False},
}


def order_of(options: dict[str, Any], global_batch: int = 6) -> Any:
    common: dict[str, Any] = {"seed": 5, "global_batch": global_batch}
    if "weights" in options:
        return WeightedOrder(
            WEIGHTS,
            n=options.get("num_samples"),
            replacement=options.get("replacement", True),
            **common,
        )
    if "balanced" in options:
        return BalancedOrder(CLASSES, **common)
    if "bucket_by_length" in options:
        return BucketedOrder(LENGTHS, **common)
    return ResizedOrder(
        EpochOrder(N, shuffle=options.get("shuffle", True), **common), options["num_samples"]
    )


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.fixture
def loader_of(make_loader: Any) -> Any:
    def make(dataset: Any = None, **options: Any) -> Any:
        return make_loader(
            Numbers() if dataset is None else dataset,
            **{"batch_size": 6, "num_workers": 0, "seed": 5, **options},
        )

    return make


@pytest.mark.parametrize("name", ORDERS)
class TestOrders:
    def test_a_loader_goes_by_the_order(self, loader_of: Any, name: str) -> None:
        loader, order = loader_of(**ORDERS[name]), order_of(ORDERS[name])
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            assert list(itertools.chain(*numbers(loader))) == list(order.with_epoch(epoch))
        assert len(loader) == -(-order.n // 6)
        loader.set_epoch(5)
        assert list(loader.sampler) == list(order.with_epoch(5)) and len(loader.sampler) == order.n

    def test_resumes_in_the_middle_on_another_number_of_ranks(
        self, loader_of: Any, name: str
    ) -> None:
        ranks = [
            loader_of(rank=rank, world_size=2, batch_size=3, **ORDERS[name]) for rank in range(2)
        ]
        iterators = [iter(rank) for rank in ranks]
        for _ in range(2):
            for iterator in iterators:
                next(iterator)
        state = json.loads(json.dumps(ranks[1].state_dict()))
        alone = loader_of(**ORDERS[name])
        expected = numbers(alone)
        resumed = loader_of(**ORDERS[name])
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert numbers(resumed) == expected[2:]

    def test_another_order_is_refused(self, loader_of: Any, name: str) -> None:
        state = loader_of(**ORDERS[name]).state_dict()
        for strict in (True, False):
            for other, options in ORDERS.items():
                same_but_for_shuffle = {name, other} == {"more", "more, in order"}
                if other != name and not (same_but_for_shuffle and not strict):
                    with pytest.raises(StateError, match="of another order"):
                        loader_of(**options).load_state_dict(state, strict=strict)
            with pytest.raises(StateError, match="of another order"):
                loader_of().load_state_dict(state, strict=strict)


@pytest.mark.parametrize("mode", ["lazy", "cached", "streaming"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_comes_again_is_transformed_anew(
    loader_of: Any, mode: str, workers: int
) -> None:
    def found(**options: Any) -> list[Any]:
        dataset = SquareDataset(transform=RandomProbe(), loading_mode=mode)
        loader = loader_of(dataset, weights=[0] * 40 + [1, 3], collate_fn="list", **options)
        return [sample for batch in loader for sample in batch]

    samples = found(num_workers=workers)
    assert len(samples) == N and len({str(sample) for sample in samples}) == N
    assert [str(s) for s in found(num_workers=0, batch_size=7)] == [str(s) for s in samples]


def test_a_cache_expects_what_is_drawn_again(loader_of: Any) -> None:
    for options, expected in (
        ({"weights": WEIGHTS}, True),
        ({"weights": WEIGHTS, "replacement": False}, False),
        ({}, False),
    ):
        dataset = SquareDataset(loading_mode="cached", cache_size=3)
        seen = []
        dataset.mode.expect_skew = lambda seen=seen: seen.append(True)  # type: ignore[method-assign, misc]
        loader_of(dataset, **options)  # type: ignore[arg-type]
        assert bool(seen) == expected


class TestClasses:
    @pytest.mark.parametrize(
        "dataset",
        [
            Numbers(CLASSES.tolist()),
            Numbers(torch.tensor(CLASSES)),
            Numbers(np.array(["a", "b", "c"])[CLASSES]),
            Subset(Numbers(), range(N)),
            ConcatDataset([Subset(Numbers(), range(20)), Subset(Numbers(), range(20, N))]),
        ],
    )
    def test_are_the_targets_of_the_dataset(self, loader_of: Any, dataset: Any) -> None:
        drawn = list(itertools.chain(*numbers(loader_of(dataset, balanced=True))))
        assert drawn == list(order_of({"balanced": True}))

    def test_of_headrace_s_own(self, loader_of: Any) -> None:
        dataset = SquareDataset()
        dataset.targets = CLASSES
        loader = loader_of(
            dataset.subset(range(0, N, 2)), balanced=True, collate_fn="list", num_samples=30
        )
        assert Counter(int(target) for batch in loader for _, target in batch) == {
            0: 10,
            1: 10,
            2: 10,
        }

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (TensorDataset(torch.arange(N)), "TensorDataset has no targets: give it `targets`"),
            (
                ConcatDataset([Numbers(), TensorDataset(torch.arange(2))]),
                "ConcatDataset has no targets",
            ),
            (Numbers([1, 2, 3]), "Numbers has 3 targets for 42 samples"),
            (Numbers(torch.rand(N)), "integers or strings as classes"),
        ],
    )
    def test_that_are_none(self, loader_of: Any, dataset: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            loader_of(dataset, balanced=True)


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weights": [1], "balanced": True}, "weights and balanced can't be given together"),
            ({"weights": [1], "sampler": [0]}, "sampler and weights can't be given together"),
            ({"weights": [1], "shuffle": True}, "weights is the order"),
            ({"balanced": True, "shuffle": "block"}, "balanced is the order"),
            ({"sampler": [0], "num_samples": 3}, "num_samples has no meaning with sampler"),
            (
                {"batch_sampler": [[0]], "num_samples": 3},
                "num_samples has no meaning with batch_sampler",
            ),
            ({"replacement": False}, "with weights or balanced only"),
            (
                {"bucket_by_length": True, "weights": [1]},
                "bucket_by_length and weights can't be given together",
            ),
            (
                {"bucket_by_length": True, "shuffle": False},
                "bucket_by_length and shuffle=False can't",
            ),
            (
                {"bucket_by_length": True, "shuffle": "block"},
                "bucket_by_length and shuffle='block' can't",
            ),
            ({"bucket_by_length": [3], "num_samples": 2}, "bucket_by_length and num_samples can't"),
            ({"num_samples": 0}, "num_samples must be an integer of at least 1"),
            ({"num_samples": 2.0}, "num_samples must be an integer"),
            ({"balanced": "yes"}, "balanced must be True or False"),
            ({"replacement": None}, "replacement must be True or False"),
        ],
    )
    def test_what_does_not_go_together(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            DataLoaderConfig(**options)

    def test_for_training(self) -> None:
        assert (
            DataLoaderConfig.train(weights=[1]).shuffle is None
            and DataLoaderConfig.train(weights=[1]).drop_last
        )
        assert DataLoaderConfig.train(balanced=True).shuffle is None
        assert DataLoaderConfig.train(num_samples=3).shuffle is True

    def test_weights_that_do_not_fit(self, loader_of: Any) -> None:
        with pytest.raises(ConfigError, match="holds 3 weights, and there are 42 samples"):
            loader_of(weights=[1, 2, 3])

    def test_not_for_an_iterable(self, loader_of: Any) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Any:
                return iter(range(3))

        for options in (
            {"weights": [1]},
            {"balanced": True},
            {"num_samples": 2},
            {"bucket_by_length": [1]},
        ):
            with pytest.raises(
                ConfigError, match=f"{next(iter(options))} can't be given for an IterableDataset"
            ):
                loader_of(Stream(), **options)

    def test_a_validation_draws_nothing(self) -> None:
        module = DataModule(
            Numbers(), Numbers(), num_workers=0, weights=WEIGHTS, replacement=False, num_samples=5
        )
        loader = module.val_dataloader()
        assert loader is not None and list(itertools.chain(*numbers(loader))) == list(range(N))
        assert len(list(itertools.chain(*numbers(module.train_dataloader())))) == 5
        module.close()


class TestLengths:
    def test_that_do_not_fit(self, loader_of: Any) -> None:
        with pytest.raises(ConfigError, match="holds 2 lengths, and there are 42 samples"):
            loader_of(bucket_by_length=[1, 2])
        for dataset in Numbers(), SquareDataset():
            with pytest.raises(ConfigError, match="does not know how long its samples are"):
                loader_of(dataset, bucket_by_length=True)

    def test_of_texts(self, loader_of: Any, tmp_path: Path) -> None:
        words = np.random.default_rng(2).integers(1, 60, 200)
        (tmp_path / "a.txt").write_text("".join("x" * int(n) + "\n" for n in words))
        found = {}
        for bucketed in (False, True):
            loader = loader_of(
                TextDataset(tmp_path, unit="line").subset(range(1, 200)),
                batch_size=8,
                bucket_by_length=bucketed,
            )
            masks = [batch["attention_mask"] for batch in loader]
            found[bucketed] = 1 - sum(int(mask.sum()) for mask in masks) / sum(
                mask.numel() for mask in masks
            )
            assert sum(int(mask.sum()) for mask in masks) == words[1:].sum()
            stats = loader.get_stats()
        assert found[True] < 0.5 * found[False]
        assert stats["padding_fraction"] < 0.5 * stats["padding_fraction_unbucketed"]
        assert abs(stats["padding_fraction_unbucketed"] - found[False]) < 0.1

    def test_padding_is_that_of_the_batches(self, loader_of: Any, tmp_path: Path) -> None:
        """Also where other fields are longer than the texts, and lengths are no tokens."""
        sizes = np.random.default_rng(2).integers(1, 60, 200).tolist()
        rows = [{"text": "a b " * size, "other": "x" * (500 - 7 * size)} for size in sizes]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for tokenizer in (None, lambda text: [1] * (len(text) // 9 + 3)):
            loader = loader_of(
                TextDataset(tmp_path, tokenizer=tokenizer), batch_size=8, bucket_by_length=True
            )
            masks = [batch["attention_mask"] for _ in range(2) for batch in loader]
            real = 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
            stats = loader.get_stats()
            assert (
                stats["padding_fraction"] == pytest.approx(real)
                and real < 0.1 < 0.3 < stats["padding_fraction_unbucketed"]
            )

    def test_of_ranks(self, loader_of: Any) -> None:
        alone = loader_of(bucket_by_length=LENGTHS, batch_size=6)
        ranks = [
            loader_of(
                bucket_by_length=LENGTHS,
                batch_size=3,
                rank=rank,
                world_size=2,
                num_workers=rank * 2,
            )
            for rank in range(2)
        ]
        assert [sorted(a + b) for a, b in zip(*map(numbers, ranks), strict=True)] == [
            sorted(batch) for batch in numbers(alone)
        ]


# -- samplers with a state


class Stateful:
    """A sampler whose order nobody could replay: each pass goes on in a sequence of its own."""

    def __init__(self) -> None:
        self.at, self.loads = 0, 0

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


class StatefulIterator:
    """An iterator that knows where it stands, of a sampler that doesn't."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at == N:
            raise StopIteration
        self.at += 1
        return self.at * 5 % N

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


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


def sampled(sampler: Any) -> dict[str, Any]:
    return (
        {"batch_sampler": sampler, "batch_size": 1}
        if isinstance(sampler, StatefulBatches | BatchSampler)
        else {"sampler": sampler}
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Stateful, OfIterator, StatefulBatches])
class TestSamplersWithAState:
    def test_are_asked_for_it(self, loader_of: Any, make: Any, workers: int) -> None:
        expected = numbers(loader_of(**sampled(make())))
        for received in range(1, 8):
            loader = loader_of(num_workers=workers, **sampled(make()))
            iterator = iter(loader)
            assert [next(iterator).tolist() for _ in range(received)] == expected[:received]
            state = loader.state_dict()
            # what was received, not what was drawn ahead
            assert state["sampler_state"]["state"] == {"at": 6 * received}
            sampler = make()
            resumed = loader_of(num_workers=0, **sampled(sampler))
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert resumed.state_dict() == state
            resumed.set_epoch(0)
            assert numbers(resumed) == expected[received:]

    def test_after_a_break_and_in_a_loader_that_has_run(
        self, loader_of: Any, make: Any, workers: int
    ) -> None:
        loader = loader_of(num_workers=workers, **sampled(make()))
        for _ in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
        assert state["batches"] == 3 and state["sampler_state"]["samples"] == 18
        other = loader_of(**sampled(make()))
        numbers(other)
        other.load_state_dict(state)
        other.load_state_dict(state)
        assert numbers(other) == numbers(loader_of(**sampled(make())))[3:]


def test_a_sampler_goes_on_without_a_replay(loader_of: Any) -> None:
    loader = loader_of(sampler=Stateful())
    iterator = iter(loader)
    next(iterator)
    resumed = loader_of(sampler=(sampler := Stateful()))
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert sampler.loads == 1 and sampler.at == 12


def test_positions_go_on_too(loader_of: Any) -> None:
    """`k` of a sample's random transforms is its position in the epoch."""

    def found(start: int) -> list[str]:
        loader = loader_of(
            SquareDataset(transform=RandomProbe()), sampler=Stateful(), collate_fn="list"
        )
        if start:
            first = loader_of(
                SquareDataset(transform=RandomProbe()), sampler=Stateful(), collate_fn="list"
            )
            for _ in zip(range(start), first, strict=False):
                pass
            loader.load_state_dict(first.state_dict())
        return [str(batch) for batch in loader]

    assert found(3) == found(0)[3:]


def test_a_sampler_without_a_state_is_replayed(loader_of: Any) -> None:
    loader = loader_of(sampler=RandomSampler(range(N)))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert "sampler_state" not in state
    resumed = loader_of(sampler=RandomSampler(range(N)))
    resumed.load_state_dict(state)
    assert numbers(resumed) == [batch.tolist() for batch in iterator]


@pytest.mark.parametrize(("inner", "asked"), [(1, True), (3, True), (4, False), (12, False)])
def test_a_state_that_counts_other_batches_is_not_asked_for(
    loader_of: Any, inner: int, asked: bool
) -> None:
    make = lambda: OrderSampler(N, batch_size=inner, seed=9, rank=0, world_size=1)  # noqa: E731
    expected = numbers(loader_of(sampler=make()))
    loader = loader_of(sampler=make())
    for _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    assert ("sampler_state" in state) == asked
    resumed = loader_of(sampler=make())
    resumed.load_state_dict(state)
    assert numbers(resumed) == expected[3:]


def test_a_sampler_state_that_is_none(loader_of: Any) -> None:
    loader = loader_of(sampler=Stateful())
    next(iter(loader))
    with pytest.raises(StateError, match="its sampler_state is 7"):
        loader_of(sampler=Stateful()).load_state_dict({**loader.state_dict(), "sampler_state": 7})


def test_a_sampler_whose_state_raises_says_so(loader_of: Any) -> None:
    class Broken(Stateful):
        def state_dict(self) -> dict[str, Any]:
            raise OSError("no state today")

    with pytest.raises(OSError, match="no state today"):
        next(iter(loader_of(sampler=Broken())))


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make", [CountsEpochs, BeginsAnew])
def test_a_sampler_that_counts_epochs_goes_on_with_the_next(
    loader_of: Any, make: Any, drop_last: bool, workers: int
) -> None:
    options = {"drop_last": drop_last, "num_workers": workers, "batch_size": 5}
    loader = loader_of(sampler=make(), **options)
    expected = [numbers(loader) for _ in range(4)]
    assert len({str(epoch) for epoch in expected}) == 4
    saving = loader_of(sampler=make(), **options)
    for epoch in range(3):
        assert numbers(saving) == expected[epoch]
        resumed = loader_of(sampler=make(), **options)
        resumed.load_state_dict(json.loads(json.dumps(saving.state_dict())))
        assert [numbers(resumed) for _ in range(epoch + 1, 4)] == expected[epoch + 1 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_after_the_last_batch_and_before_the_end(loader_of: Any, workers: int) -> None:
    """The state is of an epoch of which nothing is left."""
    expected = [numbers(loader) for loader in [loader_of(sampler=CountsEpochs())] for _ in range(2)]
    loader = loader_of(sampler=CountsEpochs(), num_workers=workers)
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    resumed = loader_of(sampler=CountsEpochs(), num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert [numbers(resumed) for _ in range(2)] == [[], expected[1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_is_kept_where_no_iterator_can_be_made(
    loader_of: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, loader = numbers(loader_of()), loader_of()
    next(iter(loader))
    resumed = loader_of(num_workers=workers)
    resumed.load_state_dict(state := loader.state_dict())

    def failing(*_: Any) -> None:
        raise OSError("no process today")

    with monkeypatch.context() as patch:
        patch.setattr(resumed, "_start", failing)
        with pytest.raises(OSError, match="no process today"):
            iter(resumed)
    assert resumed.state_dict() == state and resumed.next_epoch == 0
    assert numbers(resumed) == expected[1:] and resumed.next_epoch == 1
