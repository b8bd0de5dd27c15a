"""What every head offers, whatever its family: trainer, engine and formats know no other names.

Row p of step k holds the embedding of x_{p+1+k} and the state that step k-1 recycled for row p
(step 0: what `feed` makes of the target's states at p); what it drafts is read by lm_head and
predicts x_{p+2+k}. Legend: N rows, H hidden, B boundaries, L target layers, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..attention import AttentionContext
from ..latent import use_latents
from ..lean import LeanStack
from ..trunk import Trunk
from .config import HeadConfig, RecycleSpec
from .start import Start


class HeadStep(NamedTuple):
    """What one step gives for each of its rows."""

    recycled: Tensor  # [N, H] the next step's `hidden`
    drafted: Tensor  # [N, H] what lm_head reads


class HeadFunction(Protocol):
    """A head as the engine runs it."""

    def feed(self, states: dict[int, Tensor], trunk: Trunk) -> Tensor:
        """See `Head.feed`."""
        ...

    def __call__(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        """See `Head.forward`."""
        ...


class Head(nn.Module):
    """Base of all families.

    Args:
        config: the head's shape. target_config: transformers' configuration of the target.
        draft_vocab_size: Vd, None for the target's whole vocabulary; read by heads with an lm_head
            of their own.
    Attributes:
        boundaries: the target's states that `feed` reads, ascending; boundary k enters layer k, L
            leaves the last one.
        num_layers: layers of keys and values that the engine keeps for this head.
        num_modules: separate modules; module min(k, num_modules - 1) serves step k. Module m has
            keys of its own, written at row p when x_{p+1+m} is known.
        max_steps: steps it can be asked for, None for any number.
        lm_head: [Vd, H], or one for each step, [K, Vd, H]; None where the target's own rows are
            used.
    """

    kind: ClassVar[str]
    num_layers: int = 1
    num_modules: int = 1
    max_steps: int | None = None
    recycle: RecycleSpec = RecycleSpec()
    lm_head: nn.Parameter | None

    def __init__(
        self, config: HeadConfig, target_config: Any, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.target_config = target_config
        self.draft_vocab_size = draft_vocab_size
        self.register_parameter("lm_head", None)
        self.boundaries = self.reads(config, int(target_config.num_hidden_layers))

    @classmethod
    def reads(cls, config: HeadConfig, target_layers: int) -> tuple[int, ...]:
        """The boundaries that a head of this configuration reads; ValueError where the target has
        none of that number."""
        return (target_layers,)

    def feed(self, states: dict[int, Tensor], trunk: Trunk) -> Tensor:
        """What step 0 gets: [N, H] from raw states [N, H] of at least `boundaries` and L."""
        return trunk.norm(states[max(states)])

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        """One step over packed rows.

        Args:
            embeds: [N, H] embeddings of x_{p+1+k}. hidden: [N, H] from `feed` or the step before.
            positions: [N] int64, p + k. context: what each row may see. step: k.
        """
        raise TypeError(f"{type(self).__name__} has no forward of its own")

    def start(self, start: Start) -> None:
        """Set the weights of a fresh head, float32 on the CPU, in place; ValueError for an unknown
        choice of `config.init`."""
        raise TypeError(f"{type(self).__name__} has no start of its own")

    def lean(self) -> HeadFunction:
        """`forward` and `feed` from packed weights, for Llama-family layers; this module itself
        where there is nothing to gain."""
        return self

    def for_inference(
        self, dtype: torch.dtype, device: torch.device, own: bool = True
    ) -> HeadFunction:
        """The engine's form of these very weights: the same function, no gradient.

        With `own`, Llama-family layers run lean and DeepSeek's on latents; others run the module
        itself in `dtype`.
        """
        copy = type(self)(self.config, self.target_config, self.draft_vocab_size)
        copy.load_state_dict({name: value.detach() for name, value in self.state_dict().items()})
        copy = copy.to(device, dtype).eval().requires_grad_(False)
        if own and LeanStack.supports(self.target_config):
            return copy.lean()
        if own:
            use_latents(copy)
        return copy
