"""Training and validation loaders for a trainer, and the exact number of its batches and steps.

Ranks, `drop_last`, padding and gradient accumulation are taken into account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset, IterableDataset, Subset

from headrace.arguments import check_integer, checks_keywords, parameters_of
from headrace.core.dataset import BaseDataset
from headrace.core.views import warn_if_random
from headrace.errors import ConfigError, StateError, warn
from headrace.loader.config import Data, DataLoaderConfig, check_dataset, length_of
from headrace.loader.loader import Loader, open_paths
from headrace.loader.multi import MultiDataLoader
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
            not given, validation data have the transform of `train`, with a warning if that is
            random. Validation data must be a headrace dataset or a path. What `train` caches in
            memory is shared. With [], images are resized to `image_size`, or else to the size of
            the training crops.
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
        check_dataset("train", train)
        if val is not None:
            check_dataset("val", val)
        data: dict[str, Any] = {"train": train, "val": val}
        arguments = parameters_of(DataModule.__init__)
        self.config: DataLoaderConfig
        self._opened, self.config = open_paths("DataModule", data, config, overrides, arguments)
        data |= self._opened
        for name, dataset in data.items():
            # a HuggingFace dataset gives lists of Python numbers until it is told a format
            if _is_huggingface(dataset) and dataset.format["type"] is None:
                data[name] = dataset.with_format("torch")
        self.train: Any = data["train"]
        self.val: Any = data["val"]
        if val_split:
            self.train, self.val = _split(self.train, val_split, self.seed)
        if val_transform is not None:
            if not isinstance(self.val, BaseDataset):
                raise ConfigError(
                    f"val_transform needs a dataset of headrace, not a {type(self.val).__name__}: "
                    "give val= its own transform"
                )
            self.val = self.val.with_transform(val_transform)
        warn_if_random(self.val, "the validation data")
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
                "load_state_dict: this is not a state of a DataModule: pass what its "
                "state_dict() returned"
            )
        self.train_dataloader().load_state_dict(state["train"], strict=strict)

    def close(self) -> None:
        """Stops the workers of both loaders, and closes what was opened from paths. The module
        can be used again afterwards.
        """
        for loader in self._loaders.values():
            loader.close()
        for dataset in self._opened.values():
            dataset.close()

    def __repr__(self) -> str:
        return (
            f"DataModule(train=<{length_of(self.train)} samples>, "
            f"val={None if self.val is None else f'<{length_of(self.val)} samples>'})"
        )


def _is_huggingface(dataset: Any) -> bool:
    """True for a HuggingFace dataset, recognised without importing the library."""
    return all(hasattr(dataset, name) for name in ("with_format", "column_names", "features"))


def _split(dataset: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """Training and validation part of a dataset."""
    n = length_of(dataset)
    is_own = isinstance(dataset, BaseDataset)
    if n is None or (isinstance(dataset, IterableDataset) and not is_own):
        raise ConfigError(
            f"val_split needs random access and a length, which {type(dataset).__name__} doesn't "
            "have: pass val= instead"
        )
    val, train = split_parts(n, [fraction, 1 - fraction], seed)
    if is_own:
        return dataset.subset(train), dataset.subset(val)
    if _is_huggingface(dataset):
        return dataset.select(train), dataset.select(val)
    return Subset(dataset, train.tolist()), Subset(dataset, val.tolist())


@checks_keywords
def get_epoch_length(loader: Any, length: int | None = None) -> int:
    """Returns the number of batches per epoch and rank.

    Args:
        loader: a `Loader`, a torch `DataLoader` or a `MultiDataLoader`.
        length: number of batches per epoch and rank, which is returned unchanged (``length=1000``
            gives 1000). For loops that end an epoch early, or datasets without a length. None:
            ``len(loader)``.

    Raises:
        ConfigError: the dataset has no length and `length` is not given; or `loader` is a dataset.
    """
    if length is not None:
        return check_integer("length", length, 0)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ConfigError(
            f"pass a loader, not a {type(loader).__name__}, whose length is a number of samples"
        )
    known = length_of(loader)
    if known is None:
        data = type(getattr(loader, "dataset", loader)).__name__
        raise ConfigError(
            f"the length of an epoch over {data} is not known: pass length=, the batches of each "
            "rank"
        )
    return known


@checks_keywords
def get_train_dataloader_steps(
    loader: Any, length: int | None = None, accumulate: int = 1
) -> tuple[int, int, int]:
    """Returns global batch size, optimizer steps per epoch and accumulation.

    The optimizer steps every `accumulate` batches, and once more for the remaining batches at the
    end of the epoch.

    Args:
        loader, length: see `get_epoch_length`.
        accumulate: number of batches of a rank per optimizer step.

    Returns:
        ``(global_batch, steps, accumulate)``: number of samples per full optimizer step, over all
        ranks and accumulated batches; number of optimizer steps per epoch; and `accumulate`,
        reduced to the number of batches of an epoch if that is smaller.

    Raises:
        ConfigError: see `get_epoch_length`; or `accumulate` is below 1, or batch sizes are unknown
            or differ.
    """
    check_integer("accumulate", accumulate, 1)
    batches = get_epoch_length(loader, length)
    accumulate = min(accumulate, max(1, batches))
    global_batch = _global_batch(loader) * accumulate
    return global_batch, -(-batches // accumulate), accumulate


@checks_keywords
def get_val_dataloader_steps(loader: Any, length: int | None = None, sanity_steps: int = 0) -> int:
    """Returns the number of validation batches per rank. 0 if `loader` is None, as it is without
    validation data.

    Args:
        loader, length: see `get_epoch_length`.
        sanity_steps: maximum number of batches, for the short check before training. 0: all
            batches.

    Raises:
        ConfigError: see `get_epoch_length`; or `sanity_steps` is below 0.
    """
    check_integer("sanity_steps", sanity_steps, 0)
    if loader is None:
        return 0
    batches = get_epoch_length(loader, length)
    return min(batches, sanity_steps) if sanity_steps else batches


def _global_batch(loader: Any) -> int:
    """The samples of a batch, over all ranks."""
    parts = [loader]
    if isinstance(loader, MultiDataLoader):
        parts = list(loader.loaders.values())
    sizes = set()
    world_size = None
    for part in parts:
        size = getattr(part, "batch_size", None)
        if size is None:
            size = getattr(getattr(part, "batch_sampler", None), "batch_size", None)
        sizes.add(size)
        if isinstance(part, Loader):
            world_size = part.config.world_size
        elif world_size is None:
            world_size = getattr(getattr(part, "sampler", None), "num_replicas", None)
    size = sizes.pop()
    if sizes:
        raise ConfigError(
            f"the loaders have batches of different sizes ({size}, {', '.join(map(str, sizes))}): "
            "ask for each of them"
        )
    if not isinstance(size, int):
        raise ConfigError(
            "the size of a batch is not known: the dataset or a batch sampler makes the batches, "
            "and has no batch_size"
        )
    return size * (world_size or detect_world().world_size)
