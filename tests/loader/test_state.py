"""States: what one holds, who may load it, and who is refused."""

import copy
import io
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from headrace import HeadraceWarning, ImageDataset, StateError
from headrace.testing.contract import RandomProbe, same
from tests.testing.test_contract import SquareDataset


def squares(**options: Any) -> SquareDataset:
    return SquareDataset(transform=RandomProbe(), **options)


@pytest.fixture
def loader_of(make_loader: Any) -> Any:
    def make(dataset: Any = None, **options: Any) -> Any:
        dataset = squares() if dataset is None else dataset
        common = {"batch_size": 6, "num_workers": 0, "seed": 5, "collate_fn": "list"}
        return make_loader(dataset, **{**common, **options})

    return make


def indices(batches: Any) -> list[list[int]]:
    return [[int(sample["value"][0]) for sample in batch] for batch in batches]


def state_after(loader: Any, batches: int) -> dict[str, Any]:
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state: dict[str, Any] = loader.state_dict()
    return state


# -- what it is


def test_a_state_is_plain_and_small(loader_of: Any) -> None:
    for shuffle in (False, True, "block"):
        state = state_after(loader_of(shuffle=shuffle), 2)
        expected = {"version": 1, "epoch": 0, "batches": 2, "samples": 12, "length": 42}
        expected |= {"seed": 5, "global_batch": 6, "shuffle": shuffle}
        assert {name: state[name] for name in expected} == expected
        assert all(value is None or type(value) in (int, str, bool) for value in state.values())
        assert len(json.dumps(state)) < 500


def test_a_state_comes_back_from_every_kind_of_file(loader_of: Any) -> None:
    expected = list(loader_of())
    state = state_after(loader_of(), 2)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for loaded in (
        json.loads(json.dumps(state)),
        pickle.loads(pickle.dumps(state)),
        torch.load(file, weights_only=True),
        copy.deepcopy(state),
    ):
        assert loaded == state
        loader = loader_of()
        loader.load_state_dict(loaded)
        assert same(list(loader), expected[2:])


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
        for word in (state["fingerprint"], loader.fingerprint, "42", str(len(other))):
            assert word in str(refused.value)
        assert loader.state_dict()["batches"] == 0  # nothing has changed


def test_another_order_is_refused(loader_of: Any) -> None:
    blocks = {"shuffle": "block", "turns": 2, "interleave": 9}
    for saved, options, message in (
        ({}, {"seed": 6}, "seed was 5, is 6"),
        ({}, {"shuffle": False}, "shuffle was True, is False"),
        ({}, {"shuffle": "block"}, "shuffle was True, is 'block'"),
        (blocks, {"turns": 3}, "turns was 2, is 3"),
        (blocks, {"interleave": 4}, "interleave was 9, is 4"),
        (blocks, {"shuffle": True}, "shuffle was 'block', is True"),
    ):
        state = state_after(loader_of(**saved), 2)
        loader = loader_of(**{**saved, **options})
        own = indices(loader)
        loader.set_epoch(0)
        before = loader.state_dict()
        for strict in (True, False):
            with pytest.raises(StateError, match=message):
                loader.load_state_dict(state, strict=strict)
        assert loader.state_dict() == before
        assert indices(loader) == own != indices(loader_of(**saved))


def test_changed_data_of_the_same_length_may_be_gone_on_with(loader_of: Any) -> None:
    state = state_after(loader_of(), 1)
    loader = loader_of(squares().subset(list(reversed(range(42)))))
    with pytest.raises(StateError, match=state["fingerprint"]):
        loader.load_state_dict(state)
    with pytest.warns(HeadraceWarning, match=state["fingerprint"]) as warned:
        loader.load_state_dict(state, strict=False)
    assert [w.filename for w in warned] == [__file__]
    assert len(list(loader)) == 6
    with pytest.raises(StateError, match="40 samples"):
        loader_of(squares().subset(range(40))).load_state_dict(state, strict=False)


def test_another_global_batch_is_refused_with_the_remedy(loader_of: Any) -> None:
    state = state_after(loader_of(), 1)
    for options, remedy in (
        ({"batch_size": 4}, "batch_size=6"),
        ({"batch_size": 6, "world_size": 2, "rank": 0}, "batch_size=3"),
        ({"batch_size": 1, "world_size": 5, "rank": 0}, "world size that divides 6"),
    ):
        for strict in (True, False):
            with pytest.raises(StateError, match=remedy):
                loader_of(**options).load_state_dict(state, strict=strict)


class OtherBlocks(SquareDataset):
    def blocks(self) -> Any:
        return np.array([42])


def test_state_of_another_layout_is_refused(loader_of: Any) -> None:
    state = state_after(loader_of(shuffle="block"), 1)
    for strict in (True, False):
        other = loader_of(OtherBlocks(), shuffle="block", interleave=9)
        with pytest.raises(StateError, match="blocks was"):
            other.load_state_dict(state, strict=strict)
    # a full shuffle doesn't depend on it
    loader_of(OtherBlocks(transform=RandomProbe())).load_state_dict(state_after(loader_of(), 1))


def test_garbage_is_refused(loader_of: Any) -> None:
    loader = loader_of()
    before = loader.state_dict()
    good = {**state_after(loader_of(), 2), "skipped": 0, "skipped_samples": []}
    garbage: list[Any] = [None, 3, "state", [], {}, {"version": 1}, {"batches": 3}]
    garbage += [{"version": 1, "batches": 0}, loader.sampler.state_dict()]
    for name, values in {
        "version": ("1", None, 99, -1, 0),
        "batches": (-1, "2", None, 2.5, True, 1000),
        "epoch": ("0", None, 1.5, -1),
        "fingerprint": (None,),
        "length": ("42", -42, 43, None),
        "seed": ("five",),
        "global_batch": (None, "6", 0),
        "shuffle": ("circle", None),
        "samples": (3, None),
        "skipped": ("many",),
        "skipped_samples": (3, [5], [{"index": 5}]),
        "interleave": (0, "3"),
        "turns": (-1,),
    }.items():
        garbage += [{**good, name: value} for value in values]
    for state in garbage:
        for strict in (True, False):
            with pytest.raises(StateError):
                loader.load_state_dict(state, strict=strict)
            assert loader.state_dict() == before, state
    with pytest.raises(StateError, match=r"version 2.*knows 1.*upgrade"):
        loader.load_state_dict({**good, "version": 2})


def test_drop_last_may_differ_before_the_last_batch_only(loader_of: Any) -> None:
    ten = squares().subset(range(10))
    cut = loader_of(ten, drop_last=True)
    cut.load_state_dict(state_after(loader_of(ten), 1))
    cut.set_epoch(0)
    assert list(cut) == []
    with pytest.raises(StateError, match="samples"):
        cut.load_state_dict(state_after(loader_of(ten), 2))


# -- skipped samples


def skipping(bad: Any) -> Any:
    return SquareDataset(bad=bad, on_error="skip")


def test_skipped_samples_are_in_the_state_and_survive_it(loader_of: Any) -> None:
    options = {"shuffle": False, "num_workers": 1, "prefetch_factor": 7}
    loader, again = (loader_of(skipping([3, 30]), **options) for _ in range(2))
    assert "skipped" not in state_after(loader, 0), "what was not received is not skipped yet"
    state = json.loads(json.dumps(state_after(loader, 1)))
    (entry,) = state["skipped_samples"]
    assert state["skipped"] == 1 and entry["index"] == 3
    assert set(entry) == {"index", "path", "error"} and "can't be read" in entry["error"]
    again.load_state_dict(state)
    assert again.state_dict() == state
    list(again)
    assert [entry["index"] for entry in again.state_dict()["skipped_samples"]] == [3, 30]
    assert again.get_stats()["skipped"] == 2 and len(again.get_stats()["skipped_samples"]) == 2


def test_each_skipped_sample_is_listed_once(loader_of: Any) -> None:
    loader, again = (loader_of(skipping(range(1, 42)), batch_size=42) for _ in range(2))
    for _ in range(3):
        list(loader)
    again.load_state_dict(loader.state_dict())
    list(again)
    for one, epochs in ((loader, 3), (again, 4)):
        state = one.state_dict()
        assert state["skipped"] == 41 * epochs and len(state["skipped_samples"]) == 41


# -- blocks


def test_files_are_no_blocks(photos: Path, loader_of: Any) -> None:
    """Without blocks a block shuffle is a full one, so that a job goes on in any mode by its
    default.
    """

    def loader(mode: str) -> Any:
        return loader_of(ImageDataset(photos, image_size=8, loading_mode=mode), shuffle=None)

    expected = list(loader("lazy"))
    for one, other in itertools.permutations(("lazy", "streaming"), 2):
        state = state_after(loader(one), 2)
        resumed = loader(other)
        resumed.load_state_dict(state)
        assert same(list(resumed), expected[2:])
