"""Recipes: each composes with every number of GPUs, is forecast without a network, and fits the
memory it is for. Sweeps expand to the jobs they announce."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra._internal.core_plugins import basic_sweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from draftsmith.conf.compose import MODULE, ROOT, composed, groups, plain, register, to_config
from draftsmith.conf.schema import Config
from draftsmith.conf.structured import build
from draftsmith.scripts.plan import forecast

EXPERIMENTS = groups()["experiment"]
SWEEPS = {
    "ablation-norms": 36,
    "ablation-losses": 5,
    "ablation-families": 6,
    "ablation-context": 4,
    "ablation-answers": 2,
}
LARGER_THAN_A_DEVICE = {"llama-3.3-70b", "deepseek-v3-mtp"}
"""Targets that no one device holds, so that their cache comes from elsewhere."""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_recipe_is_forecast_and_fits(name: str, tmp_path: Path) -> None:
    """From the composed configuration alone: a work folder without anything in it, no hub."""
    overrides = [f"experiment={name}", f"work={tmp_path}/work", "inputs=null"]
    found = forecast(to_config(composed(overrides)))
    assert found.memory["train"].total <= found.budget
    assert set(found.too_much) <= ({"dump"} if name in LARGER_THAN_A_DEVICE else set())
    assert found.disk["cache"] > 0 and all(value > 0 for value in found.seconds.values())


@pytest.mark.parametrize("train", ["h100x1", "h100x8", "h100x16"])
def test_hardware_is_a_choice_of_its_own(train: str) -> None:
    """A recipe takes any number of GPUs, and each reads as many tokens in an optimiser step."""
    config = to_config(composed(["experiment=llama-3.1-8b", f"train={train}"]))
    assert config.plan.gpus == int(train.removeprefix("h100x"))
    settings = config.train
    assert settings.tokens_per_batch * settings.accumulation * config.plan.gpus == 131072
    assert settings.draft_vocab_size == 32768


@pytest.mark.parametrize(("name", "jobs"), SWEEPS.items())
def test_a_sweep_expands_to_its_jobs(name: str, jobs: int) -> None:
    """Hydra's own sweeper reads the parameters of the file; every job composes, and each has a
    work folder of its own."""
    register()
    places = set()
    with initialize_config_module(MODULE, version_base="1.3"):
        base = compose(ROOT, [f"experiment={name}"], return_hydra_config=True)
        assert base.hydra.mode.name == "MULTIRUN"
        # Hydra loads its plug-ins anew: the class is the one that is there by now
        sweeper = basic_sweeper.BasicSweeper(max_batch_size=None, params=base.hydra.sweeper.params)
        parsed = OverridesParser.create().parse_overrides(sweeper._parse_config())
        (batch,) = sweeper.split_arguments(parsed, max_batch_size=None)
        assert len(batch) == jobs
        for job in batch:
            node = compose(ROOT, [f"experiment={name}", *job])
            OmegaConf.resolve(node)
            config = build(Config, plain(node))
            places.add(config.work)
            assert config.inputs == "work/ablations"
    assert len(places) == jobs
