"""The right launcher is believed."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from headrace.errors import ConfigError
from headrace.order import World, detect_world

PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MPI_")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1"}
SLURM = {**STEP, "SLURM_NTASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
NO_SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
NO_SRUN["SLURM_NTASKS_PER_NODE"] = "4"
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
OPENMPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(PREFIXES):
            monkeypatch.delenv(name)


def set_variables(monkeypatch: pytest.MonkeyPatch, *groups: dict[str, str]) -> None:
    for group in groups:
        for name, value in group.items():
            monkeypatch.setenv(name, value)


def numbers(world: World) -> tuple[int, int, int, int]:
    return world.rank, world.world_size, world.local_rank, world.local_world_size


LAUNCHED: list[tuple[list[dict[str, str]], tuple[int, ...], str]] = [
    ([], (0, 1, 0, 1), "single process"),
    ([NO_SRUN], (0, 1, 0, 1), ""),
    ([TORCHRUN], (3, 8, 1, 2), "torchrun"),
    ([SLURM], (5, 6, 1, 2), "SLURM"),
    ([OPENMPI], (2, 4, 0, 2), "OpenMPI"),
    ([MPICH], (1, 3, 1, 3), "MPICH"),
    ([SLURM, TORCHRUN], (3, 8, 1, 2), "torchrun"),
    ([OPENMPI, TORCHRUN], (3, 8, 1, 2), "torchrun"),
    ([SLURM, OPENMPI], (2, 4, 0, 2), "OpenMPI"),  # mpirun starts its daemons by srun
    ([SLURM, MPICH], (1, 3, 1, 3), "MPICH"),
]


def test_the_innermost_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for groups, expected, source in LAUNCHED:
        with monkeypatch.context() as patch:
            set_variables(patch, *groups)
            world = detect_world()
            assert numbers(world) == expected
            assert source in world.source


def test_slurm_says_how_many_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for of_step, of_job, expected in [
        ("4(x2),3", None, 4),
        ("3,4", None, 3),
        (None, "5", 5),
        ("4", "5", 4),
        ("1,4", None, 2),  # this machine runs a task with local rank 1
        (None, None, 2),
    ]:
        with monkeypatch.context() as patch:
            set_variables(patch, STEP)
            if of_step is not None:
                patch.setenv("SLURM_STEP_TASKS_PER_NODE", of_step)
            if of_job is not None:
                patch.setenv("SLURM_NTASKS_PER_NODE", of_job)
            assert detect_world().local_world_size == expected, (of_step, of_job)


def test_arguments_win_and_the_launcher_gives_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_world(1, 2) == World(1, 2, 0, 1, "arguments")
    set_variables(monkeypatch, TORCHRUN)
    assert detect_world(0, 1) == World(0, 1, 1, 2, "arguments")


def test_process_group_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, TORCHRUN)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert detect_world() == World(0, 1, 1, 2, "torch.distributed")
        assert detect_world(1, 2).source == "arguments"
    finally:
        dist.destroy_process_group()
    assert detect_world().rank == 3


def test_bad_worlds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ((0, None), (None, 2), (2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="rank"):
            detect_world(*arguments)
    for group in (TORCHRUN, OPENMPI, MPICH):
        for name in list(group)[:2]:
            with monkeypatch.context() as patch:
                patch.setenv(name, "1")
                with pytest.raises(ConfigError, match=f"{name} is set"):
                    detect_world()
                assert detect_world(0, 1).source == "arguments"
    for name in TORCHRUN:
        for value in ("one", "", "-1", "1.5", "(x3)"):
            with monkeypatch.context() as patch:
                set_variables(patch, TORCHRUN, {name: value})
                with pytest.raises(ConfigError, match=f"{name}='"):
                    detect_world()
