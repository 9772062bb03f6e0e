"""Ranks that build different loaders are told so, and none waits for a rank that builds none."""

import logging
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
from headrace.loader.distributed import agreement
from headrace.order import EpochOrder
from tests.testing.test_contract import SquareDataset

Body = Callable[[int, Callable[[], None]], Any]
LIMIT = 60  # seconds that ranks are given in all


def ranks(world_size: int, body: Body) -> list[Any]:
    """What `body(rank, barrier)` returns, or the text of the ConfigError that it raises, on each
    rank of a real process group.
    """
    context = multiprocessing.get_context("fork")
    barrier, address, results = (
        context.Barrier(world_size),
        context.SimpleQueue(),
        context.SimpleQueue(),
    )

    def run(rank: int) -> None:
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        port = 0 if rank == 0 else address.get()
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world_size,
            rank == 0,
            timedelta(seconds=LIMIT),
            wait_for_workers=False,
        )
        for _ in range(world_size - 1 if rank == 0 else 0):
            address.put(store.port)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT)
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
    given = {"batch_size": 4, "num_workers": 0, "seed": 7, "collate_fn": "list", **options}
    return create_dataloader(given.pop("dataset", None) or SquareDataset(), **given)


def differing(options: list[dict[str, Any]]) -> list[str]:
    """What each rank says, when all have built their loaders before one begins its epoch."""

    def body(rank: int, barrier: Callable[[], None]) -> str:
        said = ""
        try:
            built = loader(**options[rank])
        except ConfigError as error:
            said = str(error)
        barrier()
        return said or str(len(list(built)))

    return ranks(len(options), body)


# -- who differs


def test_equal_loaders_pass() -> None:
    assert differing([{}, {}, {}]) == ["4"] * 3
    assert differing([{"dataset": TensorDataset(torch.arange(10))}] * 2) == ["2"] * 2


def test_another_seed_is_said_on_every_rank() -> None:
    for said in differing([{}, {"seed": 8}]):
        assert said.startswith(
            "the ranks build different loaders: seed is 7 on rank 0, 8 on rank 1. "
        )
        assert "pass rank= and world_size=" in said


def test_the_ranks_that_differ_are_listed() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> str:
        built, said = None, ""
        for turn in range(3):  # one after the other, the one that differs last
            if turn == rank:
                try:
                    built = loader(seed=8 if rank == 2 else 7)
                except ConfigError as error:
                    said = str(error)
            barrier()
        return said or str(len(list(built)))

    assert all(
        "different loaders: seed is 7 on ranks 0, 1, 8 on rank 2. " in said
        for said in ranks(3, body)
    )


def test_who_has_not_been_heard_yet_is_said() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> None:
        if rank == 1:
            barrier()
        if rank < 2:
            loader(seed=rank)
        if rank != 1:
            barrier()

    assert (
        "seed is 0 on rank 0, 1 on rank 1 (of 3 ranks 2 have been heard so far)"
        in ranks(3, body)[1]
    )


def test_everything_that_differs_is_said() -> None:
    other = {
        "dataset": TensorDataset(torch.arange(9)),
        "batch_size": 2,
        "drop_last": True,
        "pad": False,
    }
    for said in differing([{"dataset": TensorDataset(torch.arange(10))}, other]):
        assert (
            "length is 10 on rank 0, 9 on rank 1; fingerprint is 'TensorDataset:10' on rank 0, "
            "'TensorDataset:9' on rank 1; " in said
        )
        assert (
            "batch_size is 4 on rank 0, 2 on rank 1; drop_last is False on rank 0, True on rank "
            "1; pad is True on rank 0" in said
        )


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            {"shuffle": "block"},
            {"shuffle": False},
            "shuffle is 'block' on rank 0, False on rank 1; interleave is ",
        ),
        (
            {"shuffle": "block", "turns": 2},
            {"shuffle": "block", "turns": 3},
            "loaders: turns is 2 on rank 0, 3 on rank 1. ",
        ),
        (
            {"shuffle": "block", "interleave": 2},
            {"shuffle": "block", "interleave": 1},
            "loaders: interleave is 2 on rank 0, 1 on rank 1. ",
        ),
        ({"weights": [1.0] * 42}, {"weights": [2.0] + [1.0] * 41}, "loaders: weights is '"),
        ({"weights": [1.0] * 42}, {}, "loaders: shuffle is 'weights' on rank 0, True on rank 1; "),
    ],
)
def test_another_order_is_said(one: dict[str, Any], other: dict[str, Any], said: str) -> None:
    assert [said in text for text in differing([one, other])] == [True, True]


def test_other_data_of_the_same_length_are_said() -> None:
    data = SquareDataset()
    said = differing([{"dataset": data.subset(range(10))}, {"dataset": data.subset(range(1, 11))}])
    assert all("loaders: fingerprint is '" in text and "length" not in text for text in said)


# -- epochs


def in_step(built: Any, barrier: Callable[[], None]) -> str:
    """How many batches a rank gets, or what it says, when it takes the first three in step with
    the others.
    """
    received, said = 0, ""
    try:
        for _ in built:
            received += 1
            if received < 4:
                barrier()
    except ConfigError as error:
        said = str(error)
    for _ in range(received, 3):
        barrier()
    return said or str(received)


def resume_alone(rank: int, built: Any) -> None:
    if rank == 1:
        built.load_state_dict({**built.state_dict(), "batches": 1, "samples": 8})


def compute_another_order(rank: int, built: Any) -> None:
    if rank == 1:
        original = EpochOrder.__getitem__
        EpochOrder.__getitem__ = lambda order, positions: original(order, positions) ^ 1  # type: ignore


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (
            lambda rank, built: built.set_epoch(rank),
            "the ranks begin different epochs: epoch is 0 on rank 0, 1 on rank 1; order is ",
        ),
        (
            resume_alone,
            "the ranks begin different epochs: position is 'batch 0' on rank 0, 'batch 1' on rank "
            "1. ",
        ),
        (compute_another_order, "the ranks begin different epochs: order is '["),
    ],
)
def test_other_epochs_positions_and_orders_are_said(prepare: Any, said: str) -> None:
    def body(rank: int, barrier: Callable[[], None]) -> str:
        built = loader()
        prepare(rank, built)
        return in_step(built, barrier)

    assert all(text.startswith(said) for text in ranks(2, body))


def test_look_at_one_batch_by_one_rank_is_no_epoch() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> list[str]:
        built = loader()
        if rank == 1:
            next(iter(built))
        said = []
        for epoch in range(3):
            built.set_epoch(epoch)
            said.append(in_step(built, barrier))
        return said

    assert ranks(2, body) == [["6"] * 3] * 2


def test_loaders_of_two_lines_are_warned_of() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make = [
                lambda: loader(),
                lambda: loader(),
            ]
            built = make[rank]()
            in_step(built, barrier)
        return [str(one.message) for one in caught]

    said = [text for texts in ranks(2, body) for text in texts]
    lines = [
        re.findall(r"test_agreement\.py:\d+, called at test_agreement\.py:(\d+)", text)
        for text in said
    ]
    assert said and all(abs(int(one) - int(other)) == 1 for one, other in lines)


# -- who is not compared


def test_given_ranks_are_not_compared() -> None:
    options = [{"seed": rank, "rank": rank, "world_size": 2} for rank in range(2)]
    assert differing(options) == ["6", "6"]
    assert differing(
        [
            {"dataset": TensorDataset(torch.arange(4 + rank)), "rank": 0, "world_size": 1}
            for rank in range(2)
        ]
    ) == ["1", "2"]


def test_a_sampler_of_one_s_own_is_not_compared() -> None:
    assert differing([{"sampler": range(10 + 10 * rank), "seed": rank} for rank in range(2)]) == [
        "3",
        "5",
    ]


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


def test_a_rank_that_is_late_is_heard_in_the_midst_of_the_epoch() -> None:
    def body(rank: int, barrier: Callable[[], None]) -> Any:
        received = []
        if rank == 1:
            barrier()
        try:
            for batch in loader(batch_size=1, seed=7 + rank):
                received.append(batch)
                if rank == 0 and len(received) == 3:
                    barrier()  # now the other one begins
                    barrier()
        except ConfigError as error:
            if rank == 1:
                barrier()
            return len(received), "seed is 7 on rank 0, 8 on rank 1" in str(error)

    # the 2nd batch was too early, the 6th is the next that asks
    assert ranks(2, body) == [(5, True), (0, True)]


def test_late_group_is_asked_at_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    def body(rank: int, barrier: Callable[[], None]) -> Any:
        store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        monkeypatch.setenv("RANK", str(rank))
        built = loader(seed=rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        for found in range(2):
            try:
                iter(built)
            except ConfigError as error:
                assert "seed is 0 on rank 0, 1 on rank 1" in str(error)
                found += 10
            barrier()
        return found

    first, second = ranks(2, body)
    assert {first, second} <= {1, 11} and 11 in (first, second)


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

    said = (
        "the store of the process group did not answer within 0.5 s; that all ranks build the "
        "same loader has not been checked"
    )
    assert ranks(2, body)[1] == ([4 + 2, 4 + 2], [said])


def test_a_store_that_fails_is_said_once_it_was_there_it_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def __init__(self, after: int) -> None:
            self.left, self.store = after, dist.HashStore()

        def __getattr__(self, name: str) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("connection reset")
            return getattr(self.store, name)

    for after, warned in ((0, 1), (4, 0)):
        store = Failing(after)
        monkeypatch.setattr(agreement, "_store", lambda *_, store=store: store)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with (
            warnings.catch_warnings(record=True) as caught,
            caplog.at_level(logging.INFO, "headrace.loader"),
        ):
            warnings.simplefilter("always")
            assert len(list(loader())) == 6
        assert [str(one.message)[:55] for one in caught] == [
            "the store of the process group failed: connection reset"
        ] * warned
    assert ["is gone" in record.message for record in caplog.records] == [True]


# -- a rank that there can't be


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_outside_of_the_world_is_refused(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            rf"rank must be in \[0, world_size\), got rank={world_size} with "
            rf"world_size={world_size}"
        ),
    ):
        loader(rank=world_size, world_size=world_size)
    monkeypatch.setenv("RANK", str(world_size))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(ConfigError, match=r"RANK must be in \[0, WORLD_SIZE\)"):
        loader()
