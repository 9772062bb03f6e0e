"""FilesDataset keeps the laws, gives the targets that images have, and says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import FilesDataset, create_dataloader
from headrace.errors import ConfigError, DataNotFoundError
from headrace.testing import DatasetContract


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.float32).copy())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(24):
        path = tmp_path / "ab"[number % 2] / f"{number:02}.F32"
        path.parent.mkdir(exist_ok=True)
        np.full(4, number, np.float32).tofile(path)
    return tmp_path


@pytest.mark.quick_every(4)
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _files(self, folder: Path) -> None:
        self.folder = folder

    def make(self, **options: Any) -> FilesDataset:
        return FilesDataset(self.folder, ".f32", decode, **options)

    def make_bad(self, **options: Any) -> tuple[FilesDataset, list[int]]:
        (self.folder / "b/01.F32").write_bytes(b"cut")
        return self.make(**options), [12]


def test_targets_are_those_of_images(folder: Path) -> None:
    dataset = FilesDataset(folder, [".txt", ".f32"], decode, hold="encoded")
    assert dataset.class_to_idx == {"a": 0, "b": 1} and dataset.held_nbytes() == 24 * 16
    loader = create_dataloader(dataset, batch_size=24, num_workers=0, shuffle=False)
    values, targets = next(iter(loader))
    assert values[:, 0].tolist() == [*range(0, 24, 2), *range(1, 24, 2)]
    assert targets.tolist() == 12 * [0] + 12 * [1]
    table = folder / "labels.csv"
    table.write_text("file;kind;site\n" + "".join(f"{n:02}.F32;k;s{n % 3}\n" for n in range(24)))
    dataset = FilesDataset(folder, ".f32", decode, targets=table, delimiter=";", target_name="site")
    assert dataset[1][1] == 2 and dataset.classes == ["s0", "s1", "s2"]
    assert [len(part) for part in dataset.split(0.5, groups="site")] == [16, 8]
    assert isinstance(FilesDataset(folder, ".f32", decode, targets=None)[0], torch.Tensor)


def test_what_is_wrong_is_said(folder: Path) -> None:
    wrong: list[tuple[Any, Any, str]] = [
        ("f32", decode, "extensions must be the ending"),
        ([], decode, "extensions must be the ending"),
        (".f32", None, "decode must be a callable"),
    ]
    for extensions, function, message in wrong:
        with pytest.raises(ConfigError, match=message):
            FilesDataset(folder, extensions, function)
    with pytest.raises(DataNotFoundError, match=r"\.wav.*24 \.f32"):
        FilesDataset(folder, ".wav", decode)
    with pytest.raises(ConfigError, match=r"a folder.* targets='folders'"):
        FilesDataset(folder, ".f32", decode, targets=folder)
    unnamed = FilesDataset(folder, ".f32", lambda data: data)
    with pytest.raises(ConfigError, match="lambda"):
        create_dataloader(unnamed, num_workers=1, multiprocessing_context="spawn")
