"""Streams shards as an iterable dataset: block-shuffled, prefetched, resumable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.options import PathOptions, split_options
from headrace.datasets.delegating import DelegatingDataset
from headrace.datasets.shards.members import Decoders, describe_decoders
from headrace.datasets.shards.shards import open_shards
from headrace.display import Lines
from headrace.errors import ConfigError
from headrace.io.resolve.expressions import DataPath
from headrace.modes import LoadingMode
from headrace.order.lanes import FEWEST, interleave_for, lanes_for

_OF_HOLDING = ("cache_size", "cache_policy", "hold", "shared")


class StreamingDataset(DelegatingDataset):
    """Samples of shards as an `IterableDataset`, block-shuffled, prefetched, and resumable under a
    `Loader`.

    Samples by format:

    * .tar (WebDataset): a dict by extension, with ``"__key__"`` and ``"__url__"``. Images (.jpg,
      .png, .webp, ...) are uint8 tensors [3, H, W], .cls and the like int, .txt str, .json parsed
      values, .npy arrays, .npz dicts of arrays, all others bytes;
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
    kind: str
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
        if (
            isinstance(buffer_size, bool)
            or not isinstance(buffer_size, (int, np.integer))
            or buffer_size < 1
        ):
            raise ConfigError(
                f"buffer_size must be a number of samples of at least 1, not {buffer_size!r}"
            )
        for name in ("loading_mode", *_OF_HOLDING):
            if name in options and self._in_mode is LoadingMode.STREAMING:
                raise ConfigError(
                    f"{name} has no meaning for a StreamingDataset, which holds nothing but what "
                    "it reads ahead: leave it out"
                )
        check_arguments(
            self, urls, options, "urls", transform=transform, loading_mode=self._in_mode
        )
        self.data_path = urls
        self.buffer_size = int(buffer_size)
        transforms: dict[str, Any] = {
            "transform": transform,
            "target_transform": options.get("target_transform"),
        }
        transforms["transforms"] = options.get("transforms")
        of_loading = {
            name: value
            for name, value in options.items()
            if name in ("cache_dir", "progress", "max_memory_usage")
        }
        reach, common = split_options(options)
        self.kind, inner = open_shards(
            urls, decode, dataset_name, target_name, {**transforms, **of_loading}, reach
        )
        if inner.sample_source.block_nbytes:
            inner.block_memory.hold_chunks(0)  # this dataset reserves memory for them
        self._decode = decode
        rest: dict[str, Any] = {
            name: value for name, value in common.items() if name not in transforms
        }
        # without what the dataset inside does itself
        given = {name: getattr(inner, name) for name in transforms}
        super().__init__(inner, inner.sample_source, loading_mode=self._in_mode, **given, **rest)

    def lanes(self, blocks: int) -> tuple[int, int]:
        """Returns (interleave, turns): as many lanes as hold about `buffer_size` samples in
        their open blocks, in two turns.
        """
        interleave = interleave_for(self.buffer_size // 2, len(self), blocks, FEWEST)
        return lanes_for(blocks, self._layout_nbytes(), interleave)

    def explain(self) -> str:
        first, *rest = super().explain().split("\n")
        blocks = self.blocks()
        lines = [first]
        if self.kind == "tar":
            lines.append(describe_decoders(self._decode))
        if blocks is not None and len(blocks):
            interleave, turns = self.lanes(len(blocks))
            lines.append(
                f"buffer_size {self.buffer_size:,}: of {len(blocks):,} blocks of "
                f"{len(self) / len(blocks):,.1f} samples (mean) a global "
                f"batch draws from {interleave} (interleave), and the next one from others, in "
                f"{turns} turns"
            )
        return Lines("\n".join([*lines, *rest]))
