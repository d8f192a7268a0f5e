"""What launchers announce: one row of environment, one expectation."""

import pytest

from mpdp.errors import LaunchError
from mpdp.launch import Announcement, announced, left_over

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ALLOCATION = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}

ROWS = {
    "nothing": ({}, None),
    "open mpi": (OPEN_MPI, Announcement(4, 3, 1, 2, "openmpi")),
    "hydra": (HYDRA, Announcement(2, 1, 1, 2, "hydra")),
    "hydra inside an allocation": ({**ALLOCATION, **HYDRA}, Announcement(2, 1, 1, 2, "hydra")),
    "gforker": ({"PMI_RANK": "0", "PMI_SIZE": "3"}, Announcement(3, 0, None, None, "pmi")),
    "srun --mpi=pmi2": (
        {**ALLOCATION, "SLURM_STEP_ID": "0", "PMI_RANK": "5", "PMI_SIZE": "8", "SLURM_LOCALID": "1"},
        Announcement(8, 5, 1, None, "slurm"),
    ),
    "srun --mpi=pmix": (
        {
            **ALLOCATION,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "6",
            "PMIX_RANK": "5",
            "SLURM_LOCALID": "1",
        },
        Announcement(6, 5, 1, None, "slurm"),
    ),
    "pals": (
        {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PMI_RANK": "2", "PMI_SIZE": "4"},
        Announcement(4, 2, 0, None, "pals"),
    ),
    "allocation without a launcher": (ALLOCATION, None),
    "torchrun": ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, None),
    "a job of one": (
        {**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
        Announcement(1, 0, 0, 1, "hydra"),
    ),
    "hydra inside an Open MPI job of one": (
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", **HYDRA},
        Announcement(2, 1, 1, 2, "hydra"),
    ),
}


@pytest.mark.parametrize("environ, expected", ROWS.values(), ids=ROWS.keys())
def test_announced(environ, expected):
    assert announced(environ) == expected


@pytest.mark.parametrize(
    "environ, message",
    [
        (
            {"PMI_RANK": "x", "PMI_SIZE": "2"},
            "PMI_RANK: expected a number in 0..1 from the launcher, got 'x'",
        ),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "2"},
            "PMI_RANK: expected a number in 0..1 from the launcher, got '2'",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "0"}, "PMI_SIZE: expected a whole number of at least 1"),
        ({**HYDRA, "MPI_LOCALNRANKS": "9"}, r"MPI_LOCALNRANKS: expected a number in 1..2"),
        ({**HYDRA, "MPI_LOCALRANKID": "-1"}, r"MPI_LOCALRANKID: expected a number in 0..1"),
    ],
)
def test_a_broken_variable_is_named(environ, message):
    with pytest.raises(LaunchError, match=message):
        announced(environ)


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, ()),
        (ALLOCATION, ("SLURM_NTASKS=8", "SLURM_PROCID=0")),
        ({"RANK": "3", "WORLD_SIZE": "8"}, ("WORLD_SIZE=8", "RANK=3")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ()),
        ({"WORLD_SIZE": "many", "RANK": "0"}, ()),
        ({**ALLOCATION, **HYDRA}, ()),
    ],
)
def test_left_over(environ, expected):
    assert left_over(environ) == expected
