"""Finds the encrypted columns of a Parquet file whose footer is plain, at whose metadata pyarrow
aborts the process.

The footer is a struct of Thrift's compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

from collections.abc import Iterator

_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY = (1, 2), 3, (4, 5, 6), 7, 8
_LISTS, _MAP, _STRUCT = (9, 10), 11, 12
_ROW_GROUPS, _COLUMNS, _CRYPTO_METADATA = 4, 1, 8  # fields of FileMetaData, RowGroup, ColumnChunk


def encrypted_leaves(footer: bytes) -> frozenset[int]:
    """The numbers of the columns that are encrypted in any row group.

    Raises:
        IndexError, ValueError: the footer is damaged.
    """
    found = set[int]()
    reader = _Compact(footer)
    for field, kind in reader.fields():
        if field != _ROW_GROUPS:
            reader.skip(kind)
            continue
        for _ in reader.items():
            for inner, inner_kind in reader.fields():
                if inner != _COLUMNS:
                    reader.skip(inner_kind)
                    continue
                for number, _ in enumerate(reader.items()):
                    for of_chunk, kind_of_chunk in reader.fields():
                        if of_chunk == _CRYPTO_METADATA:
                            found.add(number)
                        reader.skip(kind_of_chunk)
    return frozenset(found)


class _Compact:
    """Reads values one after the other; the caller reads or skips each."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and kind of each field of a struct."""
        field = 0
        while head := self._byte():
            if head >> 4:
                field += head >> 4
            else:
                coded = self._varint()
                field = (coded >> 1) ^ -(coded & 1)
            yield field, head & 15

    def items(self) -> Iterator[int]:
        """The kind of each item of a list."""
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._varint()
        for _ in range(count):
            yield head & 15

    def skip(self, kind: int) -> None:
        """Skips the value of a field."""
        if kind in _INTEGERS:
            self._varint()
        elif kind == _BINARY:
            size = self._varint()
            self._at += size
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner)
        elif kind in _LISTS:
            for inner in self.items():
                self._skip_item(inner)
        elif kind == _MAP:
            self._skip_map()
        elif kind == _DOUBLE:
            self._at += 8
        elif kind == _BYTE:
            self._at += 1
        elif kind not in _BOOLEANS:
            raise ValueError(f"Thrift has no type {kind}")

    def _skip_item(self, kind: int) -> None:
        if kind in _BOOLEANS:  # fields hold them in their head
            self._at += 1
        else:
            self.skip(kind)

    def _skip_map(self) -> None:
        count = self._varint()
        if not count:
            return
        kinds = self._byte()
        for _ in range(count):
            self._skip_item(kinds >> 4)
            self._skip_item(kinds & 15)
