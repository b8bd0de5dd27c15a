"""From logits to the distribution a request asked for; one place for plain rows, verify rows and
drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.accept import draw
from .config import SamplingParams
from .sequence import Sequence


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, then top-p, renormalised.

    Args:
        logits: [n, V] float32 or float64. params: temperature > 0.
    Returns:
        [n, V], rows sum to 1.
    """
    assert params.temperature > 0
    scaled = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        edge = scaled.topk(params.top_k, -1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < edge, float("-inf"))
    probs = torch.softmax(scaled, -1)
    if params.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        # A token stays while the mass before it is below p, so the likeliest always stays.
        keep = ordered.cumsum(-1) - ordered < params.top_p
        kept = torch.zeros_like(probs).scatter_(-1, order, ordered * keep)
        probs = kept / kept.sum(-1, keepdim=True)
    return probs


def draft_token(sequence: Sequence, logits: Tensor, best: int | Tensor, law: list[Tensor]) -> int:
    """One draft from a row of a drafter's logits: drawn as the request asks for, with its law
    noted, or its likeliest where the request is greedy or coupled.

    Args:
        logits: [Vd]. best: their argmax. law: the distributions [Vd] of the chain so far; grows by
            one where the draft is drawn.
    Returns:
        an index into the draft vocabulary.
    """
    if not sequence.params.draws_drafts:
        return int(best)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    law.append(probabilities(wide[None], sequence.params)[0])
    return draw(law[-1], sequence.uniforms(1)[0])


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
