"""The names that a message lists."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from headrace import HDF5Dataset, MissingNameError, ZarrDataset
from headrace.io.nearest_names import listed_names


def test_few_names_are_all_listed() -> None:
    assert listed_names([]) == "none"
    assert listed_names(["b", "a"], "c", repr) == "'a', 'b'"
    assert listed_names(map(str, range(10)), "x") == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"


@pytest.mark.parametrize(
    "wanted",
    ["run/00713/image", "run/00713/imagse", "RUN/00713/IMAGES", "00713/images", "run/0713/images"],
)
def test_of_many_names_the_nearest_comes_first(wanted: str) -> None:
    names = [f"run/{i:05d}/{kind}" for i in range(10_000) for kind in ("images", "labels")]
    found = listed_names(names, wanted)
    assert (
        found.startswith("run/00713/images, ")
        and found.endswith(" and 19,990 more")
        and found.count(",") == 10
    )
    assert listed_names(names).startswith("run/00000/images, run/00000/labels, run/00001/images")


def test_a_missing_dataset_among_many_is_a_short_message(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        for i in range(300):
            file[f"images_{i:04d}"] = np.arange(3)
    with pytest.raises(
        MissingNameError, match=r"no dataset 'image_0017'; it has: images_0017, .* and 290 more"
    ) as caught:
        HDF5Dataset(tmp_path / "a.h5", "image_0017")
    assert len(str(caught.value)) < 500


def test_a_missing_array_among_many_is_a_short_message(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    for i in range(40):
        root.create_array(f"images_{i:04d}", shape=(3,), dtype="u1")
    with pytest.raises(
        MissingNameError, match=r"no array 'image_0017'; it has: 'images_0017', .* and 30 more"
    ):
        ZarrDataset(tmp_path / "a.zarr", "image_0017")
    with pytest.raises(
        MissingNameError,
        match=r"has 40 arrays, name one of them as dataset_name: 'images_0000', .* and 30 more",
    ):
        ZarrDataset(tmp_path / "a.zarr")
