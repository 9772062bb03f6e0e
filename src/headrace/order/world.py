"""Detects the rank and world size of this process.

They come from the caller's arguments, else from torch.distributed, else from the environment of a
launcher. Of nested launchers the innermost counts: torchrun or mpirun may run inside a SLURM step,
whose variables then number their daemons.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """The place of a process among those that train together.

    Attributes:
        rank: number of this process, in [0, world_size).
        world_size: number of processes.
        local_rank: number of this process among those of its machine; 0 without a launcher.
        local_world_size: number of processes on this machine, which share its memory and cores; 1
            without a launcher.
        source: where rank and world size come from, for messages.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: str


# by launcher: the variables of rank, world size, local rank, and of the local world size, of which
# the first that is set counts
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "OpenMPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM job step": (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NTASKS_PER_NODE",
    ),
}


def detect_world(rank: int | None = None, world_size: int | None = None) -> World:
    """Detects the rank and world size of this process.

    Arguments come first, then an initialised torch.distributed, then the environment of torchrun,
    OpenMPI, MPICH or Intel MPI, and SLURM (inside a job step only: a batch script that runs without
    srun is one process). Otherwise this process is alone. The local rank and size always come from
    the launcher.

    Args:
        rank: number of this process. None: detect it.
        world_size: number of processes, given together with `rank`. None: detect it.

    Raises:
        ConfigError: one of rank and world size is given without the other, the rank is outside
            [0, world_size), or a variable of the environment is not a number.
    """
    launcher = ""
    local_rank = 0
    local_sizes = [1]
    names: tuple[str, ...] = ("rank", "world_size")
    for name, (rank_name, size_name, local_name, *local_size_names) in _LAUNCHERS.items():
        present = [each for each in (rank_name, size_name) if each in os.environ]
        # sbatch sets SLURM_PROCID without srun too: only both together mean a job step
        if len(present) == 2 or (present and rank_name != "SLURM_PROCID"):
            launcher = name
            local_rank = _read_number(local_name) or 0
            set_sizes = [each for each in local_size_names if each in os.environ]
            # SLURM's first number may be that of a machine with fewer tasks
            local_sizes = [local_rank + 1, *(_read_number(each) or 1 for each in set_sizes[:1])]
            break
    # it is not initialised if it was never imported
    dist = sys.modules.get("torch.distributed")
    if rank is not None or world_size is not None:
        source = "arguments"
    elif dist is not None and dist.is_available() and dist.is_initialized():
        source = "torch.distributed"
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    elif launcher:
        names = _LAUNCHERS[launcher][:2]
        source = f"environment of {launcher} ({names[0]}, {names[1]})"
        rank = _read_number(names[0])
        world_size = _read_number(names[1])
    else:
        source = "no launcher found: a single process"
        rank = 0
        world_size = 1
    if world_size is None:
        raise ConfigError(f"{names[0]} is set without {names[1]}: pass both")
    if rank is None:
        raise ConfigError(f"{names[1]} is set without {names[0]}: pass both")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{names[0]} must be in [0, {names[1]}), got {names[0]}={rank} with "
            f"{names[1]}={world_size}"
        )
    return World(rank, world_size, local_rank, max(local_sizes), source)


def local_ranks() -> int:
    """The current number of ranks on this machine."""
    return detect_world().local_world_size


def _read_number(name: str) -> int | None:
    """A variable as a number; the first number of SLURM's lists, such as "2(x3),1"."""
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
