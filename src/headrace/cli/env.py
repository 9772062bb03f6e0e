"""`headrace env`: what a bug report needs to say of the machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from headrace.cli.output import Output, visible

SUMMARY = "show versions, cores, the memory limit and GPUs, for a bug report"
DESCRIPTION = (
    "Show what a bug report needs to say of this machine: versions, cores, the memory limit and "
    "where it comes from, GPUs."
)
EXAMPLES = """\
examples:
  %(prog)s                 to be pasted into a report
  %(prog)s --json > env.json
"""
_PACKAGES = (
    *(
        "torch",
        "numpy",
        "h5py",
        "zarr",
        "numcodecs",
        "isal",
        "zstandard",
        "google-crc32c",
        "fsspec",
        "pillow",
        "simplejpeg",
    ),
    *(
        "psutil",
        "tqdm",
        "aiohttp",
        "s3fs",
        "hdf5plugin",
        "distributed",
        "tokenizers",
        "lightning",
        "accelerate",
        "transformers",
    ),
)
_VARIABLES = (
    "HDF5_USE_FILE_LOCKING",
    "HDF5_PLUGIN_PATH",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "WORLD_SIZE",
    "SLURM_NTASKS",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "--no-gpu", action="store_true", help="don't look for GPUs, which takes importing torch"
    )


def run(given: argparse.Namespace, output: Output) -> int:
    """Prints what is known of the machine."""
    told = _facts(looks_for_gpu=not given.no_gpu)
    output.show(told, _lines(told, output))
    return 0


def _facts(looks_for_gpu: bool) -> dict[str, Any]:
    import headrace
    from headrace.io.paths import cache_folder
    from headrace.memory.limits import cores, memory_limits, tightest

    notes: list[str] = []
    limits = memory_limits(notes=notes)
    limit, folder, usable = tightest(limits), cache_folder(None), cores()
    return {
        "headrace": headrace.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "packages": _versions(imports_torch=looks_for_gpu),
        "hdf5": _hdf5(),
        "cores": {"usable": usable.number, "quota": usable.quota, "machine": os.cpu_count()},
        "memory": {
            "limit": limit.total,
            "from": limit.name,
            "headroom": limit.headroom,
            "all_limits": [
                {"name": one.name, "total": one.total, "used": one.used} for one in limits
            ],
            "notes": notes,
        },
        "shared_memory": _free("/dev/shm"),
        "cache_folder": {
            "path": str(folder),
            "free": _free(str(folder if folder.exists() else folder.parent)),
        },
        "gpus": _gpus() if looks_for_gpu else None,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "encoding": f"{sys.stdout.encoding or 'unknown'}, file names {sys.getfilesystemencoding()}",
    }


def _versions(imports_torch: bool) -> dict[str, str]:
    """Versions by package; of torch, where it is imported, with its build, such as +cu130."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if imports_torch:
        import torch

        found["torch"] = torch.__version__
    return found


def _hdf5() -> str:
    import h5py

    return str(h5py.version.hdf5_version)


def _free(path: str) -> int | None:
    """Bytes that are free on the disk of a path; None: there is no such path."""
    try:
        status = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return status.f_bavail * status.f_frsize


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found.append(
            {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
        )
    return found


def _lines(told: dict[str, Any], output: Output) -> Iterator[str]:
    from headrace.memory.budget import format_size

    def line(name: str, text: object) -> str:
        return f"{output.paint(f'{name:<13}', 'dim')} {visible(text)}"

    yield line("headrace", told["headrace"])
    yield line("python", told["python"])
    yield line("system", told["system"])
    packages = [f"{name} {version}" for name, version in told["packages"].items()]
    for number, part in enumerate(
        textwrap.wrap(", ".join(packages), max(26, output.columns - 14), break_on_hyphens=False)
    ):
        yield line("" if number else "packages", part)
    yield line("HDF5", told["hdf5"])
    quota = told["cores"]["quota"]
    yield line(
        "cores",
        f"{told['cores']['usable']} of {told['cores']['machine']}"
        + (f", by {quota}" if quota else ""),
    )
    memory = told["memory"]
    yield line(
        "memory",
        f"{format_size(memory['limit'])}, of which {format_size(memory['headroom'])} are left "
        f"({memory['from']})",
    )
    for one in memory["all_limits"]:
        yield line(
            "", f"{one['name']}: {format_size(one['total'])}, used {format_size(one['used'])}"
        )
    for note in memory["notes"]:
        yield line("", note)
    if told["shared_memory"] is not None:
        yield line("/dev/shm", f"{format_size(told['shared_memory'])} free")
    free = told["cache_folder"]["free"]
    free_text = "" if free is None else f", {format_size(free)} free"
    yield line("cache folder", f"{told['cache_folder']['path']}{free_text}")
    if told["gpus"] is not None:
        for gpu in told["gpus"] or [None]:
            yield line(
                "GPU",
                "none"
                if gpu is None
                else f"{gpu['name']}, {format_size(gpu['memory'])}, CUDA {gpu['cuda']}",
            )
    for name, value in told["variables"].items():
        yield line("variable", f"{name}={value}")
    yield line("encoding", told["encoding"])
