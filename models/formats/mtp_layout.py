"""What the MTP layouts share: a target's checkpoint with the tensors of its MTP modules in it.

A layout says where those tensors lie and how the family runs them (`MTPLayout`); writing, reading
and their refusals are here, once. Such a folder holds

    mtp.safetensors     the modules' tensors, and copies of the target's where the layout has them
    *.safetensors       the target's, linked; model.safetensors.index.json names them all
    config.json         the target's, and how many modules there are
    draftsmith.json     what the layout has no place for: the target's fingerprint, the draft ids

and the target's tokenizer, so that an engine serves it as it lies. Reading takes that folder, one
with the first file alone, or the target's own checkpoint. No layout has a place for a reduced
vocabulary: the lm_head is the target's own, so an engine drafts from all of it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import atomic_write_json, changes, read_json
from ..heads.checkpoint import LoadedHead, compare_shapes
from ..heads.config import HeadConfig, NormConfig
from ..heads.mtp import MTPHead
from ..heads.protocol import Head
from ..skeleton import held, skeleton, spelt, text_config
from ..trunk import tensor_files
from .facts import facts, judge
from .loaders import Report, few
from .merged import merge
from .mtp_loaders import MTPNames, engines, mtp_classes
from .mtp_target import compare_configs, compare_copy, read_tensor, text_part
from .quantised import dequantise, leave_plain
from .written import read_note, write_note


@dataclass(frozen=True)
class MTPLayout:
    """One layout.

    Attributes:
        name: as the commands call it. title: as messages do.
        prefix: of a module's tensors, with `{index}` where it has a number.
        after_layers: that number counts on from the target's layers instead of from 0.
        own: our tensor names inside a module, but for the decoder layer, -> the layout's.
        layer: stands before the decoder layer's own names.
        copies: the layout's names of what it copies from the target -> the target's.
        counts: (start of the model_type, key of config.json that holds the number of modules); the
            first that fits.
        families: starts of the model_types that bring such tensors themselves.
        most: modules that it can hold, None for any number.
        hidden_first, recycle_raw, norm_style: how engines run it. mask_position_zero: the same;
            None where they differ and the layout may be read either way.
        layer_as: the target's configuration -> one whose last layer is as the modules' are.
        engines: what engines call the decoder layer of a module where not as the checkpoint does,
            from {layer}, its number after the target's layers.
    """

    name: str
    title: str
    prefix: str
    own: dict[str, str]
    counts: tuple[tuple[str, str], ...]
    families: tuple[str, ...]
    after_layers: bool = False
    layer: str = ""
    copies: dict[str, str] = field(default_factory=dict)
    most: int | None = None
    hidden_first: bool = False
    recycle_raw: bool = False
    mask_position_zero: bool | None = False
    norm_style: str = "rms"
    layer_as: Callable[[Any], Any] = copy.deepcopy
    engines: tuple[str, ...] = ()

    def plan(
        self, loaded: LoadedHead, target_folder: Path | str
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The modules' tensors and where each is from; a head on the meta device needs no target.

        Raises:
            ValueError: a head that the layout cannot hold.
        """
        self.check(loaded)
        head = loaded.head
        assert isinstance(head, MTPHead)
        first = self._first(head.target_config)
        tensors = {name: value.contiguous() for name, value in self._named(head).items()}
        origin, config = dict.fromkeys(tensors, "trained"), head.target_config
        for name, theirs in self.copies.items():
            if next(head.parameters()).is_meta:
                copied = torch.empty(config.vocab_size, config.hidden_size, device="meta")
            else:
                copied = read_tensor(tensor_files(Path(target_folder)), theirs)
            for module in range(head.num_modules):
                tensors[self._prefix(first + module) + name] = copied.clone()
        return tensors, origin | {
            name: "copied from the target" for name in tensors if name not in origin
        }

    def write(
        self, loaded: LoadedHead, target_folder: Path | str, out: Path | str
    ) -> dict[str, str]:
        """Write the target's checkpoint with the modules in it.

        Args:
            loaded: the head. target_folder: its target. out: folder to write.
        Returns:
            tensor name -> `trained` or `copied from the target`, for the table that is printed.
        Raises:
            ValueError: a head that the layout cannot hold.
        """
        tensors, origin = self.plan(loaded, target_folder)
        head, out = loaded.head, Path(out)
        assert isinstance(head, MTPHead)
        first = self._first(head.target_config)
        config = read_json(Path(target_folder) / "config.json")
        text_part(config)[self._count(config)] = head.num_modules
        matrices = [
            name.removesuffix(".weight") for name, value in tensors.items() if value.dim() > 1
        ]
        config = leave_plain(config, self._prefixes(head), matrices, Path(target_folder))
        merge(Path(target_folder), out, tensors, lambda name: self._parts(name, first) is not None)
        atomic_write_json(out / "config.json", config)
        write_note(out, loaded, self.name, ids=True)
        return origin

    def read(self, folder: Path | str, target_folder: Path | str | None = None) -> LoadedHead:
        """Read such a folder, or a target's checkpoint with such tensors in it.

        Args:
            target_folder: the target, whose embedding and lm_head the layout's copies are compared
                with; None compares them with the folder's own where it holds those.
        Raises:
            ValueError: a target of another shape; no such tensor; one that is missing, unknown or
                of a wrong shape; another number of modules than config.json says.
        """
        folder = Path(folder)
        raw = read_json(folder / "config.json")
        target_config = text_config(folder)
        if target_folder is not None:
            compare_shapes(folder, target_config, target_folder)
            compare_configs(folder, target_config, target_folder, self._count(raw))
        files, first, key = tensor_files(folder), self._first(target_config), self._count(raw)
        mine = {name: parts for name in files if (parts := self._parts(name, first))}
        if not mine:
            raise ValueError(
                f"{folder}: no tensor {self._prefix(first)}* ({key} in config.json: "
                f"{text_part(raw).get(key)}); it holds no MTP module in the {self.title} layout"
            )
        count = 1 + max(module for module, _ in mine.values())
        said = text_part(raw).get(key, count)
        if said != count:
            raise ValueError(
                f"{folder}: config.json says {key}={said}, the files hold {count} MTP modules; "
                "one of them is of another checkpoint"
            )
        note, draft_ids = read_note(folder, int(target_config.vocab_size))
        head = MTPHead(self._config(count, note), self.layer_as(target_config))
        found: dict[str, Tensor] = {}
        for name, (module, rest) in mine.items():
            if rest in self.copies:
                place = folder if target_folder is None else Path(target_folder)
                compare_copy(name, self.copies[rest], files, place)
            elif not rest.endswith("rotary_emb.inv_freq"):  # follows from the configuration
                found[self._prefix(first + module) + rest] = read_tensor(files, name)
        dequantise(found, raw)
        self._take(folder, head, found, first)
        return LoadedHead(head, draft_ids, note)

    def belongs(self, model_type: str, names: dict[str, Path], target_config: Any) -> bool:
        """Whether a target of this model_type with tensors of these names brings such modules."""
        first = self._first(target_config)
        projection = self.own["eh_proj.weight"]
        return model_type.startswith(self.families) and any(
            name.endswith(projection) and self._parts(name, first) for name in names
        )

    def check(self, loaded: LoadedHead) -> None:
        """ValueError for a head that the layout cannot hold."""
        head, config, remedy = loaded.head, loaded.head.config, "keep the native folder"
        title = f"the {self.title} layout"
        if not isinstance(head, MTPHead) or head.kind != "mtp":
            raise ValueError(f"{title} holds mtp heads, this one is of kind {head.kind}: {remedy}")
        for name, on in vars(config.norms).items():
            if on != getattr(self.norms, name):
                told = (
                    f"no norm {name}, which this head was trained with; an engine would drop it"
                    if on
                    else f"a norm {name}, which this head was trained without; an engine would "
                    "leave it uninitialised"
                )
                raise ValueError(
                    f"{title} has {told}: train with head.norms.{name}={str(not on).lower()} or "
                    f"{remedy}"
                )
        differing = changes(
            head.target_config.to_dict(), self.layer_as(head.target_config).to_dict()
        )
        if differing:
            raise ValueError(
                f"{title} holds another decoder layer than the target's last ({differing[0]}): "
                f"start from head.init.source=target-mtp, which brings it, or {remedy}"
            )
        wanted: dict[str, Any] = {
            "hidden_first": self.hidden_first,
            "recycle_raw": self.recycle_raw,
            "projection_bias": False,
        }
        if self.mask_position_zero is not None:
            wanted["mask_position_zero"] = self.mask_position_zero
        for name, value in wanted.items():
            if getattr(config, name) != value:
                raise ValueError(
                    f"{title} is run with head.{name}={str(value).lower()}, this head was trained "
                    f"with {str(getattr(config, name)).lower()}: train with the former or {remedy}"
                )
        if head.recycle.norm_style != self.norm_style:
            raise ValueError(
                f"the norms of {title} are of the style {self.norm_style}, those of this head's "
                f"target {head.recycle.norm_style}: {remedy}"
            )
        if self.most is not None and head.num_modules > self.most:
            raise ValueError(
                f"{title} holds {self.most} module, this head has {head.num_modules}: {remedy}"
            )
        judged = self.judge(loaded)
        if judged and all(faults for _, faults in judged):
            told = "; ".join(fault for _, faults in judged for fault in faults)
            raise ValueError(f"{title}: {told}. Or {remedy}")

    def judge(self, loaded: LoadedHead) -> list[tuple[Report, list[str]]]:
        """What each engine that has a class for the target's family does with the head's modules
        in this layout, and what is wrong with that, a clause each."""
        target = loaded.head.target_config
        if not mtp_classes(self.name, target):
            return []
        config, tensors = self.described(loaded)
        trained = facts(loaded)
        return [
            judge(engine, config, tensors, target, trained)
            for engine in engines(self.name, self.names(config))
        ]

    def described(self, loaded: LoadedHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The configuration and the modules' tensors as they would be written, on the meta
        device."""
        head, target = loaded.head, loaded.head.target_config
        config, first = target.to_dict(), self._first(target)
        config[self._count(config)] = head.num_modules
        tensors = {name: value.to("meta") for name, value in self._named(head).items()}
        shape = (int(target.vocab_size), int(target.hidden_size))
        for module in range(head.num_modules):
            for name in self.copies:
                tensors[self._prefix(first + module) + name] = torch.empty(shape, device="meta")
        return config, tensors

    def _named(self, head: Head) -> dict[str, Tensor]:
        """The head's own tensors by the layout's names."""
        first = self._first(head.target_config)
        ours = spelt(skeleton(head.target_config), head.state_dict())
        return {self._foreign(name, first): value.detach() for name, value in ours.items()}

    def names(self, config: dict[str, Any]) -> MTPNames:
        """How the modules are spelt, for the loaders; `config` is the target's."""
        count = self._count(text_part(config))
        return MTPNames(self.prefix, self.own, self.layer, self.after_layers, count)

    @property
    def norms(self) -> NormConfig:
        """Those of a module."""
        return NormConfig(output="norm.weight" in self.own)

    def _config(self, modules: int, note: dict[str, Any]) -> HeadConfig:
        mask = self.mask_position_zero
        if mask is None:
            mask = bool(note.get("head", {}).get("mask_position_zero", False))
        return HeadConfig(
            "mtp",
            modules,
            hidden_first=self.hidden_first,
            recycle_raw=self.recycle_raw,
            mask_position_zero=mask,
            norms=self.norms,
        )

    def _take(self, folder: Path, head: MTPHead, found: dict[str, Tensor], first: int) -> None:
        """Load the head's every tensor from the layout's names; experts may lie in one tensor or
        one by one."""
        model = skeleton(head.target_config)
        ours, found = spelt(model, head.state_dict()), spelt(model, found)
        names = {self._foreign(name, first): name for name in ours}
        missing, unknown = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        if missing or unknown:
            raise ValueError(
                f"{folder}: the MTP modules lack {few(missing) or 'nothing'} "
                f"and hold unknown {few(unknown) or 'nothing'}"
            )
        for theirs, name in names.items():
            if found[theirs].shape != ours[name].shape:
                raise ValueError(
                    f"{folder}: {theirs} has shape {list(found[theirs].shape)}, the target's "
                    f"family needs {list(ours[name].shape)}"
                )
        read = {name: found[theirs] for theirs, name in names.items()}
        head.load_state_dict(held(model, read))

    def _first(self, target_config: Any) -> int:
        return int(target_config.num_hidden_layers) if self.after_layers else 0

    def _count(self, config: dict[str, Any]) -> str:
        kind = str(config.get("model_type"))
        return next(key for start, key in self.counts if kind.startswith(start))

    def _prefixes(self, head: MTPHead) -> dict[str, str]:
        """What engines' names of the modules begin with -> the checkpoint's."""
        layers, found = int(head.target_config.num_hidden_layers), dict[str, str]()
        for module in range(head.num_modules):
            here = self._prefix(self._first(head.target_config) + module)
            found[here] = here
            for name in self.engines:
                found[name.format(layer=layers + module)] = here + self.layer
        return found

    def _prefix(self, index: int) -> str:
        return self.prefix.format(index=index)

    def _parts(self, name: str, first: int) -> tuple[int, str] | None:
        """(module, name inside it) of a tensor of the MTP modules; None for any other."""
        pattern = re.escape(self.prefix).replace(r"\{index\}", r"(?P<index>\d+)")
        match = re.match(pattern, name)
        if match is None:
            return None
        module = int(match.groupdict().get("index", first)) - first
        return None if module < 0 else (module, name[match.end() :])

    def _foreign(self, name: str, first: int) -> str:
        """Our tensor name `blocks.D.…` -> the layout's."""
        _, module, rest = name.split(".", 2)
        inside = rest.removeprefix("layer.")
        theirs = self.own[rest] if inside == rest else self.layer + inside
        return self._prefix(first + int(module)) + theirs
