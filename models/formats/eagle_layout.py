"""What the EAGLE and EAGLE-3 layouts share: a folder of its own with the head's tensors, read and
judged as the engine it is for would load it.

    model.safetensors   the tensors, in the dtype that the head has (float32 as trained)
    config.json         a Llama-shaped configuration, with what the engine's class reads
    draftsmith.json     what the layout has no place for: the target's fingerprint, training facts

Writing makes the folder in memory, lets the engine's loader (`loaders.Engine`) have it, and refuses
where that would raise, drop, invent or run anything else than what was trained. Reading goes the
same way: the head that comes in is the one that the engine would run, and what its loader would do
silently is refused, what it would assume is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from ..files import atomic_write_bytes, atomic_write_json, read_json
from ..heads.checkpoint import LoadedHead
from ..skeleton import text_config
from .eagle_config import written_config
from .eagle_files import (
    EMBEDDING,
    LM_HEAD,
    mend_map,
    read_weights,
    take_copies,
)
from .eagle_head import never_run, read_head, share_lm_head
from .eagle_tensors import layout_tensors
from .facts import facts, judge
from .loaders import Engine, Loader, Report, few
from .written import KEEP, Written, faults_of, settle, write_note


@dataclass(frozen=True)
class EagleLayout:
    """One layout.

    Attributes:
        name: as the commands call it. kind: of the heads it holds. engine: whose loader it is for.
        midlayer: an only layer is called so. configure: the common configuration, the loader's
            class, the head, its target's folder -> config.json.
    """

    name: str
    kind: str
    engine: Engine
    configure: Callable[[dict[str, Any], Loader, LoadedHead, Path], dict[str, Any]]
    midlayer: bool = True

    def plan(self, loaded: LoadedHead, target_folder: Path | str) -> Written:
        """What would be written, judged; the head's tensors may lie on the meta device.

        Raises:
            ValueError: a head that the engine would not run as it was trained; every reason is
                told, with its remedy.
        """
        if loaded.head.kind != self.kind:
            raise ValueError(
                f"the {self.name} layout holds {self.kind} heads, this one is of kind "
                f"{loaded.head.kind}: {KEEP}"
            )
        trained, folder = facts(loaded), Path(target_folder)
        if trained["modules"] != 1:
            raise ValueError(
                f"the {self.name} layout holds one module, this head has {trained['modules']}: "
                f"train with head.modules=1, or {KEEP}"
            )
        if trained["layer"] not in ("plain", "query-norm"):
            raise ValueError(
                "every EAGLE class known here runs a Llama-shaped layer, this head has that of "
                f"{trained['layer']}: train head.kind=mtp where the family has an MTP layout, or "
                f"{KEEP}"
            )
        loader = self._loader(trained)
        tensors, origin = layout_tensors(loaded, loader, folder, self.midlayer)
        config = self.configure(
            written_config(loaded.head, loader, tensors), loader, loaded, folder
        )
        report, faults = judge(self.engine, config, tensors, loaded.head.target_config, trained)
        if faults:
            raise ValueError(f"the {self.name} layout: {'; '.join(faults)}. Or {KEEP}")
        return Written(tensors, config, origin, report)

    def write(
        self, loaded: LoadedHead, target_folder: Path | str, out: Path | str
    ) -> dict[str, str]:
        """Write the folder; tensor name -> `trained`, `copied from the target`, `map` or `filler`.

        Raises:
            ValueError: see `plan`; nothing is written then.
        """
        planned, out = self.plan(loaded, target_folder), Path(out)
        out.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(
            out / "model.safetensors", save(planned.tensors, metadata={"format": "pt"})
        )
        write_note(out, loaded, self.name, ids=self.kind == "eagle")  # engines draft from all
        atomic_write_json(out / "config.json", planned.config)
        return planned.origin

    def read(self, folder: Path | str, target_folder: Path | str | None = None) -> LoadedHead:
        """Read such a folder: safetensors, or a pickle of tensors and nothing else.

        Raises:
            ValueError: what the engine's loader would stop at, drop or leave random, by name; maps
                that are no offsets; another vocabulary or width than the target's.
        """
        folder = Path(folder)
        if target_folder is None:
            raise ValueError(f"{folder}: an EAGLE folder does not describe its target; name it")
        target, config = text_config(target_folder), read_json(folder / "config.json")
        tensors = read_weights(folder)
        mend_map(tensors, int(target.vocab_size), folder)
        # The target's own, which every class here shares; of EAGLE-3 the lm_head is the head's.
        own = (EMBEDDING, LM_HEAD) if self.kind == "eagle" else (EMBEDDING,)
        copies = [name for name in tensors if name.removeprefix("model.") in own]
        take_copies(folder, tensors, copies, Path(target_folder))
        report = self.engine.load(config, tensors, target)
        idle = [n for n in report.dropped if n.endswith(".bias") and not bool(tensors[n].any())]
        if idle:  # a bias of zeros is none
            tensors = {name: value for name, value in tensors.items() if name not in idle}
            report = self.engine.load(config, tensors, target)
        faults = faults_of(report, target)
        if not faults:
            faults = never_run(self.kind, report.runs)
        if self.kind == "eagle3" and LM_HEAD not in tensors and not faults:
            faults = share_lm_head(folder, tensors, Path(target_folder))
        settle(folder, report, faults, lambda value: _told(value, report))
        loader = next(one for one in self.engine.loaders if one.name == report.loader)
        return read_head(self.kind, folder, report, loader, tensors, target, self.midlayer)

    def loader_of(self, loaded: LoadedHead) -> Loader:
        """The engine's class for a head; ValueError where there is none."""
        return self._loader(facts(loaded))

    def _loader(self, trained: dict[str, Any]) -> Loader:
        """The engine's class for these norms."""
        normed = trained["layer"] == "query-norm"
        fits = [one for one in self.engine.loaders if set(one.norms) == set(trained["norms"])]
        chosen = next((one for one in fits if one.query_norms == normed), None)
        if chosen is not None:
            return chosen
        if fits:
            raise ValueError(
                f"the {self.name} layout: {self.engine.name} has no class with norms on queries "
                f"and keys for such a head, and would drop them: {KEEP}"
            )
        classes = "; ".join(
            f"{one.name}: {few(one.norms) or 'none'}" for one in self.engine.loaders
        )
        raise ValueError(
            f"the {self.name} layout: this head has the norms {few(trained['norms']) or 'none'}, "
            f"and {self.engine.name} has classes for these alone ({classes}); any other norm would "
            f"be refused, dropped or left random there: train with head.norms of one of them, or "
            f"{KEEP}"
        )


def _told(value: Any, report: Report) -> str:
    return str(list(report.runs["boundaries"])) if value == "usual" else str(value)
