"""Takes the first batch of a loader apart, into samples that can be shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.datasets.open import open_dataset
from headrace.datasets.streaming import StreamingDataset
from headrace.dtypes import AnyArray
from headrace.errors import CollateError, ConfigError, one_line
from headrace.loader.config import length_of
from headrace.loader.loader import create_dataloader

_LONGEST = 40  # characters of a value in a caption
_IDS = 32  # tokens that are listed, where no tokenizer decodes them


@dataclass(slots=True)
class Item:
    """A sample to be shown.

    Attributes:
        index: of the sample. None: not known.
        where: its file, or file and row.
        caption: its target and other fields, in words.
        value: its input as an array. None: it is a text, or can't be drawn.
        target: an array to be drawn beside it, such as labels of voxels.
        text: what its tokens stand for, or the tokens.
        tokens: number of tokens of a text, without padding. None: it is no text.
        padding: number of tokens that are padding.
        boxes: [objects, 4], edges of objects in pixels of the input: left, top, right, bottom.
    """

    index: int | None
    where: str
    caption: str
    value: AnyArray | None = None
    target: AnyArray | None = None
    text: str | None = None
    tokens: int | None = None
    padding: int = 0
    boxes: AnyArray | None = None


@dataclass(slots=True)
class Preview:
    """The first batch of an epoch.

    Attributes:
        title: dataset, epoch and seed.
        batch: structure, dtypes and shapes of the batch.
        items: its samples.
        notes: warnings, such as that the default collate function fails.
    """

    title: str
    batch: str
    items: list[Item]
    notes: list[str] = field(default_factory=list)

    @property
    def is_text(self) -> bool:
        """True if samples are tokens."""
        return any(item.tokens is not None for item in self.items)

    def lines(self, columns: int) -> Iterator[str]:
        """A table of the samples that fits so many columns."""
        yield self.title
        yield f"batch: {self.batch}"
        for item in self.items:
            number = "" if item.index is None else f"#{item.index:,}"
            what = ""
            if item.tokens is not None:
                what = f"{item.tokens:,} tokens + {item.padding:,} padding"
            elif item.value is not None:
                what = f"{item.value.dtype} {list(item.value.shape)}"
            cells = filter(None, (number, item.caption, what, item.text))
            yield "  ".join(cells)[:columns]
        yield from self.notes


def preview(
    data_path: Any,
    *,
    count: int = 24,
    seed: int = 42,
    epoch: int = 0,
    shuffle: bool = True,
    **options: Any,
) -> Preview:
    """The first batch that a loader yields in an epoch, in this process.

    Args:
        data_path: as `open_dataset` takes it.
        count: samples in the batch.
        seed, epoch: of the order and of random transforms.
        shuffle: False: the first samples in their order.
        **options: of `open_dataset`.

    Raises:
        ConfigError: a dataset without samples; options that don't fit.
        HeadraceError: any error of the loader.
    """
    loading: dict[str, Any] = {"batch_size": count, "num_workers": 0, "seed": seed}
    notes: list[str] = []
    with open_dataset(data_path, return_index=True, **options) as dataset:
        if not (shuffle and isinstance(dataset, StreamingDataset)):  # which is shuffled by blocks
            loading["shuffle"] = shuffle
        try:
            batch = _first(dataset, epoch, loading)
        except ConfigError:
            dataset.return_index = False  # samples may have a field "index" of their own
            batch = _first(dataset, epoch, loading)
        except CollateError as error:
            reason = one_line(error)
            notes.append(f"a loader with the default collate function raises: {reason}")
            batch = _first(dataset, epoch, {**loading, "collate_fn": "list"})
        samples = f"{length_of(dataset) or 'many'} samples"
        return Preview(
            f"{type(dataset).__name__}, {samples}, epoch {epoch}, seed {seed}",
            _shape_of(batch, dataset.return_index),
            [_item(sample, dataset) for sample in _samples_of(batch)],
            notes,
        )


def _first(dataset: Any, epoch: int, options: Mapping[str, Any]) -> Any:
    with create_dataloader(dataset, pin_memory=False, **options) as loader:
        loader.set_epoch(epoch)
        for batch in loader:
            return batch
    raise ConfigError(f"{dataset!r} has no samples to show")


def _shape_of(batch: Any, has_index: bool = False) -> str:
    """Structure, dtypes and shapes of a batch, in words, without the index that was added."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        keys = [key for key in batch if key != "index" or not has_index]
        return "{" + ", ".join(f"{key}: {_shape_of(batch[key])}" for key in keys) + "}"
    if isinstance(batch, tuple):
        return "(" + ", ".join(map(_shape_of, batch[: len(batch) - has_index])) + ")"
    return f"list of {len(batch)}"


def _samples_of(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        columns = [_samples_of(value) for value in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=False)]
    if isinstance(batch, tuple):
        return list(zip(*map(_samples_of, batch), strict=False))
    return list(batch)


def _item(sample: Any, dataset: Any) -> Item:
    """A sample in parts: a tuple of input and target, a dict, or the input alone."""
    classes = getattr(dataset, "classes", None) or []
    item = Item(None, "", "")
    fields: dict[str, Any] = {}
    if isinstance(sample, Mapping):
        fields = {key: value for key, value in sample.items() if key != "__url__"}
        if dataset.return_index:
            item.index = int(fields.pop("index"))
        if "input_ids" in fields:
            _add_text(item, fields, dataset)
            fields = {}
        for key, value in fields.items():
            array = _array(value)
            if array is not None and array.ndim >= 2:
                item.value = array
                del fields[key]
                break
        named: Mapping[str, Any] = dict.fromkeys(("cls", "label"), classes)
    else:
        parts = list(sample) if isinstance(sample, tuple) else [sample]
        if dataset.return_index and isinstance(sample, tuple):
            item.index = int(parts.pop())
        item.value = _array(parts[0])
        if isinstance(parts[0], str):
            item.text = parts[0]
        target = parts[1] if len(parts) > 1 else None
        mask = _array(target)
        if mask is not None and mask.ndim >= 2:
            item.target = mask
        elif isinstance(target, Mapping):
            fields = dict(target)
        elif target is not None:
            item.caption = _words(target, classes)
        # the names of the classes of each column of targets that are dicts
        named = getattr(dataset, "column_classes", None) or {}
        if isinstance(classes, Mapping):
            named = classes
    if "boxes" in fields and not isinstance(sample, Mapping):
        item.boxes = _array(fields["boxes"])
        names = {number: name for name, number in dataset.class_to_idx.items()}
        counts = Counter(names.get(label, str(label)) for label in fields["labels"].tolist())
        item.caption = ", ".join(f"{number} {name}" for name, number in counts.items())
        item.caption = item.caption or "0 objects"
    elif fields:
        words = [
            f"{key.strip('_')} {_words(one, named.get(key, []))}" for key, one in fields.items()
        ]
        item.caption = ", ".join(words)
    if item.index is not None and not isinstance(dataset, StreamingDataset):
        item.where = dataset.source_of(item.index)
    return item


def _add_text(item: Item, fields: dict[str, Any], dataset: Any) -> None:
    """Adds a text's tokens, and its label."""
    ids = np.asarray(fields["input_ids"], np.int64).reshape(-1)
    mask = np.asarray(fields.get("attention_mask", np.ones_like(ids))).reshape(-1) > 0
    item.tokens = int(mask.sum())
    item.padding = len(ids) - item.tokens
    label = fields.get("labels", fields.get("label"))
    if label is not None and np.ndim(label) == 0:
        item.caption = _words(label, getattr(dataset, "classes", None) or [])
    tokenizer: Any = getattr(dataset, "tokenizer", None)
    if hasattr(tokenizer, "decode"):
        item.text = " ".join(str(tokenizer.decode(ids[mask].tolist())).split())
    else:
        item.text = " ".join(map(str, ids[:_IDS].tolist())) + (" …" if len(ids) > _IDS else "")


def _array(value: Any) -> AnyArray | None:
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense()
        value = dense.to(torch.float32 if dense.dtype == torch.bfloat16 else dense.dtype).numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    return None


def _words(value: Any, classes: list[str]) -> str:
    """A target or another field in a few words: the name of its class, where there are names."""
    plain = value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        plain = value.tolist()
    if isinstance(plain, int) and not isinstance(plain, bool) and 0 <= plain < len(classes):
        return classes[plain]
    if isinstance(plain, float):
        return f"{plain:.4g}"
    return " ".join(str(plain).split())[:_LONGEST]
