"""Zarr stores that tensorstore and numcodecs wrote: all values are those that these
libraries read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace import ZarrDataset, create_dataloader
from tests.integration import foreign_zarr

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WRITERS: dict[str, Callable[[Path], list[foreign_zarr.Case]]] = {
    "tensorstore": foreign_zarr.write_tensorstore,
    "numcodecs": foreign_zarr.write_numcodecs,
}


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("library", WRITERS)
def test_values_are_those_that_the_library_reads(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(
            f"{library} is not installed: pip install -c constraints.txt -e '.[integration]'"
        )
    cases = WRITERS[library](tmp_path)
    assert len(cases) >= 16
    for case in cases:
        for direct in (True, False):
            with ZarrDataset(case.path, direct=direct) as dataset:
                if direct:
                    assert dataset.sample_source.is_direct == case.is_direct, dataset.explain()
                loader = create_dataloader(dataset, batch_size=4, num_workers=0, shuffle=False)
                batches = np.concatenate([batch.numpy() for batch in loader])
                is_float = case.values.dtype.kind in "fc"
                for rows in (np.stack(list(dataset)), batches):
                    assert np.array_equal(rows, case.values, equal_nan=is_float), case.path
