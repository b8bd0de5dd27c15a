"""The bench against other trainers: what of it can be held without them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from draftsmith.scripts.bench import _peer_steps, peers


def test_the_peers_process_imports_nothing_of_this_package() -> None:
    """It runs in an environment that has the peer and not us."""
    tree = ast.parse(Path(_peer_steps.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and not (node.module or "").startswith("draftsmith")
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("draftsmith") for alias in node.names)


def test_every_weight_of_the_head_gets_its_peers_name() -> None:
    """A beginning that is given is replaced, the rest is kept, other tensors are left out."""
    one = torch.ones(1)
    rows = {"head.enorm.weight": one, "head.layers.0.mlp.up_proj.weight": one, "head.lm_head": one}
    names = {"enorm.": "midlayer.input_layernorm.", "layers.0.": "midlayer."}
    names["lm_head"] = "lm_head.weight"
    renamed = _peer_steps._renamed(rows | {"table": one, "head.fc.weight": one}, names)
    assert list(renamed) == [
        "midlayer.input_layernorm.weight",
        "midlayer.mlp.up_proj.weight",
        "lm_head.weight",
        "fc.weight",
    ]


@pytest.mark.parametrize("given", (["lengths=8", "speed=1"], ["a", "b"], ["eagle=folder"]))
def test_settings_that_it_does_not_know_are_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, and the message repeats what was given."""
    assert peers.main(given) == 2
    assert " ".join(given) in capsys.readouterr().err
