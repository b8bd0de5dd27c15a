"""Compile every Triton kernel for real GPUs on a machine without one, and read what the compiler
says.

Each op is called with tensors of a real model's size on the meta device; the launches it asks for
are compiled by Triton and ptxas exactly as they would be on the card. A kernel that spills
registers to memory, takes more than 255 registers a thread or more shared memory than the card has
for one block is a failure.

    python -m draftsmith.scripts.aot [docs/kernels.md] [--wide]
        prints the table; with a page, renews it; --wide leaves the sizes of a small target out
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.accept_chains import Chains, accept_chains
from ..kernels.accept_tree import Trees, accept_trees
from ..kernels.add_norm import add_norm
from ..kernels.distill_chunk import distill_chunk
from ..kernels.jit import Launch, recorded
from ..kernels.kv_append import kv_append
from ..kernels.kv_move import compact_paths, copy_pages
from ..kernels.norm_concat import norm_concat
from ..kernels.paged_attention import DraftedRows, PagedRows, paged_attention
from ..kernels.place_rows import place_rows
from ..kernels.renormalise import renormalise
from ..kernels.rms_norm import rms_norm
from ..kernels.shift import shift_insert
from ..kernels.tree_build import build_trees, rerank
from ..kernels.ttt_attention import ttt_attention
from ..models.files import atomic_write_bytes

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


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def _differentiate(out: Tensor | tuple[Tensor, ...]) -> None:
    outputs = (out,) if isinstance(out, Tensor) else out
    torch.autograd.backward(list(outputs), [torch.empty_like(tensor) for tensor in outputs])


def _integers(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def _norms(model: Size) -> None:
    x, y = _meta(64, model.hidden, grad=True), _meta(64, model.hidden, grad=True)
    weight = _meta(model.hidden, grad=True)
    with torch.no_grad():
        rms_norm(x, weight, 1e-5)
    _differentiate(norm_concat(x, y, weight, weight, 1e-5))
    _differentiate(add_norm(x, y, weight, 1e-5))


def _pool(model: Size) -> tuple[Tensor, Tensor]:
    slots = 1 << 20
    keys = _meta(model.key_heads, slots, model.key_width)
    if model.inside:
        return keys, keys[..., : model.value_width]
    return keys, _meta(model.key_heads, slots, model.value_width)


def _cache(model: Size) -> None:
    keys, values = _pool(model)
    rows = 256
    kv_append(
        keys,
        values,
        _meta(model.key_heads, rows, model.key_width),
        _meta(model.key_heads, rows, model.value_width),
        _integers(rows),
    )
    pages = _meta(64, 512, dtype=torch.int32)
    copy_pages(keys, _integers(8), _integers(8), 16)
    compact_paths(keys, pages, 16, _integers(64), _integers(64, 4))


def _attention(model: Size) -> None:
    keys, values = _pool(model)
    # Decode (once a form: it is verification with fewer lines), verification in pieces, trees,
    # prompt.
    workloads = ((1, 512), (4, 32768), (60, 32768), (512, 2048))
    for rows, longest in workloads if model is SIZES[0] or model.inside else workloads[1:]:
        tree = None
        if rows == 60:
            ancestry = _meta(8 * rows, rows, dtype=torch.int32)
            tree = DraftedRows(ancestry, _integers(8), _integers(8 * rows))
        batch = PagedRows(
            _integers(9), _integers(8), _meta(8, 2048, dtype=torch.int32), 16, rows, longest, tree
        )
        q = _meta(8 * rows, model.heads, model.key_width).transpose(0, 1)
        paged_attention(
            q, keys, values, batch, scaling=0.1, window=model.window, softcap=model.softcap
        )


def _training(model: Size) -> None:
    tokens, steps = 4096, 2
    q, *keys = (
        _meta(tokens, heads, model.key_width, grad=True).transpose(0, 1)
        for heads in (model.heads, *[model.key_heads] * (1 + steps))
    )
    values = [
        _meta(tokens, model.key_heads, model.value_width, grad=True).transpose(0, 1)
        for _ in range(1 + steps)
    ]
    for chain in (0, steps) if model is SIZES[0] else (steps,):
        out = ttt_attention(
            q,
            keys[0],
            values[0],
            keys[1 : 1 + chain],
            values[1 : 1 + chain],
            [0, 1000, tokens],
            scaling=0.1,
            window=model.window,
            softcap=model.softcap,
        )
        _differentiate(out)
    logits = _meta(512, model.vocabulary)
    distill_chunk(logits, logits, _integers(512), softcap=model.softcap)


def _tables(model: Size) -> None:
    shift_insert(_integers(256), _integers(65), _integers(64), _integers(64))
    place_rows(_integers(64), _integers(64), _meta(64, 512, dtype=torch.int32), 16, 4)
    flags = _meta(64, dtype=torch.bool)
    for columns in (None, _integers(model.vocabulary)):
        chains = Chains(
            _integers(64, 3),
            _integers(65),
            flags,
            flags,
            _meta(64, 4, dtype=torch.float64),
            _meta(64, 3, 32000 if columns is not None else model.vocabulary, dtype=torch.float32),
            columns,
        )
        target = _meta(256, model.vocabulary, dtype=torch.float32)
        accept_chains(chains, _integers(256), target)
    tables = build_trees(_integers(64, 60), 8)
    rerank(_meta(64, 510, dtype=torch.float32), _integers(64, 510), 59)
    for columns in (None, _integers(model.vocabulary)):
        width = 32000 if columns is not None else model.vocabulary
        trees = Trees(
            _integers(64, 60),
            _integers(65),
            tables.first_child,
            tables.next_sibling,
            flags,
            flags,
            _meta(64, 60, dtype=torch.float64),
            8,
            _meta(640, width, dtype=torch.float32),
            _integers(64, 60),
            columns,
        )
        accept_trees(trees, _integers(3840), _meta(3840, model.vocabulary, dtype=torch.float32))
    share = _meta(64, dtype=torch.float32)
    renormalise(
        _meta(64, model.vocabulary, dtype=torch.float32), share, _integers(64), share, share
    )


@dataclass(frozen=True)
class Size:
    """A real model's widths."""

    name: str
    hidden: int
    heads: int
    key_heads: int
    key_width: int
    value_width: int
    vocabulary: int
    window: int | None = None
    softcap: float | None = None
    inside: bool = False
    """The values are the keys' first columns."""


SIZES = (
    Size("Llama-70B", 8192, 64, 8, 128, 128, 128256),
    Size("DeepSeek-V2-Lite", 2048, 16, 16, 192, 128, 102400),
    Size("SmolLM2-135M", 576, 9, 3, 64, 64, 49152),
)
CAPPED = Size("Gemma-2-2B", 2304, 8, 4, 256, 256, 256000, window=4096, softcap=50.0)
"""A model with a window and soft caps, for the ops that know them."""
LATENTS = (
    Size("DeepSeek-V2-Lite, latents", 2048, 16, 1, 576, 512, 102400, inside=True),
    Size("DeepSeek-V3, latents", 7168, 128, 1, 576, 512, 129280, inside=True),
)
"""Attention on latents, for the ops of the pool: one key head whose first columns are the
values."""
OPS: tuple[Callable[[Size], None], ...] = (
    _norms,
    _cache,
    _attention,
    _training,
    _tables,
)
"""Calls of every op at a model's size."""


def compile_launch(launch: Launch, size: str, capability: int) -> Report:
    """Compile one launch for one card.

    Args:
        launch: see `kernels.jit.recorded`. size: name of the case. capability: 80 or 90.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launch.kernel.built
    signature, constants, attributes = _specialise(kernel, launch.arguments)
    source = ASTSource(kernel, signature, constants, attributes)
    said = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = True  # a kernel from the cache says nothing
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        )
    registers, spilled = _usage(said.getvalue())
    return Report(
        kernel.fn.__name__,
        size,
        capability,
        launch.num_warps,
        registers,
        compiled.metadata.shared,
        spilled,
        len(re.findall(r"tt\.addptr .*: !tt\.ptr<[^>]*>, i32", compiled.asm["ttir"])),
        _products(compiled.asm["ptx"]),
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


def reports(capabilities: tuple[int, ...] = (80, 90), wide: bool = False) -> list[Report]:
    """Compile all cases for all cards; a launch that several cases share is compiled once. wide:
    leave out the sizes of a small target, which ask for less of everything."""
    found, seen = [], set()
    cases = [(size, OPS) for size in SIZES if not wide or size.hidden > 1024]
    cases += [
        (CAPPED, (_attention, _training)),
        *((size, (_cache, _attention)) for size in LATENTS),
    ]
    for size, ops in cases:
        with recorded() as launches:
            for op in ops:
                op(size)
        for launch in launches:
            key = repr((launch.num_warps, _specialise(launch.kernel.built, launch.arguments)))
            if (launch.kernel, key) not in seen:
                seen.add((launch.kernel, key))
                found += [compile_launch(launch, size.name, c) for c in capabilities]
    return found


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


def main(arguments: list[str]) -> int:
    """Print the table, renew the page that is named; 1 when a kernel is at fault."""
    wide = "--wide" in arguments
    arguments = [word for word in arguments if word != "--wide"]
    found = reports(wide=wide)
    text = table(found)
    print(text)
    if arguments:
        page = Path(arguments[0])
        atomic_write_bytes(page, renewed(page.read_text(), "aot", text).encode())
    faults = [(report, fault) for report in found for fault in report.faults]
    for report, fault in faults:
        place = f"{report.name} ({report.size}, sm_{report.capability})"
        print(f"{place}: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
