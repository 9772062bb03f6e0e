"""Profiles: what they find, tell and write."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import headrace
from headrace import (
    BaseDataset,
    BudgetError,
    ConfigError,
    HDF5Dataset,
    ImageDataset,
    Profile,
    Source,
    create_dataloader,
    profile_dataloader,
)
from headrace.cli.main import main
from headrace.loader import data
from headrace.monitor.stats import STAGES
from headrace.profiling.alone import Alone, reading_gain, repeated
from headrace.profiling.frozen import Frozen
from headrace.profiling.images import as_uint8, smaller_files
from headrace.profiling.limit import Candidate, Found, find_limit
from headrace.profiling.model import Costs
from headrace.profiling.profile import _after_trying, _ceiling
from headrace.profiling.report.result import Advice, Stage
from headrace.profiling.running import Running, Turn, joined, run_step
from headrace.profiling.trying import try_advice
from tests.data.make import make_photos
from tests.testing.test_contract import SquareDataset, bad_photos

SECONDS = 2.0


class Waiting(Source):
    """Records that take a while to be read."""

    def __init__(self, wait: float, count: int = 96) -> None:
        self._wait, self._count = wait, count

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Any) -> list[Any]:
        time.sleep(self._wait * len(indices))
        return [np.full(8, index, np.float32) for index in indices]

    def fingerprint(self) -> str:
        return f"waiting:{self._count}"


class Slow(BaseDataset):
    def __init__(
        self, read: float = 0.0, decode: float = 0.0, transform: Any = None, mode: Any = "lazy"
    ) -> None:
        self._decode = decode
        super().__init__(Waiting(read), transform=transform, loading_mode=mode)

    def decode(self, record: Any) -> Any:
        time.sleep(self._decode)
        return record


def slow(value: Any) -> Any:
    time.sleep(0.005)
    return value


def slow_batch(samples: list[Any]) -> Any:
    time.sleep(0.03)
    return torch.stack([torch.as_tensor(sample) for sample in samples])


def loader_of(dataset: Any, **options: Any) -> Any:
    return create_dataloader(dataset, **{"batch_size": 4, "num_workers": 0, **options})


def rest(batch: Any) -> None:
    time.sleep(0.001)


def step_ms(verdict: str) -> float:
    """What a verdict says that the step takes, where there is nothing to gain."""
    match = re.match(r"Nothing to gain from data: the step takes ([\d.]+) ms a batch, ", verdict)
    assert match is not None, verdict
    return float(match[1])


# -- what is found; the waits are so long that other work on the machine does not change the answer


@pytest.mark.parametrize(
    ("dataset", "options", "limit"),
    [
        (lambda: Slow(read=0.005), {}, "read"),
        (lambda: Slow(decode=0.005), {}, "decode"),
        (lambda: Slow(transform=slow), {}, "transform"),
        (lambda: Slow(), {"collate_fn": slow_batch}, "collate"),
    ],
)
@pytest.mark.quick_every(4)
def test_the_slow_stage_is_named(dataset: Any, options: dict[str, Any], limit: str) -> None:
    profile = profile_dataloader(loader_of(dataset(), **options), rest, SECONDS)
    assert profile.limit == limit and profile.is_limited_by_data
    [stage] = [stage for stage in profile.stages if stage.is_limit]
    assert stage.name.startswith(limit) and stage.share is not None and stage.share > 0.5
    assert profile.most_gain is not None and profile.most_gain > 2
    assert {one.name for one in profile.advice} & {
        "num_workers",
        "loading_mode",
        "transform",
        "collate_fn",
    }
    assert all(one.predicted > 1 and one.measured is None for one in profile.advice)


@pytest.mark.slow
def test_a_slow_step_has_nothing_to_gain() -> None:
    profile = profile_dataloader(loader_of(Slow()), lambda batch: time.sleep(0.2), SECONDS)
    assert profile.limit == "step" and not profile.is_limited_by_data and profile.advice == []
    assert step_ms(profile.verdict) >= 200
    assert "step" in {stage.name for stage in profile.stages if stage.is_limit}


@pytest.mark.slow
def test_advice_is_measured() -> None:
    profile = profile_dataloader(loader_of(Slow(decode=0.005)), rest, 12.0, apply=True)
    [cached] = [one for one in profile.advice if one.name == "loading_mode"]
    assert cached.measured is not None and cached.spread is not None
    assert cached.spread[0] <= cached.measured <= cached.spread[1] and cached.measured > 2
    assert (
        'loading_mode="cached"' in profile.config_to_paste()
        or "num_workers" in profile.config_to_paste()
    )


@pytest.mark.slow
def test_of_workers_too() -> None:
    profile = profile_dataloader(loader_of(Slow(decode=0.005), num_workers=2), rest, 6.0)
    assert profile.limit == "decode" and profile.workers == 2
    assert {one["worker_pid"] for one in profile.batches} and len(
        {one["worker_pid"] for one in profile.batches}
    ) == 2


@pytest.mark.slow
def test_without_a_step_the_loader_is_measured_alone() -> None:
    profile = profile_dataloader(loader_of(Slow(read=0.005)), seconds=SECONDS)
    assert (
        profile.limit == "read"
        and not profile.has_step
        and profile.free_per_second is None
        and profile.most_gain is None
    )
    assert profile.loading_per_second == profile.samples_per_second


@pytest.mark.slow
def test_the_loader_is_left_as_it_is() -> None:
    loader = loader_of(Slow())
    loader.set_epoch(3)
    iterator = iter(loader)
    first, state, random = next(iterator), loader.state_dict(), torch.get_rng_state()
    profile_dataloader(loader, rest, SECONDS)
    assert (
        loader.state_dict() == state
        and torch.equal(torch.get_rng_state(), random)
        and loader.get_stats()["batches"] == 1
    )
    assert len(list(iterator)) == 23 and first.shape == (4, 8)


@pytest.mark.parametrize("kind", ["squares", "photos"])
@pytest.mark.quick_every(2)
@pytest.mark.slow
def test_samples_that_are_skipped_are_skipped(kind: str, tmp_path: Path) -> None:
    if kind == "photos":
        loader = loader_of(
            ImageDataset(bad_photos(tmp_path / "bad"), image_size=16, on_error="skip"), batch_size=8
        )
    else:
        loader = loader_of(SquareDataset(bad=[5, 30], on_error="skip"))
    profile = profile_dataloader(loader, lambda batch: time.sleep(0.05), SECONDS)
    assert profile.samples_per_second > 0 and {stage.name for stage in profile.stages} >= {
        "read (warm)",
        "decode",
        "collate",
    }
    list(loader)
    assert loader.get_stats()["skipped"] == 2, "what the profile has skipped is not the loader's"


class Gone(Waiting):
    """Records that are there at first."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._reads = 0

    def read(self, indices: Any) -> list[Any]:
        self._reads += 1
        if self._reads > 2:
            raise OSError("the disk is gone")
        return super().read(indices)


def test_an_error_of_a_thread_that_reads_is_raised() -> None:
    dataset = BaseDataset(Gone())
    requests = repeated(lambda epoch: loader_of(dataset)._plan.requests(epoch, 0), 0)
    with pytest.raises(OSError, match="the disk is gone"):
        reading_gain(dataset, requests, (1, 4), 20.0)


class Noted(Waiting):
    """Records that note which copy of their source was read."""

    read_by: ClassVar[list[int]] = []

    def read(self, indices: Any) -> list[Any]:
        self.read_by.append(id(self))
        return super().read(indices)


def test_sources_are_open_before_reading_is_timed() -> None:
    Noted.read_by.clear()
    dataset = BaseDataset(Noted(0.001))
    requests = repeated(lambda epoch: loader_of(dataset)._plan.requests(epoch, 0), 0)
    assert reading_gain(dataset, requests, (2, 5), 0.2) is not None
    assert len(set(Noted.read_by[:5])) == 5, "each source is read once before the first is timed"
    assert len(set(Noted.read_by)) == 5 and id(dataset.sample_source) not in Noted.read_by


def test_a_cache_is_filled_as_in_a_training() -> None:
    with Slow(mode="cached") as dataset:
        profile_dataloader(loader_of(dataset), seconds=1)
        assert dataset.mode.stats()["held"] == 96


@pytest.mark.slow
def test_a_cache_is_not_filled_by_the_way() -> None:
    dataset, before = Slow(read=0.002), threading.active_count()
    profile_dataloader(loader_of(dataset), rest, SECONDS)
    assert dataset.mode.stats() == {} and threading.active_count() <= before


@pytest.mark.slow
def test_a_torch_loader() -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.002)
            return torch.full((4,), float(index)), index

    profile = profile_dataloader(DataLoader(Rows(), batch_size=8, shuffle=True), rest, SECONDS)
    assert profile.limit == "sample" and "__getitem__" in profile.verdict
    assert {stage.name for stage in profile.stages} >= {"sample", "collate", "step"}
    assert all(one.code.startswith("DataLoader(") for one in profile.advice if one.code)


@pytest.mark.slow
def test_samples_without_numbers() -> None:
    class Count(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for number in range(40):
                time.sleep(0.002)
                yield torch.tensor([float(number)])

    for loader in (DataLoader(Count(), batch_size=4), loader_of(Count())):
        profile = profile_dataloader(loader, rest, SECONDS)
        assert (
            profile.limit in ("sample", "read", "workers")
            and profile.most_gain is not None
            and profile.most_gain > 2
        )


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_blocks_are_advised_where_chunks_are_decoded(tmp_path: Path, compression: Any) -> None:
    """And not where each row is read by itself."""
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        rows = np.random.default_rng(0).integers(0, 99, (512, 4096), np.uint8)
        file.create_dataset("data", data=rows, chunks=(64, 4096), compression=compression)
    profile = profile_dataloader(
        loader_of(HDF5Dataset(tmp_path / "rows.h5"), batch_size=8, shuffle=True), seconds=SECONDS
    )
    assert any("shuffle='block'" in one.code for one in profile.advice) == (compression is not None)


def test_images_are_read_cold_and_warm(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # of a machine that is busy otherwise
    monkeypatch.setattr("headrace.profiling.profile._NOISE", math.inf)
    profile = profile_dataloader(
        loader_of(ImageDataset(photos, image_size=16), batch_size=8), seconds=SECONDS
    )
    names = [stage.name for stage in profile.stages]
    assert names[:5] == ["read (cold)", "read (warm)", "decode", "transform", "collate"]
    assert all(stage.samples_per_second > 0 for stage in profile.stages)
    assert all(
        stage.ceiling
        for stage in profile.stages
        if stage.name in ("read (warm)", "decode", "collate")
    )


@pytest.mark.parametrize(
    ("measured", "limit"), [(None, "workers"), (1.5, "workers"), (1.02, "decode")]
)
def test_more_workers_that_do_not_help_are_not_the_limit(
    measured: float | None, limit: str
) -> None:
    times = {f"{stage}_seconds": 0.0 for stage in STAGES} | {
        "decode_seconds": 9.0,
        "work_seconds": 10.0,
        "work_cpu_seconds": 10.0,
    }
    turn = Turn(samples=1000, batches=10, seconds=10.0, wait=8.0, times=times)
    costs = Costs(work=0.01, cpu=0.01, main=0.0, step=0.002, step_cpu=0.0, workers=1, cores=4)
    found = Found(loader_of(Slow()), turn, turn, Turn(), 5.0, Alone(), costs, None)
    assert find_limit(found) == "workers"
    candidate = Candidate(
        Advice("num_workers", "", "", 4.0, measured, options={"num_workers": 4}), None
    )
    assert _after_trying("workers", [candidate], found) == limit


def test_workers_that_wait_are_not_too_few() -> None:
    times = {f"{stage}_seconds": 0.0 for stage in STAGES} | {
        "read_seconds": 9.0,
        "work_seconds": 10.0,
        "work_cpu_seconds": 1.0,
    }
    turn = Turn(samples=1000, batches=10, seconds=10.0, wait=8.0, times=times)
    costs = Costs(work=0.01, cpu=0.001, main=0.0, step=0.002, step_cpu=0.0, workers=1, cores=4)
    found = Found(loader_of(Slow()), turn, turn, Turn(), 5.0, Alone(), costs, None)
    assert find_limit(found) == "read" and found.waiting == pytest.approx(0.9)
    turn.queued = 8.0
    assert find_limit(found) == "workers", "what is ready and has no core does not wait for a disk"


@pytest.fixture(scope="module")
def large_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of 640 x 480."""
    return make_photos(
        tmp_path_factory.mktemp("large"), classes=("noise",), per_class=16, size=(640, 480)
    )


@pytest.mark.slow
def test_images_may_be_smaller_and_uint8(large_photos: Path) -> None:
    loader = loader_of(ImageDataset(large_photos, image_size=96), batch_size=4)
    profile = profile_dataloader(loader, rest, SECONDS)
    advice = {one.name: one for one in profile.advice}
    assert (
        "--store jpeg --max-size 120 --quality 90" in advice["smaller files"].code
        and str(large_photos) in advice["smaller files"].code
    )
    assert advice["smaller files"].predicted > 1.2
    view = as_uint8(loader.dataset)
    assert view is not None and next(iter(loader_of(view)))[0].dtype == torch.uint8
    assert (
        as_uint8(view) is None
        and as_uint8(ImageDataset(large_photos, transform=lambda image: image)) is None
    )
    assert (
        smaller_files(
            ImageDataset(large_photos, image_size=600),
            lambda epoch: loader._plan.requests(epoch, 0),
        )
        is None
    )


@pytest.mark.slow
def test_uint8_until_the_device_is_no_advice(
    large_photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "is_accelerator", lambda device: device is not None)
    loader = loader_of(ImageDataset(large_photos, image_size=96), batch_size=4, device="cpu")
    profile = profile_dataloader(loader, rest, SECONDS)
    assert "uint8" not in {one.name for one in profile.advice} and loader._images.pixels is not None


@pytest.mark.slow
def test_of_other_batches_the_step_gets_one_that_it_knows(large_photos: Path) -> None:
    loader = loader_of(ImageDataset(large_photos, image_size=96), batch_size=4)
    view, seen = as_uint8(loader.dataset), []
    candidate = Candidate(
        Advice("uint8", "", "", 1.2), lambda: (loader_of(view), None), None, keeps_batch=True
    )
    try_advice(loader, candidate, None, lambda batch: seen.append(batch[0].dtype), 3.0)
    assert candidate.advice.measured is not None and set(seen) == {torch.float32}


def test_advice_that_can_not_be_tried_says_so() -> None:
    def variant() -> Any:
        raise BudgetError("no room")

    candidate = Candidate(Advice("num_workers", "", "", 2.0), variant)
    try_advice(loader_of(Slow()), candidate, None, None, 1.0)
    assert (
        candidate.advice.measured is None
        and candidate.advice.not_measured == "it could not be tried: no room"
    )


# -- what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loader": [1, 2]}, "loader must be a Loader or a torch DataLoader"),
        ({"step": 3}, "step must be a callable"),
        ({"seconds": 0.5}, "seconds must be a number of seconds, at least 1, not 0.5"),
        ({"seconds": float("nan")}, "seconds must be"),
        ({"seconds": True}, "seconds must be"),
    ],
)
def test_arguments_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    arguments = {"loader": DataLoader(TensorDataset(torch.zeros(4))), **given}
    with pytest.raises(ConfigError, match=message):
        profile_dataloader(**arguments)


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ConfigError, match="an epoch has no batch"):
        profile_dataloader(DataLoader(TensorDataset(torch.zeros(0, 3))), seconds=1)


def test_what_a_step_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        profile_dataloader(loader_of(Slow()), lambda batch: 1 / 0, 1)


# -- what is told


def made() -> Profile:
    stages = [
        Stage("decode", 500.0, 1000.0, "the <decoder> alone", 0.9, True),
        Stage("workers", 900.0),
    ]
    advice = [
        Advice(
            "num_workers",
            "1 of 4 cores",
            "create_dataloader(dataset, num_workers=4)",
            2.0,
            1.9,
            (1.8, 2.1),
            options={"num_workers": 4},
        ),
        Advice(
            "packing",
            "it is large",
            "headrace pack",
            1.5,
            not_measured="not measured: it writes a file",
        ),
    ]
    told = {
        "epoch": 0,
        "samples": 4,
        "step_seconds": 0.01,
        "wait_seconds": 0.02,
        "work_seconds": 0.03,
        "worker_pid": 7,
    }
    stage_times = {f"{stage}_seconds": 0.004 for stage in STAGES}
    batches = [
        {**told, **stage_times, "step": n, "began": 1.02 + n / 20, "received": 1.05 + n / 20}
        for n in range(9)
    ]
    series = [(0.5, 100.0, 10**9), (1.0, 120.0, 2 * 10**9)]
    return Profile(
        "Loader(<Slow>)",
        "Decoding & more holds the loop back.",
        "decode",
        True,
        100.0,
        110.0,
        300.0,
        3.0,
        0.7,
        0.9,
        "transform",
        1,
        4,
        stages,
        advice,
        {"batch_size": 4},
        batches,
        series,
        9.0,
    )


def test_a_profile_as_text() -> None:
    text = str(made())
    assert text.splitlines()[0] == "Decoding & more holds the loop back."
    assert (
        "x3.00 is the most that data can gain" in text
        and "<-- limit" in text
        and "x1.80 to x2.10" in text
    )
    assert (
        "not measured: it writes a file" in text
        and "the transform holds the interpreter's lock (90% of its time held)" in text
    )
    assert text.endswith("the best of what was measured: create_dataloader(dataset, num_workers=4)")
    assert json.loads(json.dumps(made().as_dict()))["advice"][0]["spread"] == [1.8, 2.1]


def test_the_best_is_what_was_measured() -> None:
    profile = made()
    profile.advice[0].measured = 1.01
    assert profile.best is None and profile.config_to_paste() == ""


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made().save_plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"save_plot: .*profile\.none"):
        made().save_plot(tmp_path / "profile.none")


def test_a_list_of_tensors_is_as_many_samples() -> None:
    running = Running(loader_of(Slow(transform=torch.as_tensor), collate_fn="list"))
    try:
        kept = running.first(2)
        assert [(len(batch), batch[0].shape, samples) for batch, samples in kept] == [
            (4, (8,), 4)
        ] * 2
        free, loop = run_step(kept, rest, 0.01), running.run(0.01, rest)
        assert (free.samples, loop.samples) == (4 * free.batches, 4 * loop.batches)
    finally:
        running.close()


def test_turns_are_joined() -> None:
    first = Turn(10, 2, 1.0, 0.5, series=[(0.5, 10.0, 7)], others=1.0)
    second = Turn(30, 4, 3.0, 0.5, series=[(1.0, 20.0, 8)], others=2.0)
    whole = joined([first, second])
    assert (whole.samples, whole.batches, whole.seconds, whole.wait, whole.others) == (
        40,
        6,
        4.0,
        1.0,
        1.5,
    )
    assert whole.series == [(0.5, 10.0, 7), (2.0, 20.0, 8)] and whole.rate == 10.0


def test_frozen_code_is_called_once() -> None:
    calls: list[int] = []

    def transform(value: int) -> Any:
        calls.append(value)
        return torch.tensor([value]), {"a": torch.tensor([2.0])}

    frozen = Frozen(transform)
    first, second = frozen(1), frozen(2)
    assert (
        calls == [1]
        and torch.equal(first[0], second[0])
        and first[0] is not second[0]
        and first[1]["a"] is not second[1]["a"]
    )


# -- the command

PROGRAM = """
import time
import torch
from torch.utils.data import TensorDataset
from headrace import create_dataloader

dataset = TensorDataset(torch.zeros(64, 4))
made = []

def loader():
    made.append(create_dataloader(dataset, batch_size=4, num_workers=0))
    return made[-1]

def step(batch):
    time.sleep(0.2)

def broken(batch):
    raise ValueError("no such loss")

number = 3
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"training_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return name


@pytest.mark.parametrize("ending", ["", ".py"])
@pytest.mark.quick_every(2)
def test_the_command(
    program: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "out.html"
    command = [
        "profile",
        f"{program}{ending}:loader",
        "--step",
        f"{program}:step",
        "--seconds",
        "2",
        "--html",
        str(page),
    ]
    assert main(command) == 0
    shown = capsys.readouterr().out
    [stage] = re.findall(r"^step +([\d.,]+) ", shown, re.MULTILINE)
    # samples a second: 4 in 0.2 s at most
    assert 0 < float(stage) <= 20 and f"written: {page}" in shown
    assert page.read_text().startswith("<!doctype html>")


def test_the_command_prints_json(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(photos), "--batch-size", "4", "--seconds", "1.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["has_step"] is False and document["verdict"] and document["stages"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:nothing"], "has no nothing"),
        (["no_such_module:loader"], "no_such_module can't be imported"),
        (["none.py:loader"], "there is no file"),
        (["{}:loader", "--step", "{}:number"], "is no function, but a int"),
        (["{}:loader", "--step", "step"], "names no function: write MODULE:NAME"),
        (["{}:loader", "--step", "{}:broken"], "raised ValueError: no such loss"),
        (["{}:loader", "--html", "none/out.html"], "the folder"),
        (["{}:number"], "dataset must be a dataset or a path"),
        (["none"], "none"),
    ],
)
def test_wrong_use_of_the_command(
    program: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["profile", *(one.replace("{}", program) for one in arguments), "--seconds", "1"]) == 2
    )
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_docs_run(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "train").symlink_to(photos, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "profiling.md"
    [block] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/profiling.md", "exec"), names)
    assert (tmp_path / "profile.html").exists() and isinstance(names["profile"], Profile)


def test_public_names() -> None:
    assert headrace.profile_dataloader is profile_dataloader and headrace.Profile is Profile


def test_a_ceiling_is_not_below_its_stage() -> None:
    assert _ceiling(106.58, 1.0) is None and _ceiling(1.0, None) is None
    assert _ceiling(105.0, 100.0) == 105.0 and _ceiling(50.0, 100.0) == 100.0
