"""The distillation losses: value and gradient of each, for rows whose logits lie in memory now.

p is the teacher's distribution of a row, q the student's, z the student's finished logits (scale
and soft cap applied), alpha = sum min(p, q) the probability that a draft from q is accepted.

    kl          -sum p log q                   soft cross-entropy: KL(p || q) up to a constant
    ce          -log q(label)                  label: the teacher's argmax, or the data's token
    reverse-kl  sum q log(q / p)
    tv          (1/2) sum |p - q| = 1 - alpha
    lk-alpha    -log alpha                     arXiv 2602.23881
    lk-lambda   l KL(p || q) + (1 - l) tv      the same; l = exp(-eta alpha), held constant
    topk        -sum_top p log q - p_rest log q_rest
                                               the teacher's k likeliest; one bucket for the rest
    smooth-l1   mean of huber(g - h)           of the states themselves, not of logits (EAGLE-1)

min(p, q) has no derivative where p = q. There the two sides are averaged (the subgradient of
|p - q| is 0), so a student that equals its teacher gets the gradient 0. Whatever may underflow is
kept as a logarithm: rows of logits +-1e4 give finite values and gradients. `docs/losses.md` derives
the gradients and says which loss is for what.

Legend: m rows, V columns of the head, H hidden.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_JOIN = re.compile(r"(?<![\d.][eE])\+")
"""The + between two terms, which that of an exponent (1e+1*kl) is not."""
STATES = "smooth-l1"
"""The one term that compares states; it needs no logits."""


@dataclass(frozen=True)
class LossConfig:
    """What is minimised on every supervised row."""

    kind: str = "kl"
    """kl, ce, reverse-kl, tv, lk-alpha, lk-lambda, topk or smooth-l1, or a weighted sum of them:
    smooth-l1+0.1*kl (EAGLE-1), 0.9*tv+0.1*ce."""
    top_k: int = 10
    """topk: likeliest tokens of the teacher that keep a probability each."""
    eta: float = 3.0
    """lk-lambda: how fast the weight of KL falls with the row's acceptance alpha, exp(-eta *
    alpha)."""
    labels: Literal["teacher", "data"] = "teacher"
    """ce: the teacher's argmax, or the token that follows in the data."""
    measure_outside: bool = False
    """Report the teacher's mass outside a reduced draft vocabulary on every metrics line, which
    costs the whole lm_head once per row. Validation reports it in any case."""

    def __post_init__(self) -> None:
        terms = parse(self.kind)
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1")
        if not 0 <= self.eta < math.inf:
            raise ValueError(f"eta={self.eta}: must be 0 (pure KL) or positive")
        if self.labels not in ("teacher", "data"):
            raise ValueError(f"labels={self.labels!r}: must be teacher or data")
        readers = {"top_k": "topk", "eta": "lk-lambda", "labels": "ce"}
        for field in fields(self):
            value, term = getattr(self, field.name), readers.get(field.name)
            if term is not None and term not in terms and value != field.default:
                warnings.warn(
                    f"{field.name}={value!r} has no effect: kind={self.kind!r} has no term {term}",
                    stacklevel=3,
                )


def parse(kind: str) -> dict[str, float]:
    """Weight of each term by its name: 0.9*tv+0.1*ce -> {"tv": 0.9, "ce": 0.1}.

    Raises:
        ValueError: an unknown or repeated loss, or a weight that is not a positive number.
    """
    known = (*LOSSES, STATES)
    terms: dict[str, float] = {}
    for term in _JOIN.split(kind):
        factor, star, name = term.rpartition("*")
        try:
            weight = float(factor) if star else 1.0
        except ValueError:
            weight = math.nan
        if name.strip() not in known or not 0 < weight < math.inf:
            raise ValueError(
                f"kind={kind!r}: {term!r} is no loss; write NAME or WEIGHT*NAME with a positive "
                f"weight, joined by +, of {', '.join(known)}"
            )
        if name.strip() in terms:
            raise ValueError(f"kind={kind!r} names {name.strip()} twice; add the weights up")
        terms[name.strip()] = weight
    return terms


class Pair(NamedTuple):
    """m students beside their teachers. Losses read these tensors and change none of them."""

    p: Tensor  # [m, V] the teacher's distribution
    q: Tensor  # [m, V] the student's
    teacher_logits: Tensor  # [m, V] finished
    logits: Tensor  # [m, V] finished
    cross: Tensor  # [m] -sum p log q
    label: Tensor  # [m] int64 column of the hard label; -1 = none, which adds nothing
    top: Tensor  # [m, k] int64 the teacher's likeliest columns; k = 0 where no term asks for them
    config: LossConfig

    @property
    def log_p(self) -> Tensor:
        """[m, V], made anew; finite where p underflows, exact to its own last bits where logits are
        large."""
        return self.teacher_logits.log_softmax(-1)

    @property
    def log_q(self) -> Tensor:
        """[m, V], the student's."""
        return self.logits.log_softmax(-1)


Loss = Callable[[Pair], tuple[Tensor, Tensor]]
"""Pair -> value [m] and its gradient [m, V] with respect to `logits`, both freshly made."""


def _kl(pair: Pair) -> tuple[Tensor, Tensor]:
    return pair.cross, pair.q - pair.p


def _ce(pair: Pair) -> tuple[Tensor, Tensor]:
    known = pair.label >= 0
    column = pair.label.clamp(min=0)[:, None]
    value = -pair.log_q.gather(1, column).squeeze(1) * known
    hit = torch.full_like(column, -1, dtype=pair.q.dtype)
    return value, pair.q.scatter_add(1, column, hit).mul_(known[:, None])


def _reverse_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    ratio = pair.log_q.sub_(pair.log_p)
    # Over 150k columns an fp32 softmax sums to 1 + 1e-5, which a value of many nats would magnify.
    value = (pair.q * ratio).sum(-1) / pair.q.sum(-1)
    return value, ratio.sub_(value[:, None]).mul_(pair.q)


def _tv(pair: Pair) -> tuple[Tensor, Tensor]:
    # d/dq of |q - p| / 2 is sign / 2; the softmax turns a gradient a into q (a - sum q a).
    difference = pair.q - pair.p
    value = difference.abs().sum(-1) / 2
    slope = difference.sign_().mul_(0.5)
    return value, slope.sub_((slope * pair.q).sum(-1, keepdim=True)).mul_(pair.q)


def _lk_alpha(pair: Pair) -> tuple[Tensor, Tensor]:
    # r = min(p, q) / alpha is a distribution. Where q is the smaller one (m = 1; 1/2 at a tie, else
    # 0), q / alpha = r, so the gradient q (sum r m) - r m divides by no alpha that may be 0.
    log_p, log_q = pair.log_p, pair.log_q
    smaller = torch.minimum(log_p, log_q)
    share = smaller.softmax(-1).mul_(log_p.sub_(log_q).sign_().add_(1).div_(2))
    return -smaller.logsumexp(-1), pair.q * share.sum(-1, keepdim=True) - share


def _lk_lambda(pair: Pair) -> tuple[Tensor, Tensor]:
    distance, away = _tv(pair)
    blend = torch.exp(-pair.config.eta * (1 - distance))
    divergence = pair.log_p.sub_(pair.log_q).mul_(pair.p).sum(-1)
    value = blend * divergence + (1 - blend) * distance
    return value, (pair.q - pair.p).mul_(blend[:, None]).add_(away.mul_(1 - blend[:, None]))


def _topk(pair: Pair) -> tuple[Tensor, Tensor]:
    log_q = pair.log_q
    log_q_top, p_top = log_q.gather(1, pair.top), pair.p.gather(1, pair.top)
    log_q_rest = log_q.scatter_(1, pair.top, -math.inf).logsumexp(-1)
    p_rest = pair.p.scatter(1, pair.top, 0.0).sum(-1)
    value = -(p_top * log_q_top).sum(-1) - p_rest * log_q_rest
    # The bucket's mass is shared out as the student itself shares it.
    wanted = log_q.sub_(log_q_rest[:, None]).exp_().mul_(p_rest[:, None])
    return value, pair.q - wanted.scatter_(1, pair.top, p_top)


LOSSES: dict[str, Loss] = {
    "kl": _kl,
    "ce": _ce,
    "reverse-kl": _reverse_kl,
    "tv": _tv,
    "lk-alpha": _lk_alpha,
    "lk-lambda": _lk_lambda,
    "topk": _topk,
}


def mix(terms: dict[str, float], pair: Pair) -> tuple[Tensor, Tensor]:
    """Weighted sum of the terms that read logits: value [m] and gradient [m, V]."""
    value, gradient = torch.zeros_like(pair.cross), torch.zeros_like(pair.q)
    for name, weight in terms.items():
        if name != STATES:
            one, slope = LOSSES[name](pair)
            value += weight * one
            gradient.add_(slope, alpha=weight)
    return value, gradient


def smooth_l1(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over H of d^2 / 2 where |d| < 1 and |d| - 1/2 beyond, d = states - wanted, both [m, H]:
    value [m] and gradient [m, H]."""
    difference = states - wanted
    slope = difference.clamp(-1, 1)
    value = (slope * (difference - slope / 2)).mean(-1)
    return value, slope / states.shape[1]
