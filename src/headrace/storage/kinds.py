"""Names the kinds of files that datasets read; `headrace.io.resolve.resolver` finds them."""

from __future__ import annotations

from headrace.io.resolve.contents import READERS
from headrace.io.resolve.file_set import Kind

EXTENSIONS = READERS["ImageDataset"]
"""Of images, in any case."""
TEXT_EXTENSIONS = READERS["TextDataset"]
IMAGES = Kind("images", EXTENSIONS, dataset="ImageDataset")
TEXTS = Kind("texts", TEXT_EXTENSIONS, dataset="TextDataset")
