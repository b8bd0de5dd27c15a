"""`draftsmith VERB key=value …`: finds the verb and hands over. Only the verb that runs is
imported."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

VERBS = {
    "prepare": "conversations -> token rows, loss mask and a ledger of what was dropped and why",
    "regenerate": "token rows -> the same conversations, answered by the target itself",
    "dump": "token rows -> the target's hidden states, in a sharded cache",
    "combine": "several caches, or a part of one, read as one; no state is copied",
    "train": "cache -> head, with its acceptance measured in the engine while training",
    "evaluate": "head + prompts -> acceptance report (JSON, Markdown, HTML, plots)",
    "compare": "runs -> one table of what differs, acceptance with intervals, curves",
    "export": "native head -> another layout, re-imported and compared by logits",
    "import": "another layout -> native head",
    "generate": "chat with the target, plain or with a head",
    "doctor": "target, rows, cache, run, head, report -> which of the classic faults is in them",
    "plan": "memory, disk and time of a run, forecast from its configuration alone",
    "demo": "all of it on a small real model, on a CPU, in minutes",
}
"""Every verb in the order of the way, and what it does."""

_MODULES = {"import": "import_head"}  # `import` cannot be the name of a module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code (see `app`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"draftsmith {importlib.metadata.version('draftsmith')}")
        return 0
    verb, *rest = given
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(VERBS)}"
        print(f"draftsmith: {verb}: no such verb; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{_MODULES.get(verb, verb)}", __package__)
    return module.VERB.main(rest)


def usage() -> str:
    """One line per verb."""
    lines = ["usage: draftsmith VERB [key=value ...]", ""]
    lines += [f"  {name:<10}{summary}" for name, summary in VERBS.items()]
    lines += [
        "",
        "draftsmith VERB --help lists a verb's options, draftsmith VERB --cfg job what it would "
        "run with.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
