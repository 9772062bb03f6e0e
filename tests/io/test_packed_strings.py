"""Packed names are what went in, in little room, and sorted by their parts."""

from __future__ import annotations

import multiprocessing
import pickle
import tracemalloc
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.io.packed_strings import NamesBuilder, PackedNames, order_of_parts

pytestmark = pytest.mark.quick_every(4)

listed_names = st.lists(st.binary(max_size=20))


class TestPackedNames:
    @given(listed_names)
    def test_is_a_sequence_of_bytes(self, listed: list[bytes]) -> None:
        packed = PackedNames(listed)
        assert len(packed) == len(listed) and list(packed) == listed and packed[:] == listed
        assert packed[::-2] == listed[::-2] and packed[1:3] == listed[1:3]
        assert [packed[-1 - i] for i in range(len(listed))] == listed[::-1]
        for index in (len(listed), -len(listed) - 1):
            with pytest.raises(IndexError):
                packed[index]
        again = PackedNames.from_arrays(*packed.arrays)
        assert list(again) == listed

    def test_takes_the_bytes_and_8_more_a_name(self) -> None:
        packed = PackedNames(f"folder/{i:06d}.jpg".encode() for i in range(10_000))
        data, offsets = packed.arrays
        assert (data.nbytes, offsets.nbytes) == (10_000 * 17, 10_001 * 8)
        assert (data.dtype, offsets.dtype) == (np.uint8, np.int64)

    def test_is_read_only(self) -> None:
        for array in PackedNames([b"a", b"bc"]).arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1

    @pytest.mark.slow
    def test_is_made_from_a_stream_that_is_never_held_at_once(self) -> None:
        n = 300_000
        tracemalloc.start()
        packed = PackedNames(b"folder/%08d.jpg" % i for i in range(n))
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size = sum(a.nbytes for a in packed.arrays)
        assert held < size + 100_000
        assert peak < 1.2 * size + 10_000_000  # one chunk of names
        assert packed[n - 1] == b"folder/00299999.jpg"

    @pytest.mark.parametrize("n", [0, 1, 65_535, 65_536, 65_537, 140_000])
    def test_chunks_are_all_of_it(self, n: int) -> None:
        packed = PackedNames(str(i).encode() for i in range(n))
        chunks = list(packed.chunks())
        assert (
            [name for chunk in chunks for name in chunk]
            == [str(i).encode() for i in range(n)]
            == list(packed)
        )
        assert all(chunks)

    @given(st.data(), listed_names.filter(bool))
    def test_takes_names_in_any_order(self, data: st.DataObject, listed: list[bytes]) -> None:
        order = data.draw(st.lists(st.integers(0, len(listed) - 1)))
        assert list(PackedNames(listed).take(np.array(order, np.int64))) == [
            listed[i] for i in order
        ]

    @given(listed_names)
    def test_a_pickle_holds_the_names(self, listed: list[bytes]) -> None:
        again = pickle.loads(pickle.dumps(PackedNames(listed)))
        assert list(again) == listed and not any(a.flags.writeable for a in again.arrays)


class TestBuilder:
    @given(st.lists(listed_names))
    def test_takes_names_one_by_one_and_joined(self, lists: list[list[bytes]]) -> None:
        builder = NamesBuilder()
        for number, listed in enumerate(lists):
            if number % 2:
                builder.extend(listed)
            else:
                builder.add_joined(b"".join(listed), np.array([len(n) for n in listed], np.int64))
        wanted = [name for listed in lists for name in listed]
        assert len(builder) == len(wanted)
        assert list(builder.build()) == wanted


# Bytes on both sides of "/", and what stands for it.
odd_names = st.lists(
    st.lists(
        st.text("ab\x01 -./é", min_size=1, max_size=3).map(str.encode), min_size=1, max_size=3
    ).map(b"/".join)
)


class TestOrder:
    @given(odd_names)
    def test_is_that_of_the_parts(self, listed: list[bytes]) -> None:
        order = order_of_parts(PackedNames(listed))
        wanted = sorted(listed, key=lambda name: name.split(b"/"))
        assert ([listed[i] for i in order] if order is not None else listed) == wanted
        assert (order is None) == (listed == wanted)

    @given(odd_names)
    def test_equal_names_stay_as_they_come(self, listed: list[bytes]) -> None:
        doubled = listed + listed
        order = order_of_parts(PackedNames(doubled))
        wanted = sorted(range(len(doubled)), key=lambda i: doubled[i].split(b"/"))
        assert (list(range(len(doubled))) if order is None else order.tolist()) == wanted

    @pytest.mark.parametrize("at", [0, 65_535, 65_536, 69_999])
    def test_looks_at_all_chunks(self, at: int) -> None:
        listed = [b"%08d" % i for i in range(70_000)]
        listed[at : at + 2] = listed[at : at + 2][::-1]
        order = order_of_parts(PackedNames(listed))
        assert (order is None) == (at == 69_999)


def tell(names: PackedNames, pipe: Connection) -> None:
    pipe.send(
        (
            len(names),
            names[0],
            names[-1],
            [a.flags.writeable for a in names.arrays],
            names._bytes._memory is not None,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "n"),
    [("fork", 200_000), ("spawn", 200_000), ("forkserver", 200_000), ("forkserver", 3)],
)
def test_workers_map_what_is_large(method: str, n: int) -> None:
    context = multiprocessing.get_context(method)
    names = PackedNames(b"folder/%08d.jpg" % i for i in range(n))
    ours, theirs = context.Pipe()
    with ours, theirs:
        worker = context.Process(target=tell, args=(names, theirs))
        worker.start()
        said = ours.recv()
        worker.join()
    assert said == (
        n,
        b"folder/00000000.jpg",
        b"folder/%08d.jpg" % (n - 1),
        [False, False],
        method != "fork" and n > 3,
    )
    assert names[n - 1] == said[2]


def test_names_that_end_in_some_letters() -> None:
    names = [
        b"a.csv",
        b"B.CSV",
        b"csv",
        b".csv",
        b"",
        b"a.csv.gz",
        b"x/a.cSv",
        "é.csv".encode(),
        b"a_csv",
    ]
    assert PackedNames(names).end_in(b".csv").tolist() == [
        name.lower().endswith(b".csv") for name in names
    ]
    assert PackedNames().end_in(b".csv").tolist() == []
