"""One machine stands in for two nodes, one of which is lost.

A node is a `torchrun` with all that it starts. Where it is allowed (Linux, root, `ip` and
`unshare`), each node has a network of its own, and a cable between the two; else both share the
loopback interface.

Nodes end with this process, however it ends: the kernel kills them (Linux); elsewhere only what
Python can still do is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

_ADDRESSES = "10.213.7.1", "10.213.7.2"
_PORT = 29_500  # in a network of one's own it is free
_SETUP = (
    'read -r go && ip link set lo up && ip addr add "$1/30" dev "$2" && ip link set "$2" up && '
    'shift 2 && exec "$@"'
)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when its parent ends (Linux).

    Args:
        parent: the parent's id; None where the process does not know it (and its parent is not the
            system's first process).
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1 if parent is None else os.getppid() != parent:  # it has ended already
            os._exit(1)


def end(status: int) -> NoReturn:
    """Ends this process with an exit status.

    At once where its process group still stands, as after an error: an orderly end may wait for
    ranks that are gone, and threads of gloo that still hold tensors abort it
    (https://github.com/pytorch/pytorch/issues/190489). The loader's workers end with their parent.
    """
    # not at the top: `die_with_parent` is called before the long imports
    import torch.distributed as dist

    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class Node:
    """One `torchrun` and all that it starts.

    Args:
        command: what to run.
        log: file for its output.
        interface: of the network that it talks over.
        wrap: a command that goes before it.
    """

    def __init__(
        self, command: Sequence[str], log: Path, interface: str | None, wrap: Sequence[str] = ()
    ) -> None:
        said = (
            {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        )
        self.log = log
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                [*wrap, *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **said},
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        self.pid = self._process.pid
        self._seen: set[psutil.Process] = set()

    def begin(self) -> None:
        """Lets a wrapped command go on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self.pid)
            self._seen.update([top, *top.children(recursive=True)])
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit status, None if it still runs after so long."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._process.poll()

    def kill(self) -> int:
        """Sends SIGKILL to all of it, the workers of its loaders included; waits until all are
        gone, and says how many there were.

        (torchrun gives its children sessions of their own, so they are no process group.)
        """
        self.poll()
        alive = [process for process in self._seen if not _is_gone(process)]
        alive.sort(
            key=lambda process: process.pid != self._process.pid
        )  # the first one first: else it might see its children die, and end by itself
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()
        deadline = time.monotonic() + 30
        while left := [process for process in alive if not _is_gone(process)]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes that SIGKILL does not end: {left}")
            time.sleep(0.02)
        return len(alive)

    def last_lines(self, number: int = 15) -> str:
        """The end of its output."""
        return "\n".join(
            f"  | {line}" for line in self.log.read_text(errors="replace").splitlines()[-number:]
        )


def _is_gone(process: psutil.Process) -> bool:
    """True if it has ended. Its new parent, perhaps a container's first process, never asks how."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class TwoNodes:
    """Two nodes on one machine, under way; ended when the `with` block ends.

    Args:
        command: of a node, made of its rank, the first node's address and a port.
        folder: for their output.
        is_together: both on the loopback interface, even where networks of their own are allowed.
    """

    def __init__(
        self, command: Callable[[int, str, int], list[str]], folder: Path, is_together: bool = False
    ) -> None:
        self.is_isolated = not is_together and _may_isolate()
        """Has each node a network of its own?"""
        self.nodes: list[Node] = []
        logs = [folder / f"life-1-node-{rank}.log" for rank in range(2)]
        try:
            if self.is_isolated:
                for rank, (log, address) in enumerate(zip(logs, _ADDRESSES, strict=True)):
                    wrap = ["unshare", "--net", "sh", "-c", _SETUP, "sh", address, f"node{rank}"]
                    self.nodes.append(
                        Node(command(rank, _ADDRESSES[0], _PORT), log, f"node{rank}", wrap)
                    )
                self._lay_cable()
            else:
                port = free_port()
                self.nodes += [
                    Node(command(rank, "127.0.0.1", port), log, loopback())
                    for rank, log in enumerate(logs)
                ]
        except BaseException:
            self.kill()
            raise

    def _lay_cable(self) -> None:
        here = os.stat("/proc/self/ns/net")
        first, second = (node.pid for node in self.nodes)
        deadline = time.monotonic() + 30
        # not yet in their own
        while any(
            os.path.samestat(here, os.stat(f"/proc/{pid}/ns/net")) for pid in (first, second)
        ):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"a node has no network of its own:\n{self.nodes[0].last_lines()}"
                )
            time.sleep(0.01)
        ends = [
            "node0",
            "netns",
            str(first),
            "type",
            "veth",
            "peer",
            "name",
            "node1",
            "netns",
            str(second),
        ]
        subprocess.run(["ip", "link", "add", *ends], check=True, timeout=30)
        for node in self.nodes:
            node.begin()

    def cut_cable(self) -> None:
        """From now on nothing arrives, not even that the other end is gone."""
        network = ["nsenter", "--net", "--target", str(self.nodes[0].pid)]
        subprocess.run([*network, "ip", "link", "set", "node0", "down"], check=True, timeout=30)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def one_node(command: list[str], log: Path) -> Iterator[Node]:
    """A node alone, on the loopback interface; ended when the `with` block ends."""
    node = Node(command, log, loopback())
    try:
        yield node
    finally:
        node.kill()


def loopback() -> str | None:
    """The name of the loopback interface; None where it is not known."""
    return {"linux": "lo", "darwin": "lo0"}.get(sys.platform)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _may_isolate() -> bool:
    """True if this process may make networks, and cables between them."""
    if (
        sys.platform != "linux"
        or os.geteuid() != 0
        or not all(map(shutil.which, ("ip", "unshare", "nsenter")))
    ):
        return False
    script = "ip link add node0 type veth peer name node1 && ip link set lo up"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", script], capture_output=True, timeout=30
    )
    return tried.returncode == 0
