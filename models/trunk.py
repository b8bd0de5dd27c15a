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
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from .layer import one_layer_model
from .norm import own_norm

_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_LM_HEAD = "lm_head.weight"


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
    ) -> Trunk:
        """Read the three tensors of a Hugging Face safetensors folder and nothing else.

        Raises:
            ValueError: a tensor is missing, or an lm_head is neither in the files nor tied.
        """
        folder = Path(folder)
        files = tensor_files(folder)
        config = AutoConfig.from_pretrained(folder)
        embedding = _read(files, _EMBEDDING, folder).to(device, dtype)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        if _LM_HEAD in files:
            head = _read(files, _LM_HEAD, folder).to(device, dtype)
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
                f"{folder}: no tensor {_LM_HEAD!r} and tie_word_embeddings is false; the "
                "checkpoint is incomplete "
                "(a random head would be used); complete it or set tie_word_embeddings"
            )
        norm = own_norm(one_layer_model(config).norm.to_empty(device="cpu"))
        norm.load_state_dict({"weight": _read(files, _NORM, folder)}, strict=True)
        return cls(
            embedding,
            norm.to(device, dtype),
            head,
            multiplier=_embedding_multiplier(config),
            logit_scale=float(getattr(config, "logit_scale", None) or 1.0),
            softcap=getattr(config, "final_logit_softcapping", None),
        )

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


def _read(files: dict[str, Path], name: str, folder: Path) -> Tensor:
    if name not in files:
        close = sorted(key for key in files if key.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:])[
            :3
        ]
        raise ValueError(
            f"{folder}: no tensor {name!r} (similar: {close}); the trunk cannot be complete"
        )
    with safe_open(files[name], framework="pt") as file:
        return file.get_tensor(name)


def _embedding_multiplier(config: Any) -> float:
    if str(config.model_type).startswith("gemma"):
        return float(config.hidden_size**0.5)
    return float(getattr(config, "embedding_multiplier", None) or 1.0)
