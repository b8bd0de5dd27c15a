"""What `plan` says of drafting: acceptance from a report, costs from its steps or the device."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..conf.schema import Config
from ..data.store import expanded
from ..inference.payoff import (
    Check,
    Costs,
    MeasuredCosts,
    ModelledCosts,
    Payoff,
    Weights,
    checks,
    payoff,
    rates,
)
from ..inference.tables import main_runs
from ..models.files import read_json
from ..models.shape import TargetShape, routed_experts
from ..models.target import torch_dtype
from ..train.forecast import CARDS, draft_columns
from ..train.trace import Step
from .artifacts import Artifacts

CPU = "cpu"


@dataclass(frozen=True)
class Drafting:
    """Everything `plan` says of it.

    Attributes:
        report: the file. target: its target, as the report names it. payoffs: one for each drafter
            and temperature. told: in words, where the costs come from. checks: what the formula
            gives for the report's own runs, where it holds their steps.
    """

    report: Path
    target: str
    payoffs: list[Payoff]
    told: str
    checks: list[Check]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "report": self.report.as_posix(),
            "target": self.target,
            "costs": self.told,
            "payoffs": [one.to_json() for one in self.payoffs],
            "checks": [{**vars(one), "off": one.off} for one in self.checks],
        }


def find_report(config: Config) -> Path | None:
    """The report asked for; that of the work folder, or None, where none was asked for.

    Raises:
        ValueError: the one asked for is not there.
    """
    asked = config.plan.report
    path = Artifacts.of(config).work if asked is None else Path(expanded(asked))
    path = path / "report.json" if path.is_dir() else path
    if path.is_file():
        return path
    if asked is None:
        return None
    raise ValueError(
        f"plan.report={asked}: no report.json is there; `draftsmith evaluate` writes one"
    )


def drafting(
    config: Config,
    report: Path,
    shape: TargetShape,
    head: Step,
    key_width: int,
    device: str,
    flops: float,
) -> Drafting | None:
    """When drafting pays, by a report; None where that of the work folder has no run of fixed
    chains.

    Args:
        head: the traced training step of the head. key_width: values of keys and values of one
            token and layer of the target. device: `cpu`, or a key of `CARDS`. flops: operations a
            second that one device reaches.
    Raises:
        ValueError: the report that was asked for has no run of fixed chains, or holds no steps
            where they are asked for.
    """
    plan = config.plan
    found = read_json(report)
    runs = [run for run in main_runs(found["runs"]) if run["drafter"] != "untrained"]
    known = rates(runs)
    if not known and plan.report is None:
        return None
    if not known:
        raise ValueError(
            f"{report}: no run drafted chains of one length (no head, trees or engine.adaptive), "
            "so there are no rates by position; evaluate the head with engine.tree.kind=none "
            "engine.adaptive=false"
        )
    here = plan.device == "auto" and _same_kind(found, device)
    wanted = plan.costs == "measured" or (plan.costs == "auto" and here)
    payoffs, told = [], list[str]()
    for one in known:
        longest = plan.longest or one.measured
        measured = MeasuredCosts.of(
            (run for run in runs if run["temperature"] == one.temperature), one.drafter
        )
        costs: Costs
        if wanted and measured.batches:
            costs, batches = measured, measured.batches
            told.append(f"the report's own steps ({runs[0]['dtype']}), medians")
        elif plan.costs == "measured":
            raise ValueError(
                f"{report}: it holds no times of steps, plain and with drafts; evaluate again, or "
                "plan.costs=model"
            )
        elif one.drafter == "draft-lm":  # the model below is that of the head
            continue
        else:
            costs, assumed = _modelled(config, shape, head, key_width, device, flops)
            told.append(assumed)
            batches = plan.batches
        payoffs.append(payoff(one, costs, batches, longest))
    if not payoffs:
        return None
    target = str(found.get("target", {}).get("source", "not named"))
    return Drafting(report, target, payoffs, "; ".join(dict.fromkeys(told)), checks(runs))


def _same_kind(report: dict[str, Any], device: str) -> bool:
    measured_on = str(report.get("target", {}).get("device", CPU)).split(":")[0]
    return (measured_on == CPU) == (device == CPU)


def _modelled(
    config: Config, shape: TargetShape, head: Step, key_width: int, device: str, flops: float
) -> tuple[ModelledCosts, str]:
    """The model of a device, and its assumptions in words."""
    plan, size = config.plan, torch_dtype(config.target.dtype).itemsize
    columns = draft_columns(config.train, shape)
    own = columns * shape.hidden_size if head.own_head else 0
    drafted = (head.parameters - own) / config.head.modules + columns * shape.hidden_size
    dense, experts, share = _read(shape)
    if device == CPU:
        bandwidth, tile, mbu = plan.bandwidth or _cpu_bandwidth(size), plan.tile or 1, 1.0
    else:
        if device not in CARDS and plan.bandwidth is None:
            raise ValueError(
                "plan.device=auto: the memory of this GPU is not known; give plan.bandwidth=…, or "
                "plan.device=h100"
            )
        bandwidth = plan.bandwidth or CARDS[device].bandwidth
        tile, mbu = plan.tile or 64, 0.7
    mbu = plan.mbu or mbu
    keys = plan.context * shape.num_layers * key_width * size
    costs = ModelledCosts(
        target=Weights(
            dense * size, shape.active + shape.embedding, experts * size, share, float(keys)
        ),
        head=Weights(drafted * size, drafted),
        bandwidth=bandwidth * mbu * plan.split,
        flops=flops * plan.split,
        tile=tile,
        overhead=plan.overhead,
    )
    told = (
        f"model: {plan.split} x {mbu:.0%} of {bandwidth / 1e12:.3g} TB/s, "
        f"{flops / 1e12:.3g} T operations/s reached, tiles of {tile} rows, {plan.context} tokens "
        f"of context, {plan.overhead:g} s a pass"
    )
    return costs, told


def _read(shape: TargetShape) -> tuple[float, float, float]:
    """Parameters that every pass reads (lm_head included), those of experts, and the share of
    experts that a row meets."""
    layers = shape.parameters - shape.embedding * (1 if shape.tied else 2)
    idle = layers - shape.active
    if not idle:
        return layers + shape.embedding, 0.0, 1.0
    share = int(shape.config.num_experts_per_tok) / routed_experts(shape.config)
    experts = idle / (1 - share)
    return layers - experts + shape.embedding, experts, share


@functools.cache  # all tables of a plan rest on one figure
def _cpu_bandwidth(itemsize: int) -> float:
    """Bytes a second at which one row meets a matrix too large for the caches; the best of
    five."""
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    matrix = torch.ones(16384, 4096, dtype=dtype)
    row = torch.ones(4096, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        torch.mv(matrix, row)
        best = min(best, time.perf_counter() - began)
    return matrix.numel() * matrix.element_size() / best
