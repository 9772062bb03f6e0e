"""A batch comes out of its slot as it went in; a slot is free when nobody looks at it any more."""

from __future__ import annotations

import _thread
import collections
import gc
import multiprocessing
import operator
import os
import pickle
import select
import sys
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headrace.errors import BudgetError, WorkerError
from headrace.memory import ring as ring_module
from headrace.memory.ring import STRIDE, Arena, Delivered, Ring, empty
from headrace.testing.contract import same

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.complex64, torch.complex128]


class Point(NamedTuple):
    x: Any
    y: Any


class Labelled(torch.Tensor):
    """A tensor of a user's own class."""


class GivesATensor:
    """Its pickle makes a tensor that dies as soon as it is written, so that its id comes again."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return GivesATensor, (0,), torch.full((50,), self.number)

    def __setstate__(self, state: torch.Tensor) -> None:
        self.number = int(state[0]) if (state == state[0]).all() else -1


def pack(ring: Ring, batch: Any) -> Any:
    """The worker's side: what travels to the parent."""
    with Arena(ring, ring.take()) as arena:
        return pickle.dumps(arena.pack(batch, {"note": "so"}))


def deliver(ring: Ring, batch: Any) -> Any:
    """A batch on its whole way."""
    delivered = pickle.loads(pack(ring, batch))
    assert type(delivered) is Delivered and delivered.report == {"note": "so"}
    return delivered.batch


def in_use(ring: Ring) -> int:
    gc.collect()
    return ring.in_use


def _pack_in_worker(ring: Ring, slots: list[int], pipe: Connection) -> None:
    torch.set_num_threads(1)  # as torch's own workers do: OpenMP's threads don't survive a fork
    for number, slot in enumerate(slots):
        with Arena(ring, slot) as arena:
            image = empty((300, 1000), torch.float32).fill_(number)
            pipe.send(arena.pack({"image": image, "array": np.full(9000, number)}, {}))


class TestRoundTrip:
    def test_all_dtypes_and_shapes(self) -> None:
        shapes = [(), (0,), (2, 0, 3), (7, 5), (3, 4, 5, 6)]
        batch = [(torch.randn(shape) * 50).to(dtype) for dtype in DTYPES for shape in shapes]
        batch.append(torch.tensor([0x7FC00001, -1 << 31], dtype=torch.int32).view(torch.float32))
        found = deliver(Ring(2), batch)
        assert same(found, batch)
        assert [t.stride() for t in found] == [t.stride() for t in batch]

    def test_tensors_that_are_not_contiguous(self) -> None:
        tensor = torch.randn(2, 8, 6, 5)
        numbers = torch.randn(6, dtype=torch.complex64)
        batch = [
            tensor.contiguous(memory_format=torch.channels_last),
            tensor.permute(3, 1, 0, 2),
            tensor[:, ::2, 1:],
            tensor[:1].expand(5, -1, -1, -1),
            tensor.flip(2)[..., 2],
            tensor.as_strided((4, 4), (1, 1)),
            numbers.conj(),
            numbers.conj().imag,
        ]
        found = deliver(Ring(1), batch)
        for number, (before, after) in enumerate(zip(batch, found, strict=True)):
            assert torch.equal(before, after), number
        assert [t.stride() for t in found[:2]] == [t.stride() for t in batch[:2]]

    def test_numpy(self) -> None:
        for n in (3, 5000):
            arrays = {
                "fortran": np.asfortranarray(np.ones((n, 3))),
                "strided": np.arange(2 * n)[::-2],
                "big endian": np.arange(n, dtype=">i4"),
                "time": np.arange(n).astype("M8[s]"),
                "fields": np.zeros(n, [("a", "i4"), ("b", "f8", 2)]),
                "texts": np.array(["abc", "é"] * n),
                "objects": np.array([None, "x", 3], dtype=object),
                "empty": np.empty((0, n)),
                "scalar": np.float32(3),
            }
            found = deliver(Ring(1), arrays)
            for name, array in arrays.items():
                assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
                assert (found[name] == array).all(), name
            assert found["fortran"].flags.f_contiguous
            found["strided"][:] = -1  # the user's own

    def test_objects(self) -> None:
        derived = torch.ones(3, requires_grad=True) * 2
        batch = [
            *(("text", None), Point(torch.zeros(2), [{"deep": torch.arange(5)}]), "naïve \udce9"),
            *(torch.nn.Parameter(torch.ones(3)), torch.ones(3).as_subclass(Labelled), derived),
            *({1, 2}, 1 + 2j, collections.OrderedDict(a=1), torch.float16, b"bytes" * 5000),
        ]
        found = deliver(Ring(1), [*batch, *map(GivesATensor, range(20))])
        for before, after in zip(batch, found, strict=False):
            assert type(after) is type(before)
            assert same(after, before)
        assert found[3].requires_grad and found[5].requires_grad
        assert [item.number for item in found[len(batch) :]] == list(range(20))

    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_from_a_worker(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        ring = Ring(2)
        ours, theirs = context.Pipe()
        slots = [ring.take() for _ in range(5)]
        worker = context.Process(target=_pack_in_worker, args=(ring, slots, theirs))
        worker.start()
        theirs.close()
        for number in range(5):
            batch = ours.recv().batch
            assert (batch["image"] == number).all() and batch["image"].shape == (300, 1000)
            assert (batch["array"] == number).all()
        worker.join()
        ours.close()
        del batch
        assert worker.exitcode == 0 and in_use(ring) == 0

    def test_one_tensor_twice_is_one_tensor(self) -> None:
        ring = Ring(1)
        tensor = torch.arange(1000)
        first, second, view = deliver(ring, [tensor, tensor, tensor[10:]])
        assert first is second
        assert same(view, tensor[10:])
        assert in_use(ring) == 1

    @pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
    def test_sparse_tensors(self) -> None:
        ring, dense = Ring(1), torch.diag(torch.arange(6.0))[:4]
        tensors = [dense.to_sparse_csc(), dense.to_sparse_bsr((2, 3)), dense.to_sparse_bsc((2, 3))]
        tensors += [torch.sparse_coo_tensor([[1, 1], [2, 2]], [3.0, 4.0], (4, 6))]
        tensors += [one.requires_grad_() for one in (dense.to_sparse(), dense.to_sparse_csr())]
        for tensor in tensors:
            found = deliver(ring, [tensor, "x"])[0]
            assert (found.layout, found.dtype) == (tensor.layout, tensor.dtype)
            assert found.requires_grad is tensor.requires_grad
            assert torch.equal(found.detach().to_dense(), tensor.detach().to_dense())
            if tensor.layout is torch.sparse_coo:
                assert found.is_coalesced() == tensor.is_coalesced()
            del found
            assert in_use(ring) == 0


class TestLife:
    def test_a_slot_is_free_when_the_last_view_dies(self) -> None:
        ring = Ring(2)
        for look in (
            lambda batch: batch["t"].view(-1)[5:][:2].unsqueeze(0),
            lambda batch: memoryview(batch["t"].numpy())[2:],
            lambda batch: batch["t"].untyped_storage(),
            lambda batch: torch.from_numpy(batch["a"][10:20]),
            lambda batch: np.lib.stride_tricks.sliding_window_view(batch["a"], 5),
            lambda batch: iter(batch["t"]),
            lambda batch: torch.ones(30, requires_grad=True) * batch["t"],
        ):
            batch = deliver(ring, {"t": torch.ones(60, 30), "a": np.ones(2000)})
            assert in_use(ring) == 1
            seen = look(batch)
            del batch
            assert in_use(ring) == 1
            del seen
            assert in_use(ring) == 0

    @pytest.mark.usefixtures("ctrl_c")
    def test_ctrl_c_survives_the_return_of_a_slot(self) -> None:
        ring = ring_module.Ring(1)
        leases = [ring.lease(ring.take())]
        # it comes while C code runs, the last of which frees the slot
        with pytest.raises(KeyboardInterrupt):
            collections.deque(map(operator.call, [_thread.interrupt_main, leases.clear]), maxlen=0)
            for _ in range(2):  # Python 3.14 looks for signals here, and not after the call
                pass
        assert ring.in_use == 0

    @pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
    def test_extra_slots_give_their_pages_back(self) -> None:
        ring = Ring(2)
        batches = [deliver(ring, torch.ones(1 << 18)) for _ in range(10)]  # 1 MiB each
        assert ring.total == 10 and os.fstat(ring._memory.fd).st_blocks * 512 >= 10 << 20
        batches.clear()
        assert in_use(ring) == 0
        ring.lease(ring.take())
        assert os.fstat(ring._memory.fd).st_blocks * 512 <= 3 << 20
        assert ring.stats()["ring_bytes"] <= 3 * (2 << 20)
        for number in range(12):  # and are whole again when they are needed
            batches.append(deliver(ring, torch.full((1 << 18,), number)))
        assert all((b == n).all() for n, b in enumerate(batches)) and ring.total == 12

    def test_a_batch_above_the_stride_is_refused(self) -> None:
        ring = Ring(1)
        with pytest.raises(BudgetError, match=f"{STRIDE:,}"):
            ring.map(0, STRIDE + 1)

    def test_what_is_counted(self) -> None:
        ring = Ring(2)
        assert list(ring.stats().values()) == [2, 0, 0, 0, 0]
        ring._most_extra = 3
        kept = [deliver(ring, torch.full((1 << 19,), number)) for number in range(8)]
        stats = ring.stats()
        assert (stats["ring_slots"], stats["ring_in_use"], stats["ring_grown"]) == (6, 5, 4)
        assert stats["ring_copied"] == 3 and stats["ring_bytes"] >= 5 << 22
        assert all((batch == number).all() for number, batch in enumerate(kept))

    def test_parts_of_what_lies_in_the_slot_are_not_copied(self) -> None:
        ring = Ring(1)
        arena = Arena(ring, ring.take())
        with arena:
            rows = empty((4, 2000), torch.float32)
            rows[:] = torch.arange(4.0)[:, None]
            end = arena.nbytes
            parts = [rows[2], rows[1:3], rows.view(torch.int32)[3], rows[:, ::2]]
            sent = pickle.dumps(arena.pack(parts, {}))
        assert arena.nbytes == end + 4 * 1000 * 4  # the last one has gaps, and is copied
        batch = pickle.loads(sent).batch
        assert [t.shape for t in batch] == [(2000,), (2, 2000), (2000,), (4, 1000)]
        assert (batch[0] == 2).all()
        assert batch[1][:, 0].tolist() == [1, 2]
        assert (batch[2].view(torch.float32) == 3).all()
        assert batch[3][:, 7].tolist() == [0, 1, 2, 3]
        del batch
        assert in_use(ring) == 0

    def test_a_message_fits_into_a_pipe_in_one_piece(self) -> None:
        """Else a worker killed in the midst of it would leave the parent to wait for the rest."""
        ring, batches = Ring(1), list[Any]()
        batches.append(["a text of some length " * 300] * 3)
        batches.append([f"text {number}" for number in range(5000)])
        batches.append({f"field {number}": torch.full((2,), number) for number in range(500)})
        batches.append([np.full(number, 7, np.uint8) for number in range(300)])
        for batch in batches:
            sent = pack(ring, batch)
            assert len(sent) < select.PIPE_BUF - 512
            delivered = pickle.loads(sent)
            assert same(delivered.batch, batch)
            del delivered
            assert in_use(ring) == 0

    def test_a_delivery_for_a_ring_that_is_gone(self) -> None:
        ring = Ring(1)
        sent = pack(ring, torch.ones(3))
        del ring
        gc.collect()
        with pytest.raises(WorkerError):
            pickle.loads(sent)

    def test_a_delivery_that_cannot_be_unpickled_frees_its_slot(self) -> None:
        ring = Ring(1)
        sent = pack(ring, [torch.ones(500), Explodes()])
        with pytest.raises(ZeroDivisionError):
            pickle.loads(sent)
        assert in_use(ring) == 0


class Explodes:
    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)


class TestInProcess:
    """With num_workers=0 the parent collates into a slot, and hands the tensors out as they are."""

    def test_who_keeps_the_labels_keeps_no_slot(self) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True) as arena:
            images = empty((64, 500), torch.float32).fill_(1)
            labels = empty((64,), torch.int64).fill_(5)
        assert arena.nbytes == 64 * 500 * 4 + 64 * 8
        del arena
        assert in_use(ring) == 1
        del images
        assert in_use(ring) == 0 and (labels == 5).all()

    def test_an_abandoned_slot_is_free_when_nothing_is_left(self) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True) as arena:
            half_made = [empty((20_000,), torch.float32), empty((0,), torch.float32)]
        arena.abandon()
        assert in_use(ring) == 1
        half_made.clear()
        assert in_use(ring) == 0

    def test_tensors_of_a_slot_are_aligned_and_apart(self) -> None:
        ring, kinds = Ring(1), [(n, dtype) for dtype in DTYPES for n in (20_001, 30_003, 65_536)]
        with ring_module.Arena(ring, ring.take(), leased=True):
            tensors = [empty((5, n), dtype).fill_(n % 2) for n, dtype in kinds]
        assert all(t.data_ptr() % 64 == 0 for t in tensors)
        assert all((t == n % 2).all() for t, (n, _) in zip(tensors, kinds, strict=True))
