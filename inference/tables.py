"""The tables and sentences of an acceptance report, as plain text for any of its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import plots

Run = dict[str, Any]


def verdicts(runs: Sequence[Run]) -> list[str]:
    """What the numbers say, a sentence for each prompt set, temperature, dtype and batch in which
    drafters compete."""
    sentences = []
    for group in comparable(runs):
        drafted = [run for run in group if run["drafter"] != "none"]
        if not drafted:
            continue
        told = setting(group[0], runs)
        named = {id(run): label for run, label in zip(group, plots.labels(group), strict=True)}
        # Equal to two digits is no victory of a baseline.
        best = max(
            drafted,
            key=lambda run: (round(run["tokens_per_target_call"], 2), run["drafter"] != "ngram"),
        )
        fastest = max(group, key=lambda run: run["tokens_per_second"])
        parts = [
            f"{named[id(run)]} {run['tokens_per_target_call']:.2f} tokens per target call"
            + (f" ({run['speedup']:.2f}× plain)" if run.get("speedup") is not None else "")
            for run in sorted(drafted, key=lambda run: -run["tokens_per_target_call"])
        ]
        sentence = f"{told}: {'; '.join(parts)}."
        rivals = [run for run in drafted if run["drafter"] != "ngram"]
        if best["drafter"] == "ngram" and rivals:
            rival = max(rivals, key=lambda run: run["tokens_per_target_call"])
            sentence += (
                f" n-gram look-up wins here: it accepts more than {named[id(rival)]} at no cost in "
                "training, as it does where answers repeat themselves or their prompt."
            )
        if fastest["drafter"] == "none":
            sentence += (
                " Plain decoding is the fastest here: the accepted tokens do not pay for drafting."
            )
        elif fastest is not best:
            sentence += f" Fastest is {named[id(fastest)]}, whose drafts cost less."
        if not all(run.get("lossless", True) for run in drafted):
            sentence += (
                " LOSSY: drafts were kept by typical acceptance, so these answers do not have the "
                "target's law, and the figures are not those of lossless verification."
            )
        sentences.append(sentence)
    return sentences


def comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs grouped by what must be equal for a comparison: prompts, temperature, dtype, batch."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        key = tuple(run.get(name) for name in ("prompts", "temperature", "dtype", "batch"))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


BASELINES = ("none", "ngram", "untrained", "draft-lm", "ngram+head", "ngram+draft-lm")
"""Drafters that are not the trained head alone; it goes by its kind."""


def main_runs(runs: Sequence[Run]) -> list[Run]:
    """Those in the dtype and batch that a report leads with; a proof in another dtype, which its
    tables hold, is left out."""
    return [
        run
        for run in runs
        if all(run.get(name) == runs[0].get(name) for name in ("dtype", "batch"))
    ]


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the report's main table, as text."""
    settings = (("temperature", "T"), ("dtype", "dtype"), ("batch", "batch"), ("draft_tokens", "K"))
    drafting = [run for run in runs if run["drafter"] != "none"]
    shown = [
        (key, title)
        for key, title in settings
        if len({str(run.get(key)) for run in (drafting if key == "draft_tokens" else runs)}) > 1
    ]
    header = [
        "prompts",
        "drafter",
        *(title for _, title in shown),
        "tokens per target call",
        "mean acceptance length",
        "accepted / drafted",
        "accepted per position",
        "conditional",
        "tokens/s",
        "speed-up",
        "identical to plain",
        "near ties",
    ]
    rows = []
    for run in runs:
        accepted, drafted = run["num_accepted_tokens"], run["num_draft_tokens"]
        rows.append(
            [
                str(run["prompts"]),
                str(run["drafter"]),
                *(cell(run.get(key)) for key, _ in shown),
                f"{run['tokens_per_target_call']:.3f}",
                f"{run['mean_acceptance_length']:.3f}" if run["num_drafts"] else "-",
                f"{accepted}/{drafted} = {accepted / drafted:.1%}" if drafted else "-",
                " ".join(f"{share:.1%}" for share in plots.unconditional(run)) or "-",
                " ".join(
                    "-" if share is None else f"{share:.1%}" for share in plots.conditional(run)
                )
                or "-",
                f"{run['tokens_per_second']:.1f}",
                "-" if run.get("speedup") is None else f"{run['speedup']:.2f}×",
                {True: "yes", False: "NO", None: "-"}[run.get("identical_to_plain")],
                str(run.get("near_ties", 0)),
            ]
        )
    return header, rows


def counts(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the raw counts behind the main table."""
    parts = [part for part in plots.ACTIVITIES if any(run["time"].get(part) for run in runs)]
    header = [
        "run",
        "prompts",
        "sequences",
        "target calls",
        "drafts",
        "drafted",
        "accepted",
        "tokens",
        "seconds",
    ]
    rows = [
        [
            label,
            str(run["prompts"]),
            cell(run.get("num_prompts")),
            str(run["target_calls"]),
            str(run["num_drafts"]),
            str(run["num_draft_tokens"]),
            str(run["num_accepted_tokens"]),
            str(run["tokens"]),
            f"{run['seconds']:.2f}",
            *(f"{run['time'].get(part, 0.0):.2f}" for part in parts),
        ]
        for run, label in zip(runs, plots.labels(runs), strict=True)
    ]
    header += [f"{part} s" for part in parts]
    if any(run.get("adaptive") for run in runs):
        header.append("steps with 0, 1, … drafts")
        for row, run in zip(rows, runs, strict=True):
            row.append(" ".join(map(str, run["drafts_per_step_histogram"])))
    return header, rows


def differences(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of each prompt's first difference from plain decoding."""
    rows = [
        [
            str(run["prompts"]),
            label,
            str(first["prompt"]),
            str(first["position"]),
            "-" if first["gap"] is None else f"{first['gap']:.3g}",
            f"{first['bound']:.3g}",
            "near tie" if first["near_tie"] else "NOT EXPLAINED",
        ]
        for run, label in zip(runs, plots.labels(runs), strict=True)
        for first in run.get("first_differences") or []
    ]
    return ["prompts", "run", "prompt", "token", "gap (logits)", "bound (logits)", "judged"], rows


def setting(run: Run, runs: Sequence[Run]) -> str:
    """A run's prompts, and those settings in which the runs of the report differ."""
    parts = [str(run["prompts"])]
    for key, prefix in (("temperature", "temperature "), ("dtype", ""), ("batch", "batch ")):
        if len({str(other.get(key)) for other in runs}) > 1:
            parts.append(f"{prefix}{cell(run.get(key))}")
    return ", ".join(parts)


def cell(value: Any) -> str:
    return "-" if value is None else plots.number(value)
