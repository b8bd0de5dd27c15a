"""`draftsmith import`: another layout -> native head, compared by logits with what was read."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ..conf.schema import Config
from ..models.formats import layout as find_layout
from ..models.formats.source import NATIVE, read_head
from ..models.heads import load_head, save_head
from ..models.provenance import write_provenance
from ..models.target import fingerprint, prepare_folder
from ..models.trunk import Trunk
from .app import Invocation, Verb
from .artifacts import Artifacts
from .export import proven
from .proof import boundaries_of, seeded


def run(config: Config, invocation: Invocation) -> None:
    """Read the layout, write a native head folder, read that back.

    Raises:
        ValueError: an unknown layout, a folder that does not hold it, or a head for another target;
            nothing is written then.
    """
    settings, artifacts = config.import_head, Artifacts.of(config)
    source = artifacts.exported(settings.layout or config.export.layouts[0], settings.folder)
    if not source.is_dir():
        raise ValueError(f"{source} is no folder: name the one to read, import_head.folder=…")
    if settings.layout is not None:
        find_layout(settings.layout)
    out = artifacts.work / "imported" if settings.out is None else Path(settings.out)
    folder = prepare_folder(config.target)
    found = read_head(source, folder, fingerprint(folder), settings.layout)
    layout = found.meta["layout"]
    if layout == NATIVE:
        raise ValueError(f"{source} is a native head folder already")
    if settings.layout is None:
        invocation.say(f"layout: {layout}")
    save_head(
        out,
        found.head,
        target_fingerprint=found.meta["target_fingerprint"],
        draft_ids=found.draft_ids,
        trained_length=int(found.meta.get("trained_length", 0)),
        config=invocation.resolved,
        training={**found.meta["training"], "imported_from": layout},
    )
    trunk = Trunk.load(folder, torch.float32)
    told = proven(out, found, load_head(out), trunk, [seeded(trunk, boundaries_of(found))])
    write_provenance(out, invocation.resolved)
    invocation.say(told)
    invocation.wrote(head=out)
    invocation.next("evaluate", f"evaluate.head={out}")


VERB = Verb(
    name="import",
    task=run,
    reads="a folder of another layout (import_head.folder) and the target it belongs to",
    writes="a native head folder (import_head.out): head.safetensors, config.json, provenance.json",
    sections=("work", "import_head", "target.source"),
    examples=(
        "draftsmith import import_head.folder=some/deepseek-style-head "
        "import_head.out=work/imported",
    ),
    kept="config.json is written last, so a folder without it is no head; run the command again",
)


def main() -> int:
    """`python -m draftsmith.scripts.import_head`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
