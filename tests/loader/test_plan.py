"""The requests that a plan hands out."""

import itertools
from typing import Any

from torch.utils.data import BatchSampler

from headrace.loader.plan import IterablePlan, OrderPlan, SamplerPlan, length_of
from headrace.order import BatchRequest, EpochOrder, RankBatches


def order_plan(n: int = 10, batch_size: int = 3, **options: Any) -> OrderPlan:
    order = EpochOrder(n, seed=7, global_batch=batch_size * options.get("world_size", 1))
    return OrderPlan(RankBatches(order, batch_size=batch_size, **options))


def take(plan: Any, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [list(request) for request in plan.requests(epoch, start)]


def test_requests_carry_what_a_worker_must_know() -> None:
    plan = order_plan()
    requests = list(plan.requests(3, 1))
    assert [type(request) for request in requests] == [BatchRequest] * 3
    for step, request in enumerate(requests, 1):
        assert (request.seed, request.epoch, request.step) == (7, 3, step)
        assert request.slot is None and request.draws is None
        assert all(type(index) is int for index in request)
    assert take(plan, 3, 99) == []
    one, two = plan.requests(1, 0), plan.requests(2, 0)  # by turns
    pairs = [(list(a), list(b)) for a, b in zip(one, two, strict=True)]
    assert pairs == list(zip(take(order_plan(), 1), take(order_plan(), 2), strict=True))


def test_what_an_order_plan_knows() -> None:
    plan = order_plan(rank=1, world_size=4, batch_size=2)
    assert plan.steps() == 2 and plan.padding == 2 and plan.seed == 7
    assert [plan.samples_before(step) for step in range(4)] == [0, 8, 10, 10]
    assert [plan.ends_at(position) for position in (0, 1, 2, 3)] == [False, False, True, True]
    parameters = plan.parameters()
    assert parameters["global_batch"] == 8 and "n" not in parameters
    parameters["seed"] = 8
    assert plan.parameters()["seed"] == 7
    assert order_plan(0).steps() == 0 and order_plan(0).ends_at(0)


# -- samplers


class Spy:
    """A sampler without a length that notes what is asked of it."""

    def __init__(self, n: int) -> None:
        self.n, self.asked = n, 0
        self.epochs: list[int] = []

    def __iter__(self) -> Any:
        for i in range(self.n):
            self.asked += 1
            yield i

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_sampler_is_cut_into_batches_and_not_asked_ahead() -> None:
    for drop_last, expected in (
        (False, [[0, 1, 2], [3, 4, 5], [6]]),
        (True, [[0, 1, 2], [3, 4, 5]]),
    ):
        plan = SamplerPlan(7, Spy(7), batch_size=3, drop_last=drop_last)
        assert plan.steps() is None and not plan.ends_at(99)
        for start in range(4):
            requests = list(plan.requests(2, start))
            assert [list(request) for request in requests] == expected[start:]
            assert [request.step for request in requests] == list(range(start, len(expected)))
            # k: here the position is the index
            assert [list(request.draws) for request in requests] == expected[start:]
            assert {(request.seed, request.epoch) for request in requests} <= {(7, 2)}
    spy = Spy(99)
    asking = SamplerPlan(7, spy, batch_size=3).requests(0, 0)
    assert spy.asked == 0 and spy.epochs == []
    next(asking)
    assert spy.asked == 3


def test_k_is_the_position_whatever_the_batches() -> None:
    plan = SamplerPlan(7, batch_sampler=[[5], [5, 5], [], [5]])
    assert [list(request.draws) for request in plan.requests(0, 1)] == [[1, 2], [], [3]]


class Batches(BatchSampler):
    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, 3, False)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_set_epoch_is_called_once_an_epoch_and_on_both() -> None:
    inner = Spy(7)
    outer = Batches(inner)
    assert take(SamplerPlan(7, batch_sampler=outer), 4) == [[0, 1, 2], [3, 4, 5], [6]]
    assert inner.epochs == outer.epochs == [4]


# -- streams


def test_requests_of_a_stream_have_no_end_and_name_their_run() -> None:
    plan = IterablePlan(7, 4, None, False)
    for run, epoch in enumerate((0, 0, 5)):
        requests = list(itertools.islice(plan.requests(epoch, 0), 3))
        for step, request in enumerate(requests):
            assert list(request) == [run]
            assert (request.step, request.epoch, request.seed) == (step, epoch, 7)


class Refuses:
    def __len__(self) -> int:
        raise NotImplementedError


def test_numbers_of_steps() -> None:
    for plan, expected in (
        (SamplerPlan(7, range(7), batch_size=3), 3),
        (SamplerPlan(7, range(7), batch_size=3, drop_last=True), 2),
        (SamplerPlan(7, range(7), batch_size=None), 7),
        (SamplerPlan(7, batch_sampler=[[1], [2]]), 2),
        (IterablePlan(7, 4, None, False), None),
        (IterablePlan(7, 4, 9, False), 3),
        (IterablePlan(7, 4, 9, True), 2),
        (IterablePlan(7, None, 9, True), 9),
    ):
        assert plan.steps() == expected
    assert SamplerPlan(7, range(7), batch_size=3).ends_at(3)
    assert not IterablePlan(7, 4, 9, False).ends_at(3)
    assert length_of([]) == 0 and length_of(iter([1])) is None and length_of(Refuses()) is None
