"""Running a head on real rows, to say what it was trained for if not for what it is given.

    agreement  the head's choice against the target's at steps 0 and 1, the text's own tokens fed
    shift      against the target's choice one place earlier and later: the right one must win;
               medusa: no other block must say at step 0 what its first should
    norm       fed the state before the target's final norm instead of after it
    fusion     state and embedding exchanged
    boundaries one higher and one lower than configured (needs the target)
    recycle    the next step fed the state of the other side of the output norm
    validated  agreement against what its run measured when these weights were chosen
    engine     the engine's drafts against the trainer's forward, float32 (parity.py)

Each alternative is run with these very weights. One that does clearly better than what is
configured is what the head was trained for, and a fault of that name: nearer to the target
(trial.py) on the same rows, by far more than chance explains and by enough to matter, and so from
the first step that it touches on; what later steps were never trained to read may suit them better.
Of a head that comes no nearer than a constant even so nothing is concluded: it has learnt nothing
that could tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..data.findings import Finding, faults_of
from ..models.heads import Head, LoadedHead
from .material import Material
from .parity import parity
from .trial import STEPS, Nearness, Said, Trial

_PLACES, _LOGITS = 1024, 1 << 26  # head rows whose logits are worked out; of one step together
_FEW = 24
_MARGIN, _TIMES, _SIGMAS = 0.05, 1.3, 4.0  # in agreement, by which another shift must win
_NATS, _AT_ONCE = 0.03, 2.5  # a step, by which an alternative must win; sigmas at its first step
_ALL = 0.8  # agreement at another shift that only training gives
_NOTHING = 0.005  # agreement that chance reaches
_HALF, _MOST = 0.5, 0.8  # of the agreement that was validated
_TOLERANCE = 5e-3  # of the states' root mean square, float32 or what a GPU makes of it


def _share(hits: Tensor) -> float:
    return float(hits.float().mean())


def probe_head(
    loaded: LoadedHead, material: Material, validated: list[float] | None = None
) -> list[Finding]:
    """Findings on a head that could be read.

    Args:
        material: rows with the boundaries that the head reads. validated: teacher-forced agreement
            by step, as its run measured it on held-out rows; None where nothing was kept.
    """
    read = {*loaded.head.boundaries, int(loaded.head.target_config.num_hidden_layers)}
    lacking = tuple(sorted(read - set(material.states)))
    if lacking and material.more is None:
        told = f"the rows' states lack boundaries {list(lacking)}: not run"
        return [Finding("agreement", "note", told, "dump with this head's boundaries")]
    if lacking and material.more is not None:
        states = {**material.states, **material.more(lacking)}
        material = replace(material, states=states)
    head = loaded.head.to(material.trunk.device).eval()
    rows = _rows(material.batch, material.trunk.vocab_size)
    if len(rows) < _FEW:
        told = f"{len(rows)} supervised head rows are too few to judge by"
        return [Finding("agreement", "note", told)]
    trial = Trial(loaded, material, rows, len(validated) if validated else None)
    base = trial.run(head)
    if base is None:
        told = "its states or logits are not finite"
        return [Finding("agreement", "fault", told, "lower train.lr; keep the head's norms")]
    others = _judged([_shift(base, trial), *_alternatives(head, material, trial, base)])
    if not faults_of(others):
        others += _validated(base, validated)
    # What is found there explains why it agrees in nothing.
    found = [] if faults_of(others) else [_agreement(base, len(rows))]
    return [*found, *others, _engine(head, loaded, material)]


def _rows(batch: PackedBatch, vocabulary: int) -> Tensor:
    """Head rows with a teacher one place on and one before, evenly spread, at most `_PLACES` and
    fewer of a large vocabulary."""
    rows = batch.chains(2)[1].nonzero()[:, 0]
    stride = max(1, -(-len(rows) // min(_PLACES, _LOGITS // vocabulary)))
    return rows[::stride]


class _Other(NamedTuple):
    """An alternative beside what is configured, on the same rows, and the words for both.

    Attributes:
        wins: whether the head was trained for it, by all appearance. sigmas: what it gains, in
            standard errors. told, fault, remedy, note: words of a finding.
    """

    check: str
    wins: bool
    sigmas: float
    told: str
    fault: str
    remedy: str
    note: str = ""


def _sigmas(gained: Tensor) -> float:
    """A mean gain in standard errors of its rows (of hits: McNemar's test)."""
    gained = gained.double()
    return float(gained.sum()) / math.sqrt(max(float(gained.square().sum()), 1e-12))


def _judged(others: list[_Other]) -> list[Finding]:
    """Of alternatives that win, the one that wins most clearly is the fault; the others win by the
    same cause. What is wrong at the first step shows in the next, so `recycle` comes last."""
    winning = [one for one in others if one.wins]
    best = max(winning, key=lambda one: (one.check != "recycle", one.sigmas), default=None)
    found = []
    for one in others:
        if one is best:
            found.append(Finding(one.check, "fault", f"{one.fault}: {one.told}", one.remedy))
        else:
            found.append(Finding(one.check, "note" if one.note else "ok", one.told, one.note))
    return found


class _Gain(NamedTuple):
    """What another run gains over some steps of the same rows, nats a step."""

    nats: float
    sigmas: float
    wins: bool


def _gain(base: list[Nearness], other: list[Nearness], trial: Trial) -> _Gain:
    """base, other: the steps to be judged, the first of them that on which the runs part."""
    nats = [two.nats - one.nats for one, two in zip(base, other, strict=True)]
    overlap = [two.overlap - one.overlap for one, two in zip(base, other, strict=True)]
    gained = torch.stack(nats).mean(0)
    sigmas = _sigmas(gained)
    return _Gain(
        _share(gained),
        sigmas,
        sigmas > _SIGMAS
        and _share(gained) > _NATS
        and _sigmas(nats[0]) > _AT_ONCE
        and _share(torch.stack(overlap)) > 0
        and _sigmas(other[0].overlap - trial.constant) > _SIGMAS,
    )


def _shift(base: Said, trial: Trial) -> _Other:
    """A head begins as the target's next token, x_(p+1), and leans there while it has learnt
    little; only one that says hardly anything else was trained to."""
    for number, block in enumerate(base.blocks[1:], 1):
        gain = _gain(base.blocks[:1], [block], trial)
        if gain.wins:
            told = f"block 0 is {-_share(base.blocks[0].nats):.3f} nats from the target's "
            told += f"distribution of x_(p+2), block {number} {-_share(block.nats):.3f} "
            told += f"({gain.sigmas:+.1f} standard errors)"
            remedy = "put its blocks in their order; a trainer that counts otherwise shifts them"
            fault = "its blocks are a step off, or in another order"
            return _Other("shift", True, gain.sigmas, told, fault, remedy)
    before, right, late = _share(base.early), _share(base.right), _share(base.late)
    told = f"agreement by shift -1: {before:.1%}, 0: {right:.1%}, +1: {late:.1%}"
    early = before > max(right, _ALL)
    place = "x_(p+1), which it is fed" if early else "x_(p+3)"
    other, share = (base.early, before) if early else (base.late, late)
    sigmas = _sigmas(other.float() - base.right.float())
    leans = "it still leans to what it began with, the token it is fed: train longer"
    return _Other(
        "shift",
        sigmas > _SIGMAS and share > right + _MARGIN and share > _TIMES * right,
        sigmas,
        told,
        f"row p predicts {place}, not x_(p+2)",
        "its training shifted inputs and teacher otherwise: train it here",
        leans if before > right else "",
    )


def _alternatives(head: Head, material: Material, trial: Trial, base: Said) -> Iterator[_Other]:
    """The head run otherwise than it is configured."""
    config, remedy = head.config, "give its config.json what it was trained with, or train it again"

    def other(check: str, what: str, found: Said | None, steps: slice) -> _Other:
        near = base.near[steps]
        one = sum(_share(step.nats) for step in near) / len(near)
        where = "" if steps.stop == 1 else f" over steps {steps.start or 0} to {trial.steps - 1}"
        told = f"{-one:.3f} nats from the target's distribution{where} as configured, "
        if found is None:
            return _Other(check, False, 0.0, f"{told}not finite {what}", "", remedy)
        gain = _gain(near, found.near[steps], trial)
        told += f"{-one - gain.nats:.3f} {what} ({gain.sigmas:+.1f} standard errors)"
        return _Other(check, gain.wins, gain.sigmas, told, f"trained {what}", remedy)

    first, following, every = slice(0, 1), slice(1, None), slice(0, None)
    if head.recycle.hidden_fed == "post-final-norm":
        found = trial.run(head, raw=True, steps=1)
        yield other("norm", "with the state before the final norm", found, first)
    if head.kind in ("mtp", "eagle"):
        found = trial.run(_reshaped(head, hidden_first=not config.hidden_first), steps=1)
        what = f"with head.hidden_first={_word(not config.hidden_first)}"
        yield other("fusion", what, found, first)
        if config.norms.output and head.num_modules == 1 and trial.steps > 1:
            found = trial.run(_reshaped(head, recycle_raw=not config.recycle_raw))
            what = f"with head.recycle_raw={_word(not config.recycle_raw)}"
            yield other("recycle", what, found, following)
    if head.kind == "eagle3":
        if trial.steps > 1:
            found = trial.run(_reshaped(head, norm_output=not config.norm_output))
            what = f"with head.norm_output={_word(not config.norm_output)}"
            yield other("recycle", what, found, following)
        if material.more is not None:
            layers = int(head.target_config.num_hidden_layers)
            moved = [tuple(k + by for k in head.boundaries) for by in (-1, 1)]
            moved = [ids for ids in moved if ids[0] >= 0 and ids[-1] <= layers]
            lacking = {k for ids in moved for k in ids} - set(material.states)
            further = material.more(tuple(sorted(lacking))) if lacking else {}
            for ids in moved:
                found = trial.run(_reshaped(head, boundaries=ids), further)
                yield other("boundaries", f"on boundaries {list(ids)}", found, every)


def _word(on: bool) -> str:
    return str(on).lower()


def _reshaped(head: Head, **settings: Any) -> Head:
    """The same weights under another configuration."""
    other = type(head)(replace(head.config, **settings), head.target_config, head.draft_vocab_size)
    other.load_state_dict(head.state_dict())
    return other.to(next(head.parameters()).device).eval()


def _agreement(base: Said, count: int) -> Finding:
    told = f"the head chooses the target's token at {_share(base.right):.1%} of {count} head rows"
    told += f", {_share(base.next):.1%} at the second step"
    if _share(base.right) < _NOTHING:
        remedy = "it has learnt nothing, or runs on other inputs than it was trained on"
        return Finding("agreement", "fault", told, remedy)
    return Finding("agreement", "ok", told)


def _validated(base: Said, validated: list[float] | None) -> list[Finding]:
    """Other rows of the same text vary; half of what was validated they do not explain."""
    if not validated:
        return [Finding("validated", "note", "what it agreed with when trained is not known")]
    here, then = _share(base.right), validated[0]
    told = f"agreement {here:.1%} here, {then:.1%} when it was validated"
    error = math.sqrt(then * (1 - then) / len(base.right)) + 1e-3
    remedy = "these are other weights, or another configuration, than those that were validated"
    if here < _HALF * then and then - here > _SIGMAS * error:
        return [Finding("validated", "fault", told, remedy)]
    if here < _MOST * then and then - here > 2 * error:
        return [Finding("validated", "note", f"{told}: lower than rows explain", remedy)]
    return [Finding("validated", "ok", told)]


def _engine(head: Head, loaded: LoadedHead, material: Material) -> Finding:
    """The longest prefix of the first row up to its middle, and a short one."""
    trunk = material.trunk
    end = int(material.batch.starts[1])
    tokens = material.batch.tokens[:end].cpu()
    states = {k: state[:end].to(trunk.device, trunk.dtype) for k, state in material.states.items()}
    gaps: list[float] = []
    sizes = sorted({min(end, 3), min(end, 128), max(2, min(end, 256) // 2)})
    for size in sizes:
        cut = {k: state[:size] for k, state in states.items()}
        gaps += parity(head, loaded.draft_ids, trunk, tokens[:size], cut, STEPS).difference
    worst = max(gaps)
    told = (
        f"{len(gaps)} drafts behind {', '.join(str(n - 1) for n in sizes)} rows: the engine's "
        f"states differ from the trainer's by at most {worst:.2g} of their size (float32)"
    )
    if not all(gap <= _TOLERANCE for gap in gaps):
        remedy = "a fault of this version, which runs something else than it trains: report it"
        return Finding("engine", "fault", told, remedy)
    return Finding("engine", "ok", told)
