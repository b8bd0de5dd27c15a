"""Everything that only a GPU can show of the kernels and the engine, in one call.

    parity    every op's Triton form against its definition in float64, at the widths of real
              models, states in bfloat16 and float32 (`op_cases`)
    engine    50 decode-only steps of the overlapped schedule, in which any wait for the device but
              the one that is planned is an error (`torch.cuda.set_sync_debug_mode`)
    graphs    draft and verification captured in a CUDA graph: replayed steps give what called ones
              give
    backends  the engine's own passes replayed from graphs, and FlashInfer over its pages where that
              is installed (`gpu_engine`)
    timings   every op beside its floor, and beside what else computes it: PyTorch's own attention
              and norm, FlashInfer and Liger where they are installed (`gpu_rivals`)

    python -m draftsmith.scripts.gpu_check [OUT.json] [docs/kernels.md]
        prints what was found; writes it as JSON; fills the page's column of measured times

Exit status 0: all is well; 1: something differs or waits; 2: no GPU that can run this. On a
machine without one the same code runs in parts (tests/scripts/test_gpu_check.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..inference.config import EngineConfig, SamplingParams
from ..inference.device_step import DeviceSteps
from ..inference.engine import Engine
from ..inference.head_drafter import HeadDrafter
from ..inference.overlapped import Overlapped
from ..kernels.jit import VARIABLE, installed
from ..models.files import atomic_write_json
from ..models.heads import Head, HeadConfig, build_head
from ..models.target import Target, TargetConfig
from . import roofline
from .aot import renew
from .gpu_engine import backends
from .gpu_rivals import rivals
from .op_arguments import Size
from .op_calls import Case, Outputs
from .op_cases import CASES

STEPS = 50
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference to the definition, relative to its largest value or 1. float32 products of a
GPU are exact here (no TF32); what remains is the order of sums."""


@dataclass(frozen=True)
class Parity:
    """One op at one size. error: see `TOLERANCE`; infinite where the op failed, as `told` says."""

    op: str
    size: str
    dtype: str
    error: float
    told: str = ""

    @property
    def good(self) -> bool:
        """Whether the op is its definition."""
        return self.error <= TOLERANCE[getattr(torch, self.dtype)]


def difference(got: Outputs, want: Outputs) -> float:
    """The largest difference of any output; infinite where integers differ or NaN stands."""
    worst = 0.0
    for ours, exact in zip(got, want, strict=True):
        ours, exact = ours.detach(), exact.detach()
        if not exact.is_floating_point():
            worst = worst if torch.equal(ours, exact) else float("inf")
        elif exact.numel():
            gap = (ours.double() - exact.double()).abs().max()
            gap = gap / exact.double().abs().max().clamp(min=1)
            worst = max(worst, float(gap.nan_to_num(float("inf"))))
    return worst


def parity(case: Case, size: Size, dtype: torch.dtype, device: str, **numbers: int) -> Parity:
    """Hold one op against its definition. numbers: instead of the case's own for checks."""
    counts = case.check | numbers
    name = str(dtype).removeprefix("torch.")
    try:
        got = case.run(*case.arguments(size, dtype, device, counts))
        want = case.plain(*case.arguments(size, dtype, device, counts))
        return Parity(case.op, size.name, name, difference(got, want))
    except Exception as fault:  # a kernel that does not run is a finding, and others follow
        told = f"{type(fault).__name__}: {fault}"[:300]
        return Parity(case.op, size.name, name, float("inf"), told)


def toy(folder: Path, dtype: str, device: str, hidden: int = 512) -> tuple[Target, Head]:
    """A random Llama of four layers and a recycled MTP head; steps are checked, not texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4096,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(shape).to(getattr(torch, dtype)).save_pretrained(folder)
    settings = TargetConfig(source=str(folder), folder=str(folder), dtype=dtype, device=device)
    return Target.load(settings), build_head(HeadConfig(), folder, 1.0)


PROMPTS = [list(range(3, 3 + length)) for length in (5, 17, 64, 130)]


def overlapped_steps(
    target: Target,
    head: Head,
    drafts: int,
    params: SamplingParams,
    guard: Callable[[], AbstractContextManager[None]],
    steps: int = STEPS,
) -> int:
    """Decode-only steps of the overlapped schedule inside a guard, after two outside it.

    Returns:
        How many of them were overlapped: all, or the check says nothing.
    """
    settings = EngineConfig(
        draft_tokens=drafts, max_batch=len(PROMPTS), pool_tokens=8192, schedule="overlapped"
    )
    engine = Engine(target, settings, HeadDrafter(head, None))
    schedule = engine.schedule
    assert isinstance(schedule, Overlapped)
    for prompt in PROMPTS:
        engine.add(prompt, params)
    while not all(sequence.decoding for sequence in engine.scheduler.running) or not schedule.steps:
        engine.step()
    engine.step()
    before = schedule.steps
    with guard():
        for _ in range(steps):
            engine.step()
    return schedule.steps - before


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of a call that has run before; what is returned replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def replayed_steps(
    target: Target,
    head: Head,
    drafts: int,
    capture: Callable[[Callable[[], None]], Callable[[], None]],
    steps: int = STEPS,
) -> list[str]:
    """Where replayed steps differ from called ones; empty when they do not."""
    room = max(map(len, PROMPTS)) + (steps + 3) * (drafts + 1)
    called, recorded = (DeviceSteps(target, head, PROMPTS, room, drafts) for _ in range(2))
    for each in (called, recorded):  # kernels are compiled, pools made
        each.step()
    replay = capture(recorded.step)
    faults = []
    for step in range(steps):
        called.step()
        replay()
        for name in ("emitted", "kept", "tokens", "first"):
            one, other = getattr(called, name), getattr(recorded, name)
            if not torch.equal(one, other):
                faults.append(f"step {step}: {name} {other.tolist()} instead of {one.tolist()}")
    return faults[:4]


def median_seconds(call: Callable[[], Any]) -> float:
    """Of a call, its inputs not in the cache."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(call, return_mode="median")
    return float(milliseconds) / 1e3


def timings(
    cases: tuple[Case, ...], device: str, timed: Callable[[Callable[[], Any]], float]
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Seconds of every case at every size by `roofline.label`, and of what else computes it: by
    label and name its seconds, how far its output lies from ours, or why it could not run."""
    seconds: dict[str, float] = {}
    others: dict[str, dict[str, Any]] = {}
    for case in cases:
        for size in case.sizes:
            name = roofline.label(case, size)
            try:
                given = case.arguments(size, torch.bfloat16, device)
                seconds[name] = timed(lambda case=case, given=given: case.run(*given))
            except torch.cuda.OutOfMemoryError:
                continue
            for rival, make in rivals(case).items():
                found = others.setdefault(name, {})
                try:
                    call = make(*given)
                    apart = difference((call(),), case.run(*given)[:1])
                    found[rival] = {"seconds": timed(call), "difference": apart}
                except Exception as fault:  # a rival of another version must not end the run
                    found[rival] = {"failed": f"{type(fault).__name__}: {fault}"[:200]}
    return seconds, others


def main(arguments: list[str]) -> int:
    """Run all checks."""
    if not torch.cuda.is_available() or not installed():
        missing = "the package triton" if torch.cuda.is_available() else "a CUDA device"
        print(
            f"gpu_check: this needs {missing}, which is not here. Run it on a machine with a GPU "
            "and a CUDA build of PyTorch; without one, `pytest tests/kernels tests/scripts` runs "
            "the kernels in Triton's interpreter and compiles them for sm_80 and sm_90",
            file=sys.stderr,
        )
        return 2
    os.environ[VARIABLE] = "triton"
    named = {Path(word).suffix: Path(word) for word in arguments}
    means = Means("cuda", median_seconds, no_waiting, captured)
    report, faults = check(CASES, torch.cuda.get_device_name(), means)
    if ".json" in named:
        atomic_write_json(named[".json"], report)
    if ".md" in named:
        write_page(named[".md"], report)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


@dataclass(frozen=True)
class Means:
    """What a check has at hand: where it runs, its clock, what forbids waiting, what captures."""

    device: str
    timed: Callable[[Callable[[], Any]], float]
    guard: Callable[[], AbstractContextManager[None]]
    capture: Callable[[Callable[[], None]], Callable[[], None]]
    steps: int = STEPS


def check(cases: tuple[Case, ...], card: str, means: Means) -> tuple[dict[str, Any], list[str]]:
    """All checks; the report, and what is wrong."""
    print(f"{card}, torch {torch.__version__}")
    compared = [
        parity(case, size, dtype, means.device)
        for case in cases
        for size in (*case.sizes, *case.extra)
        for dtype in TOLERANCE
    ]
    faults = [
        f"{one.op} @ {one.size}, {one.dtype}: {one.error:.1e} {one.told}"
        for one in compared
        if not one.good
    ]
    print(f"parity: {len(compared) - len(faults)} of {len(compared)} ops are their definitions")
    with tempfile.TemporaryDirectory() as folder:
        checks = _engine_checks(*toy(Path(folder), "bfloat16", means.device), means)
    faults += [f"{name}: {told}" for name, told in checks.items() if told != "good"]
    seconds, others = timings(cases, means.device, means.timed)
    for name, value in seconds.items():
        beside = ", ".join(
            f"{rival} {1e6 * one['seconds']:.1f} µs" if "seconds" in one else f"{rival} failed"
            for rival, one in others.get(name, {}).items()
        )
        print(f"{name}: {1e6 * value:.1f} µs {beside}")
    report = {
        "card": card,
        "torch": torch.__version__,
        "parity": [asdict(one) for one in compared],
        "checks": checks,
        "seconds": seconds,
        "others": others,
    }
    return report, faults


def _engine_checks(target: Target, head: Head, means: Means) -> dict[str, str]:
    """By name, `good` or what went wrong."""
    checks, steps = {}, means.steps
    for drafts in (1, 3):
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                max_new_tokens=(steps + 4) * (drafts + 1),
                ignore_eos=True,
                temperature=temperature,
                top_p=0.95,
            )
            name = f"engine, {drafts} drafts, temperature {temperature}"
            try:
                done = overlapped_steps(target, head, drafts, params, means.guard, steps)
                checks[name] = "good" if done == steps else f"{done} of {steps} steps overlapped"
            except RuntimeError as fault:
                checks[name] = str(fault)[:300]
        found = replayed_steps(target, head, drafts, means.capture, steps)
        checks[f"graphs, {drafts} drafts"] = "; ".join(found) or "good"
    checks |= backends(target, head, PROMPTS, means.device)
    for name, told in checks.items():
        print(f"{name}: {told}")
    return checks


def write_page(page: Path, report: dict[str, Any]) -> None:
    """Fill the column of measured times."""
    renew(page, roofline.MARKS, roofline.table(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
