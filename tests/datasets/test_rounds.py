"""Workers start on arrays whatever the parent has read through h5py and zarr, and never hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.gallery import make_gallery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        ("fork", 4),
        pytest.param("fork", 20, marks=pytest.mark.nightly),
        pytest.param("spawn", 1, marks=pytest.mark.nightly),
    ],
)
def test_workers_start_over_and_over(
    tmp_path: Path, make_loader: Any, method: str, rounds: int
) -> None:
    gallery = make_gallery(tmp_path)
    options: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "multiprocessing_context": method}
    datasets = {name: gallery[name](direct=False) for name in ("hdf5 rows", "zarr shards")}
    datasets["hdf5 rows"].targets = None
    expected = {
        name: sorted(row.numpy().tobytes() for row in dataset.__getitems__(range(len(dataset))))
        for name, dataset in datasets.items()
    }
    for name, dataset in datasets.items():
        for turn in range(rounds):
            loader = make_loader(dataset, shuffle=True, seed=turn, **options)
            found = torch.cat(list(loader))
            loader.close()
            assert sorted(row.numpy().tobytes() for row in found) == expected[name], (name, turn)
            dataset.__getitems__([1, 5, 3])
        dataset.close()
