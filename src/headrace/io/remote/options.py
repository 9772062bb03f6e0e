"""Declares, documents and checks the options of everything that reads URLs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from headrace.arguments import check_integer, check_seconds, described
from headrace.errors import ConfigError
from headrace.io.paths import is_url, redact
from headrace.memory.budget import parse_size

RETRIES = 8
DEADLINE = 60.0


class ServerKeywords(TypedDict, total=False):
    """Keywords for requests to a server; see `RemoteOptions`."""

    storage_options: dict[str, Any] | None
    retries: int | None
    deadline: float | None


class RemoteKeywords(ServerKeywords, total=False):
    """Keywords of every dataset that apply to URLs only; see `RemoteOptions`."""

    disk_cache_size: int | str | None


@dataclass(frozen=True)
class RemoteOptions:
    """Options for reading URLs. Every dataset takes them as keywords; None selects the default.
    Local paths don't use them.

    Attributes:
        storage_options: dict that is passed to fsspec: credentials, ``endpoint_url``, ...
        retries: number of attempts after the first (8), for each request that fails with a
            temporary error.
        deadline: seconds (60) for all attempts of a request. A request may take longer while bytes
            still arrive.
        cache_dir: local folder for indexes and for blocks cached under `disk_cache_size`. None: the
            user's cache folder.
        disk_cache_size: maximum size of fetched data cached in `cache_dir`, in bytes or as a text
            ("20GB"). All processes of this user on this machine share the cache, and later jobs use
            it again. None: nothing is cached on disk.

    Raises:
        ConfigError: an option is invalid; the message names it.
    """

    storage_options: dict[str, Any] | None = None
    retries: int = RETRIES
    deadline: float = DEADLINE
    cache_dir: str | os.PathLike[str] | None = None
    disk_cache_size: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.storage_options, (Mapping, type(None))):
            raise ConfigError(
                "storage_options must be a dict of fsspec's options, or None, not "
                f"{described(self.storage_options)}"
            )
        check_integer("retries", self.retries, 0)
        if not check_seconds("deadline", self.deadline):
            raise ConfigError("deadline must be a number of seconds above 0, not 0")
        is_path = (
            isinstance(self.cache_dir, (str, os.PathLike))
            and os.fspath(self.cache_dir)
            and not is_url(self.cache_dir)
        )
        if self.cache_dir is not None and not is_path:
            raise ConfigError(
                f"cache_dir must be a local folder or None, not {redact(self.cache_dir)!r}"
            )
        if self.disk_cache_size is not None:
            parse_size(self.disk_cache_size, "disk_cache_size")

    @staticmethod
    def split(keywords: Any) -> tuple[RemoteOptions, dict[str, Any]]:
        """Splits the keywords of a dataset into these options and all others. `cache_dir` is in
        both, since local data use it too.
        """
        others = dict(keywords)
        given: dict[str, Any] = {"cache_dir": others.get("cache_dir")}
        for name in RemoteKeywords.__optional_keys__:
            given[name] = others.pop(name, None)
        for name, value in list(given.items()):
            if value is None:
                del given[name]
        if not given:
            return _DEFAULTS, others
        return RemoteOptions(**given), others

    def keywords(self) -> dict[str, Any]:
        """Returns the options as keywords of a dataset, without `cache_dir`."""
        return {name: getattr(self, name) for name in RemoteKeywords.__optional_keys__}


_DEFAULTS = RemoteOptions()
