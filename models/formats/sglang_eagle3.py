"""EAGLE-3 folders for SGLang 0.5.23 (`--speculative-algorithm EAGLE3`); names as in `eagle3.py`.

One class, `LlamaForCausalLMEagle3`: a Llama-shaped layer whose q, k and v have no biases. It drops
every name that it does not know and leaves what is missing random (a norm one), without a word;
`model.` before the names does no harm but to `lm_head`, which is then random.
`eagle_config.eagle_aux_hidden_state_layer_ids` are the layers that a state *leaves* (one less than
in vLLM, whose top-level key it does not read); where that is absent, the states entering 2, L//2
and L-3. Its target captures states that enter layers 1 to L-1. `norm_before_residual` is not known.
A norm before `fc` is `norm_before_fc` or `fc_norm` (of old `use_aux_norm`, `aux_norm_low`, …).
`fc` is skipped where one state of width H is fed. Further layers read `hidden_norm`. The rope's
table is as long as `max_position_embeddings` says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle3 import (
    FOUR_NORMS,
    eagle3_made,
    eagle3_runs,
    fed_norms,
    norm_before_fc,
    to_first,
    usual,
    with_vocabulary,
)
from .eagle_layout import EagleLayout
from .loaders import Engine, Keys, Loader, Made, Parameter, Stopped, layer_made, read_rope
from .sglang_eagle import VERSION
from .sglang_eagle import biases as llama_biases
from .vllm_eagle3 import NESTED, all_or_none, with_flags, with_ids


def _made(keys: Keys, target: Any) -> Made:
    given, ids = keys.get("num_aux_hidden_states"), keys.get(NESTED)
    count = int(given) if given is not None else len(ids) if ids else 3
    inner = tuple(name for name in llama_biases(keys) if name == "o_proj")
    kind: dict[str, Any] = {"biases": inner, "bias": "zeros"}
    rows, vocabulary = keys.need("draft_vocab_size"), keys.need("vocab_size")
    reduced = rows not in (None, vocabulary)
    made = eagle3_made(keys, count, "zeros" if reduced else "unused", **kind)
    made |= fed_norms(keys, count, "use_aux_norm")
    if keys.get("bias", False):
        made["fc.bias"] = Parameter((int(keys.need("hidden_size")),))
    if keys.get("tie_word_embeddings", False):
        del made["lm_head.weight"]
    elif rows is not None:
        made["lm_head.weight"] = Parameter(made["lm_head.weight"].shape)
    for index in range(1, int(keys.need("num_hidden_layers"))):
        prefix, size = f"layers.{index}.", int(keys.need("hidden_size"))
        norms = ("hidden_norm", "post_attention_layernorm")
        made |= layer_made(keys, prefix, norms=norms, **kind)
        made[f"{prefix}input_layernorm.weight"] = Parameter((size,), "unused")
    return made


def _runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    ids = keys.get(NESTED, "usual", guess=True)
    boundaries = usual(target) if ids in ("usual", None) else tuple(sorted(k + 1 for k in ids))
    if len(boundaries) == 1 and not keys.get("target_hidden_size"):
        raise Stopped("it skips fc where one state of the head's own width is fed")
    if boundaries[0] < 1 or boundaries[-1] >= int(target.num_hidden_layers):
        raise Stopped(
            f"its target captures the states entering layers 1 to {target.num_hidden_layers - 1}, "
            f"and {list(boundaries)} are asked for: train with head.boundaries among those"
        )
    named = {_renamed(name) or name: value for name, value in tensors.items()}
    runs = eagle3_runs(keys, read_rope(keys), boundaries, named)
    runs["fed"] = norm_before_fc(keys, "use_aux_norm")
    if keys.get("norm_output", False):
        runs["recycled"] = "its output after the norm"
    return runs


def _renamed(name: str) -> str | None:
    """Older names of the norms before `fc`, too; `model.` may stand before all names but the
    lm_head's, and the maps are found anywhere in one."""
    for name_of_map, place in (("d2t", "d2t"), ("t2d", None)):
        if name_of_map in name:
            return place
    if not name.startswith("model.lm_head"):
        name = name.removeprefix("model.")
    for index, older in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        name = name.replace(older, f"fc_norm.{index}")
    return to_first(name)


SGLANG3 = Engine(
    VERSION,
    lambda keys: keys.need("architectures")[0],
    (
        Loader(
            "LlamaForCausalLMEagle3",
            "LlamaForCausalLMEagle3",
            _made,
            _runs,
            _renamed,
            unexpected="drop",
            norms=FOUR_NORMS,
        ),
    ),
)


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    return with_flags(with_ids(with_vocabulary(all_or_none(config), loaded), loaded), loaded)


SGLANG_EAGLE3 = EagleLayout("sglang-eagle3", "eagle3", SGLANG3, _configure)
