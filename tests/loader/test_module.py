"""DataModule: a trainer's two loaders come from one description, and share no sample."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

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
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(4)


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
        return (
            {k: torch.tensor(v) for k, v in row.items()} if self.format["type"] == "torch" else row
        )

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[i] for i in indices]

    def with_format(self, format_type: str) -> "HuggingFace":
        return HuggingFace(self.rows, format_type)

    def select(self, indices: Any) -> "HuggingFace":
        return HuggingFace([self.rows[i] for i in indices], self.format["type"])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def drawn(loader: Any) -> list[int]:
    """The samples of an epoch, by their first number."""
    first = (
        batch["y"]
        if isinstance(batch, dict)
        else batch[0]
        if isinstance(batch, list | tuple)
        else batch
        for batch in loader
    )
    return [int(value) for batch in first for value in batch.reshape(len(batch), -1)[:, 0]]


DATASETS = {
    "tensors": lambda: TensorDataset(torch.arange(42)),
    "list": lambda: list(torch.arange(42)),
    "rows": lambda: list(torch.arange(42)[:, None].repeat(1, 3)),
    "huggingface": lambda: HuggingFace(list(range(42))),
    "lazy": SquareDataset,
    "cached": lambda: SquareDataset(loading_mode="cached"),
    "streaming": lambda: SquareDataset(loading_mode="streaming"),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_a_split_is_disjoint_and_whole(module_of: Any, kind: str) -> None:
    module = module_of(DATASETS[kind](), val_split=0.25, seed=3)
    train, val = drawn(module.train_dataloader()), drawn(module.val_dataloader())
    assert len(val) == round(42 * 0.25) == 10 and val == sorted(val)
    assert train != sorted(train) and sorted(train + val) == list(range(42))
    assert drawn(module.val_dataloader()) == val and drawn(module.train_dataloader()) != train
    assert repr(module) == "DataModule(train=<32 samples>, val=<10 samples>)"


def test_a_split_follows_from_seed_and_length_alone(module_of: Any) -> None:
    def val_of(dataset: Any = None, **options: Any) -> list[int]:
        dataset = SquareDataset() if dataset is None else dataset
        return drawn(module_of(dataset, val_split=0.25, **{"seed": 3, **options}).val_dataloader())

    found = val_of()
    # golden: another one would put validation samples into the training
    assert found == [0, 2, 9, 15, 19, 20, 21, 28, 37, 41]
    assert all(val_of(DATASETS[kind]()) == found for kind in DATASETS)
    assert (
        val_of(batch_size=3, shuffle=False)
        == val_of(generator=torch.Generator().manual_seed(3), seed=9)
        == found
    )
    assert val_of(seed=4) != found and val_of(range(41)) != found
    parts = [val_of(rank=rank, world_size=2) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == found


def test_validation_is_in_order_and_whole(module_of: Any) -> None:
    config = DataLoaderConfig.train(batch_size=4, num_workers=0)
    for options in (
        {"config": config},
        {"sampler": range(5)},
        {"batch_sampler": [[0, 1], [2]], "batch_size": 4},
    ):
        module = module_of(
            TensorDataset(torch.arange(10)), TensorDataset(torch.arange(100, 111)), **options
        )
        assert drawn(module.val_dataloader()) == list(range(100, 111))
        assert len(module.val_dataloader()) == 3
    assert drawn(module.train_dataloader()) == [0, 1, 2]
    dropping = module_of(TensorDataset(torch.arange(10)), config=config)
    assert (
        len(dropping.train_dataloader()) == 2
        and dropping.val_dataloader() is None
        and dropping.val is None
    )


def test_no_rank_pads_validation_unless_it_must(module_of: Any) -> None:
    val = [
        module_of(SquareDataset(), list(torch.arange(7)), rank=r, world_size=3).val_dataloader()
        for r in range(3)
    ]
    assert sorted(i for loader in val for i in drawn(loader)) == list(range(7))
    module = module_of(SquareDataset(), list(torch.arange(2)), rank=2, world_size=3)
    with pytest.warns(HeadraceWarning, match="2 validation samples are fewer than 3 ranks"):
        assert drawn(module.val_dataloader()) == [0]


def test_streams_are_taken_and_can_t_be_split(module_of: Any) -> None:
    module = module_of(Stream(), Stream())
    assert [batch.tolist() for batch in module.train_dataloader()] == [[0, 1, 2, 3], [4, 5]]
    assert [batch.tolist() for batch in module.val_dataloader()] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ConfigError, match=r"random access.*Stream"):
        module_of(Stream(), val_split=0.5)


def test_huggingface_datasets_give_tensors(module_of: Any) -> None:
    plain, formatted = HuggingFace(list(range(8))), HuggingFace(list(range(8)), "numpy")
    batch = next(iter(module_of(plain, shuffle=False).train_dataloader()))
    assert same(batch, {"x": torch.arange(4)[:, None].repeat(1, 3), "y": torch.arange(4)})
    module = module_of(formatted, plain)
    assert (
        module.train is formatted
        and module.val.format["type"] == "torch"
        and plain.format["type"] is None
    )


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
    assert set(map(split.train.source_of, range(12))).isdisjoint(
        map(split.val.source_of, range(12))
    )


def test_the_seed_is_that_of_a_generator(module_of: Any) -> None:
    module = module_of(SquareDataset(), generator=torch.Generator().manual_seed(77), seed=3)
    assert module.seed == module.train_dataloader().config.seed == 77
    assert module_of(SquareDataset()).seed == 42


def test_loaders_are_made_once_and_workers_live_on(module_of: Any) -> None:
    module = module_of(SquareDataset(), val_split=0.5, num_workers=1)
    assert (
        module.train_dataloader() is module.train_dataloader()
        and module.val_dataloader() is module.val_dataloader()
    )
    assert len(drawn(module.train_dataloader())) == 21 == len(drawn(module.val_dataloader()))


@pytest.mark.parametrize("options", [{}, {"val_split": 0.25}])
def test_a_state_goes_on_in_the_middle_of_an_epoch(module_of: Any, options: dict[str, Any]) -> None:
    def make(**more: Any) -> DataModule:
        module: DataModule = module_of(SquareDataset(), **options, **more)
        return module

    module = make()
    whole, following = drawn(module.train_dataloader()), drawn(module.train_dataloader())
    module.train_dataloader().set_epoch(0)
    iterator = iter(module.train_dataloader())
    for _ in range(3):
        next(iterator)
    other = make(num_workers=1)
    other.load_state_dict(module.state_dict())
    assert other.state_dict() == module.state_dict()
    assert (
        drawn(other.train_dataloader()) == whole[12:]
        and drawn(other.train_dataloader()) == following
    )
    with pytest.raises(StateError, match="another order"):
        make(seed=9).load_state_dict(module.state_dict()) if not options else make(
            shuffle=False
        ).load_state_dict(module.state_dict())
    adopted = make(shuffle=False)
    adopted.load_state_dict(module.state_dict(), strict=False)
    assert drawn(adopted.train_dataloader()) == whole[12:]


def test_another_split_is_refused(module_of: Any) -> None:
    state = module_of(SquareDataset(), val_split=0.25, seed=3).state_dict()
    with pytest.raises(StateError, match="another dataset"):
        module_of(SquareDataset(), val_split=0.25, seed=4).load_state_dict(state)
    for garbage in (None, {}, {"val": 3}, {"train": None}):
        with pytest.raises(StateError):
            module_of(SquareDataset()).load_state_dict(garbage)


def test_the_protocol_is_told_at_run_time(module_of: Any) -> None:
    class Own:
        def train_dataloader(self) -> list[int]:
            return [1]

        def val_dataloader(self) -> None: ...

    assert isinstance(module_of(SquareDataset()), DataModuleProtocol) and isinstance(
        Own(), DataModuleProtocol
    )
    assert not isinstance(SquareDataset(), DataModuleProtocol)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (
            (SquareDataset(), SquareDataset()),
            {"val_split": 0.1},
            "val and val_split=0.1 can't be given together",
        ),
        ((SquareDataset(),), {"val_split": 1.0}, "below 1, not 1.0"),
        ((SquareDataset(),), {"val_split": -0.1}, "not -0.1"),
        ((SquareDataset(),), {"val_split": float("nan")}, "not nan"),
        ((SquareDataset(),), {"val_split": True}, "not True"),
        ((SquareDataset(),), {"val_split": "0.1"}, "not '0.1'"),
        ((SquareDataset(),), {"val_split": 0.01}, "0.01 of 42 samples leaves none for validation"),
        ((SquareDataset(),), {"val_split": 0.99}, "leaves none for training"),
        ((None,), {}, "train must be a dataset or a path, not None"),
        ((3,), {}, "train must be"),
        ((SquareDataset(), 3), {}, "val must be"),
        (({"train": [1], "test": [2]},), {}, r"train, test.*pass train=data\[name\]"),
        ((torch.utils.data.DataLoader([1]),), {}, "not a loader: pass its dataset"),
        ((SquareDataset(),), {"custom_sampler": [1]}, "sampler"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataModule(*arguments, **options)


def test_close_closes_what_was_opened_and_it_can_be_used_again(photos: Path) -> None:
    module = DataModule(
        photos, val_split=0.5, image_size=8, batch_size=4, num_workers=1, loading_mode="cached"
    )
    first = [images.numpy().copy() for images, _ in module.val_dataloader()]
    module.close()
    again = [images.numpy().copy() for images, _ in module.val_dataloader()]
    module.close()
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)) and len(first) == 3


RECIPE = [RandomResizedCrop(16), RandomHorizontalFlip()]


class RandomRotation:
    def __call__(self, value: Any) -> Any:
        return value


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize(
    "transform",
    [
        RECIPE,
        Compose(Compose(RandomRotation())),
        Compose(np.random.default_rng(0)),
        [random.random],
    ],
)
def test_validation_at_random_is_warned_of(module_of: Any, transform: Any) -> None:
    dataset = (
        SquareDataset(transform=transform)
        if transform is not RECIPE
        else SquareDataset(transform=list(RECIPE))
    )
    with pytest.warns(
        HeadraceWarning,
        match=r"the validation data are transformed at random .*val_transform= \(\[\] for none\)",
    ):
        module_of(dataset, val_split=0.25)


def test_validation_of_a_path_at_random_is_warned_of(module_of: Any, photos: Path) -> None:
    with pytest.warns(
        HeadraceWarning, match=r"at random \(RandomResizedCrop, RandomHorizontalFlip\)"
    ):
        module_of(photos, photos, transform=RECIPE)


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize(
    "options", [{}, {"image_size": 24}, {"hold": "decoded"}, {"transform_input": "tensor"}]
)
def test_val_transform_shares_the_store_and_draws_nothing(
    module_of: Any,
    photos: Path,
    mode: str,
    options: dict[str, Any],
    recwarn: pytest.WarningsRecorder,
) -> None:
    dataset = ImageDataset(
        photos, transform=RECIPE, loading_mode=mode, max_memory_usage="50MB", **options
    )
    module = module_of(dataset, val_split=0.25, val_transform=[])
    images, targets = next(iter(module.val_dataloader()))
    size = options.get("image_size", 16)
    plain = ImageDataset(
        photos, image_size=size, **({"hold": "decoded"} if "hold" in options else {})
    )
    whole = module.val.whole_indices(range(4)).tolist()
    wanted = [plain[i] for i in whole]
    assert targets.tolist() == [target for _, target in wanted] and images.shape == (
        4,
        3,
        size,
        size,
    )
    exact = torch.stack([image for image, _ in wanted])
    assert (images - exact).abs().mean() < 0.05 and torch.equal(images[1], module.val[1][0])
    assert torch.equal(next(iter(module.val_dataloader()))[0], images)
    assert (
        (module.train.mode is module.val.mode or mode == "lazy")
        and module.train.transform is None
        and module.train.sample_format.augment is not None
    )
    assert not [w for w in recwarn if issubclass(w.category, HeadraceWarning)]


@pytest.mark.parametrize("given", ["pil", "tensor", "numpy"])
@pytest.mark.parametrize("train", [None, RECIPE, [RandomHorizontalFlip(), lambda image: image]])
@pytest.mark.parametrize("loading", [{}, {"loading_mode": "eager", "image_size": 16}])
def test_views_with_another_transform_show_the_same_pixels(
    photos: Path, given: str, train: Any, loading: dict[str, Any]
) -> None:
    seen: list[Any] = []
    dataset = ImageDataset(photos, transform=train, transform_input=given, **loading)
    view = dataset.with_transform(lambda image: seen.append(image) or torch.zeros(1))
    twin = ImageDataset(
        photos, transform=lambda image: image, transform_input=given, image_size=dataset.image_size
    )
    assert view[3][0].shape == (1,) and type(seen[0]) is type(twin[3][0])
    assert np.array_equal(np.asarray(seen[0]), np.asarray(twin[3][0]))
    again = dataset.with_transform(RECIPE)[3][0]
    assert again.shape == (3, 16, 16) and again.dtype is torch.float32
    assert "transform=" in repr(view)


def test_val_transform_of_wrapped_and_streamed_images(
    photos: Path, module_of: Any, tmp_path: Path
) -> None:
    pack(ImageDataset(photos), tmp_path / "photos.h5")
    for dataset in (
        MemoryEfficientDataset(photos, transform=RECIPE),
        MemoryEfficientDataset(ImageDataset(photos, transform=RECIPE)),
        StreamingDataset(tmp_path / "photos.h5", transform=RECIPE),
    ):
        module = module_of(
            dataset, val_split=0.25, val_transform=[lambda image: torch.tensor(image.size)]
        )
        sizes = torch.cat([sizes for sizes, _ in module.val_dataloader()])
        assert sizes.tolist() == [[64, 48]] * 6
        assert next(iter(module.train_dataloader()))[0].shape == (4, 3, 16, 16)


def test_val_transform_of_a_joint_one_is_joint(photos: Path) -> None:
    dataset = ImageDataset(photos, transforms=lambda image, target: (1, target))
    view = dataset.with_transform(lambda image, target: (image.size, "other"))
    assert view[3] == ((64, 48), "other") and dataset[3] == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((SquareDataset(),), {}, "val_transform needs validation data"),
        ((SquareDataset(),), {"val_split": 0.5, "val_transform": [3]}, "3 is none"),
        (
            (TensorDataset(torch.arange(10)),),
            {"val_split": 0.5},
            "can't be given to a Subset: pass val=",
        ),
    ],
)
def test_val_transform_that_has_no_place(
    arguments: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        DataModule(*arguments, **{"val_transform": [], **options})
