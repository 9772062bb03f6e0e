"""Zarr stores that tensorstore and numcodecs wrote: all values are those that these
libraries read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from headrace import ZarrDataset, create_dataloader
from tests.integration import foreign_zarr

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HOW_TO_INSTALL = "pip install -c constraints.txt -e '.[integration]'"
WRITERS: dict[str, Callable[[Path], list[foreign_zarr.Case]]] = {
    "tensorstore": foreign_zarr.write_tensorstore,
    "numcodecs": foreign_zarr.write_numcodecs,
}


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("library", WRITERS)
def test_values_are_those_that_the_library_reads(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: {HOW_TO_INSTALL}")
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


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
def test_icechunk_sessions_are_read_as_by_zarr(mode: str, tmp_path: Path) -> None:
    """A commit of a repository, of which a later one changes nothing."""
    icechunk = pytest.importorskip("icechunk", reason=HOW_TO_INSTALL)
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    session = repository.writable_session("main")
    rows = np.random.default_rng(0).random((41, 6, 5))
    zarr.create_array(session.store, name="group/x", data=rows, chunks=(8, 6, 3))
    zarr.create_array(session.store, name="y", data=np.arange(41), chunks=(16,))
    first = session.commit("written")
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="group/x")[:9] = 0
    session.commit("changed")
    for options in ({"snapshot_id": first}, {"branch": "main"}):
        store = repository.readonly_session(**options).store
        expected = zarr.open_array(store, path="group/x", mode="r")[:]
        dataset = ZarrDataset(store, "group/x", target_name="y", loading_mode=mode)
        for workers, shuffle in ((0, "block"), (2, True), (2, "block")):
            batches = create_dataloader(dataset, batch_size=7, num_workers=workers, shuffle=shuffle)
            read = np.full_like(expected, -1)
            for inputs, numbers in batches:
                read[numbers] = inputs
            assert np.array_equal(read, expected), (options, workers, shuffle)
