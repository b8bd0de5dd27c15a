"""The ranks of a run: one process or many, the same calls."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..models.shard import leave_at_exit

T = TypeVar("T")
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Roles:
    """What the processes of a launch do.

    Attributes:
        rank: of this process in the launch. trainers, servers: how many train, and how many run
            the target for them; trainers come first. server: this one's number among the servers,
            None where it trains. master: host of the launch's rendezvous.
    """

    rank: int
    trainers: int
    servers: int
    server: int | None
    master: str


def adopt_slurm(environment: MutableMapping[str, str]) -> bool:
    """Inside an srun step of several tasks, announce the launch as torchrun would; whether it is
    one. A batch script outside a step has SLURM_NTASKS too, and is one process.

    RANK, WORLD_SIZE, LOCAL_RANK come from Slurm's counts; MASTER_ADDR is the first host of the
    step, MASTER_PORT follows from the job and step numbers. What is set already stays.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return False
    hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    number = int(environment["SLURM_JOB_ID"]) + 97 * int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_ADDR", first_host(hosts))
    environment.setdefault("MASTER_PORT", str(20000 + number % 10000))
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["RANK"] = environment["SLURM_PROCID"]
    return True


def first_host(hosts: str) -> str:
    """The first of a Slurm host list: `gpu[007-012,20],cpu1` -> `gpu007`."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert entry is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry[0])


def set_apart(servers: int) -> Roles:
    """Take the last `servers` processes of the launch out of the training group, which `start`
    forms afterwards from the others.

    Raises:
        ValueError: not launched, or fewer trainers than servers (a server would idle).
    """
    number = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if not servers:
        return Roles(number, world, 0, None, master)
    if dist.is_initialized():
        raise ValueError(
            "data.online.target_ranks: the processes of this launch have their roles already; "
            "launch each run of a sweep by itself"
        )
    trainers = world - servers
    if trainers < servers:
        raise ValueError(
            f"data.online.target_ranks={servers} of {world} processes: at least as many must train "
            f"as run the target; launch {2 * servers} or more (torchrun --nproc-per-node N)"
        )
    if number >= trainers:
        return Roles(number, trainers, servers, number - trainers, master)
    os.environ["WORLD_SIZE"] = str(trainers)
    return Roles(number, trainers, servers, None, master)


def start(device: torch.device) -> None:
    """Join the process group that torchrun or deepspeed announced; alone, form a group of one.

    Goes through DeepSpeed, so that its engine finds the group. A second call does nothing.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" not in os.environ:
        # DeepSpeed asks for this one; RANK would make a child process take itself for a rank.
        os.environ.setdefault("LOCAL_RANK", "0")
        # A store in memory: a port could be taken by another run between its choice and its use.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    import_deepspeed(device).init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False
    )
    leave_at_exit()


def import_deepspeed(device: torch.device) -> Any:
    """The deepspeed module, told which accelerator this run is on (it guesses at import, and
    guesses once)."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's own calls, once a collective: nothing a user of this package could change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with quiet_imports():
        import deepspeed
        import deepspeed.ops

        if device.type == "cpu":
            with _uncompiled():  # imported by every sharded optimiser
                import deepspeed.runtime.zero.muon.muon_optimizer

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On a CPU it would compile a shared-memory all-reduce in C++ for a minute; gloo needs no
    # compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """What is decorated with torch.compile here stays as it is. DeepSpeed's Muon is: its import
    would take seconds, for the compiler's own, and its first step minutes on a CPU."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """DeepSpeed imports torch modules that torch deprecates, some of them as late as its engine is
    made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def rank() -> int:
    """This process's number, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for every rank."""
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, in place; the same on every rank."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def largest_over_ranks(values: Tensor) -> Tensor:
    """The largest of each over all ranks, in place; the same on every rank."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def gather_over_ranks(value: Any) -> list[Any]:
    """Every rank's value, in the order of the ranks; the same on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


class Meeting:
    """Where ranks tell each other what they did, however unequal the work was.

    The collectives of training end a run when one rank keeps the others waiting for minutes
    (DeepSpeed's limit is 10, see DEEPSPEED_TIMEOUT); here they wait a day, in a gloo group of its
    own, and not longer than the processes live. All ranks must make it, and meet equally often.
    """

    def __init__(self) -> None:
        self._group = (
            dist.new_group(backend="gloo", timeout=_PATIENCE) if world_size() > 1 else None
        )

    def share(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; what each of them returned, by rank, on all of them.

        Raises:
            what this rank's `work` raised; ValueError where only another's did, with its words.
        """
        if self._group is None:
            return [work()]
        error: Exception | None = None
        mine: list[Any] = [None, None]
        try:
            mine[0] = work()
        except Exception as caught:  # whatever it is, the others must not wait for this rank
            error, mine[1] = caught, f"{type(caught).__name__}: {caught}"
        everyone: list[Any] = [None] * world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        if error is not None:
            raise error
        for number, (_, fault) in enumerate(everyone):
            if fault is not None:
                raise ValueError(f"rank {number} could not do its part: {fault}")
        return [result for result, _ in everyone]
