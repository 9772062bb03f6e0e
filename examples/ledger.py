"""Records which samples were trained on, over all lives of a job, and which of their steps count.

A life is what happens between a start and an end, be it wanted or not. Each rank of each life
writes a file: a line that says where the life began, and a line for each step. Of a life that was
followed by another one, the steps before the other one's beginning count: the checkpoint holds what
they taught. Those after it are done again by the next life, and what the first one learnt from them
is gone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Ledger:
    """The file of one rank in one life.

    Args:
        folder: of all ranks' files, on a disk that they share or copied together later.
        life: 1 for the first.
        rank, world_size: of this life.
        samples: of the dataset.
        begin: epoch and step of the first batch.
    """

    def __init__(
        self,
        folder: Path,
        life: int,
        rank: int,
        world_size: int,
        samples: int,
        begin: tuple[int, int],
    ) -> None:
        self._file = (folder / f"life-{life}-rank-{rank}.jsonl").open("w", encoding="utf-8")
        self._write(
            {
                "life": life,
                "rank": rank,
                "world_size": world_size,
                "samples": samples,
                "epoch": begin[0],
                "step": begin[1],
            }
        )

    def write(
        self,
        epoch: int,
        step: int,
        indices: Sequence[int],
        padding: Sequence[int] = (),
        durable: bool = False,
    ) -> None:
        """Notes the samples of a step, and apart from them those that only fill it up.

        The line is the system's when this returns, so it outlives the process; a `durable` one, and
        all before it, outlive the machine.
        """
        self._write(
            {"epoch": epoch, "step": step, "indices": list(indices), "padding": list(padding)}
        )
        if durable:
            os.fsync(self._file.fileno())

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def forget(folder: Path, life: int) -> None:
    """Removes what a life left, and later ones: they died before their first checkpoint, or
    belong to another job.
    """
    for path in folder.glob("life-*-rank-*.jsonl"):
        if int(path.name.split("-")[1]) >= life:
            path.unlink(missing_ok=True)


@dataclass
class Life:
    """What the ranks of one life have done."""

    number: int
    world_size: int
    samples: int
    begin: tuple[int, int]
    """Epoch and step."""
    steps: dict[tuple[int, int], list[dict[str, Any]]]
    """The lines of all ranks, by epoch and step."""


def read_lives(folder: Path) -> list[Life]:
    """All lives, in their order.

    Raises:
        ValueError: the file of a rank is missing, or the lives don't belong together.
    """
    heads: dict[int, list[dict[str, Any]]] = {}
    lives: dict[int, Life] = {}
    for path in sorted(folder.glob("life-*-rank-*.jsonl")):
        text = path.read_text(encoding="utf-8")
        # the last one may be half written
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if not lines:
            continue
        head, rest = lines[0], lines[1:]
        begin = head["epoch"], head["step"]
        life = lives.setdefault(
            head["life"], Life(head["life"], head["world_size"], head["samples"], begin, {})
        )
        heads.setdefault(head["life"], []).append(head)
        for line in rest:
            life.steps.setdefault((line["epoch"], line["step"]), []).append(line)
    for number, life in lives.items():
        ranks = {head["rank"] for head in heads[number]}
        if missing := set(range(life.world_size)) - ranks:
            raise ValueError(
                f"{folder}: life {number} had {life.world_size} ranks, and the files of "
                f"{sorted(missing)} are not here"
            )
        if (
            len(
                {
                    (head["epoch"], head["step"], head["world_size"], head["samples"])
                    for head in heads[number]
                }
            )
            > 1
        ):
            raise ValueError(f"{folder}: the ranks of life {number} did not begin together")
    if len({life.samples for life in lives.values()}) > 1:
        raise ValueError(f"{folder}: the lives are of different datasets")
    return [lives[number] for number in sorted(lives)]


@dataclass
class Balance:
    """One epoch over all lives."""

    epoch: int
    steps: int
    samples: int
    missing: int
    duplicated: int
    padding: int
    """Samples that came once more, to give every rank as many."""


def balance(lives: Sequence[Life]) -> list[Balance]:
    """Adds up the steps that count, epoch by epoch."""
    seen: dict[int, Counter[int]] = {}
    padding: Counter[int] = Counter()
    steps: Counter[int] = Counter()
    for life, follower in zip(lives, [*lives[1:], None], strict=True):
        for at, lines in life.steps.items():
            if follower is not None and at >= follower.begin:
                continue
            steps[at[0]] += 1
            for line in lines:
                seen.setdefault(at[0], Counter()).update(line["indices"])
                padding[at[0]] += len(line["padding"])
    found = []
    for epoch in sorted(seen):
        counts, samples = seen[epoch], lives[0].samples
        twice = sum(count - 1 for count in counts.values())
        found.append(
            Balance(epoch, steps[epoch], samples, samples - len(counts), twice, padding[epoch])
        )
    return found


def report(lives: Sequence[Life]) -> list[str]:
    """The lives and the balance of each epoch, in words."""
    said = []
    for life, follower in zip(lives, [*lives[1:], None], strict=True):
        last = max(life.steps, default=life.begin)
        ranks = f"{life.world_size} rank{'s' if life.world_size > 1 else ''}"
        said.append(
            f"life {life.number}: {ranks}, {len(life.steps)} steps, from epoch {life.begin[0]} "
            f"step {life.begin[1]} "
            f"to epoch {last[0]} step {last[1]}"
        )
        if follower is not None:
            redone = sum(at >= follower.begin for at in life.steps)
            where = f"epoch {follower.begin[0]} step {follower.begin[1]}"
            said.append(
                f"  its last checkpoint was taken before {where}: its {len(life.steps) - redone} "
                "steps before that count"
            )
            said.append(
                f"  the {redone} steps that it began after that don't: life {follower.number} did "
                "them again"
            )
    for one in balance(lives):
        padding = f", padding {one.padding}" if one.padding else ""
        said.append(
            f"epoch {one.epoch}: {one.steps} steps, {one.samples} samples, missing {one.missing}, "
            f"duplicated {one.duplicated}{padding}"
        )
    return said
