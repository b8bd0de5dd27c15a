"""How one op of `kernels/` is called on a workload, and what that must move and compute.

The wrappers here make functions of one form out of ops and definitions alike: arguments of
`op_arguments` to a tuple of tensors.

Formulae are over H hidden, Q and G query and key heads, D and E key and value width, W the width
of a slot (D + E; D where the values are the keys' first columns), V vocabulary, and the workload's
own numbers. Bytes count every input read once and every output written once, in the dtypes of a run
(bfloat16 states, keys and logits of training; float32 probabilities). Operations count
multiplications and additions of matrix products for attention, an estimate a value for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.distill_chunk import ChunkFigures
from ..kernels.paged_rows import PagedRows
from ..kernels.tree_build import TreeTables
from .op_arguments import CHAIN, SIZES, Maker, Size

Outputs = tuple[Tensor, ...]
Call = Callable[..., Outputs]


@dataclass(frozen=True)
class Case:
    """One op on one workload.

    Attributes:
        workload: with {names} of the numbers. check: numbers to be held against the definition
            with, where the workload's own would take too long or too much memory for that.
        make: the arguments. run: the public function on them. plain: the definition on equal ones
            (states in float64, see `wide`). Both give tuples and may write their arguments.
        matrix: whether the operations are matrix products. sizes: the models it is for; extra: and
            those it is compiled for beside them.
    """

    op: str
    workload: str
    numbers: dict[str, int]
    bytes: str
    operations: str
    make: Callable[[Maker], tuple[Any, ...]]
    run: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    check: dict[str, int] = field(default_factory=dict)
    matrix: bool = False
    sizes: tuple[Size, ...] = SIZES
    extra: tuple[Size, ...] = ()

    @property
    def title(self) -> str:
        """The workload with its numbers."""
        return self.workload.format(**self.numbers)

    def arguments(
        self,
        size: Size,
        dtype: torch.dtype,
        device: torch.device | str,
        numbers: dict[str, int] | None = None,
    ) -> tuple[Any, ...]:
        """What `run` and `plain` take; two calls give equal ones."""
        return self.make(Maker(size, self.numbers | (numbers or {}), dtype, device))

    def amounts(self, size: Size) -> tuple[int, int]:
        """(bytes, operations) at a model's widths."""
        names = self.numbers | {
            "H": size.hidden,
            "Q": size.heads,
            "G": size.key_heads,
            "D": size.key_width,
            "E": size.value_width,
            "W": size.key_width + (0 if size.inside else size.value_width),
            "V": size.vocabulary,
        }
        # The formulae are this file's own constants; as text they stand in the page as computed.
        moved, operations = (
            int(eval(text, {"__builtins__": {}}, names)) for text in (self.bytes, self.operations)
        )
        return moved, operations


def one(function: Callable[..., Tensor]) -> Call:
    """The function's single output as a tuple."""
    return lambda *arguments: (function(*arguments),)


def normed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A norm with its epsilon."""
    return lambda *arguments: function(*arguments, 1e-5)


def graded(function: Callable[..., Any]) -> Callable[..., Outputs]:
    """Outputs, and the gradients of all arguments for a fixed direction."""

    def both(*leaves: Tensor) -> Outputs:
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        found = function(*leaves)
        outputs = found if isinstance(found, tuple) else (found,)
        directions = [
            torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view(out.shape)
            for out in outputs
        ]
        return *outputs, *torch.autograd.grad(outputs, leaves, directions)

    return both


def wide(function: Callable[..., Any]) -> Callable[..., Outputs]:
    """The function on float64 copies of its floating arguments."""

    def exact(*arguments: Any) -> Outputs:
        found = function(
            *(
                x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in arguments
            )
        )
        return tuple(found) if isinstance(found, tuple) else (found,)

    return exact


def in_place(function: Callable[..., None]) -> Call:
    """An op that writes keys and values of the pool, its first two arguments."""

    def call(keys: Tensor, values: Tensor, *rest: Any) -> Outputs:
        function(keys, values, *rest)
        return keys, values

    return call


def of_pool(function: Callable[..., None]) -> Callable[..., Outputs]:
    """An op that writes one tensor of the pool, on both that there are."""

    def both(keys: Tensor, values: Tensor, *rest: Any) -> Outputs:
        for tensor in (keys,) if values.data_ptr() == keys.data_ptr() else (keys, values):
            function(tensor, *rest)
        return keys, values

    return both


def over_pages(function: Callable[..., Tensor]) -> Call:
    """Attention with its settings by name."""

    def call(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: PagedRows,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Outputs:
        settings = {"scaling": scaling, "window": window, "softcap": softcap}
        return (function(q, keys, values, rows, **settings),)

    return call


def tables(function: Callable[..., TreeTables]) -> Call:
    """The tables of trees side by side."""

    def call(parents: Tensor, height: int) -> Outputs:
        found = function(parents, height)
        return found.ancestry, found.first_child, found.next_sibling

    return call


def chunk(function: Callable[..., ChunkFigures]) -> Call:
    """A chunk's losses, and the gradient that is written over the students."""

    def call(students: Tensor, teachers: Tensor, rows: Tensor, softcap: float | None) -> Outputs:
        figures = function(students, teachers, rows, softcap=softcap)
        return figures.cross, figures.kl, figures.acceptance, students

    return call


def unroll(attention: Callable[..., Tensor], form: Callable[[Callable[..., Tensor]], Call]) -> Call:
    """Attention of step CHAIN over two documents; `one` of its tensors, or `graded`."""

    def call(scaling: float, window: int | None, softcap: float | None, *leaves: Tensor) -> Outputs:
        settings = {"scaling": scaling, "window": window, "softcap": softcap}

        def attend(q: Tensor, k0: Tensor, v0: Tensor, *chain: Tensor) -> Tensor:
            borders = [0, k0.shape[1] // 3, k0.shape[1]]
            return attention(q, k0, v0, chain[:CHAIN], chain[CHAIN:], borders, **settings)

        return form(attend)(*leaves)

    return call
