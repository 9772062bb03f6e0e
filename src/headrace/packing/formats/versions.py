"""The versions of the libraries that decide the bytes of a pack."""

from __future__ import annotations

import PIL
import simplejpeg
import torch

from headrace.core.dataset import BaseDataset
from headrace.datasets.image.image import ImageDataset
from headrace.packing.options import StoreOptions
from headrace.packing.plan import Plan, is_encoded
from headrace.storage.hdf5.filters import filter_versions


def versions_of(dataset: BaseDataset, plan: Plan, options: StoreOptions) -> dict[str, str]:
    """The versions of what decides the bytes of a pack, beside headrace's own layout; by name. Of
    texts the plan knows their tokenizer.

    Args:
        dataset: what is packed.
        plan: of a file.
        options: how it is stored.
    """
    versions: dict[str, str] = {}
    is_resized = (
        isinstance(dataset, ImageDataset) and plan.info.store == "decoded" and is_encoded(dataset)
    )
    if options.is_jpeg or is_resized:
        versions |= {"Pillow": PIL.__version__, "simplejpeg": simplejpeg.__version__}
    if is_resized or options.max_size is not None:
        versions["torch"] = str(torch.__version__).partition("+")[0]  # resizes
    if plan.compression is not None:
        versions |= filter_versions(plan.compression)
    return versions
