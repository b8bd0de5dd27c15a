"""The MTP layout of GLM-4.5 and later: DeepSeek's names, another recycled state.

    model.layers.{L}.{enorm,hnorm,eh_proj,shared_head.norm}.weight, <decoder layer>.*
    model.layers.{L}.{embed_tokens,shared_head.head}.weight        copies of the target's

The next step is fed the layer's output *before* `shared_head.norm`, as vLLM runs it (SGLang feeds
it after; a head of one step is the same in both). vLLM zeroes the embedding at position 0, SGLang
does not; read without unless our note beside it says otherwise.
"""

from __future__ import annotations

from .deepseek_mtp import LAYERS_COPIES, LAYERS_OWN
from .mtp_layout import MTPLayout

GLM_MTP = MTPLayout(
    name="glm-mtp",
    title="GLM MTP",
    prefix="model.layers.{index}.",
    after_layers=True,
    own=LAYERS_OWN,
    copies=LAYERS_COPIES,
    counts=(("", "num_nextn_predict_layers"),),
    families=("glm4",),
    recycle_raw=True,
    mask_position_zero=None,
    engines=("model.decoder.",),
)
