"""find_max_batch_size finds the largest that fits."""

from __future__ import annotations

import errno
import gc
import logging
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from headrace import BudgetError, ConfigError, HeadraceWarning, find_max_batch_size
from headrace.memory.limits import Limit
from headrace.profiling import tune
from headrace.profiling.tune import HostRoom, _Search, is_out_of_memory, peak_during

GPU = "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.15 GiB total capacity)"


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError(GPU)


class Step:
    """A training step on a device with room for so many samples."""

    def __init__(self, room: int, error: Callable[[], BaseException] = out_of_memory) -> None:
        self.room, self.error, self.sizes = room, error, list[int]()

    def __call__(self, size: int) -> None:
        self.sizes.append(size)
        if size > self.room:
            raise self.error()


class Boundless:
    """A host where everything fits."""

    taken = (1, 2)

    def run(self, size: int, function: Callable[[], None]) -> int:
        function()
        return 0

    def most(self, size: int) -> int:
        return size


@pytest.fixture
def real() -> None:
    """For tests that want all of it."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without a collection of garbage after each size, which takes a tenth of a second among so
    many tests, and a thread beside it.
    """
    if "real" not in request.fixturenames:
        monkeypatch.setattr(tune, "free_caches", lambda: None)
        monkeypatch.setattr(tune, "HostRoom", lambda _: Boundless())


# --- the search -----------------------------------------------------------------------------------

relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)


@relaxed
@given(
    room=st.integers(1, 300),
    start=st.integers(1, 300),
    multiple=st.integers(1, 9),
    limit=st.integers(300, 400) | st.just(None),
)
@example(room=63, start=64, multiple=1, limit=None)
@example(room=300, start=300, multiple=1, limit=300)
def test_it_is_the_largest_that_fits(
    room: int, start: int, multiple: int, limit: int | None
) -> None:
    step = Step(room)
    expected = min(room, limit or room) // multiple * multiple
    if not expected:
        with pytest.raises(BudgetError):
            find_max_batch_size(step, start, limit, multiple_of=multiple)
        return
    assert find_max_batch_size(step, start, limit, multiple_of=multiple) == expected
    assert all(size % multiple == 0 for size in step.sizes)
    assert not limit or max(step.sizes) <= limit
    # an optimizer's state comes with the first step, and is there in the second
    assert all(step.sizes.count(size) == (2 if size <= room else 1) for size in step.sizes)


def test_every_true_size_is_found_in_few_steps() -> None:
    for room in [*range(1, 301), 777_777]:
        step = Step(room)
        assert find_max_batch_size(step) == room
        assert len(set(step.sizes)) <= 2 + 2 * math.ceil(math.log2(max(room, 64)))


def test_what_fits_once_but_not_twice_does_not_fit() -> None:
    held: set[int] = set()

    def step(size: int) -> None:
        # the optimizer's state, made at the end of the first step
        if size > 100 - (20 if held else 0):
            raise torch.OutOfMemoryError(GPU)
        held.add(1)

    assert find_max_batch_size(step, start=90) == 80


def test_limits_end_it() -> None:
    step = Step(10**9)
    assert find_max_batch_size(step, start=64, limit=100) == 100
    assert step.sizes == [64, 64, 100, 100]
    with pytest.warns(HeadraceWarning, match="check that the step uses its size") as warned:
        assert find_max_batch_size(lambda size: None) == 1 << 20
    assert warned[0].filename == __file__


def test_not_even_one_is_an_error_that_says_why() -> None:
    step = Step(0)
    with pytest.raises(BudgetError, match="CUDA out of memory") as caught:
        find_max_batch_size(step)
    assert step.sizes == [64, 32, 16, 8, 4, 2, 1]
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(BudgetError, match="batch of 8"):
        find_max_batch_size(Step(7), multiple_of=8)


@pytest.mark.usefixtures("real")
def test_arguments_that_make_no_sense() -> None:
    step = Step(10)
    rows: list[tuple[dict[str, Any], str]] = [
        ({"step": 64}, "step"),
        ({"start": 0}, "start"),
        ({"start": 2.0}, "start"),
        ({"start": True}, "start"),
        ({"limit": 0}, "limit"),
        ({"limit": 63}, "limit=63"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"start": 1, "limit": 7, "multiple_of": 8}, "multiple_of=8"),
        ({"reset": 3}, "reset"),
        ({"max_memory_usage": 0}, "max_memory_usage"),
        ({"max_memory_usage": "much"}, "max_memory_usage"),
    ]
    for options, word in rows:
        with pytest.raises(ConfigError, match=word):
            find_max_batch_size(**{"step": step, **options})
    assert not step.sizes


# --- what counts as out of memory -----------------------------------------------------------------


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except (RuntimeError, MemoryError) as error:
        return error
    raise AssertionError("a petabyte")


def wrapped() -> BaseException:
    error = ValueError("the step failed")
    error.__cause__ = ValueError("again")
    error.__cause__.__cause__ = torch.OutOfMemoryError(GPU)
    return error


MESSAGES = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a ...",
    "MPS backend out of memory (MPS allocated: 17.98 GB, max allowed: 18.13 GB)",
    "Invalid buffer size: 32.00 GB",
    "unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)",
)


def test_it_backs_off() -> None:
    errors = [
        torch.OutOfMemoryError(GPU),
        torch.cuda.OutOfMemoryError(GPU),
        MemoryError(),
        BudgetError("the batch ring needs 9 GB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        caught(lambda: torch.empty(1 << 50)),
        caught(lambda: np.empty(1 << 55)),
        wrapped(),
        *map(RuntimeError, MESSAGES),
    ]
    for error in errors:
        assert is_out_of_memory(error), error
        assert find_max_batch_size(Step(37, lambda error=error: error)) == 37


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_any_other_error_passes_with_the_size(error: BaseException) -> None:
    step, resets = Step(100, lambda: error), list[int]()
    with pytest.raises(type(error)) as caught:
        find_max_batch_size(step, reset=lambda: resets.append(step.sizes[-1]))
    assert caught.value is error and step.sizes == [64, 64, 128]
    if isinstance(error, Exception):
        assert error.__notes__ == ["headrace: in find_max_batch_size, with a batch size of 128"]
        assert resets == [64, 128]
    assert any(entry.name == "__call__" for entry in caught.traceback), "it shows the step"


# --- what is left behind --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_tensors_of_what_did_not_fit_are_freed() -> None:
    alive: list[weakref.ref[Any]] = []
    kept: list[BaseException] = []

    class Activations:
        pass

    def forward(size: int) -> None:
        mine = Activations()
        mine.circle = mine  # type: ignore[attr-defined]
        assert not any(ref() for ref in alive), "those of the last step are still there"
        alive.append(weakref.ref(mine))
        if size > 20:
            error = torch.OutOfMemoryError(GPU)
            kept.append(error)  # as a logger or a debugger may
            raise error

    def step(size: int) -> Activations:
        gc.collect()
        outer = Activations()
        try:
            forward(size)
        except RuntimeError as error:
            kept.append(ValueError("again"))
            raise kept[-1] from error
        return outer

    assert find_max_batch_size(step, start=20, limit=24) == 20
    gc.collect()
    assert len(kept) == 6 and not any(ref() for ref in alive)


@pytest.mark.usefixtures("real")
def test_generators_are_restored_and_reset_is_called(caplog: pytest.LogCaptureFixture) -> None:
    """And it logs what it tries."""
    calls: list[Any] = []

    def step(size: int) -> None:
        calls.append(size)
        torch.rand(3), random.random(), np.random.rand()
        if size > 5:
            raise torch.OutOfMemoryError(GPU)

    def reset() -> None:
        calls.append("reset")

    drawn = []
    for tunes in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if tunes:
            with caplog.at_level(logging.INFO, "headrace.profiling"):
                assert find_max_batch_size(step, start=4, limit=8, reset=reset) == 5
        drawn.append((torch.rand(1), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
    assert calls == [4, 4, "reset", 8, "reset", 6, "reset", 5, 5, "reset"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("batch size 4: runs; the process has grown by ")
    assert lines[1] == f"batch size 8: OutOfMemoryError: {GPU}" and lines[-1].endswith(": 5")


# --- a host that kills ----------------------------------------------------------------------------


class Host:
    """A host on which a step takes `fixed` bytes and `each` for a sample; one that takes more
    than is free is killed.
    """

    def __init__(
        self, free: int, each: int, fixed: int = 0, keeps: float = 0.0, usage: Any = 1.0
    ) -> None:
        self.free, self.each, self.fixed, self.keeps = free, each, fixed, keeps
        self.base = self.now = 50_000
        self.sizes: list[int] = []
        self.room = HostRoom(usage, limits=self.limits, own=lambda: self.now, peak=self.peak)

    def limits(self) -> list[Limit]:
        used = 10**9 - self.free + self.now - self.base
        return [Limit("wide", 10**12, 0), Limit("cgroup v2 /job memory.max", 10**9, used)]

    def peak(self, run: Callable[[], None]) -> int:
        run()
        taken = self.fixed + self.each * self.sizes[-1]
        assert taken <= self.free, f"killed at {self.sizes[-1]}"
        self.now = self.base + int(taken * self.keeps)  # what its allocator does not give back
        return self.base + taken

    def largest(self, start: int, step: Any = None) -> int:
        return _Search(step or self.sizes.append, None, 1, self.room).largest(start, 1 << 20)


@relaxed
@given(
    true=st.integers(64, 100_000),
    each=st.integers(1, 100),
    fixed=st.integers(0, 1000),
    keeps=st.sampled_from([0.0, 0.5, 1.0]),
    start=st.integers(2, 64),
)
def test_what_would_be_killed_is_not_tried(
    true: int, each: int, fixed: int, keeps: float, start: int
) -> None:
    host = Host(true * each + fixed * each, each, fixed * each, keeps)
    with pytest.warns(HeadraceWarning, match="was not tried"):
        found = host.largest(start)
    assert true - true // 32 - 1 <= found <= true and len(set(host.sizes)) <= 2 + 3 * 20


def test_devices_and_neighbours_end_it_too() -> None:
    host, device = Host(10**8, 1), Step(5000)

    def both(size: int) -> None:
        host.sizes.append(size)
        device(size)

    assert host.largest(64, both) == 5000
    host = Host(10**6, 10)

    def beside_others(size: int) -> None:
        host.sizes.append(size)
        if size >= 512:
            host.free = 5200

    with pytest.warns(HeadraceWarning, match="512 runs; 1024 was not tried"):
        assert host.largest(64, beside_others) == 512


def test_the_user_says_how_much_may_be_taken() -> None:
    usages: dict[Any, int] = {0.5: 500, 1.0: 1000, 200_000: 200, "300kB": 300, "5GB": 1000}
    for usage, expected in usages.items():
        with pytest.warns(HeadraceWarning):
            found = Host(1_000_000, 1000, keeps=1.0, usage=usage).largest(16)
        assert expected - expected // 32 - 1 <= found <= expected


def test_ranks_of_a_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(HeadraceWarning):
        assert 242 <= Host(1_000_000, 1000).largest(16) <= 250


def test_the_peak_of_a_process_is_seen_after_it_is_gone() -> None:
    def run() -> None:
        block = np.ones(300_000_000, np.uint8)
        assert block[-1] == 1

    before = peak_during(lambda: None)
    # what tests before left may be freed meanwhile
    assert before + 200_000_000 <= peak_during(run)
    with pytest.raises(ZeroDivisionError):
        peak_during(lambda: print(1 / 0))


@pytest.mark.cuda
@pytest.mark.usefixtures("real")
def test_a_real_device() -> None:
    free, _ = torch.cuda.mem_get_info()
    nbytes = free // 1000  # a sample
    weight = torch.ones(1, device="cuda", requires_grad=True)

    def step(size: int) -> None:
        batch = torch.ones(size, nbytes // 4, device="cuda")
        (batch * weight).sum().backward()

    before = torch.cuda.memory_allocated()
    found = find_max_batch_size(step, start=16)
    assert 300 < found < 510, "batch and product: two of each sample at least"
    assert torch.cuda.memory_allocated() - before < 1 << 20
    step(found)
    with pytest.raises(torch.OutOfMemoryError):
        step(found * 2)
