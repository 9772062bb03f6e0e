"""States: what one holds, who may load it, and who is refused."""

import copy
import io
import itertools
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from headrace import HDF5Dataset, HeadraceWarning, ImageDataset, StateError
from headrace.testing.contract import RandomProbe, same
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(12)


@pytest.fixture
def loader_of(make_loader: Any) -> Any:
    def make(dataset: Any = None, **options: Any) -> Any:
        dataset = SquareDataset(transform=RandomProbe()) if dataset is None else dataset
        return make_loader(
            dataset,
            **{"batch_size": 6, "num_workers": 0, "seed": 5, "collate_fn": "list", **options},
        )

    return make


def indices(batches: Any) -> list[list[int]]:
    return [[int(sample["value"][0]) for sample in batch] for batch in batches]


def state_after(loader: Any, batches: int, epoch: int = 0) -> dict[str, Any]:
    loader.set_epoch(epoch)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state: dict[str, Any] = loader.state_dict()
    return state


# -- what it is


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_a_state_is_plain_and_small(loader_of: Any, shuffle: Any) -> None:
    state = state_after(loader_of(shuffle=shuffle), 2)
    assert state["version"] == 1 and (state["epoch"], state["batches"], state["samples"]) == (
        0,
        2,
        12,
    )
    assert (
        state["length"] == 42
        and state["seed"] == 5
        and state["global_batch"] == 6
        and state["shuffle"] == shuffle
    )
    assert all(value is None or type(value) in (int, str, bool) for value in state.values())
    assert len(json.dumps(state)) < 500


def test_a_state_comes_back_from_every_kind_of_file(loader_of: Any) -> None:
    expected = list(loader_of())
    state = state_after(loader_of(), 2)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copies = [
        json.loads(json.dumps(state)),
        pickle.loads(pickle.dumps(state)),
        torch.load(file, weights_only=True),
        copy.deepcopy(state),
    ]
    for loaded in copies:
        assert loaded == state
        loader = loader_of()
        loader.load_state_dict(loaded)
        assert same(list(loader), expected[2:])


def test_loading_changes_nothing_in_the_state(loader_of: Any) -> None:
    state = state_after(loader_of(), 2)
    before = copy.deepcopy(state)
    loader = loader_of()
    loader.load_state_dict(state)
    list(loader)
    assert state == before


def test_a_loaded_state_is_the_loader_s_own(loader_of: Any) -> None:
    state = state_after(loader_of(), 3, epoch=4)
    loader = loader_of()
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    iterator = iter(loader)
    assert loader.state_dict() == state
    next(iterator)
    assert loader.state_dict() == {**state, "batches": 4, "samples": 24}


def test_workers_prefetch_and_the_state_does_not_count_it(loader_of: Any) -> None:
    loader = loader_of(num_workers=2, prefetch_factor=4)
    assert state_after(loader, 1)["batches"] == 1
    loader.set_epoch(0)
    assert same(list(loader), list(loader_of()))


def test_a_loaded_state_is_kept_when_an_iterator_is_under_way(loader_of: Any) -> None:
    loader = loader_of()
    expected = list(loader_of())
    state = state_after(loader_of(), 5)
    running = iter(loader)
    next(running)
    loader.load_state_dict(state)
    next(running)
    assert loader.state_dict() == state
    assert same(list(loader), expected[5:])


# -- going on elsewhere


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
@pytest.mark.parametrize("workers", [0, 2])
def test_other_modes_and_workers_go_on(loader_of: Any, mode: str, workers: int) -> None:
    expected = loader_of(shuffle="block")
    expected.set_epoch(1)
    batches = list(expected)
    state = state_after(loader_of(shuffle="block", num_workers=1), 3, epoch=1)
    with SquareDataset(transform=RandomProbe(), loading_mode=mode, progress=False) as dataset:
        loader = loader_of(
            dataset, num_workers=workers, shuffle="block", prefetch_factor=3 if workers else None
        )
        loader.load_state_dict(state)
        assert same(list(loader), batches[3:])
        assert same(list(loader), list(expected))  # epoch 2
        loader.close()


@pytest.mark.quick_every(12)
@pytest.mark.parametrize("shuffle", [False, True, "block"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 3), (2, 1), (3, 2), (2, 6), (6, 1)])
def test_other_numbers_of_ranks_go_on(
    loader_of: Any, shuffle: Any, before: int, after: int
) -> None:
    whole = indices(loader_of(shuffle=shuffle, batch_size=6))
    states = [
        state_after(
            loader_of(shuffle=shuffle, batch_size=6 // before, rank=r, world_size=before), 4
        )
        for r in range(before)
    ]
    assert all(state == states[0] for state in states)
    ranks = [
        loader_of(shuffle=shuffle, batch_size=6 // after, rank=r, world_size=after)
        for r in range(after)
    ]
    for loader in ranks:
        loader.load_state_dict(states[-1])
    parts = [indices(loader) for loader in ranks]
    merged = [[parts[p % after][step][p // after] for p in range(6)] for step in range(3)]
    assert merged == whole[4:]


def test_a_state_of_any_moment_gives_the_rest(loader_of: Any) -> None:
    expected = list(loader_of())
    for number in range(len(expected) + 1):
        state = state_after(loader_of(), number)
        loader = loader_of()
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert len(iter(loader)) == len(expected) - number
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert same(list(loader), expected[number:])


@pytest.mark.slow
def test_resuming_again_and_again(loader_of: Any) -> None:
    expected, received, state = list(loader_of()), [], loader_of().state_dict()
    for workers in (0, 1, 0, 2, 0, 1, 0):
        loader = loader_of(num_workers=workers)
        loader.load_state_dict(state)
        received.append(next(iter(loader)))
        state = loader.state_dict()
    assert same(received, expected)


# -- who is refused


def test_other_data_is_refused_with_both_fingerprints(loader_of: Any, photos: Path) -> None:
    state = state_after(loader_of(), 1)
    for other in (
        SquareDataset().subset(range(41)),
        ImageDataset(photos, image_size=8),
        TensorDataset(torch.zeros(42)),
    ):
        loader = loader_of(other)
        with pytest.raises(StateError) as refused:
            loader.load_state_dict(state)
        assert state["fingerprint"] in str(refused.value) and loader.fingerprint in str(
            refused.value
        )
        assert "42" in str(refused.value) and str(len(other)) in str(refused.value)
        assert loader.state_dict()["batches"] == 0  # nothing has changed


@pytest.mark.parametrize(
    ("field", "options", "values"),
    [
        ("seed", {"seed": 6}, ("5", "6")),
        ("shuffle", {"shuffle": False}, ("True", "False")),
        ("shuffle", {"shuffle": "block"}, ("True", "'block'")),
        ("turns", {"shuffle": "block", "turns": 3}, ("2", "3")),
        ("interleave", {"shuffle": "block", "interleave": 4, "turns": 2}, ("9", "4")),
    ],
)
def test_another_order_is_refused_or_adopted(
    loader_of: Any, field: str, options: dict[str, Any], values: tuple[str, str]
) -> None:
    saved: dict[str, Any] = (
        {"shuffle": "block", "turns": 2, "interleave": 9}
        if field in ("turns", "interleave")
        else {}
    )
    expected = indices(loader_of(**saved))
    state = state_after(loader_of(**saved), 2)
    loader = loader_of(**{**saved, **options})
    own = indices(loader)
    loader.set_epoch(0)
    before = loader.state_dict()
    with pytest.raises(StateError, match=f"{field} was {values[0]}, is {values[1]}.*strict=False"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before
    assert indices(loader) == own != expected
    loader.load_state_dict(state, strict=False)
    assert loader.state_dict() == state
    assert getattr(loader.config, field) == state[field]
    assert list(loader.sampler) == list(loader_of(**saved).sampler)
    assert "adopted from the loaded state" in loader.explain() or field in ("turns", "interleave")
    assert indices(loader) == expected[2:]
    loader.set_epoch(0)
    assert indices(loader) == expected


def test_what_is_adopted_reaches_the_random_transforms(loader_of: Any) -> None:
    expected = list(loader_of(seed=5))
    loader = loader_of(seed=6, num_workers=1)
    list(loader)
    loader.load_state_dict(state_after(loader_of(seed=5), 2), strict=False)
    assert same(list(loader), expected[2:])


def test_an_adopted_block_order_may_be_resumed(loader_of: Any) -> None:
    state = state_after(loader_of(shuffle="block"), 2)
    loader = loader_of(shuffle=True)
    loader.load_state_dict(state, strict=False)
    next(iter(loader))
    again = loader_of(shuffle="block")
    again.load_state_dict(loader.state_dict())
    assert indices(again) == indices(loader_of(shuffle="block"))[3:]


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("kind", ["raw", "gzip"])
def test_state_of_former_blocks_gives_their_order(
    loader_of: Any, tmp_path: Path, kind: str
) -> None:
    """Of a time when blocks that may be cut anywhere had 2 MiB, and lanes went in 12 turns."""
    rows, width = {"raw": (1200, 1 << 13), "gzip": (6400, 16)}[kind]
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        layout = {} if kind == "raw" else {"chunks": (4, width), "compression": "gzip"}
        file.create_dataset(
            "data", data=np.arange(rows)[:, None] + np.zeros((1, width), np.int64), **layout
        )
    dataset = HDF5Dataset(tmp_path / "rows.h5")
    former, now = (dataset.epoch_order("block", 5, 0, 6, former=which) for which in (2, 0))
    sizes = {"raw": (32, 16), "gzip": (4, 4)}[kind]
    assert (int(former.blocks[0]), int(now.blocks[0])) == sizes and (
        former.interleave,
        former.turns,
    ) != (now.interleave, now.turns)
    state = state_after(loader_of(dataset, shuffle="block"), 30)
    saved = {
        **state,
        **{name: former.parameters()[name] for name in ("interleave", "turns", "blocks")},
    }
    loader = loader_of(dataset, shuffle="block")
    for given, order in [(saved, former), (state, now), (saved, former)]:
        loader.load_state_dict(given)
        assert {name: loader.state_dict()[name] for name in saved} == given
        assert [value[0].item() for batch in loader for value in batch] == order[180:].tolist()
        loader.set_epoch(1)
        assert next(iter(loader))[0][0].item() == order.with_epoch(1)[0]
    with pytest.raises(StateError, match=r"turns was 5, is \d+"):
        loader_of(dataset, shuffle="block").load_state_dict({**saved, "turns": 5})
    with pytest.raises(StateError, match="interleave was"):
        loader_of(dataset, shuffle="block", interleave=3).load_state_dict(saved)
    adopting = loader_of(dataset, shuffle=True)
    adopting.load_state_dict(saved, strict=False)
    assert [value[0].item() for batch in adopting for value in batch] == former[180:].tolist()


def test_changed_data_of_the_same_length_may_be_gone_on_with(loader_of: Any) -> None:
    state = state_after(loader_of(), 1)
    other = SquareDataset(transform=RandomProbe()).subset(list(reversed(range(42))))
    loader = loader_of(other)
    with pytest.raises(StateError, match="another dataset"):
        loader.load_state_dict(state)
    with pytest.warns(HeadraceWarning, match="another dataset") as warned:
        loader.load_state_dict(state, strict=False)
    assert [w.filename for w in warned] == [__file__]
    assert len(list(loader)) == 6
    shorter = loader_of(SquareDataset().subset(range(40)))
    with pytest.raises(StateError, match="40 samples"):
        shorter.load_state_dict(state, strict=False)


def test_other_data_and_another_order_are_warned_of_once(loader_of: Any) -> None:
    state = state_after(loader_of(), 1)
    loader = loader_of(
        SquareDataset(transform=RandomProbe()).subset(list(reversed(range(42)))), seed=8
    )
    with pytest.warns(HeadraceWarning) as warned:
        loader.load_state_dict(state, strict=False)
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"batch_size": 4}, "batch_size=6"),
        ({"batch_size": 6, "world_size": 2, "rank": 0}, "batch_size=3"),
        ({"batch_size": 1, "world_size": 5, "rank": 0}, "world size that divides 6"),
    ],
)
def test_another_global_batch_is_refused_with_the_remedy(
    loader_of: Any, options: dict[str, Any], remedy: str
) -> None:
    state = state_after(loader_of(), 1)
    for strict in (True, False):
        with pytest.raises(StateError, match=remedy):
            loader_of(**options).load_state_dict(state, strict=strict)


def test_state_of_another_layout_is_refused(loader_of: Any) -> None:
    class OtherBlocks(SquareDataset):
        def blocks(self) -> Any:
            return torch.tensor([42]).numpy()

    state = state_after(loader_of(shuffle="block"), 1)
    for strict in (True, False):
        with pytest.raises(StateError, match="blocks"):
            loader_of(OtherBlocks(), shuffle="block", interleave=9).load_state_dict(
                state, strict=strict
            )
    # a full shuffle doesn't
    loader_of(OtherBlocks(transform=RandomProbe())).load_state_dict(state_after(loader_of(), 1))


@pytest.mark.quick_every(12)
@pytest.mark.parametrize(
    "garbage",
    [
        None,
        3,
        "state",
        [],
        {},
        {"version": 1},
        {"batches": 3},
        {"version": 1, "batches": 0},
        {"version": "1"},
        {"version": None},
        {"version": 99},
        {"version": -1},
        {"version": 0},
        {"batches": -1},
        {"batches": "2"},
        {"batches": None},
        {"batches": 2.5},
        {"batches": True},
        {"epoch": "0"},
        {"epoch": None},
        {"epoch": 1.5},
        {"epoch": -1},
        {"fingerprint": None},
        {"length": "42"},
        {"length": -42},
        {"length": 43},
        {"length": None},
        {"seed": "five"},
        {"global_batch": None},
        {"global_batch": "6"},
        {"global_batch": 0},
        {"shuffle": "circle"},
        {"shuffle": None},
        {"samples": 3},
        {"samples": None},
        {"batches": 1000},
        {"skipped": "many"},
        {"skipped_samples": 3},
    ],
)
def test_garbage_is_refused(loader_of: Any, garbage: Any) -> None:
    good = {**state_after(loader_of(), 2), "skipped": 0, "skipped_samples": []}
    partial = not isinstance(garbage, dict) or len(garbage) != 1 or garbage in ({"version": 1},)
    state = garbage if partial else {**good, **garbage}
    loader = loader_of()
    for strict in (True, False):
        with pytest.raises(StateError):
            loader.load_state_dict(state, strict=strict)
        assert loader.state_dict() == loader_of().state_dict()


@pytest.mark.parametrize("garbage", [{"version": -1}, {"epoch": -1}, {"length": 43}])
def test_impossible_numbers_are_refused(loader_of: Any, garbage: Any) -> None:
    with pytest.raises(
        StateError, match=next(iter(garbage)) if "length" not in garbage else "43 samples"
    ):
        loader_of().load_state_dict({**state_after(loader_of(), 2), **garbage})


def test_a_newer_version_says_what_to_do(loader_of: Any) -> None:
    with pytest.raises(StateError, match=r"version 2.*knows 1.*upgrade"):
        loader_of().load_state_dict({**loader_of().state_dict(), "version": 2})


def test_a_state_of_a_torch_sampler_is_refused(loader_of: Any) -> None:
    with pytest.raises(StateError, match=r"loader\.state_dict"):
        loader_of().load_state_dict(loader_of().sampler.state_dict())


def test_the_tail_without_padding_depends_on_the_ranks(loader_of: Any) -> None:
    """10 samples, 3 ranks, batches of 3: the first step hands its last positions over to the
    second.
    """
    ten = SquareDataset(transform=RandomProbe()).subset(range(10))
    three = [loader_of(ten, batch_size=3, rank=r, world_size=3, pad=False) for r in range(3)]
    state = state_after(three[0], 1)
    assert state["samples"] == 6
    with pytest.raises(StateError, match=r"6 samples.*after 9.*pad=False"):
        loader_of(ten, batch_size=9, pad=False).load_state_dict(state)
    rest = []
    for loader in three:
        loader.load_state_dict(state)
        rest += indices(loader)
    assert sorted(map(len, rest)) == [1, 1, 2]
    for loader in three:
        list(loader)
    done = three[0].state_dict()
    alone = loader_of(ten, batch_size=9, pad=False)
    alone.load_state_dict(done)  # a whole epoch is a whole epoch
    alone.set_epoch(done["epoch"])
    assert list(alone) == []


def test_drop_last_may_differ_before_the_last_batch_only(loader_of: Any) -> None:
    ten = SquareDataset(transform=RandomProbe()).subset(range(10))
    whole = indices(loader_of(ten))
    cut = loader_of(ten, drop_last=True)
    cut.load_state_dict(state_after(loader_of(ten), 1))
    cut.set_epoch(0)
    assert indices(cut) == [] and len(whole) == 2
    with pytest.raises(StateError, match="samples"):
        cut.load_state_dict(state_after(loader_of(ten), 2))


# -- skipped samples


def skipping(bad: Any, n: int = 42) -> Any:
    return SquareDataset(bad=bad, on_error="skip")


@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_samples_are_in_the_state_and_survive_it(loader_of: Any, workers: int) -> None:
    loader = loader_of(skipping([3, 30]), shuffle=False, num_workers=workers)
    assert "skipped" not in state_after(loader, 0)
    state = state_after(loader, 1)
    assert state["skipped"] == 1 and [entry["index"] for entry in state["skipped_samples"]] == [3]
    assert (
        set(state["skipped_samples"][0]) == {"index", "path", "error"}
        and "can't be read" in state["skipped_samples"][0]["error"]
    )
    state = json.loads(json.dumps(state))
    again = loader_of(skipping([3, 30]), shuffle=False, num_workers=workers)
    again.load_state_dict(state)
    assert again.state_dict() == state
    list(again)
    assert [entry["index"] for entry in again.state_dict()["skipped_samples"]] == [3, 30]
    assert again.get_stats()["skipped"] == 2 and len(again.get_stats()["skipped_samples"]) == 2


def test_each_is_listed_once(loader_of: Any) -> None:
    loader = loader_of(skipping(set(range(42)) - {0}), batch_size=42)
    for _ in range(3):
        list(loader)
    state = loader.state_dict()
    assert state["skipped"] == 41 * 3 and len(state["skipped_samples"]) == 41
    again = loader_of(skipping(set(range(42)) - {0}), batch_size=42)
    again.load_state_dict(state)
    list(again)
    assert (
        again.state_dict()["skipped"] == 41 * 4 and len(again.state_dict()["skipped_samples"]) == 41
    )


def test_what_the_user_has_not_received_is_not_skipped_yet(loader_of: Any) -> None:
    loader = loader_of(skipping([30]), shuffle=False, num_workers=1, prefetch_factor=7)
    assert "skipped" not in state_after(loader, 1)


# -- quiet


def test_loading_warns_of_nothing(loader_of: Any) -> None:
    state = state_after(loader_of(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader_of().load_state_dict(state)
        loader_of(seed=9).load_state_dict(state, strict=False)


def test_files_are_no_blocks(photos: Path, loader_of: Any) -> None:
    """Without blocks a block shuffle is a full one, so that a job goes on in any mode by its
    default.
    """

    def loader(mode: str) -> Any:
        return loader_of(ImageDataset(photos, image_size=8, loading_mode=mode), shuffle=None)

    expected = list(loader("lazy"))
    for one, other in itertools.permutations(("lazy", "cached", "streaming"), 2):
        state = state_after(loader(one), 2)
        for saved in (state, {**state, "shuffle": "block"}):  # the second as it was saved before
            resumed = loader(other)
            resumed.load_state_dict(saved)
            assert same(list(resumed), expected[2:])
