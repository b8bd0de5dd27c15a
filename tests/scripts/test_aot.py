"""Every kernel compiles for sm_80 and sm_90 on this machine, and what the gate refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.scripts.aot import Report, _products, _usage, renewed, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text()
GOOD = Report("some_kernel", "Llama-70B", 90, 8, 128, 65536, 0, 0, "wgmma bf16")


@pytest.fixture(scope="module")
def compiled() -> subprocess.CompletedProcess[str]:
    """Each kernel's widest launch, then one of them in a single warp, in another process: there
    Triton compiles instead of interpreting."""
    pytest.importorskip("triton")
    program = """
import torch
from draftsmith.kernels.jit import recorded
from draftsmith.scripts import aot, op_cases
code = aot.main(["--widest"])
case = next(case for case in op_cases.CASES if case.op == "rms_norm, with gradients")
with recorded() as launches:
    case.run(*case.arguments(case.sizes[0], torch.bfloat16, "meta"))
worst = next(one for one in launches if "extra" in one.arguments)
print(aot.compile_launch(worst._replace(num_warps=1), "one warp", 90).faults)
raise SystemExit(code)
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )


@pytest.mark.slow
def test_every_kernel_compiles_within_the_limits_of_both_cards(
    compiled: subprocess.CompletedProcess[str],
):
    """No spill, no overrun, no narrow offset; the page knows every kernel, and bfloat16 products
    run on matrix units although loads are widened.

    For `renormalise`, `norm_concat`, `add_norm`, `build_trees`, `rerank` and `shift_insert` this
    alone stands against offsets of 32 bits. They launch a program for each of many equal rows that
    lie end to end, so a row behind element 2**31 is reached only by computing all before it: 4 to
    16 GB written, hours of interpreting. Ops that find their rows through a table or a stride have
    a test on memory that is mostly never touched (`far_memory`). What is counted here is the
    kernel as compiled: each addition of a 32-bit number to a scalar pointer, whatever the sizes.
    """
    assert compiled.returncode == 0, compiled.stderr
    rows = [line.split(" | ") for line in compiled.stdout.splitlines() if line.startswith("| `")]
    names = {row[0].strip("| `") for row in rows}
    written = {
        name
        for file in (ROOT / "kernels").glob("*.py")
        for name in re.findall(r"@Kernel\ndef (\w+)", file.read_text())
    }
    assert names == written
    assert names == set(re.findall(r"^\| `(\w+_kernel)`", PAGE, re.MULTILINE)), "renew the page"
    for row in rows:
        if "attention" in row[0] or "causal" in row[0]:
            assert "mma bf16" in row[-1] and "tf32" not in row[-1], row


@pytest.mark.slow
def test_a_kernel_that_spills_is_found(compiled: subprocess.CompletedProcess[str]):
    """The derivative of a norm in one warp has not registers enough; ptxas says so."""
    assert re.search(r"spills \d+ bytes", compiled.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "change,fault",
    [
        ({}, None),
        ({"spilled": 8}, "spills 8 bytes"),
        ({"registers": 256}, "256 registers"),
        ({"shared": 227 * 1024 + 1}, "of 232448"),
        ({"shared": 200 * 1024}, None),
        ({"shared": 200 * 1024, "capability": 80}, "of 166912"),
        ({"narrow": 1}, "int64"),
    ],
    ids=str,
)
def test_what_the_gate_refuses(change: dict[str, int], fault: str | None):
    """Each limit on its own; shared memory by card."""
    faults = Report(**{**GOOD.__dict__, **change}).faults
    assert (faults == []) if fault is None else (len(faults) == 1 and fault in faults[0])


def test_ptxas_and_ptx_are_read():
    """Spilled stores and loads are added up; an instruction's input type is found."""
    said = """ptxas info    : Function properties for k
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 400 bytes cmem[0]"""
    assert _usage(said) == (255, 20)
    ptx = """wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {...};
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {...};"""
    assert _products(ptx) == "mma tf32, wgmma bf16"
    assert _products("add.f32") == ""


def test_the_table_shows_the_worst_build_of_each_card():
    """Two builds of one kernel are one line."""
    other = Report("some_kernel", "Llama-70B", 90, 4, 200, 1024, 4, 0, "")
    eighty = Report("some_kernel", "Llama-70B", 80, 8, 90, 2048, 0, 0, "mma bf16")
    line = table([GOOD, other, eighty, eighty]).splitlines()[-1]
    assert "| 2 | 8 | 90 / 200 | 2,048 / 65,536 | 0 / 4 | mma bf16, wgmma bf16 |" in line


def test_a_page_keeps_what_lies_around_its_marks():
    """And a page without marks is refused."""
    assert renewed("a <!-- x -->old<!-- /x --> b", "x", "new") == "a <!-- x -->\nnew\n<!-- /x --> b"
    with pytest.raises(ValueError, match="<!-- x -->"):
        renewed("a", "x", "new")
