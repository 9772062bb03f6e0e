"""Opens shards by the `index.json` beside them, and checks what it says before it is believed."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, cast

from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.columns import Columns
from headrace.formats.shards.heads import COPY, INDEX, OFFSET, Heads, Shard
from headrace.formats.shards.source import ALL, CODECS, ShardColumn, ShardSource
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles, above, in_folder_of


def shard_path(index: str, name: str) -> str:
    """The path or URL of a shard, by its name in an index.

    Raises:
        ValueError: it leads out of the folder of the index.
    """
    if "::" in name or {"", ".."} & set(name.split("/")):
        raise ValueError(f"a shard has the name {name!r}, which leads out of the folder")
    return in_folder_of(index, name)


class ShardColumns(Columns):
    """The columns of the shards in some folders, one folder after the other. The index of a folder
    that has none may be merged with others, and lie one folder above.

    Args:
        paths: of all shards of their folders, or their URLs.
        files: by which they are read.

    Raises:
        DataNotFoundError: a folder has no index.
        FormatError: an index is damaged, or of another layout; folders have other columns.
    """

    written_by: str = ""

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self.paths: set[str] = set(paths)
        self._files = files
        self.shards = list[Shard]()
        self._heads = Heads(files, self.shards)
        self._columns: dict[str, ShardColumn] = {}
        own = self._contents(in_folder_of(path, INDEX) for path in paths)
        merged = self._contents(above(index) for index, content in own.items() if content is None)
        for index, content in own.items():
            if merged.get(above(index), content) is None:
                raise DataNotFoundError(f"{redact(index)}, of the shards, is missing: {COPY}")
            if above(index) not in merged:
                self._add(index, content)
        for index, content in merged.items():
            self._add(index, content)
        self._check_named()
        self.names: list[str] = list(self._columns)
        columns = self._columns.items()
        self.decoders: dict[str, str] = {
            name: column.extension for name, column in columns if column.extension
        }

    def _contents(self, indices: Iterable[str]) -> dict[str, memoryview | None]:
        """The contents of index files, each once; None of one that is missing."""
        distinct = list(dict.fromkeys(indices))
        found = self._files.read(ByteRanges.of_wholes(distinct, range(len(distinct))))
        return dict(zip(distinct, found, strict=True))

    def _add(self, index: str, content: Any) -> None:
        try:
            self.add(index, json.loads(bytes(content)))
        except FormatError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(
                f"{redact(index)} is damaged, or no index of {self.written_by} "
                f"({type(error).__name__}: {error}): {COPY}"
            ) from error

    def _check_named(self) -> None:
        """Raises a FormatError where a shard lies in a folder, and is not among those named: all
        that an index knows are read. One that is missing is an error of its samples.
        """
        shards = [shard.path for shard in self.shards]
        if self._files.is_remote:
            versions = cast(RemoteFiles, self._files).find_versions(shards)
            existing = {path for path, version in zip(shards, versions, strict=True) if version}
        else:
            existing = {path for path in set(shards) - self.paths if os.path.exists(path)}
        if existing - self.paths:
            raise FormatError(
                f"{redact(min(existing - self.paths))} is a shard of the same {INDEX} as those "
                "named, and they are one dataset: name all, or their folder; dataset.subset() "
                "chooses samples"
            )

    @abstractmethod
    def add(self, index: str, said: Any) -> None:
        """Adds shards, as an index says.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: it is none.
        """

    def add_shard(self, shard: Shard, columns: Sequence[tuple[str, ShardColumn]]) -> None:
        """Adds a shard that has these columns.

        Raises:
            ValueError: no shard is like that.
            FormatError: those before have others.
        """
        numbers = (shard.samples, shard.nbytes, shard.stored)
        if (
            shard.codec not in ("", *CODECS)
            or not all(type(number) is int and number >= 0 for number in numbers)
            or not OFFSET * (shard.samples + 2) <= shard.nbytes < 1 << 8 * OFFSET
        ):
            raise ValueError(f"compression {shard.codec!r}, samples and bytes {numbers}")
        named = dict(columns)
        if len(named) < len(columns):
            raise ValueError(f"several columns have one name: {[name for name, _ in columns]}")
        for name, column in columns:
            size = column.nbytes
            is_size = size is None or (type(size) is int and size >= ALL)
            if not isinstance(name, str) or not is_size:
                raise ValueError(f"column {name!r} has values of {size!r} bytes")
            spec = column.array_spec
            if spec is None or not shard.samples:
                continue
            if size not in (None, ALL, spec.nbytes) or not 0 <= spec.nbytes <= shard.nbytes:
                raise ValueError(f"column {name!r}: {column.encoding!r} has {size!r} bytes")
        kinds = {name: column[:2] for name, column in columns}
        others = {name: column[:2] for name, column in self._columns.items()}
        if others and kinds != others:
            raise FormatError(
                f"{redact(shard.path)} has the columns {kinds}, and the shards before it {others}: "
                "open its folder by itself"
            )
        self._columns = named
        self.shards.append(shard)

    def __len__(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def column(self, name: str) -> ShardSource:
        return self._source([name], True)

    def rows(self, names: Sequence[str]) -> ShardSource:
        return self._source(names, False)

    def _source(self, names: Sequence[str], is_one: bool) -> ShardSource:
        return ShardSource(self._files, self.shards, self._heads, self._columns, names, is_one)
