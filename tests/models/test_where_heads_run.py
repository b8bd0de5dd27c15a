"""The page that says where a head runs, and the layouts that an engine's name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.models.formats.matrix import head_of, page
from draftsmith.models.formats.runs import SHORT, named_layout, where
from draftsmith.models.heads import HeadConfig, NormConfig

from .test_real_sizes import real_head

NONE = NormConfig(False, False, False, False)
MOE = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def test_the_page_is_that_of_the_code() -> None:
    """docs/where-heads-run.md, written by `python -m draftsmith.models.formats.matrix`."""
    root = Path(__file__).resolve().parents[2]
    assert (root / "docs" / "where-heads-run.md").read_text() == page()


def test_what_is_said_of_an_export() -> None:
    """The class that runs it, or that there is none."""
    llama = {"model_type": "llama"}
    assert "no engine has a class" in where(head_of(HeadConfig(), llama), "deepseek-mtp")
    told = where(head_of(HeadConfig("eagle3"), llama), "trtllm-eagle3")
    assert "Eagle3ForCausalLM" in told and "eagle3_layers_to_capture={1, 3, 4}" in told
    glm = {"model_type": "glm4_moe", **MOE}
    told = where(head_of(HeadConfig(modules=2, recycle_raw=True), glm), "glm-mtp")
    assert told.startswith(
        "runs in vLLM as Glm4MoeMTPModel, TensorRT-LLM as Glm4MTP; not in SGLang"
    )
    assert "takes 1 module alone" in told


def test_an_engines_name_stands_for_its_layout() -> None:
    """By the head's kind, MTP by the target's family; where there is no class it is refused."""
    llama, glm = {"model_type": "llama"}, {"model_type": "glm4_moe", **MOE}
    eagle3 = head_of(HeadConfig("eagle3"), llama)
    assert [named_layout(name, eagle3) for name in SHORT] == [
        "vllm-eagle3",
        "sglang-eagle3",
        "trtllm-eagle3",
        "eagle3",
    ]
    medusa = head_of(HeadConfig("medusa", norms=NONE), llama)
    assert [named_layout(name, medusa) for name in ("vllm", "authors")] == ["vllm-medusa", "medusa"]
    mtp = head_of(HeadConfig(recycle_raw=True), glm)
    assert {named_layout(name, mtp) for name in ("vllm", "sglang", "trtllm")} == {"glm-mtp"}
    assert named_layout("qwen-mtp", mtp) == "qwen-mtp"
    for name, head in (("sglang", medusa), ("vllm", head_of(HeadConfig(), llama))):
        with pytest.raises(ValueError, match=f"export.layout={name}: .* has no class"):
            named_layout(name, head)


def test_ernies_modules_are_refused_where_the_rope_turns_otherwise() -> None:
    """vLLM has a class, which runs another rope; SGLang's is the family's."""
    config = HeadConfig(norms=NormConfig(output=False), mask_position_zero=True)
    ernie = real_head("ernie-4.5-21b", config)
    assert named_layout("sglang", ernie) == "ernie-mtp"
    with pytest.raises(ValueError, match=r"export.layout=vllm: .*turned by halves, this head has"):
        named_layout("vllm", ernie)
