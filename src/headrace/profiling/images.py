"""Advice that only images have: uint8 until the device, and smaller files."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
from PIL import Image

from headrace.core.batch import Collating
from headrace.core.batcher import Batcher
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.pixels import open_image
from headrace.errors import SampleError
from headrace.io.paths import redact
from headrace.order import BatchRequest
from headrace.order.seeding import preserved_rng
from headrace.profiling.alone import first_requests

_TRIED = 24  # images
# of the files that are tried: their longer side by that of a sample, and the quality of their JPEG
_MARGIN, _QUALITY = 1.25, 90


def as_uint8(dataset: Any) -> ImageDataset | None:
    """A view of images that are left uint8; None: they are already, or a transform makes them
    what they are.
    """
    if (
        not isinstance(dataset, ImageDataset)
        or dataset.is_transformed
        or not dataset._decoder.normalize
    ):
        return None
    view = dataset.subset(np.arange(len(dataset)))
    view._decoder = dataclasses.replace(dataset._decoder, normalize=False)
    return view


def work_ratio(
    dataset: ImageDataset,
    other: ImageDataset,
    collating: Collating,
    requests: Iterable[BatchRequest],
) -> float:
    """What a batch of another dataset costs in this process, by what one of this dataset costs:
    the best of three each, in turns.
    """
    some = first_requests(requests, _TRIED)
    batchers = [Batcher(one, collating) for one in (dataset, other)]
    best = [float("inf")] * 2
    with preserved_rng():
        for _ in range(3):
            for number, batcher in enumerate(batchers):
                start = time.perf_counter()
                for request in some:
                    batcher.make(request)
                best[number] = min(best[number], time.perf_counter() - start)
    return best[1] / best[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Smaller:
    """Files of smaller images.

    Attributes:
        side: pixels of the longer side.
        ratio: what decoding one costs, by what decoding an image as it is costs.
        command: that writes them.
    """

    side: int
    ratio: float
    command: str


def smaller_files(
    dataset: Any, requests: Callable[[int], Iterator[BatchRequest]]
) -> Smaller | None:
    """Some images, encoded anew a little larger than samples are, and decoded; None: they are as
    small already, no files to pack, or none can be read.
    """
    if (
        not isinstance(dataset, ImageDataset)
        or dataset.image_size is None
        or not isinstance(dataset.data_path, (str, os.PathLike))
    ):
        return None
    decoder = dataset._decoder
    # masks and boxes can't be packed
    if decoder.is_stored_decoded or decoder.is_encoded or decoder.splits_targets:
        return None
    side = int(_MARGIN * max(dataset.image_size))
    indices = [
        index for request in first_requests(requests(1_000_005), _TRIED) for index in request
    ][:_TRIED]
    reader, numbers = dataset.sample_reader, dataset.whole_indices(indices).tolist()
    pairs = zip(numbers, reader.records(numbers, dataset.sample_source.read), strict=True)
    records = [
        record
        for number, record in pairs
        if not isinstance(reader.decoded(number, record, decoder), SampleError)
    ]
    if not records:
        return None
    made = [_smaller(bytes(record), side) for record in records]
    if sum(one is not None for one in made) < len(made) / 2:
        return None
    others = [
        bytes(record) if one is None else one for record, one in zip(records, made, strict=True)
    ]
    best = [float("inf")] * 2
    for _ in range(3):
        for number, some in enumerate((records, others)):
            start = time.perf_counter()
            for record in some:
                decoder.decode(record)
            best[number] = min(best[number], time.perf_counter() - start)
    options = f"--store jpeg --max-size {side} --quality {_QUALITY}"
    command = packing_command(dataset, f"smaller.h5 {options}")
    if command is None:
        return None
    return Smaller(side, best[1] / best[0], command)


def packing_command(dataset: ImageDataset, options: str) -> str | None:
    """The command that packs images with their labels, or for a view words, since a command packs
    the whole path; None where a command can't name the labels.
    """
    if dataset._chosen is not None:
        return f"pack the view from Python, with headrace.pack(view, ...) and: {options}"
    given = dataset._arguments
    path = os.fspath(cast("str | os.PathLike[str]", dataset.data_path))
    command = f"headrace pack {shlex.quote(redact(path))} {options}"
    for name in ("targets", "target_name", "unused_targets"):
        value = given.get(name)
        if name == "targets" and name in given and value is None:
            value = "none"
        if isinstance(value, (str, os.PathLike)):
            if os.fspath(value) == "folders":
                continue
            text = shlex.quote(redact(os.fspath(value)))
            command += f" --{name.replace('_', '-')} {text}"
        elif value is not None:
            return None
    return f"{command} --masks" if given.get("masks") else command


def _smaller(record: bytes, side: int) -> bytes | None:
    """An image as a JPEG of that longer side; None: it is no larger."""
    with open_image(record) as image:
        if max(image.size) <= side:
            return None
        small = image.convert("RGB")
        small.thumbnail((side, side), Image.Resampling.BILINEAR)
        stream = io.BytesIO()
        small.save(stream, "JPEG", quality=_QUALITY)
        return stream.getvalue()
