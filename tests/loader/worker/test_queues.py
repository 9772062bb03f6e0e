"""Queues whose messages are written by who sends them: order, length, full pipes and processes."""

from __future__ import annotations

import multiprocessing
import queue
import select
from typing import Any

import pytest

from headrace.loader.worker.queues import DirectQueue, direct_queues

pytestmark = pytest.mark.skipif(not hasattr(select, "poll"), reason="plain queues")


def made(context: str = "fork") -> Any:
    return direct_queues(multiprocessing.get_context(context))()


def answer(requests: Any, results: Any) -> None:
    while (request := requests.get()) is not None:
        results.put(request * 2)


@pytest.fixture
def own() -> Any:
    created: DirectQueue = made()
    yield created
    created.cancel_join_thread()
    created.close()


def test_short_messages_need_no_thread(own: Any) -> None:
    for number in range(20):
        own.put((number, "x" * 100))
    assert own._thread is None
    assert [own.get(timeout=5)[0] for _ in range(20)] == list(range(20))
    with pytest.raises(queue.Empty):
        own.get(timeout=0)


def test_long_messages_go_as_ever_and_none_overtakes(own: Any) -> None:
    messages: list[Any] = ["a", "b" * 10_000, "c", b"d" * 300_000, "e"]
    for message in messages:
        own.put(message)
    assert own._thread is not None and [own.get(timeout=20) for _ in messages] == messages


def test_who_sends_into_a_full_pipe_goes_on(own: Any) -> None:
    messages = [f"{number} {'x' * 3000}" for number in range(100)]  # more than a pipe holds
    for message in messages:
        own.put(message)
    assert [own.get(timeout=20) for _ in messages] == messages


def test_a_closed_queue_takes_nothing() -> None:
    own = made()
    own.close()
    with pytest.raises(ValueError, match="is closed"):
        own.put(1)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_use_it(context: str) -> None:
    requests, results = made(context), made(context)
    process = multiprocessing.get_context(context).Process(target=answer, args=(requests, results), daemon=True)
    process.start()
    try:
        for text in ("short", "long" * 5000, "short"):
            requests.put(text)
            assert results.get(timeout=60) == text * 2
        requests.put(None)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        for each in (requests, results):
            each.cancel_join_thread()
            each.close()
