"""`draftsmith plan`: what a run will need, before anything is run."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from ..conf.schema import Config
from ..data.rows import Rows
from ..data.store import Store
from ..inference.payoff_plot import draw
from ..inference.plots import png
from ..models.files import atomic_write_bytes, atomic_write_json
from ..models.heads import HeadConfig, head_class, training_boundaries
from ..models.latent import latent_width
from ..models.shape import TargetShape
from ..models.target import torch_dtype
from ..train import forecast as facts
from ..train.config import TrainConfig
from ..train.forecast import GB, Memory
from ..train.trace import Step, trace_step
from .app import Invocation, Verb
from .artifacts import Artifacts
from .plan_device import Device, device_of
from .plan_measured import beside
from .plan_page import pays, tables
from .plan_payoff import Drafting, drafting, find_report

_SHAREGPT = 25_233_764  # tokens, docs/results.md
_LAYER_TOKENS = 256


@dataclass(frozen=True)
class Forecast:
    """Everything `plan` says.

    Attributes:
        memory: by command; `validate` where the engine runs in training. budget: bytes that a rank
            may hold. disk: bytes by what. seconds: by command. facts: sizes and assumptions.
        too_much: commands whose memory passes the budget. remedies: settings that would fit.
        drafting: when drafting pays; None without a report.
    """

    device: Device
    memory: dict[str, Memory]
    budget: float
    disk: dict[str, int]
    free: int | None
    seconds: dict[str, float]
    facts: dict[str, Any]
    too_much: tuple[str, ...]
    remedies: tuple[str, ...]
    drafting: Drafting | None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        memory = {
            name: {"moment": found.moment, "total": found.total, "parts": found.parts}
            for name, found in self.memory.items()
        }
        drafting = self.drafting.to_json() if self.drafting else None
        told = {**dataclasses.asdict(self), "memory": memory, "drafting": drafting}
        return {"kind": "forecast", **told}


def run(config: Config, invocation: Invocation) -> None:
    """Forecast, print, write WORK/plan.json and, where a report says how much is kept,
    WORK/payoff.png.

    Raises:
        ValueError: a command's memory passes that of a device; names it and what would fit.
    """
    found = forecast(config)
    artifacts = Artifacts.of(config)
    measured = beside(found, artifacts)
    for table in tables(found, measured):
        invocation.console.print(table)
        invocation.say("")
    artifacts.work.mkdir(parents=True, exist_ok=True)
    told = [dataclasses.asdict(one) for one in measured]
    atomic_write_json(artifacts.plan, found.to_json() | {"measured": told})
    wrote = {"forecast": artifacts.plan}
    if found.drafting:
        for line in pays(found.drafting):
            invocation.say(line)
        wrote["payoff"] = artifacts.plan.with_name("payoff.png")
        figure = draw(found.drafting.payoffs, found.drafting.told.split(":")[0])
        atomic_write_bytes(wrote["payoff"], png(figure))
    invocation.wrote(**wrote)
    if found.free is not None and found.disk.get("cache", 0) > found.free:
        invocation.say(
            f"[yellow]the cache is forecast at {found.disk['cache'] / GB:.1f} GB, the disk has "
            f"{found.free / GB:.1f} GB free[/]; {_smaller_cache(found, config)}"
        )
    if found.too_much:
        needs = ", ".join(
            f"{name} {found.memory[name].total / GB:.1f} GB" for name in found.too_much
        )
        remedy = "; ".join(found.remedies) or "a device with more memory"
        raise ValueError(
            f"forecast: {needs} of {found.budget / GB:.1f} GB that a rank on {found.device.name} "
            f"may hold ({1 - config.plan.headroom:.0%} of its memory). What would fit: {remedy}"
        )


def forecast(config: Config) -> Forecast:
    """The whole forecast of a configuration; reads no weight and computes nothing but shapes.

    Raises:
        ValueError: the target's shape is not known, or the head does not fit it.
    """
    shape = TargetShape.of(config.target)
    device = device_of(config)
    tokens, row_tokens, heldout = _rows(config)
    train, plan = config.train, config.plan
    online = config.data.source == "online"
    read = training_boundaries(config.head, shape.num_layers)
    kept = config.data.dump.boundaries or read
    itemsize = torch_dtype(config.target.dtype).itemsize
    layer = trace_step(
        HeadConfig(),
        shape.config,
        TrainConfig(steps=1, tokens_per_batch=_LAYER_TOKENS, precision="fp32"),
        row_tokens=_LAYER_TOKENS,
    )
    step = trace_step(config.head, shape.config, train, row_tokens=row_tokens)

    def of_training(settings: TrainConfig, step: Step) -> Memory:
        memory = facts.training_memory(
            settings,
            shape,
            step,
            ranks=plan.gpus,
            gpu=device.gpu,
            boundaries=len(read if online else kept),
            heldout=heldout,
        )
        if not online or config.data.online.target_ranks:
            return memory
        target = facts.target_memory(shape, itemsize, gpu=device.gpu)
        return Memory(memory.moment, memory.parts | target)

    budget = device.memory * (1 - plan.headroom)
    memory: dict[str, Memory] = {}
    if not online or config.data.online.target_ranks:
        memory["dump"] = facts.dump_memory(
            shape,
            layer,
            itemsize,
            boundaries=len(kept),
            tokens_per_batch=config.data.dump.tokens_per_batch,
            layer_tokens=_LAYER_TOKENS,
            shard_bytes=min(tokens, config.data.dump.shard_tokens)
            * facts.cache_bytes(shape, len(kept), 1)[config.data.dump.dtype],
            gpu=device.gpu,
        )
    memory["train"] = of_training(train, step)
    latents = latent_width(shape.config) if config.target.layers != "transformers" else None
    if config.validate.engine and train.validate_every and heldout:
        memory["validate"] = facts.validation_memory(
            shape,
            config.engine,
            step,
            memory["train"],
            itemsize,
            layers=1 if head_class(config.head.kind).kind != "medusa" else 0,
            key_width=latents or layer.key_width,
            gpu=device.gpu,
        )
    too_much = tuple(name for name, found in memory.items() if found.total > budget)
    remedies = []
    if "train" in too_much:
        remedies += _remedies(config, shape, step, row_tokens, budget, of_training)
    if "validate" in too_much:
        remedies.append("validate.engine=false")
    if "dump" in too_much:
        remedies.append(
            "for dump, one process with target.spread=true (layers over all cards, then memory, "
            "then disk: slower), or a device that holds the whole target"
        )
    dump_rate = plan.dump_rate or device.flops * device.mfu / facts.dump_flops(
        shape, layer.query_width, row_tokens
    )
    work = facts.train_flops(train, shape, step, plan.supervised)
    own = train.max_steps * train.accumulation * train.tokens_per_batch
    train_seconds = own / plan.train_rate if plan.train_rate else work / (device.flops * device.mfu)
    caches = facts.cache_bytes(shape, len(kept), tokens + heldout)
    whole = 4 * step.parameters
    disk = {} if online else {"cache": caches[config.data.dump.dtype]}
    disk |= {
        **({} if online else {f"cache as {name}": size for name, size in caches.items()}),
        "checkpoints": 3 * whole * (train.keep_checkpoints + 1),
        "head": whole,
    }
    pays_off, report = None, find_report(config)
    if report is not None:
        reached = device.flops * device.mfu
        pays_off = drafting(
            config, report, shape, step, latents or layer.key_width, device.key, reached
        )
    seconds = {"train": train_seconds}
    if not online:
        seconds = {"dump": (tokens + heldout) / dump_rate / plan.gpus, **seconds}
    return Forecast(
        device=device,
        memory=memory,
        budget=budget,
        disk=disk,
        free=None if online else Store(Artifacts.of(config).cache).free_bytes(),
        seconds=seconds,
        facts={
            "target": config.target.source,
            "shape": shape.where,
            "target_parameters": shape.parameters,
            "head": config.head.kind,
            "head_parameters": step.parameters,
            "gpus": plan.gpus,
            "boundaries": len(kept),
            "tokens": tokens,
            "row_tokens": row_tokens,
            "supervised": plan.supervised,
            "tokens_per_step": train.tokens_per_batch * train.accumulation * plan.gpus,
            "epochs": own * plan.gpus / tokens,
            "train_flops": work,
            "train_tokens_per_second": own / train_seconds,
            "dump_tokens_per_second": dump_rate,
        },
        too_much=too_much,
        remedies=tuple(remedies),
        drafting=pays_off,
    )


def _remedies(
    config: Config,
    shape: TargetShape,
    step: Step,
    row_tokens: int,
    budget: float,
    memory: Any,
) -> list[str]:
    """Settings of training that would fit: each alone, and where none does, stage 3 with shorter
    batches."""
    train = config.train

    def fits(**changes: Any) -> bool:
        changed = dataclasses.replace(train, **changes)
        traced = step
        if {"tokens_per_batch", "draft_vocab_size"} & set(changes):
            traced = trace_step(config.head, shape.config, changed, row_tokens=row_tokens)
        return memory(changed, traced).total <= budget

    def shorter(**changes: Any) -> str | None:
        tokens = train.tokens_per_batch // 2
        while tokens >= 512:
            more = train.accumulation * train.tokens_per_batch // tokens
            if fits(tokens_per_batch=tokens, accumulation=more, **changes):
                return f"train.tokens_per_batch={tokens} train.accumulation={more}"
            tokens //= 2
        return None

    found = []
    stages = range(train.zero_stage + 1, 4) if config.plan.gpus > 1 else ()
    for stage in stages:
        if fits(zero_stage=stage):
            found.append(f"train.zero_stage={stage}")
            break
    if words := shorter():
        found.append(words)
    if (train.draft_vocab_size or shape.vocab_size) > 32768 and fits(draft_vocab_size=32768):
        found.append("train.draft_vocab_size=32768")
    if not found and stages and (words := shorter(zero_stage=3)):
        found.append(f"train.zero_stage=3 {words}")
    return found


def _smaller_cache(found: Forecast, config: Config) -> str:
    assert found.free is not None
    if found.disk["cache as fp8"] <= found.free and config.data.dump.dtype == "bf16":
        return "data.dump.dtype=fp8 would fit"
    share = found.free / found.disk["cache"]
    return f"data.dump.max_tokens={int(found.facts['tokens'] * share * 0.95)} would fit"


def _rows(config: Config) -> tuple[int, int, int]:
    """Tokens of the training rows, of one row, and of all held-out rows."""
    plan, dump = config.plan, config.data.dump
    limit = min(config.data.rows.max_length or 2048, config.train.tokens_per_batch, 2048)
    folder = Artifacts.of(config).learned
    if (folder / "manifest.json").exists():
        rows = Rows.open(folder, verify=False)
        total, one = int(rows.lengths.sum()), int(rows.lengths.mean())
        heldout = int(Rows.open(folder, "heldout", verify=False).lengths.sum())
        total = min(total, dump.max_tokens or total)
    else:
        total, one = dump.max_tokens or _SHAREGPT, limit
        heldout = config.data.rows.holdout * limit
    return plan.tokens or total, plan.row_tokens or one, heldout


VERB = Verb(
    name="plan",
    task=run,
    reads=(
        "the target's config.json (or target.shape); WORK/rows, the files of a finished run and "
        "WORK/report.json if there"
    ),
    writes=(
        "WORK/plan.json, WORK/payoff.png; exit code 2 where a rank would need more memory than it "
        "has"
    ),
    sections=("work", "plan", "target", "head", "train", "data.dump", "data.source"),
    examples=(
        "draftsmith plan",
        "draftsmith plan experiment=llama-3.1-8b train=h100x8",
        "draftsmith plan target=qwen3-8b head=eagle3 plan.device=a100 plan.tokens=100000000",
        "draftsmith plan experiment=llama-3.1-8b plan.device=h100 plan.report=work/default",
    ),
    kept="nothing was written",
)


def main() -> int:
    """`python -m draftsmith.scripts.plan`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
