"""The code of README.md and of the guides runs as it stands there, and README.md stays short."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from PIL import Image

from headrace import ImageDataset, TextDataset, collators, create_dataloader, pack
from tests.data.labelled import make_street, make_street_labels
from tests.data.make import image_bytes, make_mds, make_photos, make_tar, make_tfrecord
from tests.data.sparse import random_matrix, write_anndata
from tests.datasets.text.chat_tokenizer import chat_tokenizer
from tests.servers.ranges import RangeServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = (
    *("index", "start", "which_mode", "images", "text", "hdf5", "zarr", "streaming", "packing"),
    *("own_format", "loader", "collating", "order", "memory", "configuration"),
    *("moving", "multinode", "labels", "sparse", "tables", "episodes"),
    "profiling",
)
ELSEWHERE = {"architecture", "misuses", "trainers"}
"""Pages whose code is run by a test of their room."""
NEEDS = {
    "from distributed import Client": "Dask",
    "ray.get(": "Ray and Spark",
    "augment = v2.": "torchvision and a GPU",
}
"""What blocks need that don't run here, by what stands in them; tests/integration/ packs on
Dask.
"""


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def example(name: str) -> Any:
    """A module of examples/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_shard(path: Path, samples: int) -> None:
    """A tar of photographs and their classes."""
    path.parent.mkdir(exist_ok=True)
    members = []
    for number in range(samples):
        encoded = io.BytesIO()
        Image.new("RGB", (16, 12), (number, 0, 0)).save(encoded, "JPEG")
        members.append((f"{number:06d}.jpg", encoded.getvalue()))
        members.append((f"{number:06d}.cls", b"%d" % number))
    make_tar(path, members)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the pages read: photographs, drawings, arrays, volumes, shards, texts."""
    folder = tmp_path_factory.mktemp("data")
    make_photos(folder / "photos" / "train", per_class=50)
    make_photos(folder / "photos" / "val", per_class=5)
    make_photos(folder / "drawings", per_class=20)
    make_street_labels(make_street(folder / "street"))
    for number in range(2):
        write_shard(folder / "shards" / f"part-{number:03}.tar", 5)
    pixels = np.random.default_rng(0).integers(0, 256, (256, 3073), dtype=np.uint8)
    pixels.tofile(folder / "data_batch_1.bin")
    (folder / "scans/head").mkdir(parents=True)
    np.save(folder / "scans/head/1.npy", pixels[:3])
    texts = [json.dumps({"text": "a" * number}) for number in range(1, 200)]
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
    said = {"user": "What turns?", "assistant": "The wheel."}
    chat = [{"role": role, "content": content} for role, content in said.items()]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 10)
    (folder / "books").mkdir()
    (folder / "books" / "mill.txt").write_text("the mill wheel turns\n" * 100)
    with TextDataset(folder / "books") as books:
        pack(books, folder / "tokens.h5", progress=False)
    (folder / "runs").mkdir()
    chunked: dict[str, Any] = {"chunks": (4, 8, 8, 3), "compression": "gzip"}
    for path in (folder / "runs" / "a.h5", folder / "runs" / "b.h5", folder / "run.h5"):
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=np.zeros((20, 8, 8, 3), np.uint8), **chunked)
            file["image"] = file["images"]
            file["labels"] = file["label"] = np.arange(20)
            file["caption"] = [f"caption {number}" for number in range(20)]
    shutil.copy(folder / "run.h5", folder / "train.h5")
    root = zarr.open_group(folder / "volume.zarr", mode="w")
    for name, dtype in (("raw", "u2"), ("labels", "u1")):  # what was never written is 0
        array = root.create_array(
            name, shape=(512, 512, 512), dtype=dtype, chunks=(32, 32, 32), shards=(64, 64, 64)
        )
        array[:64, :64, :64] = 1
    (folder / "saved" / "train").mkdir(parents=True)
    rows = pa.table({"pressure": np.arange(100.0), "label": np.arange(100) % 3})
    pq.write_table(rows, folder / "saved" / "train" / "rows.parquet")
    pq.write_table(pa.table({"text": ["the mill", "turns"]}), folder / "corpus.parquet")
    photo = image_bytes(Image.new("RGB", (16, 12)), "JPEG")
    kinds = {"image": ("jpeg", None), "label": ("int", 8)}
    make_mds(folder / "mds", kinds, [[(photo, bytes(8))] * 70])
    (folder / "records").mkdir()
    features = {"image/encoded": photo, "label": np.array([1])}
    make_tfrecord(folder / "records" / "a.tfrecord", [features] * 9)
    example("make_volume").make_volume(folder / "image.zarr", (32, 128, 128))
    write_tables(folder)
    write_episodes(folder)
    genes = ["CD3E", "CD8A", "NKG7", *(f"gene {n}" for n in range(37))]
    for name in ("cells.h5ad", "plate1.h5ad", "plate2.h5ad", "cells.zarr"):
        write_anndata(folder / name, random_matrix(200, 40), names=genes)
    with h5py.File(folder / "cells.h5ad", "r+") as file:
        file["obsm/X_pca"] = np.zeros((200, 5), "f4")
    return folder


def write_tables(folder: Path) -> None:
    """What docs/tables.md reads."""
    spectra = np.random.default_rng(0).random((80, 16), np.float32)
    captions = [f"no. {row}" for row in range(80)]
    photo = image_bytes(Image.new("RGB", (16, 12)), "PNG")
    kinds = pa.array(["oak", "ash", "elm"] * 2).dictionary_encode()
    (folder / "measurements").mkdir()
    for name, columns in (
        ("measurements/a", {"pressure": np.arange(80.0), "spectrum": list(spectra)}),
        ("photos", {"image": [{"bytes": photo, "path": None}] * 80, "caption": captions}),
    ):
        table = pa.table({**columns, "note": captions, "label": [0, 1] * 40})
        pq.write_table(table, folder / f"{name}.parquet")
    pq.write_table(pa.table({"size": range(6), "kind": kinds}), folder / "kinds.parquet")
    np.save(folder / "embeddings.npy", spectra)
    np.savez(folder / "arrays.npz", x=spectra, y=np.arange(80))


def write_episodes(folder: Path) -> None:
    """What docs/episodes.md reads."""
    draws = np.random.default_rng(0)
    with h5py.File(folder / "demos.hdf5", "w") as file:
        for number in range(12):
            steps, demo = 20 + number, file.create_group(f"data/demo_{number}")
            demo["obs/agentview_image"] = draws.integers(0, 256, (steps, 84, 84, 3), np.uint8)
            demo["obs/robot0_eef_pos"] = np.zeros((steps, 3))
            demo["actions"] = draws.normal(size=(steps, 7))
            demo.attrs["num_samples"] = steps
        file["mask/train"] = np.array([f"demo_{number}".encode() for number in range(10)])
    with h5py.File(folder / "session.nwb.h5", "w") as file:
        file["acquisition/probe/data"] = np.zeros((900, 4))
        file["acquisition/probe/timestamps"] = np.arange(900) / 30
    root = zarr.open_group(folder / "pusht.zarr", mode="w", zarr_format=2)
    root.create_array("data/img", data=np.zeros((30, 96, 96, 3), "u1"))
    root.create_array("data/action", data=np.zeros((30, 2), "f4"))
    root.create_array("meta/episode_ends", data=np.array([18, 30]))


@pytest.fixture
def web(data: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of what the pages read by HTTP."""
    folder = tmp_path / "web"
    for number in range(4):
        write_shard(folder / f"train-{number:04}.tar", 3)
    with ImageDataset(data / "photos" / "val") as photos:
        pack(photos, folder / "train.h5", progress=False)
    shutil.copy(data / "tokens.h5", folder)
    line = b'{"text": "the mill", "label": 1}\n'
    (folder / "a.jsonl").write_bytes(line)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(line))
    with zarr.storage.ZipStore(folder / "volume.zarr.zip", mode="w") as store:
        zarr.open_group(store, mode="w").create_array(
            "raw", data=np.ones((64, 64, 64), "u2"), chunks=(32, 32, 32)
        )
    with RangeServer(folder) as server:
        yield server.url


@pytest.fixture
def bucket(data: Path, tmp_path: Path, memory: Any) -> str:
    """The URL, in memory, of what the pages read from a bucket of S3, and write to it."""
    folder = tmp_path / "bucket"
    shutil.copytree(data / "runs", folder / "runs")
    shutil.copytree(data / "books", folder / "texts")
    for store, array in (("volume.zarr", "raw"), ("images.zarr", "images")):
        root = zarr.open_group(folder / store, mode="w")
        for name in (array, "labels"):
            root.create_array(name, data=np.ones((200, 8), "u1"), chunks=(10, 8), shards=(100, 8))
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/bucket/{path.relative_to(folder)}", path.read_bytes())
    return "memory://bucket/"


@pytest.fixture
def run(
    own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs blocks of a page one after the other in a folder, and gives their names; closes what
    they made.
    """
    monkeypatch.setattr(collators, "_entries", dict(collators._entries))
    opened: list[Any] = []
    made: list[dict[str, Any]] = []

    def run_in(folder: Path, page: str, code: list[str], **names: Any) -> dict[str, Any]:
        monkeypatch.chdir(folder)
        names["__name__"] = "page"
        made.append(names)
        for block in code:
            exec(compile(block, page, "exec"), names)
            opened.extend(
                value
                for value in names.values()
                if hasattr(value, "close") and not isinstance(value, type | ModuleType)
            )
        return names

    yield run_in
    for thing in opened:
        thing.close()
        if hasattr(thing, "dataset"):
            thing.dataset.close()
    for names in made:
        names.clear()  # a class of the page, which caches by class may hold, would hold them all


def in_reach(block: str, web: str, bucket: str) -> str:
    """The block with URLs that are there."""
    block = re.sub(r"https://(host|data\.example\.org)/", f"{web}/", block)
    return block.replace("{0000..0127}", "{0000..0003}").replace("s3://bucket/", bucket)


def training(data: Path) -> dict[str, Any]:
    """What docs/which_mode.md takes to be there."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    dataset = ImageDataset(data / "photos" / "train", image_size=16)
    model(dataset[0][0][None])
    given = {"dataset": dataset, "model": model, "criterion": torch.nn.CrossEntropyLoss()}
    return {**given, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


@pytest.fixture
def job(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What docs/multinode.md takes to be there; one rank, which joins no group and has no GPU."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, *, rank, world_size, timeout: None
    )
    with (
        ImageDataset(data / "photos" / "train", image_size=16) as dataset,
        create_dataloader(dataset, batch_size=48, seed=7) as loader,
    ):
        next(iter(loader))
        saved = {"loader": loader.state_dict()}
        yield {"dataset": dataset, "global_batch": 48, "seed": 7, "saved": saved}


@pytest.mark.slow
@pytest.mark.quick_every(4)
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_guide_runs(
    page: str, data: Path, run: Any, request: pytest.FixtureRequest
) -> None:
    code = blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    code = [block for block in code if not any(words in block for words in NEEDS)]
    if any("://" in block for block in code):
        web, bucket = map(request.getfixturevalue, ("web", "bucket"))
        code = [in_reach(block, web, bucket) for block in code]
    given: dict[str, Any] = {}
    if page == "which_mode":
        given = training(data)
    elif page == "text":
        given = {"chat_tokenizer": chat_tokenizer()}
    elif page == "multinode":
        given = request.getfixturevalue("job")
    names = run(data, f"docs/{page}.md", code, **given)
    if page == "own_format":
        images, labels = next(iter(names["loader"]))
        assert images.shape == (128, 3, 32, 32)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    elif page == "multinode":
        assert names["rest"] == 0 and names["loader"].state_dict()["batches"] == 1
    elif page == "order":
        assert names["step"] == 1 and names["other"].state_dict()["epoch"] == 3
    elif page == "labels":
        assert names["masks"].shape == (8, 64, 64) and names["masks"].dtype is torch.int64
        assert names["images"].shape == (8, 3, 48, 64) and len(names["targets"]) == 8
        assert names["names"] == {3: "mill", 7: "wheel"}
        assert len(names["test"]) == 2 and len(names["val"]) in (4, 8)
    elif page == "tables":
        assert len(names["saved"]) == 100 and "pressure" in names["saved"][0]
        assert names["embeddings"][3].shape == (16,) and names["both"][3][1] == 3
    elif page == "profiling":
        assert (data / "profile.html").exists()
    elif page == "episodes":
        actions = torch.stack([one["actions"] for one in names["train"]])
        assert abs(float(actions.mean())) < 0.2


@pytest.mark.slow
@pytest.mark.quick_every(1)
def test_the_program_of_the_readme_prints_what_it_says(
    tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    example("make_photos").make_photos(tmp_path / "photos" / "train")
    (program,), (output,) = blocks(README), blocks(README, "text")
    assert len(program.splitlines()) <= 12
    capsys.readouterr()
    run(tmp_path, "README.md", [program])
    assert capsys.readouterr().out == output


def test_all_code_is_run() -> None:
    """Blocks without a language are commands; those of other libraries, in docs/moving.md as "py",
    can only be compiled.
    """
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    assert {page for page, text in texts.items() if blocks(text)} == {*PAGES, *ELSEWHERE}
    of_pages = [block for page in PAGES for block in blocks(texts[page])]
    assert sum(any(words in block for words in NEEDS) for block in of_pages) == len(NEEDS)
    for page, text in {**texts, "README": README}.items():
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for block in [block for language, block in fenced if not language]:
            assert not re.search(r"^(from \S+ )?import |^\w+ = ", block, re.MULTILINE), page
        for number, block in enumerate(blocks(text, "py")):
            assert page == "moving"
            compile(block, f"docs/moving.md, block {number} of other libraries", "exec")


def test_the_readme_is_short() -> None:
    """What is longer belongs on a page; each of the nine points has a number and a link."""
    assert len(README.splitlines()) <= 160 and len(README.split()) <= 800
    start = README.partition("\npip install")[0]
    assert start.count("\n") < 25 and "<picture>" in start
    text = README.partition("## What it does\n")[2].partition("\n\n**Where it loses")[0]
    points = text.strip().splitlines()
    assert len(points) == 9
    for point in points:
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", point.removeprefix("* "))
        assert len(text.split()) <= 15 and "](" in point, point
        assert re.search(r"\d|once|twice|two|four|billion", text), point


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings. GitHub and mkdocs give these headings the same anchors."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    names = (re.sub(r"[^\w\- ]", "", one.lower()) for one in re.findall(r"(?m)^#+ (.*)$", text))
    return {name.strip().replace(" ", "-") for name in names}


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            # "#only-dark" of a picture is no anchor
            is_named = not anchor or target.suffix != ".md" or anchor in _anchors(target)
            assert "://" in link or (target.exists() and is_named), (page, link)
