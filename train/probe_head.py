"""Running a head on real rows, to say what it was trained for if not for what it is given.

    agreement  the head's choice against the target's at steps 0 and 1, the text's own tokens fed
    shift      against the target's choice one place earlier and later: the right one must win
    norm       fed the state before the target's final norm instead of after it
    fusion     state and embedding exchanged
    boundaries one higher and one lower than configured (needs the target)
    recycle    the next step fed the state of the other side of the output norm
    validated  agreement against what its run measured when these weights were chosen
    engine     the engine's drafts against the trainer's forward, float32 (parity.py)

Each alternative is run with these very weights. One that agrees far better than what is configured
is what the head was trained for, and a fault of that name.
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
from ..models.trunk import Trunk
from .material import Material
from .parity import parity
from .unroll import UnrollContext, unroll

_PLACES = 512  # head rows whose logits are worked out
_FEW = 24
_MARGIN, _TIMES, _SIGMAS = 0.05, 1.3, 4.0  # by how much an alternative must win
_ALL = 0.8  # agreement at another shift that only training gives
_NOTHING = 0.005  # agreement that chance reaches
_HALF, _MOST = 0.5, 0.8  # of the agreement that was validated
_TOLERANCE = 5e-3  # of the states' root mean square, float32 or what a GPU makes of it
_STEPS = 4


class _Hits(NamedTuple):
    """Which head rows [n] choose as the target does, bool: at step 0 by shift, and at step 1."""

    early: Tensor
    right: Tensor
    late: Tensor
    next: Tensor


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
    rows = _rows(material.batch)
    if len(rows) < _FEW:
        told = f"{len(rows)} supervised head rows are too few to judge by"
        return [Finding("agreement", "note", told)]
    trial = _Trial(loaded, material, rows)
    base = trial.measure(head)
    if base is None:
        told = "what it hands to lm_head is not finite"
        return [Finding("agreement", "fault", told, "lower train.lr; keep the head's norms")]
    others = _judged([_shift(base), *_alternatives(head, material, trial, base)])
    if not faults_of(others):
        others += _validated(base, validated)
    # What is found there explains why it agrees in nothing.
    found = [] if faults_of(others) else [_agreement(base, len(rows))]
    return [*found, *others, _engine(head, loaded, material)]


def _rows(batch: PackedBatch) -> Tensor:
    """Head rows with a teacher one place on and one before, evenly spread, at most `_PLACES`."""
    rows = batch.chains(2)[1].nonzero()[:, 0]
    stride = max(1, -(-len(rows) // _PLACES))
    return rows[::stride]


class _Other(NamedTuple):
    """An alternative: its hits beside those of what is configured, on the same rows, and the words
    for both."""

    check: str
    base: Tensor
    other: Tensor
    told: str
    fault: str
    remedy: str
    note: str = ""

    @property
    def wins(self) -> bool:
        """Whether the head was trained for it, by all appearance: far more rows agree, and more
        than chance explains (McNemar's test on the rows in which the two differ)."""
        base, other = _share(self.base), _share(self.other)
        gained = int((self.other & ~self.base).sum())
        lost = int((self.base & ~self.other).sum())
        clear = gained - lost > _SIGMAS * math.sqrt(max(1, gained + lost))
        return clear and other > base + _MARGIN and other > _TIMES * base


def _judged(others: list[_Other]) -> list[Finding]:
    """Of alternatives that win, the one with the highest agreement is the fault; the others win by
    the same cause."""
    winning = [one for one in others if one.wins]
    best = max(winning, key=lambda one: _share(one.other)) if winning else None
    found = []
    for one in others:
        if one is best:
            found.append(Finding(one.check, "fault", f"{one.fault}: {one.told}", one.remedy))
        else:
            found.append(Finding(one.check, "note" if one.note else "ok", one.told, one.note))
    return found


def _shift(base: _Hits) -> _Other:
    """A head begins as the target's next token, x_(p+1), and leans there while it has learnt
    little; only one that says hardly anything else was trained to."""
    before, right, late = map(_share, base[:3])
    told = f"agreement by shift -1: {before:.1%}, 0: {right:.1%}, +1: {late:.1%}"
    early = before > max(right, _ALL)
    place = "x_(p+1), which it is fed" if early else "x_(p+3)"
    remedy = "its training shifted inputs and teacher otherwise: train it here"
    leans = "it still leans to what it began with, the token it is fed: train longer"
    return _Other(
        "shift",
        base.right,
        base.early if early else base.late,
        told,
        f"row p predicts {place}, not x_(p+2)",
        remedy,
        leans if before > right else "",
    )


def _alternatives(head: Head, material: Material, trial: _Trial, base: _Hits) -> Iterator[_Other]:
    """The head run otherwise than it is configured."""
    config, remedy = head.config, "give its config.json what it was trained with, or train it again"

    def other(check: str, what: str, found: _Hits | None, step: int = 0) -> _Other:
        one = base.next if step else base.right
        two = torch.zeros_like(one) if found is None else (found.next if step else found.right)
        told = f"agreement{' at the second step' if step else ''} {_share(one):.1%} as configured, "
        told += f"{_share(two):.1%} {what}"
        return _Other(check, one, two, told, f"trained {what}", remedy)

    if head.recycle.hidden_fed == "post-final-norm":
        found = trial.measure(head, raw=True)
        yield other("norm", "with the state before the final norm", found)
    if head.kind in ("mtp", "eagle"):
        found = trial.measure(_reshaped(head, hidden_first=not config.hidden_first))
        yield other("fusion", f"with head.hidden_first={_word(not config.hidden_first)}", found)
        if config.norms.output and head.num_modules == 1:
            found = trial.measure(_reshaped(head, recycle_raw=not config.recycle_raw))
            what = f"with head.recycle_raw={_word(not config.recycle_raw)}"
            yield other("recycle", what, found, step=1)
    if head.kind == "eagle3":
        found = trial.measure(_reshaped(head, norm_output=not config.norm_output))
        what = f"with head.norm_output={_word(not config.norm_output)}"
        yield other("recycle", what, found, step=1)
        if material.more is not None:
            layers = int(head.target_config.num_hidden_layers)
            for by in (-1, 1):
                ids = tuple(k + by for k in head.boundaries)
                if ids[0] >= 0 and ids[-1] <= layers:
                    found = trial.measure(_reshaped(head, boundaries=ids), material.more(ids))
                    yield other("boundaries", f"on boundaries {list(ids)}", found)


def _word(on: bool) -> str:
    return str(on).lower()


def _reshaped(head: Head, **settings: Any) -> Head:
    """The same weights under another configuration."""
    other = type(head)(replace(head.config, **settings), head.target_config, head.draft_vocab_size)
    other.load_state_dict(head.state_dict())
    return other.to(next(head.parameters()).device).eval()


class _Trial:
    """Head rows [n], and what the target says one place before, at, and one behind each."""

    def __init__(self, loaded: LoadedHead, material: Material, rows: Tensor) -> None:
        trunk = self.trunk = material.trunk
        self.batch, self.rows = material.batch, rows
        self.ids = None if loaded.draft_ids is None else loaded.draft_ids.to(trunk.device)
        self.states = {
            k: state.to(trunk.device, trunk.dtype) for k, state in material.states.items()
        }
        normed = trunk.norm(self.states[max(self.states)])
        self.teacher = [self._choice(trunk.logits(normed[rows + place])) for place in range(3)]

    @torch.no_grad()
    def measure(
        self, head: Head, further: dict[int, Tensor] | None = None, raw: bool = False
    ) -> _Hits | None:
        """Hits of a head; None where what it drafts is not finite.

        Args:
            further: states of other boundaries. raw: feed the state before the final norm.
        """
        more = {
            k: state.to(self.trunk.device, self.trunk.dtype) for k, state in (further or {}).items()
        }
        steps = min(2, head.max_steps or 2)
        given: Any = _Given(self.trunk) if raw else self.trunk
        drafted = unroll(
            head,
            given,
            self.batch,
            steps,
            states={**self.states, **more},
            context=UnrollContext(self.batch.starts),
        )[:, self.rows]
        if not bool(drafted.isfinite().all()):
            return None
        chosen = [self._drafts(head, drafted[step], step) for step in range(steps)]
        early, right, late = (chosen[0] == one for one in self.teacher)
        return _Hits(early, right, late, chosen[1] == self.teacher[2] if steps > 1 else right)

    def _drafts(self, head: Head, drafted: Tensor, step: int) -> Tensor:
        """Target ids [n] of what lm_head makes of [n, H]; one for all steps, or one for each."""
        if head.lm_head is None:
            columns = self._choice(self.trunk.logits(drafted, self.ids))
        else:
            rows = head.lm_head if head.lm_head.dim() == 2 else head.lm_head[step]
            columns = self._choice(drafted @ rows.T)
        return columns if self.ids is None else self.ids[columns]

    @staticmethod
    def _choice(logits: Tensor) -> Tensor:
        return logits.argmax(-1)


class _Given:
    """A trunk whose final norm the head is not given."""

    def __init__(self, trunk: Trunk) -> None:
        self.embed = trunk.embed
        self.norm = lambda raw: raw


def _agreement(base: _Hits, count: int) -> Finding:
    told = f"the head chooses the target's token at {_share(base.right):.1%} of {count} head rows"
    told += f", {_share(base.next):.1%} at the second step"
    if _share(base.right) < _NOTHING:
        remedy = "it has learnt nothing, or runs on other inputs than it was trained on"
        return Finding("agreement", "fault", told, remedy)
    return Finding("agreement", "ok", told)


def _validated(base: _Hits, validated: list[float] | None) -> list[Finding]:
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
        gaps += parity(head, loaded.draft_ids, trunk, tokens[:size], cut, _STEPS).difference
    worst = max(gaps)
    told = (
        f"{len(gaps)} drafts behind {', '.join(str(n - 1) for n in sizes)} rows: the engine's "
        f"states differ from the trainer's by at most {worst:.2g} of their size (float32)"
    )
    if not all(gap <= _TOLERANCE for gap in gaps):
        remedy = "a fault of this version, which runs something else than it trains: report it"
        return Finding("engine", "fault", told, remedy)
    return Finding("engine", "ok", told)
