"""`draftsmith export`: native head -> another layout, read back and compared by logits."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from rich.table import Table

from ..conf.schema import Config
from ..models.formats import MTP_LAYOUTS
from ..models.formats import layout as find_layout
from ..models.formats.loaders import few
from ..models.formats.runs import SHORT, named_layout, where
from ..models.formats.source import read_head
from ..models.heads import LoadedHead
from ..models.provenance import write_provenance
from ..models.target import fingerprint, prepare_folder
from ..models.trunk import Trunk
from .app import Invocation, Verb
from .artifacts import Artifacts
from .proof import (
    TOLERANCE,
    Prompts,
    Row,
    boundaries_of,
    cached,
    changed,
    difference,
    rounded,
    seeded,
    steps_of,
    table,
)


def run(config: Config, invocation: Invocation) -> None:
    """Export, compare, say what every tensor is and where."""
    written = export(config, invocation)
    for name, (_, rows) in written.items():
        shown = Table(
            name, "shape", "dtype", "origin", box=None, pad_edge=False, header_style="bold"
        )
        for row in rows:
            shown.add_row(row.name, "×".join(map(str, row.shape)), row.dtype, row.origin)
        invocation.console.print(shown)
    invocation.wrote(**{name: out for name, (out, _) in written.items()})
    invocation.next("generate")


def export(config: Config, invocation: Invocation) -> dict[str, tuple[Path, list[Row]]]:
    """Write each layout and prove it; its folder, and what each of its tensors is.

    Raises:
        ValueError: an unknown layout, a head that a layout cannot hold, or one that came back
        different; layouts before it in the list are written.
    """
    settings, artifacts = config.export, Artifacts.of(config)
    for name in settings.layouts:
        if name not in SHORT:
            find_layout(name)
    folder = prepare_folder(config.target)
    marks = fingerprint(folder)
    loaded = read_head(artifacts.head_or(settings.head), folder, marks)
    layouts = {
        name: find_layout(name)
        for name in (named_layout(given, loaded) for given in settings.layouts)
    }
    stored = rounded(loaded, getattr(torch, settings.dtype))
    kept = dataclasses.replace(stored, head=stored.head.float())
    trunk, steps = Trunk.load(folder, torch.float32), steps_of(loaded)
    prompts = _prompts(config, marks, loaded, trunk, invocation)
    written: dict[str, tuple[Path, list[Row]]] = {}
    for name, (write, read) in layouts.items():
        out = artifacts.exported(name, settings.folder)
        if settings.folder is not None and len(layouts) > 1:
            out = out / name
        origins = write(stored, folder, out)
        back = read(out, folder)
        told = proven(out, kept, back, trunk, prompts)
        written[name] = out, table(out, origins, folder, loaded.draft_ids)
        write_provenance(out, invocation.resolved)
        invocation.say(f"{name}: {told}")
        if stored is not loaded:
            rounding = max(difference(loaded, back, trunk, one, steps) for one in prompts)
            invocation.say(
                f"{name}: stored in {settings.dtype}, which moves logits by up to {rounding:.3g} "
                "of the largest; that is what the engine gets"
            )
        invocation.say(f"{name}: {where(loaded, name)}")
        for reason in _otherwise(loaded, name):
            invocation.say(f"{name}: not there: {reason}")
    held = {"vllm-medusa"}  # the ids, too
    if loaded.draft_ids is not None and loaded.head.lm_head is None and set(layouts) - held:
        invocation.say(
            f"the head was trained on {len(loaded.draft_ids):,} draft ids; such a layout drafts "
            f"from all {loaded.head.target_config.vocab_size:,}, with the target's own lm_head"
        )
    return written


def proven(
    out: Path, trained: LoadedHead, back: LoadedHead, trunk: Trunk, prompts: list[Prompts]
) -> str:
    """What was shown of a head that came back from `out`, for the user.

    Raises:
        ValueError: a weight that is not what it was, by name, or logits that are not.
    """
    lost = changed(trained, back)
    if lost:
        raise ValueError(
            f"{out}: read back, {few(lost)} differ from what was written; do not use it"
        )
    steps, worst = steps_of(trained), 0.0
    for one in prompts:
        worst = max(worst, difference(trained, back, trunk, one, steps))
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{out}: read back, the head's logits differ by {worst:.3g} of the largest (at most "
            f"{TOLERANCE:g} is rounding); do not use it"
        )
    return (
        f"read back, weights bit for bit, logits of {steps} steps differ by at most {worst:.3g} "
        f"({', '.join(one.name for one in prompts)})"
    )


def _prompts(
    config: Config,
    marks: dict[str, str],
    loaded: LoadedHead,
    trunk: Trunk,
    invocation: Invocation,
) -> list[Prompts]:
    boundaries = boundaries_of(loaded)
    real, reason = cached(config, marks, boundaries)
    if real is None:
        invocation.say(f"[dim]compared over seeded prompts alone: {reason}[/]")
    return [seeded(trunk, boundaries), *([] if real is None else [real])]


def _otherwise(loaded: LoadedHead, name: str) -> list[str]:
    """Why an engine that has a class for the head's family would not run it as it was trained."""
    layout = next((one for one in MTP_LAYOUTS if one.name == name), None)
    return [] if layout is None else [fault for _, told in layout.judge(loaded) for fault in told]


VERB = Verb(
    name="export",
    task=run,
    reads=(
        "a head in any layout (WORK/train/head), the target's embedding and lm_head, rows of "
        "WORK/cache where it is there"
    ),
    writes="WORK/export/LAYOUT for each: weights and configuration of that layout, provenance.json",
    sections=("work", "export", "target.source"),
    examples=(
        "draftsmith export",
        "draftsmith export 'export.layout=[vllm-eagle3,sglang-eagle3]'",
        "draftsmith export export.head=some/head export.folder=for-an-engine",
        "draftsmith export export.dtype=bfloat16",
    ),
    kept="each file is written whole or not at all; run the command again",
)


def main() -> int:
    """`python -m draftsmith.scripts.export`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
