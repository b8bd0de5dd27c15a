"""From logits to the law that a request asked for; one place for plain rows, verify rows and
drafts.

The order of what acts, on every row with that row's own text (a speculated row counts the drafts in
front of it): mask and bias, penalties (`processors`), then temperature, min-p, top-k, top-p
(`kernels.renormalise`). It is vLLM's. A greedy request takes the argmax behind the penalties.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from ..kernels.renormalise import renormalise
from .config import SamplingParams
from .processors import Row, row_logits
from .upload import upload

_Law = Callable[[Tensor, Rows[SamplingParams]], Tensor]


def row_laws(logits: Tensor, rows: Rows[Row], ids: Tensor | None = None) -> Tensor:
    """The law of the token behind each row.

    Args:
        logits: [n, W] float32 or float64. rows: [n] what each follows; any mixture of requests and
            speculated texts. ids: [W] ascending target ids of a drafter's columns, None for all.
    Returns:
        [n, W], rows sum to 1; one-hot for greedy requests. A row does not depend on the others.
    """
    return laws(row_logits(logits, rows, ids), [row.sequence.params for row in rows])


def laws(logits: Tensor, params: Rows[SamplingParams]) -> Tensor:
    """Temperature, min-p, top-k, top-p, renormalised.

    Args:
        logits: [n, V], processed. params: [n].
    Returns:
        [n, V], rows sum to 1.
    """
    groups: dict[_Law, list[int]] = {}
    for index, one in enumerate(params):
        law = _likeliest if one.greedy else _truncated if one.truncates else _softmax
        groups.setdefault(law, []).append(index)
    if len(groups) == 1:
        return next(iter(groups))(logits, params)
    out = torch.empty_like(logits)
    for law, chosen in groups.items():
        at = upload(chosen, logits.device)
        out[at] = law(logits[at], [params[index] for index in chosen])
    return out


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """`laws` of rows [n, V] that follow one request's settings."""
    return laws(logits, [params] * len(logits))


def _likeliest(logits: Tensor, params: Rows[SamplingParams]) -> Tensor:
    return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1)


def _softmax(logits: Tensor, params: Rows[SamplingParams]) -> Tensor:
    if any(one.temperature != 1 for one in params):
        temperatures = upload([one.temperature for one in params], logits.device, torch.float64)
        logits = logits / temperatures.to(logits.dtype)[:, None]
    return torch.softmax(logits, -1)


def _truncated(logits: Tensor, params: Rows[SamplingParams]) -> Tensor:
    rows = [(one.temperature, one.top_p, one.min_p) for one in params]
    temperature, top_p, min_p = upload(rows, logits.device, torch.float64).T
    top_k = upload([one.top_k for one in params], logits.device)
    return renormalise(logits, temperature, top_k, top_p, min_p)


def check_finite(logits: Tensor, place: str) -> None:
    """Refuse NaN or +infinity logits before a token is taken from them.

    Args:
        logits: [n, V].
    """
    best = logits.amax(-1)
    if not bool(torch.isfinite(best).all()):
        raise ValueError(
            f"{place}: logits are not finite (largest {best.tolist()[:4]}); the weights are "
            "damaged or the dtype "
            "overflows: try target.dtype=float32"
        )
