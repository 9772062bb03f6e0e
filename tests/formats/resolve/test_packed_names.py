"""Packed names are what went in, in little room, and sorted by their parts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

from headrace.formats.resolve.file_set import PackedNames

listed_names = st.lists(st.binary(max_size=20))


class TestPackedNames:
    @given(listed_names, st.data())
    def test_is_a_sequence_of_bytes(self, listed: list[bytes], data: st.DataObject) -> None:
        packed = PackedNames(listed)
        again = PackedNames.from_arrays(*packed.arrays)
        for names in (packed, again, pickle.loads(pickle.dumps(packed))):
            assert len(names) == len(listed)
            assert list(names) == names[:] == listed
            assert not any(array.flags.writeable for array in names.arrays)
        assert packed[::-2] == listed[::-2]
        assert packed[1:3] == listed[1:3]
        assert [packed[-1 - i] for i in range(len(listed))] == listed[::-1]
        for index in (len(listed), -len(listed) - 1):
            with pytest.raises(IndexError):
                packed[index]
        if listed:
            order = data.draw(st.lists(st.integers(0, len(listed) - 1)))
            taken = packed.take(np.array(order, np.int64))
            assert list(taken) == [listed[index] for index in order]

    def test_chunks_are_all_of_it(self) -> None:
        for n in [0, 1, 65_536, 65_537]:
            wanted = [str(i).encode() for i in range(n)]
            packed = PackedNames(iter(wanted))
            assert list(packed) == wanted
            twice = PackedNames.joined([packed, packed])
            assert twice is not None and list(twice) == wanted + wanted
        assert PackedNames.joined([packed, None]) is None
