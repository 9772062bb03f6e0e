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


def test_of_many_names_the_nearest_comes_first() -> None:
    names = [f"run/{i:05d}/{kind}" for i in range(10_000) for kind in ("images", "labels")]
    for wanted in ("run/00713/imagse", "RUN/00713/IMAGES", "00713/images", "run/0713/images"):
        found = listed_names(names, wanted)
        assert found.startswith("run/00713/images, "), wanted
        assert found.endswith(" and 19,990 more")
        assert found.count(",") == 10
    assert listed_names(names).startswith("run/00000/images, run/00000/labels, run/00001/images")


def test_a_missing_name_among_many_is_a_short_message(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        for number in range(40):
            file[f"images_{number:04d}"] = np.arange(3)
            root.create_array(f"images_{number:04d}", shape=(3,), dtype="u1")
    for make, name in ((HDF5Dataset, "a.h5"), (ZarrDataset, "a.zarr")):
        with pytest.raises(MissingNameError, match=r"images_0017.* and 30 more") as caught:
            make(tmp_path / name, "image_0017")
        assert len(str(caught.value)) < 500
    with pytest.raises(MissingNameError, match=r"has 40 arrays.*'images_0000', .* and 30 more"):
        ZarrDataset(tmp_path / "a.zarr")
