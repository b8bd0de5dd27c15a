"""`draftsmith export`: native head -> another layout, read back and compared by logits."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.table import Table

from ..conf.schema import Config
from ..models.attention import PackedContext
from ..models.formats import layout as find_layout
from ..models.formats.runs import SHORT, named_layout, where
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
    written = export(config, invocation)
    for name, (_, origins) in written.items():
        shown = Table(name, "origin", box=None, pad_edge=False, header_style="bold")
        for tensor, origin in origins.items():
            shown.add_row(tensor, origin)
        invocation.console.print(shown)
    invocation.wrote(**{name: out for name, (out, _) in written.items()})
    invocation.next("generate")


def export(config: Config, invocation: Invocation) -> dict[str, tuple[Path, dict[str, str]]]:
    """Write each layout and prove it; its folder, and the origin of each of its tensors.

    Raises:
        ValueError: an unknown layout, a head that a layout cannot hold, or one that came back
        different; layouts before it in the list are written.
    """
    settings, artifacts = config.export, Artifacts.of(config)
    for name in settings.layouts:
        if name not in SHORT:
            find_layout(name)
    folder = prepare_folder(config.target)
    loaded = load_head(artifacts.head_or(settings.head), fingerprint(folder))
    layouts = {
        name: find_layout(name)
        for name in (named_layout(given, loaded) for given in settings.layouts)
    }
    trunk = Trunk.load(folder, torch.float32)
    written: dict[str, tuple[Path, dict[str, str]]] = {}
    for name, (write, read) in layouts.items():
        out = artifacts.exported(name, settings.folder)
        if settings.folder is not None and len(layouts) > 1:
            out = out / name
        origins = write(loaded, folder, out)
        difference = largest_difference(loaded, read(out, folder), trunk)
        if not difference <= TOLERANCE:
            raise ValueError(
                f"{out}: read back, the head's logits differ by {difference:.3g} (at most "
                f"{TOLERANCE:g} is rounding); do not use this export"
            )
        write_provenance(out, invocation.resolved)
        written[name] = out, origins
        invocation.say(f"{name}: read back, logits differ by at most {difference:.3g}")
        invocation.say(f"{name}: {where(loaded, name)}")
    held = {"vllm-medusa"}  # the ids, too
    if loaded.draft_ids is not None and loaded.head.lm_head is None and set(layouts) - held:
        invocation.say(
            f"the head was trained on {len(loaded.draft_ids):,} draft ids; such a layout drafts "
            f"from all {loaded.head.target_config.vocab_size:,}, with the target's own lm_head"
        )
    return written


@torch.inference_mode()
def largest_difference(
    one: LoadedHead, other: LoadedHead, trunk: Trunk, prompts: tuple[int, ...] = (4, 7, 10, 12, 15)
) -> float:
    """Largest absolute difference of two heads' float32 logits over the same prompts: at the step
    of every module, and recycled twice beyond; infinite where they draft other ids.

    Args:
        trunk: of the target, float32. prompts: their lengths; seeded tokens, states of unit RMS at
            every boundary that either head reads.
    """
    if (one.draft_ids is None) != (other.draft_ids is None) or (
        one.draft_ids is not None
        and other.draft_ids is not None
        and not torch.equal(one.draft_ids, other.draft_ids)
    ):
        return float("inf")
    generator, rows = torch.Generator().manual_seed(0), sum(prompts)
    steps = one.head.max_steps or one.head.num_modules + 2
    tokens = torch.randint(trunk.vocab_size, (steps, rows), generator=generator)
    boundaries = sorted({*_read(one), *_read(other)})
    raw = {k: torch.randn(rows, trunk.hidden_size, generator=generator) for k in boundaries}
    states = [loaded.head.feed(raw, trunk) for loaded in (one, other)]
    starts = [sum(prompts[:index]) for index in range(len(prompts) + 1)]
    places = torch.cat([torch.arange(length) for length in prompts])
    worst = 0.0
    for step in range(steps):
        outs = [
            loaded.head.eval()(
                trunk.embed(tokens[step]), state, places + step, PackedContext(starts), step
            )
            for loaded, state in zip((one, other), states, strict=True)
        ]
        states = [out.recycled for out in outs]
        ours, theirs = (
            trunk.logits(out.drafted)
            if loaded.head.lm_head is None
            else out.drafted @ loaded.head.lm_head.expand(steps, -1, -1)[step].T
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
    writes="WORK/export/LAYOUT for each: weights and configuration of that layout, provenance.json",
    sections=("work", "export", "target.source"),
    examples=(
        "draftsmith export",
        "draftsmith export 'export.layout=[vllm-eagle3,sglang-eagle3]'",
        "draftsmith export export.head=some/head export.folder=for-an-engine",
    ),
    kept="each file is written whole or not at all; run the command again",
)


def main() -> int:
    """`python -m draftsmith.scripts.export`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
