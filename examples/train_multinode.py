"""Trains a small network on images on many nodes, and goes on with another number of them when one
is lost.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST --master-port 29500 \\
        examples/train_multinode.py photos/train
    # the same job, with the node that is left
    torchrun --nnodes 1 --nproc-per-node 4 examples/train_multinode.py photos/train
    # what all lives of the job have seen
    python examples/train_multinode.py --count
    python examples/train_multinode.py --demo  # all of it on this machine: see below

`--global-batch` stays what it is; a rank takes its share of it, so any number of ranks that divides
it may go on. Model, optimiser and the loader's state are saved every few steps to `--out`, which
all nodes share, and each rank keeps a ledger of the samples that it has seen.

`--demo` starts two nodes with torchrun, kills one of them by SIGKILL in the middle of an epoch,
sees the other one end, goes on with one node from the last checkpoint, and counts: over both lives
every sample of every epoch must have come exactly once.

docs/multinode.md has more, and SLURM.

Exit status: 0; 1 where samples are missing or came twice; 2 for an error; 3 where other ranks were
lost; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from two_nodes import Node, TwoNodes, die_with_parent, end, free_port, one_node

if "--die-with-parent" in sys.argv:
    die_with_parent()  # before the long imports

# torch's threads leave their cores to the workers instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from ledger import Ledger, balance, forget, read_lives, report
from make_photos import make_photos
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headrace import (
    ConfigError,
    HeadraceError,
    ImageDataset,
    Loader,
    create_dataloader,
    seed_everything,
)
from headrace.order import World, detect_world

# seconds that the demo gives a node to start and to learn, and one that has lost the other to end
START, END = 240, 60


class PeersLost(Exception):
    """A step could not be done together with the other ranks."""


class Network(nn.Module):
    """Three convolutions. No batch statistics: they would depend on the number of ranks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(images).amax((2, 3)))


@dataclass
class Job:
    """What is saved, beside the numbers of the life."""

    world: World
    network: nn.Module
    """The network itself: its names don't depend on how it is trained."""
    replica: nn.Module
    """The same, as it shares its gradients with the other ranks."""
    optimiser: torch.optim.Optimizer
    loader: Loader
    life: int = 1

    def save(self, path: Path) -> None:
        """Never a half-written file under the final name, and none that the machine forgets."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        saved = {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "loader": self.loader.state_dict(),
        }
        with open(unfinished, "wb") as file:
            torch.save({**saved, "life": self.life}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)

    def load(self, path: Path, device: str) -> None:
        """Goes on from a checkpoint, if there is one: all ranks from the same."""
        if path.exists():
            saved = torch.load(path, map_location=device, weights_only=True)
            self.network.load_state_dict(saved["network"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.loader.load_state_dict(saved["loader"])
            self.life = saved["life"] + 1
        own = self.life, *self.position()
        everywhere: list[Any] = [own]
        if self.world.world_size > 1:
            everywhere = [None] * self.world.world_size
            dist.all_gather_object(everywhere, own)
        if len(set(everywhere)) > 1:
            raise ConfigError(
                f"{path} is not the same on all ranks (life, epoch, step): {everywhere}; --out "
                "must be a folder that they share"
            )

    def position(self) -> tuple[int, int]:
        """Epoch and step of the next batch."""
        state = self.loader.state_dict()
        return state["epoch"], state["batches"]


def join(given: argparse.Namespace) -> tuple[World, str]:
    """Meets the other ranks, under torchrun or srun; the place of this one, and its device."""
    world = detect_world()
    is_cuda = given.device.startswith("cuda")
    device = f"cuda:{world.local_rank}" if given.device == "cuda" else given.device
    if is_cuda:
        torch.cuda.set_device(device)
    if world.world_size > 1:
        patience = timedelta(seconds=given.timeout)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            rank=world.rank,
            world_size=world.world_size,
            timeout=patience,
        )
    return world, device


def open_data(given: argparse.Namespace, world: World) -> ImageDataset:
    """The images; without a path rank 0 makes some, and then each node that does not share its
    disk.
    """
    if given.path is None:
        folder = given.out / f"photos-{given.images}"
        for turn in (world.rank, world.local_rank):
            if turn == 0:
                make_photos(folder, given.images, (64, 48))
            if world.world_size > 1:
                dist.barrier()
        given.path = folder
    return ImageDataset(given.path, image_size=given.image_size, seed=given.seed, return_index=True)


def build(given: argparse.Namespace, world: World, device: str, dataset: ImageDataset) -> Job:
    """Network, optimiser and loader; the same on every rank, bar its share of the batches."""
    batch_size, rest = divmod(given.global_batch, world.world_size)
    if rest or not batch_size:
        raise ConfigError(
            f"--global-batch {given.global_batch} can't be shared by {world.world_size} ranks: "
            "take a number that divides it"
        )
    seed_everything(given.seed)
    network = Network(max(1, len(dataset.classes))).to(device)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    replica = DistributedDataParallel(network) if world.world_size > 1 else network
    loader = create_dataloader(
        dataset, batch_size=batch_size, num_workers=given.workers, seed=given.seed, device=device
    )
    return Job(world, network, replica, optimiser, loader)


def train(given: argparse.Namespace) -> None:
    """One life of the job, up to its end."""
    world, device = join(given)
    with open_data(given, world) as dataset:
        job = build(given, world, device, dataset)
        checkpoint, folder = given.out / "checkpoint.pt", given.out / "ledger"
        job.load(checkpoint, device)
        if world.local_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            forget(folder, job.life)
        if world.world_size > 1:
            dist.barrier()
        ledger = Ledger(
            folder, job.life, world.rank, world.world_size, len(dataset), job.position()
        )
        if world.rank == 0:
            epoch, step = job.position()
            print(
                f"life {job.life}: {world.world_size} ranks, {device}, from epoch {epoch} step "
                f"{step}",
                flush=True,
            )
        try:
            for epoch in range(job.position()[0], given.epochs):
                loss = run_epoch(given, job, ledger, epoch, checkpoint)
                if world.rank == 0 and loss is not None:
                    print(
                        f"epoch {epoch}: loss {loss:.4f} (of rank 0, in the last of "
                        f"{len(job.loader)} steps)",
                        flush=True,
                    )
        finally:
            ledger.close()
            job.loader.close()
    if world.world_size > 1:
        dist.destroy_process_group()


def run_epoch(
    given: argparse.Namespace, job: Job, ledger: Ledger, epoch: int, checkpoint: Path
) -> float | None:
    """Learns from the rest of an epoch; the loss of its last batch, None where nothing was left."""
    world, loader, loss = job.world, job.loader, None
    loader.set_epoch(epoch)  # a position that was loaded for this epoch stays
    for images, targets, indices in loader:
        step = job.position()[1] - 1
        is_last = step + 1 == len(loader)
        is_saved = (step + 1) % given.checkpoint_every == 0 or is_last
        own = indices.tolist()
        fills_up = 1 if is_last and world.rank >= world.world_size - loader.padding else 0
        # Before the gradients are shared: no rank gets through a step that another one has not in
        # its ledger.
        ledger.write(
            epoch, step, own[: len(own) - fills_up], own[len(own) - fills_up :], durable=is_saved
        )
        try:
            loss = nn.functional.cross_entropy(job.replica(images), targets)
            job.optimiser.zero_grad()
            loss.backward()
        except RuntimeError as error:
            if world.world_size == 1:
                raise
            raise PeersLost(
                f"rank {world.rank} in epoch {epoch} step {step}: {str(error).splitlines()[0]}"
            ) from error
        job.optimiser.step()
        if is_saved and world.rank == 0:
            job.save(checkpoint)
        time.sleep(given.pause)
    return None if loss is None else loss.item()


# -- two nodes on one machine


def demo(given: argparse.Namespace) -> int:
    """Two nodes, one of them lost; then one; then the balance."""
    given.out /= "demo"  # no checkpoint of a real job is touched
    given.out.mkdir(parents=True, exist_ok=True)
    if given.path is None:
        given.path = make_photos(given.out / f"photos-{given.images}", given.images, (64, 48))
    (given.out / "checkpoint.pt").unlink(missing_ok=True)
    forget(given.out / "ledger", 1)
    lose_a_node(given)
    print("life 2: one node alone", flush=True)
    with one_node(
        torchrun(given, 1, 0, "127.0.0.1", free_port()), given.out / "life-2-node-0.log"
    ) as node:
        if (status := node.wait(START)) != 0:
            raise ConfigError(
                f"the node that went on alone ended with {status}:\n{node.last_lines()}"
            )
    return count(given)


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
    options = [str(given.path), "--out", str(given.out), "--die-with-parent"]
    for name in (
        "epochs",
        "global_batch",
        "image_size",
        "workers",
        "seed",
        "checkpoint_every",
        "timeout",
        "device",
    ):
        if getattr(given, name) is not None:
            options += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    if nodes > 1:
        options += ["--pause", str(given.pause or 0.15)]  # as a larger network would
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
        given.loopback,
    ) as pair:
        networks = (
            "each in a network of its own" if pair.is_isolated else "both on the loopback interface"
        )
        print(f"life 1: two nodes of {given.nproc_per_node} ranks, {networks}", flush=True)
        lost, left = pair.nodes[given.lose], pair.nodes[1 - given.lose]
        wait_for_steps(given, pair.nodes)
        if given.cut:
            if not pair.is_isolated:
                raise ConfigError(
                    "--cut needs networks of their own: Linux, root, ip, unshare and nsenter"
                )
            pair.cut_cable()
        since = time.monotonic()
        killed = lost.kill()
        print(
            f"node {given.lose}: SIGKILL to its {killed} "
            f"processes{', its cable cut before' if given.cut else ''}",
            flush=True,
        )
        status = left.wait(given.timeout + END)
        how = (
            f"ended by itself with status {status}"
            if status is not None
            else "did not end by itself, and was killed"
        )
        print(f"node {1 - given.lose}: {how}, {time.monotonic() - since:.1f} s later", flush=True)
        for line in left.log.read_text(errors="replace").splitlines():
            if line.startswith("lost the other"):
                print(f"  {line[:130]}", flush=True)
        if status == 0:
            raise ConfigError(
                "the job was through before a node was lost: give it more --epochs or --images"
            )


def wait_for_steps(given: argparse.Namespace, nodes: Sequence[Node]) -> None:
    """Waits until the node that will be lost has done some steps after a checkpoint."""
    rank = given.lose * given.nproc_per_node
    path, wanted = given.out / "ledger" / f"life-1-rank-{rank}.jsonl", given.checkpoint_every + 3
    deadline = time.monotonic() + START
    while not (
        path.exists()
        and path.read_bytes().count(b"\n") > wanted
        and (given.out / "checkpoint.pt").exists()
    ):
        for number, node in enumerate(nodes):
            if (status := node.poll()) is not None:
                raise ConfigError(
                    f"node {number} ended too early, with status {status}:\n{node.last_lines()}"
                )
        if time.monotonic() > deadline:
            raise ConfigError(
                f"no node has learnt anything after {START} s:\n{nodes[0].last_lines()}"
            )
        time.sleep(0.01)


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
        description=(
            "Trains a small network on images on many nodes, and goes on with another number of "
            "them."
        )
    )
    parser.add_argument(
        "path",
        nargs="?",
        help="folder of class folders, or a packed .h5 file; without: makes photographs",
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--global-batch", type=int, default=24, help="samples a step, over all ranks (24)"
    )
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument(
        "--workers", type=int, help="worker processes a rank; without: chosen by headrace"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--images", type=int, default=480, help="how many photographs to make")
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
        default=Path("out/multinode"),
        help="folder for checkpoint and ledger, which all nodes share",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--count", action="store_true", help="print what all lives have seen, and end"
    )
    parser.add_argument(
        "--demo", action="store_true", help="two nodes on this machine, one of which is lost"
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, help="of the demo: ranks a node (1)"
    )
    parser.add_argument(
        "--lose", type=int, choices=(0, 1), default=1, help="of the demo: the node that is lost (1)"
    )
    parser.add_argument(
        "--cut",
        action="store_true",
        help="of the demo: cut its cable first, so that nothing tells the other one",
    )
    parser.add_argument(
        "--loopback", action="store_true", help="of the demo: both nodes on the loopback interface"
    )
    # read above, before torch is imported
    parser.add_argument("--die-with-parent", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if (
        min(
            given.epochs,
            given.global_batch,
            given.image_size,
            given.images,
            given.checkpoint_every,
            given.nproc_per_node,
        )
        < 1
    ):
        parser.error(
            "--epochs, --global-batch, --image-size, --images, --checkpoint-every and "
            "--nproc-per-node must be at least 1"
        )
    if given.device == "auto":
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        if given.count:
            return count(given)
        if given.demo:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its nodes are ended
            return demo(given)
        train(given)
        return 0
    except (HeadraceError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PeersLost as error:
        print(
            f"lost the other ranks: {error}\nstart again with the nodes that are left: it goes on "
            f"from {given.out / 'checkpoint.pt'}",
            file=sys.stderr,
        )
        return 3
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    end(main())
