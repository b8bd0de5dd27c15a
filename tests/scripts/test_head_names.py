"""Drafters by name: `head` is any trained head, a kind is that kind alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch

from draftsmith.conf.compose import composed, groups, to_config
from draftsmith.conf.schema import EvaluateConfig, GenerateConfig
from draftsmith.models.heads import HEADS, HeadConfig, LoadedHead, NormConfig, build_head
from draftsmith.models.target import Target, TargetConfig
from draftsmith.scripts.acceptance import drafter, require_kind, untrained


@pytest.fixture
def target(tiny_llama_folder: Callable[..., Path]) -> Target:
    """A tiny target of three layers."""
    return Target.load(TargetConfig(source=str(tiny_llama_folder()), dtype="float32", device="cpu"))


def loaded(target: Target, config: HeadConfig, ids: torch.Tensor | None = None) -> LoadedHead:
    """A head as if read from its folder."""
    torch.manual_seed(3)
    head = build_head(config, target.folder, 2.0, draft_ids=ids)
    meta = {"head": asdict(config), "training": {"state_rms": 2.0, "seed": 3}}
    return LoadedHead(head, ids, meta)


def test_a_head_drafts_under_its_kind(target: Target):
    """Asked for as `head` or by its kind, reported by its kind; another kind is refused."""
    eagle = loaded(target, HeadConfig("eagle"))
    for name in ("head", "eagle"):
        found = drafter(name, eagle, target)
        assert found is not None and found.name == "eagle"
    with pytest.raises(ValueError, match="drafter 'mtp': the head is of kind 'eagle'"):
        drafter("mtp", eagle, target)
    with pytest.raises(ValueError, match="name it head or eagle"):
        require_kind(eagle, ["none", "head", "medusa"])
    assert drafter("none", None, target) is None


def test_the_untrained_head_of_any_kind_is_rebuilt(target: Target):
    """Bit for bit what training began with, the lm_head of its own included."""
    ids = torch.arange(0, 512, 2)
    eagle3 = loaded(target, HeadConfig("eagle3", boundaries=(1, 2)), ids)
    again = untrained(eagle3, target)
    for name, value in eagle3.head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize("name", ["head", *HEADS])
def test_settings_take_head_and_every_kind(name: str):
    """In the list of drafters and for a chat; another name is refused with the known ones."""
    assert EvaluateConfig(drafters=("none", name)).drafters[1] == name
    assert GenerateConfig(drafter=name).drafter == name
    with pytest.raises(ValueError, match="eagel"):
        EvaluateConfig(drafters=("eagel",))


def test_every_head_recipe_composes():
    """conf/head: published EAGLE has no norm, the restored one all; nothing is ignored."""
    heads = {name: to_config(composed([f"head={name}"])).head for name in groups()["head"]}
    assert {config.kind for config in heads.values()} == set(HEADS)
    assert not any(vars(heads["eagle"].norms).values())
    assert all(vars(heads["eagle-restored"].norms).values())
    assert heads["mtp-modules"].modules == 3 and heads["mtp"] == HeadConfig()
    assert heads["eagle3"] == HeadConfig("eagle3")


def test_the_documented_ablation_takes_each_norm_alone():
    """The loop of docs/heads/eagle.md names every norm, and its lines compose to that one."""
    text = (Path(__file__).parents[2] / "docs" / "heads" / "eagle.md").read_text()
    _, _, loop = text.partition("for norm in ")
    names, _, lines = loop.partition("; do")
    assert set(names.split()) == {field.name for field in fields(NormConfig)}
    overrides = [word for word in lines.partition("done")[0].split() if "=" in word]
    works = set()
    for norm in names.split():
        config = to_config(composed([word.replace("$norm", norm) for word in overrides]))
        assert [name for name, on in vars(config.head.norms).items() if on] == [norm]
        assert config.head.kind == "eagle"
        works.add(config.work)
    assert len(works) == 4
