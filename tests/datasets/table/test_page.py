"""What docs/tables.md says is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.datasets.table.test_table import encoded, some_table, write

pa = pytest.importorskip("pyarrow")

PAGE = (Path(__file__).parents[3] / "docs" / "tables.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spectra = np.random.default_rng(0).random((80, 16), np.float32)
    rows = {
        "pressure": np.arange(80, dtype=np.float32),
        "spectrum": pa.FixedSizeListArray.from_arrays(pa.array(spectra.reshape(-1)), 16),
        "note": [f"no. {row}" for row in range(80)],
        "label": [row % 2 for row in range(80)],
    }
    write(tmp_path / "measurements" / "a.parquet", pa.table(rows))
    captions = [f"no. {row}" for row in range(6)]
    images = {
        "image": [{"bytes": encoded(row), "path": None} for row in range(6)],
        "label": [0, 1] * 3,
        "caption": captions,
    }
    write(tmp_path / "photos.parquet", pa.table(images))
    write(tmp_path / "captions.parquet", pa.table({"caption": captions}))
    kinds = pa.array(["oak", "ash", "elm"] * 2).dictionary_encode()
    write(tmp_path / "kinds.parquet", pa.table({"size": range(6), "kind": kinds}))
    write(tmp_path / "saved" / "train" / "data-00000-of-00001.arrow", some_table(30), "stream")
    np.save("embeddings.npy", spectra)
    np.savez("arrays.npz", x=spectra, y=np.arange(80))
    names: dict[str, Any] = {"torch": torch}
    for block in BLOCKS:
        exec(block, names)
    assert len(names["saved"]) == 30 and "number" in names["saved"][0]
    assert names["embeddings"][3].shape == (16,) and names["both"][3][1] == 3
    names["loader"].close()
