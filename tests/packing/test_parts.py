"""Packs of several parts: equal bytes whoever packs them, and nothing is lost where a job is
killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from headrace import HDF5Dataset, ImageDataset, TextDataset, create_dataloader, open_dataset, pack
from headrace.errors import (
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
from headrace.packing.destination import FolderDestination
from headrace.packing.parts import edges_of
from headrace.storage.files import FilesSource
from tests.packing.shared import contents, kill_four_times
from tests.servers.ranges import RangeServer
from tests.servers.s3 import S3Server

SHARD = 16_000
"""Bytes: the 24 photographs of the fixture become several parts."""


class Numbers(Dataset[Any]):
    """Arrays of any length, with a target each."""

    def __init__(self, count: int = 30, wrong: int | None = None) -> None:
        self.count, self.wrong = count, wrong

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full(
            (1 + index % 3, 4), index, np.float64 if index == self.wrong else np.float32
        ), index


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs, packed in one go; not to be written to."""
    return pack(photos, tmp_path_factory.mktemp("packed") / "whole", shard_size=SHARD)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 3000))
def test_parts_are_ranges_of_samples(sizes: list[int], shard_size: int) -> None:
    edges = edges_of(np.array(sizes, np.int64), shard_size)
    assert (
        edges[0] == 0
        and edges[-1] == len(sizes)
        and all(a < b for a, b in itertools.pairwise(edges))
    )
    parts = [sizes[a:b] for a, b in itertools.pairwise(edges)]
    assert all(sum(part) <= shard_size + max(part) for part in parts)
    assert len(parts) <= -(-sum(sizes) // shard_size) + 1


@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_round_trip(photos: Path, tmp_path: Path, store: str) -> None:
    with ImageDataset(photos, image_size=(20, 30), normalize=False) as source:
        out = pack(source, tmp_path / "out", store=store, shard_size=SHARD)
        assert pack_status(out).parts > 2 and pack_status(out).joined
        for path in (out, out / "manifest.json", str(out) + "/"):
            with (
                ImageDataset(path, image_size=(20, 30), normalize=False) as copy,
                open_dataset(path) as opened,
            ):
                assert isinstance(opened, ImageDataset) and len(opened) == len(copy) == len(source)
                assert (
                    copy.fingerprint == source.fingerprint
                    and copy.classes == source.classes
                    and np.array_equal(copy.targets, source.targets)
                )
                assert all(
                    torch.equal(copy[i][0], source[i][0]) and copy[i][1] == source[i][1]
                    for i in range(len(source))
                )


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_batches_are_those_of_one_file(
    photos: Path, packed: Path, tmp_path: Path, mode: str
) -> None:
    one = pack(photos, tmp_path / "one.h5")

    def batches(path: Path) -> list[Any]:
        with ImageDataset(path, image_size=(8, 8), loading_mode=mode) as dataset:
            return [
                (images.clone(), targets.clone())
                for images, targets in create_dataloader(dataset, batch_size=5, shuffle=True)
            ]

    if mode == "streaming":  # blocks are files there: the samples are equal, their order is not

        def key(item: Any) -> Any:
            return item[0].sum().item(), item[1].item()

        ours, theirs = (
            [key(pair) for batch in batches(path) for pair in zip(*batch, strict=True)]
            for path in (packed, one)
        )
        assert sorted(ours) == sorted(theirs)
    else:
        for ours, theirs in zip(batches(packed), batches(one), strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_each_sidecar_is_read_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = pack(photos, tmp_path / "out", shard_size=SHARD, part="0/2")
    asked, read = Counter[str](), FolderDestination.read

    def counted(self: FolderDestination, name: str, *reach: Any) -> bytes | None:
        asked[name] += 1
        return read(self, name, *reach)

    monkeypatch.setattr(FolderDestination, "read", counted)
    for call in (
        lambda: pack(photos, out, shard_size=SHARD),
        lambda: join(out),
        lambda: verify(out),
        lambda: pack_status(out),
    ):
        asked.clear()
        call()
        assert [asked[f"part-{part:05d}-of-00004.json"] for part in range(4)] == [1] * 4


def test_a_remote_folder_is_listed_once(
    photos: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{photos}/", "/photos/", recursive=True)
    listed, find = list[str](), memory.find
    monkeypatch.setattr(
        type(memory),
        "find",
        lambda self, path, **options: (listed.append(path), find(path, **options))[1],
    )
    try:
        with ImageDataset("memory://photos", cache_dir=tmp_path / "cache") as source:
            listed.clear()
            assert contents(pack(source, tmp_path / "out", shard_size=SHARD)) == contents(packed)
            assert len(listed) == 1, "for the plan; each part looks at what that found"
    finally:
        memory.rm("/photos", recursive=True)


@pytest.mark.parametrize("how", ["shares", "backwards", "threads", "processes"])
def test_same_bytes_whoever_packs(photos: Path, packed: Path, tmp_path: Path, how: str) -> None:
    out, parts = tmp_path / "out", pack_status(packed).parts
    if how == "shares":
        for i in range(3):
            assert pack(photos, out, shard_size=SHARD, part=f"{i}/3", workers=1) == out
            assert pack_status(out).joined == (i == 2)
    elif how == "backwards":
        for i in reversed(range(parts)):
            pack(photos, out, shard_size=SHARD, parts=f"{i}:{i + 1}")
    elif how == "threads":
        with ThreadPoolExecutor(3) as executor:
            pack(photos, out, shard_size=SHARD, executor=executor)
    else:
        pack(photos, out, shard_size=SHARD, processes=2)
    assert contents(out) == contents(packed)


def test_two_jobs_at_once(photos: Path, packed: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for job in [
            pool.submit(pack, photos, tmp_path / "out", shard_size=SHARD) for _ in range(2)
        ]:
            job.result()
    assert contents(tmp_path / "out") == contents(packed)


def test_same_call_goes_on(photos: Path, packed: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    (out / "manifest.json").unlink()
    names = sorted(path.name for path in out.glob("part-*.h5"))
    (out / names[0]).unlink()  # its sidecar stays
    (out / names[1].replace(".h5", ".json")).write_text("{")
    with open(out / names[2], "ab") as file:
        file.write(b"x")
    (out / f".{names[0]}.0123abcd.part").write_bytes(b"of a job that was killed")
    before = {name: os.stat(out / name).st_mtime_ns for name in names[3:]}
    status = pack_status(out)
    assert (status.missing, status.stale, status.joined) == ([0], [1, 2], False) and len(
        status.done
    ) == status.parts - 3
    assert "missing: 0" in str(status) and "stale: 1-2" in str(status)
    with pytest.raises(DataNotFoundError, match="not complete"):
        ImageDataset(out)
    with pytest.raises(DataNotFoundError, match="missing: 0"):
        join(out)
    pack(photos, out, shard_size=SHARD)
    assert contents(out) == contents(packed)
    assert {name: os.stat(out / name).st_mtime_ns for name in names[3:]} == before, (
        "finished parts stay"
    )


def test_another_plan_is_refused(photos: Path, packed: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    with pytest.raises(TargetExistsError, match=r"shard_size: 16000 there, 30000 now"):
        pack(photos, out, shard_size=30_000)
    with pytest.raises(TargetExistsError, match=r"store: encoded there, decoded now"):
        pack(ImageDataset(photos, image_size=8), out, shard_size=SHARD, store="decoded")
    assert contents(out) == contents(packed)
    pack(photos, out, shard_size=30_000, overwrite=True)
    assert pack_status(out).joined and pack_status(out).parts < pack_status(packed).parts
    assert len(list(out.iterdir())) == 2 * pack_status(out).parts + 3, (
        "nothing is left of the other plan"
    )
    assert contents(pack(photos, tmp_path / "new", shard_size=30_000)) == contents(out)


def test_a_changed_source_is_named(photos: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(photos, tmp_path / "photos"))
    out = pack(source, tmp_path / "out", shard_size=SHARD, parts="0:1")
    changed = sorted(source.rglob("*.jpg"))[-1]
    changed.write_bytes(changed.read_bytes() + b"more")
    with pytest.raises(TargetExistsError, match="names or sizes of samples"):
        pack(source, out, shard_size=SHARD)
    for job in ("0/2", "1/2"):  # one of them has its part
        with contextlib.suppress(FileChangedError):
            pack(source, out, shard_size=SHARD, part=job)
            continue
        break
    else:
        pytest.fail("a changed file was packed")
    with pytest.raises(FileChangedError, match=changed.name):
        pack(source, out, shard_size=SHARD, part=job)
    changed.write_bytes(changed.read_bytes()[:-4])
    pack(source, out, shard_size=SHARD)
    assert pack_status(out).joined


def test_a_source_that_changes_meanwhile_is_named(photos: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(photos, tmp_path / "photos"))
    with ImageDataset(source) as dataset:
        out = pack(dataset, tmp_path / "out", shard_size=SHARD, parts="0:1")
        path = Path(dataset.samples[len(dataset) - 1][0])
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises((FileChangedError, SampleError, TargetExistsError)) as caught:
            pack(dataset, out, shard_size=SHARD)
        assert path.name in str(caught.value) or "names or sizes" in str(caught.value)
        assert not (out / "manifest.json").exists()


def test_unreadable_samples_are_left_out(photos: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(photos, tmp_path / "photos"))
    broken = sorted(source.rglob("*.jpg"))[3]
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(SampleError, match=broken.name) as caught:
        pack(source, tmp_path / "out", shard_size=SHARD)
    assert any("part-" in note for note in caught.value.__notes__)
    with pytest.warns(HeadraceWarning, match=r"1 samples? can't be read"):
        out = pack(ImageDataset(source, on_error="skip"), tmp_path / "skipped", shard_size=SHARD)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["left_out"] == 1 and broken.name in manifest["left_out_first"][0]
    with ImageDataset(out) as packed:
        assert (
            len(packed) == manifest["samples"] == 23
            and packed.fingerprint != ImageDataset(source).fingerprint
        )
    assert verify(out).ok


def test_arrays_of_any_length(tmp_path: Path) -> None:
    out = pack(Numbers(), tmp_path / "out", shard_size=200)
    assert pack_status(out).parts > 3
    with HDF5Dataset(out, target_name="targets") as packed:
        for index in range(30):
            rows, target = packed[index]
            assert rows.shape == (1 + index % 3, 4) and (rows == index).all() and target == index
    again = pack(Numbers(), tmp_path / "again", shard_size=200, part="1/2")
    pack(Numbers(), again, shard_size=200, part="0/2")
    assert contents(again) == contents(out)
    with pytest.raises(ConfigError, match="sample 7 "):
        pack(Numbers(wrong=7), tmp_path / "wrong", shard_size=200)


def test_other_programs_read_the_parts(photos: Path, packed: Path) -> None:
    with ImageDataset(photos) as source:
        samples = iter(source.samples)
        for path in sorted(packed.glob("part-*.h5")):
            with h5py.File(path) as file:
                offsets = file["offsets"][:]
                for number in range(len(offsets) - 1):
                    image, target = next(samples)
                    assert (
                        file["data"][offsets[number] : offsets[number + 1]].tobytes()
                        == Path(image).read_bytes()
                    )
                    assert file["targets"][number] == target
        assert next(samples, None) is None


def test_every_flipped_bit_is_found(packed: Path, tmp_path: Path) -> None:
    assert verify(packed).ok and verify(packed).samples == 24
    choose = random.Random(7)
    for path in sorted(packed.iterdir()):
        if path.suffix == ".crc32":
            continue
        for _ in range(6):
            out = Path(shutil.copytree(packed, tmp_path / "out"))
            data = bytearray(path.read_bytes())
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            (out / path.name).write_bytes(data)
            try:
                assert not verify(out).ok, path.name
            except (FormatError, DataNotFoundError) as error:
                assert str(out) in str(error)
            shutil.rmtree(out)


def test_processes_verify_parts(packed: Path, tmp_path: Path) -> None:
    assert verify(packed, processes=2) == verify(packed)
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    for path in out.glob("part-*.h5"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    bad = verify(out, processes=2, workers=1).bad
    assert len(bad) == len(list(out.glob("part-*.h5"))) and bad == verify(out).bad
    with pytest.raises(ConfigError, match="processes must be an integer of at least 1"):
        verify(out, processes=0)
    with pytest.raises(
        ConfigError, match="is one file: processes is for packs of several parts, use workers"
    ):
        verify(next(packed.glob("part-*.h5")), processes=2)


def test_a_damaged_sample_is_named(packed: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    last = sorted(out.glob("part-*.h5"))[-1]
    with h5py.File(last) as file:
        place = file["data"].id.get_offset() + int(file["offsets"][-1]) - 1
    data = bytearray(last.read_bytes())
    data[place] ^= 1
    last.write_bytes(data)
    assert [index for index, _, _ in verify(out).bad] == [23]


class TestBad:
    """What is wrong is said before anything is written."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"part": "3/3"}, "part must be 'i/N'"),
            ({"part": "one"}, "part must be 'i/N'"),
            ({"parts": "3:3"}, "parts must be 'a:b'"),
            ({"parts": "0:1000"}, "the plan has"),
            ({"part": "0/2", "parts": "0:1"}, "exclude each other"),
            ({"shard_size": 0}, "at least 1 byte"),
            ({"shard_size": "huge"}, "shard_size must be a number of bytes"),
            ({"processes": 0}, "processes must be an integer of at least 1"),
            ({"workers": 0}, "workers must be an integer of at least 1"),
            ({"shard_size": None, "part": "0/2"}, "pass shard_size"),
        ],
    )
    def test_arguments(
        self, photos: Path, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            pack(photos, tmp_path / "out", **{"shard_size": SHARD, **options})

    def test_destinations(self, photos: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(ConfigError, match="is a file"):
            pack(photos, tmp_path / "file", shard_size=SHARD)
        with pytest.raises(DataNotFoundError, match="make it first"):
            pack(photos, tmp_path / "no" / "out", shard_size=SHARD)
        with pytest.raises(DataNotFoundError, match=r"plan\.json"):
            pack_status(tmp_path)

    def test_a_damaged_plan(self, photos: Path, packed: Path, tmp_path: Path) -> None:
        out = Path(shutil.copytree(packed, tmp_path / "out"))
        (out / "plan.json").write_text('{"version": 1')
        with pytest.raises(FormatError, match=r"plan\.json is damaged"):
            pack(photos, out, shard_size=SHARD)
        (out / "plan.json").unlink()
        pack(photos, out, shard_size=SHARD)
        assert contents(out) == contents(packed)

    def test_a_process_that_dies(self, tmp_path: Path) -> None:
        with pytest.raises(WriteError, match="died while it packed"):
            pack(Dying(), tmp_path / "out", shard_size=200, processes=2)


class Dying(Numbers):
    """Kills the process that reads it, if it is a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = os.getpid()

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if os.getpid() != self.parent:
            os._exit(9)
        return super().__getitem__(index)


@pytest.mark.parametrize("store", [{}, {"store": "jpeg", "max_size": 30}])
def test_a_share_asks_for_its_own_sizes(
    photos: Path, tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = 3000
    pack(photos, tmp_path / "whole", shard_size=shard, **store)
    pack(photos, tmp_path / "out", shard_size=shard, part="0/3", **store)
    asked, sizes = list[int](), FilesSource.sizes
    monkeypatch.setattr(
        FilesSource, "sizes", lambda self, indices: (asked.extend(indices), sizes(self, indices))[1]
    )
    for job in (1, 2):
        asked.clear()
        pack(photos, tmp_path / "out", shard_size=shard, part=f"{job}/3", **store)
        assert 0 < len(asked) < 24
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(TargetExistsError, match="shard_size"):
        pack(photos, tmp_path / "out", shard_size=2 * shard, part="0/3", **store)


class Counted(Numbers):
    """Counts how often this process pickles it; which packs a part of it when the other one has
    packed three.
    """

    pickled = 0

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def __getitem__(self, index: int) -> tuple[Any, int]:
        end = time.monotonic() + 60
        while (
            parent_process() is None
            and (self.out / "plan.json").exists()
            and time.monotonic() < end
        ):
            if len(list(self.out.glob("part-*.json"))) >= 3:
                break
            time.sleep(0.01)
        return super().__getitem__(index)

    def __getstate__(self) -> dict[str, Any]:
        Counted.pickled += 1
        return vars(self)


@pytest.mark.parametrize(("fork_safe", "has_thread"), [(True, False), (False, False), (True, True)])
def test_a_process_gets_the_dataset_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_safe: bool, has_thread: bool
) -> None:
    """And not with each part: it may know the names of a million files."""
    monkeypatch.setattr(Counted, "pickled", 0)
    monkeypatch.setattr(Counted, "fork_safe", fork_safe, raising=False)
    out = tmp_path / "out"
    busy = ThreadPoolExecutor(1)
    if has_thread:
        busy.submit(int).result()  # its thread waits for more
    else:
        # tests before this one may have left the thread of an event loop
        monkeypatch.setattr(threading, "active_count", lambda: 1)
    with busy:
        pack(Counted(out), out, shard_size=100, processes=2)
    assert pack_status(out).parts > 5 and verify(out).ok
    assert Counted.pickled == (1 if fork_safe and not has_thread else 2), (
        "once to see whether it can be, and once for a process that is no fork"
    )


def test_opens_from_a_server(photos: Path, packed: Path) -> None:
    with (
        RangeServer(packed) as server,
        ImageDataset(f"{server.url}/manifest.json") as remote,
        ImageDataset(photos) as source,
    ):
        assert len(remote) == 24 and remote.classes == source.classes
        assert torch.equal(remote[5][0], source[5][0]) and remote[23][1] == source[23][1]


@pytest.mark.slow
def test_to_a_store(photos: Path, packed: Path, own_cache: None) -> None:
    with S3Server() as server, ImageDataset(photos) as source:
        client, options = server.client(), server.options
        client.create_bucket(Bucket="bucket")
        where: dict[str, Any] = {"shard_size": SHARD, "storage_options": options}
        with pytest.raises(DataNotFoundError, match="bucket"):
            pack(photos, "s3://missing/packed", **where)
        out = pack(photos, "s3://bucket/packed", part="0/2", **where)
        status = pack_status(out, storage_options=options)
        assert out == "s3://bucket/packed" and (status.done, status.missing) == ([0, 2], [1, 3])
        with pytest.raises(DataNotFoundError, match="missing: 1, 3"):
            join(out, storage_options=options)
        with pytest.raises(TargetExistsError, match="shard_size"):
            pack(photos, out, shard_size=30_000, storage_options=options)
        pack(photos, out, processes=2, **where)
        names = [item["Key"] for item in client.list_objects_v2(Bucket="bucket")["Contents"]]
        stored = {
            name: client.get_object(Bucket="bucket", Key=name)["Body"].read() for name in names
        }
        assert {
            name.rpartition("/")[2]: hashlib.sha256(data).hexdigest()
            for name, data in stored.items()
        } == contents(packed)
        assert verify(out, storage_options=options).ok
        with ImageDataset(f"{out}/manifest.json", storage_options=options) as remote:
            assert len(remote) == 24 and torch.equal(remote[7][0], source[7][0])
        part = "packed/part-00001-of-00004.h5"
        client.put_object(Bucket="bucket", Key=part, Body=stored[part][:-1])
        assert pack_status(out, storage_options=options).stale == [1]


_JOB = """
import sys
from headrace import ImageDataset, pack
pack(
    ImageDataset(sys.argv[1], image_size=24), sys.argv[2], shard_size=int(sys.argv[3]),
    store=sys.argv[4], processes=int(sys.argv[5]), progress=False,
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_kills_lose_nothing(photos: Path, tmp_path: Path, store: str, processes: int) -> None:
    undisturbed = pack(
        ImageDataset(photos, image_size=24), tmp_path / "undisturbed", shard_size=6000, store=store
    )
    out, choose = tmp_path / "out", random.Random(f"{store}{processes}")
    kill_four_times(_JOB, [photos, out, 6000, store, processes], out, choose, removes=True)
    assert contents(out) == contents(undisturbed)


def test_a_single_part_is_the_whole(photos: Path, tmp_path: Path) -> None:
    source = ImageDataset(photos)
    for kind in ("hdf5", "zarr"):
        out = pack(source, tmp_path / kind, shard_size="1GB", format=kind)
        assert pack_status(out).parts == 1
        with open_dataset(out) as packed:
            assert packed.fingerprint == source.fingerprint
            resumed, loader = (
                create_dataloader(one, batch_size=2, num_workers=0) for one in (packed, source)
            )
            next(iter(loader))
            resumed.load_state_dict(loader.state_dict())


def test_a_single_part_of_texts_is_the_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line\nanother one\nthe last of all\n")
    texts = TextDataset(tmp_path / "a.txt", unit="line")
    packs = [
        pack(texts, tmp_path / "one.h5"),
        *(pack(texts, tmp_path / size, shard_size=size) for size in ("1GB", "20B")),
    ]
    assert [pack_status(path).parts for path in packs[1:]] == [1, 2]
    assert len({TextDataset(path).fingerprint for path in packs}) == 1
