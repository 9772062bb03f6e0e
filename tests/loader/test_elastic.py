"""Image, HDF5 and Zarr datasets give the same global batches to every world size and mode, and each
step is resumed by all.

The batches that are expected come from the order and from samples made one at a time; what
`tests/order/test_elastic.py` shows of orders, this shows of loaders, with their samples' values and
random numbers: augmentation depends neither on ranks nor on workers, nor on where a run was
resumed. Each pair of the factors is tried, without and with worker processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from headrace import HDF5Dataset, ImageDataset, StateError, ZarrDataset
from headrace.loader.loader import Loader
from headrace.testing.contract import MODES, SHUFFLES, RandomProbe, same
from tests.covering import covering
from tests.data.make import make_photos
from tests.order.test_elastic import WORLDS, cuts_of, dealt, is_too_short

GLOBAL_BATCH, SEED, EPOCH = 12, 5, 1
KINDS = ("image", "hdf5", "zarr")
FLAGS = (False, True)
# tails of 2, 1 and 5: some below the world size, and one above all but 6
SIZES = {"image": 26, "hdf5": 37, "zarr": 29}
# all; none, one, fewer than the ranks, fewer than a global batch, and just one
LENGTHS = (99, 0, 1, 5, 11, 12)


def pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations that hold each pair of values of two factors."""
    return covering(list(itertools.product(*factors)))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny files: 26 images in folders of 13, 37 rows in three HDF5 files of 20, 1 and 16, 29
    rows in Zarr shards of 8.
    """
    folder = tmp_path_factory.mktemp("elastic")
    make_photos(folder / "image", classes=("circle", "noise"), per_class=13, size=(8, 6))
    rows = np.random.default_rng(3).integers(0, 255, (37, 3, 2), dtype=np.uint8)
    for number, (start, stop) in enumerate([(0, 20), (20, 21), (21, 37)]):
        chunks = (min(4, stop - start), 3, 2)
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset("data", data=rows[start:stop], chunks=chunks, compression="gzip")
    root = zarr.open_group(folder / "rows.zarr", mode="w")
    layout = {"chunks": (2, 3, 2), "shards": (8, 3, 2)}
    root.create_array("data", shape=(29, 3, 2), dtype="u1", **layout)[...] = rows[:29]
    return folder


def open_kind(data: Path, kind: str, mode: str) -> Any:
    options: dict[str, Any] = {"loading_mode": mode, "transform": RandomProbe(), "seed": SEED}
    options |= {"return_index": True, "progress": False}
    if kind == "image":
        return ImageDataset(data / "image", image_size=(6, 8), transform_input="numpy", **options)
    if kind == "hdf5":
        return HDF5Dataset(str(data / "*.h5"), **options)
    return ZarrDataset(data / "rows.zarr", "data", **options)


@pytest.fixture(scope="module")
def samples(data: Path) -> dict[str, list[Any]]:
    """Each sample of epoch 1, made alone by a lazy dataset without a loader."""
    made = {}
    for kind in KINDS:
        with open_kind(data, kind, "lazy") as dataset:
            dataset.set_epoch(EPOCH)
            made[kind] = [dataset[i] for i in range(len(dataset))]
            assert len(dataset) == SIZES[kind]
    return made


class Job:
    """A dataset of one kind and mode, what its batches must be, and its loaders."""

    def __init__(self, dataset: Any, alone: list[Any], shuffle: Any, drop_last: bool, pad: bool):
        self.dataset, self.alone = dataset, alone
        self.drop_last, self.pad = drop_last, pad
        self.options = {"shuffle": shuffle, "drop_last": drop_last, "pad": pad}
        self.order = list(dataset.epoch_order(shuffle, SEED, EPOCH, GLOBAL_BATCH))

    def cuts(self, world: int) -> list[int]:
        """The positions between the global batches."""
        return cuts_of(len(self.alone), world, self.drop_last, self.pad, GLOBAL_BATCH)

    def expected(self, world: int, start: int = 0) -> list[list[Any]]:
        """The global batches from a position on, made of samples that were made alone."""
        cuts = [cut for cut in self.cuts(world) if cut >= start]
        batches = [[self.alone[i] for i in self.order[a:b]] for a, b in itertools.pairwise(cuts)]
        if batches and self.pad and not self.drop_last:
            n = len(self.order)
            batches[-1] += [self.alone[self.order[i % n]] for i in range(-n % world)]
        return batches

    def loader(self, world: int, rank: int, **options: Any) -> Loader:
        common = {"num_workers": 0, "seed": SEED, "collate_fn": "list", **self.options}
        common |= {"batch_size": GLOBAL_BATCH // world, "rank": rank, "world_size": world}
        loader = Loader(self.dataset, enable_monitoring=False, **{**common, **options})
        loader.set_epoch(EPOCH)
        return loader


@pytest.fixture
def job(data: Path, samples: dict[str, list[Any]]) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(kind: str, n: int, mode: str, *options: Any) -> Job:
            dataset = stack.enter_context(open_kind(data, kind, mode))
            if n < len(dataset):
                dataset = dataset.subset(range(n))
            return Job(dataset, samples[kind][:n], *options)

        yield make


def states_of(loader: Loader) -> list[dict[str, Any]]:
    """The state before each batch, and after the last, as it comes back from a file."""
    loader.set_epoch(EPOCH)
    iterator = iter(loader)
    states = [loader.state_dict()]
    for _ in iterator:
        states.append(loader.state_dict())
    return json.loads(json.dumps(states))  # type: ignore[no-any-return]


def received(ranks: list[Loader], state: dict[str, Any] | None = None) -> list[list[Any]]:
    """The global batches of all ranks from a state on."""
    batches = []
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
        loader.set_epoch(EPOCH)
        batches.append(list(loader))
    assert len({len(b) for b in batches}) == 1, "ranks have different numbers of batches"
    return [dealt(list(parts)) for parts in zip(*batches, strict=True)]


@pytest.mark.quick_every(10)
@pytest.mark.parametrize("case", pairs(KINDS, LENGTHS, MODES, SHUFFLES, FLAGS, FLAGS), ids=str)
def test_all_world_sizes_go_on_from_every_step_of_all(job: Any, case: Any) -> None:
    made = job(*case)
    drop_last, pad = made.drop_last, made.pad
    sizes = [w for w in WORLDS if not is_too_short(len(made.alone), w, drop_last, pad)]
    worlds = {w: [made.loader(w, rank) for rank in range(w)] for w in sizes}
    tried = list[Any]()
    for before, ranks in worlds.items():
        assert same(received(ranks), made.expected(before)), f"{before} ranks get other batches"
        states = states_of(ranks[0])
        assert states_of(ranks[-1]) == states, "ranks have different states"
        assert [state["samples"] for state in states] == made.cuts(before)
        for start, state in zip(made.cuts(before), states, strict=True):
            for after, others in worlds.items():
                if (after, state) in tried:
                    continue  # another world size has saved the very same
                tried.append((after, state))
                if start not in made.cuts(after):
                    assert not pad and not drop_last
                    with pytest.raises(StateError, match="pad=False"):
                        others[0].load_state_dict(state)
                    continue
                message = f"{after} ranks don't go on at {start} where {before} were"
                assert same(received(others, state), made.expected(after, start)), message


# -- with worker processes


def check_workers(made: Job, workers: int, world: int) -> None:
    """The last rank of a world loads an epoch with workers, and is left after a batch; the last
    rank of another world goes on.
    """
    other = WORLDS[(WORLDS.index(world) + workers) % len(WORLDS)]
    share, other_share = ([b[w - 1 :: w] for b in made.expected(w)] for w in (world, other))
    options = {"prefetch_factor": 3, "multiprocessing_context": "fork"}
    with (
        made.loader(world, world - 1, num_workers=workers, **options) as first,
        made.loader(other, other - 1, num_workers=4 - workers, **options) as second,
    ):
        assert same(list(first), share), "with workers the batches differ"
        first.set_epoch(EPOCH)
        for batch in first:
            assert same(batch, share[0])
            break  # while others are on their way
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        message = f"{other} ranks don't go on after the first batch of {world}"
        assert same(list(second), other_share[1:]), message


@pytest.mark.quick_every(20)
@pytest.mark.parametrize(
    "case", pairs(KINDS, [99], MODES, SHUFFLES, FLAGS, FLAGS, (1, 3), WORLDS), ids=str
)
def test_workers(job: Any, case: Any) -> None:
    *data, workers, world = case
    check_workers(job(*data), workers, world)
