"""Inspects episodes: numbered groups of HDF5 files, and replay buffers in HDF5 or Zarr."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.errors import FormatError
from headrace.inspecting.report import Report
from headrace.storage.episodes.find import STEPS, arrays_in, episode_ends, is_replay
from headrace.storage.tree import Tree


class Episodes(NamedTuple):
    """Groups of arrays that are episodes, or a replay buffer, where that is unmistakable.

    Attributes:
        pattern: of their paths; of a replay buffer "".
        number: how many there are.
        first: the path of the first; of a replay buffer that of the group with all steps.
        keys: the arrays of the first, with dtype and shape of a step.
        shortest, longest, steps: of those that were looked at.
        is_cut: True if there are more.
    """

    pattern: str
    number: int
    first: str
    keys: list[str]
    shortest: int
    longest: int
    steps: int
    is_cut: bool


def replay_in(tree: Tree, notes: list[str]) -> Episodes | None:
    """The episodes of a file that is a replay buffer; None: it is none, or one that can't be
    read, which a note says.
    """
    if not is_replay(tree):
        return None
    try:
        lengths = np.diff(episode_ends(tree), prepend=0)
    except FormatError as error:
        notes.append(" ".join(str(error).split()))
        return None
    told = [tree.described(f"{STEPS}/{key}").split(" ", 1)[0] for key in arrays_in(tree, STEPS)]
    keys = [
        f"{key} {dtype} {list(tree.shape(f'{STEPS}/{key}')[1:])}"
        for key, dtype in zip(arrays_in(tree, STEPS), told, strict=True)
    ]
    return Episodes(
        "",
        len(lengths),
        STEPS,
        keys,
        int(lengths.min()),
        int(lengths.max()),
        int(lengths.sum()),
        False,
    )


def tell_episodes(report: Report, episodes: Episodes, many: bool) -> None:
    """Tells of episodes, and how they are opened."""
    least, most = episodes.shortest, episodes.longest
    steps = f"{least:,} to {most:,} steps" if least < most else f"{least:,} steps"
    about = "the first " if episodes.is_cut else ""
    report.samples = None if many else episodes.number
    named = f"episodes {episodes.pattern!r}" if episodes.pattern else "episodes of a replay buffer,"
    report.samples_are = (
        f"{named} of {steps} ({about}{episodes.steps:,} in all): {', '.join(episodes.keys)}"
    )
    report.opens_as = f"headrace.EpisodeDataset({report.path!r}, window=16)"
