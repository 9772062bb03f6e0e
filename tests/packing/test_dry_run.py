"""`dry_run=True` says what would be packed, and writes nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace import ImageDataset, TextDataset, pack
from headrace.cli.main import main
from headrace.errors import ConfigError, DataNotFoundError, SampleError, TargetExistsError
from headrace.packing import PackPlan, pack_status
from headrace.packing.dry_run import measure
from headrace.packing.dry_run.measure import _spread
from headrace.packing.options import StoreOptions
from tests.packing.test_layouts import Waves, images

SHARD = 16_000


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


CASES: dict[str, dict[str, Any]] = {
    "encoded": {},
    "jpeg": {"store": "jpeg", "max_size": 32},
    "decoded": {"store": "decoded"},
    "gzip": {"store": "decoded", "compression": "gzip", "chunks": 4},
}


@pytest.mark.parametrize("shard_size", [None, SHARD])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_is_packed_then(
    photos: Path, tmp_path: Path, case: str, shard_size: int | None
) -> None:
    (tmp_path / "in").mkdir()
    before = tree(tmp_path)
    plan = pack(
        images(photos), tmp_path / "out", shard_size=shard_size, dry_run=True, **CASES[case]
    )
    assert isinstance(plan, PackPlan) and tree(tmp_path) == before
    assert (
        plan.samples == 24
        and plan.seconds is not None
        and plan.kind == "image"
        and plan.room is not None
    )
    out = pack(images(photos), tmp_path / "out", shard_size=shard_size, **CASES[case])
    if shard_size is None:
        nbytes, parts = os.stat(out).st_size, 1
    else:
        nbytes, parts = (
            sum(path.stat().st_size for path in Path(out).glob("*.h5")),
            pack_status(out).parts,
        )
    assert plan.parts == plan.left == parts
    assert 0.3 * plan.nbytes < nbytes < 1.2 * plan.nbytes + 10_000 * parts
    assert plan.part_samples[0] * parts <= 24 <= plan.part_samples[1] * parts


def test_arrays_and_texts(tmp_path: Path) -> None:
    plan = pack(Waves(), tmp_path / "a.h5", compression="gzip", dry_run=True)
    assert (
        "gzip, 8,192 samples a chunk" in plan.layout
        and plan.nbytes < 37 * 120
        and plan.store == "decoded"
    )
    assert "contiguous" in pack(Waves(), tmp_path / "a.h5", dry_run=True).layout
    assert "as chunks=1 says" in pack(Waves(), tmp_path / "a.h5", chunks=1, dry_run=True).layout
    assert os.listdir(tmp_path) == []
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text\n" * 100)
    with TextDataset(tmp_path / "texts", cache_dir=tmp_path / "cache") as texts:
        for shard_size in (None, 500):
            plan = pack(texts, tmp_path / "out", shard_size=shard_size, dry_run=True)
            assert plan.store == "tokens" and plan.nbytes > 500 and plan.seconds is not None
    assert not (tmp_path / "out").exists()


def test_zarr(photos: Path, tmp_path: Path) -> None:
    plan = pack(
        images(photos),
        tmp_path / "out",
        store="decoded",
        format="zarr",
        shard_size=SHARD,
        dry_run=True,
    )
    assert plan.parts > 1 and "shards" in plan.layout and os.listdir(tmp_path) == []


def test_finished_parts_are_left_out(photos: Path, tmp_path: Path) -> None:
    out = pack(photos, tmp_path / "out", shard_size=SHARD, part="0/2")
    before, parts = tree(tmp_path), pack_status(out).parts
    plan = pack(photos, out, shard_size=SHARD, dry_run=True)
    assert plan.left == len(pack_status(out).missing) < parts == plan.parts
    assert pack(photos, out, shard_size=SHARD, part="0/2", dry_run=True).left == 0
    assert pack(photos, out, shard_size=SHARD, part="0/2", dry_run=True).seconds is None
    with pytest.raises(TargetExistsError, match="holds the plan of another pack"):
        pack(photos, out, shard_size=2 * SHARD, dry_run=True)
    assert pack(photos, out, shard_size=2 * SHARD, overwrite=True, dry_run=True).left < parts
    assert tree(tmp_path) == before


def test_room_of_finished_parts(photos: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"store": "jpeg", "max_size": 32, "shard_size": 3000}
    out = pack(photos, tmp_path / "out", **how)
    plan = pack(photos, out, dry_run=True, **how)
    assert plan.parts > 1 and (plan.left, plan.needed) == (0, 0)


@pytest.mark.parametrize(
    ("workers", "processes", "at_once"), [(1, 1, 1), (2, 1, 2), (2, 2, 2), (1, 3, 3)]
)
def test_room_of_parts_on_their_way_to_a_store(
    photos: Path, memory: Any, workers: int, processes: int, at_once: int
) -> None:
    """All parts that are packed at a time lie in the folder for temporary files: two of a single
    process, if it has two threads.
    """
    plan = pack(
        photos,
        "memory://dry-run/out",
        shard_size=SHARD,
        workers=workers,
        processes=processes,
        dry_run=True,
    )
    assert plan.left > 3 and plan.needed == at_once * plan.part_nbytes[1]


def test_what_pack_would_refuse(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "there.h5").touch()
    with pytest.raises(TargetExistsError):
        pack(photos, tmp_path / "there.h5", dry_run=True)
    with pytest.raises(DataNotFoundError, match="is no folder"):
        pack(photos, tmp_path / "no" / "out", shard_size=SHARD, dry_run=True)
    with pytest.raises(ConfigError, match="nothing to plan"):
        pack(ImageDataset(photos).subset([]), tmp_path / "a.h5", dry_run=True)
    copy = shutil.copytree(photos, tmp_path / "copy")
    first = next(path for path in sorted(copy.rglob("*")) if path.is_file())
    first.write_bytes(b"no image")
    with pytest.raises(SampleError, match=first.name):
        pack(copy, tmp_path / "a.h5", dry_run=True)


def test_room_that_is_too_little(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 500, 500))  # type: ignore[attr-defined]
    plan = pack(photos, tmp_path / "out", shard_size=SHARD, dry_run=True)
    assert (
        plan.room is not None and plan.room[1] == 500 < plan.needed and ": too little" in str(plan)
    )


@pytest.mark.parametrize("count", [1, 2, 17, 1000, 100_000])
def test_samples_are_evenly_spread(count: int) -> None:
    numbers = _spread(count).tolist()
    assert len(set(numbers)) == len(numbers) <= 4096 and set(numbers) <= set(range(count))
    if count <= 17:
        assert len(numbers) > count // 2
    if count >= 1000:  # the first ten fall into each fifth
        assert {number * 5 // count for number in numbers[:10]} == set(range(5))


def test_measuring_ends(photos: Path) -> None:
    """There is always one round, and none begins when the time is over."""
    with ImageDataset(photos) as dataset:
        found = measure.measured(dataset, StoreOptions("encoded"), None, 1, enough_s=0)
    assert found is not None and 0 < found.samples < 24


def test_the_command(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["pack", str(photos), str(tmp_path / "out"), "--shard-size", "16kB", "--dry-run"]) == 0
    )
    text = capsys.readouterr().out
    assert all(
        word in text
        for word in ("24 samples", "parts:", "layout:", "room:", "time:", "nothing was written")
    )
    assert main(["pack", "--json", str(photos), str(tmp_path / "out.h5"), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 24 and os.listdir(tmp_path) == []
