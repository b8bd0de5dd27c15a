"""The DeepSeek-style MTP layout: extra layers from index L on inside a target checkpoint.

    model.layers.{L}.enorm.weight                 [H]      on the embedding of x_{p+1}
    model.layers.{L}.hnorm.weight                 [H]      on the target's final-normed state h_p
    model.layers.{L}.eh_proj.weight               [H, 2H]  input order [embedding ; hidden], no bias
    model.layers.{L}.<decoder layer>.*                     names of the family's own layer
    model.layers.{L}.shared_head.norm.weight      [H]      its output is drafted from and recycled
    model.layers.{L}.embed_tokens.weight          [V, H]   a copy of the target's embedding
    model.layers.{L}.shared_head.head.weight      [V, H]   a copy of the target's lm_head

A head of D modules has the layers L .. L+D-1, and config.json says so in
`num_nextn_predict_layers`. vLLM zeroes the embedding at position 0, SGLang does not; the layout
holds heads of both kinds, read without unless our note beside it says otherwise. DeepSeek publishes
the matrices as float8 with a scale for each block (`weight_scale_inv`): they are multiplied out.
"""

from __future__ import annotations

from .mtp_layout import MTPLayout

LAYERS_OWN = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
LAYERS_COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}

DEEPSEEK_MTP = MTPLayout(
    name="deepseek-mtp",
    title="DeepSeek MTP",
    prefix="model.layers.{index}.",
    after_layers=True,
    own=LAYERS_OWN,
    copies=LAYERS_COPIES,
    counts=(("", "num_nextn_predict_layers"),),
    families=("",),
    mask_position_zero=None,
    engines=("model.decoder.",),
)
