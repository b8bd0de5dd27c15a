"""The self-describing folder of the speculators library, which vLLM 0.33.0 serves as it lies
(`vllm serve FOLDER`: target, method and draft tokens are in config.json). EAGLE-3 heads; names as
in `eagle3.py`, the layers always `layers.i.*`.

config.json holds `speculators_model_type`, `speculators_config` (proposal methods, and the target
as `verifier.name_or_path`), `transformer_layer_config` (the Llama- or Qwen3-shaped layer) and
beside it the draft vocabulary, the boundaries as vLLM counts them and the norms' switches.
`norm_before_residual` is true for vLLM where it is absent, and false for the library itself: it
is always written. The embedding is a copy of the target's: where it is missing, the library
(0.9.0 with transformers 5.19) takes the target's only if the memory it allocated holds a NaN.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..heads.checkpoint import LoadedHead
from .eagle3 import with_vocabulary
from .eagle_files import EMBEDDING
from .eagle_layout import EagleLayout
from .loaders import Engine, Keys, Loader, Stopped
from .vllm_eagle import VERSION
from .vllm_eagle3 import CLASSES, IDS, all_or_none, with_flags, with_ids

LIBRARY = "0.9.0"
_CLASSES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
_TOP = (
    "draft_vocab_size",
    "norm_before_residual",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
    IDS,
)
_DRAFT_TOKENS = 3


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM makes of such a configuration."""
    if config.get("speculators_model_type") != "eagle3":
        raise Stopped(
            f"config.json has speculators_model_type={config.get('speculators_model_type')!r}, and "
            "eagle3 is held here"
        )
    try:
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        config["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError):
        raise Stopped(
            "config.json lacks speculators_config.proposal_methods[0].speculative_tokens or "
            "speculators_config.verifier.name_or_path"
        ) from None
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise Stopped("config.json has no transformer_layer_config")
    kind = layer.get("model_type", "llama")
    if kind not in _CLASSES:
        raise Stopped(f"transformer_layer_config.model_type {kind!r} is not one of {[*_CLASSES]}")
    flat = {
        **layer,
        "norm_before_fc": config.get("norm_before_fc", False),
        "fc_norm": config.get("fc_norm", False),
        "norm_output": config.get("norm_output", False),
        "architectures": [_CLASSES[kind]],
    }
    for name in ("draft_vocab_size", "target_hidden_size", "norm_before_residual", IDS):
        if config.get(name) is not None:
            flat[name] = config[name]
    return flat


def _assuming(loader: Loader) -> Loader:
    """The class as vLLM runs it from such a folder: another default. It finds the copy of the
    embedding equal and shares the target's; the library itself needs one, see above."""

    def runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
        normed = keys.get("norm_before_residual", True, guess=True)
        return loader.runs(keys, target, tensors) | ({"residual": "post-norm"} if normed else {})

    return replace(loader, runs=runs, fills={EMBEDDING: EMBEDDING})


_COPIED = tuple(map(_assuming, CLASSES[1:]))
SPECULATORS_VLLM = Engine(VERSION, lambda keys: keys.need("architectures")[0], _COPIED, flat=_flat)


def _verifier(folder: Path) -> str:
    """The target's name on the hub where the folder lies in the hub's cache, else its path."""
    cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{folder.absolute()}/")
    return "/".join(cached.groups()) if cached else str(folder.absolute())


def _configure(
    config: dict[str, Any], loader: Loader, loaded: LoadedHead, target: Path
) -> dict[str, Any]:
    config = with_flags(with_ids(with_vocabulary(all_or_none(config), loaded), loaded), loaded)
    del config["eagle_config"], config["architectures"]
    top = {name: config.pop(name) for name in _TOP}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": LIBRARY,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFT_TOKENS}],
            "verifier": {
                "name_or_path": _verifier(target),
                "architectures": list(
                    getattr(loaded.head.target_config, "architectures", None) or []
                ),
            },
        },
        **top,
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": config,
    }


SPECULATORS = EagleLayout("speculators", "eagle3", SPECULATORS_VLLM, _configure, midlayer=False)
