"""The misuses of docs/errors.md: each is provoked, and its message is what the page shows.

`python -m tests.docs_errors` writes them into the page again, after one has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import torch
from PIL import Image

from tests.data.make import make_photos

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
MISUSE = re.compile(
    r"^### (\d+)\. (.*?)\n\n```python\n(.*?)\n```\n\n```text\n(.*?)\n```$", re.DOTALL | re.MULTILINE
)
"""Number, title, code and message of an entry."""


def make_files(folder: Path) -> None:
    """What the code of the page reads."""
    make_photos(folder / "photos", classes=("circle", "noise"), per_class=2, size=(16, 12))
    photo = (folder / "photos/circle/circle_000.jpg").read_bytes()
    (folder / "empty").mkdir()
    for name, content in (
        ("mixed/cats/cat.jpg", photo),
        ("mixed/stray.jpg", photo),
        ("broken/cut.jpg", photo[: len(photo) // 2]),
        ("texts/a.txt", b"a text"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, size in (("images/1", (16, 12)), ("images/2", (16, 12)), ("masks/1", (8, 6))):
        (folder / "street" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", size).save(folder / "street" / f"{name}.png")
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    with h5py.File(folder / "run.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((4, 3)), np.zeros(4)


@contextlib.contextmanager
def as_notebook(folder: Path) -> Iterator[dict[str, object]]:
    """The names of a notebook that runs in the folder, on a machine without a GPU."""
    main = types.ModuleType("__main__")
    exec("import os, signal, h5py, torch, headrace\nfrom headrace import *", main.__dict__)
    exec("from torch.utils.data import RandomSampler", main.__dict__)
    main.__dict__["dataset"] = [(torch.zeros(3), number) for number in range(10)]
    with (
        contextlib.chdir(folder),
        mock.patch.dict(sys.modules, {"__main__": main}),
        mock.patch("torch.cuda.is_available", return_value=False),
    ):
        yield main.__dict__


def message_of(code: str, folder: Path) -> str:
    """Type and text of the error that the code raises; what differs from run to run is left out."""
    with as_notebook(folder) as names, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(code, names)
        except Exception as error:
            text, shown = type(error).__name__, str(error).splitlines()[0]
        else:
            return "no error"
        finally:
            names.clear()
    shown = re.sub(r"\(pid \d+\)", "(pid 4711)", re.sub(r"0x[0-9a-f]+", "0x7f00", shown))
    shown = re.sub(r"[\d.,]+ k?M?G?B are left", "... are left", shown)
    of_3_14, before = "it's not found as __main__.<lambda>", "attribute lookup <lambda> on __main__"
    shown = shown.replace(of_3_14, f"{before} failed")
    for path in (os.path.realpath(folder), str(folder)):
        shown = shown.replace(f"{path}/", "").replace(path, "/home/me")
    return f"{text}: {shown}"


def made_page(folder: Path) -> str:
    """The page, with messages that are provoked in an empty folder."""
    make_files(folder)
    page = PAGE.read_text(encoding="utf-8")
    for _, _, code, shown in MISUSE.findall(page):
        old = f"```python\n{code}\n```\n\n```text\n"
        page = page.replace(f"{old}{shown}\n", f"{old}{message_of(code, folder)}\n", 1)
    return page


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        made_text = made_page(Path(made))
    PAGE.write_text(made_text, encoding="utf-8")
