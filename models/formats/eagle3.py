"""The EAGLE-3 folder as its authors' code reads it (SafeAILab/EAGLE, cnets.py), and the names that
every engine takes over from it.

    fc.weight                                  [H, B*H]   over raw states, ascending
    midlayer.input_layernorm.weight            [H]        on the embedding of x_{p+1}
    midlayer.hidden_norm.weight                [H]        on what fc gives, or on what is recycled
    midlayer.self_attn.{q,k,v}_proj.weight     [*, 2H]    reads [norm(embedding) ; norm(hidden)]
    midlayer.{self_attn.o_proj, mlp.{gate,up,down}_proj, post_attention_layernorm}.weight
    norm.weight                                [H]
    lm_head.weight                             [Vd, H]
    d2t  int64 [Vd]   offsets: target id = i + d2t[i];   t2d  bool [V];   neither where Vd = V

Further layers are `layers.i.*` (then the first is `layers.0.*`), and hold their input norm twice,
as `input_layernorm` and `hidden_norm`: engines differ in which they read. The embedding is the
target's.

The authors' code reads the states entering layers 2, L//2 and L-3 and no others, knows one layer
without biases, takes H / heads for the width of a head, loads with strict=False, and knows no rope
but the plain one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle import VERSION, plain_or_scaled, with_plain_rope
from .eagle_files import EMBEDDING
from .eagle_layout import EagleLayout
from .facts import mapped
from .loaders import Engine, Keys, Loader, Made, Parameter, Stopped, layer_made, layer_runs

FOUR_NORMS = ("embedding", "hidden", "attention_input", "output")
FIRST_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def usual(target: Any) -> tuple[int, ...]:
    """The boundaries that every engine takes where nothing is said."""
    layers = int(target.num_hidden_layers)
    return (2, layers // 2, layers - 3)


def eagle3_made(keys: Keys, count: int, map_absent: str | None, **kind: Any) -> Made:
    """The parameters of an EAGLE-3 class over `count` states but for its further layers; None for
    `map_absent`: it has no map."""
    size = int(keys.need("hidden_size"))
    fed = int(keys.get("target_hidden_size") or size)
    rows = int(keys.get("draft_vocab_size") or keys.need("vocab_size"))
    made: Made = {
        "fc.weight": Parameter((size, count * fed)),
        **layer_made(keys, wide=True, **{"norms": FIRST_NORMS, **kind}),
        "norm.weight": Parameter((size,), kind.get("unset", "ones")),
        "lm_head.weight": Parameter((rows, size), "shared"),
        EMBEDDING: Parameter((int(keys.need("vocab_size")), size), "shared"),
    }
    if map_absent is not None:
        made["d2t"] = Parameter((rows,), map_absent)
    return made


def eagle3_runs(
    keys: Keys,
    rope: dict[str, Any],
    boundaries: tuple[int, ...],
    tensors: dict[str, Tensor],
    square: bool = False,
) -> dict[str, Any]:
    """How an EAGLE-3 class runs where its configuration turns nothing else on."""
    reduced = keys.get("draft_vocab_size") not in (None, keys.need("vocab_size"))
    return layer_runs(keys, rope, square) | {
        "norms": FOUR_NORMS,
        "boundaries": boundaries,
        "residual": "pre-norm",
        "recycled": "its output before the norm",
        "layers": int(keys.need("num_hidden_layers")),
        "draft_ids": mapped(tensors) if reduced else None,
        "fed": "none",
    }


def norm_before_fc(keys: Keys, older: str = "") -> str:
    """A norm before `fc` as vLLM and SGLang read it: none; all, over all states side by side
    (`norm_before_fc`, in `eagle_config` first); each (`fc_norm`, or an older key)."""
    whole = keys.get("eagle_config.norm_before_fc", keys.get("norm_before_fc", False))
    each = keys.get("fc_norm", False) or (older and keys.get(older, False))
    if whole and each:
        raise Stopped("norm_before_fc and fc_norm are one or the other")
    return "all" if whole else "each" if each else "none"


def fed_norms(keys: Keys, count: int, older: str = "") -> Made:
    """The parameters of such norms over `count` states."""
    kind = norm_before_fc(keys, older)
    size = int(keys.get("target_hidden_size") or keys.need("hidden_size"))
    if kind == "all":
        return {"input_norm.weight": Parameter((count * size,), "ones")}
    return {
        f"fc_norm.{index}.weight": Parameter((size,), "ones")
        for index in range(count if kind == "each" else 0)
    }


def to_first(name: str) -> str | None:
    """`midlayer.` is the first of `layers`; t2d is not read."""
    return None if name == "t2d" else name.replace("midlayer.", "layers.0.")


def _made(keys: Keys, target: Any) -> Made:
    reduced = keys.need("draft_vocab_size") != keys.need("vocab_size")
    made = eagle3_made(keys, 3, "zeros" if reduced else None, square=True)
    if keys.get("target_hidden_size") is not None:
        made[EMBEDDING] = Parameter(made[EMBEDDING].shape)
    made["lm_head.weight"] = Parameter(made["lm_head.weight"].shape)
    if reduced:
        made["t2d"] = Parameter((int(keys.need("vocab_size")),), "unused")
    return {name.replace("layers.0.", "midlayer."): one for name, one in made.items()}


def _runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    for name in ("norm_before_fc", "fc_norm"):
        if keys.get(name, False):
            raise Stopped(f"{name}=true: it has no such norm")
    rope = plain_or_scaled(keys)
    return eagle3_runs(keys, rope, usual(target), tensors, square=True) | {"layers": 1}


SAFEAILAB3 = Engine(
    VERSION,
    lambda keys: "cnets.Model",
    (
        Loader(
            "cnets.Model",
            "LlamaForCausalLM",
            _made,
            _runs,
            unexpected="drop",
            norms=FOUR_NORMS,
        ),
    ),
)


def with_vocabulary(config: dict[str, Any], loaded: LoadedHead) -> dict[str, Any]:
    """`draft_vocab_size`: the rows of lm_head, where there is no map the target's."""
    ids = loaded.draft_ids
    config["draft_vocab_size"] = config["vocab_size"] if ids is None else len(ids)
    return config


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    return with_vocabulary(with_plain_rope(config), loaded)


EAGLE3 = EagleLayout("eagle3", "eagle3", SAFEAILAB3, _configure)
