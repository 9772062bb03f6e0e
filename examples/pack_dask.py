"""Packs photographs in parts on a Dask cluster of this machine, loses a worker in the middle, and
verifies the pack.

python examples/pack_dask.py photos/train packed       # without: photographs are made, in ./out
# on a cluster that runs; nobody is killed
python examples/pack_dask.py photos/train s3://bucket/packed --scheduler tcp://node:8786

Needs `pip install "headrace[dask]"`. A task that runs twice changes nothing, so Dask may repeat
those of a worker that died.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from make_photos import make_photos

from headrace import HeadraceError, ImageDataset, pack, verify
from headrace.packing import pack_status

try:
    from distributed import Client, LocalCluster
except ImportError:
    print('error: this example needs Dask: pip install "headrace[dask]"', file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def client_of(given: argparse.Namespace) -> Iterator[Client]:
    """A client of the cluster that was given, or of two worker processes of this machine."""
    if given.scheduler:
        with Client(given.scheduler) as client:
            yield client
        return
    # of a killed worker Dask says much
    quiet = {"dashboard_address": None, "silence_logs": logging.CRITICAL}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, **quiet) as cluster,
        Client(cluster) as client,
    ):
        yield client


def kill_one(client: Client, folder: Path) -> None:
    """Kills a worker as soon as a part is there."""
    while not list(folder.glob("*.h5")):
        time.sleep(0.01)
    victim = next(iter(client.run(os.getpid).values()))
    os.kill(victim, signal.SIGKILL)
    print(f"killed worker {victim} after {len(list(folder.glob('*.h5')))} parts", flush=True)


def run(given: argparse.Namespace) -> None:
    photos = given.photos or make_photos(Path("out") / "dask_photos", given.images, (160, 120))
    with client_of(given) as client:
        if given.kill and not given.scheduler:
            threading.Thread(target=kill_one, args=(client, Path(given.out)), daemon=True).start()
        start = time.perf_counter()
        packed = pack(
            ImageDataset(photos),
            given.out,
            shard_size=given.shard_size,
            executor=client.get_executor(retries=3),
            progress=False,
        )
        print(
            f"packed {len(ImageDataset(photos)):,} photographs in "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )
    print(pack_status(packed))
    verify(packed, progress=False)
    print(
        f"verified: headrace.ImageDataset({str(packed)!r}) has {len(ImageDataset(packed)):,} "
        "samples"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", default=str(Path("out") / "packed"))
    parser.add_argument("--images", type=int, default=600, help="how many to make")
    parser.add_argument("--scheduler", help="address of a running scheduler")
    parser.add_argument("--shard-size", default="100kB")
    parser.add_argument(
        "--kill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="kill a worker of this machine's cluster",
    )
    try:
        run(parser.parse_args())
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
