"""Other people's datasets, streams and samplers work as with a plain torch DataLoader."""

import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from headrace import ConfigError, HeadraceWarning, SampleError, StateError
from headrace.testing.contract import RandomProbe, same
from tests.testing.test_contract import SquareDataset

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture
def loader_of(loader_of: Any) -> Any:
    # a look at memory costs more than such an epoch
    return functools.partial(loader_of, collate_fn="list", enable_monitoring=False)


class Noise(Dataset[tuple[int, float, float, float, float]]):
    """A plain map-style dataset: its index, and random numbers of all kinds."""

    def __init__(self, n: int = 21) -> None:
        self.n, self.generator = n, np.random.default_rng(0)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float, float, float, float]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        drawn = (random.random(), np.random.rand(), float(torch.rand(())))
        return index, *drawn, self.generator.random()


class NoiseInBatches(Noise):
    """One that answers a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list and all(type(i) is int for i in indices)
        return [self[i] for i in indices]


def first(batches: Any) -> list[list[int]]:
    return [[int(sample[0]) for sample in batch] for batch in batches]


def samples_of(batches: Any) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def as_saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


# -- map-style


class SampleBySample(TensorDataset):
    """A dataset of a user's, for all that anybody knows."""


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_are_gathered_as_they_would_be_stacked(loader_of: Any, workers: int) -> None:
    tensors = [
        torch.rand(21, 3, 2).transpose(1, 2),
        torch.arange(21),
        torch.arange(21) % 2 == 0,
        torch.rand(21, 1).bfloat16(),
        torch.zeros(21, 0),
    ]
    options = {"collate_fn": None, "num_workers": workers, "batch_size": 4}
    for sampler in (None, [3, -1, 3, 20, 0, -21]):
        gathered, stacked = (
            list(loader_of(dataset(*tensors), sampler=sampler, **options))
            for dataset in (TensorDataset, SampleBySample)
        )
        assert same(gathered, stacked) and type(gathered[0]) is tuple
    with pytest.raises(IndexError, match="21"):
        list(loader_of(TensorDataset(*tensors), sampler=[3, 21], **options))


@pytest.mark.parametrize(
    "make",
    [
        Noise,
        NoiseInBatches,
        lambda: StackDataset(Noise(9), Noise(9)),
        lambda: Subset(ConcatDataset([Noise(9), NoiseInBatches(9)]), range(17, 3, -1)),
    ],
)
def test_random_transforms_do_not_depend_on_the_workers(loader_of: Any, make: Any) -> None:
    alone, workers = loader_of(make()), loader_of(make(), num_workers=2)
    epochs = []
    for _ in range(2):
        batches = list(alone)
        assert same(batches, list(workers))
        epochs.append({str(sample) for sample in samples_of(batches)})
    assert not epochs[0] & epochs[1], "an epoch repeats the random numbers of another"


def test_foreign_sample_is_independent_of_its_batch(loader_of: Any) -> None:
    for dataset in (Noise(), Subset(Subset(Noise(), range(21)), range(21))):
        by_size = [
            samples_of(loader_of(dataset, batch_size=size, shuffle=False)) for size in (1, 4, 21)
        ]
        assert same(by_size[0], by_size[1]) and same(by_size[0], by_size[2])


class Columns(Dataset[Any]):
    """One that answers a batch with a batch, as a TensorDict does; its collate function has
    nothing to do.
    """

    def __init__(self) -> None:
        self.x = torch.arange(20.0).reshape(10, 2)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index]}

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": self.x[indices], "n": len(indices)}


def as_it_is(batch: Any) -> Any:
    return batch


def test_a_dataset_may_answer_with_a_finished_batch(loader_of: Any) -> None:
    plain = DataLoader(Columns(), batch_size=4, collate_fn=as_it_is)
    loader = loader_of(Columns(), collate_fn=as_it_is, shuffle=False, num_workers=2)
    assert same(list(loader), list(plain))
    assert loader.get_stats()["samples"] == 10


def halves(dataset: Any) -> Any:
    return random_split(dataset, [0.5, 0.5], torch.Generator().manual_seed(1))[1]


@pytest.mark.parametrize("wrap", [halves, lambda ds: Subset(ConcatDataset([ds, ds]), range(60))])
def test_epoch_and_seed_reach_our_datasets_inside_others(loader_of: Any, wrap: Any) -> None:
    def make(**options: Any) -> Any:
        return loader_of(wrap(SquareDataset(transform=RandomProbe())), shuffle=False, **options)

    loader = make()
    epochs = [samples_of(loader) for _ in range(2)]
    assert same(samples_of(make(num_workers=1)), epochs[0])
    for a, b in zip(*epochs, strict=True):
        assert same(a["value"], b["value"]) and not same(a["draws"], b["draws"])
    assert not same(samples_of(make(seed=6)), epochs[0])


def test_a_subset_gives_what_a_view_gives(loader_of: Any) -> None:
    chosen = [30, 7, 7, 2, 15]
    ours = SquareDataset(transform=RandomProbe()).subset(chosen)
    theirs = Subset(SquareDataset(transform=RandomProbe()), chosen)
    assert same(list(loader_of(ours, shuffle=False)), list(loader_of(theirs, shuffle=False)))


@WORKERS
def test_bad_samples_of_inner_datasets(loader_of: Any, workers: int) -> None:
    parts = [SquareDataset(bad=[3], on_error="skip"), SquareDataset(bad=[4, 5], on_error="skip")]
    both = loader_of(ConcatDataset(parts), num_workers=workers, batch_size=50)
    assert sum(map(len, both)) == 81
    assert both.get_stats()["skipped"] == 3
    options = {"num_workers": workers, "batch_size": 2, "shuffle": False}
    with pytest.raises(SampleError, match=r"none of the .* sample 5"):
        list(loader_of(ConcatDataset(parts[1:]), **options))
    with pytest.raises(SampleError, match=r"^sample 4"):
        list(loader_of(ConcatDataset([SquareDataset(bad=[4])]), **options))


def test_anything_with_a_length_and_items_is_a_dataset(loader_of: Any) -> None:
    for data in (list(range(10)), tuple(range(10)), range(10), np.arange(10), torch.arange(10)):
        loader = loader_of(data, collate_fn=None)
        assert sorted(int(i) for batch in loader for i in batch) == list(range(10)), type(data)


# -- streams


class Count(IterableDataset[int]):
    """Counts to n, shared out to the workers as torch's documentation has it; with random numbers
    of the global generators, and of one of its own.
    """

    def __init__(self, n: int | None, noise: bool = False) -> None:
        self.n, self.noise, self.generator = n, noise, np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for i in itertools.count(worker, workers):
            if self.n is not None and i >= self.n:
                return
            if self.noise:
                drawn = random.random(), np.random.rand(), float(torch.rand(()))
                yield i, *drawn, self.generator.random()
            else:
                yield i


class SizedCount(Count):
    def __len__(self) -> int:
        assert self.n is not None
        return self.n


class Uneven(IterableDataset[int]):
    """Worker w has 3 w samples; without workers there are 5."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(5) if info is None else (100 * info.id + i for i in range(3 * info.id))


@WORKERS
def test_a_stream_gives_what_torch_s_loader_gives(loader_of: Any, workers: int) -> None:
    streams = [(Count(0), True), (SizedCount(1), False), (SizedCount(17), True), (Uneven(), False)]
    for stream, drops in streams:
        options = {"batch_size": 4, "num_workers": workers, "drop_last": drops, "collate_fn": list}
        expected = list(DataLoader(stream, **options))
        loader = loader_of(stream, **options)
        for _ in range(2):
            assert list(loader) == expected, stream
    assert len(loader_of(SizedCount(17), num_workers=workers)) == 5
    with pytest.raises(TypeError, match="Count"):
        len(loader_of(Count(17), num_workers=workers))


class Finished(Count):
    """A stream of finished batches."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((i + 1, 2), i) for i in super().__iter__())


@WORKERS
def test_a_stream_of_finished_batches(loader_of: Any, workers: int) -> None:
    loader = loader_of(Finished(7), num_workers=workers, batch_size=None, collate_fn=None)
    for _ in range(2):
        batches = sorted(loader, key=len)
        assert [tuple(batch.shape) for batch in batches] == [(i + 1, 2) for i in range(7)]
        assert all((batch == len(batch) - 1).all() for batch in batches)


def test_a_stream_with_more_batches_than_its_length_says(loader_of: Any) -> None:
    """Two workers with 5 samples each make 4 batches of 4, not 3."""
    loader = loader_of(SizedCount(10), num_workers=2)
    expected = list(loader)
    assert len(expected) == 4
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    fresh = loader_of(SizedCount(10), num_workers=2)
    fresh.load_state_dict(loader.state_dict())
    assert list(fresh) == expected[3:]


def test_a_stream_is_not_resumed_with_another_number_of_workers(loader_of: Any) -> None:
    loader = loader_of(Count(30), num_workers=2)
    next(iter(loader))
    for strict in (True, False):
        other = loader_of(Count(30), num_workers=0)
        with pytest.raises(StateError, match="workers was 2, is 1"):
            other.load_state_dict(loader.state_dict(), strict=strict)
    one, none = loader_of(Count(30), num_workers=1), loader_of(Count(30))
    next(iter(one))
    none.load_state_dict(one.state_dict())  # the same shares
    assert samples_of(none) == list(range(4, 30))


class LargeCount(Count):
    """Samples of 0.8 MB."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((100_000,), number) for number in super().__iter__())


def test_workers_given_up_for_want_of_memory_are_in_a_stream_s_state(loader_of: Any) -> None:
    options = {"prefetch_factor": 1, "max_memory_usage": "10MB", "batch_size": 2}
    loader, other = (loader_of(LargeCount(12), num_workers=2, **options) for _ in range(2))
    with pytest.warns(HeadraceWarning, match="in the next epoch there will be fewer"):
        next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 5 and loader.num_workers == 2, "in the midst of an epoch"
    with pytest.warns(HeadraceWarning, match="lowered to 1 x 1"):
        next(iter(loader))
    assert loader.num_workers == 1
    with pytest.raises(StateError, match="workers was 1, is 2"):
        other.load_state_dict(loader.state_dict())


class Stumbles:
    """An iterator that goes on after an error."""

    def __init__(self) -> None:
        self.numbers = iter(range(12))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        number = next(self.numbers)
        if number == 5:
            raise ValueError("number five")
        return number


class Stumbling(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return Stumbles()


@WORKERS
def test_a_stream_that_raises_and_can_go_on(loader_of: Any, workers: int) -> None:
    shares = max(1, workers)
    iterator = iter(loader_of(Stumbling(), num_workers=workers))
    received = [next(iterator) for _ in range(shares)]
    for _ in range(shares):
        with pytest.raises(ValueError, match="number five"):
            next(iterator)
    received += list(iterator)
    each = Counter(samples_of(received))
    assert set(each.values()) == {shares} and set(each) >= {0, 1, 2, 3, 6, 7, 8, 9, 10, 11}


def test_a_stream_has_an_order_of_its_own(loader_of: Any) -> None:
    for name, value in (
        ("shuffle", True),
        ("shuffle", "block"),
        ("sampler", [0]),
        ("batch_sampler", [[0]]),
    ):
        with pytest.raises(ConfigError):
            loader_of(Count(3), **{name: value})
            pytest.fail(f"{name}={value!r} is accepted")
    assert samples_of(loader_of(Count(3), shuffle=False)) == [0, 1, 2]


# -- samplers


class Evens:
    """A sampler of one's own, with `set_epoch`."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 20, 2))


class RandomWalk:
    """Draws all the time, without a length."""

    def __init__(self, own: bool) -> None:
        self.generator = np.random.default_rng(8) if own else None

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            if self.generator is not None:
                yield int(self.generator.integers(21))
            else:
                yield random.randrange(21)


def test_a_sampler_is_the_order(loader_of: Any) -> None:
    sampler = Evens()
    loader = loader_of(Noise(), sampler=sampler, num_workers=2)
    assert loader.sampler is sampler and loader.config.shuffle is False
    for _ in range(2):
        assert first(loader) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    dropping = loader_of(Noise(), sampler=sampler, drop_last=True)
    assert first(dropping) == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert sampler.epochs == [0, 1, 0]
    with pytest.raises(TypeError):
        len(loader)


def test_a_batch_sampler_makes_the_batches(loader_of: Any) -> None:
    batches = [[1, 2, 3], [4], [20, 0]]
    loader = loader_of(Noise(), batch_sampler=batches, num_workers=2, batch_size=8)
    assert loader.batch_sampler is batches and loader.batch_size is None
    for _ in range(2):
        assert first(loader) == batches
    # the batch size means nothing beside it
    loader_of(Noise(), batch_sampler=batches, batch_size=32).load_state_dict(loader.state_dict())


def random_batches() -> BatchSampler:
    return BatchSampler(RandomSampler(range(21)), 5, drop_last=False)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sampler", lambda: RandomSampler(range(21), generator=torch.Generator().manual_seed(9))),
        ("sampler", lambda: WeightedRandomSampler([1.0, 5.0, 2.0] * 7, 25)),
        ("batch_sampler", random_batches),
        ("sampler", lambda: RandomWalk(own=False)),
        ("sampler", lambda: RandomWalk(own=True)),
    ],
)
def test_a_sampler_is_replayed_on_resume(loader_of: Any, name: str, make: Any) -> None:
    loader = loader_of(Noise(), **{name: make()})
    epochs = [list(loader) for _ in range(3)]
    torch.manual_seed(3)
    random.seed(3)
    interrupted = loader_of(Noise(), num_workers=1, **{name: make()})
    list(interrupted)
    received = [next(iter(interrupted))]
    state = as_saved(interrupted)
    assert (state["epoch"], state["batches"]) == (1, 1)
    torch.manual_seed(99)
    random.seed(99)
    fresh = loader_of(Noise(), **{name: make()})
    fresh.load_state_dict(state)
    assert same(received + list(fresh), epochs[1])
    ended = loader_of(Noise(), **{name: make()})
    ended.load_state_dict(fresh.state_dict())
    assert same(list(ended), epochs[2])


class Scaled(Noise):
    """Its keys are (index, size), as samplers of multi-scale training give them."""

    def __getitem__(self, key: Any) -> Any:
        return (*super().__getitem__(key[0]), key[1])


def test_a_sampler_may_give_keys(loader_of: Any) -> None:
    letters = {"a": 1, "b": 2, "c": 3}  # a dict is a dataset too
    loader = loader_of(letters, sampler="cab", num_workers=2, batch_size=2)
    assert list(loader) == [[3, 1], [2]]
    keys = [(3, 32), (3, 32), (4, 64)]
    for order in ({"sampler": keys}, {"batch_sampler": [keys]}):
        (batch,) = loader_of(Scaled(), num_workers=2, **order)
        assert [(sample[0], sample[-1]) for sample in batch] == keys
        assert len({sample[1] for sample in batch}) == 3


def test_indices_of_any_integer_type(loader_of: Any) -> None:
    for sampler in (
        np.array([4, 2, 9]),
        torch.tensor([4, 2, 9]),
        [np.int32(4), torch.tensor(2), 9],
    ):
        assert first(loader_of(SquareDataset(), sampler=sampler)) == [[4, 2, 9]]
    batches = [np.array([4, 2]), torch.tensor([9])]
    assert first(loader_of(SquareDataset(), batch_sampler=batches)) == [[4, 2], [9]]


def fails_after_four() -> Iterator[int]:
    yield from range(4)
    raise ValueError("the sampler is at fault")


@WORKERS
def test_failing_sampler_is_an_error(loader_of: Any, workers: int) -> None:
    with pytest.raises(ValueError, match="at fault"):
        list(loader_of(Noise(), sampler=fails_after_four(), num_workers=workers))
