"""Packs images on a Dask cluster of two workers, one of which is killed in the middle.

python dask_pack.py SRC DST SHARD_SIZE STORAGE_OPTIONS
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from distributed import Client, LocalCluster

from headrace import ImageDataset
from headrace.cli.main import main
from headrace.packing import pack_status


class Slow(ImageDataset):
    """Kills the worker that it is read in, once."""

    def __init__(self, path: str, marker: str) -> None:
        super().__init__(path)
        self.marker, self.parent = marker, os.getpid()

    def subset(self, indices: Any) -> Any:
        if os.getpid() != self.parent and len(indices) < len(self) and 10 in indices:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return super().subset(indices)


def run(src: str, dst: str, shard_size: str, options: dict[str, Any], marker: str) -> None:
    import headrace

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        how: dict[str, Any] = {"shard_size": shard_size, "storage_options": options}
        how["executor"] = client.get_executor(retries=3)
        out = headrace.pack(Slow(src, marker), dst, progress=False, **how)
        assert os.path.exists(marker), "no worker was killed"
        assert pack_status(out, storage_options=options).joined
        if not options:  # and by the command
            flags = ["--shard-size", shard_size, "--dask", cluster.scheduler_address]
            assert main(["pack", src, f"{dst}-2", *flags, "--no-progress"]) == 0


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), sys.argv[5])
