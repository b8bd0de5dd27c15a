"""What `doctor` asks of a target's folder before anything that was made with it.

trunk       embedding, final norm and lm_head are there, of one vocabulary, finite
vocabulary  no id of the tokenizer lies beyond the embedding
template    a small conversation is rendered, and every answer's place in it is proven
end         the token that ends such an answer is one that the target stops at, and no file of its
            folder says of ends what none of the others does
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ..models.files import read_json
from ..models.skeleton import text_config
from ..models.target import eos_ids, has_tokenizer, load_tokenizer
from ..models.trunk import Trunk
from .conversations import Conversation, Dropped, Turn
from .findings import Finding
from .render import Renderer

_TALK = Conversation(
    "doctor",
    (
        Turn("user", "Say a letter."),
        Turn("assistant", "a"),
        Turn("user", "And another one."),
        Turn("assistant", "b, of course."),
    ),
)


def examine_target(
    folder: Path,
    template_kwargs: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[list[Finding], Trunk | None]:
    """Findings, and the trunk in float32 on the device (None where it cannot be read).

    Args:
        folder: a prepared checkpoint folder. template_kwargs: of the chat template.
    """
    try:
        trunk = Trunk.load(folder, torch.float32, device)
    except ValueError as error:
        return [Finding("trunk", "fault", str(error), "fetch the checkpoint again")], None
    found = [_trunk(trunk)]
    if not has_tokenizer(folder):
        told = "the folder holds no tokenizer: it runs on token ids, and no rows can be prepared"
        return [*found, Finding("vocabulary", "note", told)], trunk
    tokenizer = load_tokenizer(folder)
    highest = max(tokenizer.get_vocab().values())
    told = f"{len(tokenizer):,} ids up to {highest:,} for {trunk.vocab_size:,} embeddings"
    if highest >= trunk.vocab_size:
        remedy = (
            "take the tokenizer that belongs to these weights; added tokens need rows of theirs"
        )
        found.append(Finding("vocabulary", "fault", told, remedy))
    else:
        found.append(Finding("vocabulary", "ok", told))
    return [*found, *_rendered(folder, tokenizer, template_kwargs)], trunk


def _trunk(trunk: Trunk) -> Finding:
    weights = {
        "embedding": trunk.embedding,
        "final norm": next(trunk.final_norm.parameters()),
        "lm_head": trunk.lm_head,
    }
    told = f"{trunk.vocab_size:,} x {trunk.hidden_size}, lm_head {_tied(trunk)}"
    for name, value in weights.items():
        bad = int((~value.isfinite()).sum())
        if bad or not bool(value.any()):
            what = f"{bad:,} of {value.numel():,} values are not finite" if bad else "all zeros"
            return Finding("trunk", "fault", f"{name}: {what}", "fetch the checkpoint again")
    return Finding("trunk", "ok", f"{told}: all values finite")


def _tied(trunk: Trunk) -> str:
    return "tied to the embedding" if trunk.tied else "of its own"


def _rendered(
    folder: Path, tokenizer: Any, template_kwargs: dict[str, Any] | None
) -> list[Finding]:
    """The small conversation through the template: `template`, and `end` where answers were
    found."""
    remedy = "put the target's own chat_template.jinja into its folder"
    try:
        renderer = Renderer(tokenizer, template_kwargs)
        [rendered] = renderer.render([_TALK], Counter())
    except ValueError as error:
        return [Finding("template", "fault", str(error), remedy)]
    if isinstance(rendered, Dropped):
        return [Finding("template", "fault", f"{rendered.reason}: {rendered.message}", remedy)]
    tokens = [token for part in rendered.parts for token in part.tokens]
    marked = [one for part in rendered.parts for one in part.supervised]
    told = (
        f"{2 - len(rendered.unproven)} of 2 answers found in a small conversation of "
        f"{len(tokens)} tokens, {sum(marked)} of them supervised"
    )
    if rendered.unproven:
        reasons = ", ".join(dict.fromkeys(why for _, why in rendered.unproven))
        remedy = f"look at data.rows.template_kwargs (enable_thinking=false?), or {remedy}"
        verdict = "note" if rendered.parts else "fault"
        return [
            Finding("template", verdict, f"{told} ({reasons})", remedy),
            *_ends(folder, tokens, marked),
        ]
    about = renderer.describe()
    told += (
        "; its own generation marks agree"
        if about["generation_blocks"]
        else ("; it has no generation marks, so spans are proven by rendering")
    )
    if about["dated"]:
        today = "it writes the day's date, so rows of another day differ"
        fix = "+data.rows.template_kwargs.date_string='26 Jul 2024'"
        return [
            Finding("template", "note", f"{told}; {today}", fix),
            *_ends(folder, tokens, marked),
        ]
    return [Finding("template", "ok", told), *_ends(folder, tokens, marked)]


def _ends(folder: Path, tokens: list[int], marked: list[bool]) -> list[Finding]:
    """Every answer's last token against the ids that the target stops at."""
    ends = eos_ids(folder, text_config(folder))
    last = {tokens[place] for place in run_ends(marked)}
    if not last:
        return []
    words = load_tokenizer(folder).convert_ids_to_tokens(sorted(last))
    told = f"answers end with {', '.join(map(repr, words))} ({sorted(last)}), the target stops at "
    told += f"{sorted(ends)}"
    if last <= ends:
        return [_agreed(folder, last, told)]
    remedy = "list the template's end-of-turn id in generation_config.json's eos_token_id"
    return [Finding("end", "fault", told, remedy)]


def _agreed(folder: Path, last: set[int], told: str) -> Finding:
    """What is joined here is read from one file alone elsewhere: one that lists ends, but neither
    an answer's nor any that another source has, never stops an answer there."""
    listed = {"the tokenizer": _ids(load_tokenizer(folder).eos_token_id)}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            about = read_json(folder / name)
            listed[name] = _ids(about.get("eos_token_id"))
            listed[name] |= _ids((about.get("text_config") or {}).get("eos_token_id"))
    for name in ("config.json", "generation_config.json"):
        ends = listed.get(name, set())
        others = set().union(*(ids for other, ids in listed.items() if other != name))
        if ends and others and not ends & (others | last):
            told += f", but {name} lists {sorted(ends)} alone, and no other file these"
            remedy = f"put the end of an answer into {name}'s eos_token_id: some engines read no "
            return Finding("end", "fault", told, f"{remedy}other file, and would never stop")
    return Finding("end", "ok", told)


def _ids(value: Any) -> set[int]:
    """An eos_token_id as it is written: one id, a list of them, or none."""
    values = value if isinstance(value, list) else [value]
    return {int(one) for one in values if one is not None}


def run_ends(marked: list[bool]) -> list[int]:
    """The last place of each supervised run."""
    pairs = zip(marked, [*marked[1:], False], strict=True)
    return [place for place, (here, after) in enumerate(pairs) if here and not after]
