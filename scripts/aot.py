"""Compile every Triton kernel for real GPUs on a machine without one, and read what the compiler
says.

Each op is called with tensors of a real model's size on the meta device; the launches it asks for
are compiled by Triton and ptxas exactly as they would be on the card. A kernel that spills
registers to memory, takes more than 255 registers a thread or more shared memory than the card has
for one block is a failure.

    python -m draftsmith.scripts.aot [docs/kernels.md]     prints the table; with a page, renews it
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.add_norm import add_norm
from ..kernels.jit import Launch, recorded
from ..kernels.norm_concat import norm_concat
from ..kernels.rms_norm import rms_norm
from ..models.files import atomic_write_bytes

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one block can have, bytes, by compute capability (CUDA C++ programming guide,
table of technical specifications)."""
REGISTER_LIMIT = 255
_MARKS = "<!-- aot -->", "<!-- /aot -->"


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

    @property
    def faults(self) -> list[str]:
        """What forbids the kernel to run, or to run well; empty when nothing does."""
        limit = SHARED_LIMIT[self.capability]
        faults = []
        if self.spilled:
            faults.append(f"spills {self.spilled} bytes")
        if self.registers > REGISTER_LIMIT:
            faults.append(f"takes {self.registers} registers, more than {REGISTER_LIMIT}")
        if self.shared > limit:
            faults.append(f"takes {self.shared} bytes of shared memory, more than {limit}")
        return faults


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def _differentiate(out: Tensor | tuple[Tensor, ...]) -> None:
    outputs = (out,) if isinstance(out, Tensor) else out
    torch.autograd.backward(list(outputs), [torch.empty_like(tensor) for tensor in outputs])


def _norms(size: int) -> None:
    x, y = _meta(64, size, grad=True), _meta(64, size, grad=True)
    weight = _meta(size, grad=True)
    with torch.no_grad():
        rms_norm(x, weight, 1e-5)
    _differentiate(norm_concat(x, y, weight, weight, 1e-5))
    _differentiate(add_norm(x, y, weight, 1e-5))


CASES: dict[str, Callable[[], None]] = {
    "H=8192": lambda: _norms(8192),
    "H=2048": lambda: _norms(2048),
    "H=576": lambda: _norms(576),
}
"""Calls of the ops by the size they stand for (Llama-70B, DeepSeek-V2-Lite, SmolLM2-135M)."""


def compile_launch(launch: Launch, size: str, capability: int) -> Report:
    """Compile one launch for one card.

    Args:
        launch: see `kernels.jit.recorded`. size: name of the case. capability: 80 or 90.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launch.kernel.built
    signature, constants, attributes = _specialise(kernel, launch.arguments)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    registers, spilled = _ptxas(compiled.asm["ptx"])
    return Report(
        kernel.fn.__name__,
        size,
        capability,
        launch.num_warps,
        registers,
        compiled.metadata.shared,
        spilled,
    )


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


def _ptxas(ptx: str) -> tuple[int, int]:
    """(registers a thread, bytes spilled) of one kernel's PTX, from ptxas' own words."""
    from triton import knobs

    found = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        said = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", f"-arch={found[1]}", str(path), "-o", os.devnull],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert registers and spills, f"ptxas said: {said}"
    return int(registers[1]), sum(int(spill) for spill in spills)


def reports(capabilities: tuple[int, ...] = (80, 90)) -> list[Report]:
    """Compile all cases for all cards; a launch that several cases share is compiled once."""
    found = []
    for size, call in CASES.items():
        with recorded() as launches:
            call()
        seen = set()
        for launch in launches:
            key = (launch.kernel, repr(_specialise(launch.kernel.built, launch.arguments)))
            if key not in seen:
                seen.add(key)
                found += [compile_launch(launch, size, c) for c in capabilities]
    return found


def table(found: list[Report]) -> str:
    """A Markdown table, one line a kernel and size, cards side by side."""
    lines = [
        "| kernel | size | warps | registers sm_80 / sm_90 | shared, bytes sm_80 / sm_90 | spilled |",
        "|---|---|---|---|---|---|",
    ]
    pairs: dict[tuple[str, str, int], list[Report]] = {}
    for report in found:
        pairs.setdefault((report.name, report.size, report.warps), []).append(report)
    for (name, size, warps), group in sorted(pairs.items()):
        registers, shared, spilled = (
            " / ".join(f"{getattr(report, field):,}" for report in group)
            for field in ("registers", "shared", "spilled")
        )
        lines.append(f"| `{name}` | {size} | {warps} | {registers} | {shared} | {spilled} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table, renew the page that is named; 1 when a kernel is at fault."""
    found = reports()
    text = table(found)
    print(text)
    if arguments:
        page = Path(arguments[0])
        old, (begin, end) = page.read_text(), _MARKS
        head, _, rest = old.partition(begin)
        tail = rest.partition(end)[2]
        atomic_write_bytes(page, f"{head}{begin}\n{text}\n{end}{tail}".encode())
    faults = [(report, fault) for report in found for fault in report.faults]
    for report, fault in faults:
        print(
            f"{report.name} ({report.size}, sm_{report.capability}): {fault}; use a smaller block "
            "or more warps",
            file=sys.stderr,
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
