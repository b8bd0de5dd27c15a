"""What a run did between two metrics lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.distill_loss import DistillStats
from .ranks import sum_over_ranks

PHASES = ("data", "forward", "backward", "step")
SUMS = ("weight", "rows", "loss", "cross", "kl", "acceptance", "agreement", "outside")


class Window:
    """What happened since the last metrics line, or since a resume after it. Sums stay on the
    device until they are asked for."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.steps, self.device = steps, device
        self.norm = 0.0
        self.restart()

    def restart(self) -> None:
        self.sums = torch.zeros(len(SUMS), self.steps, dtype=torch.float64, device=self.device)
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.tokens = 0
        self.began = time.perf_counter()

    def forget_time(self) -> None:
        """Leave validation and checkpointing out of tokens per second."""
        self.began = time.perf_counter() - sum(self.seconds.values())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to a phase. On a GPU these are the host's, which runs ahead of
        the device."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def add(self, stats: DistillStats) -> None:
        part = torch.stack([getattr(stats, name).double() for name in SUMS])
        self.sums[:, : part.shape[1]] += part

    def summary(self) -> dict[str, Any]:
        """Figures over all ranks; lists are per unroll step. All ranks must call it."""
        sums = dict(zip(SUMS, sum_over_ranks(self.sums).cpu(), strict=True))
        rows = sums["rows"].clamp(min=1)
        elapsed = max(time.perf_counter() - self.began, 1e-9)
        weight = sums["weight"].sum().clamp(min=1e-30)
        outside = {}
        if bool(sums["outside"].any()):  # measured, see train.loss.measure_outside
            outside["mass_outside_draft_vocabulary"] = (sums["outside"] / rows).tolist()
        return {
            "loss": float(sums["loss"].sum() / weight),
            "cross_entropy": float(sums["cross"].sum() / weight),
            "agreement": (sums["agreement"] / rows).tolist(),
            "kl": (sums["kl"] / rows).tolist(),
            "expected_acceptance": (sums["acceptance"] / rows).tolist(),
            **outside,
            "grad_norm": self.norm,
            "tokens": self.tokens,
            "supervised": int(sums["rows"][0]),
            "tokens_per_second": self.tokens / elapsed,
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
        }
