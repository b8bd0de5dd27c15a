"""The benches' forms compute the same thing, and what is measured is what grows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.scripts.bench import _forms, attention, loss


def test_forms_agree():
    """Gradients of ours and of the dense forms, within bfloat16's rounding."""
    for make, others in ((loss.make, ("dense",)), (attention.make, ("mask", "definition"))):
        ours = make("ours", 48)()
        for form in others:
            for a, b in zip(ours, make(form, 48)(), strict=True):
                assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.03


def _hold(form: str, tokens: int) -> Callable[[], Any]:
    """`flat` holds 2 MiB whatever the length, `square` tokens x tokens bytes."""
    size = 2**21 if form == "flat" else tokens * tokens
    return lambda: torch.ones(size, dtype=torch.uint8).amax()


def test_growth_and_ratio_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A form that is quadratic shows it; the ratio is that of the medians."""
    monkeypatch.setattr(_forms, "LENGTHS", (2048, 4096, 8192))
    assert _forms.compare("held", _hold, "flat", ("square",), [str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    flat, square = report["peak_mib"]["flat"], report["peak_mib"]["square"]
    assert max(flat.values()) < 8 < 14 < square["4096"]
    assert report["ratio"] == report["seconds"]["square"] / report["seconds"]["flat"]
    assert "times as fast" in capsys.readouterr().out
