"""Configuration: every choice composes, every mistake is named, nothing is lost between YAML and
dataclass."""

from __future__ import annotations

import dataclasses

import pytest

from draftsmith.conf.compose import composed, groups, options, plain, to_config
from draftsmith.conf.schema import Config
from draftsmith.conf.structured import build
from draftsmith.kernels.losses import LossConfig
from draftsmith.models.formats import LAYOUTS

CHOICES = [f"{group}={name}" for group, names in groups().items() for name in names]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_composes(choice: str) -> None:
    """A YAML file that the schema or a dataclass refuses would be found here."""
    assert isinstance(to_config(composed([choice])), Config)


def test_the_groups_are_the_documented_ones() -> None:
    """target, head, data, train, engine, tracker and experiment, each with a choice."""
    assert set(groups()) == {"target", "head", "data", "train", "engine", "tracker", "experiment"}


def test_an_experiment_is_overridden_by_the_command_line() -> None:
    """Later wins: schema, group, experiment, command line."""
    config = to_config(composed(["experiment=demo", "train.max_steps=7"]))
    assert config.train.max_steps == 7
    assert config.work == "work/demo"


def test_values_survive_the_round_trip() -> None:
    """dataclass -> composed node -> plain JSON -> dataclass gives the same frozen tree, tuples
    included."""
    node = composed(
        [
            "train.betas=[0.8,0.99]",
            "evaluate.temperatures=[0,1]",
            "train.draft_vocab_size=128",
            "train.step_weights=[1,0.5,0]",
        ]
    )
    config = to_config(node)
    assert config.train.step_weights == (1.0, 0.5, 0.0)
    assert config.train.betas == (0.8, 0.99)
    assert config.evaluate.temperatures == (0.0, 1.0)
    assert build(Config, plain(node)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_mix_of_losses_needs_no_quotes() -> None:
    """Weights and sums are plain characters of an override, so that a sweep can list them."""
    config = to_config(composed(["train.loss.kind=0.9*tv+0.1*ce", "train.loss.labels=data"]))
    assert config.train.loss == LossConfig("0.9*tv+0.1*ce", labels="data")


def test_a_free_mapping_takes_new_entries() -> None:
    """Arguments of a chat template are not ours to know."""
    config = to_config(composed(["+data.rows.template_kwargs.enable_thinking=false"]))
    assert config.data.rows.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trian.steps=1", "did you mean train.steps?"),
        ("max_stepz=1", "did you mean train.max_steps?"),
        ("steps=1", "did you mean train.steps?"),
        ("+train.stepz=1", "train.steps"),
        ("head=mpt", "did you mean mtp?"),
        ("experiment=dem", "did you mean demo?"),
        ("target=gpt", "llama-3.1-8b"),
        ("train.steps=abc", "'abc'.*expected int"),
        ("train.steps=1.5", "'1.5'.*expected int"),
        ("train.draft_vocab_size=many", "'many'.*expected int | None"),
        ("engine.poison=perhaps", "'perhaps'.*expected bool"),
        ("evaluate.temperatures=0.5", r"write evaluate.temperatures=\[…\]"),
        ("train.steps=a=b", "quotes"),
        ("train.zero_stage=7", "train.zero_stage=7"),
        ("train.loss.kind=kll", "train.loss: kind='kll'.*lk-alpha"),
        ("train.loss.labels=both", "train.loss.labels=both.*teacher"),
        ("train.loss.top=3", "did you mean train.loss.top_k?"),
        ("engine.page_size=0", "engine.page_size 0"),
        ("data.rows.max_length=1", "data.rows.*max_length 1"),
        ("data.rows.source=???", "data.rows.source has no value"),
        ("data.rows.template_kwargs.x=1", r"\+data.rows.template_kwargs.x="),
        ("evaluate.drafters=[nrgam]", "'nrgam'.*ngram"),
        ("work=", "work is empty"),
        ("zzzz=3", "--cfg job"),
    ],
)
def test_a_wrong_override_is_refused_by_name(override: str, told: str) -> None:
    """Unknown keys and choices give the nearest known one, wrong values the value and what is
    expected."""
    with pytest.raises(ValueError, match=told):
        to_config(composed([override]))


def test_every_option_says_what_it_means() -> None:
    """The help is the strings under the fields, so a field without one has no help."""
    unexplained = [key for key, meaning in options().items() if not meaning]
    assert set(unexplained) <= {"head.kind", "tracker.project"}


def test_the_help_lists_every_layout() -> None:
    """Of export and import alike."""
    for key in ("export.layout", "import_head.layout"):
        assert all(name in options()[key] for name in LAYOUTS)


def test_settings_of_the_live_target_without_it_are_told() -> None:
    """data.online.* does nothing for a cache: said, not silent, and ranks that would do other work
    are refused; the source is one of two."""
    with pytest.warns(
        UserWarning, match=r"data\.online\.\* is ignored: states come from the cache"
    ):
        to_config(composed(["data.online.timeout=1"]))
    with pytest.raises(ValueError, match="target_ranks=1 needs data.source=online"):
        to_config(composed(["data.online.target_ranks=1"]))
    chosen = to_config(composed(["data.source=online", "data.online.target_ranks=1"]))
    assert chosen.data.online.target_ranks == 1
    with pytest.raises(ValueError, match="data.source=disk is not known"):
        to_config(composed(["data.source=disk"]))
    with pytest.raises(ValueError, match="target_ranks=-1: must not be negative"):
        to_config(composed(["data.source=online", "data.online.target_ranks=-1"]))
