"""A remote Zarr store as zarr-python sees it, so that its bytes come by the same requests, with the
same retries, as all others.

Imported where it is needed, since zarr-python takes its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)

from headrace.formats.zarr.store import Store as ZarrStore

if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer, BufferPrototype


class LibraryStore(Store):
    """For reading alone."""

    def __init__(self, store: ZarrStore) -> None:
        super().__init__(read_only=True)
        self._store = store

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        start, stop = _bounds(byte_range)
        data = await asyncio.to_thread(self._store.content, key, start, stop)
        if data is None:
            return None
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [*await asyncio.gather(*(self.get(key, prototype, one) for key, one in key_ranges))]

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self._store.content, key) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LibraryStore) and other._store is self._store

    supports_writes = supports_deletes = supports_listing = False

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError

    set = delete = list = list_prefix = list_dir = _refuse  # type: ignore[assignment]


def _bounds(wanted: ByteRequest | None) -> tuple[int, int | None]:
    """First byte and end, as a slice has them."""
    if isinstance(wanted, RangeByteRequest):
        return wanted.start, wanted.end
    if isinstance(wanted, OffsetByteRequest):
        return wanted.offset, None
    if isinstance(wanted, SuffixByteRequest):
        return -wanted.suffix, None
    return 0, None
