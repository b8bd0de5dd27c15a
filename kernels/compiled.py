"""Which ops run a C++ form on a CPU, made by torch.compile at their first use.

A chain of elementwise steps and row sums over a chunk of logits is bound by memory: plain PyTorch
reads and writes the chunk once a step. Inductor fuses the chain into two or three vectorised loops.
It needs a C++ compiler and Python's headers; where either is missing, the plain form runs.
`DRAFTSMITH_KERNELS` (see `jit`) picks: `auto` compiles where it can and there is enough to do to
repay the seconds that it takes, `compiled` insists, `reference` never does.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .jit import VARIABLE, choice


@functools.cache
def missing() -> str | None:
    """What a C++ form cannot be made without on this machine; None where all is there."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}); install g++ or set CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "no Python.h; install Python's development headers (python3-dev)"
    return None


def use_compiled(like: Tensor, worth: bool) -> bool:
    """Whether an op on a tensor like this runs its C++ form. float64 takes the plain form.

    Args:
        worth: whether there is so much to do that `auto` should compile.

    Raises:
        ValueError: `compiled` is asked for where it cannot be had.
    """
    asked = choice()
    if asked not in ("auto", "compiled") or like.dtype not in (torch.float32, torch.bfloat16):
        return False
    if like.device.type != "cpu" or (asked == "auto" and not worth):
        return False
    lacking = missing()
    if lacking is not None and asked == "compiled":
        raise ValueError(f"{VARIABLE}=compiled: {lacking}; or set {VARIABLE}=auto")
    return lacking is None


class Compiled:
    """A function of tensors, compiled at its first call for any number of rows.

    Where the compiler fails, that is told once and the function itself runs: the same values but
    for the order of sums.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._form: Callable[..., Any] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        if self._form is not None:
            return self._form(*arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised inside torch itself
            warnings.simplefilter("ignore", FutureWarning)
            try:
                # No pool of compiling processes for one small function.
                form = torch.compile(self.function, dynamic=True, options={"compile_threads": 1})
                result = form(*arguments)
            except Exception as error:  # a compiler may fail in any way; the plain form never does
                warnings.warn(
                    f"{self.function.__name__} could not be compiled ({type(error).__name__}: "
                    f"{str(error).splitlines()[0] if str(error) else ''}); its plain form runs, "
                    f"more slowly. {VARIABLE}=reference does not try",
                    stacklevel=3,
                )
                form, result = self.function, self.function(*arguments)
        self._form = form
        return result
