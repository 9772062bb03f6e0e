"""The peers of `images.py`, each used so that it does the same job as headrace.

Each function is a contestant (see `common.py`) that gives batches of 3 x 224 x 224 images of JPEG
files, as the peer's own documentation shows it first, with the settings that it recommends where
data is local. Files that a peer wants in its own format are written before, outside of the timing.
Where a peer decodes with functions of the user's, these are Pillow's, as in torchvision.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import multiprocessing
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folders import prepared
from PIL import Image
from torch.utils.data import DataLoader, Dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Runs = Iterator[Callable[[], int]]


@dataclass(frozen=True)
class Job:
    """The task of all contestants of a section.

    Attributes:
        path: a folder of class folders of JPEG files.
        files: the files, each with the number of its class.
        normalize: float32 by ImageNet's statistics, or uint8.
        work: a folder for the peers' files.
    """

    path: str
    files: tuple[tuple[str, int], ...]
    normalize: bool
    workers: int
    batch: int
    size: tuple[int, int]
    work: Path

    @property
    def loader(self) -> dict[str, Any]:
        """What every torch DataLoader gets."""
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0}


def touch(
    batches: Iterable[Any], images_of: Callable[[Any], torch.Tensor] = lambda batch: batch[0]
) -> int:
    """Goes through an epoch as a training loop would: looks at each batch, holds none."""
    count = 0
    for batch in batches:
        images = images_of(batch)
        count += images.shape[0]
        # few enough for one thread: others would spin on the workers' cores afterwards
        images[:, :, ::32, ::32].sum()
    return count


def normalized(images: torch.Tensor) -> torch.Tensor:
    """A batch, [N, 3, H, W] uint8 -> float32 by ImageNet's statistics, in as few passes as
    torch's operators need.
    """
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return images.to(torch.float32).mul_(1 / (255 * std)).sub_(mean / std)


def transformed(image: Image.Image, job: Job) -> torch.Tensor:
    """What torchvision's Resize, ToTensor and Normalize do to an image, step by step, or Resize
    and PILToTensor.
    """
    resized = image.convert("RGB").resize((job.size[1], job.size[0]), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()
    if not job.normalize:
        return pixels
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return pixels.to(torch.float32).div(255).clone().sub_(mean).div_(std)


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return len(self.job.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, target = self.job.files[index]
        with open(path, "rb") as file, Image.open(file) as image:
            return transformed(image, self.job), target


def torchvision_style(job: Job) -> Runs:
    loader = DataLoader(ImageFolder(job), job.batch, shuffle=True, **job.loader)
    while True:
        yield lambda: touch(loader)


def webdataset(job: Job) -> Runs:
    """Tar shards, eight for each worker; its shuffle mixes shards, and 1,000 samples: what it
    has for a full shuffle.
    """
    import webdataset as wds

    def write(folder: Path) -> None:
        order = random.Random(0).sample(job.files, len(job.files))
        samples = -(-len(order) // (8 * max(1, job.workers)))
        with wds.ShardWriter(str(folder / "train-%06d.tar"), maxcount=samples, verbose=0) as shards:
            for number, (path, target) in enumerate(order):
                shards.write(
                    {"__key__": f"{number:08d}", "jpg": Path(path).read_bytes(), "cls": target}
                )

    shards = sorted(map(str, prepared(job.work, f"webdataset-{job.workers}", write).glob("*.tar")))
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
    )
    batches = dataset.map_tuple(functools.partial(transformed, job=job), int).batched(job.batch)
    loader = wds.WebLoader(batches, batch_size=None, **job.loader)
    while True:
        yield lambda: touch(loader)


def _import_streaming() -> Any:
    """MosaicML Streaming, whose classes for CIFAR-10 and others, unused here, want names of
    torchvision when they are imported.
    """
    lent = []
    if importlib.util.find_spec("torchvision") is None:
        names: dict[str, dict[str, Any]] = {
            "": {},
            "transforms": {},
            "datasets": {"VisionDataset": object, "CIFAR10": None},
            "transforms.functional": {"to_tensor": None},
        }
        for name, contents in names.items():
            module = types.ModuleType(f"torchvision.{name}".rstrip("."))
            vars(module).update(
                contents, __spec__=importlib.util.spec_from_loader(module.__name__, None)
            )
            sys.modules[module.__name__] = module
            lent.append(module.__name__)
    try:
        import streaming
    finally:
        for name in lent:
            del sys.modules[name]
    return streaming


def mds_folder(job: Job) -> Path:
    """MDS shards that hold the files' own bytes."""
    streaming = _import_streaming()

    def write(folder: Path) -> None:
        columns = {"image": "jpeg", "class": "int"}
        with streaming.MDSWriter(out=str(folder), columns=columns) as shards:
            for path, target in job.files:
                with Image.open(path) as image:
                    shards.write({"image": image, "class": target})

    return prepared(job.work, "mds", write)


def mosaicml_streaming(job: Job) -> Runs:
    """The shards of `mds_folder`."""
    streaming = _import_streaming()

    class Images(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return transformed(sample["image"], job), sample["class"]

    dataset = Images(local=str(mds_folder(job)), shuffle=True, batch_size=job.batch)
    loader: DataLoader[Any] = DataLoader(dataset, job.batch, **job.loader)
    while True:
        yield lambda: touch(loader)


def _read_sample(sample: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(sample[0]).read_bytes(), "class": sample[1]}


def _decoded_sample(sample: dict[str, Any], job: Job) -> tuple[torch.Tensor, int]:
    with Image.open(io.BytesIO(sample["image"])) as image:
        return transformed(image, job), sample["class"]


def litdata_folder(job: Job) -> Path:
    """Chunks of the files' bytes."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # or it asks PyPI for a newer one
    import litdata as ld

    def write(folder: Path) -> None:
        ld.optimize(
            fn=_read_sample,
            inputs=list(job.files),
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=max(1, job.workers),
        )

    folder = prepared(job.work, "litdata", write)
    # `optimize` sets "spawn" for the whole process
    multiprocessing.set_start_method(None, force=True)
    return folder


def litdata(job: Job) -> Runs:
    """The chunks of `litdata_folder`, decoded in `transform`: LitData's own decoding of images
    needs torchvision.
    """
    folder = litdata_folder(job)
    import litdata as ld

    dataset = ld.StreamingDataset(
        str(folder), shuffle=True, transform=functools.partial(_decoded_sample, job=job)
    )
    loader = ld.StreamingDataLoader(dataset, batch_size=job.batch, **job.loader)
    while True:
        yield lambda: touch(loader)


def hf_datasets(job: Job) -> Runs:
    """The folder itself, through its `imagefolder` builder."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(job.work / "huggingface")
    import datasets

    datasets.disable_progress_bars()

    def transform(samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            "image": [transformed(image, job) for image in samples["image"]],
            "label": samples["label"],
        }

    cache = str(job.work / "huggingface")
    dataset = datasets.load_dataset(
        "imagefolder", data_dir=job.path, split="train", cache_dir=cache
    ).with_transform(transform)
    loader = DataLoader(dataset, job.batch, shuffle=True, **job.loader)
    while True:
        yield lambda: touch(loader, lambda batch: batch["image"])


class _Decoded(ImageFolder):
    """What FFCV's writer takes: pixels."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, target = self.job.files[index]
        with Image.open(path) as image:
            return np.array(image.convert("RGB")), target


def ffcv(job: Job, whole: bool = True) -> Runs:
    """JPEG in a beton file, at the original size.

    FFCV has no decoder that resizes whole images. Its random crop does so when the crop's area is
    that of the image, for then no crop of another shape fits and it falls back on the image itself.
    `whole=False`: its centre crop, as in its ImageNet example, which resizes the largest square:
    less to do.
    """
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.writer import DatasetWriter

    def write(folder: Path) -> None:
        fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
        DatasetWriter(
            str(folder / "train.beton"), fields, num_workers=max(1, job.workers)
        ).from_indexed_dataset(_Decoded(job))

    if whole:
        decoder = RandomResizedCropRGBImageDecoder(job.size, scale=(1.0, 1.0), ratio=(0.01, 100.0))
    else:
        decoder = CenterCropRGBImageDecoder(job.size, ratio=1)
    yield from ffcv_epochs(str(prepared(job.work, "ffcv-jpg", write) / "train.beton"), decoder, job)


def ffcv_epochs(beton: str, decoder: Any, job: Any) -> Runs:
    """FFCV's loader on the CPU. Each iterator of it is a thread that ends with the epoch."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, Squeeze, ToTensor, ToTorchImage

    normalize = (
        [NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)]
        if job.normalize
        else []
    )
    pipelines = {
        "image": [decoder, *normalize, ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor(), Squeeze()],
    }
    options = {
        "num_workers": max(1, job.workers),
        "os_cache": True,
        "order": OrderOption.RANDOM,
        "drop_last": False,
    }
    loader = Loader(beton, batch_size=job.batch, pipelines=pipelines, **options)
    while True:
        yield lambda: touch(loader)


def dali(job: Job) -> Runs:
    """Operators for the CPU, as many threads as others have workers.

    A pipeline that lives on decodes the first batches of the next epoch when one ends, so each
    epoch has a new one: it is built before the timing starts, and reads nothing until the first
    batch is asked for.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    paths, labels = (list(column) for column in zip(*job.files, strict=True))

    @pipeline_def(batch_size=job.batch, num_threads=max(1, job.workers), device_id=None)
    def images(seed: int) -> Any:
        options = {"pad_last_batch": True, "name": "reader"}
        shuffled = random.Random(seed).sample(range(len(paths)), len(paths))
        files = {"files": [paths[i] for i in shuffled], "labels": [labels[i] for i in shuffled]}
        encoded, targets = fn.readers.file(**files, **options)
        decoded = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        resized = fn.resize(decoded, size=job.size, interp_type=types.INTERP_LINEAR)
        if not job.normalize:
            return fn.transpose(resized, perm=[2, 0, 1]), targets
        statistics = {"mean": [255 * m for m in MEAN], "std": [255 * s for s in STD]}
        return fn.crop_mirror_normalize(
            resized, dtype=types.FLOAT, output_layout="CHW", **statistics
        ), targets

    epoch = 0
    while True:
        options = {
            "reader_name": "reader",
            "last_batch_policy": LastBatchPolicy.PARTIAL,
            "prepare_first_batch": False,
        }
        iterator = DALIGenericIterator(images(epoch), ["image", "label"], **options)
        yield functools.partial(touch, iterator, lambda batch: batch[0]["image"])
        del iterator
        epoch += 1


class _Shuffled:
    """Paths in a new order each time."""

    def __init__(self, job: Job) -> None:
        self.paths = [path for path, _ in job.files]

    def __iter__(self) -> Iterator[str]:
        return iter(random.sample(self.paths, len(self.paths)))


def spdl(job: Job) -> Runs:
    """Its DataLoader in threads, one for each worker; FFmpeg decodes and resizes. A pipeline
    ends with the epoch.
    """
    import spdl.io
    from spdl.dataloader import DataLoader as Pipelines

    sizes = {
        "scale_height": job.size[0],
        "scale_width": job.size[1],
        "scale_mode": None,
        "scale_algo": "bilinear",
    }
    description = spdl.io.get_video_filter_desc(**sizes, pix_fmt="rgb24")

    def decode(path: str) -> Any:
        return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=description)

    # what fails in the pipeline is logged and left out, so an FFmpeg that isn't there is noticed
    # here
    decode(job.files[0][0])

    def collate(frames: list[Any]) -> torch.Tensor:
        images = spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)
        return normalized(images) if job.normalize else images

    options = {"batch_size": job.batch, "aggregator": collate, "num_threads": max(1, job.workers)}
    loader = Pipelines(_Shuffled(job), preprocessor=decode, **options)
    while True:
        yield lambda: touch(loader, lambda images: images)
