"""What the Medusa layouts share: a folder with the heads' blocks and their lm_heads, written and
read as the engine it is for would load it.

A head's lm_head is its own (`own_lm_heads`) or the target's, of which the folder then holds copies.
`draftsmith.json` beside it keeps what the layout has no place for.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..files import atomic_write_bytes, atomic_write_json, read_json
from ..heads.checkpoint import LoadedHead
from ..heads.config import HeadConfig, NormConfig
from ..heads.medusa import MedusaHead
from ..skeleton import text_config
from .eagle_files import read_weights, targets_own
from .facts import identity, judge
from .loaders import Engine
from .written import KEEP, Written, faults_of, read_note, settle, write_note

_PLAIN_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass(frozen=True)
class MedusaLayout:
    """One layout.

    Attributes:
        name: as the commands call it. engine: whose loader it is for. file: that holds the tensors.
        block: the name of a block's linear map before `.weight` and `.bias`, from {head}, {block}.
        lm_head: the name of a head's lm_head, from {head} and the number of {blocks}.
        shared: of the one lm_head of all heads; None where each has a tensor of its own.
        token_map: of the ids [Vd] that the rows of an lm_head stand for; None where there are rows
            for all.
        configure: the head, its target's folder -> config.json.
    """

    name: str
    engine: Engine
    file: str
    block: str
    lm_head: str
    configure: Callable[[LoadedHead, Path], dict[str, Any]]
    shared: str | None = None
    token_map: str | None = None
    kind: str = "medusa"

    def plan(self, loaded: LoadedHead, target_folder: Path | str) -> Written:
        """What would be written, judged; the head's tensors may lie on the meta device.

        Raises:
            ValueError: a head that the engine would not run as it was trained, with every reason.
        """
        head = loaded.head
        if not isinstance(head, MedusaHead):
            raise ValueError(
                f"the {self.name} layout holds medusa heads, this one is of kind {head.kind}: "
                f"{KEEP}"
            )
        tensors, origin = self._tensors(loaded, head, Path(target_folder))
        config = self.configure(loaded, Path(target_folder))
        report, faults = judge(
            self.engine, config, tensors, head.target_config, self._facts(loaded)
        )
        config_of = head.target_config
        if not head.config.own_lm_heads and any(
            getattr(config_of, name, None) not in (None, 1.0) for name in _PLAIN_LOGITS
        ):
            faults.append(
                f"{report.title} reads lm_heads plainly, and the target's logits are scaled or "
                "capped: train with head.own_lm_heads=true"
            )
        if faults:
            raise ValueError(f"the {self.name} layout: {'; '.join(faults)}. Or {KEEP}")
        return Written(tensors, config, origin, report)

    def write(
        self, loaded: LoadedHead, target_folder: Path | str, out: Path | str
    ) -> dict[str, str]:
        """Write the folder; tensor name -> `trained`, `copied from the target` or `map`.

        Raises:
            ValueError: see `plan`; nothing is written then.
        """
        planned, out = self.plan(loaded, target_folder), Path(out)
        out.mkdir(parents=True, exist_ok=True)
        if self.file.endswith(".safetensors"):
            data = save(planned.tensors, metadata={"format": "pt"})
        else:  # the authors' code opens a pickle; of tensors and nothing else
            stream = io.BytesIO()
            torch.save(planned.tensors, stream)
            data = stream.getvalue()
        atomic_write_bytes(out / self.file, data)
        own = loaded.head.config.own_lm_heads
        write_note(out, loaded, self.name, ids=self.token_map is None, own_lm_heads=own)
        atomic_write_json(out / "config.json", planned.config)
        return planned.origin

    def read(self, folder: Path | str, target_folder: Path | str | None = None) -> LoadedHead:
        """Read such a folder: safetensors, or a pickle of tensors and nothing else.

        Raises:
            ValueError: what the engine's loader would stop at, drop or leave random, by name; a
                target of another width or vocabulary.
        """
        folder = Path(folder)
        if target_folder is None:
            raise ValueError(f"{folder}: a Medusa folder does not describe its target; name it")
        target, config = text_config(target_folder), read_json(folder / "config.json")
        note, noted = read_note(folder, int(target.vocab_size))
        tensors = read_medusa(folder)
        report = self.engine.load(config, tensors, target)
        settle(folder, report, faults_of(report, target))
        runs, vocab_size = report.runs, int(target.vocab_size)
        ids = None if runs["draft_ids"] is None else torch.tensor(runs["draft_ids"])
        rows = self._lm_heads(runs, tensors, ids)
        ids = noted if ids is None else ids
        own = targets_own(Path(target_folder), "lm_head.weight").float()
        held = own if rows.shape[1] == vocab_size else own[torch.as_tensor(runs["draft_ids"])]
        # Copies of the target's are none of the head's, unless it was trained from such copies.
        alike = all(torch.equal(one, held) for one in rows)
        shape = HeadConfig(
            "medusa",
            modules=runs["modules"],
            num_layers=runs["layers"],
            own_lm_heads=bool(note.pop("own_lm_heads", not alike)),
            norms=NormConfig(False, False, False, False),
        )
        if not shape.own_lm_heads and not alike:
            raise ValueError(
                f"{folder}: its note says that the lm_heads are the target's, and they differ from "
                "those of this target; name the target it was trained for"
            )
        head = MedusaHead(shape, target, None if ids is None else len(ids))
        state = {"lm_head": rows} if shape.own_lm_heads else {}
        for name in head.state_dict():
            if name != "lm_head":
                theirs = self._foreign(name)
                lacking = torch.zeros(int(target.hidden_size))
                state[name] = tensors.get(theirs, lacking).float()
        head.load_state_dict(state)
        return LoadedHead(head, ids, note)

    def _foreign(self, name: str) -> str:
        """Our `heads.K.i.linear.weight` -> the layout's."""
        _, head, block, _, end = name.split(".")
        return f"{self.block.format(head=head, block=block)}.{end}"

    def _facts(self, loaded: LoadedHead) -> dict[str, Any]:
        head = loaded.head
        ids = loaded.draft_ids
        if self.token_map is None and not head.config.own_lm_heads:
            ids = None  # rows for every id are the target's; which were trained on is noted
        return {
            "modules": head.config.modules,
            "layers": head.config.num_layers,
            "vocabulary": int(head.target_config.vocab_size),
            "draft_ids": identity(ids),
        }

    def _tensors(
        self, loaded: LoadedHead, head: MedusaHead, folder: Path
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        state = {name: value.detach() for name, value in head.state_dict().items()}
        own, count = state.pop("lm_head", None), head.config.modules
        tensors = {self._foreign(name): value.contiguous() for name, value in state.items()}
        origin = dict.fromkeys(tensors, "trained")
        names = [
            self.lm_head.format(head=index, blocks=head.config.num_layers) for index in range(count)
        ]
        if own is not None:
            tensors |= {name: own[index].clone() for index, name in enumerate(names)}
        else:
            names = names if self.shared is None else [self.shared]
            size, vocabulary = (
                int(getattr(head.target_config, name)) for name in ("hidden_size", "vocab_size")
            )
            if next(head.parameters()).is_meta:
                rows = torch.empty(vocabulary, size, device="meta")
            else:
                rows = targets_own(folder, "lm_head.weight")
            if self.token_map is not None and loaded.draft_ids is not None:
                rows = rows[loaded.draft_ids.to(rows.device)]
            tensors |= {name: rows.clone() for name in names}
        origin |= dict.fromkeys(names, "copied from the target" if own is None else "trained")
        if self.token_map is not None and loaded.draft_ids is not None:
            tensors[self.token_map] = loaded.draft_ids.to(torch.int64).clone()
            origin[self.token_map] = "map"
        return tensors, origin

    def _lm_heads(
        self, runs: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor | None
    ) -> Tensor:
        """[K, V or Vd, H], the rows in the order of ascending ids."""
        found = [
            tensors.get(self.lm_head.format(head=index, blocks=runs["layers"]))
            for index in range(runs["modules"])
        ]
        one = found[0] if self.shared is None else tensors.get(self.shared, found[0])
        held = [one if value is None else value for value in found]
        rows = torch.stack([value.float() for value in held if value is not None])
        if self.token_map is None or ids is None:
            return rows
        given = tensors[self.token_map].to(torch.int64)
        return rows[:, ids] if rows.shape[1] > len(ids) else rows[:, given.argsort()]


def read_medusa(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Medusa folder, `medusa_lm_head.pt` among the files that may hold them, by
    their names without `medusa_head.` or `medusa_heads.` before them."""
    pickled = folder / "medusa_lm_head.pt"
    if list(folder.glob("*.safetensors")) or not pickled.exists():
        found = read_weights(folder)
    else:
        try:
            found = torch.load(pickled, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{pickled} holds more than tensors, and reading it could run code; convert it to "
                f"safetensors where it comes from ({str(error).splitlines()[0]})"
            ) from error
    return {
        name.removeprefix("medusa_head.").removeprefix("medusa_heads."): value
        for name, value in found.items()
    }
