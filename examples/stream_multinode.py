"""Streams shards from a server to many nodes, loses a node, and goes on with another number of
ranks: each sample exactly once.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST --master-port 29500 \\
        examples/stream_multinode.py "https://server/train-{0000..0127}.tar" --out SHARED
    python examples/stream_multinode.py --count --out SHARED  # what all lives of the job have seen
    python examples/stream_multinode.py --demo  # all of it on this machine: see below

There is no network here: a step adds up the pixels of the batch over all ranks, which keeps them
together as gradients would. What training adds is in train_multinode.py. The state of the loader is
saved every few steps to `--out`, which all nodes share, and each rank keeps a ledger of the samples
that it has seen. `--global-batch` stays what it is: any number of ranks that divides it may go on.

`--demo` packs made photographs into tar shards, puts them behind a server on loopback that waits 20
ms before each answer, starts two nodes of two ranks, kills one of them by SIGKILL in the middle of
an epoch, goes on with one node, and counts: over both lives every sample of every epoch must have
come exactly once, and the server says what was fetched for it.

Exit status: 0; 1 where samples are missing or came twice; 2 for an error; 3 where other ranks were
lost; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from two_nodes import TwoNodes, die_with_parent, end, free_port, one_node

if "--die-with-parent" in sys.argv:
    die_with_parent()  # before the long imports

import torch
import torch.distributed as dist
from ledger import Ledger, balance, forget, read_lives, report
from make_photos import make_photos

from headrace import ConfigError, HeadraceError, Loader, StreamingDataset, create_dataloader
from headrace.order import World, detect_world

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from stream_server import StreamServer, counts, tell

# seconds that the demo gives a node to start and to get on, and one that has lost the other to end
START, END = 240, 60
LATENCY = 0.02


class PeersLost(Exception):
    """A step could not be done together with the other ranks."""


# -- the job


def stream(given: argparse.Namespace) -> None:
    """One life of the job, up to its end."""
    world = detect_world()
    if world.world_size > 1:
        patience = timedelta(seconds=given.timeout)
        dist.init_process_group(
            "gloo", rank=world.rank, world_size=world.world_size, timeout=patience
        )
    batch_size, rest = divmod(given.global_batch, world.world_size)
    if rest or not batch_size:
        raise ConfigError(
            f"--global-batch {given.global_batch} can't be shared by {world.world_size} ranks: "
            "take a number that divides it"
        )
    with StreamingDataset(
        given.urls,
        buffer_size=given.buffer_size,
        seed=given.seed,
        return_index=True,
        cache_dir=given.cache_dir,
    ) as dataset:
        loader = create_dataloader(
            dataset, batch_size=batch_size, num_workers=given.workers, seed=given.seed
        )
        life = go_on(given.out / "checkpoint.json", loader)
        folder = given.out / "ledger"
        if world.local_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            forget(folder, life)
        if world.world_size > 1:
            dist.barrier()
        ledger = Ledger(folder, life, world.rank, world.world_size, len(dataset), position(loader))
        if world.rank == 0:
            epoch, step = position(loader)
            print(
                f"life {life}: {world.world_size} ranks, from epoch {epoch} step {step}", flush=True
            )
        try:
            for epoch in range(position(loader)[0], given.epochs):
                run_epoch(given, world, loader, ledger, epoch, life)
        finally:
            ledger.close()
            loader.close()
    if world.world_size > 1:
        dist.destroy_process_group()


def run_epoch(
    given: argparse.Namespace, world: World, loader: Loader, ledger: Ledger, epoch: int, life: int
) -> None:
    """The rest of an epoch."""
    loader.set_epoch(epoch)  # a position that was loaded for this epoch stays
    # a dict by extension: {"jpg": uint8 [N, 3, H, W], "cls": int64 [N], "index": int64 [N], ...}
    for batch in loader:
        step = position(loader)[1] - 1
        is_last = step + 1 == len(loader)
        is_saved = (step + 1) % given.checkpoint_every == 0 or is_last
        own = batch["index"].tolist()
        fills_up = 1 if is_last and world.rank >= world.world_size - loader.padding else 0
        # Before the ranks meet: none gets through a step that another one has not in its ledger.
        ledger.write(
            epoch, step, own[: len(own) - fills_up], own[len(own) - fills_up :], durable=is_saved
        )
        total = pixels(batch)
        try:
            if world.world_size > 1:
                dist.all_reduce(total)
        except RuntimeError as error:
            raise PeersLost(
                f"rank {world.rank} in epoch {epoch} step {step}: {str(error).splitlines()[0]}"
            ) from error
        if is_saved and world.rank == 0:
            save(given.out / "checkpoint.json", loader, life)
        time.sleep(given.pause)
    if world.rank == 0:
        stats = loader.get_stats()
        print(
            f"epoch {epoch}: {len(loader)} steps; rank 0 fetched "
            f"{stats.get('bytes_fetched', 0) / 1e6:.1f} MB in "
            f"{stats.get('requests', 0):.0f} requests, {stats.get('retries', 0):.0f} retries",
            flush=True,
        )


def pixels(batch: dict[str, Any]) -> torch.Tensor:
    """The sum of all that is an image in a batch."""
    found = [
        value.sum()
        for value in batch.values()
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8
    ]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64)


def position(loader: Loader) -> tuple[int, int]:
    """Epoch and step of the next batch."""
    state = loader.state_dict()
    return state["epoch"], state["batches"]


def save(path: Path, loader: Loader, life: int) -> None:
    """Never a half-written file under the final name, and none that the machine forgets."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump({"life": life, "loader": loader.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def go_on(path: Path, loader: Loader) -> int:
    """Goes on from a checkpoint, if there is one; the number of this life."""
    if not path.exists():
        return 1
    saved = json.loads(path.read_text(encoding="utf-8"))
    loader.load_state_dict(saved["loader"])
    return int(saved["life"]) + 1


# -- two nodes and a server on one machine


def demo(given: argparse.Namespace) -> int:
    """Two nodes, one of them lost; then one; then the balance, and what the server sent."""
    given.out /= "demo"  # no checkpoint of a real job is touched
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "checkpoint.json").unlink(missing_ok=True)
    forget(given.out / "ledger", 1)
    given.cache_dir = given.cache_dir or str(given.out / "cache")
    shards = make_shards(given.out / "served", given.images)
    stored = sum(path.stat().st_size for path in shards)
    with StreamServer(given.out / "served") as server:
        tell(server.url, latency=LATENCY)
        given.urls = [f"{server.url}/train/{path.name}" for path in shards]
        lose_a_node(given)
        print("life 2: one node alone", flush=True)
        with one_node(
            torchrun(given, 1, 0, "127.0.0.1", free_port()), given.out / "life-2-node-0.log"
        ) as node:
            if (status := node.wait(START)) != 0:
                raise ConfigError(
                    f"the node that went on alone ended with {status}:\n{node.last_lines()}"
                )
        served = counts(server.url)
    print(
        f"the server sent {served['bytes'] / 1e6:.1f} MB in {served['requests']} answers, for "
        f"{given.epochs} epochs of "
        f"{stored / 1e6:.1f} MB in {len(shards)} shards, some steps of which were done twice"
    )
    return count(given)


def make_shards(folder: Path, images: int, in_shard: int = 50) -> list[Path]:
    """Photographs in tar files of uneven numbers."""
    # three of four
    photos = sorted(make_photos(folder / "photos", images, (64, 48)).rglob("*.jpg"))
    (folder / "train").mkdir(exist_ok=True)
    found, start = [], 0
    while start < len(photos):
        some = photos[start : start + in_shard - 7 * (len(found) % 3)]
        found.append(folder / "train" / f"{len(found):04d}.tar")
        with tarfile.open(found[-1], "w") as shard:
            for number, path in enumerate(some, start):
                shard.add(path, f"{number:06d}.jpg")
                label = str(number).encode()
                member = tarfile.TarInfo(f"{number:06d}.cls")
                member.size = len(label)
                shard.addfile(member, io.BytesIO(label))
        start += len(some)
    return found


def torchrun(
    given: argparse.Namespace, nodes: int, rank: int, address: str, port: int
) -> list[str]:
    """The command that starts a node."""
    launcher = [
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(given.nproc_per_node),
        "--node-rank",
        str(rank),
    ]
    launcher += ["--master-addr", address, "--master-port", str(port)]
    options = [*given.urls, "--out", str(given.out), "--die-with-parent"]
    for name in (
        "epochs",
        "global_batch",
        "buffer_size",
        "workers",
        "seed",
        "checkpoint_every",
        "timeout",
        "cache_dir",
    ):
        if getattr(given, name) is not None:
            options += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    if nodes > 1:
        options += ["--pause", str(given.pause or 0.15)]  # as a network would
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *launcher,
        os.path.abspath(__file__),
        *options,
    ]


def lose_a_node(given: argparse.Namespace) -> None:
    """Starts two nodes, kills one in the middle of an epoch, and waits for the end of the other;
    bounded, and nothing is left.
    """
    with TwoNodes(
        lambda rank, address, port: torchrun(given, 2, rank, address, port),
        given.out,
        is_together=True,
    ) as pair:
        print(f"life 1: two nodes of {given.nproc_per_node} ranks", flush=True)
        left, lost = pair.nodes
        path, deadline = (
            given.out / "ledger" / f"life-1-rank-{given.nproc_per_node}.jsonl",
            time.monotonic() + START,
        )
        while not (
            (given.out / "checkpoint.json").exists()
            and path.read_bytes().count(b"\n") > given.checkpoint_every + 3
        ):
            for number, node in enumerate(pair.nodes):
                if (status := node.poll()) is not None:
                    raise ConfigError(
                        f"node {number} ended too early, with status {status}:\n{node.last_lines()}"
                    )
            if time.monotonic() > deadline:
                raise ConfigError(f"no node has got on after {START} s:\n{left.last_lines()}")
            time.sleep(0.01)
        since = time.monotonic()
        print(f"node 1: SIGKILL to its {lost.kill()} processes", flush=True)
        status = left.wait(given.timeout + END)
        how = (
            f"ended by itself with status {status}"
            if status is not None
            else "did not end by itself, and was killed"
        )
        print(f"node 0: {how}, {time.monotonic() - since:.1f} s later", flush=True)
        if status == 0:
            raise ConfigError(
                "the job was through before a node was lost: give it more --epochs or --images"
            )


def count(given: argparse.Namespace) -> int:
    """Prints the ledger; 1 where a sample is missing or came twice."""
    try:
        lives = read_lives(given.out / "ledger")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not lives:
        raise ConfigError(f"no ledger in {given.out / 'ledger'}")
    print("\n".join(report(lives)))
    sums = balance(lives)
    missing, duplicated = sum(one.missing for one in sums), sum(one.duplicated for one in sums)
    print(f"all epochs: missing {missing}, duplicated {duplicated}")
    return 0 if sums and not missing and not duplicated else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Streams shards to many nodes, and goes on with another number of them."
    )
    parser.add_argument(
        "urls", nargs="*", help="shards: paths or URLs, or patterns such as train-{0000..0127}.tar"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--global-batch", type=int, default=24, help="samples a step, over all ranks (24)"
    )
    parser.add_argument(
        "--buffer-size", type=int, default=200, help="samples that are mixed, about (200)"
    )
    parser.add_argument("--workers", type=int, default=1, help="worker processes a rank (1)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--images", type=int, default=600, help="of the demo: photographs to make (600)"
    )
    parser.add_argument("--checkpoint-every", type=int, default=5, metavar="STEPS")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30,
        help="seconds that a rank waits for the others in a step (30)",
    )
    parser.add_argument(
        "--pause", type=float, default=0, help="seconds to sleep after each step (0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/stream"),
        help="folder for checkpoint and ledger, which all nodes share",
    )
    parser.add_argument(
        "--cache-dir",
        help="where each node keeps the shards' indices; without: in the user's cache folder",
    )
    parser.add_argument(
        "--count", action="store_true", help="print what all lives have seen, and end"
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="a server and two nodes on this machine, one of which is lost",
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=2, help="of the demo: ranks a node (2)"
    )
    # read above, before torch is imported
    parser.add_argument("--die-with-parent", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if (
        min(
            given.epochs,
            given.global_batch,
            given.images,
            given.checkpoint_every,
            given.nproc_per_node,
            given.buffer_size,
        )
        < 1
    ):
        parser.error("numbers must be at least 1")
    if not (given.urls or given.demo or given.count):
        parser.error("name the shards, or take --demo")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        if given.count:
            return count(given)
        if given.demo:
            # so that its nodes and its server are ended
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            return demo(given)
        stream(given)
        return 0
    except (HeadraceError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PeersLost as error:
        print(
            f"lost the other ranks: {error}\nstart again with the nodes that are left: it goes on "
            f"from {given.out / 'checkpoint.json'}",
            file=sys.stderr,
        )
        return 3
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    end(main())
