"""The parts of the check for GPUs that run without one, and that each of them can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference.config import SamplingParams
from draftsmith.kernels import jit
from draftsmith.models.heads import Head
from draftsmith.models.target import Target
from draftsmith.scripts import gpu_check
from draftsmith.scripts.gpu_check import (
    Means,
    check,
    difference,
    main,
    overlapped_steps,
    parity,
    replayed_steps,
    timings,
    toy,
    write_page,
)
from draftsmith.scripts.gpu_rivals import rivals
from draftsmith.scripts.op_arguments import Size
from draftsmith.scripts.op_calls import Case
from draftsmith.scripts.op_cases import CASES

TINY = Size("tiny", 40, 4, 2, 24, 16, 300)
LATENT = Size("tiny latents", 40, 4, 1, 24, 16, 300, inside=True)
NAMED = {case.op: case for case in CASES}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Head]:
    """The check's own random model, narrower."""
    return toy(tmp_path_factory.mktemp("toy"), "float32", "cpu", hidden=64)


def test_without_a_gpu_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Status 2 and what to do instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["report.json"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_every_case_holds_in_the_interpreter(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Ops of the list, at odd widths and in the checks' own numbers; those of states once more in
    bfloat16 on latents."""
    pytest.importorskip("triton")
    monkeypatch.setattr(jit, "choice", lambda: "triton")
    smaller = {"Vd": 100, "C": 13, "B": 2, "N": 70, "keep": 5}
    numbers = {name: count for name, count in smaller.items() if name in case.numbers}
    if case.op == "paged_attention, decode":
        numbers |= {"B": 1, "L": 1030}  # in pieces
    found = parity(case, TINY, torch.float32, "cpu", **numbers)
    assert found.good, found
    if len(case.sizes) > 3 and case.op.endswith("verify"):
        found = parity(case, LATENT, torch.bfloat16, "cpu", **numbers)
        assert found.good, found


def test_a_difference_is_found():
    """A wrong value, a wrong integer, NaN, and an op that does not run."""
    exact = (torch.tensor([1.0, 100.0]),)
    assert difference((torch.tensor([1.0, 101.0]),), exact) == pytest.approx(0.01)
    assert difference((torch.tensor([1.0, float("nan")]),), exact) == float("inf")
    whole = (torch.tensor([1, 2]),)
    assert difference((torch.tensor([1, 3]),), whole) == float("inf")
    case = NAMED["rms_norm"]
    wrong = replace(case, run=lambda x, w: (x * w,))
    assert not parity(wrong, TINY, torch.bfloat16, "cpu").good
    broken = replace(case, run=lambda x, w: (x @ w[:3],))
    found = parity(broken, TINY, torch.float32, "cpu")
    assert not found.good and "RuntimeError" in found.told


def test_the_whole_check_and_what_it_finds(monkeypatch: pytest.MonkeyPatch):
    """Everything in one call: all steps lie inside the guard, a guard that raises is a finding, and
    so is an op that is not its definition."""
    monkeypatch.setattr(gpu_check, "toy", partial(toy, hidden=64))
    good = replace(NAMED["rms_norm"], sizes=(TINY,), numbers={"N": 3})
    wrong = replace(NAMED["kv_append"], sizes=(TINY,), run=lambda keys, values, *rest: (keys,) * 2)
    entered: list[str] = []

    @contextmanager
    def guard() -> Iterator[None]:
        entered.append("in")
        if len(entered) == 4:
            raise RuntimeError("called a synchronizing CUDA operation")
        yield

    means = Means("cpu", lambda call: float(call() is None), guard, lambda call: call, steps=3)
    report, faults = check((good, wrong), "no card", means)
    assert len(entered) == 4
    assert {name: told for name, told in report["checks"].items() if told != "good"} == {
        "engine, 3 drafts, temperature 0.8": "called a synchronizing CUDA operation"
    }
    assert len(faults) == 3 and faults[0].startswith("kv_append @ tiny, float32: inf")
    assert report["seconds"] == {"rms_norm @ tiny": 0.0, "kv_append @ tiny": 0.0}


def test_a_request_that_cannot_overlap_is_told(small: tuple[Target, Head]):
    """A coupled one runs step by step, and the number says so."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    assert overlapped_steps(*small, 1, params, nullcontext, steps=12) < 12


def test_replayed_steps_are_compared(small: tuple[Target, Head]):
    """The same calls agree; a graph that does nothing is found at once."""
    assert replayed_steps(*small, 2, lambda call: call, steps=2) == []
    faults = replayed_steps(*small, 2, lambda call: lambda: None, steps=2)
    assert faults and "step 0" in faults[0]


def test_times_and_rivals_go_to_the_page(tmp_path: Path):
    """PyTorch's attention over the same keys is our output; what fails is told; the column is
    filled."""
    page = tmp_path / "page.md"
    page.write_text("before <!-- roofline -->\n<!-- /roofline --> after")
    chosen = [NAMED["rms_norm"], NAMED["paged_attention, verify"]]
    few = [replace(case, sizes=(TINY,), numbers=case.numbers | case.check) for case in chosen]

    def timed(call: Any) -> float:
        call()
        return 2e-6

    seconds, others = timings(tuple(few), "cpu", timed)
    assert seconds == {"rms_norm @ tiny": 2e-6, "paged_attention, verify @ tiny": 2e-6}
    assert others["rms_norm @ tiny"]["PyTorch"]["difference"] < 2e-2
    assert others["paged_attention, verify @ tiny"]["SDPA, no pages"]["difference"] < 2e-2
    capped = replace(few[1], sizes=(replace(TINY, softcap=5.0),))
    _, others = timings((capped,), "cpu", timed)
    assert "no soft cap" in others["paged_attention, verify @ tiny"]["SDPA, no pages"]["failed"]
    write_page(page, {"card": "a card", "seconds": {"rms_norm @ SmolLM2-135M": 2e-6}})
    assert "| 2 |" in page.read_text() and "measured on a card" in page.read_text()


def test_what_is_installed_is_tried(monkeypatch: pytest.MonkeyPatch):
    """FlashInfer and Liger only where they can be imported."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(rivals(NAMED["rms_norm"])) == ["PyTorch"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert "FlashInfer" in rivals(NAMED["paged_attention, decode"])
    assert "FlashInfer" not in rivals(NAMED["paged_attention, tree"])
