"""Images that take more memory than the budget leaves are refused before they are decoded."""

from __future__ import annotations

import pickle
import threading
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from headrace import ImageDataset, RandomResizedCrop, SampleError, StreamingDataset, TableDataset
from headrace.datasets.pixels import FREE, claimed, decode_image
from headrace.errors import FormatError
from headrace.memory import budget as budgeting
from tests.data.make import grey_png, image_bytes, larger_jpeg, make_tar

BUDGET = 300_000_000


def png(height: int, width: int) -> bytes:
    """A PNG of a few bytes that says it has so many black pixels, and ends after the first ones."""
    return grey_png(width, height, 8, zlib.compress(bytes(99)))


def jpeg(height: int, width: int, **options: Any) -> bytes:
    """A JPEG of one block whose header says that it is larger."""
    data = image_bytes(Image.new("RGB", (16, 16)), "JPEG", **options)
    return larger_jpeg(data, width, height)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small images, and between them one of 1 x 40,000,000 pixels."""
    for name in ("a.png", "c.png"):
        Image.new("RGB", (20, 30), (255, 0, 0)).save(tmp_path / name)
    (tmp_path / "b.png").write_bytes(png(40_000_000, 1))
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "workers"), [("lazy", 0), ("eager", 0), ("cached", 1), ("streaming", 0)]
)
def test_it_is_an_error_or_skipped(folder: Path, make_loader: Any, mode: str, workers: int) -> None:
    options: dict[str, Any] = {
        "image_size": 24,
        "targets": None,
        "loading_mode": mode,
        "max_memory_usage": BUDGET,
        "progress": False,
    }
    named = r"sample 1 .*b\.png: .* 1 x 40,000,000 pixels takes 4\.8 GB, .* leaves \d+\.\d MB"
    with pytest.raises(SampleError, match=named):
        list(ImageDataset(folder, **options))
    with ImageDataset(folder, on_error="skip", **options) as dataset:
        loader = make_loader(dataset, batch_size=3, num_workers=workers)
        assert [len(images) for images, _ in loader] == [2]
        assert "1 x 40,000,000 pixels" in str(loader.get_stats()["skipped_samples"])


def test_a_jpeg_counts_at_the_size_it_is_decoded_at(tmp_path: Path) -> None:
    Image.new("L", (5000, 5000)).convert("RGB").save(tmp_path / "a.jpg")
    for options, nbytes in (
        ({"decode": "exact"}, "10[4-7]"),
        ({"image_size": None}, "100"),
        ({"color": "L"}, "20[4-7]"),
    ):
        dataset = ImageDataset(tmp_path, targets=None, max_memory_usage=FREE, **options)
        with pytest.raises(SampleError, match=rf"takes {nbytes}\S+ MB, .* leaves 6\d\.\d MB"):
            dataset[0]
    dataset = ImageDataset(tmp_path, targets=None, max_memory_usage=FREE)
    assert dataset[0][0].shape == (3, 224, 224)  # an eighth of its size fits


def test_every_way_to_pixels_asks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"targets": None, "max_memory_usage": BUDGET}
    for data in (png(20_000, 5_000), jpeg(9_000, 9_000, progressive=True)):
        (tmp_path / "a.png").write_bytes(data)
        make_tar(tmp_path / "a.tar", [("0.png", data)])
        crop = ImageDataset(tmp_path / "a.png", transform=[RandomResizedCrop(8)], **options)
        with pytest.raises(SampleError, match="pixels takes"):
            crop[0]
        with pytest.raises(SampleError, match=r"member 'png': .* pixels takes"):
            list(StreamingDataset(str(tmp_path / "a.tar"), max_memory_usage=BUDGET))
        pq.write_table(pa.table({"image": [data]}), tmp_path / "a.parquet")
        table = TableDataset(
            tmp_path / "a.parquet", decode={"image": "png"}, max_memory_usage=BUDGET
        )
        with pytest.raises(SampleError, match=r"column 'image': .* pixels takes"):
            table[0]
        with pytest.raises(FormatError, match="pixels takes"):
            decode_image(data, left=lambda: FREE)
        with pytest.raises(FormatError, match="pixels takes"):
            decode_image(data, "RGB", (8, 8), True, left=lambda: FREE)


def test_a_worker_has_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ImageDataset(folder, image_size=24, targets=None, max_memory_usage=BUDGET) as dataset:
        whole = dataset.budget.left()
        assert whole == dataset.budget.available
        worker = type("Info", (), {"num_workers": 4})
        monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: worker)
        assert dataset.budget.left() == whole // 4
        monkeypatch.setattr(budgeting, "is_spawning", lambda: True)  # whose ledger is empty
        with dataset.budget.reserve(100_000_000, "batches"):
            data = pickle.dumps(dataset)
        assert pickle.loads(data).budget.left() == (whole - 100_000_000) // 4


def test_threads_wait_for_one_another() -> None:
    steps: list[str] = []

    def second() -> None:
        with claimed(lambda: 3 * FREE, 1, 1, 2 * FREE):
            steps.append("second")

    with claimed(lambda: 3 * FREE, 1, 1, 2 * FREE):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.1)
        steps.append("first")
    thread.join(10)
    assert steps == ["first", "second"]
