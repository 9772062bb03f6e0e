"""Misuses of datasets: each is found before anything is read, in the words of the class that the
user called.
"""

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


class MyImages(ImageDataset):
    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)


class MySquares(SquareDataset):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


# -- keywords


@pytest.mark.parametrize("cls", [*CLASSES, MyImages, open_dataset])
def test_an_unknown_keyword_names_the_class_called(cls: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^{cls.__name__} has no 'max_memoryusage': did you mean max_memory_usage\\?$",
    ):
        cls(NOWHERE, max_memoryusage="1GB")


@pytest.mark.parametrize(
    ("cls", "args", "said"),
    [
        (
            ImageDataset,
            [224],
            "takes data_path by position, and all other arguments by name: pass for example "
            "image_size=224",
        ),
        (TextDataset, [str, 8], r"takes data_path by position.*tokenizer=\.\.\."),
        (
            HDF5Dataset,
            ["data", "target"],
            "takes data_path and dataset_name by position.*target_name='target'",
        ),
        (
            ZarrDataset,
            ["data", "target"],
            "takes data_path and dataset_name by position.*target_name='target'",
        ),
        (StreamingDataset, [1000], "takes urls by position.*buffer_size=1000"),
        (MemoryEfficientDataset, ["1GB"], "takes data_path by position.*max_memory_usage='1GB'"),
        (ImageDataset, ["Cached"], "takes data_path by position.*loading_mode='Cached'"),
        (
            ImageDataset,
            [str.lower],
            r"takes data_path by position.*: pass for example transform=\.\.\.",
        ),
        (
            HDF5Dataset,
            ["data", "eager"],
            "takes data_path and dataset_name by position.*loading_mode='eager'",
        ),
        (ImageDataset, ["labels.csv"], "takes data_path by position.*targets='labels.csv'"),
    ],
)
def test_options_are_passed_by_name(cls: Any, args: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{cls.__name__} {said}"):
        cls(NOWHERE, *args)


def test_a_part_of_the_data_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ConfigError, match=f"pass for example {str(tmp_path / 'train')!r}$"):
        ImageDataset(tmp_path, "train")  # type: ignore[misc]


@pytest.mark.parametrize("cls", [ImageDataset, MyImages, open_dataset, create_dataloader])
def test_a_keyword_of_images_is_suggested(cls: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"^{cls.__name__} has no 'imagesize': did you mean image_size\\?$"
    ):
        cls(NOWHERE, imagesize=3)


@pytest.mark.parametrize(
    ("word", "use"),
    [
        ("mode", "loading_mode"),
        ("train", "data_path, the path of that part"),
        ("root", "data_path"),
    ],
)
def test_a_word_of_other_datasets_gets_ours(word: str, use: str) -> None:
    for door in (ImageDataset, TextDataset, open_dataset):
        with pytest.raises(ConfigError, match=f"{door.__name__} has no '{word}': use {use}"):
            door(NOWHERE, **{word: "a"})


def test_a_keyword_passed_on_by_a_class_of_one_s_own() -> None:
    with pytest.raises(
        ConfigError, match=r"^MySquares has no 'loadingmode': did you mean loading_mode"
    ):
        MySquares(loadingmode="lazy")


@pytest.mark.parametrize("mode", ["lazy", "eager", "streaming"])
def test_cache_size_without_a_cache_is_a_warning(mode: str) -> None:
    with pytest.warns(HeadraceWarning, match=f"cache_size=3 .* has no effect in '{mode}'"):
        SquareDataset(loading_mode=mode, cache_size=3)


def test_another_type_error_is_left_alone() -> None:
    class Broken(SquareDataset):
        def __init__(self, size: int = 3) -> None:
            super().__init__()
            len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        Broken(size=3)

    class Popping(SquareDataset):
        def __init__(self, **options: Any) -> None:
            super().__init__(transform=options.pop("augment"))
            len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        Popping(augment=None)
    with pytest.raises(TypeError, match=r"Broken.*unexpected keyword argument 'sizes'") as raised:
        Broken(sizes=3)  # type: ignore[call-arg]
    assert not isinstance(raised.value, ConfigError)


def test_an_option_of_another_format_is_told_so(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    for door in (open_dataset, create_dataloader):
        with pytest.raises(
            ConfigError,
            match="image_size is an option for images and tables, and here are texts: leave it out",
        ):
            door(tmp_path, image_size=3)
        with pytest.raises(
            ConfigError, match="max_length is an option for texts and tables, and here are images"
        ):
            door(photos, max_length=3)


# -- paths


@pytest.mark.parametrize("cls", [*CLASSES, open_dataset])
@pytest.mark.parametrize(
    "path",
    [None, 5, 1.5, object(), {"a": 1}, (p for p in "ab"), ImageDataset],
    ids=lambda path: type(path).__name__,
)
def test_a_path_of_another_type(cls: Any, path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^(data_path|urls)\b.* path"):
        cls(path)


def test_an_open_file_is_no_path(tmp_path: Path) -> None:
    with (
        h5py.File(tmp_path / "a.h5", "w") as file,
        pytest.raises(ConfigError, match="not a File that is open: pass its path"),
    ):
        HDF5Dataset(file, "x")
    with (
        open(tmp_path / "a.h5", "rb") as raw,
        pytest.raises(ConfigError, match="that is open: pass its path"),
    ):
        ImageDataset(raw)  # type: ignore[arg-type]


def test_base_dataset_reads_no_path() -> None:
    with pytest.raises(
        ConfigError, match=r"'photos' is a path: use open_dataset\(path\).*subclass BaseDataset"
    ):
        BaseDataset("photos")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reads a Source, not a list"):
        BaseDataset([1, 2])  # type: ignore[arg-type]


def test_all_datasets_know_their_data_path(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((4, 3))
    h5 = str(tmp_path / "a.h5")
    made = {
        photos: ImageDataset(photos),
        str(tmp_path): TextDataset(str(tmp_path)),
        (h5,): HDF5Dataset((h5,), "x"),
        h5: StreamingDataset(h5, dataset_name="x"),
    }
    for path, dataset in made.items():
        assert dataset.data_path == path == dataset.subset([0]).data_path
        assert MemoryEfficientDataset(photos).data_path is photos
    assert MemoryEfficientDataset(made[photos]).data_path is photos
    assert SquareDataset().data_path is None


# -- callables and options


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", ["transform", "target_transform", "transforms"])
def test_a_class_of_transforms_is_refused(cls: Any, name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            rf"{name} is the class RandomHorizontalFlip, .*: write "
            r"RandomHorizontalFlip\(\.\.\.\)"
        ),
    ):
        cls(NOWHERE, **{name: RandomHorizontalFlip})
    with pytest.raises(ConfigError, match=f"{name} must be a callable, .*3"):
        cls(NOWHERE, **{name: 3})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", "a"),
        ("seed", 1.5),
        ("on_error", "ignore"),
        ("on_error", None),
        ("max_memory_usage", "much"),
        ("hold", "all"),
        ("transform", [None]),
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_bad_option_is_named_before_anything_is_read(cls: Any, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        cls(NOWHERE, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("loading_mode", "fast"), ("cache_size", "a"), ("shared", "all"), ("cache_policy", "mru")],
)
@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not StreamingDataset])
def test_a_bad_option_of_holding_is_named(cls: Any, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        cls(NOWHERE, **{option: value})


# -- targets


class Column:
    """What a column of pandas shows, as far as it is used: comparisons go through its elements,
    and it has no truth value.
    """

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
    assert [(Path(path).name, target) for path, target in dataset.samples] == list(
        zip(names, [1, 4, 1, 3], strict=True)
    )


@pytest.mark.parametrize(
    "kind",
    [list, np.array, torch.tensor, Column, Exporting, lambda values: Column(values, [7, 5, 3, 1])],
)
def test_one_target_a_path_goes_with_its_path(tiny_photos: Path, kind: Any) -> None:
    paths = sorted(tiny_photos.rglob("*.*"), reverse=True)
    dataset = ImageDataset(paths, image_size=8, targets=kind([30, 10, 40, 20]))
    assert dict(dataset.samples) == dict(zip(map(str, paths), [30, 10, 40, 20], strict=True))
    assert dataset[0][1] == 20


@pytest.mark.parametrize("kind", [list, np.array, Column])
def test_targets_without_names_are_refused_for_a_folder(tiny_photos: Path, kind: Any) -> None:
    for path in (NOWHERE, tiny_photos, [tiny_photos], list(tiny_photos.rglob("*.*"))[:3]):
        with pytest.raises(
            ConfigError, match=r"4 values and no names.*dict\(zip\(names, values\)\)"
        ):
            ImageDataset(path, targets=kind([3, 1, 4, 1]))
    with pytest.raises(ConfigError, match="each path must be that of a file, not of a folder"):
        ImageDataset([tiny_photos], targets=[1])


def test_targets_of_a_source_may_be_a_column() -> None:
    class Own(BaseDataset):
        def __init__(self, targets: Any) -> None:
            super().__init__(Squares(), targets=targets)

    values = np.arange(42) % 5
    for given in (Column(values, values[::-1]), Exporting(values)):
        assert isinstance(targets := Own(given).targets, np.ndarray) and np.array_equal(
            targets, values
        )
    for wrong in (Column([1, 2]), "abcd", 5, {0: 1}):
        with pytest.raises(ConfigError, match="targets"):
            Own(wrong)


def test_weights_and_lengths_may_be_columns() -> None:
    assert (
        len(create_dataloader(SquareDataset(), num_workers=0, weights=Exporting(np.ones(42)))) == 2
    )
    assert (
        len(
            create_dataloader(
                SquareDataset(), num_workers=0, bucket_by_length=Exporting(np.ones(42, np.int64))
            )
        )
        == 2
    )
