"""Zarr stores that tensorstore and numcodecs wrote: all values are those that these
libraries read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ImageDataset, ZarrDataset, create_dataloader, pack
from tests.data.make import make_photos
from tests.integration import foreign_zarr

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WRITERS: dict[str, Callable[[Path], list[foreign_zarr.Case]]] = {
    "tensorstore": foreign_zarr.write_tensorstore,
    "numcodecs": foreign_zarr.write_numcodecs,
}


@pytest.mark.parametrize("compression", ["encoded", None, "zstd", "lz4"])
def test_tensorstore_reads_a_pack(compression: str | None, tmp_path: Path) -> None:
    tensorstore: Any = pytest.importorskip("tensorstore")
    how: dict[str, Any] = {"store": "decoded", "compression": compression}
    if compression == "encoded":
        how = {}
    with ImageDataset(make_photos(tmp_path / "photos"), image_size=(20, 30)) as photos:
        out = pack(photos, tmp_path / "out", format="zarr", shard_size=16_000, **how)

        def array(name: str) -> Any:
            return tensorstore.open(
                {"driver": "zarr3", "kvstore": f"file://{out}/data.zarr/{name}/"}, read=True
            ).result()

        assert np.array_equal(array("targets").read().result(), photos.targets)
        data = array("data")
        for index, (path, _) in enumerate(photos.samples):
            if how:
                assert np.array_equal(data[index].read().result(), photos.pixels_of(index))
                continue
            first, end = (int(array(name)[index].read().result()) for name in ("starts", "stops"))
            assert data[first:end].read().result().tobytes() == Path(path).read_bytes()


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
