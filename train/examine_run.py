"""What `doctor` asks of a training run's folder (finished, stopped or failed) and of an acceptance
report.

    files        metrics.jsonl can be read
    inputs       the states at hand are those that the run learned from
    loss         finite, and lower at the end than at the beginning
    divergence   the loss did not go up, at the first steps or later
    teaching     batches in which nothing was supervised
    checkpoints  the newest is whole and undamaged
    drafted      the engine drafted at all
    accepted     it accepts what teacher-forced agreement promises
    text         greedy text with drafts is that without them
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from ..data.findings import Finding
from ..inference.tables import BASELINES
from ..models.files import read_json
from .checkpoint import Checkpoints, damage
from .metrics import read_metrics

_LINES = 6  # training lines from which a course can be told
_LOWER = 0.98  # of the loss at the beginning
_LEFT = 1.3  # times the lowest loss
_AGREES, _ACCEPTS = 0.1, 0.02


def examine_run(folder: Path, cache_key: str | None = None) -> list[Finding]:
    """Findings on WORK/train.

    Args:
        cache_key: of the cache at hand, None where there is none.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = list(read_metrics(path)) if path.exists() else []
    except ValueError as error:
        return [Finding("files", "fault", str(error), "remove the damaged line")]
    if not lines:
        told = f"{path} holds no line: no step was logged"
        return [Finding("files", "note", told, "look at what the command said at its end")]
    found = [Finding("files", "ok", f"metrics.jsonl: {len(lines)} lines to step {_step(lines)}")]
    if cache_key is not None and (folder / "run.json").exists():
        found.append(_inputs(read_json(folder / "run.json")["identity"], cache_key))
    trained = [line for line in lines if line["kind"] == "train"]
    found += [*_loss(trained), _teaching(trained), _checkpoints(folder)]
    measured = [line for line in lines if "acceptance" in line]
    if measured:
        last = measured[-1]
        runs = [
            run for sets in last["acceptance"].get("runs", {}).values() for run in sets.values()
        ]
        found += _acceptance(runs, last["agreement"][0], f"validation of step {last['step']}")
    return found


def examine_report(report: dict[str, Any], agreement: float | None) -> list[Finding]:
    """Findings on report.json.

    Args:
        agreement: teacher-forced, of step 0, where the run measured it.
    """
    runs = [run for run in report["runs"] if run["drafter"] not in BASELINES]
    if not runs:
        return [Finding("drafted", "note", "the report measured no head")]
    found = _acceptance(runs, agreement, f"{len(runs)} measurements of the report")
    differing = [run for run in report["runs"] if run.get("identical_to_plain") is False]
    told = f"{len(differing)} of {len(report['runs'])} measurements differ from plain decoding by "
    if differing:
        names = ", ".join(f"{run['drafter']} on {run['prompts']}" for run in differing)
        remedy = "report.json's first_differences names each place; evaluate.proof=float32 repeats"
        told = f"{told}more than rounding ({names})"
        return [*found, Finding("text", "fault", told, f"{remedy} it without rounding")]
    return [*found, Finding("text", "ok", f"{told}more than rounding")]


def _step(lines: list[dict[str, Any]]) -> int:
    return max(line["step"] for line in lines)


def _inputs(identity: dict[str, Any], cache_key: str) -> Finding:
    learned = identity.get("cache")
    if learned is None:
        return Finding("inputs", "ok", "the target made the states while training")
    told = f"the run learned from cache {learned[:12]}, at hand is {cache_key[:12]}"
    if learned != cache_key:
        remedy = "train anew (overwrite=true), or name the cache it learned from"
        return Finding("inputs", "fault", told, remedy)
    return Finding("inputs", "ok", told)


def _loss(lines: list[dict[str, Any]]) -> list[Finding]:
    """`loss` and `divergence`, of medians over the first and the last tenth (a line at least)."""
    losses = [line["loss"] for line in lines]
    bad = [line["step"] for line in lines if not _finite(line["loss"], line["grad_norm"])]
    if bad:
        told = f"the loss or its gradient is not finite at step {bad[0]} ({len(bad)} lines)"
        remedy = "lower train.lr; check the rows' states (the cache's `values`)"
        return [Finding("loss", "fault", told, remedy)]
    if len(losses) < _LINES:
        return [Finding("loss", "note", f"{len(losses)} training lines: too few to judge a course")]
    size = max(1, len(losses) // 10)
    first, last = median(losses[:size]), median(losses[-size:])
    lowest = min(median(losses[place : place + 3]) for place in range(len(losses) - 2))
    agreed = [line["agreement"][0] for line in lines]
    began, ended = median(agreed[:size]), median(agreed[-size:])
    told = (
        f"{first:.3f} at the beginning, {last:.3f} at the end of {lines[-1]['step']:,} steps; "
        f"agreement with the target {began:.1%} to {ended:.1%}"
    )
    left = last > _LEFT * lowest and ended < max(agreed) / 2
    if last > _LEFT * first or left:
        peak = max(range(len(losses)), key=losses.__getitem__)
        told = f"it went up to {losses[peak]:.3f} at step {lines[peak]['step']}: {told}"
        remedy = "lower train.lr, raise train.warmup_steps, keep the norms (head.norms.*=true)"
        return [Finding("divergence", "fault", told, remedy)]
    if last > _LOWER * first and ended < began + 0.01:
        rates = [line.get("lr", 0.0) for line in lines]
        told = f"it does not fall: {told}; learning rate {min(rates):.2g} to {max(rates):.2g}"
        remedy = "another train.lr; a head of which nothing moves shows as untrained"
        return [Finding("loss", "fault", told, remedy)]
    highest = f"at most {max(losses):.3f}, {max(losses) / first:.2f} times its beginning"
    return [Finding("loss", "ok", told), Finding("divergence", "ok", highest)]


def _teaching(lines: list[dict[str, Any]]) -> Finding:
    supervised = sum(line["supervised"] for line in lines)
    tokens = sum(line["tokens"] for line in lines)
    idle = sum(line["unsupervised_batches"] for line in lines)
    told = f"{supervised:,} of {tokens:,} tokens taught, {idle:,} batches taught nothing"
    if not supervised:
        return Finding("teaching", "fault", told, "prepare again: no answer is marked")
    return Finding("teaching", "ok", told)


def _checkpoints(folder: Path) -> Finding:
    try:
        whole = Checkpoints(folder / "checkpoints", 1).whole()
    except ValueError as error:
        return Finding("checkpoints", "fault", str(error), "resume with the version that wrote it")
    halves = [
        path.name
        for path in sorted((folder / "checkpoints").glob("step-*"))
        if not (path / "complete.json").exists()
    ]
    beside = f"; {', '.join(halves)} is half written and never loaded" if halves else ""
    if not whole:
        return Finding("checkpoints", "note", f"none is whole{beside}")
    fault = damage(whole[-1].folder)
    if fault is not None:
        remedy = "delete that folder; the run goes on from the one before it"
        return Finding("checkpoints", "fault", f"{whole[-1].folder.name}: {fault}", remedy)
    return Finding("checkpoints", "ok", f"{whole[-1].folder.name} is whole{beside}")


def _acceptance(runs: list[dict[str, Any]], agreement: float | None, of: str) -> list[Finding]:
    """`drafted` and `accepted` over measurements of one head, pooled.

    Tokens per target call of exactly 1 mean that nothing was drafted, or that nothing drafted was
    accepted: the counts tell which.
    """
    calls = sum(run["target_calls"] for run in runs)
    drafts = sum(run["num_drafts"] + run["cut_drafts"] for run in runs)
    proposed = sum(run["num_drafts"] for run in runs)
    kept = sum(run["accepted_per_position"][0] for run in runs if run["accepted_per_position"])
    told = f"{of}: {drafts:,} drafts in {calls:,} target calls"
    if calls and not drafts:
        remedy = "engine.draft_tokens must be 1 or more, and the head's folder the right one"
        return [Finding("drafted", "fault", told, remedy)]
    found = [Finding("drafted", "ok", told)]
    if not proposed:
        return [*found, Finding("accepted", "note", "no draft went to its end: nothing to count")]
    share = kept / proposed
    told = f"{share:.1%} of {proposed:,} first drafts accepted"
    if agreement is not None:
        told += f", teacher-forced agreement is {agreement:.1%}"
    promised = agreement is not None and agreement >= _AGREES
    if not kept or (promised and share < _ACCEPTS):
        remedy = "the head does not run as it was trained: see its own checks (shift, norm, engine)"
        return [*found, Finding("accepted", "fault", told, remedy)]
    return [*found, Finding("accepted", "ok", told)]


def _finite(*values: float | None) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)
