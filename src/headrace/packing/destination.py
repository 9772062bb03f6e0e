"""Where a pack is written: a local folder, or a prefix of an object store through fsspec."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
from torch.utils.data import Dataset

from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    RemoteError,
    TargetExistsError,
    WriteError,
)
from headrace.formats.hdf5.files import locked_by_caller
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.manifests import MANIFEST, PLAN
from headrace.formats.resolve.resolver import expand_braces
from headrace.formats.source import Source
from headrace.io.atomic import user_id
from headrace.io.paths import chain_of, is_url, redact
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import below
from headrace.packing.part import PartFile, new_token, remove_abandoned

_RETRIES = 5
_DEADLINE_S = 24 * 3600


class Destination:
    """The files of a pack in a local folder, by name. A pickle reaches the same files from another
    process.

    Attributes:
        path: the folder, or its URL.
        shown: what messages call it, without secrets.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.shown = redact(path)

    def shown_name(self, name: str) -> str:
        """The name of a file in messages."""
        return f"{self.shown.rstrip('/')}/{name}"

    def check(self) -> None:
        """Raises a DataNotFoundError or ConfigError if the folder can't be made."""
        parent, name = os.path.split(self.path)
        if not os.path.isdir(parent):
            raise DataNotFoundError(
                f"{redact(parent)}, where {name} should go, is no folder: make it first"
            )
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"{self.shown} is a file: with shard_size name a folder")

    def prepare(self) -> None:
        """Makes the folder if needed.

        Raises:
            DataNotFoundError, ConfigError, WriteError: it can't be.
        """
        self.check()
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise WriteError(
                f"{self.shown} can't be made: {error.strerror}: use another folder"
            ) from error
        with contextlib.suppress(OSError):  # writing says what is wrong
            self.remove_abandoned()

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name; empty if there is no folder."""
        found = dict[str, int]()
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as listing:
            for entry in listing:
                with contextlib.suppress(FileNotFoundError):  # a temporary file of another job
                    found[entry.name] = entry.stat().st_size
        return found

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None if it does not exist."""
        try:
            # there are many, and small
            with open(os.path.join(self.path, name), "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise DataNotFoundError(
                f"{self.shown} is a file, and a pack of parts is a folder: name that"
            ) from error
        except OSError as error:
            raise AccessError(
                f"{self.shown_name(name)} can't be read: {error.strerror or error}"
            ) from error

    def write(self, name: str, data: bytes, overwrite: bool = True) -> None:
        """Writes a small file, whole or not at all.

        Raises:
            TargetExistsError: there is one, and it may not be replaced.
            WriteError, AccessError: it can't be written.
        """
        with PartFile(os.path.join(self.path, name), overwrite, new_token()) as file:
            file.write(data, 0)
            file.commit()

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.path, name))

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[PartFile]:
        """A local file to write a part into. It gets its name when the context ends without an
        error.
        """
        path = os.path.join(self.path, name)
        with PartFile(path, overwrite=True, token=new_token()) as file:
            yield file
            file.commit()

    def fetched(self, name: str) -> contextlib.AbstractContextManager[str]:
        """A local path of a file, valid inside the context.

        Raises:
            DataNotFoundError, AccessError, WriteError: it is not there, or can't be read.
        """
        return contextlib.nullcontext(os.path.join(self.path, name))

    def remove_abandoned(self) -> None:
        """Removes what killed processes left."""
        remove_abandoned(str(self.path), (".part-", ".plan", ".manifest"))


class StoreDestination(Destination):
    """The files of a pack below a prefix of an object store. A part is written and verified on this
    machine (in `tempfile.gettempdir()`), then uploaded.

    Args:
        url: of the prefix.
        storage_options: of the fsspec file system.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        super().__init__(url)
        # a part takes as long as it takes: attempts are limited, and not their time
        options = RemoteOptions(storage_options, _RETRIES, _DEADLINE_S)
        self._server = Remote(url, options)

    def check(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def remove_abandoned(self) -> None:
        """Removes nothing: what killed processes left lies elsewhere, see `_temporary`."""

    def sizes(self) -> dict[str, int]:
        self._server.filesystem.invalidate_cache()
        sizes = dict[str, int]()
        with contextlib.suppress(DataNotFoundError):
            for entry in self._ask("ls", "", detail=True):
                if entry["type"] == "file":
                    name = entry["name"].rstrip("/").rpartition("/")[2]
                    sizes[name] = int(entry["size"] or 0)
        return sizes

    def read(self, name: str) -> bytes | None:
        # another job may have written it since this one listed
        self._server.filesystem.invalidate_cache()
        with contextlib.suppress(DataNotFoundError):
            return bytes(self._ask("cat_file", name))
        return None

    def write(self, name: str, data: bytes, overwrite: bool = True) -> None:
        there = TargetExistsError(f"{self.shown_name(name)} is there already")
        if overwrite:
            self._ask("pipe_file", name, data)
            return
        if self.read(name) is not None:
            raise there
        try:
            self._ask("pipe_file", name, data, mode="create")
        except (WriteError, FileChangedError):
            if self.read(name) is None:
                raise
            raise there from None  # another job was faster

    def remove(self, name: str) -> None:
        with contextlib.suppress(DataNotFoundError):
            self._ask("rm_file", name)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[PartFile]:
        with _temporary(name) as file:
            yield file
            self._ask("put_file", name, before=[file.path])

    @contextlib.contextmanager
    def fetched(self, name: str) -> Iterator[str]:
        with _temporary(name) as file:
            with file.explained():
                self._ask("get_file", name, file.path)
            with locked_by_caller(file.path):
                yield file.path

    def _ask(self, question: str, name: str, *after: Any, **options: Any) -> Any:
        """`Remote.ask` for a file of the pack.

        Raises:
            WriteError, AccessError, DataNotFoundError: the store doesn't do it.
        """
        try:
            return self._server.ask(question, below(str(self.path), name), *after, **options)
        except RemoteError as error:
            raise WriteError(str(error)) from error
        except DataNotFoundError as error:
            raise DataNotFoundError(f"{error}: is there such a bucket?") from error


def _temporary(name: str) -> PartFile:
    """A file of this user in the folder for temporary files. Removes those that killed processes
    left.
    """
    folder = tempfile.gettempdir()
    ours = f"headrace-pack-{user_id()}-"
    remove_abandoned(folder, (f".{ours}",))
    return PartFile(os.path.join(folder, ours + name), overwrite=True, token=new_token())


def destination_of(
    dst: str | os.PathLike[Any], storage_options: dict[str, Any] | None = None
) -> Destination:
    """The destination for a path or URL (``file://`` is a local folder)."""
    path = local_path(dst)
    if path is not None:
        return Destination(path)
    url = os.fspath(dst)
    if url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{redact(url)}: HTTP neither writes files nor lists their sizes: use a folder, or a "
            "store such as s3://"
        )
    return StoreDestination(url, storage_options)


def local_path(path: str | os.PathLike[Any]) -> Path | None:
    """The absolute local path of a path or ``file://`` URL. None: it is on a server."""
    text = os.fspath(path)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return Path(os.path.abspath(text.removeprefix(scheme)))
    return None if is_url(path) else Path(os.path.abspath(os.path.expanduser(text)))


# -- a pack onto the data that it is made from

_DATA = {"data_path", "urls", "targets", "path", "paths", "root", "root_dir", "folder", "data_dir"}
"""Arguments and attributes that name data: a folder in one is a folder of data."""


def refuse_own_source(dataset: Any, dst: str | os.PathLike[Any]) -> None:
    """Compares where a pack goes with the files and folders that a dataset reads.

    Args:
        dataset: of any library; the paths in its attributes count.
        dst: the file, or the folder of the parts; or its URL.

    Raises:
        ConfigError: `dst` is one of them, by whatever name, or lies in one of the folders.
    """
    target = local_path(dst)
    for source, is_data in _sources_of(dataset):
        for link in chain_of(source):  # of an archive's member the archive, too
            path = local_path(link)
            if target is None:
                is_own = path is None and _is_own(link, os.fspath(dst), True)
            else:
                is_own = path is not None and _is_own_path(path, target, is_data)
            if is_own:
                raise ConfigError(
                    f"{redact(dst)} is a part of what is packed ({redact(source)}), which a pack "
                    "must not change: write it elsewhere"
                )


def _is_own_path(source: Path, target: Path, is_data: bool) -> bool:
    """`_is_own` for local paths."""
    if not os.path.exists(source):  # it may be any text
        return False
    if target.exists() and source.samefile(target):
        return True
    is_folder = is_data and os.path.isdir(source)
    return _is_own(os.path.realpath(source), os.path.realpath(target), is_folder)


def _is_own(source: str, target: str, is_folder: bool) -> bool:
    """True if a pack to `target` would replace `source`, or lie inside it if that is a folder."""
    source = source.rstrip("/")
    target = target.rstrip("/")
    if is_folder and f"{target}/".startswith(f"{source}/"):
        return True
    name = source.removeprefix(f"{target}/")
    return name != source and _is_of_pack(name.partition("/")[0])


def is_of_part(name: str) -> bool:
    """True for the names of parts and their sidecars."""
    return name.startswith("part-") and "-of-" in name and name.endswith((".h5", ".json"))


def _is_of_pack(name: str) -> bool:
    """True for the names that a pack of parts writes, replaces and removes."""
    return name in (PLAN, MANIFEST) or is_of_part(name)


def _sources_of(dataset: Any) -> Iterator[tuple[str, bool]]:
    """Paths and URLs in the attributes of a dataset, its source and the datasets inside; and for
    each whether it certainly names data.
    """
    seen = set[int]()
    left: list[tuple[str, Any]] = [("dataset", dataset)]
    while left:
        name, value = left.pop()
        if isinstance(value, (str, bytes, os.PathLike)):
            text = os.fsdecode(value)
            if name in _DATA and text:
                yield from ((path, True) for path in expand_braces(text))
            elif os.sep in text or "." in text:  # else it is a name in a file
                yield text, False
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FileSet):
            for root in value.searched:
                yield (root if value.server is None else value.server.url_of(root)), True
            are_stores = len(value) > 0 and os.path.isdir(value.url(0))
            yield from ((value.url(index), are_stores) for index in range(len(value)))
        elif isinstance(value, h5py.HLObject):
            if value:  # it is open
                yield value.file.filename, True
        elif isinstance(value, Mapping):
            left += ((key if isinstance(key, str) else name, one) for key, one in value.items())
        elif isinstance(value, (list, tuple, set)):
            name = "" if name == "targets" else name  # these are the targets themselves
            left += ((name, one) for one in value)
        elif hasattr(value, "__dict__") and (
            isinstance(value, (Dataset, Source))
            or name in ("dataset", "datasets")
            or type(value).__module__.startswith("headrace.")
        ):
            left += ((one.strip("_"), inner) for one, inner in vars(value).items())
