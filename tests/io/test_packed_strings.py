"""Packed names are what went in, in little room, and sorted by their parts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

from headrace.io.packed_strings import PackedNames, order_of_parts

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
            chunks = list(packed.chunks())
            assert [name for chunk in chunks for name in chunk] == wanted == list(packed)
            assert all(chunks)


# Bytes on both sides of "/", and what stands for it.
odd_names = st.lists(
    st.lists(
        st.text("ab\x01 -./é", min_size=1, max_size=3).map(str.encode), min_size=1, max_size=3
    ).map(b"/".join)
)


class TestOrder:
    @given(odd_names, st.booleans())
    def test_is_that_of_the_parts(self, listed: list[bytes], are_doubled: bool) -> None:
        """Equal names stay as they come."""
        if are_doubled:
            listed = listed + listed
        order = order_of_parts(PackedNames(listed))
        wanted = sorted(range(len(listed)), key=lambda number: listed[number].split(b"/"))
        if order is None:
            assert wanted == list(range(len(listed)))
        else:
            assert order.tolist() == wanted != list(range(len(listed)))

    def test_looks_at_all_chunks(self) -> None:
        for at in [0, 65_535, 69_999]:
            listed = [b"%08d" % i for i in range(70_000)]
            listed[at : at + 2] = listed[at : at + 2][::-1]
            order = order_of_parts(PackedNames(listed))
            assert (order is None) == (at == 69_999)
