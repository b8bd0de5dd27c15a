"""The tuner keeps what is faster, and launches then use it; without a GPU it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.kernels import jit, launches
from draftsmith.scripts.op_arguments import Size
from draftsmith.scripts.op_cases import CASES
from draftsmith.scripts.tune import main, tune, write

TINY = Size("tiny", 40, 4, 2, 24, 16, 300)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table of its own, for a card of capability 90."""
    monkeypatch.setattr(launches, "TABLE", tmp_path / "launches.json")
    monkeypatch.setattr(launches, "_capability", lambda: 90)
    launches._read.cache_clear()
    yield launches.TABLE
    launches._read.cache_clear()


def test_the_fastest_setting_is_launched(table: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that likes blocks of 32 keys: what is chosen is written, read at the next launch
    of that class, and computes the same."""
    pytest.importorskip("triton")
    monkeypatch.setattr(jit, "choice", lambda: "triton")
    case = next(case for case in CASES if case.op == "paged_attention, verify")
    case = replace(case, numbers={"B": 1, "R": 2, "L": 40}, sizes=(TINY,), extra=())
    given = case.arguments(TINY, torch.float32, "cpu")
    before = case.run(*given)[0]
    tried: list[float] = []

    def timed(call: Callable[[], Any]) -> float:
        call()
        # The rule is timed first, then every other setting in order: blocks of 32 come first.
        tried.append(0.5 + 0.01 * len(tried) if tried else 1.0)
        return tried[-1]

    found = tune((case,), "cpu", timed)
    (name,) = found
    assert name.startswith("paged_attention_kernel BLOCK_D=32 BLOCK_M=16 BLOCK_N=64")
    assert found[name] == {"BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    write(table, 80, {"other": {"BLOCK": 1}})
    write(table, 90, found)
    assert json.loads(table.read_text()) == {"80": {"other": {"BLOCK": 1}}, "90": found}
    launches._read.cache_clear()
    seen: list[int] = []
    kernel = launches.tuned_here

    def watched(name: str, asked: dict[str, Any]) -> dict[str, int]:
        setting = kernel(name, asked)
        seen.append(setting.get("BLOCK_N", 0))
        return setting

    monkeypatch.setattr(jit, "tuned_here", watched)
    torch.testing.assert_close(case.run(*given)[0], before)
    assert seen == [32]


def test_a_rule_that_is_as_fast_stays(table: Path, monkeypatch: pytest.MonkeyPatch):
    """Two percent are noise; a setting that cannot run is passed over."""
    pytest.importorskip("triton")
    monkeypatch.setattr(jit, "choice", lambda: "triton")
    case = next(case for case in CASES if case.op == "rms_norm")
    case = replace(case, numbers={"N": 2}, sizes=(TINY,))
    times = iter([1.0, 0.98])

    def timed(call: Callable[[], Any]) -> float:
        call()
        taken = next(times, None)
        if taken is None:
            raise RuntimeError("out of resource")
        return taken

    assert tune((case,), "cpu", timed) == {}


def test_other_cards_and_classes_keep_the_rule(table: Path):
    """The table of one card says nothing to another."""
    asked = {"BLOCK": 1024, "num_warps": 4}
    write(table, 90, {launches.shape_class("some_kernel", asked): {"num_warps": 8}})
    launches._read.cache_clear()
    assert launches.tuned_here("some_kernel", asked) == {"num_warps": 8}
    assert launches.tuned("some_kernel", asked, 80) == {}
    assert launches.tuned_here("some_kernel", asked | {"BLOCK": 512}) == {}


def test_without_a_gpu_it_refuses(capsys: pytest.CaptureFixture[str]):
    """Status 2; nothing has to be tuned."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main() == 2 and "the rules" in capsys.readouterr().err
