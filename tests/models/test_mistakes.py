"""The classic mistakes in a folder, in every layout that has one of its own: what the engine's
loader makes of each, and what is made of it when such a folder is read here (CASES 7, 8, 39, 40,
47, 92). Those of MTP modules are in test_mtp_loaders.

vLLM's and SGLang's outcomes are those of their own classes, which were given such folders
(docs/formats/export.md); the others' were read from their sources.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models.formats.loaders import Report
from draftsmith.models.heads import HeadConfig, NormConfig

from .eagle_toys import BY_NAME, IDS, NONE, head_for

Tensors = dict[str, Tensor]
Harm = Callable[[Tensors, dict[str, Any]], None]
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
BOUNDARIES = (1, 4, 6)


def first(tensors: Tensors) -> str:
    """What stands before the first layer's own names."""
    return next(name for name in tensors if "self_attn" in name).partition("self_attn")[0]


def missing_norm(tensors: Tensors, config: dict[str, Any]) -> None:
    del tensors[first(tensors) + "post_attention_layernorm.weight"]


def extra_norm(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[first(tensors) + "self_attn.q_norm.weight"] = torch.ones(8)


def bias(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[first(tensors) + "self_attn.o_proj.bias"] = torch.ones(32)


def absolute_ids(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(IDS))


def no_map(tensors: Tensors, config: dict[str, Any]) -> None:
    del tensors["d2t"]


def other_counting(tensors: Tensors, config: dict[str, Any]) -> None:
    """Layers that are left where those that are entered are asked for, and the other way round."""
    if IDS_KEY in config:
        config[IDS_KEY] = [k - 1 for k in config[IDS_KEY]]
    if "eagle_config" in config:
        config["eagle_config"][IDS_KEY] = [k + 1 for k in config["eagle_config"][IDS_KEY]]


def prefix(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in list(tensors):
        tensors["model." + name] = tensors.pop(name)


def tied(tensors: Tensors, config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True


def no_embedding(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if "embed_tokens" in name]:
        del tensors[name]


def lm_head(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = torch.ones(96, 32)


A_O = NormConfig(False, False, True, True)
E_H_A = NormConfig(True, True, True, False)
A = NormConfig(False, False, True, False)
LEFT = "dropped+random+ones"
# By mistake, in the order of EAGLE: what the class does that it would not do with a whole folder.
EAGLE = (missing_norm, extra_norm, bias, prefix, tied, no_embedding, lm_head)
EAGLE_TABLE: list[tuple[str, NormConfig, str]] = [
    ("eagle", NONE, f"ones dropped dropped {LEFT} same same dropped"),
    ("vllm-eagle", NONE, "ones raises dropped raises same same raises"),
    ("vllm-eagle", A_O, "raises raises dropped raises same same raises"),
    ("vllm-eagle", E_H_A, "raises raises dropped raises same same same"),
    ("sglang-eagle", NONE, f"ones dropped dropped {LEFT} same same same"),
    ("sglang-eagle", A, f"ones dropped dropped {LEFT} same same same"),
]
EAGLE3 = (
    *(missing_norm, extra_norm, bias, prefix, tied, no_embedding),
    *(absolute_ids, no_map, other_counting),
)
# zeros: of the map, so that the first ids are drafted.
EAGLE3_TABLE: dict[str, str] = {
    "eagle3": "ones dropped dropped dropped+random+zeros+ones+draft_ids same same"
    " draft_ids zeros+draft_ids same",
    "vllm-eagle3": "ones raises dropped raises same same draft_ids zeros+draft_ids boundaries",
    "speculators": "ones raises dropped raises same same draft_ids zeros+draft_ids boundaries",
    "sglang-eagle3": "ones dropped dropped dropped+random dropped same"
    " draft_ids zeros+draft_ids boundaries",
    "trtllm-eagle3": "random dropped dropped raises same same draft_ids raises boundaries",
}
CASES = [
    (name, HeadConfig("eagle", norms=norms), harm, words)
    for name, norms, row in EAGLE_TABLE
    for harm, words in zip(EAGLE, row.split(), strict=True)
] + [
    # The authors' code reads the usual boundaries and no others.
    (name, HeadConfig("eagle3", boundaries=() if name == "eagle3" else BOUNDARIES), harm, words)
    for name, row in EAGLE3_TABLE.items()
    for harm, words in zip(EAGLE3, row.split(), strict=True)
]


def outcome(report: Report, whole: Report) -> str:
    """In one word each, what a loader does with a harmed folder that it would not do with a whole
    one."""
    if report.raised:
        return "raises"
    words = [
        name
        for name in ("dropped", "random", "zeros", "ones")
        if set(getattr(report, name)) - set(getattr(whole, name))
    ]
    words += [
        name
        for name in ("draft_ids", "boundaries")
        if report.runs.get(name) != whole.runs.get(name)
    ]
    return "+".join(words) or "same"


@pytest.mark.parametrize(
    ("name", "config", "harm", "words"),
    CASES,
    ids=[f"{index}-{name}-{harm.__name__}" for index, (name, _, harm, _) in enumerate(CASES)],
)
def test_every_mistake_in_every_layout(
    folders: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    config: HeadConfig,
    harm: Harm,
    words: str,
) -> None:
    """The loader does what is written above. Read here, such a folder is refused where the engine
    would stop, drop or invent, mended and told where that is proven, and else the very same head;
    boundaries in the other counting alone cannot be known for such, and are read as they stand."""
    folder, one = folders("llama"), BY_NAME[name]
    loaded = head_for(folder, config, IDS if config.kind == "eagle3" else None)
    planned = one.plan(loaded, folder)
    assert not planned.report.faults()
    tensors, written = dict(planned.tensors), json.loads(json.dumps(planned.config))
    harm(tensors, written)
    report = one.engine.load(written, tensors, loaded.head.target_config)
    assert outcome(report, planned.report) == words
    (tmp_path / "config.json").write_text(json.dumps(written))
    save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "a.safetensors")
    if report.faults() and harm is not lm_head:
        with pytest.raises(ValueError, match="as .* loads it"):
            one.read(tmp_path, folder)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        back = one.read(tmp_path, folder)
    assert bool(told) == (harm in (absolute_ids, lm_head))
    state = loaded.head.state_dict()
    assert all(torch.equal(back.head.state_dict()[key], value) for key, value in state.items())
    assert (back.head.boundaries == loaded.head.boundaries) == (words != "boundaries")
    assert config.kind == "eagle" or torch.equal(back.draft_ids, IDS)  # type: ignore[arg-type]
