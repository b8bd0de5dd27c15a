"""Probes that name the classic faults of hidden states before anything is trained on them.

shift:  the likelihood of x_{p+1} under lm_head(norm(h_p)) must beat that of x_p and of x_{p+2} by a
        wide margin; another winner means that the states are shifted against the tokens. Only
        positions whose three tokens differ can tell.
norm:   the state through the final norm must predict better than without it; the reverse means that
        the states were normed already.
argmax: the cached states and the engine, run anew on each row alone, must choose the same token;
        else they come from another layer, another row or another batch.

Where the cache holds one byte a value, shift and norm are probed on the states as they are read
back, argmax (which looks for states of another place) on the exact ones; and what the dtype costs
is measured: how often the two choose the same token, and how much likelihood is lost.

A target that predicts nothing (random weights) makes the first two inconclusive: said, not refused.
One whose embedding is its lm_head may know x_p a little better than the rest, from the embedding
alone: that is a shift only where argmax says so too, or the rest is far behind.
Legend: N packed tokens, H hidden, V vocabulary, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.shift import row_ends
from ..models.trunk import Trunk
from .batches import RowSource

MARGIN, FAR = 0.5, 2.0  # nats
LEAST = 8  # positions
AGREEMENT = 0.98
TIE = 0.02  # of the height of the best logit over the mean: closer than this is a tie
_CHUNK = 256
_PROBE_TOKENS = 512
_RMS_TOKENS = 8192
OK, INCONCLUSIVE = "ok", "inconclusive"


@dataclass(frozen=True)
class ProbeReport:
    """What the probes measured (nats) and found; a verdict is ok, inconclusive, or the fault's
    name. positions: those that were counted. dtype_agreement and dtype_nll compare the states as
    read back with the exact bf16 ones: the share of equal choices, and by how much the likelihood
    of x_{p+1} got worse; None for bf16.
    """

    positions: int
    shift_nll: dict[str, float]
    raw_nll: float
    argmax_agreement: float | None
    verdicts: dict[str, str]
    dtype_agreement: float | None = None
    dtype_nll: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For the manifest; null for what is not finite."""
        shifts = {name: _finite(value) for name, value in self.shift_nll.items()}
        rest = {"raw_nll": _finite(self.raw_nll), "dtype_nll": _finite(self.dtype_nll)}
        return {**asdict(self), "shift_nll": shifts, **rest}

    @property
    def faults(self) -> list[str]:
        """The names of the faults found."""
        return [text for text in self.verdicts.values() if text not in (OK, INCONCLUSIVE)]

    def refuse_faults(self, where: str, remedy: str = "dump again, into another folder") -> None:
        """Raise on any fault.

        Raises:
            ValueError: the faults with their numbers, and the remedy.
        """
        if self.faults:
            raise ValueError(
                f"{where}: {'; '.join(self.faults)}. Nothing learnt from such states would be "
                f"right: {remedy}"
            )


@torch.inference_mode()
def probe_states(
    trunk: Trunk,
    states: Tensor,
    tokens: Tensor,
    starts: Tensor,
    engine_logits: Callable[[int, int], Tensor] | None = None,
    exact: Tensor | None = None,
) -> ProbeReport:
    """Probe raw states of boundary L.

    Args:
        states: [N, H], any float dtype. tokens: [N] int. starts: [R+1] int row borders.
        engine_logits: (a, b) -> [b-a, V], the engine's own logits at packed positions a..b-1.
        exact: [N, H] bf16, the states before they were quantised, where they were.
    Raises:
        ValueError: no row has three tokens.
    """
    tokens, starts = tokens.to(trunk.device).long(), starts.to(trunk.device)
    whole = torch.arange(tokens.shape[0], device=trunk.device) + 2 < row_ends(starts)
    if not whole.any():
        raise ValueError(
            f"the probes need a row of at least 3 tokens; the {len(starts) - 1} rows are shorter"
        )
    after, last = tokens.roll(-1), tokens.roll(-2)
    telling = whole & (tokens != after) & (after != last) & (tokens != last)
    enough = int(telling.sum()) >= LEAST
    whole = telling if enough else whole
    sums: dict[str, float] = dict.fromkeys(("-1", "0", "+1", "raw", "exact"), 0.0)
    agree = compared = same = 0
    for begin in range(0, tokens.shape[0], _CHUNK):
        end = min(begin + _CHUNK, tokens.shape[0])
        raw = states[begin:end].to(trunk.device, trunk.dtype)
        logits = trunk.logits(trunk.norm(raw)).float()
        places = torch.nonzero(whole[begin:end])[:, 0]
        unspoilt = logits
        if exact is not None:
            unspoilt = trunk.logits(trunk.norm(exact[begin:end].to(trunk.device, trunk.dtype)))
            unspoilt = unspoilt.float()
            same += int((unspoilt.argmax(-1) == logits.argmax(-1)).sum())
            sums["exact"] += _nll(unspoilt[places], tokens[begin + places + 1])
        if engine_logits is not None:
            agree += _agreements(unspoilt, engine_logits(begin, end).float())
            compared += end - begin
        for name, offset in (("-1", 0), ("0", 1), ("+1", 2)):
            sums[name] += _nll(logits[places], tokens[begin + places + offset])
        sums["raw"] += _nll(trunk.logits(raw[places]).float(), tokens[begin + places + 1])
    count = int(whole.sum())
    means = {name: round(total / count, 4) for name, total in sums.items()}
    agreement = round(agree / compared, 4) if compared else None
    raw_nll, exact_nll = means.pop("raw"), means.pop("exact")
    knows = math.log(trunk.vocab_size) - MARGIN
    disagree = agreement is not None and agreement < AGREEMENT
    verdicts = {
        "shift": _shift_verdict(means, knows, disagree) if enough else INCONCLUSIVE,
        "norm": _norm_verdict(means["0"], raw_nll, knows),
    }
    if agreement is not None:
        verdicts["argmax"] = _argmax_fault(agreement) if disagree else OK
    if exact is None:
        return ProbeReport(count, means, raw_nll, agreement, verdicts)
    kept = round(same / tokens.shape[0], 4)
    lost = round(means["0"] - exact_nll, 4)
    return ProbeReport(count, means, raw_nll, agreement, verdicts, kept, lost)


def _nll(logits: Tensor, wanted: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))


def _agreements(cached: Tensor, engine: Tensor) -> int:
    """Positions where the cached state's choice is the engine's, or ties with it; [n, V] each."""
    chosen = engine.gather(1, cached.argmax(-1, keepdim=True))[:, 0]
    best = engine.amax(-1)
    return int((best - chosen <= TIE * (best - engine.mean(-1))).sum())


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shift_verdict(nll: dict[str, float], knows: float, disagree: bool) -> str:
    if not all(map(math.isfinite, nll.values())):
        return f"shift: the likelihoods are not finite ({nll})"
    if min(nll.values()) > knows:
        return INCONCLUSIVE
    best = min(nll, key=lambda name: nll[name])
    if best == "0" and nll["0"] + MARGIN <= min(nll["-1"], nll["+1"]):
        return OK
    if best == "-1" and not disagree and nll["0"] - nll["-1"] <= FAR:
        return INCONCLUSIVE
    place = {
        "-1": "the states lie one position late: h_p predicts x_p",
        "0": f"h_p predicts x_(p+1) by less than {MARGIN} nats better than its neighbours",
        "+1": "the states lie one position early: h_p predicts x_(p+2)",
    }[best]
    told = ", ".join(f"{name}: {value:.2f}" for name, value in nll.items())
    return f"shift: {place} (mean negative log-likelihood by shift {told})"


def _norm_verdict(normed: float, raw: float, knows: float) -> str:
    if not math.isfinite(raw) or min(normed, raw) > knows or abs(normed - raw) < 0.02:
        return INCONCLUSIVE
    if normed < raw:
        return OK
    return (
        f"norm: the states predict better without the final norm ({raw:.2f} nats) than with it "
        f"({normed:.2f}); "
        "they were normed before they were stored"
    )


def _argmax_fault(agreement: float) -> str:
    return (
        f"argmax: the states choose the engine's own token at only {agreement:.1%} of the "
        "positions; they come from "
        "another layer, another row, or were normed"
    )


def probe_source(source: RowSource, trunk: Trunk) -> ProbeReport:
    """The shift and norm probes once more, on what training is about to read: the last boundary of
    the first rows, about 512 tokens."""
    count = int((source.lengths.cumsum() < _PROBE_TOKENS).sum()) + 1
    tokens, _, states = source.gather(list(range(min(count, len(source.lengths)))))
    lengths = torch.tensor([0, *map(len, tokens)])
    last = states.chunk(len(source.boundaries), -1)[-1].to(trunk.device)
    return probe_states(trunk, last, torch.cat(tokens).to(trunk.device), lengths.cumsum(0))


def state_rms(source: RowSource) -> float:
    """Median over tokens of the root mean square of a raw state of the last boundary, from the
    first rows of a source.

    A few positions (the first of a row above all) carry states a hundred times larger than the
    others; a mean of squares would follow them and start the projection far off.
    """
    sizes: list[Tensor] = []
    for index in range(len(source.lengths)):
        _, _, states = source.gather([index])
        last = states.chunk(len(source.boundaries), -1)[-1].float()
        sizes.append(last.square().mean(-1).sqrt())
        if sum(map(len, sizes)) >= _RMS_TOKENS:
            break
    return float(torch.cat(sizes).median())
