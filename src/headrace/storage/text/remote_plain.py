"""How is a text read that is compressed, and far away?

As one of this machine: through a plain copy in `cache_dir`, since nobody can begin in the middle of it. It is fetched once, in order,
unpacked as it comes, and kept by its URL and version.
"""

from __future__ import annotations

import functools

from headrace.errors import AccessError, FormatError
from headrace.io.array_file import MappedArrays
from headrace.io.paths import redact
from headrace.io.remote_files import RemoteFiles
from headrace.io.sequential import opened_in_order
from headrace.io.single_flight import one_builder
from headrace.storage.text.plain import copied, copy_file


def far_plain_copy(files: RemoteFiles, url: str, encoding: str, errors: str, cache_dir: str) -> MappedArrays:
    """`headrace.storage.text.plain.plain_copy` of a text that is far away. Of several processes that want it at once one fetches it.

    Raises:
        FormatError: the file is damaged, fetched a second time too; or a byte of it is none of the encoding.
        AccessError: the server has no version of it to keep a copy by, or `cache_dir` can't be written to.
        RemoteError, FileChangedError, DataNotFoundError: see `Remote.read`.
    """
    version = files.version(url)
    if version.tag is None:
        raise AccessError(
            f"{redact(url)} is read through a plain copy of its text, and the server gives it neither an ETag nor a time, so that nobody "
            "can tell an old copy from a new one: copy the file to this machine, or decompress and convert it to UTF-8 where it lies"
        )
    kept = copy_file([files.place, redact(url), version.size, version.tag], encoding, errors, cache_dir)
    if (found := kept.found()) is not None:
        return found
    with one_builder(kept.path, files.patience):
        if (found := kept.found()) is not None:  # another process has made it meanwhile
            return found
        try:
            return copied(kept, url, encoding, errors, cache_dir, functools.partial(opened_in_order, files, url))
        except FormatError:  # perhaps of the way, or of what is kept of it here
            return copied(kept, url, encoding, errors, cache_dir, functools.partial(opened_in_order, files, url, bypass=True))
