"""Which trainings docs/comparisons.md sets side by side: the runs of each phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..kernels.losses import LossConfig
from ..models.heads import HeadConfig, InitConfig, NormConfig

NONE = NormConfig(embedding=False, hidden=False, attention_input=False, output=False)
NORMS = {
    "published": NONE,
    **{
        field.name: dataclasses.replace(NONE, **{field.name: True})
        for field in dataclasses.fields(NormConfig)
    },
    "all": NormConfig(),
}
STARTS = {
    "target": InitConfig(),
    "random": InitConfig(layer="random", projection="random"),
}
RATES = (2e-3, 5e-4, 6e-3)
SHORT = {"steps": 1, "max_steps": 80}
LONG = {"steps": 3, "max_steps": 160, "unroll_warmup": 50}
LOSSES = ("ce", "tv", "lk-lambda")
SIZES = ((125_000, 1), (250_000, 1), (500_000, 1), (500_000, 4))
"""Tokens of the phase `data`, and how often they are read."""


@dataclass(frozen=True)
class Run:
    """One training. train: what differs from `Bench.train`'s settings. answers: see `Bench.source`.
    kept: whether its head is written, for the engine. tokens: how many of the source's first
    tokens are there; they are read `epochs` times, in the first tenth with one step alone."""

    name: str
    head: HeadConfig
    train: dict[str, Any]
    answers: str = "found"
    kept: bool = True
    tokens: int | None = None
    epochs: int = 1


def runs(phase: str, done: list[dict[str, Any]]) -> Iterator[Run]:
    """The runs of a phase; `done` are the lines of results.jsonl, from which `norms` takes each
    choice's best setting."""
    mtp = HeadConfig(kind="mtp")
    if phase == "select":
        for rate in RATES:
            for start, init in STARTS.items():
                for norms, chosen in NORMS.items():
                    head = HeadConfig(kind="eagle", norms=chosen, init=init)
                    name = f"sel-{norms}-{start}-{rate}"
                    yield Run(name, head, {**SHORT, "lr": rate}, kept=False)
    elif phase == "norms":
        for norms, chosen in NORMS.items():
            start, rate = best_setting(norms, done)
            head = HeadConfig(kind="eagle", norms=chosen, init=STARTS[start])
            yield Run(f"abl-{norms}", head, {**LONG, "lr": rate})
    elif phase == "families":
        alone = {**LONG, "unroll_warmup": 0}
        yield Run("fam-mtp", mtp, LONG)
        yield Run("fam-mtp-modules", HeadConfig(kind="mtp", modules=3), alone)
        yield Run("fam-eagle3", HeadConfig(kind="eagle3"), LONG)
        yield Run("fam-medusa", HeadConfig(kind="medusa", modules=3, norms=NONE), alone)
    elif phase == "context":
        for context, steps in (("causal", 3), ("engine", 5), ("causal", 5)):  # engine, 3: fam-mtp
            settings = {**LONG, "steps": steps, "context": context}
            yield Run(f"ctx-{context}-{steps}", mtp, settings)
    elif phase == "losses":
        for kind in LOSSES:
            yield Run(f"loss-{kind}", mtp, {**LONG, "loss": LossConfig(kind=kind)})
    elif phase == "answers":
        for answers in ("equal", "regenerated"):
            yield Run(f"ans-{answers}", mtp, LONG, answers=answers)
    elif phase == "data":
        for tokens, epochs in SIZES:
            name = f"data-{tokens // 1000}k-x{epochs}"
            eagle3 = HeadConfig(kind="eagle3")
            yield Run(name, eagle3, {"steps": 3}, tokens=tokens, epochs=epochs)
    else:
        raise ValueError(
            f"phase {phase!r}: choose select, norms, families, context, losses, "
            "answers, data, accept, trees, lengths or page"
        )


def best_setting(norms: str, done: list[dict[str, Any]]) -> tuple[str, float]:
    """Start and rate of the lowest held-out loss among the short runs of a choice of norms."""
    tried = [r for r in done if r["name"].startswith(f"sel-{norms}-") and "figures" in r]
    if len(tried) < len(STARTS) * len(RATES):
        raise ValueError(f"{norms}: {len(tried)} of its short runs are done; run `select` first")
    best = min(tried, key=lambda record: record["figures"]["loss"])
    return best["name"].split("-")[2], best["train"]["lr"]
