"""The next batch travels while this one computes; none is seen before it is there, and none is
lost.

Without a GPU: `late_device.LateAccelerator` stands in for one. The real one is in test_cuda.py.
"""

import contextlib
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import IterableDataset

from headrace import create_dataloader, move_to_device
from headrace.collate.vision import Normalization
from headrace.datasets.resizing import IMAGENET
from headrace.errors import HeadraceError
from headrace.loader import device as prefetcher
from headrace.loader.device import (
    CudaPrefetcher,
    TorchAccelerator,
    Transfer,
    accelerator_of,
    transfer_to,
)
from headrace.memory.ring import Delivered
from headrace.memory.tree import tensors_of
from headrace.testing.contract import same
from tests.loader.device.late_device import LateAccelerator, is_pinned, pin
from tests.loader.device.test_transfer import structures
from tests.testing.test_contract import SquareDataset

PILE = 3 + 3 + 1  # of two batches the wait, the event and the kernel; the kernel of the one before


class Deliveries:
    """Deliveries of these batches; what is an exception is raised."""

    def __init__(self, batches: list[Any], is_ready: bool = True) -> None:
        self.rest, self.ready = list(batches), is_ready
        self.taken = 0

    def __next__(self) -> Delivered:
        if not self.rest:
            raise StopIteration
        found = self.rest.pop(0)
        self.taken += 1
        if isinstance(found, Exception):
            raise found
        if isinstance(found, Delivered):
            return found
        return Delivered(found, {"step": self.taken - 1, "samples": 1})

    def is_ready(self) -> bool:
        return self.ready and bool(self.rest)


def pinned(batch: Any) -> Any:
    return Delivered(batch, {}).pin_memory().batch


def received(way: Transfer, deliveries: Any) -> Any:
    """What the user's `next` does with a way."""
    way.await_device()
    batch = way.move(way.receive(deliveries))
    way.prefetch(deliveries)
    return batch


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateAccelerator:
    """A late accelerator at "cpu", and memory that can be pinned for it, also in torch's own
    thread.
    """
    accelerator = LateAccelerator()
    monkeypatch.setattr(prefetcher, "_STREAMED", ("cpu", "cuda"))
    monkeypatch.setattr(prefetcher, "accelerator_of", lambda device: accelerator)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    for name, value in {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # which torch 2.6 asks instead
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return accelerator


@pytest.fixture
def way(late: LateAccelerator) -> CudaPrefetcher:
    found = transfer_to("cpu")
    assert isinstance(found, CudaPrefetcher)
    return found


def rows(number: int) -> list[torch.Tensor]:
    return [torch.full((3, 2), i, dtype=torch.int32) for i in range(number)]


# --- the plain way and this one give the same bytes


def more_structures() -> list[Any]:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    return [
        *structures(),
        # views of one memory, and the same twice
        [whole, whole[0], whole[:, 1:], whole.transpose(0, 2), whole],
        whole.contiguous(memory_format=torch.contiguous_format)[None].to(
            memory_format=torch.channels_last
        ),
        {
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3),
            "flag": torch.tensor([True]),
            "half": whole.bfloat16(),
            "z": whole + 1j,
        },
        "no tensor",
        None,
    ]


def test_the_plain_way_and_the_prefetcher_give_the_same(late: LateAccelerator) -> None:
    for value in more_structures():
        plain = move_to_device(value, "cpu")
        for given in (value, pinned(value)):
            moved = received(moving(), Deliveries([given, None]))
            late.main.run()
            assert type(moved) is type(plain) and str(moved) == str(plain) and not late.hazards
            for a, b in zip(tensors_of(moved), tensors_of(plain), strict=True):
                assert a.layout == b.layout
                if a.layout is torch.strided:
                    assert same(a, b) and a.stride() == torch.empty_like(b).stride()


def test_what_can_t_be_recorded_goes_straight(late: LateAccelerator, way: CudaPrefetcher) -> None:
    dense, sparse = torch.ones(2), torch.eye(2).to_sparse()
    batch = pinned({"dense": dense, "sparse": sparse})
    deliveries = Deliveries([dense, batch])
    received(way, deliveries)
    # taken, but its copy would keep this process waiting
    assert deliveries.taken == 2 and way._started is None
    moved = received(way, deliveries)
    assert moved["sparse"] is batch["sparse"], "there already"
    late.device = torch.device("meta")
    assert received(way, Deliveries([batch]))["sparse"].device.type == "meta", "not there yet"
    assert moved["dense"] is not batch["dense"]


# --- the protocol of streams and events


def test_stream_waits_for_copy_and_records_tensors(late: LateAccelerator) -> None:
    a, b = rows(2)
    batch = {"a": a, "rest": [b, (a, "text")]}
    for given, kind in ((batch, "pageable"), (pinned(batch), "pinned")):
        late.log.clear()
        received(moving(), Deliveries([given]))
        assert late.log == [*[("copy", kind)] * 3, ("wait", "main"), *[("keep", "main")] * 3]


def test_the_source_is_held_until_the_copy_is_done(
    late: LateAccelerator, way: CudaPrefetcher
) -> None:
    late.patience = None  # no event comes by itself
    sources = [pinned(row) for row in rows(3)]
    references = [weakref.ref(source) for source in sources]
    deliveries = Deliveries(sources)
    del sources

    def alive() -> list[bool]:
        return [reference() is not None for reference in references]

    def settle() -> None:
        for event in list(way._handed):
            event.synchronize()

    received(way, deliveries)
    settle()
    late.side.run()
    assert alive() == [True, True, True], "nobody has asked yet"
    received(way, deliveries)
    assert alive() == [False, False, True]
    settle()
    received(way, deliveries)
    late.main.run()
    late.patience = 1
    way.finish()
    assert alive() == [False, False, False] and not late.hazards
    assert way.seconds() > 0


def test_stream_is_the_current_one_at_hand_over(late: LateAccelerator, way: CudaPrefetcher) -> None:
    deliveries, found = Deliveries([pinned(row) for row in rows(4)]), list[torch.Tensor]()
    streams = [late.another_stream(), late.another_stream()]
    for step in range(4):
        with late.using(streams[step % 2]):
            late.kernel(received(way, deliveries), found)
    waits = [name for kind, name in late.log if kind == "wait"]
    assert waits == ["user 1", "user 2", "user 1", "user 2"]
    for stream in reversed(streams):
        stream.run()
    assert same(sorted(found, key=lambda row: int(row[0, 0])), rows(4)) and not late.hazards


def copies(late: LateAccelerator) -> int:
    return len([entry for entry in late.log if entry[0] == "copy"])


def test_the_next_copy_is_under_way_while_this_batch_computes(
    late: LateAccelerator, way: CudaPrefetcher
) -> None:
    deliveries, found = Deliveries([pinned(row) for row in rows(5)]), list[torch.Tensor]()
    for step in range(5):
        batch = received(way, deliveries)
        assert copies(late) == min(step + 2, 5), "one ahead, and never more"
        late.kernel(batch, found)
        late.main.run()  # as a loop that asks for its loss
        late.side.run()
        assert way._started is None or way._started.done.come, "it waits for earlier copies alone"
    assert same(found, rows(5))


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_would_keep_this_process_waiting_is_left_for_later(
    late: LateAccelerator, way: CudaPrefetcher, is_ready: bool
) -> None:
    """A batch that is not there yet; one that is not pinned."""
    batches = rows(3) if is_ready else [pinned(row) for row in rows(3)]
    deliveries = Deliveries(batches, is_ready)
    for step in range(3):
        batch = received(way, deliveries)
        assert copies(late) == step + 1
        late.main.run()
        assert same(batch, rows(3)[step])


def test_batches_do_not_pile_up_on_the_device(late: LateAccelerator, way: CudaPrefetcher) -> None:
    """Each is dropped at once, before its kernel has run."""
    deliveries, found = Deliveries([pinned(row) for row in rows(40)]), list[torch.Tensor]()
    for _ in range(40):
        late.kernel(received(way, deliveries), found)
        assert len(late.main.ops) <= PILE
    late.main.run()
    assert same(found, rows(40)) and not late.hazards


# --- what is done with batches on the device


Conversion = tuple[Normalization, Any]


def converting(memory_format: Any = None, dtype: torch.dtype = torch.float32) -> Conversion:
    return Normalization(IMAGENET.means, IMAGENET.stds, dtype=dtype), memory_format


def moving(*conversion: Any) -> Transfer:
    """The transfer to the stand-in."""
    return transfer_to("cpu", *conversion)


def ways(*conversion: Any) -> list[Transfer]:
    return [moving(*conversion), Transfer(torch.device("cpu"), *conversion)]


def batches_of_images(number: int) -> list[Any]:
    """Dicts of labels, an image, a mask and a list of images: the second and the last two
    tensors are to be normalised.
    """
    made = []
    for step in range(number):
        ramp = ((torch.arange(2 * 3 * 4 * 5) + step) % 256).to(torch.uint8).reshape(2, 3, 4, 5)
        batch = {"label": torch.tensor([step, 2]), "image": ramp, "mask": ramp[:, 0], "n": step}
        made.append({**batch, "views": [ramp[0], ramp[1, :, :2]]})
    return made


NORMALIZED = (1, 3, 4)


def normalized(batch: Any, conversion: Conversion) -> Any:
    step = conversion[0]
    views = [step.normalized(view) for view in batch["views"]]
    return {**batch, "image": step.normalized(batch["image"]), "views": views}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pixels_are_normalised_on_the_device(late: LateAccelerator, dtype: Any) -> None:
    plain = batches_of_images(4)
    pinned_too = [*plain[:2], *map(pinned, plain[2:])]
    for memory_format in (torch.contiguous_format, torch.channels_last):
        conversion = converting(memory_format, dtype)
        expected = [normalized(batch, conversion) for batch in plain]
        for way in ways(*conversion):
            report = {"pixels": NORMALIZED}
            deliveries = Deliveries([Delivered(batch, report) for batch in pinned_too])
            batches = [received(way, deliveries) for _ in plain]
            late.main.run()
            assert same(batches, expected) and not late.hazards
            for batch in batches:
                assert batch["image"].is_contiguous(memory_format=memory_format)


def test_only_images_get_the_memory_format(late: LateAccelerator) -> None:
    four, sparse = torch.arange(48.0).reshape(2, 2, 3, 4), torch.eye(3).to_sparse()
    images = {"images": four, "bytes": four.to(torch.uint8)}
    others = {"volume": torch.ones(2, 3, 4, 5, 6), "rows": four[0]}
    batch = {**images, **others, "sparse": sparse}
    for way in ways(None, torch.channels_last):
        moved = received(way, Deliveries([batch]))
        late.main.run()
        assert same(moved, batch) and moved["sparse"] is sparse
        for name in images:
            assert moved[name].is_contiguous(memory_format=torch.channels_last)
        for name in others:
            assert moved[name].is_contiguous()


def test_normalising_waits_for_the_copy_and_the_user_for_it(late: LateAccelerator) -> None:
    """On the copy stream, in memory that other streams see only when it is finished."""
    late.patience = None
    plain, conversion, found = batches_of_images(2), converting(), list[torch.Tensor]()
    way = moving(*conversion)
    deliveries = Deliveries([Delivered(pinned(batch), {"pixels": NORMALIZED}) for batch in plain])
    for _ in range(2):
        late.kernel(received(way, deliveries)["image"], found)
    late.main.run()
    assert same(found, [normalized(batch, conversion)["image"] for batch in plain])
    assert not late.hazards
    kinds = [entry[0] for entry in late.log]
    assert kinds[:8] == ["copy", "copy", "convert", "copy", "copy", "convert", "copy", "convert"]
    # the user's stream waits once, and holds what it gets alone
    assert kinds[8:14] == ["wait", *["keep"] * 5]


# --- what is taken early has not been received


class Error(RuntimeError):
    """One that a weak reference may be made of."""


def test_an_early_error_and_its_iterator_hold_nothing(late: LateAccelerator) -> None:
    for is_asked_for in (False, True):
        way, deliveries = moving(), Deliveries([rows(1)[0], Error("of the next batch")])
        gone = weakref.ref(deliveries.rest[1]), weakref.ref(way)
        received(way, deliveries)
        gc.disable()
        try:
            if is_asked_for:
                with contextlib.suppress(Error):
                    received(way, deliveries)
                assert gone[0]() is None, "the error and its traceback are a circle"
            del way
            assert gone[1]() is None, "the error's traceback holds the iterator"
        finally:
            gc.enable()


def test_what_is_no_batch_is_not_copied(late: LateAccelerator, way: CudaPrefetcher) -> None:
    for report in ({"failure": ValueError("bad")}, {"exhausted": True}):
        none = Delivered(None, report)
        deliveries = Deliveries([pinned(rows(1)[0]), none, pinned(rows(2)[1])])
        received(way, deliveries)
        assert deliveries.taken == 2 and way.receive(deliveries).report is report
        batch = received(way, deliveries)
        late.main.run()
        assert same(batch, rows(2)[1])


def test_an_empty_tensor_keeps_nobody_waiting(late: LateAccelerator, way: CudaPrefetcher) -> None:
    received(way, Deliveries([rows(1)[0], pinned({"a": torch.zeros(0, 3), "b": torch.ones(2)})]))
    assert way._started is not None


@pytest.mark.parametrize("failures", [1, 2])
def test_a_full_device_is_the_error_of_its_own_batch(
    late: LateAccelerator, way: CudaPrefetcher, failures: int
) -> None:
    deliveries = Deliveries([pinned(row) for row in rows(4)])
    first = way.move(way.receive(deliveries))
    late.failures = failures
    way.prefetch(deliveries)
    late.main.run()
    assert same(first, rows(1)[0]) and deliveries.taken == 2
    if failures == 2:  # and the user has not made room either
        with pytest.raises(torch.OutOfMemoryError):
            received(way, deliveries)
    rest = [received(way, deliveries) for _ in range(2)]
    late.main.run()
    assert same(rest, rows(4)[failures : failures + 2]) and not late.hazards


# --- loaders


Make = Callable[..., Any]


@pytest.fixture
def make(late: LateAccelerator, make_loader: Make) -> Make:
    def make(dataset: Any = None, **options: Any) -> Any:
        options = {"num_workers": 1, "pin_memory": True, "device": "cpu", **options}
        options = {"batch_size": 4, "shuffle": False, "enable_monitoring": False, **options}
        return make_loader(SquareDataset() if dataset is None else dataset, **options)

    return make


def expected(dataset: Any = None, **options: Any) -> list[Any]:
    options = {"batch_size": 4, "shuffle": False, "num_workers": 0, "pin_memory": False, **options}
    return list(create_dataloader(SquareDataset() if dataset is None else dataset, **options))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_two_have_come(iterator: Any) -> None:
    awaited = iterator._deliveries._rcvd_idx
    until(lambda: {awaited, awaited + 1} <= come(iterator))


def come(iterator: Any) -> set[int]:
    """The numbers of the batches that lie ready, in their order or not."""
    ours = iterator._deliveries
    with ours._data_queue.mutex:
        queued = {number for number, _ in ours._data_queue.queue}
    return queued | {number for number, info in ours._task_info.items() if len(info) == 2}


def next_with_another_behind_it(iterator: Any) -> Any:
    """A batch, when the one after it lies ready too, so that it is taken early."""
    if iterator._transfer._early is None:
        until_two_have_come(iterator)
    else:
        until(iterator._deliveries.is_ready)
    return next(iterator)


@pytest.mark.parametrize(("workers", "pin_memory"), [(0, True), (1, False), (2, True)])
def test_loader_batches_and_counts_on_a_device(
    late: LateAccelerator, make: Make, workers: int, pin_memory: bool
) -> None:
    loader = make(num_workers=workers, pin_memory=pin_memory, shuffle=True)
    plain, found = expected(shuffle=True), list[torch.Tensor]()
    for epoch in range(2):
        loader.set_epoch(0)
        for step, batch in enumerate(loader, 1):
            assert (loader.epoch, loader.state_dict()["batches"]) == (0, step)
            assert loader.get_stats()["batches"] == epoch * len(plain) + step
            late.kernel(batch, found)
            assert len(late.main.ops) <= PILE, "this process runs ahead of the device"
            del batch
    late.main.run()
    assert same(found, plain * 2) and not late.hazards
    stats = loader.get_stats()
    assert stats["transfer_time"] >= 2 * len(plain), "a tick of the device's clock a copy"
    assert not late.living and not late.side.ops
    assert stats["ring_in_use"] == 0 and stats["ring_grown"] == 0


def test_early_batch_counts_when_received(late: LateAccelerator, make: Make) -> None:
    loader, plain = make(), expected()
    iterator = iter(loader)
    for step in range(1, 4):
        batch = next_with_another_behind_it(iterator)
        assert iterator._transfer._started is not None
        stats = loader.get_stats()
        assert loader.state_dict()["batches"] == stats["batches"] == step
        assert stats["samples"] == 4 * step and len(iterator) == len(plain) - step
        assert stats["queued_batches"] == iterator.pool.dispatch.handed_out - step >= 1
        late.main.run()
        assert same(batch, plain[step - 1])
    state = loader.state_dict()
    del iterator
    other = make(num_workers=0)
    other.load_state_dict(state)
    rest = list(other)
    late.main.run()
    assert same(rest, plain[3:])


@pytest.mark.parametrize("persistent", [True, False])
def test_an_early_break_leaves_nothing(late: LateAccelerator, make: Make, persistent: bool) -> None:
    loader, plain = make(persistent_workers=persistent), expected()
    for _ in range(2):
        loader.set_epoch(0)
        iterator = iter(loader)
        batch = next_with_another_behind_it(iterator)
        early = weakref.ref(iterator._transfer._early.batch)
        assert late.living == 2
        del iterator
        assert early() is None and late.living == 1 and not late.side.ops
        late.main.run()
        assert same(batch, plain[0]) and loader.state_dict()["batches"] == 1
        del batch
    assert not late.hazards


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def test_the_wait_for_a_device_that_hangs_can_be_interrupted(
    late: LateAccelerator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, plain, late.patience = make(num_workers=0), expected(), None
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]
    with monkeypatch.context() as patch:
        patch.setattr(prefetcher.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert loader.state_dict()["batches"] == 2
    late.patience = 1
    found += iterator
    late.main.run()
    assert same(found, plain), "no batch is lost"


def test_a_bad_sample_is_the_error_of_its_own_batch(late: LateAccelerator, make: Make) -> None:
    loader, plain = make(SquareDataset(bad=[5])), expected()
    iterator = iter(loader)
    first = next_with_another_behind_it(iterator)
    assert iterator._transfer._early is not None and loader.get_stats()["errors"] == 0
    with pytest.raises(OSError, match="sample 5"):
        next(iterator)
    assert loader.state_dict()["batches"] == 1
    rest = list(iterator)
    late.main.run()
    assert same([first, *rest], [plain[0], *plain[2:]])
    assert loader.state_dict()["batches"] == len(plain)


def test_a_worker_that_dies_while_a_batch_is_taken_early(
    late: LateAccelerator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = SquareDataset()
    loader, plain = make(dataset), expected(dataset)
    iterator = iter(loader)
    until_two_have_come(iterator)

    def dies_now(deliveries: Any) -> bool:
        os.kill(deliveries.workers[0].pid, signal.SIGKILL)
        deliveries.workers[0].join(60)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(type(iterator._deliveries), "is_ready", dies_now)
        first = next(iterator)
    late.main.run()
    assert same(first, plain[0]) and loader.state_dict()["batches"] == 1
    with pytest.raises(HeadraceError, match="a worker died"):
        list(iterator)  # with what had come before
    batches = list(loader)  # with new workers
    late.main.run()
    assert same(batches, plain)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_stream_of_unknown_length_ends_in_its_turn(late: LateAccelerator, make: Make) -> None:
    options = {"shuffle": None, "num_workers": 2}
    loader, plain = make(Counting(), **options), expected(Counting(), **options)
    for _ in range(2):
        found = list(loader)
        late.main.run()
        assert same(found, plain)
        assert loader.state_dict()["batches"] == len(plain)


class Slow(SquareDataset):
    """The second batch waits for a file."""

    def __init__(self, go: Path) -> None:
        super().__init__()
        self.go = go

    def decode(self, record: bytes) -> Any:
        value = super().decode(record)
        while value[0] == 5 and not self.go.exists():
            time.sleep(0.01)
        return value


def test_a_batch_that_came_before_a_slower_one_is_not_the_next(
    late: LateAccelerator, make: Make, tmp_path: Path
) -> None:
    loader, plain = make(Slow(tmp_path / "go"), num_workers=2, timeout=60), expected()
    iterator = iter(loader)
    until(lambda: come(iterator) == {0, 2})  # 1 and 3 are the other worker's
    assert iterator._deliveries.is_ready()
    batches = [next(iterator)]
    assert not iterator._deliveries.is_ready() and iterator._transfer._early is None
    (tmp_path / "go").touch()
    batches.append(next(iterator))
    assert iterator._transfer._early is not None, "that one lay behind the slower one in the queue"
    batches += iterator
    late.main.run()
    assert same(batches, plain)


# --- devices


def test_devices_without_streams_go_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "meta", "mps", torch.device("cpu")):
        assert type(transfer_to(device)) is Transfer
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert type(transfer_to("cuda")) is Transfer, "torch says best what is the matter"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # without asking the device for anything
    assert isinstance(transfer_to("cuda:1"), CudaPrefetcher)


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mock.Mock()
    module.current_device.return_value = 1
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    prefetcher._accelerator.cache_clear()
    try:
        first, second, third = map(accelerator_of, map(torch.device, ("cuda", "cuda:1", "cuda:0")))
        assert first is second is not third, "one a device"
        assert isinstance(first, TorchAccelerator) and first.device == torch.device("cuda", 1)
        assert [call.args[0].index for call in module.Stream.call_args_list] == [1, 0]
    finally:
        prefetcher._accelerator.cache_clear()
