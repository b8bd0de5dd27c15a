"""What runs a head: engine and class by layout, and the layout that an engine's name stands for."""

from __future__ import annotations

from ..heads.checkpoint import LoadedHead
from . import EAGLE_LAYOUTS, LAYOUTS, MEDUSA_LAYOUTS, MTP_LAYOUTS
from .mtp_layout import MTPLayout

SHORT = {
    "vllm": {"eagle": "vllm-eagle", "eagle3": "vllm-eagle3", "medusa": "vllm-medusa"},
    "sglang": {"eagle": "sglang-eagle", "eagle3": "sglang-eagle3"},
    "trtllm": {"eagle3": "trtllm-eagle3"},
    "authors": {"eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa"},
}
"""What stands for an engine -> kind of head -> its layout there."""
_ENGINE = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "authors": "its authors' code",
}


def named_layout(name: str, loaded: LoadedHead) -> str:
    """The layout that a name stands for: itself, or of an engine's name (`SHORT`) the one that it
    reads this head from.

    Raises:
        ValueError: the engine has no class for such a head, or would run it otherwise.
    """
    if name not in SHORT:
        return name
    kind, family = loaded.head.kind, str(loaded.head.target_config.model_type)
    if kind in SHORT[name]:
        return SHORT[name][kind]
    for layout in MTP_LAYOUTS if kind == "mtp" else ():
        runs, words = mtp_runs(layout, loaded).get(_ENGINE[name], (False, ""))
        if runs:
            return layout.name
        if words:
            raise ValueError(
                f"export.layout={name}: {words}. Or keep the native folder, which this engine runs"
            )
    raise ValueError(
        f"export.layout={name}: {_ENGINE[name]} has no class for a head of kind {kind} of a "
        f"{family} target (docs/where-heads-run.md); name a layout ({', '.join(LAYOUTS)}), or keep "
        "the native folder, which this engine runs"
    )


def where(loaded: LoadedHead, layout: str) -> str:
    """What runs a head in a layout that holds it, for the user."""
    eagle = next((one for one in EAGLE_LAYOUTS if one.name == layout), None)
    if eagle is not None:
        loader = eagle.loader_of(loaded)
        hint = (
            "; give it eagle3_layers_to_capture="
            f"{{{', '.join(str(k - 1) for k in loaded.head.boundaries)}}}"
            if layout == "trtllm-eagle3"
            else ""
        )
        return f"runs in {eagle.engine.name} as {loader.name}{hint}"
    medusa = next((one for one in MEDUSA_LAYOUTS if one.name == layout), None)
    if medusa is not None:
        return f"runs in {medusa.engine.name} as {medusa.engine.loaders[0].name}"
    found = mtp_runs(next(one for one in MTP_LAYOUTS if one.name == layout), loaded)
    if not found:
        return (
            f"no engine has a class for such a head of a {loaded.head.target_config.model_type} "
            "target; it runs in this engine alone"
        )
    runs = [f"{engine} as {words}" for engine, (well, words) in found.items() if well]
    not_in = [f"; not in {engine}: {words}" for engine, (well, words) in found.items() if not well]
    return "runs in " + ", ".join(runs) + "".join(not_in)


def mtp_runs(layout: MTPLayout, loaded: LoadedHead) -> dict[str, tuple[bool, str]]:
    """Engine -> (whether it runs such modules as they were trained, its class or why not)."""
    return {
        report.engine.split()[0]: (not faults, "; ".join(faults) or report.loader)
        for report, faults in layout.judge(loaded)
    }
