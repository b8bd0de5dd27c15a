"""Which share of a dump a process takes is read from its launcher."""

from __future__ import annotations

import pytest

from draftsmith.scripts.dump import _launched, _local_rank


@pytest.mark.parametrize(
    ("environment", "expected", "gpu"),
    [
        ({}, (0, 1), 0),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8), 1),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "2"}, (2, 4), 2),
        # a batch script is one process, whatever it was given
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1), 0),
    ],
)
def test_launchers(environment: dict[str, str], expected: tuple[int, int], gpu: int) -> None:
    """torchrun, srun, neither."""
    found = _launched(environment)
    assert (found["rank"], found["world_size"]) == expected
    assert _local_rank(environment) == gpu
