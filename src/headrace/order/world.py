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


_MPI, _STEP = "OMPI_COMM_WORLD", ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_SLURM = _Launcher("SLURM job step", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _STEP)
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "OpenMPI", f"{_MPI}_RANK", f"{_MPI}_SIZE", f"{_MPI}_LOCAL_RANK", (f"{_MPI}_LOCAL_SIZE",)
    ),
    _Launcher(
        "MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)
    ),
    _SLURM,
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
    launcher = _find_launcher()
    local_rank, local_size = _read_local(launcher)
    if rank is not None or world_size is not None:
        pair, source = _pair("rank", rank, "world_size", world_size), "arguments"
    elif (group := _process_group()) is not None:
        pair, source = group, "torch.distributed"
    elif launcher is not None:
        numbers = (_read_number(launcher.rank), _read_number(launcher.size))
        pair = _pair(launcher.rank, numbers[0], launcher.size, numbers[1])
        source = f"environment of {launcher.name} ({launcher.rank}, {launcher.size})"
    else:
        pair, source = (0, 1), "no launcher found: a single process"
    return World(*pair, local_rank, local_size, source)


def _find_launcher() -> _Launcher | None:
    for launcher in _LAUNCHERS:
        present = launcher.rank in os.environ, launcher.size in os.environ
        # sbatch sets SLURM_PROCID without srun too: only both together mean a job step
        if all(present) or (any(present) and launcher is not _SLURM):
            return launcher
    return None


def _read_local(launcher: _Launcher | None) -> tuple[int, int]:
    if launcher is None:
        return 0, 1
    rank = _read_number(launcher.local_rank) or 0
    size = next(
        (_read_number(name, repeated=True) for name in launcher.local_size if name in os.environ),
        None,
    )
    # SLURM's first number may be that of a machine with fewer tasks
    return rank, max(size or 1, rank + 1)


def _read_number(name: str, *, repeated: bool = False) -> int | None:
    """Reads a variable as a number; `repeated` allows SLURM's lists too, as in "2(x3),1": the
    first counts.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+)(\(x\d+\))?(,.*)?" if repeated else r"\s*(\d+)\s*", value)
    if match is None:
        raise ConfigError(
            f"the environment variable {name}={value!r} is not a number; pass rank= and "
            "world_size= instead"
        )
    return int(match[1])


def _process_group() -> tuple[int, int] | None:
    """Asks torch.distributed, but does not import it: nobody can have initialised what nobody
    has imported.
    """
    dist = sys.modules.get("torch.distributed")
    is_initialised = dist is not None and dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if dist is not None and is_initialised else None


def _pair(rank_name: str, rank: int | None, size_name: str, size: int | None) -> tuple[int, int]:
    if rank is None or size is None:
        given, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
        raise ConfigError(
            f"{rank_name} and {size_name} belong together: {given} is given without {missing}"
        )
    if not 0 <= rank < size:
        raise ConfigError(
            f"{rank_name} must be in [0, {size_name}), got {rank_name}={rank} with "
            f"{size_name}={size}"
        )
    return rank, size
