"""Ranks with different loaders are told so, and none waits for a rank that has none."""

import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from headrace import ConfigError, create_dataloader
from headrace.loader import ranks as agreement
from headrace.order import EpochOrder
from tests.testing.test_contract import SquareDataset

Body = Callable[[int, Callable[[], None]], Any]
LIMIT = 60  # seconds that ranks are given in all


def ranks(world_size: int, body: Body) -> list[Any]:
    """What `body(rank, barrier)` returns, or the text of the ConfigError that it raises, on each
    rank of a real process group.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(world_size)
    address, results = context.SimpleQueue(), context.SimpleQueue()
    limit = timedelta(seconds=LIMIT)

    def run(rank: int) -> None:
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        port = 0 if rank == 0 else address.get()
        is_first = rank == 0
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, is_first, limit, wait_for_workers=False
        )
        for _ in range(world_size - 1 if is_first else 0):
            address.put(store.port)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        try:
            said = body(rank, lambda: barrier.wait(LIMIT) and None)
        except ConfigError as error:
            said = str(error)
        results.put((rank, said))
        barrier.wait(LIMIT)  # rank 0 holds the store

    processes = [context.Process(target=run, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + LIMIT
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        assert [process.exitcode for process in processes] == [0] * world_size
        found = dict(results.get() for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(world_size)]


def loader(**options: Any) -> Any:
    given = {"batch_size": 4, "num_workers": 0, "enable_monitoring": False, **options}
    given = {"seed": 7, "collate_fn": "list", **given}
    return create_dataloader(given.pop("dataset", None) or SquareDataset(), **given)


def heard(options: dict[str, Any]) -> str:
    """What a rank says of a loader: the number of its batches, or why there are none."""
    try:
        return str(len(list(loader(**options))))
    except ConfigError as error:
        return str(error)


def differing(*cases: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """What the ranks say of each case, options by rank, one rank after the other."""

    def body(rank: int, barrier: Callable[[], None]) -> list[str]:
        said = []
        for options in cases:
            for turn in range(len(options)):
                if turn == rank:
                    said.append(heard(options[rank]))
                barrier()
        return said

    return list(zip(*ranks(len(cases[0]), body), strict=True))


# -- who differs


def test_equal_loaders_pass() -> None:
    small = {"dataset": TensorDataset(torch.arange(10))}
    assert differing([{}, {}, {}], [small] * 3) == [("4",) * 3, ("1",) * 3]


BLOCK = {"shuffle": "block"}
SQUARES, NUMBERS = SquareDataset(), TensorDataset(torch.arange(10))
DIFFERING: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"dataset": NUMBERS},
        {"dataset": TensorDataset(torch.arange(9)), "batch_size": 2, "drop_last": True},
        [
            "length is 10 on rank 0, 9 on rank 1",
            "'TensorDataset:10' on rank 0, 'TensorDataset:9' on rank 1",
            "batch_size is 4 on rank 0, 2 on rank 1",
            "drop_last is False on rank 0, True on rank 1",
        ],
    ),
    (BLOCK, {"shuffle": False}, ["shuffle is 'block' on rank 0, False on rank 1", "interleave is"]),
    (BLOCK | {"turns": 2}, BLOCK | {"turns": 3}, ["turns is 2 on rank 0, 3 on rank 1. "]),
    ({"weights": [1.0] * 42}, {}, ["shuffle is 'weights' on rank 0, True on rank 1"]),
    ({"pad": True}, {"pad": False}, ["epochs: pad is True on rank 0, False on rank 1. "]),
    ({"seed": 7}, {"seed": 8}, ["seed is 7 on rank 0, 8 on rank 1. "]),
    (
        {"dataset": SQUARES.subset(range(10))},
        {"dataset": SQUARES.subset(range(1, 11))},
        ["epochs: fingerprint is '"],
    ),
]


def test_what_differs_is_said() -> None:
    said = differing(*([one, other] for one, other, _ in DIFFERING))
    for (first, text), (_, _, parts) in zip(said, DIFFERING, strict=True):
        assert first.isdecimal(), "it has nobody to differ from"
        assert text.startswith("the ranks have different loaders, or epochs: ")
        assert [part for part in parts if part not in text] == []


# -- epochs


def resume_alone(rank: int, built: Any) -> None:
    if rank == 1:
        built.load_state_dict({**built.state_dict(), "batches": 1, "samples": 8})


def name_another_epoch(rank: int, built: Any) -> None:
    built.set_epoch(rank)


def test_another_order_is_said() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> int:
        if rank == 1:
            original = EpochOrder.__getitem__
            EpochOrder.__getitem__ = lambda order, at: original(order, at) ^ 1  # type: ignore
        built = loader()
        if rank == 1:
            barrier()
        count = len(list(built))
        if rank == 0:
            barrier()
        return count

    first, text = ranks(2, body)
    assert first == 6 and "order is [" in text


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (name_another_epoch, "epochs: epoch is 0 on rank 0, 1 on rank 1. "),
        (resume_alone, "position is 'batch 0' on rank 0, 'batch 1' on rank 1. "),
    ],
)
def test_other_epochs_and_positions_are_said(prepare: Any, said: str) -> None:
    def body(rank: int, barrier: Callable[[], None]) -> int:
        built = loader()
        prepare(rank, built)
        if rank == 1:
            barrier()
        iterator = iter(built)
        count = len([next(iterator), next(iterator)])
        if rank == 0:
            barrier()
        return count + len(list(iterator))

    first, text = ranks(2, body)
    assert first == 6 and said in text


def test_look_at_one_batch_by_one_rank_is_no_epoch() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> list[int]:
        built = loader()
        if rank == 1:
            next(iter(built))
        counts = []
        for epoch in range(3):
            built.set_epoch(epoch)
            counts.append(len(list(built)))
            barrier()
        return counts

    assert ranks(2, body) == [[6] * 3] * 2


def test_look_at_one_batch_by_all_ranks_is_no_epoch() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> list[int]:
        built = loader()
        next(iter(built))
        return [len(list(built)) for _ in range(3)]

    assert ranks(2, body) == [[6] * 3] * 2


# -- who is not compared


def test_loaders_of_a_rank_s_own_are_not_compared() -> None:
    """Those with given ranks, and those with a sampler."""
    given = [{"seed": rank, "rank": rank, "world_size": 2} for rank in range(2)]
    alone = {"rank": 0, "world_size": 1}
    lengths = [{"dataset": TensorDataset(torch.arange(n)), **alone} for n in (4, 5)]
    samplers = [{"sampler": range(10 + 10 * rank), "seed": rank} for rank in range(2)]
    assert differing(given, lengths, samplers) == [("6", "6"), ("1", "2"), ("3", "5")]


def test_group_of_another_size_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    built = loader()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert len(list(built)) == 4
    finally:
        dist.destroy_process_group()


# -- who builds what, and when


def test_loader_of_one_rank_alone_waits_for_nobody() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> list[int]:
        counts = []
        warnings.simplefilter("error")
        if rank == 0:
            validation = loader(seed=99, dataset=TensorDataset(torch.arange(50)))
            counts = [len(list(validation)), len(list(validation))]
        barrier()
        built = [loader(batch_size=size) for size in (2, 3)]  # two at one place
        barrier()
        return [*counts, *(len(list(one)) for one in built)]

    assert ranks(2, body) == [[7, 7, 11, 7], [11, 7]]


def test_late_group_is_asked_at_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    def body(rank: int, barrier: Callable[[], None]) -> Any:
        store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
        barrier()  # the other rank may still be connecting
        dist.destroy_process_group()
        monkeypatch.setenv("RANK", str(rank))
        built = loader(seed=rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        try:
            return len(list(built))
        finally:
            barrier()

    assert sorted("seed is " in str(said) for said in ranks(2, body)) == [False, True]


# -- a store that fails


def test_a_store_that_does_not_answer_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE", 0.5)

    def body(rank: int, barrier: Callable[[], None]) -> Any:
        pids = dist.distributed_c10d._get_default_store()
        pids.set(f"pid{rank}", str(os.getpid()))
        barrier()
        if rank == 0:  # it holds the store, and is stopped
            barrier()
            return None
        holder = int(pids.get("pid0"))
        os.kill(holder, signal.SIGSTOP)
        try:
            while psutil.Process(holder).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                counts = [len(list(loader(seed=rank))) for _ in range(2)]
        finally:
            os.kill(holder, signal.SIGCONT)
        barrier()
        return counts, [str(one.message) for one in caught]

    counts, said = ranks(2, body)[1]
    assert counts == [4 + 2, 4 + 2] and len(said) == 1
    assert "no answer within 0.5 s" in said[0]


class Failing:
    """A store that fails after so many calls."""

    def __init__(self, after: int) -> None:
        self.left, self.store = after, dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("connection reset")
        return getattr(self.store, name)


def test_a_store_that_fails_is_said_once_it_was_there_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for after, warned in ((0, ["connection reset"]), (1, [])):
        store = Failing(after)
        monkeypatch.setattr(agreement, "_store", lambda *_, store=store: store)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            built = loader()
            assert len(list(built)) == len(list(built)) == 6
        assert re.findall("connection reset", str([one.message for one in caught])) == warned
