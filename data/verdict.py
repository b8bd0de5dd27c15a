"""What a finished ledger says about the data set as a whole."""

from __future__ import annotations

from .ledger import Ledger

WARN_SHARE = 0.05
_REMEDIES = {
    "unproven_prompt_rewritten": "the template shows an answer otherwise than its generation "
    "prompt begins it; look at data.rows.template_kwargs (enable_thinking=false?)",
    "unproven_content_changed": "the template writes text of its own into the answers; look at "
    "data.rows.template_kwargs (enable_thinking=false?)",
    "unproven_reasoning_left_out": "the template forgets the reasoning that led to the answers; "
    "use a template that writes it, or clean the reasoning away",
    "unproven_generation_block": "the template's generation blocks do not say what it lets the "
    "model write; mend chat_template.jinja",
}


def refuse_useless(ledger: Ledger, holdout: int) -> None:
    """A data set that would train nothing, or everything, is refused.

    Raises:
        ValueError: with the ledger's reasons and the remedy.
    """
    if not ledger.tokens["supervised"]:
        unproven = ledger.unproven()
        why = f"; {unproven:,} unproven answers, {_most_unproven(ledger)}" if unproven else ""
        raise ValueError(
            f"{ledger.source}: no row keeps a supervised token, so there is nothing to learn from "
            f"({ledger.summary()}{why}); look at the reasons, raise max_length or give other "
            "conversations"
        )
    if ledger.tokens["supervised"] == ledger.tokens["total"]:
        raise ValueError(
            f"{ledger.source}: every token of every row is supervised, so prompts would be trained "
            "on; the chat template writes nothing around the answers: give the target's own "
            "template"
        )
    if not ledger.rows["train"]:
        raise ValueError(
            f"{ledger.source}: holdout={holdout} takes all {ledger.kept} usable "
            "conversations and leaves none "
            f"to train on ({ledger.summary()}); lower data.rows.holdout or give more conversations"
        )


def find_warnings(ledger: Ledger, max_length: int) -> list[str]:
    """What the user should look at before anything is dumped, each with its remedy."""
    found: list[str] = []
    lost = ledger.dropped["emptied_by_truncation"] + ledger.dropped["no_whole_answer"]
    if lost > WARN_SHARE * (ledger.kept + lost):
        found.append(
            f"{lost:,} of {ledger.kept + lost:,} usable records ({lost / (ledger.kept + lost):.1%})"
            f" have no answer within max_length {max_length:,}; raise data.rows.max_length"
        )
    unproven, answers = ledger.unproven(), ledger.unproven() + ledger.turns["supervised"]
    if unproven > WARN_SHARE * answers:
        found.append(
            f"{unproven:,} of {answers:,} answers ({unproven / answers:.1%}) are not supervised, "
            + _most_unproven(ledger)
        )
    if ledger.template.get("dated"):
        found.append(
            "the chat template writes the day's date, so these rows differ from those of another "
            "day; fix it with +data.rows.template_kwargs.date_string='26 Jul 2024'"
        )
    return found


def _most_unproven(ledger: Ledger) -> str:
    """The commonest reason for unproven answers, and what to do about it."""
    names = [name for name in ledger.turns if name.startswith("unproven")]
    most = max(names, key=lambda name: ledger.turns[name])
    remedy = _REMEDIES.get(most, "unproven.parquet names them")
    return f"{ledger.turns[most]:,} of them as {most}: {remedy}"
