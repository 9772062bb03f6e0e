"""Tables that other libraries wrote: HuggingFace's datasets, pandas and pyarrow, read equal to
what these read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import ImageDataset, TableDataset, create_dataloader, open_dataset

pytestmark = pytest.mark.integration

N = 2500  # more than a record batch of datasets has


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("huggingface"))
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets


def some_rows(hf: Any) -> Any:
    """A dataset with features of many kinds."""
    rows = range(N)
    numbers, words = hf.List(hf.Value("int64")), hf.List(hf.Value("string"))
    columns: dict[str, tuple[Any, list[Any]]] = {
        "id": (hf.Value("int32"), list(rows)),
        "score": (hf.Value("float64"), [row / 7 for row in rows]),
        "text": (hf.Value("string"), [f"row {row}" for row in rows]),
        "flag": (hf.Value("bool"), [row % 2 == 0 for row in rows]),
        "label": (hf.ClassLabel(names=["cat", "dog", "bird"]), [row % 3 for row in rows]),
        "vector": (hf.List(hf.Value("float32"), length=4), [[row, 1.0, 2.0, 3.0] for row in rows]),
        "tokens": (numbers, [list(range(row % 5)) for row in rows]),
        "grid": (hf.Array2D((2, 3), "float32"), [[[row, 1, 2], [3, 4, 5]] for row in rows]),
        "words": (words, [["a", str(row)] for row in rows]),
    }
    features = hf.Features({name: kind for name, (kind, _) in columns.items()})
    return hf.Dataset.from_dict({name: v for name, (_, v) in columns.items()}, features=features)


def test_a_saved_data_set_opens_in_place(hf: Any, tmp_path: Path) -> None:
    dataset = some_rows(hf)
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    # caches beside it
    hf.load_from_disk(str(tmp_path / "saved")).map(lambda row: {"id": row["id"] + 1})
    theirs = dataset.with_format("torch")
    with open_dataset(tmp_path / "saved") as ours:
        assert type(ours) is TableDataset and len(ours) == N
        for row in (0, 999, 1000, 2499):
            mine, other = ours[row], theirs[row]
            for name in ("id", "score", "flag", "label", "vector", "tokens", "grid"):
                # theirs is float32
                assert torch.equal(mine[name].float(), other[name].float()), name
            assert float(mine["score"]) == row / 7
            assert mine["text"] == other["text"] and mine["words"] == list(other["words"])
            assert mine["grid"].shape == (2, 3) and mine["id"].dtype == torch.int32
    with TableDataset(tmp_path / "saved", ["vector"], target_name="label") as ours:
        assert ours.classes == ["cat", "dog", "bird"]
        loader = create_dataloader(ours, batch_size=64, num_workers=2, shuffle=True, seed=1)
        assert sorted(float(x) for batch, _ in loader for x in batch["vector"][:, 0]) == [
            float(row) for row in range(N)
        ]
        loader.close()


def test_splits_and_images(hf: Any, tmp_path: Path) -> None:
    images = [Image.fromarray(np.full((6, 8, 3), row, np.uint8)) for row in range(12)]
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["a", "b"])})
    dataset = hf.Dataset.from_dict(
        {"image": images, "label": [row % 2 for row in range(12)]}, features=features
    )
    hf.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "saved"))
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    for path in (tmp_path / "saved" / "train", tmp_path / "a.parquet"):
        options: Any = {"column": "image", "targets": "label", "normalize": False}
        with ImageDataset(path, image_size=None, **options) as ours:
            image, target = ours[7]
            assert (image == 7).all() and image.shape == (3, 6, 8)
            assert target == 1 and ours.classes == ["a", "b"]
            assert ours.describe().classes == {"a": 6, "b": 6}


def test_parquet_of_pandas(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {"n": np.arange(N, dtype=np.uint16), "x": np.linspace(0, 1, N, dtype=np.float32)}
    )
    frame["s"] = [f"é{row}" for row in range(N)]
    frame["c"] = pd.Categorical(["ab"[row % 2] for row in range(N)])
    frame["maybe"] = pd.array([row if row % 9 else None for row in range(N)], "Int64")
    path = tmp_path / "a.parquet"
    for compression in ("snappy", "zstd", "gzip", "brotli", "lz4", None):
        frame.to_parquet(path, compression=compression, row_group_size=300, index=False)
        with TableDataset(path, ["n", "x", "s", "c"], target_name="n") as ours:
            for row in (0, 299, 300, N - 1):
                sample, target = ours[row]
                assert sample["n"].dtype == torch.uint16 and int(sample["n"]) == row == target
                assert float(sample["x"]) == float(frame["x"][row])
                assert sample["s"] == f"é{row}" and sample["c"] == "ab"[row % 2]
    frame.to_feather(tmp_path / "a.feather")
    with TableDataset(tmp_path / "a.feather", ["x", "c"]) as ours:
        assert float(ours[N - 1]["x"]) == 1.0 and ours[3]["c"] == "b"
