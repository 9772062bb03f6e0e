"""Detects the rank and world size of this process.

Asked in turn: the caller's arguments, torch.distributed, and the environment that a launcher sets.
Launchers nest, and the innermost is right: torchrun or mpirun may run inside a SLURM step, whose
variables then number their daemons.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """The place of a process among those that train together.

    Attributes:
        rank: number of this process, in [0, world_size).
        world_size: number of processes.
        local_rank: number of this process among those of its machine; 0 where no launcher says.
        local_world_size: number of processes on this machine, which share its memory and cores; 1
            where no launcher says.
        source: where rank and world size come from, in words.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: str


class _Launcher(NamedTuple):
    """The variables that a launcher sets; of `local_size` the first that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: tuple[str, ...]


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "OpenMPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)
    ),
    _Launcher(
        "SLURM job step",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ),
)


def detect_world(rank: int | None = None, world_size: int | None = None) -> World:
    """Finds out the rank and the world size of this process.

    Arguments count most, then an initialised torch.distributed, then the environment of torchrun,
    OpenMPI, MPICH or Intel MPI, and SLURM (inside a job step only: a batch script that runs without
    srun is one process). Else the world is this process alone. The local rank and size are the
    launcher's in every case.

    Args:
        rank: number of this process, or None to find out.
        world_size: number of processes, or None to find out; given together with `rank`.

    Returns:
        The world; `World.source` says where it comes from.

    Raises:
        ConfigError: one of rank and world size without the other, a rank outside [0, world_size),
            or a variable of the environment that is no number.
    """
    launcher = None
    for one in _LAUNCHERS:
        present = [name for name in (one.rank, one.size) if name in os.environ]
        # sbatch sets SLURM_PROCID without srun too: only both together mean a job step
        if len(present) == 2 or (present and one.rank != "SLURM_PROCID"):
            launcher = one
            break
    local_rank = 0
    local_sizes = [1]
    if launcher is not None:
        local_rank = _read_number(launcher.local_rank) or 0
        set_sizes = [name for name in launcher.local_size if name in os.environ]
        # SLURM's first number may be that of a machine with fewer tasks
        local_sizes = [local_rank + 1, *(_read_number(name) or 1 for name in set_sizes[:1])]
    # nobody can have initialised what nobody has imported
    dist = sys.modules.get("torch.distributed")
    names = ("rank", "world_size")
    if rank is not None or world_size is not None:
        source = "arguments"
    elif dist is not None and dist.is_available() and dist.is_initialized():
        source = "torch.distributed"
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    elif launcher is not None:
        names = (launcher.rank, launcher.size)
        source = f"environment of {launcher.name} ({launcher.rank}, {launcher.size})"
        rank = _read_number(launcher.rank)
        world_size = _read_number(launcher.size)
    else:
        source = "no launcher found: a single process"
        rank = 0
        world_size = 1
    if world_size is None:
        raise ConfigError(f"{names[0]} is given without {names[1]}: give both")
    if rank is None:
        raise ConfigError(f"{names[1]} is given without {names[0]}: give both")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{names[0]} must be in [0, {names[1]}), got {names[0]}={rank} with "
            f"{names[1]}={world_size}"
        )
    return World(rank, world_size, local_rank, max(local_sizes), source)


def local_ranks() -> int:
    """The number of ranks on this machine, as things are now."""
    return detect_world().local_world_size


def _read_number(name: str) -> int | None:
    """A variable as a number; of SLURM's lists, such as "2(x3),1", the first."""
    value = os.environ.get(name)
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+)\s*(\(x\d+\))?(,.*)?", value)
    if match is None:
        raise ConfigError(
            f"the environment variable {name}={value!r} is not a number; pass rank= and "
            "world_size= instead"
        )
    return int(match[1])
