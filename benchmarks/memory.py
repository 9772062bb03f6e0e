"""Measures how much memory a loader takes, and whether it stays within its budget.

    python benchmarks/memory.py PATH [--budgets 300MB 500MB 2GB] [--modes MODE ...] [--workers 2]
    [--ranks 2]
        [--images N] [--broken FRACTION] [--json]

Each line is a job of its own: a dataset and a loader under `max_memory_usage`, three epochs in
batches of 64 float32 images of 224 x
224. What it takes is the growth of the PSS (shared pages counted once) of all its processes over
  the moment before the dataset
exists, at its highest of some hundred looks, less what the worker processes of a plain DataLoader
take that does nothing. The last lines are several ranks on one machine, with a store for each and
with one for all (``--ranks 1`` leaves them out). ``--images 800`` takes so many images of the
folder, evenly spread. With ``--broken 0.5`` half of the images are cut off in the middle and
skipped, for ten epochs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from folders import temporary_folder
from torch.utils.data import DataLoader, Dataset

import headrace
from headrace.memory.budget import format_size, parse_size
from headrace.monitor.stats import pss_of

SIZE, EPOCHS, EPOCHS_BROKEN = 224, 3, 10
MODES = ("lazy", "streaming", "cached", "eager")


class Nothing(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1)


def job(given: argparse.Namespace) -> None:
    """One job, in a process of its own: says when it is ready, waits to be told to go on, and
    says what it holds at the end.
    """
    torch.set_num_threads(1)
    warm = torch.nn.functional.interpolate(
        torch.zeros(1, 3, 300, 300, dtype=torch.uint8),
        size=(SIZE, SIZE),
        mode="bilinear",
        antialias=True,
    )
    del warm
    print("READY", flush=True)
    sys.stdin.readline()
    refused, held = None, {}
    if given.mode == "idle":
        loader: Any = DataLoader(
            Nothing(), 64, num_workers=given.workers, persistent_workers=given.workers > 0
        )
        for _ in range(EPOCHS):
            for _ in loader:
                time.sleep(0.005)
    else:
        try:
            loader = ours(given)
            for _ in range(EPOCHS_BROKEN if given.broken else EPOCHS):
                for _ in loader:
                    pass
            held = {
                k: v
                for k, v in loader.get_stats().items()
                if k in ("held", "held_bytes", "cache_hits", "cache_misses", "samples_per_second")
            }
            held["workers"], held["prefetch"] = (
                loader.config.num_workers,
                loader.config.prefetch_factor,
            )
        except headrace.BudgetError as error:
            refused = str(error).splitlines()[0]
    print(json.dumps({"refused": refused, **held}), flush=True)
    sys.stdin.readline()  # held until everybody was looked at


def ours(given: argparse.Namespace) -> headrace.Loader:
    options: dict[str, Any] = {
        "loading_mode": given.mode,
        "max_memory_usage": given.budget,
        "progress": False,
    }
    options["on_error"] = "skip" if given.broken else "raise"
    if given.shared == "machine":
        options |= {"shared": "machine", "cache_dir": given.cache_dir}
    dataset = headrace.ImageDataset(given.path, image_size=SIZE, **options)
    return headrace.create_dataloader(
        dataset, batch_size=64, shuffle=True, num_workers=given.workers
    )


def tree(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def copied(path: str, folder: str, images: int | None, fraction: float) -> str:
    """So many images of a folder, evenly spread, as links; but that fraction of them as copies
    of their first halves.
    """
    files = sorted(file for file in Path(path).rglob("*.*") if file.is_file())
    files = files[:: max(1, len(files) // images)][:images] if images else files
    for number, file in enumerate(files):
        copy = Path(folder) / file.relative_to(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if int((number + 1) * fraction) > int(number * fraction):
            copy.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        else:
            copy.symlink_to(file.resolve())
    return folder


def measure(
    path: str,
    mode: str,
    workers: int,
    budget: str,
    ranks: int = 1,
    shared: str = "rank",
    broken: float = 0,
) -> dict[str, Any]:
    """The most that all processes of a job took beyond what they took before there was a
    dataset.
    """
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        jobs = []
        for rank in range(ranks):
            command = [
                sys.executable,
                __file__,
                path,
                "--job",
                mode,
                "--workers",
                str(workers),
                "--budget",
                budget,
            ]
            command += ["--shared", shared, "--cache-dir", folder, "--broken", str(broken)]
            world = (
                {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
                if ranks > 1
                else {}
            )
            environment = {**os.environ, **{k: str(v) for k, v in world.items()}}
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
                "env": environment,
            }
            jobs.append(stack.enter_context(subprocess.Popen(command, **pipes)))
        for process in jobs:
            process.stdout.readline()
        before = sum(pss_of(process.pid) for process in jobs)
        for process in jobs:
            process.stdin.write("\n")
            process.stdin.flush()
        highest = worker = 0
        results = []
        waiting = list(jobs)
        while waiting:
            pids = [pid for process in jobs for pid in tree(process.pid)]
            highest = max(highest, sum(map(pss_of, pids)))
            worker = max(
                [worker, *(uss_of(pid) for pid in pids if pid not in [p.pid for p in jobs])]
            )
            time.sleep(0.05)
            for process in list(waiting):
                os.set_blocking(process.stdout.fileno(), False)
                line = process.stdout.readline()
                if line or process.poll() is not None:
                    results.append(
                        json.loads(line) if line else {"refused": f"exit code {process.returncode}"}
                    )
                    waiting.remove(process)
        for process in jobs:
            process.communicate("\n")
    return {"growth": highest - before, "worker_uss": worker, **results[0]}


def uss_of(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_full_info().uss)
    return 0


def rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    idle = functools.cache(lambda n: measure(given.path, "idle", n, "1GB")["growth"])
    found = []
    for budget in given.budgets:
        for mode in given.modes:
            for workers in sorted({0, given.workers}):
                one = measure(given.path, mode, workers, budget, broken=given.broken)
                workers = one.get("workers", workers)  # fewer, where the budget is small
                found.append(row(one, mode, workers, budget, 1, "rank", idle(workers)))
    for shared in ("rank", "machine") if given.ranks > 1 else ():
        for mode in ("cached", "eager"):
            one = measure(given.path, mode, 1, given.budgets[-1], given.ranks, shared, given.broken)
            found.append(
                row(one, mode, 1, given.budgets[-1], given.ranks, shared, given.ranks * idle(1))
            )
    return found


def row(
    one: dict[str, Any], mode: str, workers: int, budget: str, ranks: int, shared: str, idle: int
) -> dict[str, Any]:
    growth = one["growth"] - idle
    allowed = parse_size(budget) * ranks
    of_budget = None if one["refused"] else growth / allowed
    return {
        "mode": mode,
        "workers": workers,
        "ranks": ranks,
        "shared": shared,
        "budget": budget,
        "of_budget": of_budget,
        **one,
        "growth": growth,
    }


def show(found: list[dict[str, Any]]) -> None:
    heads = ("budget", "of budget", "taken", "samples held", "a worker USS")
    print(
        f"{'mode':<10}{'workers':>8}{'ranks':>6} "
        f"{'shared':<8}{heads[0]:>8}{heads[1]:>11}{heads[2]:>11}{heads[3]:>14}{heads[4]:>14}"
    )
    for one in found:
        head = (
            f"{one['mode']:<10}{one['workers']:>8}{one['ranks']:>6} "
            f"{one['shared']:<8}{one['budget']:>8}"
        )
        if one["refused"]:
            print(f"{head}    refused: {one['refused'][:90]}")
            continue
        worker = format_size(one["worker_uss"]) if one["worker_uss"] else "-"
        print(
            f"{head}{one['of_budget']:>10.0%} "
            f"{format_size(one['growth']):>11}{one.get('held', 0):>14,}{worker:>14}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder of class folders of images")
    parser.add_argument("--budgets", nargs="+", default=["300MB", "500MB", "2GB"], metavar="SIZE")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--images", type=int, metavar="N", help="take so many of the images; default: all"
    )
    parser.add_argument(
        "--broken",
        type=float,
        default=0,
        metavar="FRACTION",
        help="of the images that are cut off, and skipped",
    )
    parser.add_argument("--json", action="store_true")
    # of the processes that this one starts
    for name in ("--job", "--budget", "--shared", "--cache-dir"):
        parser.add_argument(
            name,
            dest=name[2:].replace("-", "_") if name != "--job" else "mode",
            help=argparse.SUPPRESS,
        )
    given = parser.parse_args()
    if given.mode:
        job(given)
        return
    with temporary_folder() as folder:
        if given.broken or given.images:
            given.path = copied(given.path, folder, given.images, given.broken)
        found, images = rows(given), len(list(Path(given.path).rglob("*.*")))
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "headrace": headrace.__version__,
    }
    if given.json:
        print(json.dumps({"machine": machine, "images": images, "rows": found}, indent=2))
        return
    show(found)
    print("\n" + ", ".join(f"{k} {v}" for k, v in machine.items()))


if __name__ == "__main__":
    main()
