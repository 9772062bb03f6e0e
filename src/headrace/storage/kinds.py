"""Names the kinds of files that datasets read; `headrace.io.resolve.resolver` finds them."""

from __future__ import annotations

from headrace.io.resolve.contents import READERS
from headrace.io.resolve.file_set import Kind
from headrace.storage.tar.source import TARS
from headrace.storage.text.plain import COMPRESSED
from headrace.storage.text.records import JSON_LINES
from headrace.storage.zarr.stores import ZARR

EXTENSIONS = READERS["ImageDataset"]
"""Of images, in any case."""
TEXT_EXTENSIONS = READERS["TextDataset"]
IMAGES = Kind("images", EXTENSIONS)
TEXTS = Kind("texts", TEXT_EXTENSIONS)
SHARD_KINDS: dict[str, tuple[str, ...]] = {
    "tar": TARS.endings,
    "jsonl": tuple(ending + packed for ending in JSON_LINES for packed in ("", *COMPRESSED)),
    "txt": tuple(".txt" + packed for packed in ("", *COMPRESSED)),
    "h5": (".h5", ".hdf5", ".he5"),
    "zarr": ZARR.stores,
}
"""The endings of shards."""
SHARDS = Kind(
    "shards",
    tuple(ending for kind, endings in SHARD_KINDS.items() if kind != "zarr" for ending in endings),
    stores=ZARR.stores,
    recognizes=ZARR.recognizes,
)
