"""Takes the first batch of a loader apart, into samples that can be shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.dataset import BaseDataset
from headrace.datasets.open import open_dataset
from headrace.datasets.shards.streaming import StreamingDataset
from headrace.errors import CollateError, ConfigError
from headrace.loader.create import create_dataloader
from headrace.loader.data import length_of

_IDS, _MASK, _INDEX = "input_ids", "attention_mask", "index"
_SAID = 40  # characters of a value in a caption


@dataclass(slots=True)
class Item:
    """A sample to be shown.

    Attributes:
        index: of the sample; None: it has none.
        where: it lies.
        caption: its target and other fields, in words.
        value: its input as an array; None: it is a text, or nothing that can be drawn.
        target: an array to be drawn beside it, such as labels of voxels; None: the caption says it.
        ids, mask: of a text: its tokens [length] and 1 where they are no padding.
        text: what the tokens stand for; None: nobody can say.
        boxes: [objects, 4], edges of objects in pixels of the input: left, top, right, bottom;
            None: it has none.
    """

    index: int | None
    where: str
    caption: str
    value: npt.NDArray[Any] | None = None
    target: npt.NDArray[Any] | None = None
    ids: npt.NDArray[np.int64] | None = None
    mask: npt.NDArray[np.int64] | None = None
    text: str | None = None
    boxes: npt.NDArray[Any] | None = None

    @property
    def padding(self) -> int:
        """Tokens that are padding."""
        return 0 if self.mask is None else int((self.mask == 0).sum())


@dataclass(slots=True)
class Preview:
    """The first batch of an epoch.

    Attributes:
        title: dataset, epoch and seed.
        facts: what the batch is made of, by name.
        items: its samples.
        notes: what there is to know besides.
    """

    title: str
    facts: dict[str, str]
    items: list[Item]
    notes: list[str] = field(default_factory=list)

    @property
    def is_text(self) -> bool:
        """True if samples are tokens."""
        return any(item.ids is not None for item in self.items)


def preview(
    data_path: Any,
    *,
    count: int = 24,
    seed: int = 42,
    epoch: int = 0,
    shuffle: bool = True,
    transform: Callable[[Any], Any] | None = None,
    opens: Callable[..., BaseDataset] = open_dataset,
    **options: Any,
) -> Preview:
    """The first batch that a loader yields in an epoch, in this process.

    Args:
        data_path: as `open_dataset` takes it; or a dataset of headrace's.
        count: samples in the batch.
        seed, epoch: of the order and of random transforms.
        shuffle: False: the first samples in their order.
        transform: of inputs; None: the dataset's default.
        opens: what opens the path.
        **options: of `opens`.

    Raises:
        ConfigError: a dataset of no samples; options that don't fit.
        HeadraceError: what the loader raises.
    """
    given = {**options, **({} if transform is None else {"transform": transform})}
    dataset = (
        data_path
        if isinstance(data_path, BaseDataset)
        else opens(data_path, return_index=True, **given)
    )
    is_own = dataset is not data_path
    notes: list[str] = []
    try:
        if not isinstance(dataset, StreamingDataset) and not len(dataset):
            raise ConfigError(f"{dataset!r} has no samples to show")
        # shards have a shuffle of their own, by blocks
        order: dict[str, Any] = {}
        if not (shuffle and isinstance(dataset, StreamingDataset)):
            order["shuffle"] = shuffle
        loader_options: dict[str, Any] = {
            "batch_size": count,
            "num_workers": 0,
            "seed": seed,
            "pin_memory": False,
            **order,
        }
        try:
            try:
                batch = _first(dataset, epoch, loader_options)
            except ConfigError:
                if not (is_own and dataset.return_index):
                    raise
                dataset.return_index = False  # samples may have a field "index" of their own
                batch = _first(dataset, epoch, loader_options)
        except CollateError as error:
            notes.append(
                f"a loader with the default collate function raises: {' '.join(str(error).split())}"
            )
            batch = _first(dataset, epoch, {**loader_options, "collate_fn": "list"})
        facts = {"batch": _shape_of(_without_index(batch) if dataset.return_index else batch)}
        classes = list(getattr(dataset, "classes", None) or [])
        items = [_item(sample, dataset, classes) for sample in _samples_of(batch)]
        name = type(dataset).__name__
        length = length_of(dataset)
        samples = "?" if length is None else f"{length:,}"
        return Preview(
            f"{name}, {samples} samples, epoch {epoch}, seed {seed}", facts, items, notes
        )
    finally:
        if is_own:
            dataset.close()


def _first(dataset: Any, epoch: int, options: Mapping[str, Any]) -> Any:
    loader = create_dataloader(dataset, **options)
    try:
        loader.set_epoch(epoch)
        for batch in loader:
            return batch
        raise ConfigError("there is no batch to show")
    finally:
        loader.close()


# -- a batch and its samples


def _without_index(batch: Any) -> Any:
    """What a dataset gives without ``return_index``."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != _INDEX}
    return batch[:-1] if isinstance(batch, tuple) else batch


def _shape_of(batch: Any) -> str:
    """Structure, dtypes and shapes of a batch, in words."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {_shape_of(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, tuple):
        return "(" + ", ".join(map(_shape_of, batch)) + ")"
    if isinstance(batch, list):
        return f"list of {len(batch)}"
    return type(batch).__name__


def _samples_of(batch: Any) -> list[Any]:
    if isinstance(batch, torch.Tensor | np.ndarray | list):
        return list(batch)
    if isinstance(batch, Mapping):
        columns = {key: _samples_of(value) for key, value in batch.items()}
        count = max(map(len, columns.values()), default=0)
        return [
            {key: column[number] for key, column in columns.items() if number < len(column)}
            for number in range(count)
        ]
    if isinstance(batch, tuple):
        return list(zip(*map(_samples_of, batch), strict=False))
    return []


def _item(sample: Any, dataset: Any, classes: list[str]) -> Item:
    index, value, target, said = None, sample, None, list[str]()
    if isinstance(sample, tuple):
        parts = list(sample)
        index = int(parts.pop()) if dataset.return_index else None
        value, target = parts[0] if parts else None, parts[1] if len(parts) > 1 else None
    elif isinstance(sample, Mapping):
        rest = dict(sample)
        index = int(rest.pop(_INDEX)) if dataset.return_index and _INDEX in rest else None
        if _IDS in rest:
            return _text_item(rest, index, dataset, classes)
        drawn = next(
            (
                key
                for key, one in rest.items()
                if (array := _array(one)) is not None and array.ndim >= 2
            ),
            None,
        )
        value = None if drawn is None else rest.pop(drawn)
        said = [
            f"{key.strip('_')} {_said(one, classes if key in ('cls', 'label') else [])}"
            for key, one in rest.items()
            if key != "__url__"
        ]
    array, mark = _array(value), _array(target)
    is_drawn = mark is not None and mark.ndim >= 2
    boxes = _array(target.get("boxes")) if isinstance(target, Mapping) else None
    if isinstance(target, Mapping) and boxes is not None:
        said.append(_objects(target, getattr(dataset, "class_to_idx", {})))
    elif isinstance(target, Mapping):
        named = _names_of_columns(dataset)
        said += [f"{name} {_said(one, named.get(name, []))}" for name, one in target.items()]
    elif target is not None and not is_drawn:
        said.append(_said(target, classes))
    where = (
        dataset.source_of(index)
        if index is not None and not isinstance(dataset, StreamingDataset)
        else ""
    )
    if array is None and isinstance(value, str):
        return Item(index, where, ", ".join(said), text=value)
    return Item(index, where, ", ".join(said), array, mark if is_drawn else None, boxes=boxes)


def _objects(target: Mapping[str, Any], numbers: Mapping[str, int]) -> str:
    """How many objects of which classes there are: "2 mill, 1 wheel"."""
    names = {number: name for name, number in numbers.items()}
    counts = (
        Counter(names.get(label, str(label)) for label in target["labels"].tolist())
        if "labels" in target
        else Counter[str]()
    )
    return (
        ", ".join(f"{count} {name}" for name, count in counts.items())
        or f"{len(target['boxes'])} objects"
    )


def _names_of_columns(dataset: Any) -> Mapping[str, list[str]]:
    """The names of the classes of each column of targets that are dicts."""
    each = (getattr(dataset, name, None) for name in ("column_classes", "classes"))
    return next((names for names in each if isinstance(names, Mapping)), {})


def _text_item(fields: dict[str, Any], index: int | None, dataset: Any, classes: list[str]) -> Item:
    ids = np.asarray(fields[_IDS], np.int64).reshape(-1)
    mask = np.asarray(fields.get(_MASK, np.ones_like(ids)), np.int64).reshape(-1)
    label = fields.get("labels", fields.get("label"))
    caption = _said(label, classes) if label is not None and np.ndim(label) == 0 else ""
    where = dataset.source_of(index) if index is not None else ""
    return Item(
        index,
        where,
        caption,
        ids=ids,
        mask=mask,
        text=_decoded(getattr(dataset, "tokenizer", None), ids[mask > 0]),
    )


def _decoded(tokenizer: Any, ids: npt.NDArray[np.int64]) -> str | None:
    if hasattr(tokenizer, "decode"):
        return str(tokenizer.decode(ids.tolist()))
    return None


def _array(value: Any) -> npt.NDArray[Any] | None:
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense()  # a dense one as it is
        value = dense.to(torch.float32 if dense.dtype == torch.bfloat16 else dense.dtype).numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return np.abs(value) if value.dtype.kind == "c" else value
    return None


def _said(value: Any, classes: list[str]) -> str:
    """A target or another field in a few words: the name of its class, where there are names."""
    plain = value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
    if isinstance(plain, int) and not isinstance(plain, bool) and 0 <= plain < len(classes):
        return classes[plain]
    if isinstance(plain, float):
        return f"{plain:.4g}"
    text = " ".join(str(plain).split())
    return text if len(text) <= _SAID else f"{text[: _SAID - 1]}…"
