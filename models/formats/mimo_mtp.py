"""The MTP layout of MiMo-7B: modules of their own beside the target's layers.

    model.mtp_layers.{i}.token_layernorm.weight    [H]       on the embedding of x_{p+1}
    model.mtp_layers.{i}.hidden_layernorm.weight   [H]       on the target's final-normed state h_p
    model.mtp_layers.{i}.input_proj.weight         [H, 2H]   input order [hidden ; embedding]
    model.mtp_layers.{i}.<decoder layer>.*                   a Qwen2 layer
    model.mtp_layers.{i}.final_layernorm.weight    [H]       its output is drafted from and recycled

The embedding is zeroed at position 0 (vLLM and SGLang alike). Embedding and lm_head are the
target's and not repeated. `num_nextn_predict_layers` counts the modules; vLLM and SGLang run module
0 alone. The family's model_type is `mimo`, whose layers are Qwen2's; transformers has no class of
that name, so config.json must say `qwen2` for the target to load.
"""

from __future__ import annotations

from .mtp_layout import MTPLayout

MIMO_MTP = MTPLayout(
    name="mimo-mtp",
    title="MiMo MTP",
    prefix="model.mtp_layers.{index}.",
    own={
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
    counts=(("", "num_nextn_predict_layers"),),
    families=("qwen2", "mimo"),
    hidden_first=True,
    mask_position_zero=True,
    engines=("model.layers.{layer}.",),
)
