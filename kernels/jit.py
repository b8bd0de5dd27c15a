"""Triton kernels that are built, and Triton imported, at their first launch; and who picks them.

A machine without Triton imports every op and runs the plain form. `DRAFTSMITH_KERNELS`, read when
the first op runs, picks:

    auto        the plain form, until the kernels have run on a GPU (none has; see docs/kernels.md);
                on a CPU some ops have a form in C++ (`native`), where a compiler is there
    compiled    that form, or an error that says what is missing
    reference   the plain form everywhere
    triton      Triton, or an error that says what is missing (TRITON_INTERPRET=1 runs it on a CPU)

Kernels widen states and logits to float32 and no further, so float64 tensors take the plain form
under any choice.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launches import tuned_here

VARIABLE = "DRAFTSMITH_KERNELS"
CHOICES = ("auto", "compiled", "reference", "triton")


class Kernel:
    """A Triton kernel written as a plain function; its module's `tl` is set when it is built.

    Args:
        function: the kernel. It may call no other kernel, only `tl`.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @functools.cached_property
    def built(self) -> Any:
        """What `triton.jit` makes of it (an interpreted function under TRITON_INTERPRET=1)."""
        import triton
        import triton.language

        self.function.__globals__["tl"] = triton.language
        return triton.jit(self.function)

    @functools.cached_property
    def constants(self) -> tuple[str, ...]:
        """The names of its compile-time parameters."""
        given = inspect.signature(self.function).parameters.values()
        return tuple(one.name for one in given if one.annotation == "tl.constexpr")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch if _recorded is None else self._record, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **asked: Any) -> None:
        self.built[grid](*args, **{**asked, **tuned_here(self.function.__name__, asked)})

    def _record(self, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **kwargs: Any) -> None:
        assert _recorded is not None
        stages = kwargs.pop("num_stages", 3)
        given = inspect.signature(self.function).bind(*args, **kwargs).arguments
        _recorded.append(Launch(self, grid, given, num_warps, stages))


class Launch(NamedTuple):
    """One launch as an op asked for it."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


_recorded: list[Launch] | None = None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Ops inside write their launches into the list that is yielded and run no kernel. With tensors
    on the meta device this gives every kernel of a real size, to be compiled without a GPU."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


@functools.cache
def installed() -> bool:
    """Whether the package triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


@functools.cache
def choice() -> str:
    """What the environment asks for; read once, for ops are called thousands of times a second.

    Raises:
        ValueError: an unknown choice.
    """
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in CHOICES:
        raise ValueError(f"{VARIABLE}={asked!r}: choose one of {', '.join(CHOICES)}")
    return asked


def use_triton(like: Tensor) -> bool:
    """Whether an op on tensors like this one runs its Triton form (see the module's table).

    Raises:
        ValueError: an unknown choice, or `triton` where it cannot run.
    """
    if _recorded is not None:
        return True
    asked = choice()
    if asked != "triton" or like.dtype == torch.float64:
        return False
    if not installed():
        raise ValueError(
            f"{VARIABLE}=triton, but the package triton is not installed: pip install triton, or "
            f"set {VARIABLE}=auto"
        )
    if not like.is_cuda and not interpreting():
        raise ValueError(
            f"{VARIABLE}=triton, but the tensors are on {like.device}: move them to a CUDA device, "
            f"set {VARIABLE}=auto, or TRITON_INTERPRET=1 to run kernels in Triton's interpreter"
        )
    return True


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size` >= 1: the width of a masked block."""
    return 1 << (size - 1).bit_length()


def warps_for(block: int, lanes: int = 16) -> int:
    """Warps for one program over a block of `block` float32 values, about `lanes` of them a
    thread."""
    return max(1, min(16, block // (32 * lanes)))
