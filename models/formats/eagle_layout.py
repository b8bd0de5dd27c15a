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

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..files import atomic_write_bytes, atomic_write_json, read_json
from ..heads.checkpoint import LoadedHead, read_vocabulary, vocabulary_maps
from ..heads.config import HeadConfig, NormConfig
from ..heads.families import head_class
from ..heads.protocol import Head
from ..skeleton import text_config
from .eagle_config import layer_config, written_config
from .eagle_files import (
    EMBEDDING,
    LM_HEAD,
    draft_ids,
    mend_map,
    read_weights,
    take_copies,
    targets_own,
)
from .facts import differences, facts
from .loaders import Engine, Loader, Report, few

NOTE = "draftsmith.json"
_KEEP = "keep the native folder, which this engine runs"
_EAGLE_NAMES = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "input_norm1.weight",
    "hnorm.weight": "input_norm2.weight",
    "norm.weight": "norm.weight",
}


@dataclass(frozen=True)
class Written:
    """An export before it is on disk."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    origin: dict[str, str]
    report: Report


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
                f"{loaded.head.kind}: {_KEEP}"
            )
        trained, folder = facts(loaded), Path(target_folder)
        if trained["modules"] != 1:
            raise ValueError(
                f"the {self.name} layout holds one module, this head has {trained['modules']}: "
                f"train with head.modules=1, or {_KEEP}"
            )
        if trained["layer"] not in ("plain", "query-norm"):
            raise ValueError(
                "every EAGLE class known here runs a Llama-shaped layer, this head has that of "
                f"{trained['layer']}: train head.kind=mtp where the family has an MTP layout, or "
                f"{_KEEP}"
            )
        loader = self._loader(trained)
        tensors, origin = self._tensors(loaded, loader, folder)
        config = self.configure(
            written_config(loaded.head, loader, tensors), loader, loaded, folder
        )
        report = self.engine.load(config, tensors, loaded.head.target_config)
        faults = [f"{report.title} {fault}" for fault in report.faults()]
        faults += differences(report.title, report.runs, trained)
        if faults:
            raise ValueError(f"the {self.name} layout: {'; '.join(faults)}. Or {_KEEP}")
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
        note = {key: value for key, value in loaded.meta.items() if key != "sha256"}
        if self.kind == "eagle" and loaded.draft_ids is not None:  # engines draft from all
            note["draft_ids"] = loaded.draft_ids.tolist()
        atomic_write_json(out / NOTE, note | {"layout": self.name})
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
        note = read_json(folder / NOTE) if (folder / NOTE).exists() else {}
        mend_map(tensors, int(target.vocab_size), folder)
        take_copies(folder, tensors, self._copies(tensors), Path(target_folder))
        report = self.engine.load(config, tensors, target)
        idle = [n for n in report.dropped if n.endswith(".bias") and not bool(tensors[n].any())]
        if idle:  # a bias of zeros is none
            tensors = {name: value for name, value in tensors.items() if name not in idle}
            report = self.engine.load(config, tensors, target)
        faults = report.faults()
        for name in ("hidden_size", "vocab_size"):
            said, wanted = report.read.get(name), int(getattr(target, name))
            if said is not None and said != wanted:
                faults.append(f"config.json says {name}={said}, the target has {wanted}")
        if not faults:
            faults = self._unknown(report.runs)
        if self.kind == "eagle3" and LM_HEAD not in tensors and not faults:
            faults = _share_lm_head(folder, tensors, Path(target_folder))
        if faults:
            if report.assumed:
                faults.append(f"config.json has no {', '.join(report.assumed)}")
            raise ValueError(f"{folder}, as {report.title} loads it: {'; '.join(faults)}")
        for name, value in report.guessed.items():
            warnings.warn(
                f"{folder}: config.json has no {name}; {report.title} takes {_told(value, report)}",
                stacklevel=2,
            )
        return self._head(folder, report, tensors, target, note)

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
                f"and keys for such a head, and would drop them: {_KEEP}"
            )
        classes = "; ".join(
            f"{one.name}: {few(one.norms) or 'none'}" for one in self.engine.loaders
        )
        raise ValueError(
            f"the {self.name} layout: this head has the norms {few(trained['norms']) or 'none'}, "
            f"and {self.engine.name} has classes for these alone ({classes}); any other norm would "
            f"be refused, dropped or left random there: train with head.norms of one of them, or "
            f"{_KEEP}"
        )

    def _names(self, head: Head, loader: Loader) -> dict[str, str]:
        """Our tensor names -> the layout's."""
        if self.kind == "eagle":
            found = {}
            for name in head.state_dict():
                inside = name.removeprefix("blocks.0.")
                rest = inside.removeprefix("layer.")
                theirs = _EAGLE_NAMES[inside] if rest == inside else loader.layer + rest
                found[name] = loader.prefix + theirs
            return found
        first = "midlayer." if self.midlayer and head.num_layers == 1 else "layers.0."
        own = {
            "enorm.weight": f"{first}input_layernorm.weight",
            "hnorm.weight": f"{first}hidden_norm.weight",
            "lm_head": LM_HEAD,
        }
        return {
            name: own.get(name, first + name.removeprefix("layers.0."))
            if name in own or name.startswith("layers.0.")
            else name
            for name in head.state_dict()
        }

    def _tensors(
        self, loaded: LoadedHead, loader: Loader, folder: Path
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        head = loaded.head
        state = {name: value.detach() for name, value in head.state_dict().items()}
        tensors = {
            theirs: state[name].contiguous() for name, theirs in self._names(head, loader).items()
        }
        origin = dict.fromkeys(tensors, "trained")
        for index in range(
            1, head.num_layers
        ):  # some classes call it by the one, some by the other
            name = f"layers.{index}.input_layernorm.weight"
            if name in tensors:
                twin = f"layers.{index}.hidden_norm.weight"
                tensors[twin], origin[twin] = tensors[name].clone(), f"trained (equal to {name})"
        if loader.all_biases:
            for name in [name for name in tensors if name.endswith("q_proj.bias")]:
                lacking = name.replace("q_proj", "o_proj")
                if lacking not in tensors:
                    size, kind = int(head.target_config.hidden_size), tensors[name].dtype
                    tensors[lacking] = torch.zeros(size, dtype=kind)
                    origin[lacking] = "filler: zeros, the class has a bias here"
        size, dtype = int(head.target_config.hidden_size), next(iter(state.values())).dtype
        for name, what in loader.fills.items():
            if what in ("zeros", "ones"):
                tensors[name] = getattr(torch, what)(size, dtype=dtype)
                origin[name] = f"filler: {what}, the class has a parameter here"
            else:
                shape = (int(head.target_config.vocab_size), size)
                tensors[name] = (
                    torch.empty(shape, device="meta")
                    if next(head.parameters()).is_meta
                    else targets_own(folder, what).clone()
                )
                origin[name] = "copied from the target"
        if self.kind == "eagle3" and loaded.draft_ids is not None:
            maps = vocabulary_maps(loaded.draft_ids, int(head.target_config.vocab_size))
            tensors |= maps
            origin |= dict.fromkeys(maps, "map")
        return tensors, origin

    def _copies(self, tensors: dict[str, Tensor]) -> list[str]:
        """Tensors of the target that are not loaded: its embedding, and of an EAGLE folder its
        lm_head, but for a class that asks for them."""
        names = (EMBEDDING, LM_HEAD) if self.kind == "eagle" else (EMBEDDING,)
        wanted = self._wanted(tensors)
        return [n for n in tensors if n.removeprefix("model.") in names and n not in wanted]

    def _wanted(self, tensors: dict[str, Tensor]) -> set[str]:
        """Copies that the class of this folder would not load without."""
        return {
            name
            for loader in self.engine.loaders
            # Of classes without a prefix the embedding is shared.
            if loader.prefix and any(loader.prefix + loader.layer in name for name in tensors)
            for name, what in loader.fills.items()
            if what not in ("zeros", "ones")
        }

    def _unknown(self, runs: dict[str, Any]) -> list[str]:
        """What the engine runs and this one does not."""
        told = [
            f"it runs {name} {runs[name]}, which no {self.kind} head here does"
            for name, only in (("modules", 1), ("factors", (1.0, 1.0, 1.0)))
            if runs.get(name, only) != only
        ]
        if self.kind == "eagle" and runs["layers"] != 1:
            told.append(f"it has {runs['layers']} layers, an eagle head here has one")
        return told

    def _head(
        self, folder: Path, report: Report, tensors: dict[str, Tensor], target: Any, note: Any
    ) -> LoadedHead:
        runs, vocab_size = report.runs, int(target.vocab_size)
        norms = NormConfig(**{name: name in runs["norms"] for name in vars(NormConfig())})
        after = runs["recycled"] == "its output after the norm"
        if self.kind == "eagle":
            config = HeadConfig(
                "eagle", norms=norms, recycle_raw="output" in runs["norms"] and not after
            )
        else:
            chosen = tuple(runs["boundaries"])
            usual = head_class("eagle3").reads
            layers = int(target.num_hidden_layers)
            plain = layers >= 7 and usual(HeadConfig("eagle3"), layers) == chosen
            config = HeadConfig(
                "eagle3",
                num_layers=runs["layers"],
                boundaries=() if plain else chosen,
                norm_before_residual=runs["residual"] == "post-norm",
                norm_output=after,
            )
        ids = draft_ids(folder, tensors, vocab_size) if self.kind == "eagle3" else None
        loader = next(one for one in self.engine.loaders if one.name == report.loader)
        layer = layer_config(runs, tensors, target)
        head = head_class(self.kind)(config, layer, None if ids is None else len(ids))
        names = {name: loader.rename(theirs) for name, theirs in self._names(head, loader).items()}
        found = {loader.rename(name): value for name, value in tensors.items()}
        state = {name: found[theirs].float() for name, theirs in names.items()}
        self._refuse_unheld(folder, found, set(names.values()), loader)
        head.load_state_dict(state)
        note.pop("layout", None)
        noted = note.pop("draft_ids", None)
        if noted is not None:
            ids = read_vocabulary(
                vocabulary_maps(torch.tensor(noted), vocab_size), vocab_size, str(folder)
            )
        return LoadedHead(head, ids, note)

    def _refuse_unheld(
        self, folder: Path, found: dict[Any, Tensor], used: set[Any], loader: Loader
    ) -> None:
        """Whatever is left must be without effect: fillers, zero biases, twins of a norm."""
        for name, value in found.items():
            if name in used or name in (None, "d2t", "t2d"):
                continue
            if loader.fills.get(str(name), "zeros") != "zeros":
                continue  # never run, or the target's
            twin = found.get(str(name).replace("hidden_norm", "input_layernorm"))
            if str(name).endswith("hidden_norm.weight") and twin is not None:
                if torch.equal(value, twin):
                    continue
                raise ValueError(
                    f"{folder}: {name} differs from the input_layernorm beside it, of which "
                    "engines read one or the other; the folder would run differently in each"
                )
            if str(name).endswith(".bias") and not bool(value.any()):
                continue
            raise ValueError(
                f"{folder}: {name} is not zero, and no head here has it; it cannot be held"
            )


def _share_lm_head(folder: Path, tensors: dict[str, Tensor], target: Path) -> list[str]:
    """The target's lm_head, which engines take for a whole vocabulary where the folder has none."""
    if "d2t" in tensors:
        return [f"there is no {LM_HEAD} for the ids of d2t"]
    warnings.warn(f"{folder}: no {LM_HEAD}; the target's own is taken", stacklevel=3)
    tensors[LM_HEAD] = targets_own(target, LM_HEAD)
    return []


def _told(value: Any, report: Report) -> str:
    return str(list(report.runs["boundaries"])) if value == "usual" else str(value)
