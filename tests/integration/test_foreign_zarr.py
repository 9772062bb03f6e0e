"""Zarr stores that tensorstore, anndata and numcodecs wrote: all values are those that these
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
    "anndata": foreign_zarr.write_anndata,
    "numcodecs": foreign_zarr.write_numcodecs,
}


def same(found: Any, expected: Any) -> bool:
    return (
        found == expected
        if isinstance(expected, str)
        else np.array_equal(np.asarray(found), expected, equal_nan=expected.dtype.kind in "fc")
    )


def check(case: foreign_zarr.Case) -> None:
    for direct in (True, False):
        dataset = ZarrDataset(case.path, case.name, direct=direct)
        assert len(dataset) == len(case.values)
        if direct and case.is_direct is not None:
            assert dataset.sample_source.is_direct == case.is_direct, dataset.explain()
        assert all(
            same(found, expected) for found, expected in zip(dataset, case.values, strict=True)
        ), f"{case.path} {case.name}"
        batches = create_dataloader(
            dataset, batch_size=4, num_workers=0, shuffle=False, pin_memory=False
        )
        assert all(
            same(row, one)
            for row, one in zip(
                (row for batch in batches for row in batch), case.values, strict=True
            )
        )
        dataset.close()


@pytest.mark.parametrize("compression", ["encoded", None, "zstd", "lz4", "gzip"])
def test_tensorstore_reads_a_pack(compression: str | None, tmp_path: Path) -> None:
    tensorstore: Any = pytest.importorskip("tensorstore")
    how: dict[str, Any] = (
        {} if compression == "encoded" else {"store": "decoded", "compression": compression}
    )
    with ImageDataset(make_photos(tmp_path / "photos"), image_size=(20, 30)) as photos:
        out = pack(photos, tmp_path / "out", format="zarr", shard_size=16_000, **how)

        def array(name: str) -> Any:
            return tensorstore.open(
                {"driver": "zarr3", "kvstore": f"file://{out}/data.zarr/{name}/"}, read=True
            ).result()

        assert np.array_equal(array("targets").read().result(), photos.targets)
        starts, stops, data = (
            (array(name) for name in ("starts", "stops", "data"))
            if not how
            else (None, None, array("data"))
        )
        for index, (path, _) in enumerate(photos.samples):
            if starts is None:
                assert np.array_equal(data[index].read().result(), photos.pixels_of(index))
            else:
                first, end = int(starts[index].read().result()), int(stops[index].read().result())
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
        check(case)
