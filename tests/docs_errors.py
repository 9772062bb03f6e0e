"""The misuses of docs/errors.md: each is provoked, and its message is what the page shows.

`python -m tests.docs_errors --write` writes the page again, after a message has changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import h5py
import numpy as np
import torch
from PIL import Image

from tests.data.make import make_photos

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
INTRODUCTION = """# Errors

This page lists the 47 most common misuses, each with its code, message, cause and remedy. Every
error of headrace is a `HeadraceError`, and a subclass of the builtin that fits (`ConfigError` is a
`ValueError`, `DataNotFoundError` a `FileNotFoundError`, `SampleError` an `OSError`). Three things
raise Python's own errors: an index out of range (`IndexError`), random access to a stream
(`TypeError`), and a name that the package does not have (`AttributeError`, or `ImportError` in
`from headrace import ...`). Most misuses are detected when the loader or dataset is made, before
anything is read.

The messages are those of the code: `tests/docs_errors.py` provokes each of them.
"""


class Misuse(NamedTuple):
    """An entry of the page.

    Attributes:
        title: what was done wrong.
        code: that does so, as the page shows it.
        cause: why it is refused.
        remedy: what to do.
    """

    title: str
    code: str
    cause: str
    remedy: str


CHAPTERS: dict[str, list[Misuse]] = {
    "Arguments": [
        Misuse(
            "The batch size as second argument",
            "create_dataloader(dataset, 64)",
            "The second argument is a `DataLoaderConfig`; torch's `DataLoader` has the batch size "
            "there.",
            "Pass options by name.",
        ),
        Misuse(
            "A misspelt option",
            "create_dataloader(dataset, batchsize=64)",
            "No option has that name.",
            "Use the name that the message suggests.",
        ),
        Misuse(
            "A misspelt option of the dataset, beside a path",
            'create_dataloader("photos", imagesize=64)',
            "With a path, you may mix options of loader and dataset; this is an option of neither.",
            "Use the name that the message suggests.",
        ),
        Misuse(
            "A misspelt option of a dataset",
            'ImageDataset("photos", imagesize=64)',
            "The dataset has no argument of that name. The folder has not been read yet.",
            "Use the name that the message suggests.",
        ),
        Misuse(
            "A word of other libraries",
            "create_dataloader(dataset, is_training=True)",
            "Older guides and other libraries have that word ([names](names.md) lists them).",
            "`DataLoaderConfig.train()` shuffles and drops the incomplete batch, `.eval()` does "
            "neither.",
        ),
        Misuse(
            "An option of the dataset, given to the loader",
            "create_dataloader(dataset, image_size=64)",
            "The dataset already exists, and its options are fixed.",
            "Pass it to the dataset, or pass a path instead of a dataset.",
        ),
        Misuse(
            "An option of another format",
            'create_dataloader("texts", image_size=64)',
            "The format was found by looking at the files: these are texts.",
            "Leave the option out, or check that it is the right folder.",
        ),
        Misuse(
            "A class instead of a dataset",
            "create_dataloader(ImageDataset, batch_size=64)",
            "The parentheses are missing.",
            "Make the dataset, and pass it.",
        ),
        Misuse(
            "A generator instead of a dataset",
            "create_dataloader(sample for sample in dataset)",
            "A generator gives its samples once, to one process, in its own order.",
            "Pass its source, or write an `IterableDataset`.",
        ),
        Misuse(
            "Several datasets in a dict",
            'create_dataloader({"train": dataset, "test": dataset})',
            "A loader has one dataset. HuggingFace's `load_dataset` gives such a dict.",
            "Pass one of its values; `MultiDataLoader` mixes several.",
        ),
        Misuse(
            "No path",
            "ImageDataset(None)",
            "An environment variable or a command line's argument was not set.",
            "Look where the path comes from.",
        ),
        Misuse(
            "An open file instead of its path",
            'HDF5Dataset(h5py.File("run.h5"), "images")',
            "Workers open files by themselves, and an open file can't travel to them.",
            "Pass the path.",
        ),
        Misuse(
            "`BaseDataset` with a path",
            'BaseDataset("photos")',
            "`BaseDataset` is the base class of all formats, and can't read any itself.",
            "Use `open_dataset`, or the class of the format.",
        ),
        Misuse(
            "A name of an older guide",
            "headrace.DataLoaderFactory()",
            "headrace never had that name.",
            "[Names](names.md) has a table of them.",
        ),
    ],
    "Files": [
        Misuse(
            "A path that is not there",
            'ImageDataset("phots")',
            "Nothing has that name. A relative path starts at the working folder, which the "
            "message names.",
            "Correct the path, or make it absolute.",
        ),
        Misuse(
            "An empty folder",
            'ImageDataset("empty")',
            "No file below it has the extension of an image.",
            "Check the path; rename files without an extension.",
        ),
        Misuse(
            "A folder of another kind",
            'TextDataset("photos")',
            "The folder holds files, and none of them is a text.",
            "Use the class that fits, or `open_dataset`, which chooses it.",
        ),
        Misuse(
            "Images beside the class folders",
            'ImageDataset("mixed")',
            "Classes are the first-level folders, so files outside them have no class.",
            "Move the files, or pass `targets=`.",
        ),
        Misuse(
            "A file that can't be decoded",
            'ImageDataset("broken", targets=None)[0]',
            "The file is truncated, as after an interrupted download.",
            'Fix or remove it; `on_error="skip"` leaves such samples out, and counts them.',
        ),
        Misuse(
            "A name that is not in the file",
            'HDF5Dataset("run.h5", "image")',
            "The file has no dataset of that name.",
            "Use one of those that the message lists.",
        ),
        Misuse(
            "A folder without HDF5 files",
            'HDF5Dataset("photos", "images")',
            "A folder stands for all HDF5 files below it, and there are none.",
            "Use the class that the message names.",
        ),
        Misuse(
            "A file of another format",
            'HDF5Dataset("photos/circle/circle_000.jpg", "images")',
            "The format is detected from a file's first bytes, not from its name.",
            "Use the class that fits.",
        ),
        Misuse(
            "A glob that nothing fits",
            'HDF5Dataset("runs/*.h5", "images")',
            "No file matches, relative to the working folder.",
            "Correct the pattern; `**` goes through folders.",
        ),
    ],
    "Samples": [
        Misuse(
            "Targets without names, for a folder",
            'ImageDataset("photos", targets=[0, 1, 0, 1])',
            "Files come in sorted order, which may differ from that of a table.",
            "Pass a dict by file name (a column of pandas with names as its index does, too), or "
            "the list of the files' paths.",
        ),
        Misuse(
            "A file without a target",
            'ImageDataset("photos", targets={"circle_000.jpg": 0})',
            "Each file needs an entry, by its path below the folder or by its name.",
            "Complete the mapping, or pass a callable of the path.",
        ),
        Misuse(
            "An image without a mask",
            'ImageDataset("street/images", targets="street/masks")',
            "A mask has the name of its image, relative to its folder, with any extension.",
            "Add the mask, or open only the images that have one.",
        ),
        Misuse(
            "A mask of another size",
            'ImageDataset("street/images/1.png", targets="street/masks/1.png")[0]',
            "Masks are resized with their images, so they must have the same size.",
            "Make the mask again in the image's size.",
        ),
        Misuse(
            "A transform's class instead of a transform",
            'ImageDataset("photos", transform=RandomHorizontalFlip)',
            "The parentheses are missing: called with an image, the class would make a transform "
            "of it.",
            "Make the transform, and pass it.",
        ),
        Misuse(
            "The wrong argument in second place",
            'ImageDataset("photos", "train")',
            "All arguments except the path are passed by name. There is no argument for a part of "
            "the data: a part is a folder.",
            'Pass the folder, `ImageDataset("photos/train")`.',
        ),
        Misuse(
            "The name of a tokenizer",
            'TextDataset("texts", tokenizer="gpt2")',
            "headrace downloads nothing, so it knows no tokenizer by name.",
            'Pass the tokenizer itself, such as `AutoTokenizer.from_pretrained("gpt2")`.',
        ),
        Misuse(
            "Chats without a tokenizer that knows them",
            'TextDataset("chats.jsonl", unit="chat")',
            "The tokenizer's chat template turns a chat into one text.",
            "Pass the tokenizer of the model that you train, `AutoTokenizer.from_pretrained(...)`.",
        ),
        Misuse(
            "An index beyond the end",
            'ImageDataset("photos")[99]',
            "Indices reach from 0 to `len(dataset) - 1`; negative ones count from the end.",
            "Check `len(dataset)`.",
        ),
        Misuse(
            "Random access to a stream",
            'ImageDataset("photos", loading_mode="streaming")[0]',
            "Streaming reads in order, and prefetches.",
            "Iterate, or use another mode.",
        ),
        Misuse(
            "A percentage instead of a fraction",
            'ImageDataset("photos").split(80)',
            "`split` takes the share of the first part.",
            "Pass 0.8.",
        ),
    ],
    "Batches": [
        Misuse(
            "Samples of unequal shape",
            "list(create_dataloader([torch.zeros(3), torch.zeros(4)], shuffle=False))",
            "A batch is one tensor, so its samples must have one shape.",
            "Resize, crop or pad; or collate to a list.",
        ),
        Misuse(
            "A misspelt collate function",
            'create_dataloader(dataset, collate_fn="padded")',
            "No collate function is registered under that name.",
            "Use one that the message lists, a callable, or register yours with "
            "`@collators.register(name)`.",
        ),
        Misuse(
            "A collator's class instead of a collator",
            "create_dataloader(dataset, collate_fn=VisionCollator)",
            "The parentheses are missing.",
            "Make the collator, and pass it.",
        ),
        Misuse(
            "A sampler, and shuffle",
            "create_dataloader(dataset, sampler=RandomSampler(dataset), shuffle=True)",
            "Both define the order.",
            "Leave `shuffle` out.",
        ),
        Misuse(
            "Weights of another length",
            "create_dataloader(dataset, weights=[0.5, 0.5])",
            "Weights belong to samples, not to classes.",
            "Pass one number per sample; with `balanced=True` all classes come equally often.",
        ),
        Misuse(
            "A device that is not there",
            'create_dataloader(dataset, device="cuda")',
            "torch was installed without CUDA, or finds no driver or no GPU.",
            "Install another build of torch, or choose a device that is available.",
        ),
    ],
    "Workers and memory": [
        Misuse(
            "A lambda under spawn",
            "create_dataloader(dataset, collate_fn=lambda samples: samples, num_workers=1, "
            'multiprocessing_context="spawn")',
            "A worker that is not forked gets its code through pickle, which refers to functions "
            "by name.",
            "Write a named function in a module.",
        ),
        Misuse(
            "A function of a notebook under spawn",
            "def collate(samples):\n    return samples\n\n\n"
            "create_dataloader(dataset, collate_fn=collate, num_workers=1, "
            'multiprocessing_context="spawn")',
            "A spawned worker imports functions by name, and a notebook can't be imported.",
            "Put the function in a file, and import it; or fork.",
        ),
        Misuse(
            "A worker that dies",
            "def collate(samples):\n    os.kill(os.getpid(), signal.SIGKILL)\n\n\n"
            "list(create_dataloader(dataset, collate_fn=collate, num_workers=1, "
            'multiprocessing_context="fork"))',
            "The system's out-of-memory killer, a crash in a library, or `os._exit`; the message "
            "says how it ended.",
            "Look at the memory (`loader.explain()`), or run with `num_workers=0`.",
        ),
        Misuse(
            "Eager loading of what does not fit",
            'ImageDataset("photos", loading_mode="eager", max_memory_usage="100kB")',
            "Eager holds every sample, and their size is known in advance.",
            'Use `loading_mode="cached"`, which holds what fits, or raise the budget.',
        ),
        Misuse(
            "Batches that don't fit",
            'create_dataloader("photos", batch_size=512, max_memory_usage="100MB")',
            "Two batches are held while the next one is made.",
            "Use a smaller batch size, or raise the budget.",
        ),
    ],
    "Several epochs and loaders": [
        Misuse(
            "The state of other data",
            "state = create_dataloader(dataset, num_workers=0).state_dict()\n"
            'create_dataloader("photos", num_workers=0).load_state_dict(state)',
            "The state names the data that it was saved for.",
            "Pass the same data. `strict=False` resumes with changed data of the same length.",
        ),
        Misuse(
            "Validation data twice",
            'DataModule("photos", "photos", val_split=0.1)',
            "Validation uses either a part of the training data, or other data.",
            "Leave one of the two out.",
        ),
    ],
}


def make_files(folder: Path) -> None:
    """What the code of the page reads."""
    make_photos(folder / "photos", classes=("circle", "noise"), per_class=2, size=(16, 12))
    photo = (folder / "photos/circle/circle_000.jpg").read_bytes()
    for name in (
        "mixed/cats/cat.jpg",
        "mixed/stray.jpg",
        "broken/cut.jpg",
        "texts/a.txt",
        "empty/",
    ):
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(
                photo
                if "mixed" in name
                else photo[: len(photo) // 2]
                if "broken" in name
                else b"a text"
            )
    for name, size in (("images/1", (16, 12)), ("images/2", (16, 12)), ("masks/1", (8, 6))):
        (folder / "street" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", size).save(folder / "street" / f"{name}.png")
    (folder / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": '
        '"hi"}]}\n'
    )
    with h5py.File(folder / "run.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((4, 3)), np.zeros(4)


@contextlib.contextmanager
def as_notebook(folder: Path) -> Iterator[dict[str, object]]:
    """The names of a notebook that runs in the folder, on a machine without a GPU."""
    main = types.ModuleType("__main__")
    exec(
        "import os, signal, h5py, torch, headrace\nfrom torch.utils.data import "
        "RandomSampler\nfrom headrace import *",
        main.__dict__,
    )
    main.__dict__["dataset"] = [(torch.zeros(3), number) for number in range(10)]
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(sys.modules, {"__main__": main}),
            mock.patch("torch.cuda.is_available", return_value=False),
        ):
            yield main.__dict__
    finally:
        os.chdir(before)


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
    # Python 3.14
    shown = re.sub(
        r"it's not found as __main__\.<lambda>",
        "attribute lookup <lambda> on __main__ failed",
        shown,
    )
    for path in (os.path.realpath(folder), str(folder)):
        shown = shown.replace(f"{path}/", "").replace(path, "/home/me")
    return f"{text}: {shown}"


def made_page(folder: Path) -> str:
    """The page, of messages that are provoked in an empty folder."""
    make_files(folder)
    lines, number = [INTRODUCTION], 0
    for chapter, misuses in CHAPTERS.items():
        lines.append(f"## {chapter}\n")
        for misuse in misuses:
            number += 1
            lines.append(f"### {number}. {misuse.title}\n\n```python\n{misuse.code}\n```\n")
            lines.append(f"```text\n{message_of(misuse.code, folder)}\n```\n")
            remedy = misuse.remedy[0].lower() + misuse.remedy[1:]
            lines.append(f"{misuse.cause} **Remedy:** {remedy}\n")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        page = made_page(Path(made))
    if "--write" in sys.argv:
        PAGE.write_text(page)
    else:
        print(page)
