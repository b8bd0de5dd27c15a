"""Which processes of a launch train."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from draftsmith.train.ranks import Meeting, adopt_slurm, first_host, set_apart


@pytest.fixture(autouse=True)
def before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles are given before the group is formed; other tests of this process have formed one."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.mark.parametrize(
    ("rank", "server", "world"), [(0, None, "3"), (2, None, "3"), (3, 0, "5"), (4, 1, "5")]
)
def test_the_last_ranks_run_the_target(
    monkeypatch: pytest.MonkeyPatch, rank: int, server: int | None, world: str
) -> None:
    """Of five processes with two target ranks three form the group; the others join none."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "5")
    roles = set_apart(2)
    assert (roles.rank, roles.trainers, roles.servers) == (rank, 3, 2)
    assert roles.server == server and os.environ["WORLD_SIZE"] == world


def test_without_target_ranks_all_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch stays as it is."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert set_apart(0).server is None and os.environ["WORLD_SIZE"] == "2"


def test_launches_that_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, more target ranks than trainers, a second run in one launch: each says what to
    do."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="target_ranks=1 of 1 processes: .* launch 2 or more"):
        set_apart(1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="target_ranks=2 of 3 processes: .* launch 4 or more"):
        set_apart(2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="launch each run of a sweep by itself"):
        set_apart(1)


def test_a_run_alone_announces_no_launch() -> None:
    """A process that it starts afterwards would take itself for a rank of a launch; and its own
    group is gone before the interpreter ends."""
    code = (
        "import atexit, os, torch, torch.distributed as dist; "
        "from draftsmith.train.ranks import start, world_size; "
        "atexit.register(lambda: print('left:', not dist.is_initialized())); "
        "before = dict(os.environ); start(torch.device('cpu')); assert world_size() == 1; "
        "print(sorted(set(os.environ) - set(before)))"
    )
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    bare = {name: value for name, value in os.environ.items() if name not in launch}
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True
    )
    added, left = done.stdout.splitlines()[-2:]
    assert left == "left: True"
    named = {name for name in launch if f"'{name}'" in added}
    assert named <= {"LOCAL_RANK"}, added  # DeepSpeed asks for it


_MEETING = """
import datetime, json, os, sys, time
import torch.distributed as dist
from draftsmith.models.shard import leave_at_exit
from draftsmith.train.ranks import Meeting, rank

dist.init_process_group("gloo")
leave_at_exit()
group = dist.distributed_c10d._get_default_group()
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
meeting = Meeting()

def slowly():
    time.sleep(3 if rank() == 0 else 0)
    return f"of {rank()}"

def fails():
    if rank() == 1:
        raise KeyError("no such prompt")
    return rank()

told = []
try:
    meeting.share(fails)
except Exception as error:
    told.append(f"{type(error).__name__}: {error}")
print(json.dumps([meeting.share(slowly), told]))
"""


@pytest.mark.slow
def test_ranks_meet_however_long_one_takes() -> None:
    """Rank 0 works three times as long as the group's own collectives wait; an error of one rank
    ends the wait of all, who learn whose it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _MEETING],
            env={**env, "RANK": str(number), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert [met for met, _ in found] == [["of 0", "of 1"]] * 2
    assert found[0][1] == ["ValueError: rank 1 could not do its part: KeyError: 'no such prompt'"]
    assert found[1][1] == ["KeyError: 'no such prompt'"]


def test_alone_there_is_nobody_to_meet() -> None:
    """The work's own result and its own error."""
    assert Meeting().share(lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        Meeting().share(lambda: 1 // 0)


STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}


def test_a_slurm_step_is_a_launch() -> None:
    """Task 11 of two nodes is rank 11 of 16 and the fourth of its node; all tasks meet at one
    place, which the user may choose."""
    environment = dict(STEP)
    assert adopt_slurm(environment)
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
    }
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("gpu007", "24808")
    own = STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert adopt_slurm(own)
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("head", "29500")


def test_what_is_no_slurm_launch_stays_as_it_is() -> None:
    """torchrun inside a job, a step of one task, a batch script, no Slurm at all."""
    batch = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}
    for environment in (STEP | {"RANK": "0"}, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, batch, {}):
        before = dict(environment)
        assert not adopt_slurm(environment) and environment == before


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[007-012,20],cpu1", "gpu007"),
        ("a,b[1-2]", "a"),
        ("rack[2-3]n[04,06]-ib,x", "rack2n04-ib"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    """Slurm's own short form, with the zeros it has."""
    assert first_host(hosts) == first
