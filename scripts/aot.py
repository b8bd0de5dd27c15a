"""Compile every Triton kernel for real GPUs on a machine without one, and read what the compiler
says.

Each op is called with tensors of a real model's size on the meta device (`op_cases`); the launches
it asks for are compiled by Triton and ptxas exactly as they would be on the card. A kernel that
spills registers to memory, takes more than 255 registers a thread or more shared memory than the
card has for one block is a failure.

What was said of a build is kept in `~/.cache/draftsmith/aot` under a hash of the kernel's source,
its types and constants, the card and the compiler, and not compiled again.

    python -m draftsmith.scripts.aot [docs/kernels.md] [--widest]
        prints the table; with a page, renews it; --widest compiles of each kernel only the launch
        of the largest blocks
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.jit import Launch, recorded
from ..kernels.launches import LAUNCH, tuned
from ..models.files import atomic_write_text
from .op_arguments import Size
from .op_cases import CASES

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one block can have, bytes, by compute capability (CUDA C++ programming guide,
table of technical specifications)."""
REGISTER_LIMIT = 255


@dataclass(frozen=True)
class Report:
    """One kernel on one card. shared and spilled in bytes, registers a thread."""

    name: str
    size: str
    capability: int
    warps: int
    registers: int
    shared: int
    spilled: int
    narrow: int
    """Additions of a 32-bit number to a scalar pointer: offsets of rows, heads and sequences, which
    overflow in a large pool."""
    products: str
    """The matrix instruction and its input type; empty where nothing is multiplied."""

    @property
    def faults(self) -> list[str]:
        """What forbids the kernel to run, or to run well; empty when nothing does."""
        limit = SHARED_LIMIT[self.capability]
        faults = []
        if self.spilled:
            faults.append(f"spills {self.spilled} bytes: a smaller block or more warps")
        if self.registers > REGISTER_LIMIT:
            faults.append(f"takes {self.registers} registers of {REGISTER_LIMIT}: more warps")
        if self.shared > limit:
            faults.append(f"takes {self.shared} bytes of {limit}: a smaller block or fewer stages")
        if self.narrow:
            faults.append(f"adds {self.narrow} offsets of 32 bits to a pointer: make them int64")
        return faults


def wanted_launches() -> list[tuple[Launch, str]]:
    """All launches of all cases that differ in what is compiled, each with the first model that
    asks for it."""
    found: list[tuple[Launch, str]] = []
    seen = set()
    sizes: dict[Size, None] = dict.fromkeys(s for case in CASES for s in (*case.sizes, *case.extra))
    for size in sizes:
        with recorded() as launches:
            for case in CASES:
                if size in (*case.sizes, *case.extra):
                    case.run(*case.arguments(size, torch.bfloat16, "meta"))
        for launch in launches:
            key = repr((launch.num_warps, _specialise(launch.kernel.built, launch.arguments)))
            if (launch.kernel, key) not in seen:
                seen.add((launch.kernel, key))
                found.append((launch, size.name))
    return found


def widest(found: list[tuple[Launch, str]]) -> list[tuple[Launch, str]]:
    """Of each kernel the launch of the largest blocks and, of those, the most arguments."""

    def extent(one: tuple[Launch, str]) -> tuple[int, int]:
        given = one[0].arguments
        blocks = math.prod(value for name, value in given.items() if name.startswith("BLOCK"))
        return blocks, sum(value is not None for value in given.values())

    best: dict[Any, tuple[Launch, str]] = {}
    for one in found:
        kernel = one[0].kernel
        if kernel not in best or extent(one) > extent(best[kernel]):
            best[kernel] = one
    return list(best.values())


def compile_launch(launch: Launch, size: str, capability: int) -> Report:
    """Compile one launch for one card, or look up what was said of it before.

    Args:
        launch: see `kernels.jit.recorded`. size: name of the case. capability: 80 or 90.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launch.kernel.built
    arguments = dict(launch.arguments)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    asked = {name: arguments[name] for name in launch.kernel.constants}
    for name, value in tuned(kernel.fn.__name__, asked, capability).items():
        (options if name in LAUNCH else arguments)[name] = value
    signature, constants, attributes = _specialise(kernel, arguments)
    source = ASTSource(kernel, signature, constants, attributes)
    key = repr((source.hash(), sorted(options.items()), capability, triton.__version__))
    place = _kept(key)
    if place.exists():
        return Report(**(json.loads(place.read_text()) | {"size": size}))
    said = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = True  # a kernel from the cache says nothing
        knobs.nvidia.dump_ptxas_log = True
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=options)
    registers, spilled = _usage(said.getvalue())
    report = Report(
        kernel.fn.__name__,
        size,
        capability,
        options["num_warps"],
        registers,
        compiled.metadata.shared,
        spilled,
        len(re.findall(r"tt\.addptr .*: !tt\.ptr<[^>]*>, i32", compiled.asm["ttir"])),
        _products(compiled.asm["ptx"]),
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(place, json.dumps(asdict(report)))
    return report


def _kept(key: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256((key + Path(__file__).read_text()).encode()).hexdigest()
    return home / "draftsmith" / "aot" / f"{digest[:24]}.json"


def _specialise(
    kernel: Any, arguments: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Types, constants and divisibility of a launch's arguments, as Triton's launcher takes them: 1
    and None are constants, pointers and multiples of 16 are marked so."""
    from triton.runtime.jit import type_canonicalisation_dict as names

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        value = arguments[name]
        even = False
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = "*" + names[str(value.dtype).removeprefix("torch.")]
            even = True
        elif type(value) is int:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            even = value % 16 == 0
        else:
            assert isinstance(value, float), f"{name}: {value!r}"
            signature[name] = "fp32"
        if even:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _products(ptx: str) -> str:
    found = {
        f"{name} {kind}" for name, kind in re.findall(r"\b(wgmma|mma)\S*?\.(bf16|f16|tf32)\b", ptx)
    }
    return ", ".join(sorted(found))


def _usage(said: str) -> tuple[int, int]:
    """(registers a thread, bytes spilled) of one kernel in ptxas' own words."""
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert registers and spills, f"ptxas said: {said}"
    return int(registers[1]), sum(int(spill) for spill in spills)


_work: list[tuple[Launch, str, int]] = []


def _build(index: int) -> Report:
    return compile_launch(*_work[index])


def reports(wanted: list[tuple[Launch, str]]) -> list[Report]:
    """Compile launches for both cards, on all cores that this process has."""
    _work[:] = [(*one, capability) for one in wanted for capability in SHARED_LIMIT]
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        return [_build(index) for index in range(len(_work))]
    with multiprocessing.get_context("fork").Pool(min(cores, 8)) as pool:  # a launch has no bytes
        return pool.map(_build, range(len(_work)), chunksize=1)


def table(found: list[Report]) -> str:
    """A Markdown table, one line a kernel and size: the worst of its builds, sm_80 / sm_90, and the
    matrix instructions of any."""
    lines = [
        "| kernel | widths of | builds | warps | registers a thread | shared memory, bytes "
        "| spilled | products |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Report]] = {}
    for report in found:
        groups.setdefault((report.name, report.size), []).append(report)
    for (name, size), group in sorted(groups.items()):
        cells = [str(len(group) // len(SHARED_LIMIT)), str(max(r.warps for r in group))]
        for field in ("registers", "shared", "spilled"):
            worst = [
                max(getattr(report, field) for report in group if report.capability == card)
                for card in SHARED_LIMIT
            ]
            cells.append(" / ".join(f"{value:,}" for value in worst))
        cells.append(", ".join(sorted({r.products for r in group} - {""})))
        lines.append(" | ".join([f"| `{name}`", size, *cells]) + " |")
    return "\n".join(lines)


def renewed(page: str, mark: str, text: str) -> str:
    """A Markdown page with the text between `<!-- mark -->` and `<!-- /mark -->` replaced.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page has no {begin} … {end} to put the table between; add the marks")
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def renew(page: Path, mark: str, text: str) -> None:
    """Write a page with this text between its marks, see `renewed`."""
    atomic_write_text(page, renewed(page.read_text(), mark, text))


def main(arguments: list[str]) -> int:
    """Print the table, renew the page that is named; 1 when a kernel is at fault."""
    wanted = wanted_launches()
    if "--widest" in arguments:
        wanted = widest(wanted)
    arguments = [word for word in arguments if word != "--widest"]
    found = reports(wanted)
    text = table(found)
    print(text)
    if arguments:
        renew(Path(arguments[0]), "aot", text)
    faults = [(report, fault) for report in found for fault in report.faults]
    for report, fault in faults:
        place = f"{report.name} ({report.size}, sm_{report.capability})"
        print(f"{place}: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
