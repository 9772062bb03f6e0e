"""DataModule: a trainer's two loaders come from one description, and share no sample."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from headrace import (
    ConfigError,
    DataLoaderConfig,
    DataModule,
    DataModuleProtocol,
    HeadraceWarning,
    ImageDataset,
    MemoryEfficientDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    StateError,
    StreamingDataset,
    pack,
)
from headrace.testing.contract import same
from tests.loader.datasets import Stream
from tests.testing.test_contract import SquareDataset


@pytest.fixture
def module_of() -> Iterator[Any]:
    made: list[DataModule] = []

    def make(*args: Any, **options: Any) -> DataModule:
        made.append(DataModule(*args, **{"batch_size": 4, "num_workers": 0, **options}))
        return made[-1]

    yield make
    for module in made:
        module.close()


class HuggingFace:
    """What a `datasets.Dataset` can do of what is used here."""

    features = column_names = ("x", "y")

    def __init__(self, rows: list[int], format_type: str | None = None) -> None:
        self.rows, self.format = rows, {"type": format_type}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {"x": [self.rows[index]] * 3, "y": self.rows[index]}
        if self.format["type"] == "torch":
            return {name: torch.tensor(value) for name, value in row.items()}
        return row

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[i] for i in indices]

    def with_format(self, format_type: str) -> "HuggingFace":
        return HuggingFace(self.rows, format_type)

    def select(self, indices: Any) -> "HuggingFace":
        return HuggingFace([self.rows[i] for i in indices], self.format["type"])


def drawn(loader: Any) -> list[int]:
    """The samples of an epoch, by their first number."""
    numbers: list[int] = []
    for batch in loader:
        if isinstance(batch, dict):
            batch = batch["y"]
        elif isinstance(batch, list | tuple):
            batch = batch[0]
        numbers += [int(value) for value in batch.reshape(len(batch), -1)[:, 0]]
    return numbers


def numbers(n: int, first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + n))


DATASETS = {
    "tensors": lambda: numbers(42),
    "list": lambda: list(torch.arange(42)),
    "huggingface": lambda: HuggingFace(list(range(42))),
    "lazy": SquareDataset,
    "cached": lambda: SquareDataset(loading_mode="cached"),
    "streaming": lambda: SquareDataset(loading_mode="streaming"),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_a_split_is_disjoint_whole_and_the_same_for_all(module_of: Any, kind: str) -> None:
    module = module_of(DATASETS[kind](), val_split=0.25, seed=3)
    train, val = drawn(module.train_dataloader()), drawn(module.val_dataloader())
    # golden: another one would put validation samples into the training
    assert val == [0, 2, 9, 15, 19, 20, 21, 28, 37, 41]
    assert train != sorted(train) and sorted(train + val) == list(range(42))
    assert drawn(module.val_dataloader()) == val and drawn(module.train_dataloader()) != train
    assert repr(module) == "DataModule(train=<32 samples>, val=<10 samples>)"


def test_a_split_follows_from_seed_and_length_alone(module_of: Any) -> None:
    def val_of(dataset: Any = None, **options: Any) -> list[int]:
        dataset = SquareDataset() if dataset is None else dataset
        return drawn(module_of(dataset, val_split=0.25, **{"seed": 3, **options}).val_dataloader())

    expected = val_of()
    assert val_of(batch_size=3, shuffle=False) == expected
    assert val_of(generator=torch.Generator().manual_seed(3), seed=9) == expected
    assert val_of(seed=4) != expected and val_of(range(41)) != expected
    parts = [val_of(rank=rank, world_size=2) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == expected


def test_validation_is_in_order_and_whole(module_of: Any) -> None:
    config = DataLoaderConfig.train(batch_size=4, num_workers=0)
    for options in (
        {"config": config},
        {"sampler": range(5)},
        {"batch_sampler": [[0, 1], [2]], "batch_size": 4},
    ):
        module = module_of(numbers(10), numbers(11, first=100), **options)
        assert drawn(module.val_dataloader()) == list(range(100, 111))
        assert len(module.val_dataloader()) == 3
    assert drawn(module.train_dataloader()) == [0, 1, 2]
    dropping = module_of(numbers(10), config=config)
    assert len(dropping.train_dataloader()) == 2
    assert dropping.val_dataloader() is None and dropping.val is None


def test_no_rank_pads_validation_unless_it_must(module_of: Any) -> None:
    val: list[int] = []
    for rank in range(3):
        module = module_of(SquareDataset(), list(torch.arange(7)), rank=rank, world_size=3)
        val += drawn(module.val_dataloader())
    assert sorted(val) == list(range(7))
    module = module_of(SquareDataset(), list(torch.arange(2)), rank=2, world_size=3)
    with pytest.warns(HeadraceWarning, match="2 validation samples are fewer than 3 ranks"):
        assert drawn(module.val_dataloader()) == [0]


def test_streams_are_taken_and_can_t_be_split(module_of: Any) -> None:
    module = module_of(Stream(6), Stream(6))
    for loader in (module.train_dataloader(), module.val_dataloader()):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="Stream"):
        module_of(Stream(6), val_split=0.5)


def test_huggingface_datasets_give_tensors(module_of: Any) -> None:
    plain, formatted = HuggingFace(list(range(8))), HuggingFace(list(range(8)), "numpy")
    batch = next(iter(module_of(plain, shuffle=False).train_dataloader()))
    assert same(batch, {"x": torch.arange(4)[:, None].repeat(1, 3), "y": torch.arange(4)})
    module = module_of(formatted, plain)
    assert module.train is formatted and module.val.format["type"] == "torch"
    assert plain.format["type"] is None


def test_paths_are_opened_with_the_datasets_options(
    module_of: Any, photos: Path, tiny_photos: Path, tmp_path: Path
) -> None:
    pack(ImageDataset(tiny_photos), tmp_path / "tiny.h5", progress=False)
    module = module_of(photos, tmp_path / "tiny.h5", image_size=8, seed=11)
    assert isinstance(module.train, ImageDataset) and module.seed == module.train.seed == 11
    images, targets = next(iter(module.train_dataloader()))
    assert images.shape == (4, 3, 8, 8) and targets.shape == (4,)
    assert [images.shape for images, _ in module.val_dataloader()] == [(4, 3, 8, 8)]
    split = module_of(str(photos), val_split=0.5, image_size=8, loading_mode="cached")
    assert len(split.train) == len(split.val) == 12 and split.seed == 42
    train, val = (set(map(part.source_of, range(12))) for part in (split.train, split.val))
    assert train.isdisjoint(val)


def test_loaders_are_made_once(module_of: Any) -> None:
    module = module_of(SquareDataset(), generator=torch.Generator().manual_seed(77), val_split=0.5)
    assert module.seed == module.train_dataloader().config.seed == 77
    assert module.train_dataloader() is module.train_dataloader()
    assert module.val_dataloader() is module.val_dataloader()


@pytest.mark.parametrize("options", [{}, {"val_split": 0.25}])
def test_a_state_goes_on_in_the_middle_of_an_epoch(module_of: Any, options: dict[str, Any]) -> None:
    module = module_of(SquareDataset(), **options)
    whole, following = drawn(module.train_dataloader()), drawn(module.train_dataloader())
    module.train_dataloader().set_epoch(0)
    iterator = iter(module.train_dataloader())
    for _ in range(3):
        next(iterator)
    state = module.state_dict()
    other = module_of(SquareDataset(), num_workers=1, **options)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert drawn(other.train_dataloader()) == whole[12:]
    assert drawn(other.train_dataloader()) == following
    with pytest.raises(StateError, match="another order"):
        module_of(SquareDataset(), shuffle=False, **options).load_state_dict(state)


def test_states_of_another_split_and_garbage_are_refused(module_of: Any) -> None:
    state = module_of(SquareDataset(), val_split=0.25, seed=3).state_dict()
    with pytest.raises(StateError, match="another dataset"):
        module_of(SquareDataset(), val_split=0.25, seed=4).load_state_dict(state)
    for garbage in (None, {}, {"val": 3}, {"train": None}):
        with pytest.raises(StateError):
            module_of(SquareDataset()).load_state_dict(garbage)


class OwnModule:
    def train_dataloader(self) -> list[int]:
        return [1]

    def val_dataloader(self) -> None: ...


def test_the_protocol_is_told_at_run_time(module_of: Any) -> None:
    assert isinstance(module_of(SquareDataset()), DataModuleProtocol)
    assert isinstance(OwnModule(), DataModuleProtocol)
    assert not isinstance(SquareDataset(), DataModuleProtocol)


def test_what_makes_no_sense_is_refused() -> None:
    squares = SquareDataset()
    for arguments, options, message in (
        ((squares, squares), {"val_split": 0.1}, "val_split=0.1"),
        ((squares,), {"val_split": 1.0}, "1.0"),
        ((squares,), {"val_split": -0.1}, "-0.1"),
        ((squares,), {"val_split": float("nan")}, "nan"),
        ((squares,), {"val_split": True}, "True"),
        ((squares,), {"val_split": "0.1"}, "'0.1'"),
        ((squares,), {"val_split": 0.01}, "of 42 samples leaves none"),
        ((squares,), {"val_split": 0.99}, "of 42 samples leaves none"),
        ((squares, 3), {}, "val .*3"),
        (({"train": [1], "test": [2]},), {}, "ConcatDataset"),
        ((squares,), {"custom_sampler": [1]}, "sampler"),
        ((squares,), {"val_transform": []}, "not a NoneType"),
        ((squares,), {"val_split": 0.5, "val_transform": [3]}, "callables, not 3"),
        ((numbers(10),), {"val_split": 0.5, "val_transform": []}, "Subset"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataModule(*arguments, **options)


def test_a_closed_module_can_be_used_again(photos: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "loading_mode": "cached"}
    module = DataModule(photos, val_split=0.5, image_size=8, **options)
    epochs = []
    for _ in range(2):
        epochs.append([images.clone() for images, _ in module.val_dataloader()])
        module.close()
    assert len(epochs[0]) == 3 and same(*epochs)


# -- transforms of validation data

RECIPE = [RandomResizedCrop(16), RandomHorizontalFlip()]


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        return value


def test_validation_at_random_is_warned_of(module_of: Any, photos: Path) -> None:
    generator = Compose(np.random.default_rng(0))
    for transform in (RECIPE, Compose(Compose(*RECIPE)), generator, [random.random]):
        dataset = SquareDataset(transform=transform)
        with pytest.warns(HeadraceWarning, match=r"val_transform="):
            dataset.split(0.75)
        with pytest.warns(HeadraceWarning, match=r"val_transform="):
            dataset.folds(3)
        with pytest.warns(HeadraceWarning, match=r"val_transform="):
            module_of(Subset(dataset, range(40)), val_split=0.25)
    with pytest.warns(HeadraceWarning, match=r"RandomResizedCrop, RandomHorizontalFlip"):
        module_of(photos, photos, transform=RECIPE)


@pytest.mark.filterwarnings("error::headrace.HeadraceWarning")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("lazy", {}),
        ("lazy", {"transform_input": "tensor"}),
        ("eager", {"image_size": 24}),
        ("cached", {"hold": "decoded"}),
    ],
)
def test_val_transform_shares_the_store_and_draws_nothing(
    module_of: Any, photos: Path, mode: str, options: dict[str, Any]
) -> None:
    dataset = ImageDataset(
        photos, transform=RECIPE, loading_mode=mode, max_memory_usage="50MB", **options
    )
    module = module_of(dataset, val_split=0.25, val_transform=[])
    images, targets = next(iter(module.val_dataloader()))
    size = options.get("image_size", 16)
    hold = {"hold": "decoded"} if "hold" in options else {}
    plain = ImageDataset(photos, image_size=size, **hold)
    expected = [plain[i] for i in module.val.whole_indices(range(4)).tolist()]
    assert targets.tolist() == [target for _, target in expected]
    assert images.shape == (4, 3, size, size)
    exact = torch.stack([image for image, _ in expected])
    assert (images - exact).abs().mean() < 0.05 and torch.equal(images[1], module.val[1][0])
    assert torch.equal(next(iter(module.val_dataloader()))[0], images)
    assert module.train.held is module.val.held
    assert module.train.transform is None and module.train.sample_decoder.augment is not None


def test_views_with_another_transform_show_the_same_pixels(photos: Path) -> None:
    eager = {"loading_mode": "eager", "image_size": 16}
    for given, train, options in (
        ("pil", RECIPE, {}),
        ("tensor", None, {}),
        ("numpy", [RandomHorizontalFlip(), lambda image: image], {}),
        ("pil", None, eager),
        ("tensor", RECIPE, eager),
    ):
        seen: list[Any] = []
        dataset = ImageDataset(photos, transform=train, transform_input=given, **options)
        view = dataset.with_transform(lambda image, seen=seen: seen.append(image) or torch.zeros(1))
        twin = ImageDataset(
            photos,
            transform=lambda image: image,
            transform_input=given,
            image_size=dataset.image_size,
        )
        assert view[3][0].shape == (1,) and type(seen[0]) is type(twin[3][0])
        assert np.array_equal(np.asarray(seen[0]), np.asarray(twin[3][0]))
        again = dataset.with_transform(RECIPE)[3][0]
        assert again.shape == (3, 16, 16) and again.dtype is torch.float32
        assert "transform=" in repr(view)
    joint = ImageDataset(photos, transforms=lambda image, target: (1, target))
    view = joint.with_transform(lambda image, target: (image.size, "other"))
    assert view[3] == ((64, 48), "other") and joint[3] == (1, 0)


def test_val_transform_of_wrapped_and_streamed_images(
    photos: Path, module_of: Any, tmp_path: Path
) -> None:
    pack(ImageDataset(photos), tmp_path / "photos.h5")
    for dataset in (
        MemoryEfficientDataset(photos, transform=RECIPE),
        MemoryEfficientDataset(ImageDataset(photos, transform=RECIPE)),
        StreamingDataset(tmp_path / "photos.h5", transform=RECIPE),
    ):
        sizes = [lambda image: torch.tensor(image.size)]
        module = module_of(dataset, val_split=0.25, val_transform=sizes)
        found = torch.cat([batch for batch, _ in module.val_dataloader()])
        assert found.tolist() == [[64, 48]] * 6
        assert next(iter(module.train_dataloader()))[0].shape == (4, 3, 16, 16)
