"""The requests that a plan hands out."""

import itertools
import pickle
from typing import Any

import pytest
from torch.utils.data import BatchSampler

from headrace.loader.plan import IterablePlan, OrderPlan, SamplerPlan, length_of
from headrace.order import BatchRequest, EpochOrder, RankBatches


def order_plan(n: int = 10, batch_size: int = 3, **options: Any) -> OrderPlan:
    order = EpochOrder(n, seed=7, global_batch=batch_size * options.get("world_size", 1))
    return OrderPlan(RankBatches(order, batch_size=batch_size, **options))


def take(plan: Any, epoch: int = 0, start: int = 0) -> list[list[int]]:
    return [list(request) for request in plan.requests(epoch, start)]


# -- headrace's order


def test_requests_carry_what_a_worker_must_know() -> None:
    requests = list(order_plan().requests(3, 1))
    assert [type(request) for request in requests] == [BatchRequest] * 3
    assert [(t.seed, t.epoch, t.step, t.slot, t.draws) for t in requests] == [
        (7, 3, step, None, None) for step in (1, 2, 3)
    ]
    assert all(type(index) is int for request in requests for index in request)


def test_an_order_plan_follows_its_order() -> None:
    plan = order_plan()
    for epoch in (0, 5, 0):
        expected = list(EpochOrder(10, seed=7, epoch=epoch, global_batch=3))
        assert take(plan, epoch) == [expected[i : i + 3] for i in range(0, 10, 3)]
        for start in range(5):
            assert take(plan, epoch, start) == take(plan, epoch)[start:]
        assert take(plan, epoch, 99) == []
        assert [plan.batches_of(epoch).batch(step).tolist() for step in range(4)] == take(
            plan, epoch
        )


def test_requests_of_two_epochs_may_be_taken_by_turns() -> None:
    plan = order_plan()
    one, two = plan.requests(1, 0), plan.requests(2, 0)
    mixed = [(list(a), list(b)) for a, b in zip(one, two, strict=True)]
    assert [a for a, _ in mixed] == take(order_plan(), 1) and [b for _, b in mixed] == take(
        order_plan(), 2
    )


def test_what_an_order_plan_knows() -> None:
    plan = order_plan(rank=1, world_size=4, batch_size=2)
    assert plan.steps() == 2 and plan.padding == 2 and plan.seed == 7
    assert [plan.samples_before(step) for step in range(4)] == [0, 8, 10, 10]
    assert [plan.ends_at(position) for position in (0, 1, 2, 3)] == [False, False, True, True]
    parameters = plan.parameters()
    assert (
        parameters["seed"] == 7
        and parameters["global_batch"] == 8
        and parameters["shuffle"] is True
        and "n" not in parameters
    )
    parameters["seed"] = 8
    assert plan.parameters()["seed"] == 7


def test_an_order_plan_travels() -> None:
    plan = order_plan()
    assert take(pickle.loads(pickle.dumps(plan)), 2) == take(plan, 2)


def test_an_empty_order_plan() -> None:
    plan = order_plan(0)
    assert plan.steps() == 0 and take(plan) == [] and plan.ends_at(0)


# -- samplers


class Spy:
    """A sampler that notes what is asked of it."""

    def __init__(self, n: int | None = 7) -> None:
        self.n, self.epochs, self.asked = n, [], 0

    def __iter__(self) -> Any:
        for i in itertools.count() if self.n is None else range(self.n):
            self.asked += 1
            yield i

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize(
    ("drop_last", "expected"),
    [(False, [[0, 1, 2], [3, 4, 5], [6]]), (True, [[0, 1, 2], [3, 4, 5]])],
)
def test_a_sampler_is_cut_into_batches(drop_last: bool, expected: list[list[int]]) -> None:
    plan = SamplerPlan(7, Spy(), batch_size=3, drop_last=drop_last)
    for start in range(4):
        requests = list(plan.requests(2, start))
        assert [list(t) for t in requests] == expected[start:]
        assert [t.step for t in requests] == list(range(start, len(expected)))
        # k: here the position is the index
        assert [list(t.draws) for t in requests] == expected[start:]
        assert {(t.seed, t.epoch) for t in requests} <= {(7, 2)}


def test_k_is_the_position_whatever_the_batches() -> None:
    draws = [
        list(t.draws) for t in SamplerPlan(7, batch_sampler=[[5], [5, 5], [], [5]]).requests(0, 1)
    ]
    assert draws == [[1, 2], [], [3]]


def test_steps_of_samplers() -> None:
    assert SamplerPlan(7, range(7), batch_size=3).steps() == 3
    assert SamplerPlan(7, range(7), batch_size=3, drop_last=True).steps() == 2
    assert SamplerPlan(7, range(7), batch_size=None).steps() == 7
    assert SamplerPlan(7, batch_sampler=[[1], [2]]).steps() == 2
    unknown = SamplerPlan(7, Spy(), batch_size=3)
    assert unknown.steps() is None and not unknown.ends_at(99)
    assert SamplerPlan(7, range(7), batch_size=3).ends_at(3)
    assert SamplerPlan(7, range(7)).samples_before(3) is None


def test_set_epoch_is_called_once_an_epoch_and_on_both() -> None:
    class Batches(BatchSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    inner = Spy()
    outer = Batches(inner, 3, False)  # type: ignore[arg-type]
    plan = SamplerPlan(7, batch_sampler=outer)
    assert take(plan, 4) == [[0, 1, 2], [3, 4, 5], [6]]
    assert inner.epochs == outer.epochs == [4]


def test_a_sampler_is_not_asked_ahead() -> None:
    spy = Spy(None)
    requests = SamplerPlan(7, spy, batch_size=3).requests(0, 0)
    assert spy.asked == 0 and spy.epochs == []
    next(requests)
    assert spy.asked == 3
    next(requests)
    assert spy.asked == 6


# -- streams


def test_requests_of_a_stream_have_no_end_and_name_their_run() -> None:
    plan = IterablePlan(7, 4, None, False)
    runs = [
        [[*t, t.step, t.epoch, t.seed] for t in itertools.islice(plan.requests(epoch, 0), 3)]
        for epoch in (0, 0, 5)
    ]
    assert runs == [
        [[run, step, epoch, 7] for step in range(3)] for run, epoch in enumerate((0, 0, 5))
    ]


def test_steps_of_streams() -> None:
    assert IterablePlan(7, 4, None, False).steps() is None
    assert IterablePlan(7, 4, 9, False).steps() == 3
    assert IterablePlan(7, 4, 9, True).steps() == 2
    assert IterablePlan(7, None, 9, True).steps() == 9
    assert not IterablePlan(7, 4, 9, False).ends_at(3)
    assert (
        IterablePlan(7, 4, 9, False, 0).parameters() == IterablePlan(7, 4, 9, False, 1).parameters()
    )
    assert (
        IterablePlan(7, 4, 9, False, 2).parameters() != IterablePlan(7, 4, 9, False, 1).parameters()
    )


def test_length_of() -> None:
    class Refuses:
        def __len__(self) -> int:
            raise NotImplementedError

    assert length_of([1, 2]) == 2 and length_of([]) == 0
    assert length_of(iter([1])) is None and length_of(Refuses()) is None
