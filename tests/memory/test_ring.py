"""The ring: a batch comes out of its slot as it went in, and a slot is free exactly when nobody looks at it any more."""

from __future__ import annotations

import _thread
import collections
import dataclasses
import gc
import multiprocessing
import operator
import os
import pickle
import select
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headrace.errors import BudgetError, HeadraceError, WorkerError
from headrace.memory import ring as ring_module
from headrace.memory.ring import STRIDE, Delivered, Ring, empty
from headrace.testing import contract

pytestmark = pytest.mark.quick_every(4)

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    image: Any
    name: str


class GivesATensor:
    """Its pickle makes a tensor that dies as soon as it is written."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return GivesATensor, (0,), torch.full((50,), self.number)

    def __setstate__(self, state: torch.Tensor) -> None:
        self.number = int(state[0]) if (state == state[0]).all() else -1


def pack(ring: Ring, batch: Any, slot: int | None = None) -> Any:
    """The worker's side: what travels to the parent."""
    arena = ring.arena(ring.take() if slot is None else slot)
    with arena:
        return pickle.dumps(arena.pack(batch, {"said": "so"}))


def deliver(ring: Ring, batch: Any) -> Any:
    """A batch on its whole way."""
    delivered = pickle.loads(pack(ring, batch))
    assert type(delivered) is Delivered and delivered.report == {"said": "so"}
    return delivered.batch


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a.resolve_conj(), b.resolve_conj()))
    return torch.equal(*bits)


def in_use(ring: Ring) -> int:
    gc.collect()
    return ring.in_use


class TestRoundTrip:
    @pytest.mark.quick_every(12)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (7, 5), (3, 4, 5, 6)], ids=str)
    def test_of_all_dtypes_and_shapes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        ring = Ring(2)
        tensor = (torch.randn(shape, dtype=torch.float64) * 50).to(dtype)
        found = deliver(ring, tensor)
        assert same(tensor, found) and type(found) is torch.Tensor and found.stride() == tensor.stride()

    def test_nan_and_signed_zero_keep_their_bits(self) -> None:
        tensor = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000], dtype=torch.int64).to(torch.int32).view(torch.float32)
        assert same(deliver(Ring(1), tensor), tensor)

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.contiguous(memory_format=torch.channels_last),
            lambda t: t.permute(3, 1, 0, 2),
            lambda t: t[:, ::2, 1:],
            lambda t: t[:1].expand(5, -1, -1, -1),
            lambda t: t.flip(2)[..., 2],
            lambda t: t.as_strided((4, 4), (1, 1)),
        ],
        ids=["channels_last", "permuted", "strided", "expanded", "flipped", "overlapping"],
    )
    def test_of_tensors_that_are_not_contiguous(self, change: Any) -> None:
        tensor = change(torch.randn(2, 8, 6, 5))
        found = deliver(Ring(1), tensor)
        assert same(tensor, found)

    def test_dense_layouts_keep_their_strides(self) -> None:
        images = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
        turned = torch.randn(4, 7).T
        found = deliver(Ring(1), [images, turned])
        assert [t.stride() for t in found] == [images.stride(), turned.stride()]
        assert found[0].is_contiguous(memory_format=torch.channels_last)

    def test_conjugate_and_negative_views(self) -> None:
        numbers = torch.randn(6, dtype=torch.complex64)
        found = deliver(Ring(1), [numbers.conj(), numbers.conj().imag])
        assert same(found[0], numbers.conj()) and same(found[1], -numbers.imag)

    def test_conjugate_views_of_what_lies_in_the_slot(self) -> None:
        ring = Ring(1)
        arena = ring.arena(ring.take())
        with arena:
            inside = empty((6,), torch.complex64).copy_(torch.randn(6, dtype=torch.complex64))
            negative = torch._neg_view(empty((4,), torch.float32).copy_(torch.arange(4.0)))
            wanted = inside.clone().conj(), negative.clone()
            sent = pickle.dumps(arena.pack((inside.conj(), negative), {}))
        found = pickle.loads(sent).batch
        assert same(found[0], wanted[0].resolve_conj()) and torch.equal(found[1], wanted[1])

    def test_one_tensor_twice_is_one_tensor(self) -> None:
        ring = Ring(1)
        tensor = torch.arange(1000)
        first, second, view = deliver(ring, [tensor, tensor, tensor[10:]])
        assert first is second
        assert same(view, tensor[10:])
        assert in_use(ring) == 1

    @pytest.mark.parametrize("n", [3, 5000])
    def test_numpy(self, n: int) -> None:
        arrays = {
            "plain": np.arange(n),
            "fortran": np.asfortranarray(np.ones((n, 3))),
            "strided": np.arange(2 * n)[::-2],
            "big endian": np.arange(n, dtype=">i4"),
            "half": np.ones(n, np.float16),
            "time": np.arange(n).astype("M8[s]"),
            "fields": np.zeros(n, [("a", "i4"), ("b", "f8", 2)]),
            "texts": np.array(["abc", "é"] * n),
            "objects": np.array([None, "x", 3], dtype=object),
            "empty": np.empty((0, n)),
            "scalar": np.float32(3),
            "0-d": np.array(7),
        }
        found = deliver(Ring(1), arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
            assert (found[name] == array).all(), name
        assert found["fortran"].flags.f_contiguous
        found["plain"][:] = -1  # the user's own

    def test_structures(self) -> None:
        batch = {
            "tuple": (torch.ones(3), "text", None),
            "point": Point(torch.zeros(2), [np.ones(2000), {"deep": torch.arange(5)}]),
            "record": Record(torch.full((4,), 7), "naïve \udce9"),
            "objects": [{1, 2}, 3.5, 1 + 2j, range(3), collections.OrderedDict(a=1), torch.float16, slice(1, 2)],
            7: b"bytes" * 5000,
        }
        found = deliver(Ring(1), batch)
        assert list(found) == list(batch)
        assert type(found["tuple"]) is tuple and found["tuple"][1:] == ("text", None)
        assert type(found["point"]) is Point and torch.equal(found["point"].y[1]["deep"], torch.arange(5))
        assert (found["point"].y[0] == 1).all()
        assert type(found["record"]) is Record and found["record"].name == "naïve \udce9" and found["record"].image.sum() == 28
        assert found["objects"] == batch["objects"] and found[7] == batch[7]

    def test_tensors_that_live_only_while_they_are_pickled(self) -> None:
        """Their ids come again for the next one: each must keep its own content."""
        found = deliver(Ring(1), [GivesATensor(i) for i in range(20)])
        assert [item.number for item in found] == list(range(20))

    def test_what_is_no_plain_tensor_travels_by_value(self) -> None:
        weights = torch.nn.Parameter(torch.ones(3))
        derived = torch.ones(3, requires_grad=True) * 2
        found = deliver(Ring(1), [torch.ones(2, requires_grad=True), weights, derived])
        assert found[0].requires_grad and found[0].tolist() == [1, 1]
        assert type(found[1]) is torch.nn.Parameter and found[1].requires_grad
        assert found[2].requires_grad and found[2].tolist() == [2, 2, 2]

    @pytest.mark.quick_every(12)
    @pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("layout", ["coo", "coo twice", "csr", "csc", "bsr", "bsc"])
    def test_sparse_tensors(self, layout: str, grad: bool) -> None:
        ring, dense = Ring(1), torch.arange(24.0).reshape(4, 6) * (torch.arange(24).reshape(4, 6) % 5 == 0)
        tensor = {
            "coo": lambda: dense.to_sparse(),
            "coo twice": lambda: torch.sparse_coo_tensor([[1, 1], [2, 2]], [3.0, 4.0], (4, 6)),  # not coalesced
            "csr": lambda: dense.to_sparse_csr(),
            "csc": lambda: dense.to_sparse_csc(),
            "bsr": lambda: dense.to_sparse_bsr((2, 3)),
            "bsc": lambda: dense.to_sparse_bsc((2, 3)),
        }[layout]().requires_grad_(grad)
        found = deliver(ring, [tensor, "x"])[0]
        assert found.layout is tensor.layout and found.dtype is tensor.dtype and found.requires_grad is grad
        assert torch.equal(found.detach().to_dense(), tensor.detach().to_dense())
        assert layout not in ("coo", "coo twice") or found.is_coalesced() == tensor.is_coalesced()
        del found
        assert in_use(ring) == 0

    def test_a_tensor_subclass_stays_one(self) -> None:
        class_before = torch.ones(3).as_subclass(Labelled)
        found = deliver(Ring(1), class_before)
        assert type(found) is Labelled and found.tolist() == [1, 1, 1]

    def test_what_was_collated_into_the_slot_is_not_copied(self) -> None:
        ring = Ring(1)
        arena = ring.arena(ring.take())
        with arena:
            images = empty((16, 100), torch.float32).fill_(3)
            labels = empty((16,), torch.int64).fill_(4)
            before = arena._end
            sent = pickle.dumps(arena.pack({"images": images, "first": images[:4], "labels": labels, "view": images[3:5]}, {}))
        assert arena._end - before <= 2 * 400 + 64  # "view" alone, which begins where no tensor of the slot does
        assert len(sent) < 1000
        found = pickle.loads(sent).batch
        assert found["images"].data_ptr() == found["first"].data_ptr()
        assert (found["images"] == 3).all() and (found["labels"] == 4).all()
        assert found["first"].shape == (4, 100) and (found["view"] == 3).all()

    def test_no_tensor_at_all(self) -> None:
        ring = Ring(1)
        assert deliver(ring, ["a", None, 3]) == ["a", None, 3]
        assert in_use(ring) == 0

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_from_a_worker(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        ring = Ring(2)
        ours, theirs = context.Pipe()
        worker = context.Process(target=_pack_in_worker, args=(ring, theirs))
        worker.start()
        theirs.close()
        for number in range(5):
            slot = ring.take()
            ours.send(slot)
            batch = ours.recv().batch
            assert (batch["image"] == number).all() and batch["image"].shape == (300, 1000)
            assert (batch["array"] == number).all() and batch["name"] == f"batch {number}"
        ours.send(None)
        worker.join()
        ours.close()
        assert worker.exitcode == 0
        del batch
        assert in_use(ring) == 0 and ring.total <= 3


class Labelled(torch.Tensor):
    """A tensor of a user's own class."""


def _pack_in_worker(ring: Ring, pipe: Connection) -> None:
    torch.set_num_threads(1)  # as torch's own workers do: OpenMP's threads don't survive a fork
    number = 0
    while (slot := pipe.recv()) is not None:
        with ring.arena(slot) as arena:
            image = empty((300, 1000), torch.float32).fill_(number)
            pipe.send(arena.pack({"image": image, "array": np.full(9000, number), "name": f"batch {number}"}, {}))
        number += 1


def _write_in_worker(ring: Ring, slots: list[int]) -> None:
    for slot in slots:
        ring.map(slot, 1 << 20)[: 1 << 20] = bytes([1]) * (1 << 20)


class TestLife:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "look",
        [
            lambda batch: batch["t"],
            lambda batch: batch["t"][3],
            lambda batch: batch["t"].view(-1)[5:][:2].unsqueeze(0),
            lambda batch: batch["t"].numpy(),
            lambda batch: memoryview(batch["t"].numpy())[2:],
            lambda batch: batch["t"].untyped_storage(),
            lambda batch: batch["t"].detach(),
            lambda batch: torch.from_numpy(batch["a"][10:20]),
            lambda batch: batch["a"][::3],
            lambda batch: np.lib.stride_tricks.sliding_window_view(batch["a"], 5),
            lambda batch: lambda t=batch["t"]: t,
            lambda batch: iter(batch["t"]),
        ],
    )
    def test_a_slot_is_free_when_the_last_view_dies(self, look: Any) -> None:
        ring = Ring(2)
        batch = deliver(ring, {"t": torch.ones(60, 30), "a": np.ones(2000)})
        assert in_use(ring) == 1
        seen = look(batch)
        del batch
        assert in_use(ring) == 1
        del seen
        assert in_use(ring) == 0

    def test_a_copy_does_not_hold_the_slot(self) -> None:
        ring = Ring(1)
        batch = deliver(ring, [torch.ones(100), np.ones(3000)])
        copies = [batch[0].clone(), batch[0] * 2, torch.stack([batch[0]]), batch[1].copy(), batch[0].tolist()]
        del batch
        assert in_use(ring) == 0 and copies[1].sum() == 200

    @pytest.mark.slow
    def test_who_keeps_the_labels_keeps_no_slot(self) -> None:
        ring, kept = Ring(2), []
        for number in range(9):
            images, labels = deliver(ring, (torch.full((64, 500), number), torch.full((64,), number)))
            assert in_use(ring) == 1 and (images == number).all()
            kept.append(labels)
            del images, labels
            assert in_use(ring) == 0
        assert ring.total == 2 and all((labels == number).all() for number, labels in enumerate(kept))

    def test_a_view_of_another_tensor_stays_one(self) -> None:
        ring = Ring(1)
        arena = ring.arena(ring.take())
        with arena:
            whole = empty((64, 500), torch.float32).fill_(1)
            message = pickle.dumps(arena.pack([whole, whole[3]], {}))
        batch = pickle.loads(message).batch
        batch[0][3] = 7
        assert (batch[1] == 7).all()
        del batch[0]
        assert in_use(ring) == 1

    def test_a_reference_cycle_holds_it_until_it_is_collected(self) -> None:
        ring = Ring(1)
        gc.disable()
        try:
            loop: dict[str, Any] = {"batch": deliver(ring, torch.ones(10))}
            loop["self"] = loop
            del loop
            assert ring.in_use == 1
            gc.collect()
            assert ring.in_use == 0
        finally:
            gc.enable()

    @pytest.mark.slow
    def test_autograd_holds_it(self) -> None:
        ring = Ring(1)
        weight = torch.ones(10, requires_grad=True)
        loss = (weight * deliver(ring, torch.arange(10.0))).sum()
        assert in_use(ring) == 1
        loss.backward()
        assert weight.grad is not None and torch.equal(weight.grad, torch.arange(10.0))
        del loss
        assert in_use(ring) == 0

    def test_ctrl_c_survives_the_return_of_a_slot(self) -> None:
        ring = ring_module.Ring(1)
        leases = [ring.lease(ring.take())]
        with pytest.raises(KeyboardInterrupt):  # it comes while C code runs, the last of which frees the slot
            collections.deque(map(operator.call, [_thread.interrupt_main, leases.clear]), maxlen=0)
            for _ in range(2):  # Python 3.14 looks for signals here, and not after the call
                pass
        assert ring.in_use == 0

    @pytest.mark.slow
    def test_a_slot_may_be_freed_in_any_thread(self) -> None:
        ring = Ring(2)
        batches = [deliver(ring, torch.full((50,), i)) for i in range(20)]
        assert in_use(ring) == 20
        threads = [threading.Thread(target=lambda: [batches.pop() for _ in range(5)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert in_use(ring) == 0

    @pytest.mark.slow
    def test_kept_batches_are_never_written_over(self) -> None:
        ring = Ring(3)
        rng = np.random.default_rng(0)
        kept: dict[int, tuple[torch.Tensor, np.ndarray[Any, Any]]] = {}
        for number in range(300):
            batch = deliver(ring, (torch.full((1500,), number), np.full(800, number)))
            if rng.random() < 0.3:
                kept[number] = batch if rng.random() < 0.5 else (batch[0][7:], batch[1][::2])
            if kept and rng.random() < 0.25:
                del kept[int(rng.choice(list(kept)))]
            if number % 20 == 0:
                assert all((t == n).all() and (a == n).all() for n, (t, a) in kept.items())
        del batch
        assert all((t == n).all() and (a == n).all() for n, (t, a) in kept.items())
        assert in_use(ring) == len(kept)
        assert ring.total < 60  # slots were used again
        kept.clear()
        assert in_use(ring) == 0

    def test_slots_in_use_are_all_different(self) -> None:
        ring = Ring(2)
        slots = [ring.take() for _ in range(9)]
        assert sorted(slots) == list(range(9)) and ring.grown == 7 and ring.in_use == 9
        for slot in slots[::2]:
            ring.give(slot)
        again = [ring.take() for _ in range(5)]
        assert sorted(slots[1::2] + again) == list(range(9)) and ring.total == 9

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
    def test_extra_slots_give_their_pages_back(self) -> None:
        ring = Ring(2)
        batches = [deliver(ring, torch.ones(1 << 18)) for _ in range(10)]  # 1 MiB each
        assert ring.total == 10 and os.fstat(ring._memory.fd).st_blocks * 512 >= 10 << 20
        batches.clear()
        assert in_use(ring) == 0
        ring.give(ring.take())
        assert os.fstat(ring._memory.fd).st_blocks * 512 <= 3 << 20
        assert ring.stats()["ring_bytes"] <= 3 * (2 << 20)
        for number in range(12):  # and are whole again when they are needed
            batches.append(deliver(ring, torch.full((1 << 18,), number)))
        assert all((b == n).all() for n, b in enumerate(batches)) and ring.total == 12

    @pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
    def test_extra_slots_give_back_what_only_a_worker_wrote(self) -> None:
        """A batch that failed in its worker was never mapped by the parent."""
        ring = Ring(1)
        slots = [ring.take() for _ in range(6)]
        worker = multiprocessing.get_context("fork").Process(target=_write_in_worker, args=(ring, slots))
        worker.start()
        worker.join()
        assert os.fstat(ring._memory.fd).st_blocks * 512 >= 6 << 20
        for slot in slots:
            ring.give(slot)
        ring.take()
        assert os.fstat(ring._memory.fd).st_blocks * 512 <= 2 << 20

    def test_slot_mapped_again_for_a_larger_batch(self) -> None:
        ring = Ring(1)
        small = deliver(ring, torch.ones(10))
        del small
        large = deliver(ring, torch.full((3 << 20,), 5.0))
        assert (large == 5).all() and ring.total == 1
        first = large[:10]
        del large
        assert in_use(ring) == 1 and (first == 5).all()

    def test_a_batch_above_the_stride_is_refused(self) -> None:
        ring = Ring(1)
        with pytest.raises(BudgetError, match="smaller batch_size"):
            ring.map(0, STRIDE + 1)

    def test_what_is_counted(self) -> None:
        ring = Ring(2)
        assert ring.stats() == {"ring_slots": 2, "ring_in_use": 0, "ring_grown": 0, "ring_copied": 0, "ring_bytes": 0}
        ring._most_extra = 3
        kept = [deliver(ring, torch.full((1 << 19,), number)) for number in range(8)]
        stats = ring.stats()
        assert (stats["ring_slots"], stats["ring_in_use"], stats["ring_grown"]) == (6, 5, 4)
        assert stats["ring_copied"] == 3 and stats["ring_bytes"] >= 5 << 22
        assert all((batch == number).all() for number, batch in enumerate(kept))

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux makes pages beforehand")
    def test_pages_are_there_before_they_are_touched(self) -> None:
        ring = Ring(2)
        ring.map(ring.take(), 5 << 20)
        assert os.fstat(ring._memory.fd).st_blocks * 512 in (0, 5 << 20)  # 0: a kernel before 5.14

    def test_parts_of_what_lies_in_the_slot_are_not_copied(self) -> None:
        ring = Ring(1)
        arena = ring.arena(ring.take())
        with arena:
            rows = empty((4, 100), torch.float32)
            rows[:] = torch.arange(4.0)[:, None]
            end = arena.nbytes
            sent = pickle.dumps(arena.pack([rows[2], rows[1:3], rows.view(torch.int32)[3], rows[:, 5]], {}))
        assert arena.nbytes == end + 64  # the last one has gaps, and is copied
        batch = pickle.loads(sent).batch
        assert [t.shape for t in batch] == [(100,), (2, 100), (100,), (4,)]
        assert (batch[0] == 2).all() and batch[1][:, 0].tolist() == [1, 2] and (batch[2].view(torch.float32) == 3).all()
        assert batch[3].tolist() == [0, 1, 2, 3]
        del batch
        assert in_use(ring) == 0

    @pytest.mark.parametrize(
        "batch",
        [
            ["a text of some length " * 300] * 3,
            [f"text {number}" for number in range(5000)],
            {f"field {number}": torch.full((2,), number) for number in range(500)},
            [np.full(number, 7, np.uint8) for number in range(300)],
        ],
        ids=["long", "many", "tensors", "arrays"],
    )
    def test_a_message_fits_into_a_pipe_in_one_piece(self, batch: Any) -> None:
        """Else a worker killed in the midst of it would leave the parent to wait for the rest."""
        ring = Ring(1)
        sent = pack(ring, batch)
        assert len(sent) < select.PIPE_BUF - 512
        delivered = pickle.loads(sent)
        assert contract.same(delivered.batch, batch) and delivered.report == {"said": "so"}
        del delivered
        assert in_use(ring) == 0

    def test_a_report_fits_into_a_pipe_in_one_piece(self) -> None:
        ring = Ring(1)
        sent = pickle.dumps(ring.arena(ring.take()).pack(None, {"failure": "a long traceback " * 10_000}))
        assert len(sent) < select.PIPE_BUF - 512
        delivered = pickle.loads(sent)
        assert delivered.batch is None and len(delivered.report["failure"]) == 170_000
        assert in_use(ring) == 0

    @pytest.mark.slow
    def test_two_rings_do_not_mix(self) -> None:
        one, two = Ring(1), Ring(1)
        sent_one, sent_two = pack(one, torch.full((9,), 1)), pack(two, torch.full((9,), 2))
        first, second = pickle.loads(sent_one).batch, pickle.loads(sent_two).batch
        assert (first == 1).all() and (second == 2).all()
        del first
        assert (in_use(one), in_use(two)) == (0, 1)

    def test_a_delivery_for_a_ring_that_is_gone(self) -> None:
        ring = Ring(1)
        sent = pack(ring, torch.ones(3))
        del ring
        gc.collect()
        with pytest.raises(WorkerError, match="closed already") as caught:
            pickle.loads(sent)
        assert isinstance(caught.value, HeadraceError)

    def test_tensors_outlive_their_ring(self) -> None:
        ring = Ring(1)
        batch = deliver(ring, torch.full((1000,), 4))
        del ring
        gc.collect()
        assert (batch == 4).all()

    @pytest.mark.slow
    def test_a_ring_ends_with_its_last_batch(self) -> None:
        ring = Ring(1)
        key = ring.key
        batch = deliver(ring, torch.ones(5))
        del ring
        gc.collect()
        del batch
        gc.collect()
        assert key not in ring_module._rings

    def test_a_delivery_that_cannot_be_unpickled_frees_its_slot(self) -> None:
        ring = Ring(1)
        sent = pack(ring, [torch.ones(500), Explodes()])
        with pytest.raises(ZeroDivisionError):
            pickle.loads(sent)
        assert in_use(ring) == 0

    @pytest.mark.slow
    def test_a_failure_instead_of_a_batch_frees_its_slot(self) -> None:
        ring = Ring(1)
        slot = ring.take()
        with pytest.raises(RuntimeError), ring.arena(slot):
            empty((100,), torch.float32).fill_(1)
            raise RuntimeError("collate failed")
        delivered = pickle.loads(pickle.dumps(ring.arena(slot).pack(None, {"failure": "so"})))
        assert delivered.batch is None
        assert in_use(ring) == 0
        assert empty((2,), torch.float32).sum().isfinite().shape == ()  # no arena is left over


class Explodes:
    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)


class TestInProcess:
    """With num_workers=0 the parent collates into a slot, and hands the tensors out as they are."""

    @pytest.mark.slow
    def test_tensors_hold_the_slot(self) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True):
            batch = [empty((20, 30), torch.float32).fill_(1), empty((0,), torch.int64)]
        assert in_use(ring) == 1
        row = batch[0][3]
        del batch
        assert in_use(ring) == 1 and (row == 1).all()
        del row
        assert in_use(ring) == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [tuple, list, dict])
    def test_who_keeps_the_labels_keeps_no_slot(self, kind: Any) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True) as arena:
            images, labels = empty((64, 500), torch.float32).fill_(1), empty((64,), torch.int64).fill_(5)
            made = dict(x=images, y=labels, z=labels) if kind is dict else kind([images, labels, labels])
        del images, labels
        batch = arena.lightened(made)
        del arena, made
        assert type(batch) is kind and in_use(ring) == 1
        images, *labels = batch.values() if kind is dict else batch
        assert labels[0] is labels[1]
        del batch, images
        assert in_use(ring) == 0 and (labels[0] == 5).all()

    def test_of_a_batch_of_anothers_kind_nothing_is_copied(self) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True) as arena:
            images, labels = empty((64, 500), torch.float32), empty((64,), torch.int64)
            point = Point(images, labels)
        assert arena.lightened(point) is point and arena.lightened(labels) is labels
        assert arena.lightened([labels[:5]])[0]._base is labels

    @pytest.mark.parametrize("layout", ["coo", "csr"])
    def test_tensors_without_a_size_in_bytes(self, layout: str) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True) as arena:
            dense = empty((4, 4), torch.float32).fill_(1)
            sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
        made = arena.lightened({"dense": dense, "sparse": sparse})
        assert made["sparse"] is sparse and torch.equal(made["sparse"].to_dense(), made["dense"])

    def test_a_batch_that_lies_elsewhere_frees_it_at_once(self) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True):
            batch = torch.ones(5)
        assert in_use(ring) == 0 and batch.sum() == 5

    def test_a_failing_collate_frees_it(self) -> None:
        ring = Ring(1)
        with pytest.raises(RuntimeError), ring_module.Arena(ring, ring.take(), leased=True):
            empty((20,), torch.float32)
            raise RuntimeError("collate failed")
        assert in_use(ring) == 0

    @pytest.mark.slow
    def test_an_abandoned_one_is_free_when_nothing_is_left_of_it(self) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True) as arena:
            half_made = empty((20,), torch.float32)
        arena.abandon()
        assert in_use(ring) == 1
        del half_made
        assert in_use(ring) == 0 and arena is not None

    def test_outside_of_an_arena_tensors_are_fresh(self) -> None:
        tensor = empty((3, 4), torch.bfloat16)
        assert tensor.shape == (3, 4) and tensor.dtype is torch.bfloat16

    def test_an_arena_is_one_threads_own(self) -> None:
        ring = Ring(1)
        made: list[torch.Tensor] = []
        with ring_module.Arena(ring, ring.take(), leased=True) as arena:
            thread = threading.Thread(target=lambda: made.append(empty((50,), torch.float32)))
            thread.start()
            thread.join()
            assert arena._end == 0 and len(made) == 1

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tensors_of_a_slot_are_aligned_and_apart(self, dtype: torch.dtype) -> None:
        ring = Ring(1)
        with ring_module.Arena(ring, ring.take(), leased=True):
            tensors = [empty((n,), dtype).fill_(n % 2) for n in (1, 3, 64, 1, 100)]
        assert all(t.data_ptr() % 64 == 0 for t in tensors)
        assert all((t == n % 2).all() for t, n in zip(tensors, (1, 3, 64, 1, 100), strict=True))
