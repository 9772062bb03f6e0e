"""Names the kinds of files that datasets read; `headrace.formats.resolve.resolver` finds them."""

from __future__ import annotations

from headrace.formats.resolve.contents import READERS
from headrace.formats.resolve.file_set import Format

EXTENSIONS = READERS["ImageDataset"]
"""Of images, in any case."""
TEXT_EXTENSIONS = READERS["TextDataset"]
IMAGES = Format("images", EXTENSIONS, dataset="ImageDataset")
TEXTS = Format("texts", TEXT_EXTENSIONS, dataset="TextDataset")
