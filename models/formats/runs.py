"""What runs a head: engine and class by layout, and the layout that an engine's name stands for."""

from __future__ import annotations

from typing import Any

from ..heads.checkpoint import LoadedHead
from . import EAGLE_LAYOUTS, LAYOUTS, MEDUSA_LAYOUTS, MTP_LAYOUTS

MTP_CLASSES: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "deepseek-mtp": (
        (
            "deepseek_v3",
            {
                "vLLM": "DeepSeekMTPModel",
                "SGLang": "DeepseekV3ForCausalLMNextN",
                "TensorRT-LLM": "its MTP worker",
            },
        ),
    ),
    "glm-mtp": (
        (
            "glm4_moe",
            {
                "vLLM": "Glm4MoeMTPModel",
                "SGLang": "Glm4MoeForCausalLMNextN",
                "TensorRT-LLM": "its MTP worker",
            },
        ),
    ),
    "qwen-mtp": (
        (
            "qwen3_next",
            {
                "vLLM": "Qwen3NextMTP",
                "SGLang": "Qwen3NextForCausalLMMTP",
                "TensorRT-LLM": "its MTP worker",
            },
        ),
        (
            "qwen3_5",
            {
                "vLLM": "Qwen3_5MTP",
                "SGLang": "Qwen3_5ForCausalLMMTP",
                "TensorRT-LLM": "its MTP worker",
            },
        ),
    ),
    "mimo-mtp": (("mimo", {"vLLM": "MiMoMTPModel", "SGLang": "MiMoMTP"}),),
    "ernie-mtp": (("ernie4_5_moe", {"SGLang": "Ernie4_5_MoeForCausalLMMTP"}),),
}
"""Layout -> (start of the target's model_type, engine -> its class)."""

MTP_OTHERWISE = {
    "ernie-mtp": {
        "vLLM": "ErnieMTP turns the rope by halves, the family's layers by pairs: it would draft "
        "otherwise than the head was trained to"
    },
}
"""Layout -> engine -> why its class does not run such a module as it was trained."""

SHORT = {
    "vllm": {"eagle": "vllm-eagle", "eagle3": "vllm-eagle3", "medusa": "vllm-medusa"},
    "sglang": {"eagle": "sglang-eagle", "eagle3": "sglang-eagle3"},
    "trtllm": {"eagle3": "trtllm-eagle3"},
    "authors": {"eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa"},
}
"""What stands for an engine -> kind of head -> its layout there."""
_ENGINE = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "authors": "its authors' code",
}


def named_layout(name: str, loaded: LoadedHead) -> str:
    """The layout that a name stands for: itself, or of an engine's name (`SHORT`) the one that it
    reads this head from.

    Raises:
        ValueError: the engine has no class for such a head.
    """
    if name not in SHORT:
        return name
    kind, family = loaded.head.kind, str(loaded.head.target_config.model_type)
    if kind in SHORT[name]:
        return SHORT[name][kind]
    if kind == "mtp":
        for layout in MTP_LAYOUTS:
            if _ENGINE[name] in mtp_classes(layout.name, loaded.head.target_config):
                return layout.name
    raise ValueError(
        f"export.layout={name}: {_ENGINE[name]} has no class for a head of kind {kind} of a "
        f"{family} target (docs/where-heads-run.md); name a layout ({', '.join(LAYOUTS)}), or keep "
        "the native folder, which this engine runs"
    )


def where(loaded: LoadedHead, layout: str) -> str:
    """What runs a head in a layout that holds it, for the user."""
    eagle = next((one for one in EAGLE_LAYOUTS if one.name == layout), None)
    if eagle is not None:
        loader = eagle.loader_of(loaded)
        hint = (
            "; give it eagle3_layers_to_capture="
            f"{{{', '.join(str(k - 1) for k in loaded.head.boundaries)}}}"
            if layout == "trtllm-eagle3"
            else ""
        )
        return f"runs in {eagle.engine.name} as {loader.name}{hint}"
    medusa = next((one for one in MEDUSA_LAYOUTS if one.name == layout), None)
    if medusa is not None:
        return f"runs in {medusa.engine.name} as {medusa.engine.loaders[0].name}"
    found = mtp_classes(layout, loaded.head.target_config)
    if not found:
        return (
            f"no engine has a class for such a head of a {loaded.head.target_config.model_type} "
            "target; it runs in this engine alone"
        )
    return "runs in " + ", ".join(f"{engine} as {name}" for engine, name in found.items())


def mtp_classes(layout: str, target: Any) -> dict[str, str]:
    """Engine -> its class for MTP modules of a target in such a layout."""
    kind = str(target.model_type)
    found = (classes for start, classes in MTP_CLASSES[layout] if kind.startswith(start))
    return next(found, {})
