"""HDF5 files: the format, recognised without h5py, which takes its time to import."""

from __future__ import annotations

import os
from typing import Any

from headrace.formats.resolve.file_set import Format
from headrace.io.library_errors import unreadable
from headrace.io.paths import redact

SIGNATURE = b"\x89HDF\r\n\x1a\n"
ENDINGS = (".h5", ".hdf5", ".he5", ".h5ad", ".nc", ".mat")
"""Of URLs of HDF5 files: remote files are not opened to find out their format."""


def is_hdf5(path: str | os.PathLike[Any]) -> bool:
    """True if the file has HDF5's signature at its beginning, or behind a user block of 512, 1024,
    2048 ... bytes, such as MATLAB writes. False if it can't be opened.

    Raises:
        AccessError: the disk fails.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            head, at = file.read(512), 512
            # a tar's first member lies at 512, too
            if head.startswith(SIGNATURE) or head[257:262] == b"ustar":
                return head.startswith(SIGNATURE)
            while len(head) >= len(SIGNATURE):
                file.seek(at)
                head, at = file.read(len(SIGNATURE)), 2 * at
                if head == SIGNATURE:
                    return True
    except OSError as error:
        failure = unreadable(redact(path), error)
        if failure is not None:
            raise failure from error
    return False


HDF5 = Format(
    "HDF5 files",
    ENDINGS,
    keeps_order=True,
    recognizes=is_hdf5,
    is_exclusive=True,
    dataset="HDF5Dataset",
)
