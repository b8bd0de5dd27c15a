"""What a head is: its kind, its norms, how it starts, and what it is fed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, fields
from typing import Any

_READ_BY = {
    "modules": ("mtp", "eagle", "medusa"),
    "num_layers": ("eagle3", "medusa"),
    "boundaries": ("eagle3",),
    "norm_before_residual": ("eagle3",),
    "norm_output": ("eagle3",),
    "hidden_first": ("mtp", "eagle"),
    "recycle_raw": ("mtp", "eagle"),
    "mask_position_zero": ("mtp", "eagle"),
    "own_lm_heads": ("medusa",),
    "projection_bias": ("mtp", "eagle", "eagle3"),
    "norm_before_fc": ("eagle3",),
}
"""Settings that only some kinds read."""


@dataclass(frozen=True)
class NormConfig:
    """Which of the head's RMSNorms are there. Restored norms are what made 70B heads converge; the
    published EAGLE has none of the four. `medusa` reads none of them."""

    embedding: bool = True
    """On the token embedding (enorm)."""
    hidden: bool = True
    """On the hidden state (hnorm)."""
    attention_input: bool = True
    """On the input of the decoder layer's attention; in eagle3 that of the layers after the
    first."""
    output: bool = True
    """On the head's output, before lm_head."""


@dataclass(frozen=True)
class InitConfig:
    """Where a head's weights start."""

    layer: str = "target-last"
    """target-last copies the target's last decoder layer; random."""
    projection: str = "pass-through"
    """pass-through lets the state through at the size the layer is used to (medusa: blocks that add
    nothing); random."""
    embedding_share: float = 0.5
    """How much of the token's embedding is let through, relative to the state."""
    output_scale: float = 0.4
    """The head's output starts at the size of the target's final-normed state times this: an
    untrained head is mostly wrong, and at full scale it would be sure of it."""
    source: str | None = None
    """null starts from the target's last layer, as the settings above say; target-mtp from the MTP
    weights that the target's checkpoint brings; else a native head folder, all of whose weights are
    taken. The last two bring the head's shape as well."""

    def __post_init__(self) -> None:
        if not 0 <= self.embedding_share < math.inf:
            raise ValueError(
                f"head.init.embedding_share={self.embedding_share}: must be 0 (none) or positive"
            )
        if not 0 < self.output_scale < math.inf:
            raise ValueError(f"head.init.output_scale={self.output_scale}: must be positive")
        if self.source is not None:
            told = [
                f"head.init.{known.name}={getattr(self, known.name)}"
                for known in fields(self)
                if known.name != "source" and getattr(self, known.name) != known.default
            ]
            if told:
                warnings.warn(
                    f"{', '.join(told)}: ignored, since all weights come from "
                    f"head.init.source={self.source}",
                    stacklevel=3,
                )


@dataclass(frozen=True)
class HeadConfig:
    """A head's shape. Its decoder layers are of the target's own class."""

    kind: str = "mtp"
    """mtp, eagle, eagle3 or medusa."""
    modules: int = 1
    """mtp, eagle: separate modules, module k serves step k and the last is recycled beyond; medusa:
    its heads, one a step."""
    num_layers: int = 1
    """eagle3: decoder layers; medusa: residual blocks of a head."""
    boundaries: tuple[int, ...] = ()
    """eagle3: the boundaries that are fused, ascending; empty takes 2, L//2 and L-3."""
    norm_before_residual: bool = False
    """eagle3: the residual stream starts from the normed state instead of the raw one."""
    norm_output: bool = False
    """eagle3: recycle the state after the output norm instead of before it."""
    hidden_first: bool = False
    """mtp, eagle: the projection reads [state ; embedding], not [embedding ; state] (MiMo)."""
    recycle_raw: bool = False
    """mtp, eagle: recycle the state before the output norm instead of after it (GLM)."""
    mask_position_zero: bool = False
    """mtp, eagle: the embedding is zeroed at position 0 of a text (MiMo)."""
    projection_bias: bool = False
    """mtp, eagle, eagle3: the projection adds a bias (the authors' first EAGLE heads)."""
    norm_before_fc: str = "none"
    """eagle3: a norm on the states before they are fused: none; each, one for each (EAGLE-3.1);
    all, one over all of them side by side."""
    own_lm_heads: bool = False
    """medusa: each of its heads trains an lm_head [Vd, H] of its own, as published; else they read
    the target's."""
    norms: NormConfig = field(default_factory=NormConfig)
    init: InitConfig = field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        for name in ("modules", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"head.{name}={getattr(self, name)}: must be at least 1")
        ascending = list(self.boundaries) == sorted(set(self.boundaries))
        if not ascending or min(self.boundaries, default=0) < 0:
            raise ValueError(
                f"head.boundaries={list(self.boundaries)}: give them ascending, each once, from 0 "
                "on; their columns lie side by side in that order"
            )
        if self.norm_before_fc not in ("none", "each", "all"):
            raise ValueError(f"head.norm_before_fc={self.norm_before_fc}: none, each or all")
        defaults = {"modules": 1, "num_layers": 1, "boundaries": (), "norm_before_fc": "none"}
        ignored = [
            f"{name}={getattr(self, name)}"
            for name, kinds in _READ_BY.items()
            if self.kind not in kinds and getattr(self, name) != defaults.get(name, False)
        ]
        if self.kind == "medusa":
            ignored += [f"norms.{name}=True" for name, on in vars(self.norms).items() if on]
        if ignored:
            warnings.warn(
                f"a head of kind {self.kind} does not read {', '.join(ignored)}: ignored",
                stacklevel=3,
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any], place: str) -> HeadConfig:
        """The configuration of a head folder; settings younger than the folder have their
        defaults.

        Args:
            place: the folder, for messages.
        Raises:
            ValueError: a setting that this version does not know.
        """
        norms, init = values.get("norms", {}), values.get("init", {})
        unknown = [
            prefix + name
            for prefix, kind, given in (
                ("", cls, values),
                ("norms.", NormConfig, norms),
                ("init.", InitConfig, init),
            )
            for name in sorted(set(given) - {known.name for known in fields(kind)})
        ]
        if unknown:
            raise ValueError(
                f"{place}: the head was made with settings that this version does not know "
                f"({', '.join(f'head.{name}' for name in unknown)}); use the version that trained "
                "it"
            )
        parts = {
            "norms": NormConfig(**norms),
            "init": InitConfig(**init),
            "boundaries": tuple(values.get("boundaries", ())),
        }
        return cls(**{**values, **parts})


@dataclass(frozen=True)
class RecycleSpec:
    """What trainer, engine and formats must agree on about a head's inputs; one record, read by all
    three."""

    fusion_order: tuple[str, ...] = ("embedding", "hidden")
    """Order of the parts in the input of the projection (mtp, eagle) or of the attention
    (eagle3)."""
    hidden_fed: str = "post-final-norm"
    """The target's state as step 0 gets it: post-final-norm, or fused-boundaries (raw, side by
    side, through the head's own projection)."""
    recycled: str = "post-output-norm"
    """The head's own state as the next step gets it: post-output-norm, pre-output-norm, or as-fed
    (unchanged)."""
    residual: str = "pre-norm"
    """Where the residual stream of an eagle3 head starts: pre-norm (what is fed, before hnorm) or
    post-norm. That of the others starts at the projection."""
    mask_position_zero: bool = False
    """Whether the embedding is zeroed at position 0 of a text (row 0 of step 0; its token x_1 is
    then not seen there)."""
    norm_style: str = "rms"
    """rms: w; gemma: 1 + w."""


def recycle_spec(config: HeadConfig, norm_style: str = "rms") -> RecycleSpec:
    """The record of a head of this configuration; settings that its kind does not read have no
    part in it.

    Args:
        norm_style: of the target's family, rms or gemma.
    """

    def on(name: str) -> bool:
        return config.kind in _READ_BY[name] and bool(getattr(config, name))

    if config.kind == "medusa":
        return RecycleSpec(fusion_order=("hidden",), recycled="as-fed", norm_style=norm_style)
    eagle3 = config.kind == "eagle3"
    normed = on("norm_output") if eagle3 else not on("recycle_raw")
    return RecycleSpec(
        fusion_order=("hidden", "embedding") if on("hidden_first") else ("embedding", "hidden"),
        hidden_fed="fused-boundaries" if eagle3 else "post-final-norm",
        recycled="post-output-norm" if normed else "pre-output-norm",
        residual="post-norm" if on("norm_before_residual") else "pre-norm",
        mask_position_zero=on("mask_position_zero"),
        norm_style=norm_style,
    )
