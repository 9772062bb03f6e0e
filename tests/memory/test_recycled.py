"""Buffers that are used again once nobody looks at them."""

from __future__ import annotations

import numpy as np

from headrace.memory.recycled import RecycledBuffers

SIZE = 1 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def test_memory_is_used_again_when_its_views_are_gone() -> None:
    buffers = RecycledBuffers()
    first = address(buffers.take(SIZE))
    assert address(buffers.take(SIZE - 100)) == first
    assert len(buffers.take(SIZE - 100)) == SIZE - 100


def test_memory_with_a_view_is_never_handed_out() -> None:
    buffers = RecycledBuffers()
    whole = buffers.take(SIZE)
    whole[:] = b"\1" * SIZE
    holders = [whole[5:9], np.frombuffer(whole[100:], np.uint8)[7:], memoryview(whole[20:])[3:4]]
    del whole
    while holders:
        other = buffers.take(SIZE)
        other[:] = b"\2" * SIZE
        assert all(bytes(holder[:1]) == b"\1" for holder in holders)
        del other
        holders.pop()
    kept = buffers.nbytes
    buffers.take(SIZE)
    assert buffers.nbytes == kept  # the first one is idle now


def test_what_is_kept_is_bounded() -> None:
    buffers = RecycledBuffers()
    held = [buffers.take(3 << 20) for _ in range(20)]
    assert buffers.nbytes <= 16 << 20 and len({address(view) for view in held}) == 20
    small, large, kept = buffers.take(1000), buffers.take(17 << 20), buffers.nbytes
    assert (len(small), len(large)) == (1000, 17 << 20) and kept == buffers.nbytes
    buffers.close()
    assert not buffers.nbytes
