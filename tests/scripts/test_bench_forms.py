"""The benches' forms compute the same thing, and what is measured is what grows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from draftsmith.scripts.bench import _forms, attention, loss


def test_forms_agree():
    """Gradients of ours and of the dense forms, within bfloat16's rounding."""
    for make, others in ((loss.make, ("dense",)), (attention.make, ("mask", "definition"))):
        ours = make("ours", 48)()
        for form in others:
            for a, b in zip(ours, make(form, 48)(), strict=True):
                assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.03


HELD = """
import torch

def hold(form, tokens):
    size = 2**21 if form == "flat" else tokens * tokens
    return lambda: torch.ones(size, dtype=torch.uint8).amax()
"""
"""A module that a fresh process can import: `flat` holds 2 MiB whatever the length, `square` tokens
x tokens bytes."""


def test_growth_and_ratio_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A form that is quadratic shows it; the ratio is that of the medians."""
    (tmp_path / "held_forms.py").write_text(HELD)
    monkeypatch.syspath_prepend(tmp_path)
    hold = importlib.import_module("held_forms").hold
    monkeypatch.setattr(_forms, "LENGTHS", (2048, 4096, 8192))
    assert _forms.compare("held", hold, "flat", ("square",), [str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    flat, square = report["peak_mib"]["flat"], report["peak_mib"]["square"]
    assert max(flat.values()) < 8 < 14 < square["4096"]
    assert report["ratio"] == report["seconds"]["square"] / report["seconds"]["flat"]
    assert "times as fast" in capsys.readouterr().out
