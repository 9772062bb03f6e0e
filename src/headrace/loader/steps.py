"""The exact number of batches of an epoch, and of the steps that an optimizer makes in it.

For schedules of learning rates: ranks, `drop_last`, padding and gradient accumulation are counted.
"""

from __future__ import annotations

from typing import Any

from headrace.arguments import check_integer
from headrace.errors import ConfigError
from headrace.loader.data import length_of
from headrace.loader.loader import Loader
from headrace.loader.multi.foreign import ReplayedLoader
from headrace.loader.multi.multi import MultiDataLoader
from headrace.order import EpochOrder, RankBatches, detect_world


def get_epoch_length(loader: Any, length: int | None = None, *, samples: int | None = None) -> int:
    """The batches that each rank gets in an epoch: `length` where it is given, what `samples` make, or ``len(loader)``.

    Args:
        loader: a `Loader`, a torch `DataLoader` or a `MultiDataLoader`.
        length: batches of an epoch on each rank, as they are: ``length=1000`` gives 1000. For a loop that ends an epoch earlier, or
            where the dataset has no length.
        samples: samples of the dataset, of all ranks together: ``samples=1000`` with ``batch_size=32`` gives 32. For another number
            than the dataset has, or where it has no length. They are taken to be shared out as a `Loader` shares them; an iterable
            dataset whose workers each end with a batch of their own may give some batches more. With ``batch_size=None``, batches
            of the dataset.

    Raises:
        ConfigError: the dataset has no length and neither is given; both are given; or `samples` for a `MultiDataLoader`.
    """
    check_integer("length", length, 0, optional=True)
    check_integer("samples", samples, 0, optional=True)
    if length is not None and samples is not None:
        raise ConfigError("length= and samples= are given, the batches and the samples of an epoch: pass one of them")
    if length is not None:
        return length
    if samples is None:
        known = length_of(loader)
        if known is None:
            data = type(getattr(loader, "dataset", loader)).__name__
            raise ConfigError(
                f"the length of an epoch over {data} is not known: pass length=, the batches of each rank, or samples=, those of all ranks"
            )
        return known
    if isinstance(loader, MultiDataLoader):
        raise ConfigError("samples= has no meaning for a MultiDataLoader, which has several datasets: pass length=, or give it steps=")
    world, size = _world_size(loader), _batch_size(loader)
    drop_last = bool(getattr(loader, "drop_last", False) or getattr(getattr(loader, "batch_sampler", None), "drop_last", False))
    pad = loader.config.pad if isinstance(loader, Loader) else True
    order = EpochOrder(samples, shuffle=False, global_batch=size * world)
    return len(RankBatches(order, 0, world, size, drop_last, pad))


def get_train_dataloader_steps(
    loader: Any, length: int | None = None, accumulate: int = 1, *, samples: int | None = None
) -> tuple[int, int, int]:
    """What an epoch is for an optimizer that makes a step every `accumulate` batches, and one over what is left at the end.

    Args:
        loader, length, samples: see `get_epoch_length`.
        accumulate: batches of a rank that a step sees.

    Returns:
        ``(global_batch, steps, accumulate)``: the samples that a full step sees, over all ranks and accumulated batches; the steps of
        an epoch; and `accumulate`, lowered to the batches of an epoch where those are fewer.

    Raises:
        ConfigError: see `get_epoch_length`; `accumulate` below 1; batches of unknown size, or of different ones.
    """
    check_integer("accumulate", accumulate, 1)
    batches = get_epoch_length(loader, length, samples=samples)
    accumulate = min(accumulate, max(1, batches))
    return _batch_size(loader, exact=True) * _world_size(loader) * accumulate, -(-batches // accumulate), accumulate


def get_val_dataloader_steps(loader: Any, length: int | None = None, sanity_steps: int = 0, *, samples: int | None = None) -> int:
    """The batches that each rank gets in a validation; 0 where `loader` is None, as it is without validation data.

    Args:
        loader, length, samples: see `get_epoch_length`.
        sanity_steps: for the short check before a training: so many batches at most. 0: all of them.

    Raises:
        ConfigError: see `get_epoch_length`; `sanity_steps` below 0.
    """
    check_integer("sanity_steps", sanity_steps, 0)
    if loader is None:
        return 0
    batches = get_epoch_length(loader, length, samples=samples)
    return min(batches, sanity_steps) if sanity_steps else batches


def _parts(loader: Any) -> list[Any]:
    """The loaders that a loader consists of."""
    if isinstance(loader, MultiDataLoader):
        return [part.loader if isinstance(part, ReplayedLoader) else part for part in loader.loaders.values()]
    return [loader]


def _batch_size(loader: Any, exact: bool = False) -> int:
    """The samples of a rank's batch; where it need not be exact, 1 for batches that the dataset makes."""
    sizes = {_size_of(part) for part in _parts(loader)}
    if len(sizes) > 1:
        raise ConfigError(
            f"the loaders have batches of different sizes ({', '.join(map(str, sorted(sizes, key=str)))}): ask for each of them"
        )
    size = sizes.pop()
    if size is None and exact:
        raise ConfigError("the size of a batch is not known: the dataset or a batch sampler makes the batches, and has no batch_size")
    return 1 if size is None else size


def _size_of(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _world_size(loader: Any) -> int:
    for part in _parts(loader):
        if isinstance(part, Loader):
            return part.config.world_size or 1
        ranks = getattr(getattr(part, "sampler", None), "num_replicas", None)
        if isinstance(ranks, int):
            return ranks
    return detect_world().world_size
