"""Files of any endings, for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.formats.files import FilesSource
from headrace.formats.resolve.file_set import FileSet
from headrace.io.remote.options import RemoteOptions


def scan(path: Any, endings: Sequence[str], reach: RemoteOptions | None = None) -> FileSet:
    """What `resolve` finds, where a URL that ends as a file does may be a folder, too."""
    return FilesSource(path, endings, reach).listing


def touch(root: Path, *names: str | bytes) -> Path:
    """Makes files below a folder, with their folders."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"content of " + os.fsencode(name))
    return root


def names_of(found: FileSet) -> list[str]:
    return [os.fsdecode(name) for name in found.names]
