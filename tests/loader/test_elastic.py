"""Image, HDF5 and Zarr datasets give the same global batches to every world size and mode, and each
step is resumed by all.

The batches that are expected come from the order and from samples made one at a time; what
`tests/order/test_elastic.py` shows of orders, this shows of loaders, with their samples' values and
random numbers: augmentation depends neither on ranks nor on workers, nor on where a run was
resumed. Without processes each pair of (dataset, mode, shuffle, drop_last, pad) is tried, in all
world sizes and at all steps; with worker processes each pair too, and the whole product under ``-m
nightly``.
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
from headrace.loader import Loader
from headrace.testing.contract import MODES, SHUFFLES, RandomProbe, same
from tests.covering import covering
from tests.data.make import make_photos
from tests.order.test_elastic import WORLDS, cuts_of, dealt, is_too_short

GLOBAL_BATCH, SEED, EPOCH = 12, 5, 1
KINDS = ("image", "hdf5", "zarr")
FLAGS = (False, True)
# tails of 2, 1 and 5: some below the world size, and one above all but 6
SIZES = {"image": 26, "hdf5": 37, "zarr": 29}


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
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset(
                "data",
                data=rows[start:stop],
                chunks=(min(4, stop - start), 3, 2),
                compression="gzip",
            )
    root = zarr.open_group(folder / "rows.zarr", mode="w")
    root.create_array("data", shape=(29, 3, 2), dtype="u1", chunks=(2, 3, 2), shards=(8, 3, 2))[
        ...
    ] = rows[:29]
    return folder


def open_kind(data: Path, kind: str, mode: str) -> Any:
    options: dict[str, Any] = {
        "loading_mode": mode,
        "transform": RandomProbe(),
        "return_index": True,
        "progress": False,
        "seed": SEED,
    }
    if kind == "image":
        return ImageDataset(data / "image", image_size=(6, 8), transform_input="numpy", **options)
    return (
        HDF5Dataset(str(data / "*.h5"), **options)
        if kind == "hdf5"
        else ZarrDataset(data / "rows.zarr", "data", **options)
    )


@pytest.fixture(scope="module")
def samples(data: Path) -> dict[str, list[Any]]:
    """Each sample of epoch 1, made alone by a lazy dataset without a loader."""
    found = {}
    for kind in KINDS:
        with open_kind(data, kind, "lazy") as dataset:
            dataset.set_epoch(EPOCH)
            found[kind] = [dataset[i] for i in range(len(dataset))]
            assert len(dataset) == SIZES[kind]
    return found


@pytest.fixture
def loaders(data: Path) -> Iterator[Any]:
    """Makes the loaders of all ranks of a world, over one dataset for each kind and mode."""
    with contextlib.ExitStack() as stack:
        opened: dict[Any, Any] = {}

        def make(
            kind: str, mode: str, world_size: int, n: int | None = None, **options: Any
        ) -> list[Loader]:
            if (kind, mode) not in opened:
                opened[kind, mode] = stack.enter_context(open_kind(data, kind, mode))
            dataset = opened[kind, mode]
            if n is not None:
                dataset = opened.setdefault((kind, mode, n), dataset.subset(range(n)))
            found = []
            for rank in range(world_size):
                said = {
                    "num_workers": 0,
                    "seed": SEED,
                    "batch_size": GLOBAL_BATCH // world_size,
                    "collate_fn": "list",
                    **options,
                }
                found.append(
                    Loader(
                        dataset, rank=rank, world_size=world_size, enable_monitoring=False, **said
                    )
                )
                found[-1].set_epoch(EPOCH)
                stack.callback(found[-1].close)
            return found

        yield make


def order_of(loader: Loader) -> list[int]:
    """All indices of the epoch, by their positions."""
    order = loader.dataset.epoch_order(loader.config.shuffle, SEED, EPOCH, GLOBAL_BATCH)
    return list(order)


def batches_from(
    alone: list[Any], order: list[int], cuts: list[int], place: int, padding: int
) -> list[list[Any]]:
    """The global batches from a position on, made of samples that were made alone."""
    found = [
        [alone[i] for i in order[a:b]]
        for a, b in itertools.pairwise(cut for cut in cuts if cut >= place)
    ]
    if found:
        found[-1] += [alone[order[i % len(order)]] for i in range(padding)]
    return found


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


@pytest.mark.quick_every(16)
@pytest.mark.parametrize(
    ("kind", "mode", "shuffle", "drop_last", "pad"), pairs(KINDS, MODES, SHUFFLES, FLAGS, FLAGS)
)
def test_all_world_sizes_and_all_steps(
    loaders: Any,
    samples: dict[str, list[Any]],
    kind: str,
    mode: str,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
) -> None:
    check_worlds(loaders, samples[kind], kind, mode, shuffle, drop_last, pad)


@pytest.mark.quick_every(21)
@pytest.mark.parametrize(
    ("kind", "n", "mode", "shuffle", "drop_last", "pad"),
    pairs(KINDS, (0, 1, 5, 11, 12), MODES, SHUFFLES, FLAGS, FLAGS),
)
def test_few_samples(
    loaders: Any,
    samples: dict[str, list[Any]],
    kind: str,
    n: int,
    mode: str,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
) -> None:
    """None, one, fewer than the ranks, fewer than a global batch, and just one."""
    check_worlds(loaders, samples[kind][:n], kind, mode, shuffle, drop_last, pad, n=n)


def check_worlds(
    loaders: Any,
    alone: list[Any],
    kind: str,
    mode: str,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
    **options: Any,
) -> None:
    """All world sizes give the batches that are expected, and go on from every step of all
    others.
    """
    n = len(alone)
    sizes = [w for w in WORLDS if not is_too_short(n, w, drop_last, pad)]
    worlds = {
        w: loaders(kind, mode, w, shuffle=shuffle, drop_last=drop_last, pad=pad, **options)
        for w in sizes
    }
    order, tried = order_of(worlds[1][0]), list[Any]()
    cuts = {w: cuts_of(n, w, drop_last, pad, GLOBAL_BATCH) for w in sizes}

    def expected(world_size: int, place: int) -> list[list[Any]]:
        return batches_from(
            alone, order, cuts[world_size], place, -n % world_size if pad and not drop_last else 0
        )

    for before, ranks in worlds.items():
        assert same(received(ranks), expected(before, 0)), f"{before} ranks get other batches"
        states = [states_of(loader) for loader in (ranks[0], ranks[-1])]
        assert states[0] == states[1], "ranks have different states"
        assert [state["samples"] for state in states[0]] == cuts[before]
        for place, state in zip(cuts[before], states[0], strict=True):
            for after, others in worlds.items():
                if (after, state) in tried:
                    continue  # another world size has saved the very same
                tried.append((after, state))
                if place not in cuts[after]:
                    assert not pad and not drop_last
                    with pytest.raises(
                        StateError,
                        match=(
                            "with pad=False the last batches of an epoch depend on the number of "
                            "ranks"
                        ),
                    ):
                        others[0].load_state_dict(state)
                    continue
                assert same(received(others, state), expected(after, place)), (
                    f"{after} ranks don't go on at {place} where {before} were"
                )


# -- with worker processes

STARTS = ("fork", "forkserver", "spawn")


def check_workers(
    loaders: Any,
    alone: list[Any],
    kind: str,
    mode: str,
    workers: int,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
    world: int,
    start: str,
) -> None:
    """The last rank of a world loads an epoch with workers, and is left after a batch; the last
    rank of another world goes on.
    """
    other, n = WORLDS[(WORLDS.index(world) + workers) % len(WORLDS)], len(alone)
    options = {"shuffle": shuffle, "drop_last": drop_last, "pad": pad}
    order, shares = [], {}
    for w in (world, other):
        order = order or order_of(loaders(kind, mode, w, **options)[-1])
        padding = -n % w if pad and not drop_last else 0
        whole = batches_from(alone, order, cuts_of(n, w, drop_last, pad, GLOBAL_BATCH), 0, padding)
        shares[w] = [batch[w - 1 :: w] for batch in whole]
    several = {
        "num_workers": workers,
        "multiprocessing_context": start,
        "prefetch_factor": 3,
        **options,
    }
    first = loaders(kind, mode, world, **several)[-1]
    assert same(list(first), shares[world]), "with workers the batches differ"
    first.set_epoch(EPOCH)
    for batch in first:
        assert same(batch, shares[world][0])
        break  # while others are on their way
    second = loaders(kind, mode, other, **{**several, "num_workers": 4 - workers})[-1]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert same(list(second), shares[other][1:]), (
        f"{other} ranks don't go on after the first batch of {world}"
    )
    first.close()
    second.close()


@pytest.mark.quick_every(20)
@pytest.mark.parametrize(
    ("kind", "mode", "workers", "shuffle", "drop_last", "pad", "world"),
    pairs(KINDS, MODES, (1, 3), SHUFFLES, FLAGS, FLAGS, WORLDS),
)
def test_workers(
    loaders: Any,
    samples: Any,
    kind: str,
    mode: str,
    workers: int,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
    world: int,
) -> None:
    check_workers(
        loaders, samples[kind], kind, mode, workers, shuffle, drop_last, pad, world, "fork"
    )


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "mode", "workers", "shuffle", "drop_last", "pad"),
    list(itertools.product(KINDS, MODES, (1, 3), SHUFFLES, FLAGS, FLAGS)),
)
def test_workers_in_all_combinations(
    loaders: Any,
    samples: Any,
    kind: str,
    mode: str,
    workers: int,
    shuffle: Any,
    drop_last: bool,
    pad: bool,
) -> None:
    for world in WORLDS:
        check_workers(
            loaders, samples[kind], kind, mode, workers, shuffle, drop_last, pad, world, "fork"
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "mode", "shuffle", "start"), pairs(KINDS, MODES, SHUFFLES, STARTS[1:])
)
def test_workers_that_are_not_forked(
    loaders: Any, samples: Any, kind: str, mode: str, shuffle: Any, start: str
) -> None:
    check_workers(loaders, samples[kind], kind, mode, 1, shuffle, False, False, 3, start)
