"""The MTP layout of Qwen3-Next and Qwen3.5: one module under `mtp.`.

    mtp.pre_fc_norm_embedding.weight    [H]       on the embedding of x_{p+1}
    mtp.pre_fc_norm_hidden.weight       [H]       on the target's final-normed state h_p
    mtp.fc.weight                       [H, 2H]   input order [embedding ; hidden], no bias
    mtp.layers.0.<decoder layer>.*                the family's full-attention layer
    mtp.norm.weight                     [H]       its output is drafted from and recycled

All norms multiply by 1 + w. Embedding and lm_head are the target's and not repeated. The number of
modules is `num_nextn_predict_layers` in a Qwen3-Next config.json (where it is absent, 1) and
`mtp_num_hidden_layers` in that of Qwen3.5. Several layers would share one `fc` and its norms, which
separate modules do not: one is held.
"""

from __future__ import annotations

from .mtp_layout import MTPLayout

QWEN_MTP = MTPLayout(
    name="qwen-mtp",
    title="Qwen MTP",
    prefix="mtp.",
    own={
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "norm.weight": "norm.weight",
    },
    layer="layers.0.",
    counts=(("qwen3_5", "mtp_num_hidden_layers"), ("", "num_nextn_predict_layers")),
    families=("qwen3_next", "qwen3_5"),
    most=1,
    norm_style="gemma",
)
