"""The trunk: embedding, final norm and lm_head of a target, frozen, readable without the rest of
the checkpoint.

Offline training of a head needs these three alone: of a 70B target that is about 2 GB instead of
140. Whether the lm_head is tied to the embedding is decided by what the files hold; the
configuration's flag is cross-checked.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .norm import RMSNorm, own_norm
from .skeleton import folder_config, name_of, read_tensors, skeleton


class Trunk:
    """Frozen embedding, final norm and lm_head. Not a module, so that no optimiser or checkpoint
    can pick it up.

    Args:
        embedding: [V, H]; norm: maps raw states [..., H] to normed ones; lm_head: [V, H] (may be
            `embedding`).
        multiplier: factor of the embeddings; logit_scale: factor of the logits; softcap: soft cap
            of the logits.
    """

    def __init__(
        self,
        embedding: Tensor,
        norm: nn.Module,
        lm_head: Tensor,
        *,
        multiplier: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.embedding = embedding.detach()
        self.final_norm = norm.requires_grad_(False)
        self.lm_head = lm_head.detach()
        self.multiplier = multiplier
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.vocab_size, self.hidden_size = lm_head.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @property
    def tied(self) -> bool:
        """Whether the lm_head is the embedding itself."""
        return self.lm_head.data_ptr() == self.embedding.data_ptr()

    @classmethod
    def load(
        cls, folder: Path | str, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Self:
        """Read the three tensors of a Hugging Face safetensors folder and nothing else.

        Raises:
            ValueError: a tensor is missing or of another vocabulary than the configuration's, an
                lm_head is neither in the files nor tied, or the family makes embeddings or logits
                in a way that is not known here.
        """
        folder = Path(folder)
        config = folder_config(folder)
        text = config.get_text_config(decoder=True)
        model = skeleton(config)
        name = f"{name_of(model, model.get_output_embeddings())}.weight"
        found = _read(folder, model, model.get_input_embeddings(), _norm(model), optional=name)
        embedding, weight, head = found
        embedding = embedding.to(device, dtype)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        if head is not None:
            head = head.to(device, dtype)
            if tied and torch.equal(head, embedding):
                head = embedding
            elif tied:
                warnings.warn(
                    f"{folder}: tie_word_embeddings is true but the files hold an lm_head that "
                    "differs from the "
                    "embedding; the file's own lm_head is used",
                    stacklevel=2,
                )
        elif tied:
            head = embedding
        else:
            raise ValueError(
                f"{folder}: no tensor {name!r} and tie_word_embeddings is false; the "
                "checkpoint is incomplete "
                "(a random head would be used); complete it or set tie_word_embeddings"
            )
        if not len(embedding) == len(head) == text.vocab_size:
            raise ValueError(
                f"{folder}: {len(embedding)} embeddings and {len(head)} rows of lm_head, but "
                f"config.json has vocab_size={text.vocab_size}; the files are of two models"
            )
        trunk = cls(
            embedding,
            _filled(_norm(model), weight).to(device, dtype),
            head,
            multiplier=_embedding_multiplier(model, text, dtype),
            logit_scale=_logit_scale(text),
            softcap=getattr(text, "final_logit_softcapping", None),
        )
        _confirm(trunk, model, folder)
        return trunk

    def embed(self, ids: Tensor) -> Tensor:
        """ids [N] int -> [N, H]."""
        rows = self.embedding[ids]
        return rows if self.multiplier == 1.0 else rows * self.multiplier

    def norm(self, raw: Tensor) -> Tensor:
        """Raw states of boundary L [N, H], any float dtype -> what lm_head reads [N, H], in the
        trunk's dtype."""
        return self.final_norm(raw.to(self.dtype))

    def lm_head_weight(self, ids: Tensor | None = None) -> Tensor:
        """[V, H], or the rows of a draft vocabulary [Vd, H] for ids [Vd]."""
        return self.lm_head if ids is None else self.lm_head[ids.to(self.lm_head.device)]

    def logits(self, normed: Tensor, ids: Tensor | None = None) -> Tensor:
        """Normed states [N, H] -> logits [N, V] (or [N, Vd] for ids [Vd]), scale and soft cap
        applied."""
        return self.finish_logits(nn.functional.linear(normed, self.lm_head_weight(ids)))

    @property
    def plain_logits(self) -> bool:
        """Whether logits are lm_head's product as it is."""
        return self.logit_scale == 1.0 and self.softcap is None

    def finish_logits(self, raw: Tensor) -> Tensor:
        """Scale and soft cap of logits that were multiplied elsewhere; shape kept."""
        if self.logit_scale != 1.0:
            raw = raw * self.logit_scale
        if self.softcap is not None:
            raw = self.softcap * torch.tanh(raw / self.softcap)
        return raw


def tensor_files(folder: Path) -> dict[str, Path]:
    """Every tensor name of a safetensors folder with the file that holds it.

    Raises:
        ValueError: no safetensors file, an unreadable one, or one that the index names and the
        folder lacks.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{index} is damaged ({error}); fetch the checkpoint again") from error
        missing = sorted({name for name in names.values() if not (folder / name).exists()})
        if missing:
            raise ValueError(
                f"{folder}: the index names {missing}, which are not there; fetch them"
            )
        return {name: folder / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read ({error}); it is cut or damaged: fetch it again"
            ) from error
    if not found:
        raise ValueError(
            f"{folder} holds no *.safetensors file; give a Hugging Face checkpoint folder"
        )
    return found


def load_final_norm(folder: Path | str) -> RMSNorm:
    """A target's final norm, float32 on the CPU; nothing else is read."""
    folder = Path(folder)
    model = skeleton(folder_config(folder))
    return _filled(_norm(model), _read(folder, model, _norm(model))[0]).float()


def _norm(model: Any) -> nn.Module:
    return model.get_decoder().norm


def _filled(module: nn.Module, weight: Tensor) -> RMSNorm:
    norm = own_norm(module)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def _read(folder: Path, model: Any, *modules: nn.Module, optional: str | None = None) -> list[Any]:
    """The weight of each module, and what `optional` names or None."""
    names = [f"{name_of(model, module)}.weight" for module in modules]
    files = tensor_files(folder)
    found = read_tensors(model, files, (*names, *filter(None, [optional])))
    for name in names:
        if name not in found:
            end = name.rsplit(".", 2)[-2:]
            close = sorted(key for key in files if key.rsplit(".", 2)[-2:] == end)[:3]
            raise ValueError(
                f"{folder}: no tensor {name!r} (similar: {close}); the trunk cannot be complete"
            )
    return [found[name] for name in names] + ([found.get(optional)] if optional else [])


def _embedding_multiplier(model: Any, config: Any, dtype: torch.dtype) -> float:
    # Gemma's factor is a tensor, rounded to the weights' dtype before it multiplies.
    rounded = getattr(model.get_input_embeddings(), "scalar_embed_scale", None)
    if rounded is not None:
        return float(torch.tensor(rounded, dtype=dtype))
    return float(getattr(config, "embedding_multiplier", None) or 1.0)


def _logit_scale(config: Any) -> float:
    # Granite divides by its factor, Cohere multiplies.
    divided = float(getattr(config, "logits_scaling", None) or 1.0)
    return float(getattr(config, "logit_scale", None) or 1.0) / divided


@torch.no_grad()
def _confirm(trunk: Trunk, model: Any, folder: Path) -> None:
    """Run the family's own model without layers, on the first rows of the vocabulary: what enters
    the norm and the logits must be the trunk's."""
    rows, decoder = min(16, trunk.vocab_size), model.get_decoder()
    decoder.layers = nn.ModuleList()
    if hasattr(decoder, "rotary_emb"):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)
    table = model.get_input_embeddings().to_empty(device=trunk.device).to(trunk.dtype)
    decoder._init_weights(table)  # its factor, where it has one
    ids = torch.arange(rows, device=trunk.device)
    table.weight = nn.Parameter(trunk.embedding[:rows])
    decoder.norm = trunk.final_norm
    model.get_output_embeddings().weight = nn.Parameter(trunk.lm_head[:rows])
    entered: list[Tensor] = []
    hook = decoder.norm.register_forward_pre_hook(lambda _, args: entered.append(args[0][0]))
    try:
        logits = model.eval()(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        hook.remove()
    embeds = trunk.embed(ids)
    for what, ours, own in (
        ("embeddings", embeds, entered[0]),
        ("logits", trunk.logits(trunk.norm(embeds), ids), logits),
    ):
        if not float((ours - own).abs().max()) <= 0.05 * float(own.abs().max()):
            raise ValueError(
                f"{folder}: the {what} of a {type(model).__name__} are made in a way that is not "
                "known here; its family is not supported"
            )
