"""What engines' classes do with the MTP modules of a target's checkpoint, as descriptions that can
be run (`loaders.py`); the parameters are the family's own layer and what the layout puts around it.

vLLM (0.33.0): what is no tensor of a module that config.json counts is never looked at; inside one,
an unknown name raises, but a `.bias` is dropped. A missing norm raises in a target that is not
quantised, and so does the projection but in Qwen's classes; whatever vLLM's own layers hold (q, k,
v, o, gate, up, down, router, experts) stays random without a word where it is missing, although the
engine compares: such layers may fill themselves after loading and are passed over. In a quantised
target norms stay one (of style gemma zero) and the projection random, too; DeepSeek's class raises
where a whole module is missing. Embedding and lm_head are the target's. ErnieMTP makes a Llama
layer of the block, which turns the rope by halves, the family's by pairs.

SGLang (0.5.23): nothing that is missing is told: norms stay one (of style gemma: zero), biases
zero, the rest random. Of what it does not know, DeepSeek's and Qwen3.5's classes warn, GLM's says
nothing, Qwen3-Next's, MiMo's and ERNIE's raise; a `.bias` is dropped, but by ERNIE's. DeepSeek's
and GLM's take one module and no more; MiMo's loads every module over the one before.

TensorRT-LLM (00679c66, PyTorch path): names that it does not know are never looked at. What is
missing raises in DeepSeek's and GLM's classes; in Qwen's one of a packed projection does, the rest
stays random. Embedding and lm_head are the target's. All recycle after the norm, and one module is
run for every draft unless config.json counts more. It has no class for MiMo and ERNIE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ..heads.config import HeadConfig
from ..heads.mtp import MTPHead
from ..skeleton import skeleton, spelt
from .loaders import Engine, Keys, Loader, Made, Parameter, Stopped
from .mtp_target import text_part
from .sglang_eagle import VERSION as SGLANG
from .trtllm_eagle3 import VERSION as TRTLLM
from .vllm_eagle import VERSION as VLLM

_PACKED = re.compile(r"\.(experts\.\d+|[qkv]_proj|gate_proj|up_proj|q_a_proj|kv_a_proj_with_mqa)\.")
"""Tensors that a class keeps in one parameter with others."""


@dataclass(frozen=True)
class MTPNames:
    """How a layout spells its modules; see `MTPLayout`."""

    prefix: str
    own: dict[str, str]
    layer: str
    after_layers: bool
    count: str


@dataclass(frozen=True)
class MTPClass:
    """A class of an engine for the MTP modules of a family.

    Attributes:
        name: as the engine calls it. family: start of the model_type. missing: what becomes of a
            parameter without a tensor: `left` (norms stay one or zero, the rest random), `norms` or
            `norms, projection` (those raise where the target is not quantised, else as before),
            `raise`, or `packed` (one of a packed projection raises, the rest stays random).
        unexpected: see `Loader`. biases: of those that it does not know it drops `all`, those of
            `modules` that it has, or `none`.
        counted: it looks at the modules that config.json counts, not at every one. anywhere: parts
            of a name by which it looks at one that does not begin as the modules' do.
        copies: it makes a module's copies of embedding and lm_head, for which the target's stand
            in where they are missing; else it skips them knowingly.
        one: the number of modules that it stops at. first: it runs the first module alone.
        merged: each module is loaded over the one before. present: it raises where a whole module
            is missing.
        default: modules where config.json has no number; None needs it.
        norms: our names of those that it runs. recycled: as `facts` says it; None where it is
            another than the layout's from the second draft on. masked: the embedding at position 0
            is zeroed; None where the layout holds both. turned: how it turns the rope, where not as
            the family does.
    """

    name: str
    family: str
    missing: str = "left"
    unexpected: str = "raise"
    biases: str = "all"
    counted: bool = False
    anywhere: tuple[str, ...] = ()
    copies: bool = False
    one: bool = False
    first: bool = False
    merged: bool = False
    present: bool = False
    default: int | None = None
    norms: tuple[str, ...] = ("embedding", "hidden", "attention_input", "output")
    recycled: str | None = "its output after the norm"
    masked: bool | None = None
    order: tuple[str, str] = ("embedding", "hidden")
    style: str = "rms"
    turned: str = ""


_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_GEMMA = {"style": "gemma", "masked": False, "default": 1}
CLASSES: dict[str, dict[str, tuple[MTPClass, ...]]] = {
    "deepseek-mtp": {
        VLLM: (
            MTPClass(
                "DeepSeekMTPModel",
                "deepseek_v3",
                missing="norms, projection",
                counted=True,
                copies=True,
                present=True,
            ),
        ),
        SGLANG: (
            MTPClass("DeepseekV3ForCausalLMNextN", "deepseek_v3", unexpected="drop", one=True),
        ),
        TRTLLM: (MTPClass("DeepseekV3MTP", "deepseek_v3", missing="raise", unexpected="drop"),),
    },
    "glm-mtp": {
        VLLM: (
            MTPClass(
                "Glm4MoeMTPModel",
                "glm4_moe",
                missing="norms, projection",
                counted=True,
                copies=True,
                recycled="its output before the norm",
            ),
        ),
        SGLANG: (
            MTPClass(
                "Glm4MoeForCausalLMNextN",
                "glm4_moe",
                unexpected="drop",
                one=True,
                recycled=None,
            ),
        ),
        TRTLLM: (
            MTPClass("Glm4MTP", "glm4_moe", missing="raise", unexpected="drop", recycled=None),
        ),
    },
    "qwen-mtp": {
        VLLM: (
            MTPClass("Qwen3NextMTP", "qwen3_next", missing="norms", biases="modules", **_GEMMA),
            MTPClass("Qwen3_5MTP", "qwen3_5", missing="norms", biases="modules", **_GEMMA),
        ),
        SGLANG: (
            MTPClass("Qwen3NextForCausalLMMTP", "qwen3_next", anywhere=("mtp",), **_GEMMA),
            MTPClass("Qwen3_5ForCausalLMMTP", "qwen3_5", unexpected="drop", **_GEMMA),
        ),
        TRTLLM: tuple(
            MTPClass("Qwen3NextMTP", family, missing="packed", unexpected="drop", **_GEMMA)
            for family in ("qwen3_next", "qwen3_5")
        ),
    },
    "mimo-mtp": {
        VLLM: (
            MTPClass(
                "MiMoMTPModel",
                "mimo",
                missing="norms, projection",
                biases="modules",
                first=True,
                order=("hidden", "embedding"),
                masked=True,
            ),
        ),
        SGLANG: (
            MTPClass(
                "MiMoMTP",
                "mimo",
                merged=True,
                anywhere=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
                order=("hidden", "embedding"),
                masked=True,
            ),
        ),
    },
    "ernie-mtp": {
        VLLM: (
            MTPClass(
                "ErnieMTP",
                "ernie4_5_moe",
                missing="norms, projection",
                biases="modules",
                one=True,
                norms=("embedding", "hidden", "attention_input"),
                recycled="its output",
                masked=True,
                turned="by halves",
            ),
        ),
        SGLANG: (
            MTPClass(
                "Ernie4_5_MoeForCausalLMMTP",
                "ernie4_5_moe",
                biases="none",
                present=True,
                norms=("embedding", "hidden", "attention_input"),
                recycled="its output",
                masked=True,
            ),
        ),
    },
}
"""Layout -> engine -> its classes."""


def engines(layout: str, names: MTPNames) -> tuple[Engine, ...]:
    """The engines that have classes for a layout."""
    return tuple(
        Engine(engine, _resolver(classes), tuple(_loader(one, names) for one in classes), text_part)
        for engine, classes in CLASSES.get(layout, {}).items()
    )


def mtp_classes(layout: str, target: Any) -> dict[str, str]:
    """Engine, without its version -> its class for MTP modules of a target in such a layout."""
    kind = str(target.model_type)
    return {
        engine.split()[0]: one.name
        for engine, classes in CLASSES.get(layout, {}).items()
        for one in classes
        if kind.startswith(one.family)
    }


@lru_cache(maxsize=8)
def module_shapes(described: str) -> dict[str, tuple[int, ...]]:
    """The tensors of one MTP module as its family's checkpoints spell them.

    Args:
        described: transformers' configuration of the target as JSON.
    Returns:
        name inside the module (that of the decoder layer after `layer.`) -> shape.
    """
    target = AutoConfig.for_model(**json.loads(described))
    with torch.device("meta"):
        head = MTPHead(HeadConfig("mtp"), target)
    tensors = spelt(skeleton(target), dict(head.state_dict()))
    return {name.removeprefix("blocks.0."): tuple(value.shape) for name, value in tensors.items()}


def _resolver(classes: tuple[MTPClass, ...]) -> Callable[[Keys], str]:
    def resolve(keys: Keys) -> str:
        kind = str(keys.need("model_type"))
        found = next((one.name for one in classes if kind.startswith(one.family)), None)
        if found is None:
            raise Stopped(f"there is no MTP class for targets of model_type {kind!r}")
        return found

    return resolve


def _loader(one: MTPClass, names: MTPNames) -> Loader:
    def modules(keys: Keys) -> int:
        if one.default is None:
            return int(keys.need(names.count))
        return int(keys.get(names.count, one.default) or one.default)

    def prefix(target: Any, module: int) -> str:
        first = int(target.num_hidden_layers) if names.after_layers else 0
        return names.prefix.format(index=first + module)

    def made(keys: Keys, target: Any) -> Made:
        count, found = modules(keys), Made()
        if one.one and count != 1:
            raise Stopped(f"config.json has {names.count}={count}, and it takes 1 module alone")
        quantised = bool(keys.get("quantization_config"))
        for module in range(1 if one.merged else count):
            start = prefix(target, module)
            for name, shape in module_shapes(target.to_json_string(use_diff=False)).items():
                inside = name.removeprefix("layer.")
                if inside == name and name not in names.own:
                    continue  # a norm that the layout's modules do not have
                theirs = names.own[name] if inside == name else names.layer + inside
                found[start + theirs] = Parameter(shape, _absent(one, name, quantised))
            shape = (int(target.vocab_size), int(target.hidden_size))
            found |= {start + name: Parameter(shape, "shared") for name in _COPIES if one.copies}
        return found

    def runs(keys: Keys, target: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
        count = modules(keys)
        for module in range(count):
            start = prefix(target, module)
            if one.present and not any(name.startswith(start) for name in tensors):
                raise Stopped(f"the weights of MTP module {start.rstrip('.')} are missing")
        told: dict[str, Any] = {
            "norms": one.norms,
            "order": one.order,
            "style": one.style,
            "modules": 1 if one.first or one.merged else count,
        }
        if one.recycled is not None:
            told["recycled"] = one.recycled
        if one.turned:
            told["turned"] = one.turned
        return told | ({} if one.masked is None else {"masked": one.masked})

    def rename(name: str) -> str | None:
        if not one.copies and name.endswith(_COPIES):
            return None
        if one.merged:
            return re.sub(r"^(model\.mtp_layers)\.\d+\.", r"\1.0.", name)
        return name

    def looks(name: str, made: Made) -> bool:
        if name.endswith(".bias"):
            module = name.removesuffix("bias") + "weight"
            if one.biases == "all" or (one.biases == "modules" and module in made):
                return False
        if one.counted:
            start = re.match(r".*?layers\.\d+\.", name)
            return start is not None and any(key.startswith(start.group()) for key in made)
        start = names.prefix.partition("{")[0]
        return name.startswith(start) or any(part in name for part in one.anywhere)

    return Loader(
        one.name,
        "",
        made,
        runs,
        rename,
        unexpected=one.unexpected,
        looks=looks,
    )


def _absent(one: MTPClass, name: str, quantised: bool) -> str:
    """What becomes of a parameter that has no tensor, by our name; see `Parameter`."""
    norm = name.endswith("norm.weight")
    if one.missing == "raise" or (one.missing == "packed" and _PACKED.search(name)):
        return "raise"
    if norm or name == "eh_proj.weight":
        if not quantised and ("norms" if norm else "projection") in one.missing:
            return "raise"
    if norm and one.missing != "packed":
        return "ones" if one.style == "rms" else "zeros"
    if name.endswith(".bias") and one.missing == "left":
        return "zeros"
    return "random"
