"""Input that makes no sense, or can't go on: it is said, and nothing hangs.

What belongs to one room is tested there: fields and ranks in `test_config.py`, pickling in
`test_build.py`, states in `test_state.py`, dead workers in `test_loader.py` and `test_kill.py`.
Here is what lies between them.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from headrace import (
    CollateError,
    ConfigError,
    DataLoaderConfig,
    DataModule,
    HeadraceWarning,
    Loader,
    MultiDataLoader,
    OrderSampler,
    StateError,
    TextCollator,
    WorkerError,
    create_dataloader,
    pad_collate,
    suggest_num_workers,
)
from headrace.collate import stack_collate
from headrace.loader.worker.pool import death_of
from headrace.testing.contract import MODES, RandomProbe, same
from tests.conftest import living_children
from tests.order.test_elastic import dealt
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(6)


@pytest.fixture
def loader_of(loader_of: Any) -> Any:
    return functools.partial(loader_of, collate_fn="list", enable_monitoring=False)


# -- samples that make no batch


def short_at_9(value: Any) -> Any:
    return value[:1] if value[0] == 9 else value


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2 + (index == 9))


_SHAPES = (
    r"can't be stacked: sample 9 \(Squares.*9.*\) is int64 \[1\], sample 8 \(Squares.*8.*\) is "
    r"int64 \[2\]\. Give all one shape"
)
_LENGTH = r"^sample 0 \(Squares.*\).* is 2 long, and max_length is 1"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("collate", "said"),
    [
        ("default", _SHAPES),
        (pad_collate(max_length=1), _LENGTH),
        (TextCollator(max_length=1), _LENGTH),
    ],
)
def test_collate_errors_name_index_and_file(
    loader_of: Any, workers: int, collate: Any, said: str
) -> None:
    with pytest.raises(CollateError, match=said):
        list(
            loader_of(
                SquareDataset(transform=short_at_9),
                shuffle=False,
                num_workers=workers,
                collate_fn=collate,
            )
        )


def test_collate_errors_of_other_samples(loader_of: Any) -> None:
    def message(dataset: Any, **options: Any) -> str:
        with pytest.raises(CollateError) as refused:
            list(loader_of(dataset, **{"shuffle": False, "collate_fn": "default", **options}))
        return str(refused.value)

    squares = SquareDataset(transform=short_at_9)
    view = message(squares.subset([1, 2, 9, 4]))
    assert "sample 2 (Squares" in view and "sample 0 (Squares" in view, (
        "indices of the view, as the user has them"
    )
    assert ": sample 9 is float32 [3], sample 8 is float32 [2]. " in message(Ragged())
    skipping = message(SquareDataset(bad=[8], on_error="skip", transform=short_at_9), batch_size=6)
    assert "sample 9 (Squares" in skipping and "sample 6 (Squares" in skipping, (
        "positions after a skipped sample are not its index"
    )
    own = message(Ragged(), collate_fn=lambda samples: stack_collate(samples[::-1]))
    expected = ": sample 2 of the batch is float32 [3], sample 0 of the batch is float32 [2]"
    assert expected in own, "a function of one's own may have chosen among the samples"


# -- indices


class Chosen:
    """A sampler that gives what it is told to."""

    def __init__(self, *indices: int) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def squares(mode: str, **options: Any) -> Any:
    return SquareDataset(loading_mode=mode, progress=False, **options)


@pytest.mark.parametrize("index", [42, -43])
@pytest.mark.parametrize(
    "make",
    [
        *[lambda mode=mode: squares(mode) for mode in MODES],
        lambda: squares("lazy", on_error="skip"),
        lambda: TensorDataset(torch.arange(42)),
        lambda: list(range(42)),
        lambda: Subset(TensorDataset(torch.arange(100)), range(42)),
        lambda: SquareDataset().subset(range(42)),
    ],
    ids=[*MODES, "skip", "tensors", "list", "torch-subset", "view"],
)
def test_an_index_out_of_range_names_sampler_index_and_length(
    loader_of: Any, make: Any, index: int
) -> None:
    dataset = make()
    said = (
        rf"gave index {index}, and {type(dataset).__name__} has 42 samples: indices must lie in "
        r"\[0, 42\)"
    )
    with pytest.raises(IndexError, match=f"^sampler Chosen {said}") as raised:
        list(loader_of(dataset, sampler=Chosen(1, 2, 3, 4, 5, index), num_workers=0))
    assert "batch 1" in raised.value.__notes__[0]
    del raised
    with pytest.raises(IndexError, match=f"^batch_sampler list {said}"):
        list(loader_of(dataset, batch_sampler=[[1, 2], [index]], num_workers=0))


def test_an_index_out_of_range_in_a_worker(loader_of: Any) -> None:
    iterator = iter(
        loader_of(SquareDataset(), sampler=Chosen(1, 42, 2, 3, 4, 5, 6, 7), num_workers=1)
    )
    with pytest.raises(
        IndexError, match=r"sampler Chosen gave index 42, and SquareDataset has 42"
    ) as raised:
        next(iterator)
    assert "worker 0, epoch 0, batch 0" in raised.value.__notes__[0]
    del raised
    assert len(next(iterator)) == 4  # the next batch comes


def test_an_index_from_the_end_is_that_sample(loader_of: Any) -> None:
    dataset = SquareDataset(transform=RandomProbe())
    (batch,) = loader_of(dataset, sampler=Chosen(-1, -42))
    assert [int(sample["value"][0]) for sample in batch] == [41, 0]


def test_an_index_error_of_the_dataset_s_own_is_left_alone(loader_of: Any) -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise IndexError("a bug in the dataset")

    with pytest.raises(IndexError, match=r"^a bug in the dataset"):
        list(loader_of(Broken(torch.arange(5)), sampler=Chosen(1)))


def test_a_sampler_that_is_its_own_iterator_is_not_begun_again(loader_of: Any) -> None:
    class Own:
        """As a generator of Python is, but for `iter`, which begins anew."""

        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            self.at = 0
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at > 10:
                raise StopIteration
            return self.at

    for _ in range(2):
        assert [len(batch) for batch in loader_of(SquareDataset(), sampler=Own())] == [4, 4, 2]


# -- lengths


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_endless_stream_has_no_length_and_may_be_left(loader_of: Any, workers: int) -> None:
    loader = loader_of(Endless(), num_workers=workers)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            assert batch == [4 * number + i for i in range(4)]
            if number == 3:
                break
        assert (loader.epoch, loader.state_dict()["batches"]) == (epoch, 4)
    with pytest.raises(TypeError, match="length of a loader over Endless is not known"):
        len(loader)
    with pytest.raises(TypeError):
        len(iter(loader))
    with pytest.raises(
        ConfigError, match="length of these loaders is not known: endless; pass steps="
    ):
        MultiDataLoader({"endless": loader})


def test_an_endless_sampler_may_be_left(loader_of: Any) -> None:
    class Forever:
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(42))

    loader = loader_of(SquareDataset(), sampler=Forever(), num_workers=1)
    assert len(list(itertools.islice(loader, 20))) == 20
    with pytest.raises(TypeError, match="length"):
        len(loader)


def test_a_dataset_without_a_length(loader_of: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "WithoutLength has no length: give it __len__, make it an IterableDataset, or pass a "
            "sampler"
        ),
    ):
        loader_of(WithoutLength())
    assert list(loader_of(WithoutLength(), sampler=range(6))) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_an_empty_dataset_has_a_state(loader_of: Any, mode: str, shuffle: Any) -> None:
    with squares(mode).subset([]) as dataset:
        for options in ({}, {"drop_last": True}, {"pad": False}, {"rank": 1, "world_size": 3}):
            loader, other = (loader_of(dataset, shuffle=shuffle, **options) for _ in range(2))
            before = loader.state_dict()
            assert len(loader) == 0 and list(loader) == []
            for state in (before, loader.state_dict()):
                assert (state["batches"], state["samples"], state["length"]) == (0, 0, 0)
                other.load_state_dict(json.loads(json.dumps(state)))
                assert other.state_dict() == state
                assert list(other) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_larger_than_the_dataset(loader_of: Any, mode: str) -> None:
    with squares(mode, transform=RandomProbe()).subset(range(5)) as dataset:
        loader = loader_of(dataset, batch_size=64)
        whole = list(loader)
        assert [len(batch) for batch in whole] == [5] and len(loader) == 1
        with pytest.warns(
            HeadraceWarning,
            match=(
                r"no batch: 5 samples are fewer than one global batch \(batch_size 64 on 1 "
                r"ranks\)"
            ),
        ):
            assert same(list(loader_of(dataset, batch_size=64, drop_last=True)), [])
        ranks = [loader_of(dataset, batch_size=32, rank=rank, world_size=2) for rank in range(2)]
        parts = [next(iter(rank)) for rank in ranks]
        # one comes again, so that both have three
        assert same(dealt(parts), [*whole[0], whole[0][0]])


@pytest.mark.parametrize(("n", "world_size"), [(1, 2), (2, 3), (5, 6)])
def test_fewer_samples_than_ranks(loader_of: Any, n: int, world_size: int) -> None:
    dataset = SquareDataset().subset(range(n))
    ranks = [loader_of(dataset, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = Counter(int(sample[0]) for loader in ranks for batch in loader for sample in batch)
    assert set(seen) == set(range(n)) and sum(seen.values()) == world_size
    with pytest.raises(
        ConfigError, match=f"there are {n} for world_size={world_size}: use pad=True"
    ):
        loader_of(dataset, rank=0, world_size=world_size, pad=False)


# -- jobs of another shape


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_a_world_size_that_does_not_divide_the_global_batch(loader_of: Any, shuffle: Any) -> None:
    saved = loader_of(SquareDataset(), batch_size=4, rank=2, world_size=3, shuffle=shuffle)
    next(iter(saved))
    state = saved.state_dict()
    for batch_size in (2, 3):
        loader = loader_of(
            SquareDataset(), batch_size=batch_size, rank=0, world_size=5, shuffle=shuffle
        )
        before = loader.state_dict()
        for strict in (True, False):
            with pytest.raises(
                StateError,
                match=(
                    f"global batch of 12, this loader has {5 * batch_size}.*use a world size that "
                    "divides 12"
                ),
            ):
                loader.load_state_dict(state, strict=strict)
        assert loader.state_dict() == before and len(list(loader)) == len(loader)


def test_a_rank_beyond_the_world_is_refused_everywhere(loader_of: Any) -> None:
    for make in (loader_of, OrderSampler):
        with pytest.raises(ConfigError, match="rank=3 with world_size=3"):
            make(SquareDataset(), rank=3, world_size=3)


# -- samples that can't be read, in the midst of an epoch


@pytest.mark.parametrize("mode", MODES)
def test_skipped_samples_are_skipped_by_every_world_size(loader_of: Any, mode: str) -> None:
    """States of the midst of an epoch; a batch with skipped samples is shorter, and the others
    are what they were.
    """
    bad = [3, 11, 30, 31]
    with squares(mode, bad=bad, on_error="skip", transform=RandomProbe()) as dataset:
        one = loader_of(dataset, batch_size=12)
        whole = list(one)
        listed = [entry["index"] for entry in one.get_stats()["skipped_samples"]]
        assert sorted(listed) == bad and sum(map(len, whole)) == 38
        one.set_epoch(0)
        iterator = iter(one)
        for received in range(5):
            state = json.loads(json.dumps(one.state_dict()))
            for world_size in (1, 2, 3):
                ranks = [
                    loader_of(dataset, batch_size=12 // world_size, rank=r, world_size=world_size)
                    for r in range(world_size)
                ]
                rest: list[Any] = []
                for loader in ranks:
                    loader.load_state_dict(state)
                    assert loader.state_dict() == state
                    loader.set_epoch(0)
                    rest += [sample for batch in loader for sample in batch]
                expected = [sample for batch in whole[received:] for sample in batch]
                found = sorted(rest, key=lambda sample: int(sample["value"][0]))
                assert same(found, sorted(expected, key=lambda sample: int(sample["value"][0])))
            next(iterator, None)


@pytest.mark.slow
def test_multi_loader_with_skipped_samples_resumes(loader_of: Any) -> None:
    def make() -> Any:
        return MultiDataLoader(
            {
                name: loader_of(
                    squares("lazy", bad=[3, 20], on_error="skip", transform=RandomProbe())
                )
                for name in "ab"
            },
            "weighted",
            [2, 1],
        )

    whole = list(make())
    for received in (0, 1, 4, 7, len(whole)):
        multi, other = make(), make()
        first = list(itertools.islice(multi, received))
        other.load_state_dict(json.loads(json.dumps(multi.state_dict())))
        other.set_epoch(0)
        assert same(first + list(other), whole)


# -- what is passed for a dataset, a config or a device


@pytest.mark.parametrize(
    "door", [create_dataloader, Loader, DataModule], ids=lambda door: door.__name__
)
@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (None, "not None"),
        (5, "not 5"),
        (SquareDataset, r"not the class SquareDataset: write SquareDataset\(\.\.\.\)"),
        (
            (i for i in range(3)),
            "not a generator: give it __getitem__ and __len__, or make it an IterableDataset",
        ),
        (DataLoader([1]), "not a loader: pass its dataset"),
        (
            [SquareDataset(), SquareDataset()],
            r"not a list of .*SquareDataset.*ConcatDataset\(\[\.\.\.\]\).*MultiDataLoader",
        ),
        ((SquareDataset(), "photos"), r"not a tuple of .*ConcatDataset"),
        (
            type(
                "Frame", (), {"iloc": 0, "columns": 0, "__getitem__": 0, "__len__": lambda self: 3}
            )(),
            r"table\.to_dict\('records'\)",
        ),
    ],
)
def test_what_is_no_dataset_is_refused(door: Any, dataset: Any, said: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^{door.__name__}: (dataset|train) must be a dataset or a path, .*{said}",
    ):
        door(dataset)


def test_a_list_of_paths_with_something_else_in_it() -> None:
    with pytest.raises(ConfigError, match="begins with a path and has None at place 1"):
        create_dataloader(["photos", None])
    with pytest.raises(ConfigError, match=r"not b'photos': pass the path as text"):
        create_dataloader(b"photos")
    assert len(create_dataloader([None, "a text"], num_workers=0)) == 1


class Said(IterableDataset[int]):
    """Gives other than the number of samples that it says."""

    def __init__(self, said: int, given: int) -> None:
        self.said, self.given = said, given

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.given))


def test_more_samples_than_the_length_says_are_warned_of(make_loader: Any) -> None:
    loader = make_loader(Said(4, 8), batch_size=2, num_workers=0)
    with pytest.warns(
        HeadraceWarning, match="says by __len__ that it has 4 samples, and gives more"
    ) as caught:
        assert len(list(loader)) == len(list(loader)) == 4
    assert len(caught) == 1
    with pytest.warns(HeadraceWarning, match="or each worker gives them all"):
        list(make_loader(Said(4, 4), batch_size=2, num_workers=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(make_loader(Said(5, 5), batch_size=2, num_workers=0))


def test_dataset_that_grew_is_warned_of(make_loader: Any) -> None:
    samples = list(range(8))
    loader = make_loader(samples, batch_size=4, num_workers=0, shuffle=False)
    samples += [8, 9]
    with pytest.warns(
        HeadraceWarning, match="list had 8 samples when this loader was made, and has 10 now"
    ) as caught:
        assert [len(list(loader)) for _ in range(2)] == [2, 2]
    assert len(caught) == 1


@pytest.mark.quick_every(1)
@pytest.mark.parametrize("epoch", [1.5, True, "1"])
def test_epoch_that_is_no_integer_is_refused(make_loader: Any, epoch: Any) -> None:
    dataset = SquareDataset()
    loader = make_loader(dataset, num_workers=0)
    for counts in (
        loader,
        dataset,
        loader.sampler,
        OrderSampler(dataset),
        MultiDataLoader({"a": loader}),
    ):
        with pytest.raises(ConfigError, match="epoch must be an integer, not "):
            counts.set_epoch(epoch)
    loader.set_epoch(np.int64(3))
    assert loader.next_epoch == 3


def test_loader_takes_a_type_argument() -> None:
    assert isinstance(Loader[int](SquareDataset(), num_workers=0), Loader)


def test_a_class_among_several_loaders() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^MultiDataLoader: loaders\['a'\] must be a dataset or a path, not the class "
            r"SquareDataset"
        ),
    ):
        MultiDataLoader({"a": SquareDataset})


def test_a_dict_by_name_is_no_dataset() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "not a dict of 'train', 'test': pass one of its values, or all of them to "
            "MultiDataLoader"
        ),
    ):
        create_dataloader({"train": [1], "test": [2]})
    assert len(create_dataloader({0: 5, 1: 6}, num_workers=0)) == 1


@pytest.mark.parametrize(
    "door", [create_dataloader, Loader, DataModule], ids=lambda door: door.__name__
)
def test_a_batch_size_in_place_of_the_config(door: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^{door.__name__}: config must be a DataLoaderConfig, not 64: write batch_size=64",
    ):
        door(SquareDataset(), config=64)
    with pytest.raises(
        ConfigError,
        match=f"^{door.__name__}: config must be .*, not a dict: write options as keywords",
    ):
        door("there/is/nothing/here", config={"batch_size": 64})


@pytest.mark.parametrize(
    "door",
    [create_dataloader, Loader, DataModule, lambda data, **o: MultiDataLoader({"a": data}, **o)],
)
def test_every_door_names_the_option_that_was_meant(door: Any) -> None:
    with pytest.raises(ConfigError, match="has no 'batchsize': did you mean batch_size"):
        door(SquareDataset(), batchsize=4)
    with pytest.raises(ConfigError, match="has no 'image_size': use it where the dataset is made"):
        door(SquareDataset(), image_size=4)


def test_every_door_checks_options_before_it_opens_a_path() -> None:
    nowhere = "there/is/nothing/here"
    for door in (
        create_dataloader,
        DataModule,
        suggest_num_workers,
        lambda path, **o: MultiDataLoader({"a": path}, **o),
    ):
        with pytest.raises(ConfigError, match="has no 'imagesize': did you mean image_size"):
            door(nowhere, imagesize=4)


@pytest.mark.parametrize("name", ["collate_fn", "worker_init_fn", "sampler", "batch_sampler"])
def test_a_class_in_place_of_an_instance(name: str) -> None:
    cls = TextCollator if name in ("collate_fn", "worker_init_fn") else RandomSampler
    with pytest.raises(
        ConfigError,
        match=rf"{name} is the class {cls.__name__}, .*: write {cls.__name__}\(\.\.\.\)",
    ):
        create_dataloader(SquareDataset(), **{name: cls})


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda"), "mps", "xpu"])
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)
    with pytest.raises(
        ConfigError,
        match=(
            r"device='.*', and torch sees no (CUDA|MPS|XPU) device here: .*is_available\(\) else "
            r"'cpu'"
        ),
    ):
        create_dataloader(SquareDataset(), device=device)
    assert DataLoaderConfig(device=device).device is device  # a config may be made elsewhere


# -- what workers can't import


def collate_here(samples: list[Any]) -> Any:
    return samples


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_function_of_a_notebook_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(main, "collate_here", collate_here, raising=False)
    create_dataloader(
        SquareDataset(), num_workers=1, multiprocessing_context=start, collate_fn=collate_here
    )
    monkeypatch.setattr(collate_here, "__module__", "__main__")
    with pytest.raises(
        ConfigError,
        match=(
            rf"collate_fn needs collate_here, .* notebook .*{start} can't import it.*put it in a "
            r"module"
        ),
    ):
        create_dataloader(
            SquareDataset(), num_workers=1, multiprocessing_context=start, collate_fn=collate_here
        )
    for options in ({"num_workers": 0}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        create_dataloader(SquareDataset(), collate_fn=collate_here, **options)


def test_a_program_of_no_file_can_not_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"import the program again, and this one was not read from a file \(<stdin>\)",
    ):
        create_dataloader(SquareDataset(), num_workers=1, multiprocessing_context="spawn")


class Ended(SimpleNamespace):
    """A process that has ended, as far as is asked."""

    @property
    def sentinel(self) -> int:
        return self.end


@pytest.mark.parametrize(
    ("start", "code", "said"),
    [
        (
            "spawn",
            1,
            "Its own error stands above this one. Workers started by spawn import the program "
            "again: .*__main__",
        ),
        ("forkserver", 1, "Workers started by forkserver import the program again"),
        ("fork", 3, r"ended the process \(sys.exit"),
        ("fork", 0, r"ended the process \(sys.exit"),
        ("fork", -9, "If it was killed for want of memory"),
        ("spawn", -11, "A library that it calls has crashed: `python -X faulthandler`"),
        ("fork", None, "If it was killed for want of memory"),
    ],
)
def test_a_dead_worker_s_remedy_follows_from_its_end(
    start: str, code: int | None, said: str
) -> None:
    reading, writing = os.pipe()
    os.close(writing)  # which makes the other end ready, as a sentinel is
    worker = Ended(pid=1, exitcode=code, end=reading, _start_method=start)
    deliveries = SimpleNamespace(workers=[worker], missing_of=lambda number: None)
    try:
        error = death_of(
            RuntimeError("DataLoader worker (pid 1) exited unexpectedly"), deliveries, 0, 0, 0, 0
        )
    finally:
        os.close(reading)
    assert re.search(said, str(error))


@pytest.mark.slow
def test_a_script_without_a_main_block_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    call = "create_dataloader(range(9), num_workers=1, multiprocessing_context='spawn')"
    script.write_text(f"from headrace import create_dataloader\nlist({call})\n")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (
        ran.returncode == 1
        and "begin it with `if __name__ == '__main__':`" in ran.stderr.splitlines()[-1]
    )


# -- the end


@pytest.mark.parametrize("workers", [0, 1])
def test_a_with_block_ends_the_workers_of_a_held_iterator(workers: int) -> None:
    with create_dataloader(SquareDataset(), batch_size=4, num_workers=workers) as loader:
        assert isinstance(loader, Loader)
        held = iter(loader)
        assert len(next(held)) == 4
        assert len(living_children()) == workers
    until = time.monotonic() + 5
    while living_children() and time.monotonic() < until:
        time.sleep(0.01)
    assert not living_children()
    with pytest.raises(WorkerError, match="closed during this epoch"):
        next(held)
    with loader:
        assert len(list(loader)) == 11  # it can be used again


def test_a_loader_s_repr_is_short() -> None:
    loader = create_dataloader(
        SquareDataset(loading_mode="cached"), batch_size=4, num_workers=0, seed=7
    )
    assert repr(loader) == (
        "Loader(<SquareDataset, 42 samples, cached>, batches=11, batch_size=4, shuffle=True, "
        "num_workers=0, seed=7)"
    )
    loader = create_dataloader(
        SquareDataset(),
        num_workers=0,
        drop_last=True,
        rank=0,
        world_size=2,
        device="cpu",
        weights=[1] * 42,
    )
    assert repr(loader) == (
        "Loader(<SquareDataset, 42 samples, lazy>, batches=0, batch_size=32, weights=list, "
        "num_workers=0, seed=42, rank=0, world_size=2, "
        "drop_last=True, device=cpu)"
    )
    assert repr(create_dataloader(Endless(), num_workers=0)) == (
        "Loader(<Endless>, batch_size=32, shuffle=False, num_workers=0, seed=42)"
    )
