"""A target's shape without its weights: what can be counted before anything is downloaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM

from .skeleton import folder_config
from .source import resolve
from .target import TargetConfig


@dataclass(frozen=True)
class TargetShape:
    """A causal language model by its sizes.

    Attributes:
        config: transformers' configuration. where: what it was read from, for messages.
        parameters: all of them. embedding: [V, H] of the embedding, and of an lm_head of its own
            (`tied`: there is none). active: those that one token meets in the decoder, embedding
            and lm_head left out; of a mixture of experts, the chosen ones.
    """

    config: Any
    where: str
    parameters: int
    embedding: int
    tied: bool
    active: int

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.config.vocab_size)

    @classmethod
    def of(cls, config: TargetConfig) -> TargetShape:
        """That of a target, from its config.json where that is on this machine, else from
        `target.shape`; ValueError where neither is, or the latter describes another source."""
        found, where = read_config(config)
        return cls.counted(found, where)

    @classmethod
    def counted(cls, config: Any, where: str) -> TargetShape:
        """Count the parameters of transformers' modules, made without data: the layers of another
        kind at the start, and one of the others for all of those."""
        small = copy.deepcopy(config)
        layers = int(config.num_hidden_layers)
        small.num_hidden_layers = min(
            layers, 1 + int(getattr(config, "first_k_dense_replace", None) or 0)
        )
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[-small.num_hidden_layers :]
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(small)
        more = layers - small.num_hidden_layers
        last = model.get_decoder().layers[-1]
        everything = _count(model) + more * _count(last)
        experts = _experts(model) + more * _experts(last)
        tied = bool(config.tie_word_embeddings)
        embedding = int(config.vocab_size) * int(config.hidden_size)
        active = everything - (1 if tied else 2) * embedding - experts
        if experts:
            active += experts * int(config.num_experts_per_tok) // routed_experts(config)
        return cls(config, where, everything, embedding, tied, active)


def routed_experts(config: Any) -> int:
    """How many experts a layer chooses from, by whatever name the family has for it."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return int(next(getattr(config, name) for name in names if getattr(config, name, None)))


def read_config(config: TargetConfig) -> tuple[Any, str]:
    """transformers' configuration of a target, and where it was found. A hub is asked last, for
    config.json alone.

    Raises:
        ValueError: no config.json, and no `target.shape` of this source.
    """
    source, shape = config.source, dict(config.shape)
    folders = [Path(source).expanduser()] if "://" not in source else []
    if source.endswith(".gguf"):
        folders = [Path(config.folder)]
    if source.startswith("hf://"):
        owner, _, name = source.removeprefix("hf://").partition("/")
        cached = try_to_load_from_cache(f"{owner}/{name.split('@')[0]}", "config.json")
        folders += [Path(cached).parent] if isinstance(cached, str) else []
    for folder in folders:
        if (folder / "config.json").exists():
            return folder_config(folder), str(folder / "config.json")
    described = shape.pop("of", None)
    if described == source and shape:
        return AutoConfig.for_model(**shape), "target.shape"
    if source.startswith("hf://"):
        path = resolve(f"{source}/config.json")
        return folder_config(path.parent), str(path)
    raise ValueError(
        f"target.source={source}: no config.json is there, and target.shape describes "
        f"{described or 'nothing'}; give the folder of the checkpoint, or target.shape with "
        f"of: {source}"
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _experts(module: torch.nn.Module) -> int:
    named = module.named_parameters()
    return sum(parameter.numel() for name, parameter in named if ".experts." in f".{name}")
