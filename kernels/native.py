"""C++ forms of ops on a CPU: one file beside the op, built at its first use and kept.

A file is built in a second or two by the machine's own compiler for the machine's own processor and
lies in the user's cache under a name that hashes the source, the compiler and the processor. It is
called through ctypes: a call costs two microseconds, and neither Python's nor PyTorch's headers are
needed. Threads are OpenMP's, which PyTorch has loaded already, so `torch.set_num_threads` holds.

`DRAFTSMITH_KERNELS` (see `jit`) picks: `auto` builds where it can and else runs the plain form,
`compiled` insists, `reference` never does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .jit import VARIABLE, choice

POINTER, INTEGER, SMALL = c_void_p, c_int64, c_int
TYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2}
"""How a file tells the dtypes apart (`BY_TYPE` in numbers.h)."""

# Sums may be reordered into vectors, but infinity and NaN stay what they are.
_FLAGS = (
    "-std=c++17 -O3 -march=native -fopenmp -shared -fPIC -fno-math-errno -fno-trapping-math "
    "-fassociative-math -fno-signed-zeros"
).split()
if platform.machine() in ("x86_64", "AMD64"):
    _FLAGS.append("-mprefer-vector-width=512")


class Native:
    """The functions of one C++ file.

    Args:
        name: the file `name.cpp` in this folder. signatures: argument types by function; a function
            returns nothing, or an int where its name is in `returns`.
    """

    def __init__(
        self, name: str, signatures: dict[str, list[type]], returns: tuple[str, ...] = ()
    ) -> None:
        self.source = Path(__file__).with_name(f"{name}.cpp")
        self.signatures = signatures
        self.returns = returns

    @functools.cached_property
    def library(self) -> ctypes.CDLL | None:
        """The loaded file; None where it cannot be built, which `auto` tells once."""
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        if compiler is None:
            return None
        try:
            library = ctypes.CDLL(str(_built(self.source, compiler)))
        except (OSError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or str(error)
            warnings.warn(
                f"{self.source.name} could not be built ({str(told).strip()[:300]}); its plain "
                f"form runs, more slowly. {VARIABLE}=reference does not try",
                stacklevel=3,
            )
            return None
        for name, arguments in self.signatures.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int if name in self.returns else None
        return library

    @property
    def functions(self) -> ctypes.CDLL:
        """The file's functions, for ops on tensors that it serves."""
        assert self.library is not None
        return self.library

    def serves(self, like: Tensor) -> bool:
        """Whether an op on tensors like this one runs its C++ form.

        Raises:
            ValueError: `compiled` is asked for where there is no compiler.
        """
        # A tensor of another class (a fake one, of a pass that only counts) has no memory to read.
        if type(like) not in (Tensor, torch.nn.Parameter):
            return False
        if like.device.type != "cpu" or like.dtype not in TYPES:
            return False
        asked = choice()
        if asked not in ("auto", "compiled"):
            return False
        if self.library is None and asked == "compiled":
            raise ValueError(
                f"{VARIABLE}=compiled: {self.source.name} cannot be built here; install g++ or set "
                f"CXX, or set {VARIABLE}=auto"
            )
        return self.library is not None


def _built(source: Path, compiler: str) -> Path:
    """The shared library of a source file, built where it is not there yet."""
    digest = hashlib.sha256(_machine(compiler).encode())
    for part in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(part.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "draftsmith" / "native"
    path = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *_FLAGS, str(source), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            made.replace(path)  # whole or not at all, whoever else builds it
    return path


@functools.cache
def _machine(compiler: str) -> str:
    """What a built file depends on beside its source: a home may serve several machines."""
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()[0]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return "\n".join([version, platform.machine(), flags, *_FLAGS])
