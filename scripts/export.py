"""`draftsmith export`: native head -> another layout, read back and compared by logits."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.table import Table

from ..conf.schema import Config
from ..models.attention import PackedContext
from ..models.formats import layout as find_layout
from ..models.heads import LoadedHead, load_head
from ..models.provenance import write_provenance
from ..models.target import fingerprint, prepare_folder
from ..models.trunk import Trunk
from .app import Invocation, Verb
from .artifacts import Artifacts

TOLERANCE = 1e-4
"""Largest difference of float32 logits that an export may show when read back; weights are stored
as they are."""


def run(config: Config, invocation: Invocation) -> None:
    """Export, compare, say what every tensor is and where."""
    out, origins = export(config, invocation)
    shown = Table("tensor", "origin", box=None, pad_edge=False, header_style="bold")
    for name, origin in origins.items():
        shown.add_row(name, origin)
    invocation.console.print(shown)
    invocation.wrote(**{config.export.layout: out})
    invocation.next("generate")


def export(config: Config, invocation: Invocation) -> tuple[Path, dict[str, str]]:
    """Write the layout and prove it; its folder, and the origin of each of its tensors.

    Raises:
        ValueError: an unknown layout, a head that the layout cannot hold, or one that came back
        different.
    """
    layout, artifacts = config.export.layout, Artifacts.of(config)
    write, read = find_layout(layout)
    folder = prepare_folder(config.target)
    loaded = load_head(artifacts.head_or(config.export.head), fingerprint(folder))
    out = artifacts.exported(layout, config.export.folder)
    origins = write(loaded, folder, out)
    difference = largest_difference(loaded, read(out, folder), Trunk.load(folder, torch.float32))
    if not difference <= TOLERANCE:
        raise ValueError(
            f"{out}: read back, the head's logits differ by {difference:.3g} (at most "
            f"{TOLERANCE:g} is rounding); do not use this export"
        )
    write_provenance(out, invocation.resolved)
    invocation.say(f"read back: logits differ by at most {difference:.3g}")
    if loaded.draft_ids is not None:
        invocation.say(
            f"the head was trained on {len(loaded.draft_ids):,} draft ids; the layout drafts from "
            f"all {loaded.head.target_config.vocab_size:,}, with the target's own lm_head"
        )
    return out, origins


@torch.inference_mode()
def largest_difference(one: LoadedHead, other: LoadedHead, trunk: Trunk, rows: int = 48) -> float:
    """Largest absolute difference of two heads' float32 logits over the same input: at the step of
    every module, and recycled once beyond.

    Args:
        trunk: of the target, float32. rows: N random rows: seeded tokens, states of unit RMS.
    """
    generator, steps = torch.Generator().manual_seed(0), one.head.num_modules + 1
    tokens = torch.randint(trunk.vocab_size, (steps, rows), generator=generator)
    raw = {k: torch.randn(rows, trunk.hidden_size, generator=generator) for k in _read(one)}
    states = [loaded.head.feed(raw, trunk) for loaded in (one, other)]
    worst = 0.0
    for step in range(steps):
        positions = torch.arange(rows) + step
        outs = [
            loaded.head.eval()(
                trunk.embed(tokens[step]), state, positions, PackedContext([0, rows]), step
            )
            for loaded, state in zip((one, other), states, strict=True)
        ]
        states = [out.recycled for out in outs]
        ours, theirs = (
            trunk.logits(out.drafted)
            if loaded.head.lm_head is None
            else out.drafted @ loaded.head.lm_head.T
            for loaded, out in zip((one, other), outs, strict=True)
        )
        worst = max(worst, float((ours - theirs).abs().max()))
    return worst


def _read(loaded: LoadedHead) -> list[int]:
    """The boundaries that the head reads, and L."""
    return sorted({*loaded.head.boundaries, int(loaded.head.target_config.num_hidden_layers)})


VERB = Verb(
    name="export",
    task=run,
    reads="a native head (WORK/train/head) and the target's embedding and lm_head",
    writes="WORK/export/LAYOUT: weights and configuration of that layout, provenance.json",
    sections=("work", "export", "target.source"),
    examples=(
        "draftsmith export",
        "draftsmith export export.head=some/head export.folder=for-an-engine",
    ),
    kept="each file is written whole or not at all; run the command again",
)


def main() -> int:
    """`python -m draftsmith.scripts.export`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
