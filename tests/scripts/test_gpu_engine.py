"""The checks of the engine's backends, as far as they run without a GPU, and that they can fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "inference"))

from documented_flashinfer import Plain  # noqa: E402  # pyright: ignore[reportMissingImports]

from draftsmith.inference import engine, flashinfer_pages  # noqa: E402
from draftsmith.inference.flashinfer_pages import FlashInfer  # noqa: E402
from draftsmith.scripts import gpu_engine  # noqa: E402
from draftsmith.scripts.gpu_check import toy  # noqa: E402
from draftsmith.scripts.gpu_engine import (  # noqa: E402
    BATCHES,
    backends,
    flashinfer_checks,
    graph_checks,
)


def test_pages_read_by_what_is_documented(monkeypatch: pytest.MonkeyPatch):
    """Good where the plan is right; a wrong view of the pages and a refusal are told."""
    short = {name: BATCHES[name] for name in ("trees",)}
    short["chains"] = ([(21, 4), (5, 1), (32, 4)], None)
    short["trees"] = ([(21, 7), (1, 1)], [gpu_engine.TREE, [-1]])
    monkeypatch.setattr(gpu_engine, "BATCHES", short)
    found = flashinfer_checks("cpu", Plain(), torch.float64)
    assert len(found) == 4 and set(found.values()) == {"good"}
    refused = flashinfer_checks("cpu", FlashInfer(), torch.float64)
    assert all(told.startswith("ValueError: engine.attention") for told in refused.values())
    view = flashinfer_pages.as_pages
    monkeypatch.setattr(flashinfer_pages, "as_pages", lambda pool, size: view(pool, size).flip(0))
    wrong = flashinfer_checks("cpu", Plain(), torch.float64)
    assert all(told.startswith("differs by") for told in wrong.values())


def test_replayed_passes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calls in the place of graphs agree; a graph that does nothing writes another text, one that
    cannot be captured is told, and so is that none was."""
    target, head = toy(tmp_path, "float64", "cpu", hidden=32)

    def failing(call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted")

    with pytest.warns(UserWarning, match="cuda_graphs is ignored"):
        assert graph_checks(target, head, [[3, 4]]) == {"engine, graphs": "no pass was replayed"}
    monkeypatch.setattr(engine, "hindrance", lambda target, config: None)
    for capture, told in [
        (lambda call: call, "good"),
        (lambda call: lambda: None, "[["),
        (failing, "operation not permitted"),
    ]:
        monkeypatch.setattr(engine, "CudaGraphs", lambda capture=capture: capture)
        assert graph_checks(target, head, [[3, 4], [5] * 9])["engine, graphs"].startswith(told)


def test_nothing_is_checked_without_a_gpu():
    """The whole check runs in parts on a CPU."""
    none: list[list[int]] = []
    assert backends(None, None, none, "cpu") == {}  # pyright: ignore
