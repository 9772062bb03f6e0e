"""Profiles: what they find, tell and write."""

from __future__ import annotations

import html
import json
import math
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from headrace import (
    BaseDataset,
    BudgetError,
    ConfigError,
    HDF5Dataset,
    ImageDataset,
    Source,
    create_dataloader,
    profile_dataloader,
    suggest_num_workers,
)
from headrace.cli.main import main
from headrace.loader import data
from headrace.monitor.stats import STAGES
from headrace.profiling import Profile
from headrace.profiling.alone import Alone, reading_gain, repeated
from headrace.profiling.images import as_uint8, packing_command, smaller_files
from headrace.profiling.limit import Candidate, Found, find_limit
from headrace.profiling.model import Costs
from headrace.profiling.profile import _after_trying, _ceiling
from headrace.profiling.report.page import page_of
from headrace.profiling.report.result import Advice, Stage
from headrace.profiling.running import Running, Turn, joined, run_step
from headrace.profiling.trying import try_advice
from tests.data.make import make_photos
from tests.testing.test_contract import SquareDataset

SECONDS = 2.0


class Waiting(Source):
    """Records that take a while to be read, from copies that are noted."""

    read_by: ClassVar[list[int]] = []

    def __init__(self, wait: float, fails_after: int = 10**9) -> None:
        self._wait, self._fails_after, self._reads = wait, fails_after, 0

    def __len__(self) -> int:
        return 96

    def read(self, indices: Any) -> list[Any]:
        self._reads += 1
        self.read_by.append(id(self))
        if self._reads > self._fails_after:
            raise OSError("the disk is gone")
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


@pytest.mark.parametrize(
    ("dataset", "options", "limit"),
    [
        ({"decode": 0.005}, {}, "decode"),
        pytest.param({"read": 0.005}, {}, "read", marks=pytest.mark.slow),
        pytest.param({"transform": slow}, {}, "transform", marks=pytest.mark.slow),
        pytest.param({}, {"collate_fn": slow_batch}, "collate", marks=pytest.mark.slow),
        pytest.param({"decode": 0.005}, {"num_workers": 2}, "decode", marks=pytest.mark.slow),
    ],
)
def test_the_slow_stage_is_named(
    dataset: dict[str, Any], options: dict[str, Any], limit: str
) -> None:
    seconds = 6.0 if options.get("num_workers") else SECONDS
    profile = profile_dataloader(loader_of(Slow(**dataset), **options), rest, seconds)
    assert profile.limit == limit and profile.is_limited_by_data
    [stage] = [stage for stage in profile.stages if stage.is_limit]
    assert stage.name.startswith(limit) and stage.share is not None and stage.share > 0.5
    assert profile.most_gain is not None and profile.most_gain > 2
    names = {one.name for one in profile.advice}
    assert names & {"num_workers", "loading_mode", "transform", "collate_fn"}
    assert all(one.predicted > 1 and one.measured is None for one in profile.advice)
    assert len({one["worker_pid"] for one in profile.batches}) == options.get("num_workers", 1)


@pytest.mark.slow
def test_a_slow_step_has_nothing_to_gain() -> None:
    profile = profile_dataloader(loader_of(Slow()), slow_step, SECONDS)
    assert profile.limit == "step" and not profile.is_limited_by_data and profile.advice == []
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
    assert profile.limit == "read" and not profile.has_step
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
def test_a_cache_is_filled_as_in_a_training() -> None:
    with Slow(loading_mode="cached") as dataset:
        profile_dataloader(loader_of(dataset), seconds=1)
        assert dataset.held.stats()["held"] == 96


@pytest.mark.slow
def test_samples_that_are_skipped_are_skipped() -> None:
    loader = loader_of(SquareDataset(bad=[5, 30], on_error="skip"))
    profile = profile_dataloader(loader, rest, SECONDS)
    names = {stage.name for stage in profile.stages}
    assert profile.samples_per_second > 0 and names >= {"read (warm)", "decode", "collate"}
    list(loader)
    assert loader.get_stats()["skipped"] == 2, "what the profile has skipped is not the loader's"


def requests_of(dataset: BaseDataset) -> Any:
    return repeated(lambda epoch: loader_of(dataset)._plan.requests(epoch, 0), 0)


def test_an_error_of_a_thread_that_reads_is_raised() -> None:
    dataset = BaseDataset(Waiting(0.0, fails_after=2))
    with pytest.raises(OSError, match="the disk is gone"):
        reading_gain(dataset, requests_of(dataset), (1, 4), 20.0)


def test_sources_are_open_before_reading_is_timed() -> None:
    dataset = BaseDataset(Waiting(0.001))
    Waiting.read_by.clear()
    assert reading_gain(dataset, requests_of(dataset), (2, 5), 0.2) is not None
    read_by = Waiting.read_by
    assert len(set(read_by[:5])) == 5, "each source is read once before the first is timed"
    assert len(set(read_by)) == 5 and id(dataset.sample_source) not in read_by


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


@pytest.mark.slow
def test_images_are_read_cold_and_warm(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # of a machine that is busy otherwise
    monkeypatch.setattr("headrace.profiling.profile._NOISE", math.inf)
    loader = loader_of(ImageDataset(photos, image_size=16), batch_size=8)
    stages = {stage.name: stage for stage in profile_dataloader(loader, seconds=1).stages}
    assert [*stages][:5] == ["read (cold)", "read (warm)", "decode", "transform", "collate"]
    assert all(stage.samples_per_second > 0 for stage in stages.values())
    assert all(stages[name].ceiling for name in ("read (warm)", "decode", "collate"))


# --- the limit, of made measurements --------------------------------------------------------------


def found_of(stage: str, cpu: float) -> Found:
    """One worker of four cores that is busy with a stage, and computes for a part of that."""
    times = {f"{name}_seconds": 0.0 for name in STAGES}
    times |= {f"{stage}_seconds": 9.0, "work_seconds": 10.0, "work_cpu_seconds": 10 * cpu}
    turn = Turn(samples=1000, batches=10, seconds=10.0, wait=8.0, times=times)
    costs = Costs(0.01, 0.01 * cpu, main=0.0, step=0.002, step_cpu=0.0, workers=1, cores=4)
    return Found(loader_of(Slow()), turn, turn, Turn(), 5.0, Alone(), costs, None)


@pytest.mark.parametrize(
    ("measured", "limit"), [(None, "workers"), (1.5, "workers"), (1.02, "decode")]
)
def test_more_workers_that_do_not_help_are_not_the_limit(
    measured: float | None, limit: str
) -> None:
    found = found_of("decode", cpu=1.0)
    assert find_limit(found) == "workers"
    advice = Advice("num_workers", "", "", 4.0, measured, options={"num_workers": 4})
    assert _after_trying("workers", [Candidate(advice, None)], found) == limit


def test_workers_that_wait_are_not_too_few() -> None:
    found = found_of("read", cpu=0.1)
    assert find_limit(found) == "read" and found.waiting == pytest.approx(0.9)
    found.loop.queued = 8.0
    assert find_limit(found) == "workers", "what is ready and has no core does not wait for a disk"


def test_a_ceiling_is_not_below_its_stage() -> None:
    assert _ceiling(106.58, 1.0) is None and _ceiling(1.0, None) is None
    assert _ceiling(105.0, 100.0) == 105.0 and _ceiling(50.0, 100.0) == 100.0


# --- advice for images ----------------------------------------------------------------------------


@pytest.fixture
def large_photos(tmp_path: Path) -> Path:
    """JPEGs of 640 x 480."""
    return make_photos(tmp_path / "large", classes=("noise",), per_class=16, size=(640, 480))


@pytest.mark.slow
def test_images_may_be_smaller_and_uint8(
    large_photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(ImageDataset(large_photos, image_size=96))
    smaller = {one.name: one for one in profile_dataloader(loader, rest, SECONDS).advice}[
        "smaller files"
    ]
    assert "--store jpeg --max-size 120 --quality 90" in smaller.code
    assert str(large_photos) in smaller.code and smaller.predicted > 1.2
    same_size = ImageDataset(large_photos, image_size=600)
    assert smaller_files(same_size, lambda epoch: loader._plan.requests(epoch, 0)) is None
    view = as_uint8(loader.dataset)
    assert view is not None and next(iter(loader_of(view)))[0].dtype == torch.uint8
    for other in (view, ImageDataset(large_photos, transform=slow)):
        assert as_uint8(other) is None
    # images that are uint8 until they are on the device
    monkeypatch.setattr(data, "is_accelerator", lambda device: device is not None)
    loader = loader_of(ImageDataset(large_photos, image_size=96), device="cpu")
    advice = profile_dataloader(loader, rest, SECONDS).advice
    assert "uint8" not in {one.name for one in advice} and loader._images.pixels is not None


def test_the_command_that_packs_names_the_labels(photos: Path) -> None:
    def command(**options: Any) -> str | None:
        made = packing_command(ImageDataset(photos, **options), "a.h5")
        return made and made.removeprefix(f"headrace pack {photos} a.h5")

    table = photos.parent / "labels.csv"
    names = [path.relative_to(photos) for path in photos.rglob("*.*")]
    table.write_text("file,kind\n" + "".join(f"{name},1\n" for name in names))
    assert command() == command(targets="folders") == ""
    assert command(targets=None) == " --targets none"
    assert command(targets=table, target_name="kind") == f" --targets {table} --target-name kind"
    assert command(targets=dict.fromkeys(map(str, names), 1)) is None
    of_view = packing_command(ImageDataset(photos).subset([0, 1]), "a.h5")
    assert of_view is not None and of_view.startswith("pack the view from Python")


@pytest.mark.slow
def test_of_other_batches_the_step_gets_one_that_it_knows(large_photos: Path) -> None:
    loader = loader_of(ImageDataset(large_photos, image_size=96))
    view = as_uint8(loader.dataset)
    seen: list[Any] = []
    advice = Advice("uint8", "", "", 1.2)
    candidate = Candidate(advice, lambda: (loader_of(view), None), None, keeps_batch=True)
    try_advice(loader, candidate, None, lambda batch: seen.append(batch[0].dtype), 3.0)
    assert candidate.advice.measured is not None and set(seen) == {torch.float32}


def test_advice_that_can_not_be_tried_says_so() -> None:
    def variant() -> Any:
        raise BudgetError("no room")

    candidate = Candidate(Advice("num_workers", "", "", 2.0), variant)
    try_advice(loader_of(Slow()), candidate, None, None, 1.0)
    assert candidate.advice.measured is None
    assert candidate.advice.not_measured == "it could not be tried: no room"


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
    packing = Advice("packing", "it is large", "headrace pack", 1.5)
    packing.not_measured = "not measured: it writes a file"
    decode = Stage("decode", 500.0, 1000.0, "the <decoder> alone", 0.9, True)
    times = {f"{stage}_seconds": 0.004 for stage in STAGES}
    times |= {"step_seconds": 0.01, "wait_seconds": 0.02, "work_seconds": 0.03}
    told = {"epoch": 0, "samples": 4, "worker_pid": 7, **times}
    places = [{"step": n, "began": 1.02 + n / 20, "received": 1.05 + n / 20} for n in range(9)]
    return Profile(
        *("Loader(<Slow>)", "Decoding & more holds the loop back.", "decode", True),
        *(100.0, 110.0, 300.0, 3.0, 0.7, 0.9, "transform", 1, 4),
        [decode, Stage("workers", 900.0)],
        [workers, packing],
        {"batch_size": 4},
        [{**told, **place} for place in places],
        [(0.5, 100.0, 10**9), (1.0, 120.0, 2 * 10**9)],
        9.0,
    )


def test_a_profile_as_text() -> None:
    profile = made()
    text = str(profile)
    assert text.startswith("Decoding & more holds the loop back.\n")
    for wanted in (
        *("x3.00 is the most that data can gain", "<-- limit", "x1.80 to x2.10"),
        *("not measured: it writes a file", "interpreter's lock (90% of its time held)"),
    ):
        assert wanted in text
    assert text.endswith("the best of what was measured: create_dataloader(dataset, num_workers=4)")
    assert json.loads(json.dumps(profile.as_dict()))["advice"][0]["spread"] == [1.8, 2.1]
    profile.advice[0].measured = 1.01
    assert profile.best is None and profile.config_to_paste() == ""


@pytest.mark.slow
def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made().save_plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"profile\.none"):
        made().save_plot(tmp_path / "profile.none")


def test_everything_is_in_the_page() -> None:
    page = page_of(made().as_dict())
    for wanted in (
        *("Decoding &amp; more holds the loop back.", "ceiling: the &lt;decoder&gt; alone"),
        *("x1.80 to x2.10", "samples/s, from 0 to 120.0 at most", "batch_size=4"),
    ):
        assert wanted in page
    assert not re.search(r"(src|href)=\"(?!data:,)", page)
    assert not any(word in page for word in ("url(", "<script", "@import"))
    assert page.count("<rect") == 9 * 8 and "default-src 'none'" in html.unescape(page)


def test_a_page_of_little() -> None:
    profile = made()
    for part in (profile.stages, profile.advice, profile.batches, profile.series):
        part.clear()
    profile.free_per_second = None
    page = page_of(profile.as_dict())
    assert "Nothing that headrace knows of" in page and "<svg" not in page


# --- how it works ---------------------------------------------------------------------------------


def test_a_list_of_tensors_is_as_many_samples() -> None:
    running = Running(loader_of(Slow(transform=torch.as_tensor), collate_fn="list"))
    try:
        kept = running.first(2)
        assert [(len(batch), samples) for batch, samples in kept] == [(4, 4)] * 2
        free, loop = run_step(kept, rest, 0.01), running.run(0.01, rest)
        assert (free.samples, loop.samples) == (4 * free.batches, 4 * loop.batches)
    finally:
        running.close()


def test_turns_are_joined() -> None:
    first = Turn(10, 2, 1.0, 0.5, series=[(0.5, 10.0, 7)], others=1.0)
    second = Turn(30, 4, 3.0, 0.5, series=[(1.0, 20.0, 8)], others=2.0)
    whole = joined([first, second])
    assert (whole.samples, whole.batches, whole.seconds, whole.wait) == (40, 6, 4.0, 1.0)
    assert whole.series == [(0.5, 10.0, 7), (2.0, 20.0, 8)]
    assert (whole.rate, whole.others) == (10.0, 1.5)


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
    assert document["has_step"] is False and document["verdict"] and document["stages"]


def test_folders_count_where_something_is_written(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    for options, message in [([], "dataset must"), (["--html", "a.html"], "may not write")]:
        assert main(["profile", f"{program}:number", *options, "--seconds", "1"]) == 2
        assert message in capsys.readouterr().err


def test_wrong_use_of_the_command(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        (["{}:nothing"], "has no nothing"),
        (["no_such_module:loader"], "no_such_module can't be imported"),
        (["none.py:loader"], "there is no file"),
        (["{}:loader", "--step", "{}:number"], "is no function"),
        (["{}:loader", "--step", "step"], "MODULE:NAME"),
        (["{}:loader", "--step", "{}:broken"], "raised ValueError: no such loss"),
        (["{}:loader", "--html", "none/out.html"], "the folder"),
        (["{}:loader", "--html", "train.h5"], "ends with .html"),
        (["{}:loader", "--plot", "a.xyz"], "ends with .png"),
        ([".", "--plot", "a.png"], "is a part of the data"),
        (["{}:number"], "dataset must"),
        (["none"], "none"),
    ]
    for arguments, message in rows:
        given = [one.replace("{}", program) for one in arguments]
        assert main(["profile", *given, "--seconds", "1"]) == 2
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
