"""The MTP layout of ERNIE-4.5 (the MoE models): one module under `model.mtp_*.0`.

    model.mtp_emb_norm.0.weight         [H]       on the embedding of x_{p+1}
    model.mtp_hidden_norm.0.weight      [H]       on the target's final-normed state h_p
    model.mtp_linear_proj.0.weight      [H, 2H]   input order [embedding ; hidden], no bias
    model.mtp_block.0.<decoder layer>.*           a dense layer of the family, whatever its last is

The layer's output is drafted from and recycled as it is: there is no norm behind it. The embedding
is zeroed at position 0. Embedding and lm_head are the target's and not repeated.
`num_nextn_predict_layers` counts the modules; vLLM and SGLang run one. SGLang turns the rope by
pairs, as the family does; vLLM (0.33.0) makes a Llama layer of the block, which turns it by halves,
so that it drafts otherwise than the module was trained to.
"""

from __future__ import annotations

import copy
from typing import Any

from .mtp_layout import MTPLayout


def dense(target_config: Any) -> Any:
    """The target's configuration with a last layer that has no experts."""
    changed = copy.deepcopy(target_config)
    if hasattr(changed, "moe_layer_end_index"):
        changed.moe_layer_end_index = int(changed.num_hidden_layers) - 2
    return changed


ERNIE_MTP = MTPLayout(
    name="ernie-mtp",
    title="ERNIE MTP",
    prefix="model.mtp_",
    own={
        "enorm.weight": "emb_norm.0.weight",
        "hnorm.weight": "hidden_norm.0.weight",
        "eh_proj.weight": "linear_proj.0.weight",
    },
    layer="block.0.",
    counts=(("", "num_nextn_predict_layers"),),
    families=("ernie4_5_moe",),
    most=1,
    mask_position_zero=True,
    layer_as=dense,
    engines=("model.mtp_block.",),
)
