"""Which head runs in which engine: the very checks of `export`, run on heads without data, as a
page (docs/where-heads-run.md).

    python -m draftsmith.models.formats.matrix > docs/where-heads-run.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..heads.checkpoint import LoadedHead
from ..heads.config import HeadConfig, NormConfig
from ..heads.families import head_class
from . import EAGLE_LAYOUTS, MEDUSA_LAYOUTS, MTP_LAYOUTS
from .mtp_layout import MTPLayout
from .mtp_loaders import mtp_classes
from .runs import mtp_runs
from .written import KEEP

ENGINES = ("vLLM", "SGLang", "TensorRT-LLM", "authors")
_COLUMN = {
    "eagle": "authors",
    "vllm-eagle": "vLLM",
    "sglang-eagle": "SGLang",
    "eagle3": "authors",
    "vllm-eagle3": "vLLM",
    "sglang-eagle3": "SGLang",
    "trtllm-eagle3": "TensorRT-LLM",
    "speculators": "vLLM",
    "medusa": "authors",
    "vllm-medusa": "vLLM",
}

_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_routed_experts": 4}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
TARGETS: dict[str, dict[str, Any]] = {
    "Llama, plain rope": {"model_type": "llama", "head_dim": 16},
    "Llama-3.1 and later": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "Mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "Qwen2": {"model_type": "qwen2"},
    "Qwen3": {"model_type": "qwen3", "head_dim": 32},
    "Gemma-2": {"model_type": "gemma2", "head_dim": 16},
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        **_EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        **_EXPERTS,
        **_MLA,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "ERNIE-4.5": {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 32,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_layer_end_index": 6,
    },
    "Qwen3-Next": {
        "model_type": "qwen3_next",
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention"] * 8,
    },
}
_LINEAR = ("qwen3_next",)
_NONE = NormConfig(False, False, False, False)
_ERNIE = HeadConfig(norms=NormConfig(output=False), mask_position_zero=True)
HEADS: dict[str, HeadConfig] = {
    "`mtp`": HeadConfig(),
    "`mtp`, two modules": HeadConfig(modules=2),
    "`eagle` as published": HeadConfig("eagle", norms=_NONE),
    "`eagle` as published, projection_bias": HeadConfig("eagle", projection_bias=True, norms=_NONE),
    "`eagle`, attention_input": HeadConfig("eagle", norms=NormConfig(False, False, True, False)),
    "`eagle`, attention_input + output": HeadConfig(
        "eagle", norms=NormConfig(False, False, True, True)
    ),
    "`eagle`, embedding + hidden + attention_input": HeadConfig(
        "eagle", norms=NormConfig(True, True, True, False)
    ),
    "`eagle-restored` (all four)": HeadConfig("eagle"),
    "`eagle3`": HeadConfig("eagle3"),
    "`eagle3`, two layers": HeadConfig("eagle3", num_layers=2),
    "`eagle3`, other boundaries": HeadConfig("eagle3", boundaries=(3, 5, 7)),
    "`eagle3`, norm_before_residual": HeadConfig("eagle3", norm_before_residual=True),
    "`eagle3`, norm_output": HeadConfig("eagle3", norm_output=True),
    "`eagle3`, norm_before_fc=all": HeadConfig("eagle3", norm_before_fc="all"),
    "`eagle3`, norm_before_fc=each": HeadConfig("eagle3", norm_before_fc="each"),
    "`medusa`": HeadConfig("medusa", modules=3, norms=_NONE),
    "`medusa`, five heads": HeadConfig("medusa", modules=5, norms=_NONE),
    "`medusa`, five heads, own_lm_heads": HeadConfig(
        "medusa", modules=5, own_lm_heads=True, norms=_NONE
    ),
}


def cell(loaded: LoadedHead) -> dict[str, tuple[bool, str]]:
    """Engine -> (whether it runs the head, its class or the reason why not)."""
    told: dict[str, tuple[bool, str]] = {}
    for layout in (*EAGLE_LAYOUTS, *MEDUSA_LAYOUTS):
        if layout.kind != loaded.head.kind or layout.name == "speculators":
            continue  # a speculators folder is vLLM's too, with the same classes
        try:
            report = layout.plan(loaded, Path()).report
        except ValueError as error:
            told[_COLUMN[layout.name]] = False, _plain(str(error), layout.name)
        else:
            told[_COLUMN[layout.name]] = True, report.loader
    for layout in MTP_LAYOUTS if loaded.head.kind == "mtp" else ():
        told |= _mtp(layout, loaded)
    return told


def _mtp(layout: MTPLayout, loaded: LoadedHead) -> dict[str, tuple[bool, str]]:
    classes = mtp_classes(layout.name, loaded.head.target_config)
    if not classes:
        return {}
    try:
        layout.check(loaded)
    except ValueError as error:
        return dict.fromkeys(classes, (False, str(error)))
    return mtp_runs(layout, loaded)


def _plain(reason: str, layout: str) -> str:
    return reason.removeprefix(f"the {layout} layout: ").removesuffix(f". Or {KEEP}")


def head_of(config: HeadConfig, target: dict[str, Any]) -> LoadedHead:
    """A head without data for a target of these settings."""
    settings = {**_SHAPE, **target}
    described = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        head = head_class(config.kind)(config, described)
    return LoadedHead(head, None, {})


def page() -> str:
    """The page."""
    notes: list[str] = []

    def note(words: str) -> str:
        if words not in notes:
            notes.append(words)
        return f"– [{notes.index(words) + 1}]"

    def row(title: str, config: HeadConfig, target: dict[str, Any]) -> str:
        here = (True, "yes")
        if target["model_type"] in _LINEAR:
            here = (False, "the target's linear attention is not run here; its head is kept alone")
        try:
            found = cell(head_of(config, target))
        except ValueError as error:
            here = (False, str(error))
            found = dict.fromkeys(ENGINES, here)
        if config.kind == "mtp" and not found:
            found = dict.fromkeys(ENGINES, (False, "the family has no MTP class there"))
        cells: list[str] = []
        for engine in ENGINES:
            runs, words = found.get(engine, (False, "no class for this kind of head"))
            cells.append(f"`{words}`" if runs else note(words))
        cells.append("yes" if here[0] else note(here[1]))
        return f"| {title} | {' | '.join(cells)} |"

    line = f"| | {' | '.join(ENGINES)} | this engine |\n|{'---|' * (len(ENGINES) + 2)}"
    plain = TARGETS["Llama, plain rope"]
    heads = [row(title, config, plain) for title, config in HEADS.items()]
    families: list[str] = []
    for family, target in TARGETS.items():
        for title in ("`mtp`", "`eagle` as published", "`eagle3`"):
            config = HEADS[title]
            if family == "GLM-4.5" and config.kind == "mtp":
                config, title = HeadConfig(recycle_raw=True), "`mtp`, recycle_raw"
            if family == "ERNIE-4.5" and config.kind == "mtp":
                config, title = _ERNIE, "`mtp` of its own kind"
            families.append(row(f"{family}: {title}", config, target))
    told = [f"{index}. {text}" for index, text in enumerate(notes, 1)]
    layouts = (*EAGLE_LAYOUTS, *MEDUSA_LAYOUTS)
    versions = ", ".join(dict.fromkeys(one.engine.name for one in layouts))
    return "\n".join(
        [
            "# Where a head runs",
            "",
            "Written by `python -m draftsmith.models.formats.matrix` from the checks of",
            "`draftsmith export` themselves, on heads without data; a test holds the page against",
            "the code. The classes were read from the engines' sources:",
            f"{versions}.",
            "A `speculators` folder runs in vLLM by the same classes as `vllm-eagle3`. vLLM 0.33",
            "has no Medusa any more. The column of the authors is SafeAILab's code for EAGLE,",
            "FasterDecoding's for Medusa's. Publishing and reading:",
            "[MTP](formats/mtp.md), [EAGLE](formats/eagle.md), [EAGLE-3](formats/eagle3.md),",
            "[Medusa](formats/medusa.md). What the engines' own packages made of such folders:",
            "[export](formats/export.md).",
            "",
            "## Heads of a Llama-family target",
            "",
            line,
            *heads,
            "",
            "## Target families",
            "",
            line,
            *families,
            "",
            "## Why not",
            "",
            *told,
            "",
        ]
    )


def main() -> int:
    """Print the page."""
    sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
