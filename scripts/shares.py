"""Which share of a command's work a process takes: as a launcher says, or as Ray hands it out."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..conf.schema import Config, RayConfig
from ..models.target import torch_device
from .app import Invocation

Work = Callable[[Config, Invocation, int, int], None]
"""Does something for the share (number, of how many) of a configuration's work."""


def launched(environment: Mapping[str, str]) -> dict[str, int]:
    """rank and world_size as torchrun or srun announces them; those of a process alone else."""
    # SLURM_NTASKS stands in a batch script, too, which is one process: a step has its own count
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if rank in environment and size in environment:
            return {"rank": int(environment[rank]), "world_size": int(environment[size])}
    return {"rank": 0, "world_size": 1}


def this_share(config: Config) -> dict[str, int]:
    """`launched` for this process.

    Raises:
        ValueError: several ranks would each lay their target over all devices.
    """
    share = launched(os.environ)
    if config.target.spread and share["world_size"] > 1:
        raise ValueError(
            f"target.spread=true on {share['world_size']} ranks: one process lays the layers over "
            "all devices; start the command without a launcher"
        )
    return share


def local_rank(environment: Mapping[str, str]) -> int:
    """Which GPU of this machine."""
    return int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))


def take_gpu(config: Config) -> None:
    """Make this process's GPU the current one; on a CPU nothing."""
    if torch_device(config.target.device).type == "cuda":
        torch.cuda.set_device(local_rank(os.environ))


def over_ray(config: Config, invocation: Invocation, share: Work, finish: Work) -> None:
    """Do the `config.ray.workers` shares on the workers of a Ray cluster, then `finish`, as share
    0, on one of them; what they say is said here.

    The share of a worker that is lost begins again on another one, three times by Ray's default;
    what it had written is found there. Both functions are those of a module, and paths mean the
    same on every machine.

    Raises:
        ValueError: ray is not installed, a launcher runs this process, no such cluster, or a
            worker refused, with its words.
    """
    settings = config.ray
    if launched(os.environ)["world_size"] > 1:
        raise ValueError(
            f"ray.workers={settings.workers} under a launcher of several processes: Ray starts its "
            "own; call `draftsmith` once, without torchrun or srun"
        )
    ray, ours = _joined(settings)
    ray.data.DataContext.get_current().enable_progress_bars = invocation.console.is_terminal
    plain = dataclasses.replace(config, ray=RayConfig())
    about = (plain, invocation.verb, invocation.overrides, invocation.resolved)
    gpus = settings.gpus
    if gpus is None:
        gpus = float("GPU" in ray.cluster_resources())
    count = settings.workers
    needs = {"num_cpus": settings.cpus, "num_gpus": gpus}
    try:
        for work, numbers in ((share, range(count)), (finish, range(1))):
            items = [{"number": number} for number in numbers]
            shares = ray.data.from_items(items, override_num_blocks=len(items))
            given = (work, about, count)
            done = shares.map_batches(_work, fn_args=given, batch_size=None, **needs)
            for line in done.iter_rows():
                name = f"share {line['number'] + 1} of {count}"
                if line["refused"]:
                    raise ValueError(f"{name}: {line['refused']}")
                for said in line["said"].splitlines():
                    invocation.say(escape(f"{name}: {said}" if work is share else said))
    finally:
        if ours:
            ray.shutdown()


def _joined(settings: RayConfig) -> tuple[Any, bool]:
    """The ray module, connected, and whether it was not before."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"ray.workers={settings.workers} needs Ray, which is not installed: pip install "
            "'draftsmith[ray]', or start the shares yourself (docs/scale-out.md)"
        ) from error
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address=settings.address, include_dashboard=False, log_to_driver=False)
    except (ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"ray.address={settings.address}: {error}; start one with `ray start --head`, or leave "
            "it out to use this machine alone"
        ) from error
    return ray, True


def _work(
    batch: dict[str, Any], work: Work, about: tuple[Any, ...], count: int
) -> dict[str, list[Any]]:
    """On a worker: one share, and what it says."""
    config, verb, overrides, resolved = about
    (number,) = map(int, batch["number"])
    text = io.StringIO()
    console = Console(file=text, width=100)
    invocation = Invocation(verb, overrides, resolved, console, one_of_many=True)
    refused = ""
    try:
        work(config, invocation, number, count)
    except ValueError as error:
        refused = str(error)
    return {"number": [number], "said": [text.getvalue()], "refused": [refused]}
