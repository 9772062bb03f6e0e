"""Misuses of datasets are found before anything is read, in the words of the class called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from headrace import (
    BaseDataset,
    ConfigError,
    HDF5Dataset,
    HeadraceWarning,
    ImageDataset,
    MemoryEfficientDataset,
    RandomHorizontalFlip,
    StreamingDataset,
    TextDataset,
    ZarrDataset,
    create_dataloader,
    open_dataset,
)
from tests.testing.test_contract import SquareDataset, Squares

NOWHERE = "there/is/nothing/here"
CLASSES: list[Callable[..., Any]] = [
    ImageDataset,
    TextDataset,
    HDF5Dataset,
    ZarrDataset,
    StreamingDataset,
    MemoryEfficientDataset,
]


@pytest.mark.parametrize("cls", CLASSES)
def test_bad_options_are_named_before_anything_is_read(cls: Any) -> None:
    texts = {"seed": "a", "on_error": "ignore", "max_memory_usage": "much", "hold": "all"}
    texts |= {"loading_mode": "fast", "cache_size": "a", "shared": "all", "cache_policy": "mru"}
    others = [("seed", 1.5), ("on_error", None), ("transform", [None]), ("transforms", 3)]
    steps = [(option, RandomHorizontalFlip) for option in ("target_transform", "transforms")]
    for option, value in (*texts.items(), *others, *steps):
        with pytest.raises(ConfigError, match=option):
            cls(NOWHERE, **{option: value})
    with pytest.raises(ConfigError, match=r"RandomHorizontalFlip\(\.\.\.\)"):
        cls(NOWHERE, transform=RandomHorizontalFlip)
    for path in (None, 5, object(), {"a": 1}, (part for part in "ab"), ImageDataset):
        with pytest.raises(ConfigError, match=r"^(data_path|urls)\b.* path"):
            cls(path)


def test_cache_size_without_a_cache_is_a_warning() -> None:
    for mode in ("lazy", "eager", "streaming"):
        with pytest.warns(HeadraceWarning, match=f"cache_size=3 .*'{mode}'"):
            SquareDataset(loading_mode=mode, cache_size=3)


def test_another_type_error_is_left_alone() -> None:
    class Broken(SquareDataset):
        def __init__(self, size: int = 3, **options: Any) -> None:
            super().__init__(transform=options.pop("augment", None), **options)
            len(size)  # type: ignore[arg-type]

    for options in ({"size": 3}, {"augment": None}):
        with pytest.raises(TypeError, match="has no len"):
            Broken(**options)  # type: ignore[arg-type]

    class Plain(SquareDataset):
        def __init__(self, size: int = 3) -> None:
            super().__init__()

    with pytest.raises(TypeError, match="'sizes'") as raised:
        Plain(sizes=3)  # type: ignore[call-arg]
    assert not isinstance(raised.value, ConfigError)


def test_an_option_of_another_format_is_told_so(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    for door in (open_dataset, create_dataloader):
        with pytest.raises(ConfigError, match=r"holds texts, but image_size= .*images"):
            door(tmp_path, image_size=3)
        with pytest.raises(ConfigError, match=r"holds images, but max_length= .*texts"):
            door(photos, max_length=3)


def test_what_is_open_or_no_source_is_no_path(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file, pytest.raises(ConfigError, match="its path"):
        HDF5Dataset(file, "x")
    with open(tmp_path / "a.h5", "rb") as raw, pytest.raises(ConfigError, match="its path"):
        ImageDataset(raw)  # type: ignore[arg-type]
    for wrong, named in (("photos", "'photos'.*open_dataset"), ([1, 2], "list")):
        with pytest.raises(ConfigError, match=named):
            BaseDataset(wrong)  # type: ignore[arg-type]


def test_all_datasets_know_their_data_path(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    images = ImageDataset(photos)
    for path, dataset in (
        (photos, images),
        (str(tmp_path), TextDataset(str(tmp_path))),
        (photos, MemoryEfficientDataset(photos)),
        (photos, MemoryEfficientDataset(images)),
    ):
        assert dataset.data_path == dataset.subset([0]).data_path == path
    assert SquareDataset().data_path is None


# -- targets


class Column:
    """As a column of pandas: comparisons go through its elements, and it has no truth value."""

    def __init__(self, values: Any, index: Any = None) -> None:
        self.values, self.index = np.asarray(values), range(len(values)) if index is None else index

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, label: Any) -> Any:
        return self.to_dict()[label]

    def __eq__(self, other: object) -> Any:
        return Column(self.values == other)

    def __ne__(self, other: object) -> Any:
        return Column(self.values != other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("The truth value of a Series is ambiguous.")

    def to_numpy(self) -> Any:
        return self.values

    def to_dict(self) -> dict[Any, Any]:
        return dict(zip(self.index, self.values, strict=True))


class Exporting:
    """Has an array to give, and nothing else."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values

    def __len__(self) -> int:
        return len(self.values)


def test_a_column_with_file_names_is_a_mapping(tiny_photos: Path) -> None:
    names = sorted(path.name for path in tiny_photos.rglob("*.*"))
    dataset = ImageDataset(tiny_photos, targets=Column([3, 1, 4, 1], names[::-1]))
    found = {Path(path).name: target for path, target in dataset.samples}
    assert found == dict(zip(names, [1, 4, 1, 3], strict=True))


def test_a_list_of_targets_has_no_names(tiny_photos: Path) -> None:
    for targets in ([1, 2, 3, 4], np.arange(4), torch.arange(4)):
        with pytest.raises(ConfigError, match=r"dict\(zip\(names, values\)\)"):
            ImageDataset(tiny_photos, targets=targets)


def test_columns_are_targets_weights_and_lengths() -> None:
    class Own(BaseDataset):
        def __init__(self, targets: Any) -> None:
            super().__init__(Squares(), targets=targets)

    values = np.arange(42) % 5
    for given in (Column(values, values[::-1]), Exporting(values)):
        targets = Own(given).targets
        assert isinstance(targets, np.ndarray)
        assert np.array_equal(targets, values)
    for wrong in (Column([1, 2]), "abcd", 5, {0: 1}):
        with pytest.raises(ConfigError, match="targets"):
            Own(wrong)
    for option in ("weights", "bucket_by_length"):
        column = Exporting(np.ones(42, np.int64))
        loader = create_dataloader(SquareDataset(), num_workers=0, **{option: column})
        assert len(loader) == 2
