"""What a user sees of a training run after each of its validations: a line, and the curves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..models.files import atomic_write_bytes
from ..models.heads import Head
from ..train.loop import Trainer
from ..train.metrics import read_metrics
from ..train.ranks import rank
from ..train.validation import Validator
from .app import Invocation
from .artifacts import Artifacts


def watched(
    validator: Validator, trainer: Trainer, artifacts: Artifacts, invocation: Invocation
) -> Callable[[Head], dict[str, Any]]:
    """The validator, which then says its figures and draws the curves up to them."""

    def validate(head: Head) -> dict[str, Any]:
        figures = validator(head)
        agreed = " ".join(f"{share:.1%}" for share in figures["agreement"])
        line = f"step {trainer.step}: held-out loss {figures['loss']:.3f}, agreement {agreed}"
        if "acceptance" in figures:
            measured = figures["acceptance"]
            line += (
                f", {measured['tokens_per_target_call']:.3f} tokens per target call in the engine "
                f"(temperature {measured['temperature']:g})"
            )
        invocation.say(line)
        if rank() == 0:
            draw_curves(artifacts, {"kind": "validation", "step": trainer.step, **figures})
        return figures

    return validate


def draw_curves(artifacts: Artifacts, *latest: dict[str, Any]) -> None:
    """WORK/train/curves.png, of metrics.jsonl and rows that are not there yet. A picture that
    cannot be drawn is told of, and ends no run."""
    # matplotlib is a tenth of what a training process imports, and most ranks never draw
    from ..inference.curves import overview
    from ..inference.plots import png

    try:
        rows = list(read_metrics(artifacts.metrics)) if artifacts.metrics.exists() else []
        figure = overview([*rows, *latest])
        if figure is not None:
            atomic_write_bytes(artifacts.curves, png(figure))
    except Exception as error:
        warnings.warn(
            f"{artifacts.curves} is not drawn ({type(error).__name__}: {error}); metrics.jsonl "
            "holds its numbers",
            stacklevel=2,
        )
