"""Training and validation loaders for a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, Subset

from headrace.arguments import checks_keywords, parameters_of
from headrace.core.dataset import BaseDataset
from headrace.errors import ConfigError, StateError, warn
from headrace.loader.config import (
    Data,
    DataLoaderConfig,
    check_dataset,
    check_options,
    is_path,
    length_of,
)
from headrace.loader.loader import Loader, open_path
from headrace.order import detect_world
from headrace.order.splits import split_parts

# options of an order, which validation data don't have
_ORDER = ["sampler", "batch_sampler", "weights", "balanced", "replacement", "num_samples"]
_ORDER += ["bucket_by_length"]


@runtime_checkable
class DataModuleProtocol(Protocol):
    """An object with a training and a validation loader: a `DataModule`, Lightning's, or your
    own.
    """

    def train_dataloader(self) -> Any:
        """The training loader."""

    def val_dataloader(self) -> Any:
        """The validation loader. None: there is no validation data."""


class DataModule:
    """Training and validation data of one run, and their loaders, which are created once.

    ```python
    module = DataModule("photos", val_split=0.1, batch_size=64, seed=7)
    for images, targets in module.train_dataloader(): ...
    ```

    Args:
        train: a path, a torch dataset, or a HuggingFace dataset. A list of tensors is a dataset:
            each tensor is a sample. A HuggingFace dataset without a format yields tensors.
        val: the same for validation.
        val_split: instead of `val`: fraction of `train` to use for validation. The split depends on
            seed and length only, so it is the same on every rank.
        val_transform: transform of the validation data, a callable or a list; [] for none. If it is
            not given, validation data have the transform of `train`. Validation data must be a
            headrace dataset or a path. What `train` caches in memory is shared. With [], images are
            resized to `image_size`, or else to the size of the training crops.
        config: the options of both loaders. Validation data are not shuffled, dropped or drawn by a
            sampler, and are padded only if there are fewer samples than ranks.
        **overrides: fields that replace those of `config`. For paths, other keywords are passed to
            the datasets, as in `create_dataloader`.

    Attributes:
        train, val: the datasets as the loaders see them; `val` is None without validation data.
        config: the options as passed.

    Raises:
        ConfigError: `val` and `val_split` are both given; `val_transform` can't be applied;
            `val_split` is outside of [0, 1), leaves a part without samples, or is given for a
            dataset without random access or length; or an argument is neither a dataset nor a path.
    """

    @checks_keywords
    def __init__(
        self,
        train: Data,
        val: Data | None = None,
        *,
        val_split: float = 0.0,
        val_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        config: DataLoaderConfig | None = None,
        **overrides: Any,
    ) -> None:
        is_number = isinstance(val_split, (int, float)) and not isinstance(val_split, bool)
        if not is_number or not 0 <= val_split < 1:
            raise ConfigError(
                f"val_split must be a fraction of at least 0 and below 1, not {val_split!r}"
            )
        if val is not None and val_split:
            raise ConfigError(
                f"val and val_split={val_split} can't be given together: pass one of them"
            )
        arguments = parameters_of(DataModule.__init__)
        self._opened: list[BaseDataset] = []
        rest: dict[str, Any] = {**overrides}
        datasets: list[Any] = []
        for name, data in (("train", train), ("val", val)):
            opened: Any = data
            if isinstance(data, Mapping):
                raise ConfigError(
                    f"{name} must be one dataset; of several by name "
                    f"({', '.join(map(str, data))}) pass {name}=data[name]"
                )
            if is_path(data):
                opened, rest = open_path("DataModule", data, config, overrides, arguments)
                self._opened.append(opened)
            elif data is not None or name == "train":
                check_dataset(name, data)
            # a HuggingFace dataset gives lists of Python numbers until it is told a format
            if _is_huggingface(opened) and opened.format["type"] is None:
                opened = opened.with_format("torch")
            datasets.append(opened)
        check_options("DataModule", config, rest, arguments)
        self.config: DataLoaderConfig = (config or DataLoaderConfig()).with_(**rest)
        self.train: Any
        self.val: Any
        self.train, self.val = datasets
        if val_split:
            self.train, self.val = _split(self.train, val_split, self.seed)
        if val_transform is not None:
            if not isinstance(self.val, BaseDataset):
                raise ConfigError(
                    f"val_transform can't be given to a {type(self.val).__name__}: pass val= with "
                    "a dataset that has it, or val_split= of such a one"
                )
            self.val = self.val.with_transform(val_transform)
        self._loaders: dict[str, Loader] = {}

    @property
    def seed(self) -> int:
        """The seed of split, orders and random transforms."""
        generator = self.config.generator
        return self.config.seed if generator is None else generator.initial_seed() & ((1 << 63) - 1)

    def train_dataloader(self) -> Loader:
        """Returns the training loader, always the same object."""
        if "train" not in self._loaders:
            self._loaders["train"] = Loader(self.train, self.config)
        return self._loaders["train"]

    def val_dataloader(self) -> Loader | None:
        """Returns the validation loader, always the same object: in order, each sample once.
        None: there is no validation data.
        """
        if self.val is not None and "val" not in self._loaders:
            config = self.config
            ranks = detect_world(config.rank, config.world_size).world_size
            n = length_of(self.val)
            pad = n is not None and n < ranks
            if pad:
                warn(
                    f"{n} validation samples are fewer than {ranks} ranks: some come several "
                    "times, so that each rank has one"
                )
            order: dict[str, Any] = {name: getattr(DataLoaderConfig, name) for name in _ORDER}
            own = config.with_(**{**order, "shuffle": False, "drop_last": False, "pad": pad})
            self._loaders["val"] = Loader(self.val, own)
        return self._loaders.get("val")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the training loader. Validation always starts anew. Lightning's
        hook of the same name may return it.
        """
        return {"train": self.train_dataloader().state_dict()}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Resumes the training loader from a saved state; see `Loader.load_state_dict`.

        Raises:
            StateError: it is not the state of a DataModule, or does not fit.
        """
        if not isinstance(state, dict) or "train" not in state:
            raise StateError(
                "load_state_dict: this is no state of a DataModule: pass what its state_dict() "
                "returned"
            )
        self.train_dataloader().load_state_dict(state["train"], strict=strict)

    def close(self) -> None:
        """Stops the workers of both loaders, and closes what was opened from paths. The module
        can be used again afterwards.
        """
        for loader in self._loaders.values():
            loader.close()
        for dataset in self._opened:
            dataset.close()

    def __repr__(self) -> str:
        return (
            f"DataModule(train=<{length_of(self.train)} samples>, "
            f"val={None if self.val is None else f'<{length_of(self.val)} samples>'})"
        )


def _is_huggingface(dataset: Any) -> bool:
    """Told by what it can do: the library need not be there."""
    return all(hasattr(dataset, name) for name in ("with_format", "column_names", "features"))


def _split(dataset: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """Training and validation part of a dataset."""
    n = length_of(dataset)
    is_own = isinstance(dataset, BaseDataset)
    if n is None or (isinstance(dataset, IterableDataset) and not is_own):
        raise ConfigError(
            f"val_split needs random access and a length, which {type(dataset).__name__} has not: "
            "pass val= instead"
        )
    val, train = split_parts(n, [fraction, 1 - fraction], seed)
    if is_own:
        return dataset.subset(train), dataset.subset(val)
    if _is_huggingface(dataset):
        return dataset.select(train), dataset.select(val)
    return Subset(dataset, train.tolist()), Subset(dataset, val.tolist())
