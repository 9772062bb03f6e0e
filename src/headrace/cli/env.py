"""Shows versions, cores, the memory limit and GPUs, for a bug report.

Show what a bug report needs to say of this machine: versions, cores, the memory limit and where it
comes from, GPUs.

examples:
  %(prog)s                 to be pasted into a report
  %(prog)s --json > env.json
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from headrace.cli.flags import add_options
from headrace.cli.output import Output, visible

_VARIABLES = ("HDF5_USE_FILE_LOCKING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_NTASKS")
_PACKAGES = (
    "torch numpy h5py zarr numcodecs isal zstandard google-crc32c fsspec pillow simplejpeg psutil "
    "tqdm aiohttp s3fs hdf5plugin distributed tokenizers lightning accelerate transformers"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    add_options(parser, {"no_gpu": (bool, "don't look for GPUs, which takes importing torch")})


def run(given: argparse.Namespace, output: Output) -> int:
    """Prints what is known of the machine."""
    facts = _facts()
    if not given.no_gpu:
        import torch

        facts["packages"]["torch"] = torch.__version__  # with its build, such as +cu130
        facts["gpus"] = []
        for device in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(device)
            memory = properties.total_memory
            facts["gpus"].append({properties.name: memory, "CUDA": torch.version.cuda})
    output.show(facts, _lines(facts, output))
    return 0


def _facts() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    import h5py

    import headrace
    from headrace.io.paths import cache_folder
    from headrace.memory.limits import cores, memory_limits, tightest

    versions = {}
    for name in _PACKAGES.split():
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    notes: list[str] = []
    limits = memory_limits(notes=notes)
    limit = tightest(limits)
    usable = cores()
    folder = cache_folder(None)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    facts = {
        "headrace": headrace.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "packages": {**versions, "HDF5": str(h5py.version.hdf5_version)},
        "cores": {"usable": usable.number, "machine": os.cpu_count(), "quota": usable.quota},
        "memory": {"limit": limit.total, "free": limit.headroom, "from": limit.name},
        "limits": [{one.name: one.total, "used": one.used} for one in limits],
        "notes": notes,
        "cache folder": {"path": str(folder), "free": free},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "encoding": {"output": sys.stdout.encoding, "file names": sys.getfilesystemencoding()},
    }
    if os.path.isdir("/dev/shm"):
        facts["/dev/shm"] = {"free": shutil.disk_usage("/dev/shm").free}
    return facts


def _lines(facts: dict[str, Any], output: Output) -> Iterator[str]:
    """A line for each fact, or several."""
    for name, value in facts.items():
        for part in textwrap.wrap(_text(value), max(26, output.columns - 14)):
            yield f"{output.paint(f'{name:<13}', 'dim')} {visible(part)}"
            name = ""


def _text(value: Any) -> str:
    from headrace.memory.budget import format_size

    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items() if one)
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    if isinstance(value, int) and value > 10_000:
        return format_size(value)
    return str(value)
