"""The EAGLE folder as its authors' code reads it (SafeAILab/EAGLE, cnets1.py; EAGLE-1 and -2).

    fc.weight                                     [H, 2H]  input order [embedding ; hidden]
    layers.0.self_attn.{q,k,v,o}_proj.weight, layers.0.mlp.{gate,up,down}_proj.weight
    layers.0.post_attention_layernorm.weight      [H]      the only norm
    (fc.bias [H]; embed_tokens.weight [V, H]: read from the target)

The state fed is the target's after its final norm; the layer's output is drafted from with the
target's lm_head and recycled. The code loads with strict=False: a name it does not know is dropped,
a matrix that is missing stays random and a norm one, all without a word. It gives `fc` a bias
unless config.json says `"bias": false`, takes H / heads for the width of a head, and knows no rope
but the plain one (a scaled one it runs with the base 10000). It is written for transformers 4;
under 5 it stops at any configuration without a scaled rope.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle_files import EMBEDDING
from .eagle_layout import EagleLayout
from .loaders import QKV, Engine, Keys, Loader, Made, Parameter, Stopped, layer_made, layer_runs

VERSION = "SafeAILab EAGLE"


def eagle_runs(rope: dict[str, Any], keys: Keys, square: bool = False) -> dict[str, Any]:
    """How every published EAGLE class runs: no norm but the layer's second."""
    return layer_runs(keys, rope, square) | {
        "norms": (),
        "boundaries": "post-final-norm",
        "residual": None,
        "recycled": "its output",
        "layers": int(keys.need("num_hidden_layers")),
        "draft_ids": None,
    }


def eagle_made(keys: Keys, prefix: str = "", layer: str = "layers", **kind: Any) -> Made:
    """`fc` and the layers of an EAGLE class; the first has no input norm unless `kind` names its
    norms."""
    size = int(keys.need("hidden_size"))
    made: Made = {f"{prefix}fc.weight": Parameter((size, 2 * size))}
    for index in range(int(keys.need("num_hidden_layers"))):
        norms = (
            ("post_attention_layernorm",)
            if index == 0
            else ("input_layernorm", "post_attention_layernorm")
        )
        made |= layer_made(keys, f"{prefix}{layer}.{index}.", **{"norms": norms, **kind})
    made[f"{prefix}{EMBEDDING}"] = Parameter((int(keys.need("vocab_size")), size), "shared")
    return made


def plain_or_scaled(keys: Keys) -> dict[str, Any]:
    """The rope of the authors' code: `rope_theta`, or a scaling of two entries, then base 10000."""
    scaling = keys.get("rope_scaling")
    if scaling is None:
        theta = float(keys.get("rope_theta", 10000.0, guess=True) or 10000.0)
        return {"rope_type": "default", "rope_theta": theta}
    kind = scaling.get("type")
    if len(scaling) != 2 or kind not in ("linear", "dynamic"):
        raise Stopped(f"rope_scaling {scaling}: it knows linear and dynamic, of two entries, alone")
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": float(scaling["factor"])}


def _made(keys: Keys, target: Any) -> Made:
    made = eagle_made(keys, biases=QKV if keys.get("qkv_bias", False) else (), square=True)
    if keys.get("bias", True, guess=True):
        made["fc.bias"] = Parameter((int(keys.need("hidden_size")),))
    return made


def _runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return eagle_runs(plain_or_scaled(keys), keys, square=True)


SAFEAILAB = Engine(
    VERSION,
    lambda keys: "cnets1.Model",
    (Loader("cnets1.Model", "LlamaForCausalLM", _made, _runs, unexpected="drop"),),
)


def with_plain_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A scaled rope in the two entries that the authors' code takes."""
    scaling = config["rope_scaling"]
    if scaling is not None:
        config["rope_scaling"] = {k: v for k, v in scaling.items() if k != "rope_type"}
    return config


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    return with_plain_rope(config) | {"bias": loaded.head.config.projection_bias}


EAGLE = EagleLayout("eagle", "eagle", SAFEAILAB, _configure)
