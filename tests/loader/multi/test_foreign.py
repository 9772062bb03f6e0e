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
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from headrace import ConfigError, OrderSampler, SampleError, StateError
from headrace.testing.contract import RandomProbe, same
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(6)

WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])


@pytest.fixture
def loader_of(loader_of: Any) -> Any:
    return functools.partial(loader_of, collate_fn="list")


class Noise(Dataset[tuple[int, float, float, float, float]]):
    """A plain map-style dataset: its index, and random numbers of all kinds."""

    def __init__(self, n: int = 21) -> None:
        self.n, self.generator = n, np.random.default_rng(0)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float, float, float, float]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return (
            index,
            random.random(),
            np.random.rand(),
            float(torch.rand(())),
            self.generator.random(),
        )


class NoiseInBatches(Noise):
    """One that answers a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list and all(type(i) is int for i in indices)
        return [(*self[i], len(indices)) for i in indices]


def first(batches: Any) -> list[list[int]]:
    return [[int(sample[0]) for sample in batch] for batch in batches]


# -- map-style


def test_a_tensor_dataset(loader_of: Any) -> None:
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    loader = loader_of(TensorDataset(x, y), num_workers=None, collate_fn=None)
    assert loader.num_workers == 0
    for batch in loader:
        assert type(batch) is tuple
        assert torch.equal(x[batch[1]], batch[0]) and batch[0].dtype == torch.float32
    seen = torch.cat([batch[1] for batch in loader])
    assert sorted(seen.tolist()) == list(range(10)) and seen.tolist() != list(range(10))


@pytest.mark.parametrize(
    "make",
    [
        Noise,
        NoiseInBatches,
        lambda: Subset(Noise(), list(range(20, 2, -1))),
        lambda: ConcatDataset([Noise(8), Noise(13)]),
        lambda: random_split(Noise(), [15, 6], torch.Generator().manual_seed(1))[0],
        lambda: StackDataset(Noise(9), Noise(9)),
        lambda: Subset(ConcatDataset([Noise(9), NoiseInBatches(9)]), range(18)),
    ],
)
def test_random_transforms_do_not_depend_on_the_workers(loader_of: Any, make: Any) -> None:
    loaders = [loader_of(make(), num_workers=workers) for workers in (0, 1, 3)]
    epochs = []
    for _ in range(2):
        batches = [list(loader) for loader in loaders]
        assert same(batches[0], batches[1]) and same(batches[0], batches[2])
        epochs.append(sorted(str(sample) for batch in batches[0] for sample in batch))
    assert not set(epochs[0]) & set(epochs[1]), "an epoch repeats the random numbers of another"


def test_foreign_sample_is_independent_of_its_batch(loader_of: Any) -> None:
    for make in (
        Noise,
        lambda: Subset(Noise(), range(21)),
        lambda: Subset(Subset(Noise(), range(21)), range(21)),
    ):
        by_size = []
        for size in (1, 4, 21):
            batches = list(loader_of(make(), batch_size=size, shuffle=False))
            by_size.append([sample for batch in batches for sample in batch])
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


@WORKERS
def test_a_dataset_may_answer_with_a_finished_batch(loader_of: Any, workers: int) -> None:
    plain = torch.utils.data.DataLoader(Columns(), batch_size=4, collate_fn=as_it_is)
    loader = loader_of(Columns(), collate_fn=as_it_is, shuffle=False, num_workers=workers)
    for _ in range(2):
        assert same(list(loader), list(plain))
    assert loader.get_stats()["samples"] == 20


@pytest.mark.quick_every(6)
@WORKERS
@pytest.mark.parametrize(
    "wrap",
    [
        lambda ds: Subset(ds, range(30, 8, -1)),
        lambda ds: ConcatDataset([ds, SquareDataset(transform=RandomProbe())]),
        lambda ds: random_split(ds, [0.5, 0.5], torch.Generator().manual_seed(1))[1],
        lambda ds: Subset(ConcatDataset([ds, ds]), range(60)),
    ],
)
def test_epoch_and_seed_reach_our_datasets_inside_others(
    loader_of: Any, workers: int, wrap: Any
) -> None:
    def make(**options: Any) -> Any:
        return loader_of(wrap(SquareDataset(transform=RandomProbe())), shuffle=False, **options)

    loader, alone = make(num_workers=workers), make()
    epochs = [list(loader) for _ in range(2)]
    assert same(epochs, [list(alone) for _ in range(2)])
    for a, b in zip(*epochs, strict=True):
        assert same([s["value"] for s in a], [s["value"] for s in b])
        assert not any(same(x["draws"], y["draws"]) for x, y in zip(a, b, strict=True))
    other = list(make(seed=6))
    assert not same(other[0], epochs[0][0])


@WORKERS
def test_a_subset_gives_what_a_view_gives(loader_of: Any, workers: int) -> None:
    chosen = [30, 7, 7, 2, 15]
    ours = SquareDataset(transform=RandomProbe()).subset(chosen)
    torch_s = Subset(SquareDataset(transform=RandomProbe()), chosen)
    assert same(
        list(loader_of(ours, shuffle=False)),
        list(loader_of(torch_s, shuffle=False, num_workers=workers)),
    )


@WORKERS
def test_what_inner_datasets_count_is_counted(loader_of: Any, workers: int) -> None:
    parts = [SquareDataset(bad=[3], on_error="skip"), SquareDataset(bad=[4, 5], on_error="skip")]
    loader = loader_of(Subset(parts[0], range(42)), num_workers=workers)
    assert sum(map(len, loader)) == 41
    assert loader.get_stats()["skipped"] == 1
    both = loader_of(ConcatDataset(parts), num_workers=workers, batch_size=50)
    assert sum(map(len, both)) == 81
    assert both.get_stats()["skipped"] == 3


@WORKERS
def test_a_batch_of_inner_samples_that_are_all_bad_is_an_error(
    loader_of: Any, workers: int
) -> None:
    parts = [SquareDataset(bad=[4, 5], on_error="skip"), SquareDataset()]
    loader = loader_of(ConcatDataset(parts), num_workers=workers, batch_size=2, shuffle=False)
    with pytest.raises(
        SampleError, match="none of the 1 samples of a batch can be read; the first: sample 5"
    ):
        list(loader)
    raising = loader_of(
        ConcatDataset([SquareDataset(bad=[4])]), num_workers=workers, batch_size=8, shuffle=False
    )
    with pytest.raises(SampleError, match="sample 4 can't be read"):
        list(raising)


@pytest.mark.parametrize(
    "data", [list(range(10)), tuple(range(10)), range(10), np.arange(10), torch.arange(10)]
)
def test_anything_with_a_length_and_items_is_a_dataset(loader_of: Any, data: Any) -> None:
    loader = loader_of(data, collate_fn=None)
    assert sorted(int(i) for batch in loader for i in batch) == list(range(10))


def test_lists_of_tensors_and_dicts(loader_of: Any) -> None:
    data = [{"x": torch.full((3,), i), "y": i} for i in range(6)]
    (batch,) = loader_of(data, batch_size=6, shuffle=False, collate_fn=None)
    assert batch["x"].shape == (6, 3) and batch["y"].tolist() == list(range(6))


# -- streams


class Count(IterableDataset[int]):
    """Counts to n, shared out to the workers as torch's documentation has it."""

    def __init__(self, n: int | None, noise: bool = False) -> None:
        self.n, self.noise, self.started = n, noise, 0

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        numbers = (
            itertools.count(worker, workers) if self.n is None else range(worker, self.n, workers)
        )
        for i in numbers:
            yield (i, random.random(), np.random.rand(), float(torch.rand(()))) if self.noise else i


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
@pytest.mark.parametrize("n", [0, 1, 3, 4, 17])
@pytest.mark.parametrize("kind", [Count, SizedCount])
def test_a_stream_gives_each_sample_once_in_every_epoch(
    loader_of: Any, workers: int, n: int, kind: Any
) -> None:
    loader = loader_of(kind(n), num_workers=workers)
    for _ in range(3):
        batches = list(loader)
        assert sorted(itertools.chain(*batches)) == list(range(n))
        assert all(1 <= len(batch) <= 4 for batch in batches)
    if kind is SizedCount and workers < 2:
        assert len(loader) == len(batches)
    if kind is Count:
        with pytest.raises(TypeError, match="Count"):
            len(loader)


@WORKERS
def test_a_stream_s_order_is_torch_s(loader_of: Any, workers: int) -> None:
    plain = torch.utils.data.DataLoader(
        Count(17), batch_size=4, num_workers=workers, collate_fn=list
    )
    assert list(loader_of(Count(17), num_workers=workers)) == list(plain)
    dropping = torch.utils.data.DataLoader(
        Count(17), batch_size=4, num_workers=workers, collate_fn=list, drop_last=True
    )
    assert list(loader_of(Count(17), num_workers=workers, drop_last=True)) == list(dropping)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_of_a_stream_may_have_unequal_shares(loader_of: Any, workers: int) -> None:
    expected = (
        range(5) if workers == 0 else [100 * w + i for w in range(workers) for i in range(3 * w)]
    )
    loader = loader_of(Uneven(), num_workers=workers, batch_size=2)
    for _ in range(3):
        assert sorted(itertools.chain(*loader)) == list(expected)


@WORKERS
def test_drop_last_drops_each_worker_s_rest(loader_of: Any, workers: int) -> None:
    loader = loader_of(Count(17), num_workers=workers, drop_last=True)
    for _ in range(2):
        batches = list(loader)
        assert all(len(batch) == 4 for batch in batches) and len(batches) == 4


@WORKERS
def test_a_stream_of_finished_batches(loader_of: Any, workers: int) -> None:
    class Batches(Count):
        def __iter__(self) -> Iterator[Any]:
            return (torch.full((i + 1, 2), i) for i in super().__iter__())

    loader = loader_of(Batches(7), num_workers=workers, batch_size=None, collate_fn=None)
    for _ in range(2):
        batches = sorted(loader, key=len)
        assert [tuple(batch.shape) for batch in batches] == [(i + 1, 2) for i in range(7)]
        assert all((batch == len(batch) - 1).all() for batch in batches)


@WORKERS
def test_an_endless_stream(loader_of: Any, workers: int) -> None:
    loader = loader_of(Count(None), num_workers=workers)
    for _ in range(2):
        seen = list(itertools.chain(*itertools.islice(loader, 6)))
        assert len(seen) == len(set(seen)) == 24
    assert loader.state_dict()["batches"] == 6 and loader.state_dict()["length"] is None


@WORKERS
def test_a_stream_s_random_numbers_follow_seed_and_epoch(loader_of: Any, workers: int) -> None:
    epochs = [
        list(loader)
        for loader in [loader_of(Count(12, noise=True), num_workers=workers)]
        for _ in range(2)
    ]
    again = loader_of(Count(12, noise=True), num_workers=workers)
    assert same(epochs, [list(again) for _ in range(2)])
    other = list(loader_of(Count(12, noise=True), num_workers=workers, seed=6))
    draws = [sample[1:] for epoch in [*epochs, other] for batch in epoch for sample in batch]
    assert len(set(draws)) == 36, "workers, epochs or seeds share their random numbers"


class OwnGenerator(Count):
    """Its random numbers come out of a generator of its own."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        return ((i, self.generator.random()) for i in super().__iter__())


@WORKERS
def test_a_stream_s_own_generator_is_resumed(loader_of: Any, workers: int) -> None:
    loader = loader_of(OwnGenerator(20), num_workers=workers)
    epochs = [list(loader) for _ in range(2)]
    assert not same(epochs[0][0], epochs[1][0])
    again = loader_of(OwnGenerator(20), num_workers=workers)
    list(again)
    next(iter(again))
    state = again.state_dict()
    fresh = loader_of(OwnGenerator(20), num_workers=workers)
    fresh.load_state_dict(state)
    assert same(list(fresh), epochs[1][1:])


@WORKERS
@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_a_stream_is_resumed_by_replay(loader_of: Any, workers: int, at: int) -> None:
    loader = loader_of(Count(14, noise=True), num_workers=workers)
    list(loader)
    expected = list(loader)
    loader.set_epoch(1)
    iterator = iter(loader)
    for _ in range(at):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["batches"]) == (1, at)
    del iterator
    fresh = loader_of(Count(14, noise=True), num_workers=workers)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    fresh.set_epoch(1)
    assert same(list(fresh), expected[at:])
    assert fresh.state_dict()["batches"] == len(expected)
    loader.set_epoch(2)
    assert same(list(fresh), list(loader))


@WORKERS
@pytest.mark.parametrize("make", [lambda: Count(9), lambda: SizedCount(9), Uneven])
def test_the_end_of_a_stream_s_epoch_is_known(loader_of: Any, workers: int, make: Any) -> None:
    loader = loader_of(make(), num_workers=workers)
    expected = list(loader)
    state = loader.state_dict()
    for call, rest in ((None, expected), (0, []), (1, expected)):
        fresh = loader_of(make(), num_workers=workers)
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
        if call is not None:
            fresh.set_epoch(call)
        assert list(fresh) == rest


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
    with pytest.raises(StateError, match="workers was 2, is 3"):
        loader_of(Count(30), num_workers=3).load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="workers was 2, is 1"):
        loader_of(Count(30), num_workers=0).load_state_dict(loader.state_dict(), strict=False)
    one = loader_of(Count(30), num_workers=1)
    next(iter(one))
    none = loader_of(Count(30), num_workers=0)
    none.load_state_dict(one.state_dict())  # the same shares
    assert first_numbers(none) == list(range(4, 30))


def first_numbers(loader: Any) -> list[int]:
    return [i for batch in loader for i in batch]


@WORKERS
def test_a_stream_that_raises_and_can_go_on(loader_of: Any, workers: int) -> None:
    class Stumbles:
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

    iterator = iter(loader_of(Stumbling(), num_workers=workers))
    received = [next(iterator) for _ in range(max(1, workers))]
    for _ in range(max(1, workers)):
        with pytest.raises(ValueError, match="number five"):
            next(iterator)
    received += list(iterator)
    each = Counter(i for batch in received for i in batch)
    assert set(each.values()) == {max(1, workers)} and set(each) >= {0, 1, 2, 3, 6, 7, 8, 9, 10, 11}


@WORKERS
def test_worker_init_fn_may_share_a_stream_out(loader_of: Any, workers: int) -> None:
    """The second example of torch's documentation of IterableDataset."""
    loader = loader_of(Range(3, 20), num_workers=workers, worker_init_fn=share_out)
    for _ in range(2):
        assert sorted(first_numbers(loader)) == list(range(3, 20))


class Range(IterableDataset[int]):
    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def share_out(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    start, end = dataset.start, dataset.end
    per_worker = -(-(end - start) // info.num_workers)
    dataset.start = start + worker_id * per_worker
    dataset.end = min(dataset.start + per_worker, end)


def test_a_chain_of_streams(loader_of: Any) -> None:
    assert first_numbers(loader_of(ChainDataset([Range(0, 5), Range(5, 9)]))) == list(range(9))


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"shuffle": "block"}, {"sampler": [0]}, {"batch_sampler": [[0]]}]
)
def test_a_stream_has_an_order_of_its_own(loader_of: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="IterableDataset"):
        loader_of(Count(3), **options)
    assert first_numbers(loader_of(Count(3), shuffle=False)) == [0, 1, 2]


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
            yield (
                int(self.generator.integers(21))
                if self.generator is not None
                else random.randrange(21)
            )


@WORKERS
def test_a_sampler_is_the_order(loader_of: Any, workers: int) -> None:
    sampler = Evens()
    loader = loader_of(Noise(), sampler=sampler, num_workers=workers)
    assert loader.sampler is sampler and loader.config.shuffle is False
    for _ in range(2):
        assert first(loader) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert first(loader_of(Noise(), sampler=sampler, drop_last=True)) == [
        [0, 2, 4, 6],
        [8, 10, 12, 14],
    ]
    assert sampler.epochs == [0, 1, 0]
    with pytest.raises(TypeError, match="length"):
        len(loader)


def test_lengths_with_samplers(loader_of: Any) -> None:
    assert len(loader_of(Noise(), sampler=list(range(10)))) == 3
    assert len(loader_of(Noise(), sampler=list(range(10)), drop_last=True)) == 2
    assert len(loader_of(Noise(), sampler=list(range(10)), batch_size=None, collate_fn=None)) == 10
    assert len(loader_of(Noise(), batch_sampler=[[1, 2], [3]])) == 2


@WORKERS
def test_a_batch_sampler_makes_the_batches(loader_of: Any, workers: int) -> None:
    batches = [[1, 2, 3], [4], [20, 0]]
    loader = loader_of(Noise(), batch_sampler=batches, num_workers=workers)
    assert loader.batch_sampler is batches and loader.batch_size is None
    for _ in range(2):
        assert first(loader) == batches
    torch_s = loader_of(
        Noise(),
        batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, drop_last=True),
        num_workers=workers,
    )
    assert first(torch_s) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_set_epoch_reaches_the_sampler_inside_a_batch_sampler(loader_of: Any) -> None:
    sampler = DistributedSampler(range(21), num_replicas=2, rank=1, seed=3)
    loader = loader_of(Noise(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    epochs = [first(loader) for _ in range(2)]
    assert sampler.epoch == 1 and epochs[0] != epochs[1]
    loader.set_epoch(0)
    assert first(loader) == epochs[0]


def test_an_order_sampler_may_be_given(loader_of: Any) -> None:
    sampler = OrderSampler(21, batch_size=4, seed=5)
    assert first(loader_of(Noise(), sampler=sampler)) == first(loader_of(Noise()))


@WORKERS
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"sampler": RandomSampler(range(21))},
        lambda: {"sampler": RandomSampler(range(21), replacement=True, num_samples=30)},
        lambda: {"sampler": RandomSampler(range(21), generator=torch.Generator().manual_seed(9))},
        lambda: {"sampler": WeightedRandomSampler([1.0, 5.0, 2.0] * 7, 25)},
        lambda: {"sampler": SubsetRandomSampler(range(3, 20))},
        lambda: {"batch_sampler": BatchSampler(RandomSampler(range(21)), 5, drop_last=False)},
        lambda: {"sampler": DistributedSampler(range(21), num_replicas=1, rank=0)},
        lambda: {"sampler": RandomWalk(own=False)},
        lambda: {"sampler": RandomWalk(own=True)},
        lambda: {"sampler": [5, 5, 5, 2, 5, 9, 1]},
    ],
)
def test_a_sampler_is_replayed_on_resume(loader_of: Any, workers: int, make: Any) -> None:
    loader = loader_of(Noise(), **make())
    epochs = [list(loader) for _ in range(2)]
    random.seed(workers)
    torch.manual_seed(workers)
    interrupted = loader_of(Noise(), num_workers=workers, **make())
    list(interrupted)
    iterator = iter(interrupted)
    received = [next(iterator)]
    state = json.loads(json.dumps(interrupted.state_dict()))
    assert (state["epoch"], state["batches"]) == (1, 1)
    random.seed(99)
    torch.manual_seed(99)
    fresh = loader_of(Noise(), **make())
    fresh.load_state_dict(state)
    assert same(received + list(fresh), epochs[1])
    ended = loader_of(Noise(), **make())
    ended.load_state_dict(fresh.state_dict())
    loader.set_epoch(2)
    assert same(list(ended), list(loader))


@WORKERS
@pytest.mark.parametrize("dataset", [lambda: SquareDataset(transform=RandomProbe()), Noise])
def test_an_index_that_comes_again_draws_anew(loader_of: Any, workers: int, dataset: Any) -> None:
    for order in ({"sampler": [3] * 12}, {"batch_sampler": [[3] * 4, [3] * 4, [3] * 4]}):
        batches = list(loader_of(dataset(), num_workers=workers, **order))
        draws = [
            str(sample["draws"].tolist() if isinstance(sample, dict) else sample)
            for batch in batches
            for sample in batch
        ]
        assert len(set(draws)) == 12
        assert same(batches, list(loader_of(dataset(), **order)))


def test_orders_of_different_kinds_don_t_share_a_state(loader_of: Any) -> None:
    loaders = {
        "True": loader_of(Noise()),
        "'sampler'": loader_of(Noise(), sampler=range(21)),
        "'batch_sampler'": loader_of(Noise(), batch_sampler=[[1, 2]]),
    }
    for (one, mine), (other, theirs) in itertools.permutations(loaders.items(), 2):
        for strict in (True, False):
            with pytest.raises(StateError, match=f"shuffle was {other}, is {one}") as refused:
                mine.load_state_dict(theirs.state_dict(), strict=strict)
            assert "strict=False" not in str(refused.value)


def test_the_seed_of_a_sampler_s_order_may_be_adopted(loader_of: Any) -> None:
    expected = list(loader_of(Noise(), sampler=RandomWalk(own=False), seed=5))
    loader = loader_of(Noise(), sampler=RandomWalk(own=False), seed=6)
    state = {**loader.state_dict(), "seed": 5, "batches": 1}
    with pytest.raises(StateError, match="seed was 5, is 6"):
        loader.load_state_dict(state)
    loader.load_state_dict(state, strict=False)
    assert same(list(loader), expected[1:])


def test_the_batch_size_means_nothing_beside_a_batch_sampler(loader_of: Any) -> None:
    state = loader_of(Noise(), batch_sampler=[[1, 2], [3]], batch_size=8).state_dict()
    loader_of(Noise(), batch_sampler=[[1, 2], [3]], batch_size=32).load_state_dict(state)


@WORKERS
def test_a_sampler_may_give_keys(loader_of: Any, workers: int) -> None:
    """A dict is a dataset too, and samplers of multi-scale training give (index, size)."""
    assert list(
        loader_of({"a": 1, "b": 2, "c": 3}, sampler="cab", num_workers=workers, batch_size=2)
    ) == [[3, 1], [2]]

    class Scaled(Noise):
        def __getitem__(self, key: Any) -> Any:
            return (*super().__getitem__(key[0]), key[1])

    for order in (
        {"sampler": [(3, 32), (3, 32), (4, 64)]},
        {"batch_sampler": [[(3, 32), (3, 32), (4, 64)]]},
    ):
        (batch,) = loader_of(Scaled(), num_workers=workers, **order)
        assert [(s[0], s[-1]) for s in batch] == [(3, 32), (3, 32), (4, 64)] and len(
            {s[1] for s in batch}
        ) == 3


def test_indices_of_any_integer_type(loader_of: Any) -> None:
    expected = first(loader_of(SquareDataset(), sampler=[4, 2, 9, 1, 0]))
    for sampler in (
        np.array([4, 2, 9, 1, 0]),
        torch.tensor([4, 2, 9, 1, 0]),
        [np.int32(4), 2, torch.tensor(9), 1, 0],
    ):
        assert first(loader_of(SquareDataset(), sampler=sampler)) == expected
    assert first(
        loader_of(SquareDataset(), batch_sampler=[np.array([4, 2]), torch.tensor([9])])
    ) == [[4, 2], [9]]


@WORKERS
def test_failing_sampler_is_an_error(loader_of: Any, workers: int) -> None:
    class Fails:
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise ValueError("the sampler is at fault")

    with pytest.raises(ValueError, match="the sampler is at fault"):
        list(loader_of(Noise(), sampler=Fails(), num_workers=workers))


@WORKERS
def test_batch_size_none_on_a_map_style_dataset(loader_of: Any, workers: int) -> None:
    loader = loader_of(Noise(), batch_size=None, collate_fn=None, num_workers=workers)
    samples = list(loader)
    assert len(loader) == len(samples) == 21 and sorted(sample[0] for sample in samples) == list(
        range(21)
    )
    assert same(samples, list(loader_of(Noise(), batch_size=None, collate_fn=None)))
    order = loader_of(
        Noise(), batch_size=None, collate_fn=None, sampler=[4, 2], num_workers=workers
    )
    assert [sample[0] for sample in order] == [4, 2]
