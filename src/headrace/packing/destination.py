"""Where a pack is written: files under a locked temporary name, renamed when they are complete; and
the folder, or the prefix of an object store, that holds them.

A temporary file lies in the folder of its target, under a kernel lock. The lock ends with its
process, however that ends, so leftovers of dead writers can be told from files in use.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
from torch.utils.data import Dataset

from headrace.dtypes import IntArray
from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    HeadraceError,
    RemoteError,
    TargetExistsError,
    WriteError,
)
from headrace.formats.hdf5.files import locked_by_caller
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.manifests import MANIFEST, OF_PART, PLAN
from headrace.formats.resolve.resolver import expand_braces
from headrace.formats.source import Source
from headrace.io.atomic import TEMPORARY, user_id
from headrace.io.checksums import SumsAhead
from headrace.io.paths import below, chain_of, is_url, redact
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import format_size
from headrace.memory.processes import HAS_LOCKS, try_lock, write_full_from

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_LOCKLESS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # file systems that know no locks
_RETRIES = 5
_DEADLINE_S = 24 * 3600


class PartFile:
    """The temporary file of a target, open and locked inside a ``with``. Removed at the end unless
    committed.

    Its name is ``.{name}.part``: one for a target, so that a lock on it is a lock on the target. A
    second writer, in this process or another one, is refused. Where the target is shared, each
    writer has a name of its own, and the last one that is done wins.

    Args:
        target: the final path.
        overwrite: True if the target may be replaced.
        is_shared: see above; `remove_abandoned` removes what writers left who are gone.

    Attributes:
        target: the final path, absolute.
        path: the temporary one.
        fd: open for reading and writing, empty at first.
        ahead: what was read back while the rest was written, since `sum_ahead`.

    Raises:
        TargetExistsError, DataNotFoundError, ConfigError: the target is there; its folder is not;
            it is a folder itself.
        WriteError, AccessError: another job writes the same target; this user may not.
    """

    def __init__(
        self, target: str | os.PathLike[Any], overwrite: bool = False, is_shared: bool = False
    ) -> None:
        self.target: str = absolute(target)
        if is_url(self.target):
            raise ConfigError(
                f"{redact(target)}: a single file is written on this machine: pass shard_size, "
                "such as '1GB', to pack into a store"
            )
        self._folder, name = os.path.split(self.target)
        self._is_shared = is_shared
        if is_shared:
            name = f"{name}.{secrets.token_hex(4)}"
        self.path: str = os.path.join(self._folder, f".{name}{TEMPORARY}")
        self.fd: int = -1
        self.ahead: SumsAhead | None = None
        self._overwrite = overwrite
        self._committed = False
        self._scratch = contextlib.ExitStack()
        self._check_target()

    def __enter__(self) -> PartFile:
        if not HAS_LOCKS:
            raise ConfigError(
                "packing needs a system with file locks, such as Linux or macOS; packed files are "
                "read everywhere"
            )
        with self.explained():
            self.fd = self._open_locked()
            try:
                os.ftruncate(self.fd, 0)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._committed:
            with contextlib.suppress(OSError):
                os.unlink(self.path)  # while it is locked: it can be nobody else's
        self._scratch.close()
        os.close(self.fd)

    def scratch(self) -> int:
        """An unnamed temporary file in the same folder, open until the part file is closed."""
        with self.explained():
            return self._scratch.enter_context(tempfile.TemporaryFile(dir=self._folder)).fileno()

    def write(self, data: Any, offset: int) -> None:
        """Writes bytes at an offset."""
        with self.explained():
            write_full_from(self.fd, [memoryview(data)], offset)

    def commit(self) -> None:
        """Makes the file durable, and gives it its final name.

        Raises:
            TargetExistsError, WriteError, AccessError: a target appeared meanwhile; it can't be
                written.
        """
        self._check_target()
        is_exclusive = self._is_shared and not self._overwrite
        with self.explained():
            os.fsync(self.fd)
            try:
                if is_exclusive:
                    os.link(self.path, self.target)  # fails where another writer was faster
                    os.unlink(self.path)
            except FileExistsError:
                raise self._target_exists() from None
            except OSError:  # a file system without hard links
                is_exclusive = False
            if not is_exclusive:
                os.replace(self.path, self.target)
        self._committed = True
        # some file systems can't: the name may then be lost with the power, not the file's
        # wholeness
        with contextlib.suppress(OSError):
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def reserve(self, nbytes: int) -> None:
        """Sets the length of the file, and checks that there is room, so that a full disk shows
        before any sample is read.

        Raises:
            WriteError, AccessError: there is none; the file can't be written, or is too large for
                the file system or the user's limit.
        """
        with self.explained():
            free = shutil.disk_usage(self._folder).free
            if nbytes > free:
                raise WriteError(
                    f"{redact(self.target)} can't be written, the disk is full: it needs "
                    f"{format_size(nbytes)}, and {format_size(free)} "
                    "are free: free some space, or use another disk"
                )
            os.ftruncate(self.fd, nbytes)

    def forget(self, start: int = 0, nbytes: int = 0) -> None:
        """Drops pages that are on the disk from memory, and starts writing the others, without
        waiting; 0 bytes: to the end.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # it is a hint
                os.posix_fadvise(self.fd, start, nbytes, os.POSIX_FADV_DONTNEED)

    def sum_ahead(self, edges: IntArray) -> None:
        """Reads samples back while later ones are written: from now on, in place of former ones.

        Args:
            edges: [n + 1] int64, the first byte of each sample in the file, and the end of the
                last.
        """
        if self.ahead is not None:
            self.ahead.close()
        ahead = SumsAhead(self.fd, edges, self._settle)
        self.ahead = self._scratch.enter_context(contextlib.closing(ahead))

    def reread(self) -> None:
        """Makes the file durable, and drops its pages from memory, so that the next reads come from
        the disk if the system allows it.

        Raises:
            WriteError, AccessError: this failed, or `sum_ahead` did.
        """
        with self.explained():
            if self.ahead is not None:
                for future in self.ahead.futures.values():
                    future.result()
            self._settle(0, 0)

    def _settle(self, start: int, stop: int) -> None:
        """Makes the file durable, and drops some of its pages from memory: all with 0 and 0."""
        os.fsync(self.fd)
        self.forget(start, stop - start)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors of the system inside the context into ours.

        Raises:
            WriteError, AccessError, DataNotFoundError: in one line: what, where, and what to do.
        """
        try:
            yield
        except HeadraceError:
            raise
        except OSError as error:
            path = redact(self.target)
            folder = redact(self._folder)
            reason = error.strerror or str(error)
            if error.errno in _FORBIDDEN:
                raise AccessError(
                    f"{folder}: this user may not write there ({reason}): use another folder"
                ) from error
            if error.errno in _MISSING:
                raise DataNotFoundError(
                    f"{folder} or the temporary file in it is gone: {reason}"
                ) from error
            remedy = ""
            if error.errno in _FULL:
                remedy = ": the disk is full: free some space, or use another disk"
            elif error.errno == errno.EFBIG:
                remedy = ": too large for this file system, or for this user's limit (ulimit -f)"
            raise WriteError(f"{path} can't be written: {reason}{remedy}") from error

    def _check_target(self) -> None:
        path = redact(self.target)
        if os.path.isdir(self.target):
            raise ConfigError(f"{path} is a folder: name the file to write")
        if not os.path.isdir(self._folder):
            raise DataNotFoundError(
                f"{redact(self._folder)}, where {os.path.basename(path)} should go, is not a "
                "folder: create it first"
            )
        if os.path.lexists(self.target) and not self._overwrite:
            raise self._target_exists()

    def _target_exists(self) -> TargetExistsError:
        return TargetExistsError(
            f"{redact(self.target)} is there already: pass overwrite=True (--overwrite) to "
            "replace it, or another name"
        )

    def _open_locked(self) -> int:
        while True:
            # O_NOFOLLOW: in a folder that others may write to, the name could be a link to some
            # file of ours
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                # else its writer renamed or removed it between the two calls, or
                # `remove_abandoned` looks at it
                if self._lock(fd) and _is_at(fd, self.path):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _lock(self, fd: int) -> bool:
        """Locks the file. False if another writer of the same target holds it."""
        try:
            is_ours = try_lock(fd)
        except OSError as error:
            if error.errno not in _LOCKLESS:
                raise
            is_ours = True
            _log.warning(
                "%s: this file system has no locks, see that no other job writes there",
                redact(self._folder),
            )
        if not is_ours and not self._is_shared:
            raise WriteError(
                f"another job is packing to {redact(self.target)} (it holds "
                f"{redact(os.path.basename(self.path))}): "
                "wait for it, or use another name"
            )
        return is_ours


def remove_abandoned(folder: str, prefixes: tuple[str, ...]) -> None:
    """Removes temporary files with one of these prefixes that nobody holds a lock on."""
    names: list[str] = []
    # another job may have removed the folder, which was empty
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    for name in names:
        if not name.startswith(prefixes) or not name.endswith(TEMPORARY):
            continue
        path = os.path.join(folder, name)
        # it was renamed or removed meanwhile, or is another user's
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if try_lock(fd) and _is_at(fd, path):
                    os.unlink(path)
            finally:
                os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


class Destination:
    """The files of a pack in a local folder, by name. A pickle reaches the same files from another
    process.

    Attributes:
        path: the folder, or its URL.
        shown: what messages call it, without secrets.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.shown: str = redact(path)

    def at(self, name: str) -> Path | str:
        """The path or URL of a file."""
        if isinstance(self.path, Path):
            return self.path / name
        return below(self.path, name)

    def shown_name(self, name: str) -> str:
        """The name of a file in messages."""
        return redact(self.at(name))

    def prepare(self, is_dry_run: bool = False) -> None:
        """Makes the folder if needed, unless it is a dry run.

        Raises:
            DataNotFoundError, ConfigError, WriteError: it can't be.
        """
        parent, name = os.path.split(self.path)
        if not os.path.isdir(parent):
            raise DataNotFoundError(
                f"{redact(parent)}, where {name} should go, is not a folder: create it first"
            )
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ConfigError(f"{self.shown} is a file: with shard_size name a folder")
        if is_dry_run:
            return
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise WriteError(
                f"{self.shown} can't be created: {error.strerror}: use another folder"
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
            with open(self.at(name), "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise DataNotFoundError(
                f"{self.shown} is a file, but a pack of parts is a folder: pass the folder"
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
        with PartFile(self.at(name), overwrite, is_shared=True) as file:
            file.write(data, 0)
            file.commit()

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(OSError):
            os.unlink(self.at(name))

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[PartFile]:
        """A local file to write a part into. It gets its name when the context ends without an
        error.
        """
        with PartFile(self.at(name), overwrite=True, is_shared=True) as file:
            yield file
            file.commit()

    def fetched(self, name: str) -> contextlib.AbstractContextManager[str]:
        """A local path of a file, valid inside the context.

        Raises:
            DataNotFoundError, AccessError, WriteError: it is not there, or can't be read.
        """
        return contextlib.nullcontext(str(self.at(name)))

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

    def prepare(self, is_dry_run: bool = False) -> None:
        """Makes nothing: a store has no folders."""

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
        if not overwrite and self.read(name) is not None:
            raise there
        options = {} if overwrite else {"mode": "create"}
        try:
            self._ask("pipe_file", name, data, **options)
        except (WriteError, FileChangedError):
            if overwrite or self.read(name) is None:
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
            return self._server.ask(question, str(self.at(name)), *after, **options)
        except RemoteError as error:
            raise WriteError(str(error)) from error
        except DataNotFoundError as error:
            raise DataNotFoundError(f"{error}: check that the bucket exists") from error


def _temporary(name: str) -> PartFile:
    """A file of this user in the folder for temporary files. Removes those that killed processes
    left.
    """
    folder = tempfile.gettempdir()
    ours = f"headrace-pack-{user_id()}-"
    remove_abandoned(folder, (f".{ours}",))
    return PartFile(os.path.join(folder, ours + name), overwrite=True, is_shared=True)


def destination_of(
    dst: str | os.PathLike[Any], storage_options: dict[str, Any] | None = None
) -> Destination:
    """The destination for a path or URL (``file://`` is a local folder)."""
    path = absolute(dst)
    if not is_url(path):
        return Destination(Path(path))
    if path.startswith(("http://", "https://")):
        raise ConfigError(
            f"{redact(path)}: HTTP neither writes files nor lists their sizes: use a folder, or a "
            "store such as s3://"
        )
    return StoreDestination(path, storage_options)


def absolute(path: str | os.PathLike[Any]) -> str:
    """The absolute path of a local path or ``file://`` URL; other URLs as they are."""
    text = os.fspath(path).removeprefix("file://").removeprefix("local://")
    return text if is_url(text) else os.path.abspath(os.path.expanduser(text))


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
    target = absolute(dst).rstrip("/")
    is_new = False
    if not is_url(target):
        target = os.path.realpath(target)
        is_new = not os.path.exists(target)
    for source, is_data in _sources_of(dataset):
        if is_new and not is_data:  # only a folder of data can be touched
            continue
        # of an archive's member the archive, too
        if any(_is_own(link, is_data, target) for link in chain_of(source)):
            raise ConfigError(
                f"{redact(dst)} is a part of the data to pack ({redact(source)}): write it "
                "elsewhere"
            )


def _is_own(source: str, is_data: bool, target: str) -> bool:
    """True if a pack to `target` would replace `source`, or lie inside it if that is a folder of
    data.
    """
    source = absolute(source)
    if not is_url(source):
        if not os.path.exists(source):  # it may be any text
            return False
        if os.path.exists(target) and os.path.samefile(source, target):
            return True
        source = os.path.realpath(source)
    source = source.rstrip("/")
    folder, name = os.path.split(source)
    if folder == target and (name in (PLAN, MANIFEST) or OF_PART.fullmatch(name)):
        return True
    return is_data and f"{target}/".startswith(f"{source}/")


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
