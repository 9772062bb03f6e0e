"""A pack of each kind of source, in each way: what is opened is what was packed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import RandomHorizontalFlip, RandomResizedCrop, create_dataloader, open_dataset, pack
from headrace.packing import pack_status, verify
from headrace.testing.contract import same
from tests.packing.cases import CASES, COUNT, Case, make_case
from tests.packing.shared import check_same, contents, plain, samples_of
from tests.servers.ranges import RangeServer


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(*request.param, tmp_path_factory.mktemp("case"))


@pytest.mark.quick_every(5)
def test_samples_are_those_of_the_source(case: Case) -> None:
    """In all modes; of images that are encoded again the targets."""
    source = case.source()
    wanted = samples_of(source)
    is_exact = case.options.get("store") != "jpeg"
    if not is_exact:
        wanted = [target for _, target in wanted]
    assert verify(case.path).samples == COUNT
    for mode in ("lazy", "eager", "cached", "streaming"):
        with case.open(case.path, loading_mode=mode) as packed:
            found = list(packed)
            if not is_exact:
                found = [target for _, target in found]
            if mode == "streaming":
                assert sorted(map(repr, map(plain, found))) == sorted(map(repr, map(plain, wanted)))
            else:
                assert same(found, wanted), mode
            if hasattr(source, "fingerprint"):
                assert packed.fingerprint == source.fingerprint
            for name in ("classes", "class_to_idx", "column_classes"):
                assert getattr(packed, name, None) == getattr(source, name, None)


@pytest.mark.quick_every(9)
def test_views_and_packs_are_packed_again(case: Case, tmp_path: Path) -> None:
    with case.open(case.path) as packed:
        with case.open(pack(packed, tmp_path / "again.h5")) as again:
            check_same(again, packed)
        view = packed.subset([7, 3, 11])
        with case.open(pack(view, tmp_path / "view.h5")) as again:
            check_same(again, view)
            assert same(samples_of(again[2:]), samples_of(view[2:]))


@pytest.mark.quick_every(13)
def test_dry_run_tells_the_parts(case: Case, tmp_path: Path) -> None:
    plan = pack(case.source(), tmp_path / "out", dry_run=True, **case.options)
    parts = pack_status(case.path).parts if case.path.is_dir() else 1
    assert (plan.count, plan.parts) == (COUNT, parts)
    files = [case.path] if case.path.is_file() else list(case.path.rglob("*"))
    nbytes = sum(path.stat().st_size for path in files)
    planned = sum(plan.nbytes)
    assert 0.3 * planned < nbytes < 1.2 * planned + 11_000 * len(files)
    assert not (tmp_path / "out").exists() and (parts > 2 or case.path.is_file())


@pytest.mark.quick_every(13)
def test_same_bytes_whoever_packs(case: Case, tmp_path: Path) -> None:
    """Jobs with a share each, two processes, threads of an executor."""
    source = case.source()
    if case.path.is_file():
        pack(source, tmp_path / "out.h5", workers=1, **case.options)
        assert (tmp_path / "out.h5").read_bytes() == case.path.read_bytes()
        return
    for number in (2, 0, 1):
        pack(source, tmp_path / "shares", part=f"{number}/3", workers=1, **case.options)
        assert pack_status(tmp_path / "shares").joined == (number == 1)
    pack(source, tmp_path / "two", processes=2, **case.options)
    with ThreadPoolExecutor(2) as executor:
        pack(source, tmp_path / "threads", executor=executor, **case.options)
    for name in ("shares", "two", "threads"):
        assert contents(tmp_path / name) == contents(case.path), name


def joint(image: Any, target: Any) -> Any:
    """A transform of both that draws."""
    return np.asarray(image) + random.randrange(5), target


@pytest.mark.parametrize("source", ["masks", "boxes"])
@pytest.mark.parametrize("way", ["file", "decoded parts"])
@pytest.mark.quick_every(2)
def test_transforms_draw_the_same(source: str, way: str, tmp_path: Path) -> None:
    case = make_case(source, way, tmp_path)
    steps = [RandomResizedCrop(6, scale=(0.3, 1)), RandomHorizontalFlip(), joint]
    options: list[dict[str, Any]] = [
        {"transforms": steps, "transform_input": "numpy"},
        {"transforms": steps, "transform_input": "pil"},
        {"transform": steps[:2], "normalize": False},
    ]
    if way == "file":
        options += [{"image_size": None}, {"image_size": None, "transform": steps[:2]}]
    for chosen in options:
        with case.source(**chosen) as dataset, case.open(case.path, **chosen) as packed:
            dataset.set_epoch(2)
            packed.set_epoch(2)
            assert same(samples_of(packed), samples_of(dataset)), chosen


def test_batches_and_states_are_those_of_the_source(tmp_path: Path) -> None:
    case = make_case("columns", "parts", tmp_path)
    with case.source() as source, case.open(case.path) as packed:
        loaders = [
            create_dataloader(dataset, batch_size=5, seed=3, shuffle=True, num_workers=0)
            for dataset in (packed, source)
        ]
        assert same(*map(list, loaders))
        next(iter(loaders[1]))
        loaders[0].load_state_dict(loaders[1].state_dict())
        of_packed = packed.split(0.5, stratify="kind", seed=1)
        of_source = source.split(0.5, stratify="kind", seed=1)
        assert same(*([samples_of(part) for part in parts] for parts in (of_packed, of_source)))


def test_packs_open_by_folder_manifest_and_url(tmp_path: Path) -> None:
    case = make_case("photos", "parts", tmp_path)
    paths = [f"{case.path}/", case.path / "manifest.json", str(case.path / "*.h5")]
    with case.open(case.path) as wanted, RangeServer(case.path) as server:
        for path in [*paths, f"{server.url}/manifest.json"]:
            with open_dataset(path, image_size=8, cache_dir=tmp_path / "cache") as packed:
                check_same(packed, wanted)
                assert type(packed) is type(wanted)
