"""The model card of a native head folder: README.md, for whoever finds the folder on its own."""

from __future__ import annotations

import json
from typing import Any


def model_card(meta: dict[str, Any], config: dict[str, Any]) -> str:
    """Markdown with the front matter that hubs read.

    Args:
        meta: the folder's config.json. config: the run's resolved configuration.
    """
    kind, target = str(meta["head"]["kind"]), meta["target_config"]
    source = str(config.get("target", {}).get("source", ""))
    front = ["library_name: draftsmith", f"tags: [speculative-decoding, {kind}]"]
    if source.startswith("hf://"):
        front.append(f"base_model: {source.removeprefix('hf://')}")
    shape = {
        name: value
        for name, value in meta["head"].items()
        if name not in ("kind", "init") and value is not False and value not in ((), "none")
    }
    target_lines = {
        "name": source or "see provenance.json",
        "family": target.get("model_type"),
        "layers": target.get("num_hidden_layers"),
        "width": target.get("hidden_size"),
        "vocabulary": target.get("vocab_size"),
        **{f"fingerprint of its {name}": mark for name, mark in meta["target_fingerprint"].items()},
    }
    facts = {
        "draft vocabulary": f"{meta['draft_vocab_size']:,} ids",
        "longest text in training": f"{meta['trained_length']:,} tokens",
        **{name: value for name, value in meta["training"].items() if _short(value)},
    }
    return "\n".join(
        [
            "---",
            *front,
            "---",
            "",
            f"# A `{kind}` head for speculative decoding",
            "",
            "It drafts tokens for one target model, which checks them: the text is the target's,"
            " in fewer passes. It is of no use with another target.",
            "",
            *_table("Target", target_lines),
            *_table("Head", shape),
            *_table("Training", facts),
            "## Use",
            "",
            "```",
            "draftsmith generate generate.head=THIS_FOLDER target.source=THE_TARGET",
            "draftsmith evaluate evaluate.head=THIS_FOLDER target.source=THE_TARGET",
            "draftsmith export export.head=THIS_FOLDER 'export.layout=[vllm,sglang]'",
            "```",
            "",
            "`head.safetensors` holds the weights (float32), `config.json` how they are run, "
            "`provenance.json` the command and every setting that made them. The embedding and the "
            f"lm_head of the target are not in it. SHA-256 of the weights: `{meta['sha256']}`.",
            "",
        ]
    )


def _table(title: str, values: dict[str, Any]) -> list[str]:
    rows = [f"| {name} | {_told(value)} |" for name, value in values.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *rows, ""]


def _told(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(name for name, on in value.items() if on) or "none"
    return f"`{value}`" if isinstance(value, str) else json.dumps(value)


def _short(value: Any) -> bool:
    return isinstance(value, int | float | str) and len(str(value)) < 80
