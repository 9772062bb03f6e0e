"""Worker processes read all formats at once: samples equal those of this process, whoever
starts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import ConcatDataset

from headrace import CollateError, ConfigError, TextCollator
from headrace.collate import stack_collate
from headrace.core.batcher import Batcher, Collating
from headrace.datasets.sparse import sparse_collate
from headrace.order.ranks import BatchRequest
from headrace.testing.contract import RandomProbe, same
from tests.data.gallery import make_gallery

MODES = ("lazy", "eager", "cached")


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Any]]:
    return make_gallery(tmp_path_factory.mktemp("gallery"))


def joined(gallery: dict[str, Callable[..., Any]]) -> ConcatDataset[Any]:
    """Each format in one of the modes, and every mode several times."""
    names = list(gallery)
    parts = [
        gallery[name](loading_mode=MODES[number % 3], transform=RandomProbe(), return_index=True)
        for number, name in enumerate(names)
    ]
    return ConcatDataset(parts)


@pytest.mark.parametrize(
    ("start", "workers"),
    [
        ("fork", 3),
        *(
            pytest.param(start, workers, marks=pytest.mark.slow)
            for start in ("fork", "forkserver", "spawn")
            for workers in (1, 3)
            if (start, workers) != ("fork", 3)
        ),
    ],
)
def test_workers_give_the_samples_of_this_process(
    gallery: dict[str, Callable[..., Any]],
    make_loader: Callable[..., Any],
    start: str,
    workers: int,
) -> None:
    options = {"batch_size": 16, "collate_fn": "list", "seed": 3, "shuffle": True}
    expected = make_loader(joined(gallery), num_workers=0, **options)
    loader = make_loader(
        joined(gallery), num_workers=workers, multiprocessing_context=start, **options
    )
    for _ in range(2):  # from memory in the second epoch
        for batch, other in zip(loader, expected, strict=True):
            assert same(batch, other)


def test_each_format_streams(
    gallery: dict[str, Callable[..., Any]], make_loader: Callable[..., Any]
) -> None:
    options = {"batch_size": 5, "collate_fn": "list", "seed": 3, "shuffle": "block"}
    for name, make in gallery.items():
        with make() as plain, make(loading_mode="streaming") as streamed:
            expected = list(make_loader(plain, num_workers=0, **options))
            loader = make_loader(streamed, num_workers=2, **options)
            assert same(list(loader), expected), name
            loader.close()


def test_what_makes_batches_travels_to_workers(gallery: dict[str, Callable[..., Any]]) -> None:
    request = BatchRequest([0, 2, 1], 3, 0)
    made = set[str]()
    for name, make in gallery.items():
        with make() as dataset:
            for function in (stack_collate, TextCollator(), sparse_collate):
                batcher = Batcher(dataset, Collating(function))
                try:
                    batch = batcher.make(request).batch
                except (CollateError, ConfigError):  # samples of several sizes, or of another kind
                    continue
                there = pickle.loads(pickle.dumps(batcher))
                assert same(there.make(request).batch, batch), name
                made.add(there.explain())
    assert len(made) >= 8, made
