"""Declares the keywords that every dataset takes; those of the formats are in
`headrace.datasets.options`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, cast

from headrace.core.reader import OnError
from headrace.io.remote.options import RemoteKeywords, RemoteOptions


class SharedOptions(TypedDict, total=False):
    """Keywords that every dataset takes and no loader takes; see `BaseDataset`."""

    target_transform: Callable[[Any], Any] | None
    transforms: (
        Callable[[Any, Any], tuple[Any, Any]]
        | Sequence[Callable[[Any, Any], tuple[Any, Any]]]
        | None
    )
    cache_size: int | str | None
    cache_policy: Literal["auto", "keep", "lru"]
    hold: Literal["decoded", "encoded"] | None
    shared: Literal["rank", "machine"]
    cache_dir: str | os.PathLike[str] | None
    on_error: OnError
    return_index: bool
    progress: bool | None


class CommonOptions(SharedOptions, total=False):
    """Keywords that every dataset takes in addition to those of its format; see `BaseDataset`."""

    max_memory_usage: float | int | str
    seed: int


class PathOptions(CommonOptions, RemoteKeywords, total=False):
    """Keywords of every dataset that reads paths and URLs; see `BaseDataset` and, for URLs,
    `RemoteOptions`.
    """


COMMON, REMOTE = CommonOptions.__optional_keys__, RemoteKeywords.__optional_keys__
"""The names of these keywords."""


def split_options(options: PathOptions) -> tuple[RemoteOptions, CommonOptions]:
    """Splits keywords into the options for URLs and the keywords of `BaseDataset`.

    Raises:
        ConfigError: a remote option is invalid, whether URLs are read or not.
    """
    keywords = dict(options)
    return RemoteOptions.taken_from(keywords), cast(CommonOptions, keywords)
