"""Engine against trainer: one head, one text, the same states; what each hands to lm_head.

The engine prefills the head's rows of a prefix and drafts a chain, by its pages and in its own form
of the head; the trainer unrolls over the prefix and those very drafts. Both in the trunk's dtype.
Only the head runs: the states are given, so the target's layers are not needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..data.batches import PackedBatch
from ..inference.batch import Batch
from ..inference.config import SamplingParams
from ..inference.head_drafter import HeadDrafter
from ..inference.pages import KVPool
from ..inference.sequence import Sequence
from ..models.heads import Head
from ..models.target import Target
from ..models.trunk import Trunk
from .unroll import UnrollContext, unroll

_PAGE = 16


class Parity(NamedTuple):
    """difference: by step, largest difference over the root mean square of the trainer's. drafts:
    the target ids that the engine drafted."""

    difference: list[float]
    drafts: list[int]


class _Recorder:
    """An lm_head that keeps what it is given."""

    def __init__(self, linear: Any, read: list[Tensor]) -> None:
        self.linear = linear
        self.read = read

    def __call__(self, states: Tensor) -> Tensor:
        self.read.append(states)
        return self.linear(states)


@torch.no_grad()
def parity(
    head: Head,
    draft_ids: Tensor | None,
    trunk: Trunk,
    tokens: Tensor,
    states: dict[int, Tensor],
    steps: int,
) -> Parity:
    """Compare a chain of `steps` drafts behind all but the last of `tokens`.

    Args:
        head: in the trunk's dtype, on its device. draft_ids: [Vd] or None. tokens: [n] int64,
            n >= 2. states: boundary -> [n, H] raw states, L among them.
    """
    known, steps = len(tokens) - 1, min(steps, head.max_steps or steps)
    drafted, chain = _engine(head, draft_ids, trunk, tokens, states, known, steps)
    text = torch.cat([tokens, torch.tensor(chain[: steps - 1], dtype=torch.int64)])
    beyond = len(text) - known
    fed = {
        k: torch.cat([state[:known], state.new_zeros(beyond, state.shape[1])])
        for k, state in states.items()
    }
    order = sorted(fed)
    batch = PackedBatch(
        text.to(trunk.device),
        torch.ones(len(text), dtype=torch.bool, device=trunk.device),
        torch.cat([fed[k] for k in order], -1),
        torch.tensor([0, len(text)], dtype=torch.int32),
        torch.arange(len(text), device=trunk.device),
        ("parity",),
    )
    context = UnrollContext(batch.starts)
    trained = unroll(head, trunk, batch, steps, states=fed, context=context)[:, known - 1]
    scale = trained.square().mean(-1).sqrt().clamp(min=1e-12)
    gap = (torch.stack(drafted) - trained).abs().amax(-1) / scale
    return Parity(gap.tolist(), chain)


def _engine(
    head: Head,
    draft_ids: Tensor | None,
    trunk: Trunk,
    tokens: Tensor,
    states: dict[int, Tensor],
    known: int,
    steps: int,
) -> tuple[list[Tensor], list[int]]:
    """What the engine's lm_head read at each draft, [H] each, and the drafts."""
    layers = int(head.target_config.num_hidden_layers)
    pages = -(-(len(tokens) + steps + 1) // _PAGE)
    pool = KVPool(layers + head.num_layers, pages * _PAGE)
    drafter = HeadDrafter(head, draft_ids)
    drafter.attach(cast(Target, _Trunk(trunk, layers)), pool, layers)
    read: list[Tensor] = []
    drafter.lm_heads = [_Recorder(one, read) for one in drafter.lm_heads]
    sequence = Sequence.create("parity", tokens.tolist(), SamplingParams(temperature=0.0))
    sequence.pages, sequence.page_size = list(range(pages)), _PAGE
    batch = Batch.build([(sequence, 0, tokens[:known].tolist())], trunk.device)
    drafter.observe(batch, {k: state[:known] for k, state in states.items()}, [int(tokens[-1])])
    sequence.num_computed = known
    [proposal] = drafter.propose([sequence], [steps])
    return [states[0] for states in read], proposal.tokens


class _Trunk:
    """As much of a `Target` as a drafter asks for."""

    def __init__(self, trunk: Trunk, layers: int) -> None:
        self.trunk = trunk
        self.num_layers = layers
        self.hidden_size = trunk.hidden_size
        self.device, self.dtype = trunk.device, trunk.dtype
        self.lm_head = self.linear(trunk.lm_head)

    def linear(self, weight: Tensor) -> Any:
        return lambda states: torch.nn.functional.linear(states, weight)

    def head_function(self, head: Head) -> Any:
        return head.for_inference(self.dtype, self.device)
