"""Profiles: what they find, tell and write."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from headrace import (
    BaseDataset,
    ConfigError,
    HDF5Dataset,
    Source,
    create_dataloader,
    profile_dataloader,
    suggest_num_workers,
)
from headrace.cli.main import main
from headrace.profiling import Profile, profile as profiling
from headrace.profiling.profile import Costs, Measured, _verdict, advise, find_limit, more_workers
from headrace.profiling.result import Advice, Stage
from headrace.profiling.running import Turn
from tests.testing.test_contract import SquareDataset

SECONDS = 2.0


class Waiting(Source):
    """Records that take a while to be read."""

    def __init__(self, wait: float) -> None:
        self._wait = wait

    def __len__(self) -> int:
        return 96

    def read(self, indices: Any) -> list[Any]:
        time.sleep(self._wait * len(indices))
        return [np.full(8, index, np.float32) for index in indices]

    def fingerprint(self) -> str:
        return "waiting"


class Slow(BaseDataset):
    def __init__(self, read: float = 0.0, decode: float = 0.0, **options: Any) -> None:
        self._decode = decode
        super().__init__(Waiting(read), **options)

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


def slow_step(batch: Any) -> None:
    time.sleep(0.2)


# --- what is found; the waits are so long that other work on the machine does not change the answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "options", "limit"),
    [
        ({"decode": 0.005}, {}, "decode"),
        ({"read": 0.005}, {}, "read"),
        ({"transform": slow}, {}, "transform"),
        ({}, {"collate_fn": slow_batch}, "collate"),
        ({"decode": 0.005}, {"num_workers": 2}, "decode"),
    ],
)
def test_the_slow_stage_is_named(
    dataset: dict[str, Any], options: dict[str, Any], limit: str
) -> None:
    seconds = 6.0 if options.get("num_workers") else SECONDS
    profile = profile_dataloader(loader_of(Slow(**dataset), **options), rest, seconds)
    assert profile.limit == limit
    [stage] = [stage for stage in profile.stages if stage.is_limit]
    assert stage.name.startswith(limit) and stage.share is not None and stage.share > 0.5
    assert profile.most_gain is not None and profile.most_gain > 2
    names = {one.name for one in profile.advice}
    assert names & {"num_workers", "loading_mode", "transform", "collate_fn"}
    assert all(one.predicted > 1 and one.measured is None for one in profile.advice)


@pytest.mark.slow
def test_a_slow_step_has_nothing_to_gain() -> None:
    profile = profile_dataloader(loader_of(Slow()), slow_step, SECONDS)
    assert profile.limit == "step" and profile.advice == []
    match = re.match(r"Nothing to gain .* step takes ([\d.]+) ms a batch", profile.verdict)
    assert match is not None and float(match[1]) >= 200


@pytest.mark.slow
def test_advice_is_measured() -> None:
    profile = profile_dataloader(loader_of(Slow(decode=0.005)), rest, 12.0, apply=True)
    [cached] = [one for one in profile.advice if one.name == "loading_mode"]
    assert cached.measured is not None and cached.spread is not None
    assert cached.spread[0] <= cached.measured <= cached.spread[1] and cached.measured > 2
    assert re.search('loading_mode="cached"|num_workers', profile.config_to_paste())


@pytest.mark.slow
def test_without_a_step_the_loader_is_measured_alone() -> None:
    profile = profile_dataloader(loader_of(Slow(read=0.005)), seconds=SECONDS)
    assert profile.limit == "read"
    assert profile.free_per_second is None and profile.most_gain is None
    assert profile.loading_per_second == profile.samples_per_second


@pytest.mark.slow
def test_the_loader_is_left_as_it_is() -> None:
    dataset, threads = Slow(read=0.002), threading.active_count()
    loader = loader_of(dataset)
    loader.set_epoch(3)
    iterator = iter(loader)
    first, state, drawn = next(iterator), loader.state_dict(), torch.get_rng_state()
    profile_dataloader(loader, rest, SECONDS)
    assert loader.state_dict() == state and loader.get_stats()["batches"] == 1
    assert torch.equal(torch.get_rng_state(), drawn) and threading.active_count() <= threads
    assert len(list(iterator)) == 23 and first.shape == (4, 8) and dataset.held is None


def test_generators_of_a_torch_loader_are_restored() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Rows(), 4, shuffle=True, generator=generator)
    state = generator.get_state()
    suggest_num_workers(loader, seconds=0.01, most=0)
    profile_dataloader(loader, seconds=1)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.slow
def test_samples_that_are_skipped_are_skipped() -> None:
    loader = loader_of(SquareDataset(bad=[5, 30], on_error="skip"))
    profile = profile_dataloader(loader, rest, SECONDS)
    names = {stage.name for stage in profile.stages}
    assert profile.samples_per_second > 0 and names >= {"read", "decode", "collate"}
    list(loader)
    assert loader.get_stats()["skipped"] == 2, "what the profile has skipped is not the loader's"


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.full((4,), float(index)), index


class Count(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for number in range(40):
            time.sleep(0.002)
            yield torch.tensor([float(number)])


@pytest.mark.slow
def test_datasets_of_torch() -> None:
    profile = profile_dataloader(DataLoader(Rows(), batch_size=8, shuffle=True), rest, SECONDS)
    assert profile.limit == "sample" and "__getitem__" in profile.verdict
    assert {stage.name for stage in profile.stages} >= {"sample", "collate", "step"}
    assert all(one.code.startswith("DataLoader(") for one in profile.advice if one.code)
    for loader in (DataLoader(Count(), batch_size=4), loader_of(Count())):
        profile = profile_dataloader(loader, rest, SECONDS)
        assert profile.limit in ("sample", "read", "workers")
        assert profile.most_gain is not None and profile.most_gain > 2


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_blocks_are_advised_where_chunks_are_decoded(compression: Any, tmp_path: Path) -> None:
    """And not where each row is read by itself."""
    rows = np.random.default_rng(0).integers(0, 99, (512, 4096), np.uint8)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("data", data=rows, chunks=(64, 4096), compression=compression)
    loader = loader_of(HDF5Dataset(tmp_path / "rows.h5"), batch_size=8, shuffle=True)
    profile = profile_dataloader(loader, seconds=1)
    is_advised = any("shuffle='block'" in one.code for one in profile.advice)
    assert is_advised == (compression is not None)


# --- rules, of made measurements -----------------------------------------------------------------

COSTS = Costs(work=0.010, cpu=0.010, main=0.0, step=0.0, step_cpu=0.0, workers=1, cores=8)


def costs(**values: Any) -> Costs:
    return dataclasses.replace(COSTS, **values)


def test_the_rate_of_a_loop() -> None:
    rows: list[tuple[dict[str, Any], float]] = [
        ({}, 100),
        ({"workers": 4}, 400),
        ({"workers": 16}, 800),  # the cores are the limit
        ({"workers": 16, "cpu": 0.001}, 1600),  # they wait
        ({"workers": 0}, 100),
        ({"workers": 0, "step": 0.010}, 50),  # one after the other
        ({"workers": 4, "step": 0.010}, 100),
        ({"workers": 4, "step": 0.010, "main": 0.010}, 50),
        ({"workers": 4, "cores": 2, "step": 0.001, "step_cpu": 0.010}, 100),
    ]
    for values, rate in rows:
        assert costs(**values).loop() == pytest.approx(rate), values
    assert measured_of("decode", 1.0).gain(saved=0.008) == pytest.approx(5)


def measured_of(stage: str, cpu: float, **others: Any) -> Measured:
    """One worker of four cores that is busy with a stage, and computes for a part of that."""
    times = {f"{stage}_seconds": 9.0, "work_seconds": 10.0, "work_cpu_seconds": 10 * cpu}
    turn = Turn(samples=1000, batches=10, seconds=10.0, wait=8.0, times=times)
    free = Turn(samples=5000, seconds=10.0)
    made = costs(cpu=0.01 * cpu, step=0.002, cores=4, **others)
    return Measured(DataLoader(TensorDataset(torch.zeros(20)), 2), turn, turn, free, made)


def test_the_fewest_workers_that_are_best() -> None:
    assert more_workers(measured_of("decode", 1.0)) == 4
    assert more_workers(measured_of("decode", 1.0, main=0.0028)) == 3
    assert more_workers(measured_of("decode", 1.0, workers=4)) is None
    assert more_workers(measured_of("read", 0.1, workers=2)) == 5


def test_workers_that_wait_are_not_too_few() -> None:
    assert find_limit(measured_of("decode", 1.0)) == "workers"
    assert find_limit(measured_of("decode", 1.0), may_be_workers=False) == "decode"
    assert find_limit(measured_of("read", 0.1)) == "read"
    moving = measured_of("decode", 1.0)
    moving.alone.times["transfer_time"] = 20.0
    assert find_limit(moving) == "transfer"


def test_no_gain_beyond_that_of_free_data() -> None:
    [workers, *_] = advise(measured_of("decode", 1.0), "workers")
    assert (workers.name, workers.options) == ("num_workers", {"num_workers": 4})
    assert workers.predicted == pytest.approx(4)
    capped = measured_of("decode", 1.0)
    capped.free = Turn(samples=2000, seconds=10.0)
    assert {one.predicted for one in advise(capped, "workers")} == {2.0}
    assert advise(capped, "step") == []


def test_slow_starts_and_uneven_batches() -> None:
    """Workers that start for each epoch, and a loader that is fast enough on average."""
    measured = measured_of("decode", 1.0)
    measured.loop = Turn(samples=1000, batches=10, seconds=20.0, wait=8.0, starts=[5.0])
    measured.free = Turn(samples=1500, seconds=20.0)
    advice = {one.name: one for one in advise(measured, "workers")}
    assert advice["prefetch_factor"].options == {"prefetch_factor": 8}
    assert "takes 4.67 s" in advice["persistent_workers"].why


@pytest.mark.parametrize(
    ("gain", "limit"), [(1.5, "workers"), pytest.param(1.02, "decode", marks=pytest.mark.slow)]
)
def test_more_workers_that_do_not_help_are_not_the_limit(
    gain: float, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(loader: Any, advice: Advice, *_: Any) -> None:
        advice.measured = gain
        advice.spread = (gain, gain)

    monkeypatch.setattr(profiling, "_measure", lambda *_: measured_of("decode", 1.0))
    monkeypatch.setattr(profiling, "_try", tried)
    profile = profile_dataloader(loader_of(Slow()), apply=True)
    assert profile.limit == limit and profile.advice[0].name == "num_workers"
    assert (profile.best is None) == (gain < 1.08)


# --- what is refused ------------------------------------------------------------------------------


def test_arguments_that_make_no_sense() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4)))
    empty = DataLoader(TensorDataset(torch.zeros(0, 3)))
    rows: list[tuple[dict[str, Any], str]] = [
        ({"loader": [1, 2]}, "loader"),
        ({"step": 3}, "step"),
        ({"seconds": 0.5}, "seconds .*0.5"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": True}, "seconds"),
        ({"loader": empty, "seconds": 1}, "no batch"),
    ]
    for given, word in rows:
        with pytest.raises(ConfigError, match=word):
            profile_dataloader(**{"loader": loader, **given})
    with pytest.raises(ZeroDivisionError):
        profile_dataloader(loader_of(Slow()), lambda batch: 1 / 0, 1)


# --- what is told ---------------------------------------------------------------------------------


def made() -> Profile:
    code = "create_dataloader(dataset, num_workers=4)"
    workers = Advice("num_workers", "1 of 4 cores", code, 2.0, 1.9, (1.8, 2.1))
    workers.options = {"num_workers": 4}
    packing = Advice("packing", "it is <large>", "headrace pack", 1.5)
    decode = Stage("decode", 500.0, 0.9, True)
    return Profile(
        *("Loader(<Slow>)", "Decoding & more limits the loop.", "decode"),
        *(100.0, 110.0, 300.0, 3.0, 0.7, 1, 4),
        [decode, Stage("workers", 900.0)],
        [workers, packing],
        {"batch_size": 4},
        9.0,
    )


def test_a_profile_as_text() -> None:
    profile = made()
    text = str(profile)
    assert text.startswith("Decoding & more limits the loop.\n")
    for wanted in ("x3.00 is the most that data can gain", "<-- limit", "x1.80 to x2.10"):
        assert wanted in text
    assert profile.config_to_paste() == "create_dataloader(dataset, num_workers=4)"
    assert json.loads(json.dumps(profile.as_dict()))["advice"][0]["spread"] == [1.8, 2.1]
    for measured, spread in ((1.01, (1.0, 1.02)), (1.3, (0.55, 1.4))):
        profile.advice[0].measured = measured
        profile.advice[0].spread = spread
        assert profile.best is None and profile.config_to_paste() == ""
    said = _verdict(measured_of("decode", 1.0), "decode", profile.advice)
    assert said.endswith(
        "num_workers=4: x1.30 (x0.55 to x1.40) is within the noise: profile longer."
    )


def test_the_page_has_everything_and_loads_nothing(tmp_path: Path) -> None:
    profile = made()
    profile.save_html(tmp_path / "profile.html")
    page = (tmp_path / "profile.html").read_text()
    for wanted in ("Decoding &amp; more limits the loop.", "it is &lt;large&gt;", "batch_size=4"):
        assert wanted in page
    assert "x1.90 (x1.80 to x2.10)" in page and "500/s" in page and "default-src 'none'" in page
    assert not any(word in page for word in ("src=", "href=", "url(", "<script", "@import"))
    profile.stages.clear()
    profile.save_html(tmp_path / "profile.html")


@pytest.mark.slow
def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made().save_plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"profile\.none"):
        made().save_plot(tmp_path / "profile.none")


# --- how it works ---------------------------------------------------------------------------------


# --- the command ----------------------------------------------------------------------------------

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
    monkeypatch.setattr("sys.path", list(sys.path))
    return name


@pytest.mark.parametrize("ending", ["", pytest.param(".py", marks=pytest.mark.slow)])
def test_the_command(program: str, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--step", f"{program}:step", "--seconds", "1", "--html", "out.html"]
    assert main(["profile", f"{program}{ending}:loader", *options]) == 0
    shown = capsys.readouterr().out
    [stage] = re.findall(r"^step +([\d.,]+) ", shown, re.MULTILINE)
    # samples a second: 4 in 0.2 s at most
    assert 0 < float(stage) <= 20 and "out.html" in shown
    assert Path("out.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_command_prints_json(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(photos), "--batch-size", "4", "--seconds", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["free_per_second"] is None and document["verdict"] and document["stages"]


def test_wrong_use_of_the_command(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        (["{}:nothing"], "has no attribute 'nothing'"),
        (["no_such_module:loader"], "no_such_module:loader can't be imported"),
        (["none.py:loader"], "does not exist"),
        (["{}:loader", "--step", "{}:number"], "must be a function"),
        (["{}:loader", "--step", "step"], "MODULE:NAME"),
        (["{}:loader", "--step", "{}:broken"], "raised ValueError: no such loss"),
        (["{}:loader", "--html", "none/out.html"], "does not exist"),
        (["{}:loader", "--html", "train.h5"], "ends with .html"),
        (["{}:loader", "--plot", "a.xyz"], "ends with .png"),
        ([".", "--plot", "a.png"], "is inside the data"),
        (["{}:number"], "dataset must"),
        (["none"], "none"),
    ]
    for arguments, message in rows:
        given = [one.replace("{}", program) for one in arguments]
        assert main(["profile", *given, "--seconds", "1"]) == 2
        assert message in capsys.readouterr().err
