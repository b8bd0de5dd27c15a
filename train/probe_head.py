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

_PLACES = 384  # head rows whose logits are worked out
_FEW = 24
_MARGIN, _TIMES = 0.1, 1.5  # by how much an alternative must win
_ALL = 0.8  # agreement at another shift that only training gives
_NOTHING = 0.005  # agreement that chance reaches
_HALF = 0.5  # of the agreement that was validated
_TOLERANCE = 5e-3  # of the states' root mean square, float32 or what a GPU makes of it
_STEPS = 4


class _Agreement(NamedTuple):
    """Shares of equal choices: of step 0 by shift, and of step 1."""

    early: float
    right: float
    late: float
    next: float


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
    """An alternative: its agreement beside that of what is configured, and the words for both."""

    check: str
    base: float
    other: float
    told: str
    fault: str
    remedy: str
    note: str = ""

    @property
    def wins(self) -> bool:
        """Whether the head was trained for it, by all appearance."""
        return self.other > self.base + _MARGIN and self.other > _TIMES * self.base


def _judged(others: list[_Other]) -> list[Finding]:
    """Of alternatives that win, the one with the highest agreement is the fault; the others win by
    the same cause."""
    winning = [one for one in others if one.wins]
    best = max(winning, key=lambda one: one.other) if winning else None
    found = []
    for one in others:
        if one is best:
            found.append(Finding(one.check, "fault", f"{one.fault}: {one.told}", one.remedy))
        else:
            found.append(Finding(one.check, "note" if one.note else "ok", one.told, one.note))
    return found


def _shift(base: _Agreement) -> _Other:
    """A head begins as the target's next token, x_(p+1), and leans there while it has learnt
    little; only one that says hardly anything else was trained to."""
    told = f"agreement by shift -1: {base.early:.1%}, 0: {base.right:.1%}, +1: {base.late:.1%}"
    leans = base.early > base.right
    early = leans and base.early > _ALL
    place = "x_(p+1), which it is fed" if early else "x_(p+3)"
    remedy = "its training shifted inputs and teacher otherwise: train it here"
    note = (
        "it still leans to what it began with, the token it is fed: train longer" if leans else ""
    )
    best = base.early if early else base.late
    fault = f"row p predicts {place}, not x_(p+2)"
    return _Other("shift", base.right, best, told, fault, remedy, note)


def _alternatives(
    head: Head, material: Material, trial: _Trial, base: _Agreement
) -> Iterator[_Other]:
    """The head run otherwise than it is configured."""
    config, remedy = head.config, "give its config.json what it was trained with, or train it again"

    def other(check: str, what: str, found: _Agreement | None, step: int = 0) -> _Other:
        nothing = _Agreement(0.0, 0.0, 0.0, 0.0) if found is None else found
        one, two = ((each.next if step else each.right) for each in (base, nothing))
        told = (
            f"agreement{' at the second step' if step else ''} {one:.1%} as configured, {two:.1%}"
        )
        return _Other(check, one, two, f"{told} {what}", f"trained {what}", remedy)

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
    ) -> _Agreement | None:
        """Agreement of a head; None where what it drafts is not finite.

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
        chosen = [self._drafts(head, drafted[step]) for step in range(steps)]
        early, right, late = (float((chosen[0] == one).float().mean()) for one in self.teacher)
        after = float((chosen[1] == self.teacher[2]).float().mean()) if steps > 1 else right
        return _Agreement(early, right, late, after)

    def _drafts(self, head: Head, drafted: Tensor) -> Tensor:
        """Target ids [n] of what lm_head makes of [n, H]."""
        if head.lm_head is None:
            columns = self._choice(self.trunk.logits(drafted, self.ids))
        else:
            columns = self._choice(drafted @ head.lm_head.T)
        return columns if self.ids is None else self.ids[columns]

    @staticmethod
    def _choice(logits: Tensor) -> Tensor:
        return logits.argmax(-1)


class _Given:
    """A trunk whose final norm the head is not given."""

    def __init__(self, trunk: Trunk) -> None:
        self.embed = trunk.embed
        self.norm = lambda raw: raw


def _agreement(base: _Agreement, count: int) -> Finding:
    told = f"the head chooses the target's token at {base.right:.1%} of {count} head rows"
    told += f", {base.next:.1%} at the second step"
    if base.right < _NOTHING:
        remedy = "it has learnt nothing, or runs on other inputs than it was trained on"
        return Finding("agreement", "fault", told, remedy)
    return Finding("agreement", "ok", told)


def _validated(base: _Agreement, validated: list[float] | None) -> list[Finding]:
    if not validated:
        return [Finding("validated", "note", "what it agreed with when trained is not known")]
    told = f"agreement {base.right:.1%} here, {validated[0]:.1%} when it was validated"
    if base.right < _HALF * validated[0] and validated[0] - base.right > _MARGIN / 2:
        remedy = "these are other weights, or another configuration, than those that were validated"
        return [Finding("validated", "fault", told, remedy)]
    return [Finding("validated", "ok", told)]


def _engine(head: Head, loaded: LoadedHead, material: Material) -> Finding:
    """The longest prefix of the first row up to its middle, and a short one."""
    trunk = material.trunk
    end = int(material.batch.starts[1])
    tokens = material.batch.tokens[:end].cpu()
    states = {k: state[:end].to(trunk.device, trunk.dtype) for k, state in material.states.items()}
    worst, sizes = 0.0, sorted({min(end, 3), min(end, 128), max(2, min(end, 256) // 2)})
    for size in sizes:
        cut = {k: state[:size] for k, state in states.items()}
        found = parity(head, loaded.draft_ids, trunk, tokens[:size], cut, _STEPS)
        worst = max(worst, *found.difference)
    told = (
        f"{len(found.difference)} drafts behind {', '.join(str(n - 1) for n in sizes)} rows: the "
        f"engine's states differ from the trainer's by at most {worst:.2g} of their size (float32)"
    )
    if not worst <= _TOLERANCE:
        remedy = "a fault of this version, which runs something else than it trains: report it"
        return Finding("engine", "fault", told, remedy)
    return Finding("engine", "ok", told)
