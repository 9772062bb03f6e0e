"""Compares the speed of two checkouts of headrace.

    python benchmarks/versions.py OLD NEW [--rounds 5] [--json] -- SCRIPT.py ARGUMENTS

Runs a script of this folder in turn from both checkouts, each with its own package and in fresh processes, one round a turn. The order
of the two changes from round to round, so that a drift of the machine hits both alike. Printed are, for each figure, the median of the
ratios within each round (new to old) with the lowest and the highest of them, and both medians. Both checkouts run in the environment of
this script's Python. Name the contestants with ``--only headrace``, as the peers are the same in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def run(checkout: Path, script: list[str]) -> dict[str, float]:
    """The figures of one round of a script, by name.

    Raises:
        RuntimeError: the script failed; with the end of what it wrote.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, str(checkout / "benchmarks" / script[0]), *script[1:], "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return dict(figures(json.loads(done.stdout)))


def figures(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Each figure of a script's JSON with its name: of `common.py`, of `order.py`, of `modes.py`."""
    for section, table in result.get("sections", {}).items():
        for name, contestant in table["contestants"].items():
            for label, values in {"": contestant["speeds"], **contestant["more"]}.items():
                if values:
                    yield f"{section} | {name}{label and f' | {label}'}", values[0]
    for size, table in result.get("sizes", {}).items():
        for name, (first, *_) in table["peers"].items():
            yield from ((f"{size} | {name} | {key}", value) for key, value in first.items() if isinstance(value, float))
    yield from ((name, values[0]) for name, values in result.get("all", {}).items())


def compare(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each figure that all rounds of both have: median, lowest and highest ratio, and both medians."""
    table = {}
    for name in old[0]:
        if not all(name in figures for figures in [*old, *new]):
            continue
        pairs = [(before[name], after[name]) for before, after in zip(old, new, strict=True) if before[name]]
        if pairs:
            ratios = [after / before for before, after in pairs]
            befores, afters = zip(*pairs, strict=True)
            table[name] = {
                "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
                "old": statistics.median(befores), "new": statistics.median(afters),
            }  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("script", nargs="+", metavar="SCRIPT.py ARGUMENTS", help="a script of this folder, after --")
    arguments = parser.parse_args()
    checkouts = [arguments.old.resolve(), arguments.new.resolve()]
    rounds: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for number in range(arguments.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            rounds[which].append(run(checkouts[which], arguments.script))
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    table = compare(*rounds)
    if arguments.json:
        print(json.dumps({"script": arguments.script, "rounds": arguments.rounds, "figures": table}, indent=1))
        return
    print("new / old: median (lowest to highest) | old | new | figure")
    for name, row in table.items():
        print(f"{row['ratio']:5.2f} ({row['lowest']:.2f} to {row['highest']:.2f}) | {row['old']:.5g} | {row['new']:.5g} | {name}")


if __name__ == "__main__":
    main()
