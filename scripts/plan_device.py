"""The device that `draftsmith plan` reckons with: a data sheet's, or this machine, measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from ..conf.schema import Config
from ..train.forecast import CARDS, CPU_MFU, GB


@dataclass(frozen=True)
class Device:
    """One device as the forecast takes it: `cpu`, `cuda` or a key of `CARDS`; bytes, operations a
    second, share of them that is reached, and in words where these come from."""

    key: str
    name: str
    gpu: bool
    memory: float
    flops: float
    mfu: float
    told: str


def device_of(config: Config) -> Device:
    """The device that `plan.device` names, or this machine's.

    Raises:
        ValueError: a GPU whose speed is not known.
    """
    plan = config.plan
    name = plan.device
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            words = torch.cuda.get_device_name().lower()
            name = next((card for card in CARDS if card in words), "cuda")
    if name == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / plan.gpus
        flops, mfu = plan.flops or _cpu_flops(config.train.precision), CPU_MFU
        told, label = "speed of a matrix product, measured now", "this CPU"
    elif name == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        if plan.flops is None:
            raise ValueError(
                f"plan.device=auto: the peak of {torch.cuda.get_device_name()} is not known; give "
                "plan.flops=…, or plan.device=h100"
            )
        flops, mfu, told, label = plan.flops, 0.3, "as given", torch.cuda.get_device_name()
    else:
        card = CARDS[name]
        memory, flops, mfu, label = card.memory, plan.flops or card.flops, card.mfu, card.name
        told = "the card's data sheet"
    memory = plan.device_memory * GB if plan.device_memory else memory
    return Device(name, label, name != "cpu", memory, flops, plan.mfu or mfu, told)


def _cpu_flops(precision: str) -> float:
    """Operations a second of a matrix product of this process, the best of three."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a = torch.ones(1536, 1536, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - began)
    return 2 * 1536**3 / best
