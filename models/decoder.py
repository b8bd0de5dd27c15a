"""The stack of decoder layers behind a target, as transformers wrote it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attention import AttentionContext


class DecoderStack(Protocol):
    """Layers 0..L-1 of a target."""

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        context: AttentionContext,
        boundaries: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """embeds [N, H], positions [N] -> raw states [N, H] by boundary; L is always among them."""
        ...


class HubStack:
    """Any family, by the library's own modules; the states are caught on their way into a layer.

    Args:
        decoder: the base model (`LlamaModel`, …) with `.layers` and `.norm`.
    """

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        if hasattr(decoder, "embedding_multiplier"):  # Granite's; the trunk's embeddings have it
            decoder.embedding_multiplier = 1.0
        self.num_layers = len(decoder.layers)

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        context: AttentionContext,
        boundaries: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """See `DecoderStack`."""
        caught: dict[int, Tensor] = {}
        wanted = {*boundaries, 0, self.num_layers}
        unknown = sorted(k for k in wanted if not 0 <= k <= self.num_layers)
        if unknown:
            raise ValueError(
                f"boundaries {unknown}: this target has boundaries 0 to {self.num_layers}"
            )

        def catch(boundary: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states = args[0] if args else kwargs["hidden_states"]
                caught[boundary] = states[0]
                if boundary == 0 and states.data_ptr() != embeds.data_ptr():
                    _same(states[0], embeds)

            return hook

        places = {**dict(enumerate(self.decoder.layers)), self.num_layers: self.decoder.norm}
        handles = [
            places[k].register_forward_pre_hook(catch(k), with_kwargs=True) for k in sorted(wanted)
        ]
        try:
            self.decoder(
                inputs_embeds=embeds[None],
                position_ids=positions[None],
                use_cache=False,
                draftsmith=context,
            )
        finally:
            for handle in handles:
                handle.remove()
        # Layers may lie on several devices (`target.spread`).
        return {k: caught[k].to(embeds.device) for k in (*boundaries, self.num_layers)}


def _same(entered: Tensor, embeds: Tensor) -> None:
    if not torch.equal(entered, embeds):
        raise ValueError(
            "the target's decoder changes the embeddings before its first layer in a way that is "
            "not known here; its family is not supported"
        )
