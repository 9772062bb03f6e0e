"""The worked examples of docs/architecture.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
TEXT = PAGE.read_text()
EXAMPLES = dict(re.findall(r"## Adding an? ([^\n]+)\n.*?```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.filterwarnings("ignore:.*the 4 files lie flat")
@pytest.mark.parametrize("title", ["format", "storage protocol", "mode"])
def test_examples_run(title: str, tmp_path: Path) -> None:
    np.arange(8.0).tofile(tmp_path / "numbers.bin")
    (tmp_path / "photos").mkdir()
    for number in range(4):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    given: dict[str, Any] = {
        "folder": tmp_path,
        "len_of_words": lambda text: [len(word) for word in text.split()],
        "__name__": "architecture",
    }
    try:
        exec(compile(EXAMPLES[title], str(PAGE), "exec"), given)
    finally:
        given.clear()  # fsspec keeps the class, and with it what its functions see


def test_it_names_files_and_methods_that_exist() -> None:
    package = PAGE.parent.parent / "src" / "headrace"
    roots = (package, PAGE.parent.parent, PAGE.parent.parent / "tests")
    for name in re.findall(r"\b((?:\w+/)+\w+\.py)\b", TEXT):
        assert any((root / name).exists() for root in roots), name
    for name, method in re.findall(r"(\w+/\w+\.py) +\w+\.(\w+)", TEXT):
        assert f"def {method}(" in (package / name).read_text(), (name, method)
