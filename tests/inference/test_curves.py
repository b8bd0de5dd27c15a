"""The curves of a training run."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftsmith.inference.curves import draw, overview, training_curves
from draftsmith.inference.plots import png


def _train(step: int, **changes: Any) -> dict[str, Any]:
    line = {"kind": "train", "step": step, "loss": 0.1, "cross_entropy": 5.0, "lr": 1e-3}
    return line | {"tokens_per_second": 100.0} | changes


def _validation(step: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "validation", "step": step, "loss": 4.5, "agreement": [0.3, 0.1]} | changes


RUNS = {
    "heldout": {"0": {"tokens_per_target_call": 1.4}, "1": {"tokens_per_target_call": 1.2}},
    "code": {"0": {"tokens_per_target_call": 1.9}},
}


def test_each_panel_has_its_points() -> None:
    """The training loss is the one that compares with the held-out loss; acceptance by set and
    temperature."""
    curves = training_curves([_train(10), _validation(20, acceptance={"runs": RUNS})])
    assert curves == {
        "loss": {"training": [(10, 5.0)], "held out": [(20, 4.5)]},
        "agreement": {"draft 1": [(20, 0.3)], "draft 2": [(20, 0.1)]},
        "acceptance": {
            "heldout T=0": [(20, 1.4)],
            "heldout T=1": [(20, 1.2)],
            "code T=0": [(20, 1.9)],
        },
        "lr": {"learning rate": [(10, 1e-3)]},
        "speed": {"tokens/s": [(10, 100.0)]},
    }


def test_the_overview_leaves_out_empty_panels() -> None:
    """Without the engine four panels, without validation three, without lines no picture."""
    whole = overview([_train(10), _validation(20, acceptance={"runs": RUNS})])
    assert whole is not None and len(whole.axes) == 5
    lines = {axis.get_title(loc="left"): axis.get_lines() for axis in whole.axes}
    drawn = lines["Acceptance in the engine over training"]
    assert [np.asarray(line.get_ydata()).tolist() for line in drawn] == [[1.4], [1.2], [1.9]]
    assert png(whole).startswith(b"\x89PNG")
    apart = overview([_train(10), _validation(20)])
    assert apart is not None and len(apart.axes) == 4
    bare = overview([_train(10)])
    assert bare is not None and len(bare.axes) == 3
    assert overview([]) is None
    assert draw(training_curves([_train(10)]), "acceptance") is None
