"""docs/labels.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.labelled import make_street, make_street_labels

PAGE = Path(__file__).parents[3] / "docs" / "labels.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_street_labels(make_street(tmp_path / "street"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, "docs/labels.md", "exec"), names)
    masks, images = names["masks"], names["images"]
    assert masks.shape == (8, 64, 64) and masks.dtype is torch.int64
    assert images.shape == (8, 3, 48, 64) and len(names["targets"]) == 8
    assert names["names"] == {3: "mill", 7: "wheel"}
    assert len(names["test"]) == 2 and len(names["val"]) in (4, 8)
