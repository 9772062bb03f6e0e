"""Compares how long it takes to know which sample is next, and how much memory.

    python benchmarks/order.py [--sizes 1e6 1e8 1e9] [--rounds 5] [--seconds 300] [--memory SIZE]
    [--clock cpu] [--only NAME ...]
                               [--json]

The order of a shuffled epoch of N samples: the time to the first index; the time an index, in
blocks of 4,096 and in lists of 64 as torch's BatchSampler takes them; the peak of memory; the time
to the first index of a run that goes on at the middle of the epoch. Each peer at each N runs in a
process of its own, once in every round, after it has done the same with 1,000 samples. A peer that
wants more than `--memory` (half of what is available) or takes longer than `--seconds` is stopped
there, and shown as too large. Before the first round each gives a whole epoch of 65,537 samples, to
see that it is a permutation, and that resuming goes on with the right index. All are computations
of one thread: `--clock cpu` measures their CPU time instead, which says something on a busy machine
too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import order_peers as peers
import psutil
from common import LIMIT, add_common_options, code_of, is_ours, machine, say, twin_of, version_of
from order_peers import BATCH, BLOCK, Indices

from headrace.memory.budget import format_size, parse_size

SMALL, CHECKED = 1000, 4**8 + 1
"""Samples of the run before, and of the one that is looked at as a whole."""
TRACED = 64 << 20
"""Bytes of growth below which the peak of the allocations is looked at too: freed memory that is
used again is no growth.
"""
STEPS, SECONDS = 64, 0.5
"""Blocks and lists that are timed, at most; fewer where they take longer, but four."""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

Row: TypeAlias = dict[str, Any]
"""What was measured of a peer at an N in a round: see `measure`. ``stopped`` says why there is
no more.
"""


@dataclass(frozen=True)
class Peer:
    """One line of a table.

    Attributes:
        name: what the table says.
        indices: how it gives indices.
        packages: distributions, one of which must be installed.
        checkout: of headrace, whose package and scripts are used; None: this one.
    """

    name: str
    indices: type[Indices]
    packages: tuple[str, ...] = ()
    checkout: str | None = None


OURS, OUR_RANK, ORDER = (
    "headrace OrderSampler",
    "headrace OrderSampler, rank 0 of 8",
    "headrace EpochOrder",
)
RANDOM, DISTRIBUTED = "torch RandomSampler", "torch DistributedSampler, rank 0 of 8"
STATEFUL, NUMPY, GRAIN = (
    "torchdata RandomSampler",
    "limit: numpy's permutation",
    "Grain index_shuffle, the bare function",
)
PEERS = [
    Peer(ORDER, peers.OurOrder),
    Peer("headrace RankBatches", peers.OurBatches),
    Peer(OURS, peers.OurSampler),
    Peer(OUR_RANK, peers.OurRank),
    Peer("headrace EpochOrder, block shuffle", peers.OurBlockOrder),
    Peer("headrace OrderSampler, block shuffle", peers.OurBlockSampler),
    Peer(GRAIN, peers.GrainShuffle, ("grain",)),
    Peer("Grain MapDataset.shuffle", peers.GrainDataset, ("grain",)),
    Peer("Grain IndexSampler", peers.GrainSampler, ("grain",)),
    Peer(RANDOM, peers.TorchRandom),
    Peer(DISTRIBUTED, peers.TorchDistributed),
    Peer(STATEFUL, peers.TorchdataRandom, ("torchdata",)),
    Peer(
        "torchdata StatefulDistributedSampler, 0 of 8", peers.TorchdataDistributed, ("torchdata",)
    ),
    Peer(NUMPY, peers.NumpyPermutation),
]
RATIOS = [
    ("first", RANDOM, OURS),
    ("first", DISTRIBUTED, OUR_RANK),
    ("memory", RANDOM, OURS),
    ("memory", DISTRIBUTED, OUR_RANK),
    ("resume", RANDOM, OURS),
    ("resume", STATEFUL, OURS),
    ("list", RANDOM, OURS),
    ("block", GRAIN, ORDER),
    ("block", NUMPY, ORDER),
    ("epoch", RANDOM, OURS),
    ("epoch", NUMPY, ORDER),
]
MEANINGS = {
    "first": "first index",
    "block": "an index, in blocks",
    "list": "an index, in lists of 64",
    "epoch": "an index in lists, with its share of the start",
    "memory": "memory",
    "resume": "resume at the middle",
}


# -- in the process of a peer


def serve(
    kind: type[Indices], n: int, checks: bool, memory: int, clock: str, connection: Connection
) -> None:
    """The life of a peer's process: it says what it has found, figure by figure, and what
    stopped it. What it prints is not wanted.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    try:
        # if the machine runs out of memory all the same, nobody else goes
        Path("/proc/self/oom_score_adj").write_text("1000")
        if checks:
            connection.send(check(kind(CHECKED)))
        else:
            measure(kind, n, memory, CLOCKS[clock], connection.send)
        connection.send({"done": True})
    except BaseException as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        # numpy's and Python's; torch's
        short = isinstance(error, MemoryError) or "allocate memory" in said
        connection.send(
            {
                "stopped": f"wants more than {format_size(memory)}" if short else said[:300],
                "short_of_memory": short,
            }
        )


def check(indices: Indices) -> Row:
    found = indices.all()
    resumed = indices.resumed(indices.saved())
    return {
        "given": len(found),
        "different": len(set(found)),
        "share": indices.share,
        "resumed": resumed == found[indices.middle],
    }


def measure(
    kind: type[Indices],
    n: int,
    memory: int,
    clock: Callable[[], float],
    send: Callable[[Row], None],
) -> None:
    """Says, in seconds and bytes: ``first``; ``block`` and ``list`` an index; ``memory`` of these;
    ``resume``, and its memory.

    The memory is the most that the resident set grew, or that was allocated at a time, whichever is
    more.
    """
    small = kind(SMALL)
    small.first(), small.resumed(small.saved())
    del small
    limit = status("VmSize") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    send({"ready": True})

    before = rest()
    indices = kind(n)
    start = clock()
    indices.first()
    first = clock() - start
    send({"first": first})
    block = per_index(indices.block, BLOCK, indices.share, clock)
    single = per_index(indices.batch, BATCH, indices.share, clock)
    growth = status("VmHWM") - before
    if growth < TRACED:
        growth = max(growth, traced(lambda: walk(kind(n))))
    send(
        {"block": block, "list": single, "epoch": single + first / indices.share, "memory": growth}
    )

    state = indices.saved()
    del indices
    before = rest()
    start = clock()
    kind(n).resumed(state)
    resumed = clock() - start
    growth = status("VmHWM") - before
    if growth < TRACED:
        growth = max(growth, traced(lambda: kind(n).resumed(state)))
    send({"resume": resumed, "resume_memory": growth})


def per_index(
    give: Callable[[int], Any], size: int, share: int, clock: Callable[[], float]
) -> float:
    """Seconds an index; parts from all over the epoch, where the peer knows positions, and no
    more than a quarter of it.
    """
    count = min(STEPS * BLOCK // size, share // size // 4)
    apart = share // size // count
    start = clock()
    for done in range(1, count + 1):
        give((done - 1) * apart)
        took = clock() - start
        if took > SECONDS and done >= 4:
            break
    return took / (done * size)


def walk(indices: Indices) -> None:
    """What is timed, without a clock."""
    indices.first()
    for number in range(4):
        indices.block(number)
    for number in range(STEPS):
        indices.batch(number)


def traced(run: Callable[[], object]) -> int:
    """The most bytes that Python and numpy had allocated at a time."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def rest() -> int:
    """Forgets the highest resident set so far, and gives the present one, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024


# -- in the process that asks


def ask(peer: Peer, n: int, given: argparse.Namespace, checks: bool = False) -> Row:
    """All that a peer says in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve,
        args=(peer.indices, n, checks, given.memory, given.clock, theirs),
        name=peer.name,
    )
    with code_of(peer.checkout):
        process.start()
    theirs.close()
    row: Row = {}
    end = time.monotonic() + max(LIMIT, given.seconds)
    try:
        while not row.keys() & {"done", "stopped"}:
            if not ours.poll(max(0.0, end - time.monotonic())):
                row["stopped"] = (
                    f"takes more than {given.seconds:g} s" if "ready" in row else "did not start"
                )
                process.kill()
                continue
            said = ours.recv()
            if "ready" in said:
                end = time.monotonic() + given.seconds
            row.update(said)
    except (EOFError, OSError):
        process.join()
        row["stopped"] = f"its process ended with exit code {process.exitcode}"
    finally:
        if process.is_alive() and "stopped" not in row:
            process.join(30)
        process.kill()
        process.join()
        ours.close()
    return row


def run(given: argparse.Namespace) -> tuple[list[str], dict[int, dict[str, list[Row]]]]:
    """What the checks say, and for each N and peer a row a round."""
    notes, found = [], {n: {} for n in given.sizes}
    chosen = [
        peer
        for peer in PEERS
        if not given.only or any(part.lower() in peer.name.lower() for part in given.only)
    ]
    if given.against:
        twins = {
            peer: replace(peer, name=twin_of(peer.name, given.against), checkout=given.against)
            for peer in chosen
            if is_ours(peer.name)
        }
        chosen = [one for peer in chosen for one in (peer, twins.get(peer)) if one is not None]
    for peer in list(chosen):
        if peer.packages and version_of(peer.packages) is None:
            notes.append(f"{peer.name}: not installed")
            chosen.remove(peer)
            continue
        say(f"looks at {peer.name}")
        notes += problems(peer.name, ask(peer, CHECKED, given, checks=True))
    # in turn, so that a drift of the machine hits all alike
    turns = itertools.product(range(1, given.rounds + 1), given.sizes, chosen)
    try:
        for number, n, peer in turns:
            rows = found[n].setdefault(peer.name, [])
            if rows and "stopped" in rows[-1]:
                continue  # what is too large once is too large
            say(f"round {number} of {given.rounds}, N = {n:,}: {peer.name}")
            rows.append(ask(peer, n, given))
    except KeyboardInterrupt:
        notes.append(f"interrupted in round {number} of {given.rounds}, at {peer.name}, N = {n:,}")
    say("")
    return notes, found


def problems(name: str, looked: Row) -> list[str]:
    """What is wrong with a peer's order of 65,537 samples."""
    if "stopped" in looked:
        return [f"{name}: {looked['stopped']}"]
    said = []
    if looked["different"] != looked["share"]:
        said.append(
            f"{name}: no permutation: {looked['different']:,} different indices of "
            f"{looked['share']:,}"
        )
    if not looked["resumed"]:
        said.append(f"{name}: goes on with another index at the middle")
    return said


# -- results


def median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else None


def ratios(found: Mapping[str, list[Row]], memory: int, against: str | None) -> list[Row]:
    """How many times as much the other takes: medians of the ratios of the single rounds."""
    lines = []
    twins = [
        (key, twin_of(name, against), name)
        for name in found
        for key in MEANINGS
        if against and is_ours(name)
    ]
    for key, name, ours in [*RATIOS, *twins]:
        pairs = [
            (a[key], b[key])
            for a, b in zip(found.get(name, []), found.get(ours, []), strict=False)
            if key in a and key in b
        ]
        label = f"{MEANINGS[key]}: {name} / {ours}"
        values = [a / b for a, b in pairs if b]
        if values:
            lines.append(
                {
                    "label": label,
                    "ratio": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                }
            )
        elif (
            key == "memory"
            and found.get(ours)
            and any(
                row.get("short_of_memory") and "memory" not in row for row in found.get(name, [])
            )
        ):
            # asked for more than the limit, so this is the least that it takes
            lines.append(
                {"label": label, "at_least": memory / max(row[key] for row in found[ours])}
            )
    return lines


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return (
                f"{value / size:.3g} {unit}"
                if value < 1000 * size
                else f"{value / size:,.0f} {unit}"
            )
    return f"{value / 1e-6:.3g} us"


def show(n: int, found: Mapping[str, list[Row]], given: argparse.Namespace) -> None:
    print(f"\nN = {n:,}")
    lines = ratios(found, given.memory, given.against)
    wide = max((len(line["label"]) for line in lines), default=0)
    for line in lines:
        if "at_least" in line:
            print(f"{line['label']:<{wide}} >{line['at_least']:>13,.0f}x   (it was stopped)")
        else:
            size = ",.0f" if line["ratio"] >= 100 else ",.2f"
            print(
                f"{line['label']:<{wide}} {line['ratio']:>14{size}}x   {line['min']:{size}} to "
                f"{line['max']:{size}}"
            )
    width = max(map(len, found), default=0) + 2
    heads = ("first index", "us, blocks", "us, lists", "with start", "memory", "resume")
    clock = ", CPU time" if given.clock == "cpu" else ""
    print(
        f"\n{f'(medians of {given.rounds} processes{clock})':<{width}}"
        + "".join(f"{head:>13}" for head in heads)
    )
    for name, rows in found.items():
        times = [
            f"{1e6 * value:.3f}" if (value := median(rows, key)) is not None else "-"
            for key in ("block", "list", "epoch")
        ]
        size = median(rows, "memory")
        cells = [
            seconds(median(rows, "first")),
            *times,
            "-" if size is None else format_size(int(size)),
            seconds(median(rows, "resume")),
        ]
        stopped = next((f"   too large: {row['stopped']}" for row in rows if "stopped" in row), "")
        print(f"{name:<{width}}" + "".join(f"{cell:>13}" for cell in cells) + stopped)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: int(float(text)),
        nargs="+",
        default=[10**6, 10**8, 10**9],
        metavar="N",
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="longest time of a peer at one N (300)"
    )
    parser.add_argument(
        "--memory",
        type=parse_size,
        help="most memory of a peer, such as 8GB (half of what is available)",
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="time as it passes, or that of the CPU"
    )
    add_common_options(parser, rounds="processes for each peer and N")
    given = parser.parse_args()
    if min(given.sizes) < 4 * peers.RANKS * BLOCK:
        parser.error(
            f"--sizes must be at least {4 * peers.RANKS * BLOCK:,}, so that blocks of {BLOCK:,} "
            "can be timed"
        )
    if given.memory is None:
        given.memory = psutil.virtual_memory().available // 2
    notes, found = run(given)
    where = machine(peer.packages for peer in PEERS if peer.packages)
    if given.json:
        sections = {
            n: {"ratios": ratios(rows, given.memory, given.against), "peers": rows}
            for n, rows in found.items()
        }
        json.dump(
            {"arguments": vars(given), "machine": where, "notes": notes, "sizes": sections},
            sys.stdout,
            indent=1,
        )
        print()
        return
    for n, rows in found.items():
        show(n, rows, given)
    print()
    for note in notes:
        print(f"note: {note}")
    print(", ".join(f"{k} {v}" for k, v in where.items()))


if __name__ == "__main__":
    main()
