"""Packs of several parts: jobs that share them, go on, are killed, and what they refuse.

That all give equal bytes: test_round_trips.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st
from torch.utils.data import Dataset

from headrace import ImageDataset, open_dataset, pack
from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceWarning,
    SampleError,
    TargetExistsError,
    WriteError,
)
from headrace.packing import join, pack_status, verify
from headrace.packing.destination import Destination
from headrace.packing.plan import edges_of
from headrace.testing.contract import same
from tests.packing.shared import contents, images, samples_of
from tests.servers.s3 import S3Server

SHARD = 16_000
"""Bytes: the 24 photographs of the fixture become four parts."""


class Numbers(Dataset[Any]):
    """Arrays of any length, with a target each."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((1 + index % 3, 4), index, np.float32), index


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs, packed in one go; not to be written to."""
    return Path(pack(photos, tmp_path_factory.mktemp("packed") / "whole", shard_size=SHARD))


@pytest.fixture
def out(packed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(packed, tmp_path / "out"))


@pytest.fixture
def copy(photos: Path, tmp_path: Path) -> Path:
    """The photographs, to be changed."""
    return Path(shutil.copytree(photos, tmp_path / "photos"))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 3000))
def test_parts_are_ranges_of_samples(sizes: list[int], shard_size: int) -> None:
    edges = edges_of(np.array(sizes, np.int64), shard_size)
    parts = [sizes[begin:end] for begin, end in itertools.pairwise(edges)]
    assert all(parts) and list(itertools.chain(*parts)) == sizes
    assert all(sum(part) <= shard_size + max(part) for part in parts)
    assert len(parts) <= -(-sum(sizes) // shard_size) + 1


# --- who packs ------------------------------------------------------------------------------------


def test_two_jobs_at_once(photos: Path, packed: Path, tmp_path: Path) -> None:
    job = partial(pack, photos, tmp_path / "out", shard_size=SHARD)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(job) for _ in range(2)]:
            future.result()
    assert contents(tmp_path / "out") == contents(packed)


def test_two_plans_at_once(photos: Path, tmp_path: Path) -> None:
    """One of two packs gets the folder, the other one an error; the pack is whole."""
    sizes = (SHARD, 2 * SHARD)
    barrier = threading.Barrier(2)

    def job(size: int) -> Any:
        with ImageDataset(photos) as source:
            barrier.wait()
            try:
                return pack(source, tmp_path / "out", shard_size=size)
            except TargetExistsError as refused:
                return refused

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(job, sizes))
    (error,) = [result for result in results if isinstance(result, TargetExistsError)]
    size = sizes[1 - results.index(error)]
    assert verify(pack(photos, tmp_path / "out", shard_size=size)).ok


class Dying(Numbers):
    """Kills the process that reads it, if it is a worker."""

    def __init__(self) -> None:
        self.parent = os.getpid()

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if os.getpid() != self.parent:
            os._exit(9)
        return super().__getitem__(index)


def test_a_process_that_dies(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="died"):
        pack(Dying(), tmp_path / "out", shard_size=200, processes=2)
    with ProcessPoolExecutor(1) as executor:
        executor.submit(os._exit, 9).exception()
        with pytest.raises(WriteError, match="died"):
            pack(Numbers(), tmp_path / "other", shard_size=200, executor=executor)


class Elsewhere(Executor):
    """Its processes write to a disk of their own."""

    def submit(self, *_: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(1)
        return future


def test_parts_that_are_written_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"part-00000.* is not there.* share"):
        pack(Numbers(), tmp_path / "out", shard_size=200, executor=Elsewhere())


# --- jobs that go on ------------------------------------------------------------------------------


def test_same_call_goes_on(photos: Path, packed: Path, out: Path, tmp_path: Path) -> None:
    """Where a part is missing, one is damaged, one too long, and a job was killed."""
    (out / "manifest.json").unlink()
    data = sorted(out.glob("part-*.h5"))
    data[1].with_suffix(".json").write_text("{")
    data[0].unlink()
    data[2].write_bytes(data[2].read_bytes() + b"x")
    (data[0].parent / f".{data[0].name}.0123abcd.part").write_bytes(b"of a job that was killed")
    os.utime(data[3], (0, 10**10))  # clocks of machines differ
    status = pack_status(out)
    assert (status.done, status.missing, status.stale) == ([3], [0], [1, 2]) and not status.joined
    assert "missing: 0" in str(status) and "stale: 1-2" in str(status)
    with pytest.raises(DataNotFoundError, match="incomplete"):
        ImageDataset(out)
    with pytest.raises(DataNotFoundError, match="missing: 0"):
        join(out)
    pack(photos, out, shard_size=SHARD)
    assert contents(out) == contents(packed)
    assert data[3].stat().st_mtime == 10**10, "finished parts stay"


def test_another_plan_is_refused(photos: Path, packed: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetExistsError, match=r"shard_size: 16000 there, 30000 now"):
        pack(photos, out, shard_size=30_000)
    with pytest.raises(TargetExistsError, match="store: encoded there, decoded now"):
        pack(images(photos), out, shard_size=SHARD, store="decoded")
    assert contents(out) == contents(packed)
    pack(photos, out, shard_size=30_000, overwrite=True)
    new = Path(pack(photos, tmp_path / "new", shard_size=30_000))
    assert contents(out) == contents(new), "nothing is left of the other plan"


@pytest.mark.parametrize("name", ["part-00000-of-00002.json", "manifest.json"])
def test_files_of_others_are_kept(name: str, photos: Path, tmp_path: Path) -> None:
    other = tmp_path / name
    other.write_text('{"mine": 1}')
    for dry_run in (True, False):
        with pytest.raises(TargetExistsError, match=f"{name} is not of a pack"):
            pack(photos, tmp_path, shard_size=SHARD, dry_run=dry_run)
    assert contents(tmp_path).keys() == {name} and other.read_text() == '{"mine": 1}'
    assert verify(pack(photos, tmp_path, shard_size=SHARD, overwrite=True)).ok


# --- sources that change, and bad samples ---------------------------------------------------------


@pytest.mark.parametrize("is_open", [False, True])
def test_a_changed_source_is_named(is_open: bool, copy: Path, tmp_path: Path) -> None:
    with ImageDataset(copy) as source:
        out = pack(source, tmp_path / "out", shard_size=SHARD, part="0/99")
        changed = Path(source.samples[23][0])
        changed.write_bytes(changed.read_bytes() + b"more")
        again = source if is_open else copy
        with pytest.raises((FileChangedError, SampleError, TargetExistsError)) as caught:
            pack(again, out, shard_size=SHARD)
        assert changed.name in str(caught.value) or "other sources" in str(caught.value)
        shares = []
        for job in ("0/2", "1/2"):
            with contextlib.suppress(FileChangedError, SampleError):
                shares.append(pack(again, out, shard_size=SHARD, part=job))
        assert len(shares) == 1 and pack_status(out).missing, "one share has the changed file"
    changed.write_bytes(changed.read_bytes()[:-4])
    pack(copy, out, shard_size=SHARD)
    assert pack_status(out).joined


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("store", ["encoded", "decoded", "jpeg"])
def test_unreadable_samples_are_left_out(store: str, copy: Path, tmp_path: Path) -> None:
    broken = sorted(copy.rglob("*.jpg"))[3]
    broken.write_bytes(broken.read_bytes()[:200])
    how: dict[str, Any] = {"shard_size": SHARD, "store": store}
    with pytest.raises(SampleError, match=broken.name) as caught:
        pack(images(copy), tmp_path / "out", **how)
    assert any("part-" in note for note in caught.value.__notes__)
    with images(copy, on_error="skip") as source:
        out = pack(source, tmp_path / "skipped", part="0/2", **how)
        with pytest.warns(HeadraceWarning, match=r"1 samples? can't be read"):
            pack(source, out, part="1/2", **how)
        manifest = json.loads((out / "manifest.json").read_text())
        assert (manifest["left_out"], manifest["samples"]) == (1, 23)
        assert broken.name in manifest["left_out_first"][0]
        paths = [Path(path) for path, _ in source.samples]
        view = source.subset([index for index, path in enumerate(paths) if path != broken])
        with images(out) as packed:
            assert len(packed) == 23
            assert packed.fingerprint not in (view.fingerprint, source.fingerprint)
            if store != "jpeg":
                assert same(samples_of(packed), samples_of(view))
    assert verify(out).ok


# --- arguments and places -------------------------------------------------------------------------


def test_arguments(photos: Path, tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"part": "3/3"}, "part must"),
        ({"part": "one"}, "part must"),
        ({"part": 3}, "part must.* 3"),
        ({"shard_size": 0}, "1 byte"),
        ({"shard_size": "huge"}, "shard_size"),
        ({"processes": 0}, "processes"),
        ({"shard_size": None, "part": "0/2"}, "pass shard_size"),
        ({"shard_size": None, "storage_options": {"key": "x"}}, "storage_options is for packs"),
    ]
    for options, word in rows:
        with pytest.raises(ConfigError, match=word):
            pack(photos, tmp_path / "out", **{"shard_size": SHARD, **options})


def test_places(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        pack(photos, tmp_path / "file", shard_size=SHARD)
    assert pack(photos, f"file://{tmp_path}/out", shard_size="1GB") == tmp_path / "out"
    assert pack_status(f"file://{tmp_path}/out").parts == 1
    with pytest.raises(DataNotFoundError):
        pack(photos, tmp_path / "no" / "out", shard_size=SHARD)
    with pytest.raises(DataNotFoundError, match=r"plan\.json"):
        pack_status(tmp_path)


def test_a_plan_that_is_lost_is_made_again(photos: Path, packed: Path, out: Path) -> None:
    whole = (out / "plan.json").read_bytes()
    (out / "plan.json").write_bytes(whole[:20])
    with pytest.raises(FormatError, match=r"plan\.json"):
        pack(photos, out, shard_size=SHARD)
    for foreign in ('{"tasks": ["milk"]}', "[1]"):
        (out / "plan.json").write_text(foreign)
        with pytest.raises(FormatError, match="or not a plan of headrace"):
            pack(photos, out, shard_size=SHARD, overwrite=True)
        assert (out / "plan.json").read_text() == foreign
    (out / "plan.json").unlink()
    parts = sorted(out.glob("part-*"))
    before = [path.stat().st_mtime_ns for path in parts]
    with pytest.raises(TargetExistsError, match="keeps finished parts"):
        pack(photos, out, shard_size=SHARD)
    pack(photos, out, shard_size=SHARD, overwrite=True)
    assert contents(out) == contents(packed)
    assert [path.stat().st_mtime_ns for path in parts] == before


def test_a_file_that_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(AccessError, match=r"plan\.json can't be read: Permission denied"):
        Destination(tmp_path).read("plan.json")


# --- stores ---------------------------------------------------------------------------------------


@pytest.fixture
def bucket(own_cache: None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A client of S3, and the options of its one bucket."""
    with S3Server() as server:
        client = server.client()
        client.create_bucket(Bucket="bucket")
        yield client, {"storage_options": server.options}


@pytest.mark.slow
def test_to_an_object_store(photos: Path, packed: Path, bucket: Any) -> None:
    client, options = bucket
    how: dict[str, Any] = {"shard_size": SHARD, **options}
    with pytest.raises(DataNotFoundError, match="bucket"):
        pack(photos, "s3://missing/packed", **how)
    out = pack(photos, "s3://bucket/packed", part="0/2", **how)
    status = pack_status(out, **options)
    assert (out, status.done, status.missing) == ("s3://bucket/packed", [0, 2], [1, 3])
    with pytest.raises(DataNotFoundError, match="missing: 1, 3"):
        join(out, **options)
    with pytest.raises(TargetExistsError, match="shard_size"):
        pack(photos, out, **{**how, "shard_size": 30_000})
    pack(photos, out, processes=2, **how)
    stored = {
        item["Key"]: client.get_object(Bucket="bucket", Key=item["Key"])["Body"].read()
        for item in client.list_objects_v2(Bucket="bucket")["Contents"]
    }
    sums = {
        name.removeprefix("packed/"): hashlib.sha256(data).hexdigest()
        for name, data in stored.items()
    }
    assert sums == contents(packed) and verify(out, **options).ok
    with ImageDataset(photos) as source:
        for mode in ("lazy", "streaming"):
            path = f"{out}/manifest.json"
            with ImageDataset(path, loading_mode=mode, return_index=True, **options) as remote:
                found = sorted(remote, key=lambda sample: sample[-1])
                assert same([sample[:2] for sample in found], samples_of(source))
                assert remote.fingerprint == source.fingerprint
    key = next(key for key in stored if "part-00001" in key)
    client.put_object(Bucket="bucket", Key=key, Body=stored[key][:-1])
    assert pack_status(out, **options).stale == [1]


@pytest.mark.slow
def test_a_store_that_goes_away(photos: Path, bucket: Any) -> None:
    """An error when the retries are through."""
    with S3Server() as server:
        server.client().create_bucket(Bucket="bucket")
        config = {"retries": {"max_attempts": 1}, "connect_timeout": 2}
        options = {"storage_options": {**server.options, "config_kwargs": config}}
        pack(photos, "s3://bucket/out", shard_size=SHARD, part="0/99", **options)
    with pytest.raises(WriteError, match=r"s3://bucket/out.*: 3 attempts") as caught:
        pack(photos, "s3://bucket/out", shard_size=SHARD, **options)
    assert "\n" not in str(caught.value)


# --- kills ----------------------------------------------------------------------------------------

JOB = """
import json, sys
from headrace import open_dataset, pack
with open_dataset(sys.argv[1], **json.loads(sys.argv[3])) as dataset:
    pack(dataset, sys.argv[2], progress=False, **json.loads(sys.argv[4]))
"""


KILLED: list[tuple[str, dict[str, Any]]] = [
    ("photos", {"processes": 2}),
    ("photos", {"store": "decoded"}),
    ("photos", {"store": "jpeg", "max_size": 32, "processes": 2}),
    ("texts", {"processes": 2}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(("kind", "how"), KILLED, ids=str)
def test_kills_lose_nothing(
    kind: str, how: dict[str, Any], kills: int, photos: Path, tmp_path: Path
) -> None:
    source, opened, how = photos, {"image_size": 24}, {"shard_size": 6000, **how}
    if kind == "texts":
        rows = [{"text": f"{number} {'mill ' * (number % 70)}wheel"} for number in range(600)]
        source, opened = tmp_path / "in.jsonl", {"cache_dir": str(tmp_path / "kept")}
        source.write_text("\n".join(map(json.dumps, rows)))
    with open_dataset(source, **opened) as dataset:
        whole = Path(pack(dataset, tmp_path / "whole", **how))
    command = [sys.executable, "-c", JOB, source, tmp_path / "out"]
    command = [*map(str, command), json.dumps(opened), json.dumps(how)]
    kill_over_and_over(command, tmp_path / "out", kills)
    assert contents(tmp_path / "out") == contents(whole) and verify(tmp_path / "out").ok


def kill_over_and_over(command: list[str], out: Path, kills: int) -> None:
    """Starts a job and kills it, or one of its processes, soon after it has begun to write, so many
    times; then it runs to its end. What is there is removed once in a while.
    """
    choose = random.Random(kills)
    for _ in range(kills):
        job = psutil.Popen(command, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not out.exists() and job.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(choose.uniform(0, 0.4))
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [job, *job.children(recursive=True)]
            choose.choice([job, *family]).kill()
            job.wait(60)
            assert not psutil.wait_procs(family, 15)[1], "a process lives on"
        if choose.random() < 0.2:
            shutil.rmtree(out, ignore_errors=True)
    subprocess.run(command, check=True)
