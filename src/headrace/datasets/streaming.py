"""Streams shards as an iterable dataset: block-shuffled, prefetched, resumable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

from headrace.arguments import check_integer
from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode, PathOptions, check_arguments
from headrace.datasets.arrays import HDF5Dataset, ZarrDataset
from headrace.datasets.columns import Decoders, LineDecoder, MemberDecoder
from headrace.datasets.dialects import PACK, class_by_dialect
from headrace.errors import ConfigError
from headrace.formats.files import check_splits
from headrace.formats.hdf5 import HDF5
from headrace.formats.registry import detect
from headrace.formats.resolve.file_set import TARS, Format
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.tar import TarSource
from headrace.formats.text.plain import COMPRESSED
from headrace.formats.text.records import JSON_LINES
from headrace.formats.text.source import LinesSource
from headrace.formats.zarr.stores import ZARR
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import MemoryBudget
from headrace.order.lanes import FEWEST, interleave_for, lanes_for
from headrace.order.world import local_ranks

_OF_HOLDING = ("loading_mode", "cache_size", "cache_policy", "hold", "shared")
_OF_READING = ("cache_dir", "progress", "max_memory_usage")
_TRANSFORMS = ("transform", "target_transform", "transforms")
_RECORDS = Format(
    "JSON Lines",
    tuple(ending + packed for ending in JSON_LINES for packed in ("", *COMPRESSED)),
    is_exclusive=True,
)
_LINES = Format("lines", tuple(f".txt{packed}" for packed in ("", *COMPRESSED)), is_exclusive=True)
_SHARDS = (
    replace(TARS, is_exclusive=True),
    _RECORDS,
    _LINES,
    replace(HDF5, keeps_order=False),
    ZARR,
)


class StreamingDataset(BaseDataset):
    """Samples of shards as an `IterableDataset`, block-shuffled, prefetched, and resumable under a
    `Loader`.

    Samples by format:

    * .tar (WebDataset): a dict by extension, with ``"__key__"`` and ``"__url__"``. Images (.jpg,
      .png, .webp, ...) are uint8 tensors [3, H, W], .cls and the like int, .txt str, .json parsed
      values, .npy arrays, .npz dicts of arrays, all others bytes. A .json.gz or .txt.zst is
      decompressed first;
    * .jsonl: the parsed line. .txt: the line as str. Both also as .gz and .zst;
    * .h5 and .zarr: as in `HDF5Dataset` and `ZarrDataset`. Packs of `headrace.pack`: for images as
      in `ImageDataset`, for texts as in `TextDataset`.

    A block is a run of consecutive samples of a shard, of about 2 MB in total. Blocks are read in
    random order, several at once, and samples in random order within their block. The order depends
    on the layout of the shards, `buffer_size`, seed and epoch only.

    Args:
        urls: a shard, a folder, a glob, a pattern such as ``train-{0000..0127}.tar``, or a list of
            these, all of one format. Paths, or URLs of one server. Folders are searched
            recursively; Zarr stores are found in the first level only.
        buffer_size: approximate number of samples to mix. Two consecutive batches together draw
            from blocks with about this many samples. A larger number shuffles better and holds more
            blocks in memory. At least 8 blocks are open if there are that many, so that 8 ranks can
            each have blocks of their own.
        transform: a callable that is applied to the sample (for .h5, .zarr and images: to the
            input).
        decode: for .tar: True: decode as above. False: members stay bytes. A dict from extension
            ("jpg", "seg.png") to a callable that takes bytes, or to None for bytes: it takes
            precedence over the rules above. Pickles are never loaded unless a callable does it.
        dataset_name, target_name: for .h5 and .zarr: see `HDF5Dataset` and `ZarrDataset`.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`. The options for caching
            (cache_size, cache_policy, hold, shared) don't apply here.

    Raises:
        ConfigError: an argument is invalid, shards are of several formats, or an option belongs to
            another format.
        DataNotFoundError: the path does not exist, or contains no shards.
        FormatError: a shard is damaged; or it is a compressed .tar, which must be decompressed
            first.
        RemoteError: a request to a server failed.
    """

    reads_urls = True
    buffer_size: int
    _in_mode = LoadingMode.STREAMING

    def __init__(
        self,
        urls: DataPath,
        *,
        buffer_size: int = 1000,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        decode: bool | Decoders = True,
        dataset_name: str | Sequence[str] | None = None,
        target_name: str | None = None,
        **options: Unpack[PathOptions],
    ) -> None:
        for name in _OF_HOLDING:
            if name in options and self._in_mode is LoadingMode.STREAMING:
                raise ConfigError(
                    f"{name} has no effect in a StreamingDataset, which holds only what it reads "
                    "ahead: leave it out"
                )
        self.buffer_size = check_integer("buffer_size", buffer_size, 1)
        check_arguments(
            self, urls, options, "urls", transform=transform, loading_mode=self._in_mode
        )
        self.data_path = urls
        reach, common = RemoteOptions.split(options)
        rest: dict[str, Any] = {"transform": transform, **common}
        passed = {name: rest[name] for name in (*_TRANSFORMS, *_OF_READING) if name in rest}
        inner = _open(urls, decode, dataset_name, target_name, passed, reach)
        inner.block_memory.hold_chunks(0)  # this dataset reserves memory for them
        # without what the dataset inside does itself
        rest.update({name: getattr(inner, name) for name in _TRANSFORMS})
        self._become(inner, loading_mode=self._in_mode, **rest)
        self.data_path = urls

    def lanes(self, blocks: int) -> tuple[int, int]:
        """Returns (interleave, turns): as many lanes as hold about `buffer_size` samples in
        their open blocks, in two turns.
        """
        interleave = interleave_for(self.buffer_size // 2, len(self), blocks, FEWEST)
        return lanes_for(blocks, self.sample_source.layout_nbytes, interleave)


def _open(
    urls: DataPath,
    decode: bool | Decoders,
    dataset_name: Any,
    target_name: str | None,
    passed: Mapping[str, Any],
    reach: RemoteOptions,
) -> BaseDataset:
    """Opens shards as a lazy dataset.

    Args:
        urls: the shards, all of one format.
        decode: see `MemberDecoder`, for .tar.
        dataset_name, target_name: for .h5 and .zarr.
        passed: transforms, and options of `BaseDataset` that concern reading.
        reach: how URLs are read.

    Raises:
        ConfigError: shards have several formats, or an option belongs to another format.
        DataNotFoundError, FormatError, AccessError: there are no shards; one can't be read.
    """
    files = detect(urls, reach, _SHARDS)
    kind = files.kind
    check_splits(files)
    if decode is not True and kind.name != TARS.name:
        raise ConfigError(f"decode is for .tar shards, but these are {kind.name}: leave it out")
    is_named = dataset_name is not None or target_name is not None
    if is_named and kind.name not in (HDF5.name, ZARR.name):
        raise ConfigError(
            "dataset_name and target_name are for .h5 and .zarr shards, but these are "
            f"{kind.name}: leave them out"
        )
    progress = passed.get("progress")
    budget = MemoryBudget(passed.get("max_memory_usage", 0.8), local_world_size=local_ranks)
    if kind.name == TARS.name:
        members = TarSource(files, progress=progress, reach=reach)
        return BaseDataset(members, sample_decoder=MemberDecoder(decode, budget), **passed)
    if kind in (_RECORDS, _LINES):
        unit = "record" if kind is _RECORDS else "line"
        lines = LinesSource(files, unit, reach, budget=budget, progress=progress)
        return BaseDataset(lines, sample_decoder=LineDecoder(lines), **passed)
    options: dict[str, Any] = {**passed, **reach.keywords()}
    if is_named:
        options |= {"dataset_name": dataset_name, "target_name": target_name}
    opens: Any = HDF5Dataset
    if kind is ZARR:
        opens = ZarrDataset
    else:
        files = replace(files, kind=HDF5)
        if not is_named:  # what was packed of images or texts comes as it was packed
            opens, _ = class_by_dialect(files, HDF5, reach, [PACK])
    return cast(BaseDataset, opens(files, **options))
