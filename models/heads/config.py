"""What a head is: its kind, its norms, how it starts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NormConfig:
    """Which of the head's RMSNorms are there. Restored norms are what made 70B heads converge; the
    published EAGLE dropped `attention_input` and `output`."""

    embedding: bool = True
    """On the token embedding, before the projection (enorm)."""
    hidden: bool = True
    """On the hidden state, before the projection (hnorm)."""
    attention_input: bool = True
    """On the input of the decoder layer's attention."""
    output: bool = True
    """On the head's output, before lm_head and before recycling."""


@dataclass(frozen=True)
class InitConfig:
    """Where a head's weights start."""

    layer: str = "target-last"
    """target-last copies the target's last decoder layer; random."""
    projection: str = "pass-through"
    """pass-through lets the normed hidden state through (identity times the target's state RMS);
    random."""
    embedding_share: float = 0.5
    """With pass-through: how much of the normed embedding is added, relative to the state."""
    output_scale: float = 0.4
    """The output norm starts as the target's final norm times this: an untrained head is mostly
    wrong, and at full scale it would be sure of it."""


@dataclass(frozen=True)
class HeadConfig:
    """A head's shape. The decoder layer is the target's own class."""

    kind: str = "mtp"
    norms: NormConfig = field(default_factory=NormConfig)
    init: InitConfig = field(default_factory=InitConfig)


@dataclass(frozen=True)
class RecycleSpec:
    """What trainer, engine and formats must agree on about a head's inputs; one record, read by all
    three."""

    fusion_order: tuple[str, str] = ("embedding", "hidden")
    """Order of the two halves in the projection's input."""
    hidden_fed: str = "post-final-norm"
    """The target's state as the head gets it."""
    recycled: str = "post-output-norm"
    """The head's own state as the next step gets it."""
    mask_position_zero: bool = False
    """Whether the embedding is zeroed at position 0."""
    norm_style: str = "rms"
    """rms: w; gemma: 1 + w."""
