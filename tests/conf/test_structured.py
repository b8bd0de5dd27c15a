"""The derived schema of a frozen dataclass, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from draftsmith.conf.structured import build, describe, leaves, nearest, schema_of


@dataclass(frozen=True)
class Inner:
    """Has a choice and a rule."""

    mode: Literal["fast", "slow"] = "fast"
    """How."""
    sizes: tuple[int, ...] = (1, 2)
    limit: int = 3

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit {self.limit}: must not be negative")


@dataclass(frozen=True)
class Outer:
    """Has a required value."""

    name: str
    """Of the
    thing.

    Not of interest to a help text."""
    inner: Inner
    extra: dict[str, Any] = field(default_factory=dict)
    size: int | None = None


def node(values: dict[str, Any]) -> Any:
    """`values` merged into the schema of Outer, as plain containers."""
    merged = OmegaConf.merge(OmegaConf.structured(schema_of(Outer)), values)
    return OmegaConf.to_container(merged)


def test_frozen_becomes_mutable_and_back() -> None:
    """Values of every kind pass; tuples come back as tuples."""
    built = build(
        Outer, node({"name": "x", "inner": {"sizes": [5]}, "extra": {"a": [1]}, "size": 4})
    )
    assert built == Outer("x", Inner(sizes=(5,)), {"a": [1]}, 4)


def test_a_missing_value_is_named() -> None:
    """A required field without a value gives its full key."""
    with pytest.raises(ValueError, match="^name has no value"):
        build(Outer, node({}))


def test_a_choice_is_confined() -> None:
    """A Literal is a string to OmegaConf and a choice to us."""
    with pytest.raises(ValueError, match="inner.mode=fats is not known; did you mean fast"):
        build(Outer, node({"name": "x", "inner": {"mode": "fats"}}))


def test_a_refusal_says_where() -> None:
    """What a dataclass says of its own fields gets the section in front."""
    with pytest.raises(ValueError, match="^inner: limit -1: must not be negative"):
        build(Outer, node({"name": "x", "inner": {"limit": -1}}))


def test_descriptions_are_first_paragraphs() -> None:
    """Full keys, nested ones too; line breaks folded."""
    assert describe(Outer) == {"name": "Of the thing.", "inner.mode": "How."}
    assert [key for key, _, _ in leaves(Outer)] == [
        "name",
        "inner.mode",
        "inner.sizes",
        "inner.limit",
        "extra",
        "size",
    ]


def test_nearest_lists_all_where_none_is_near() -> None:
    """A word without likeness is answered with the choices."""
    assert nearest("lamma", ["llama", "qwen"]) == "did you mean llama?"
    assert nearest("zzz", ["llama", "qwen"]) == "known: llama, qwen"
