"""Measure launch settings on this machine's GPU and keep those that beat the rules.

Every launch that the ops make at the widths of real models (`op_cases`) is timed as the rule has
it and with a handful of others that leave its grid as it is; what is faster by more than noise goes
into `kernels/launches.json` under its shape class and the card's compute capability. Nothing is
tuned while the library runs. Afterwards `aot` compiles what was chosen, and `gpu_check` holds it
against the definitions.

    python -m draftsmith.scripts.tune
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..kernels import launches
from ..kernels.jit import Launch, installed, recorded
from ..models.files import atomic_write_json
from .gpu_check import median_seconds
from .op_calls import Case
from .op_cases import CASES

GAIN = 0.97
"""A setting is kept where it takes less than this share of the rule's time."""
_ATTENTION = {"BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)}
_ROWS = {"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)}
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "paged_attention_kernel": _ATTENTION,
    "causal_forward_kernel": _ATTENTION,
    "causal_query_kernel": _ATTENTION,
    "causal_key_kernel": _ATTENTION,
    "distill_chunk_kernel": _ROWS,
    "renormalise_kernel": _ROWS,
    "accept_chains_kernel": _ROWS,
    "accept_trees_kernel": _ROWS,
    "rms_norm_kernel": {"num_warps": (1, 2, 4, 8, 16)},
    "norm_concat_kernel": {"num_warps": (1, 2, 4, 8, 16)},
    "add_norm_kernel": {"num_warps": (1, 2, 4, 8, 16)},
    "norm_backward_kernel": {"num_warps": (4, 8, 16)},
}
"""What may be chosen of each kernel: blocks that are walked in a loop, warps, stages."""


def asked_by(launch: Launch) -> dict[str, Any]:
    """Constants and launch settings as the op's rule has them."""
    constants = {name: launch.arguments[name] for name in launch.kernel.constants}
    return constants | {"num_warps": launch.num_warps, "num_stages": launch.num_stages}


def others(launch: Launch) -> Iterator[dict[str, int]]:
    """Settings to try instead of the rule's."""
    choices = CHOICES[launch.kernel.function.__name__]
    rule = asked_by(launch)
    for values in product(*choices.values()):
        setting = dict(zip(choices, values, strict=True))
        if any(rule[name] != value for name, value in setting.items()):
            yield setting


def best(launch: Launch, timed: Callable[[Callable[[], Any]], float]) -> dict[str, int]:
    """The fastest setting of one launch; empty where the rule's is."""

    def seconds(setting: dict[str, int]) -> float:
        given = {**launch.arguments, **asked_by(launch), **setting}
        return timed(lambda: launch.kernel.built[launch.grid](**given))

    chosen, limit = {}, GAIN * seconds({})
    for setting in others(launch):
        try:
            taken = seconds(setting)
        except Exception as fault:  # more shared memory or registers than the card has
            print(f"  {setting}: {type(fault).__name__}", file=sys.stderr)
            continue
        if taken < limit:
            chosen, limit = setting, taken
    return chosen


def tune(
    cases: tuple[Case, ...], device: str, timed: Callable[[Callable[[], Any]], float]
) -> dict[str, dict[str, int]]:
    """Settings by shape class of all launches that the cases make and that may be tuned; the first
    case of a class speaks for it."""
    found: dict[str, dict[str, int]] = {}
    for case in cases:
        for size in (*case.sizes, *case.extra):
            arguments = case.arguments(size, torch.bfloat16, device)
            with recorded() as wanted:
                case.run(*arguments)
            for launch in wanted:
                kernel = launch.kernel.function.__name__
                name = launches.shape_class(kernel, asked_by(launch))
                if kernel in CHOICES and name not in found:
                    found[name] = best(launch, timed)
                    print(f"{name}: {found[name] or 'the rule'}", flush=True)
    return {name: setting for name, setting in found.items() if setting}


def write(table: Path, capability: int, found: dict[str, dict[str, int]]) -> None:
    """Put a card's settings into the table; those of other cards stay."""
    known = json.loads(table.read_text()) if table.exists() else {}
    atomic_write_json(table, known | {str(capability): found})


def main() -> int:
    """Tune for this card; status 2 where there is none."""
    if not torch.cuda.is_available() or not installed():
        print(
            "tune: this needs a CUDA device and Triton; without kernels/launches.json the rules in "
            "the ops hold, and nothing has to be tuned",
            file=sys.stderr,
        )
        return 2
    major, minor = torch.cuda.get_device_capability()
    write(launches.TABLE, 10 * major + minor, tune(CASES, "cuda", median_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
