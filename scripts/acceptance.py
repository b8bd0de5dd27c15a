"""What training and evaluation have in common: prompt sets as the engine takes them, and drafters
by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..conf.schema import Config
from ..data.prompts import load_prompts
from ..inference.acceptance import PromptSet
from ..inference.draft_lm import DraftLM, DraftLMDrafter
from ..inference.drafters import Drafter, NgramDrafter
from ..inference.head_drafter import HeadDrafter
from ..inference.hybrid import HybridDrafter, NgramConfig
from ..inference.parallel import SharedTarget
from ..inference.tree import TreeConfig
from ..inference.tree_drafter import TreeHeadDrafter
from ..models.formats.source import find_source
from ..models.heads import HEADS, Head, LoadedHead, build_head
from ..models.target import Target, fingerprint
from .app import Invocation
from .artifacts import Artifacts

TRAINED = ("head", "ngram+head", "draft-lm", "ngram+draft-lm")
"""Drafters, by their names in the settings, with a trained model behind them."""


def prompt_set(
    name: str, limit: int, config: Config, tokenizer: PreTrainedTokenizerBase
) -> PromptSet:
    """A named set or a file of prompts, through the chat template that the rows were made with."""
    prompts = load_prompts(
        name,
        limit=limit,
        tokenizer=tokenizer,
        rows=Artifacts.of(config).rows if name == "heldout" else None,
        template_kwargs=config.data.rows.template_kwargs,
    )
    label = name if "/" not in name else Path(name).stem
    return PromptSet(
        label,
        prompts[0].form,
        [prompt.id for prompt in prompts],
        [prompt.tokens for prompt in prompts],
    )


def warn_beyond_training(loaded: LoadedHead, prompts: PromptSet, tokens: int) -> None:
    """Tell of texts longer than any that the head was trained on: they stay the target's, but what
    is accepted there says nothing of the head where it was trained.

    Args:
        tokens: that an answer may have.
    """
    trained = int(loaded.meta.get("trained_length") or 0)
    longest = max(map(len, prompts.prompts)) + tokens
    if 0 < trained < longest:
        warnings.warn(
            f"{prompts.name}: texts of up to {longest:,} tokens, and the head was trained on "
            f"{trained:,} at most; see tokens per call by context, or train on longer rows "
            "(data.rows.max_length)",
            stacklevel=2,
        )


def drafter(
    name: str,
    loaded: LoadedHead | None,
    target: Target,
    lm: DraftLM | None = None,
    tree: TreeConfig | None = None,
    ngram: NgramConfig | None = None,
) -> Drafter | None:
    """A fresh drafter by its name in the settings; None decodes plainly.

    Args:
        loaded: the head that `head` (or its kind) drafts with, and whose beginning `untrained`
            rebuilds. lm: what `draft-lm` drafts with. tree: what heads draft, and look-up beside
            them; the others draft chains. ngram: when look-up drafts before either (`ngram+…`).
    """
    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter()
    if name.startswith("ngram+"):
        model = drafter(name.removeprefix("ngram+"), loaded, target, lm, tree)
        assert model is not None
        return HybridDrafter(ngram or NgramConfig(), model, tree, name)
    if name == "draft-lm":
        assert lm is not None
        return DraftLMDrafter(lm)
    assert loaded is not None
    if name == "untrained":
        return head_drafter(untrained(loaded, target), loaded.draft_ids, tree, name)
    require_kind(loaded, [name])
    return head_drafter(loaded.head, loaded.draft_ids, tree)


def head_drafter(
    head: Head, draft_ids: torch.Tensor | None, tree: TreeConfig | None, name: str | None = None
) -> HeadDrafter:
    """A head as a drafter of trees where the settings ask for them, else of chains."""
    if tree is None or tree.kind == "none":
        return HeadDrafter(head, draft_ids, name)
    return TreeHeadDrafter(head, draft_ids, tree, name)


def draft_model(config: Config, names: Iterable[str]) -> Target | None:
    """The language model that `draft-lm` drafts with, where that is among the drafters asked for;
    still to be paired with a target."""
    if any(name.endswith("draft-lm") for name in names):
        return Target.load(config.draft_lm.model())
    if config.draft_lm.source is not None:
        warnings.warn("draft_lm.source is not used: no drafter asked for is draft-lm", stacklevel=2)
    return None


def say_shares(target: Target, invocation: Invocation) -> None:
    """Of a target on several ranks, how much each holds."""
    if isinstance(target, SharedTarget):
        shares = " + ".join(f"{rank.weights / 2**20:,.0f}" for rank in target.memory())
        invocation.say(f"[dim]the target's weights by rank: {shares} MiB[/]")


def is_head(name: str) -> bool:
    """Whether a drafter's name in the settings is the trained head."""
    return name == "head" or name in HEADS


def drafts_with_head(name: str) -> bool:
    """Whether a drafter needs the trained head, or what its folder says."""
    return is_head(name) or name in ("untrained", "ngram+head")


def require_kind(loaded: LoadedHead, names: Iterable[str]) -> None:
    """Refuse drafters that are named by another kind than the head is of; `head` fits any."""
    for name in names:
        if name in HEADS and name != loaded.head.kind:
            raise ValueError(
                f"drafter {name!r}: the head is of kind {loaded.head.kind!r}; name it head or "
                f"{loaded.head.kind}"
            )


def untrained(loaded: LoadedHead, target: Target) -> Head:
    """The head as it was before its first step, rebuilt from what its folder says.

    Raises:
        ValueError: the folder does not say how training began (an imported head), or the head that
        it began from is not there any more.
    """
    training = loaded.meta.get("training", {})
    if "state_rms" not in training:
        raise ValueError(
            "the head's folder does not say how its training began, so `untrained` cannot be "
            "rebuilt; leave it out of "
            "evaluate.drafters"
        )
    config, source = loaded.head.config, None
    if config.init.source is not None:
        source = find_source(config.init.source, target.folder, fingerprint(target.folder))
        if source is None or source.meta["content"] != training.get("source"):
            raise ValueError(
                f"the head began from head.init.source={config.init.source}, which holds other "
                "weights now; leave `untrained` out of evaluate.drafters"
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training["seed"])
        return build_head(
            config, target.folder, training["state_rms"], draft_ids=loaded.draft_ids, source=source
        )
