"""The tables of docs/comparisons.md from what scripts/results.py wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..inference.bootstrap import difference, ratio
from ..inference.comparison_plot import comparison
from ..inference.plots import png
from ..inference.report import markdown_table
from ..models.files import atomic_write_bytes
from ..train.metrics import read_metrics
from .results_matrix import matrix

_SETS = ("humaneval", "mt_bench", "heldout")
_GROUPS: dict[str, tuple[str, str]] = {
    "Norms, each choice at its best start and rate": ("abl-", "abl-published"),
    "Kinds of heads": ("fam-", "fam-mtp"),
    "What later steps see in training": ("ctx-", "fam-mtp"),
    "What is minimised": ("loss-", "fam-mtp"),
    "Whose answers": ("ans-", "ans-equal"),
    "How much data": ("data-", "data-125k-x1"),
}
"""Title -> prefix of the runs' names, and the run that the others are held against."""


def page(
    results: list[dict[str, Any]],
    accepted: list[dict[str, Any]],
    by_length: Sequence[dict[str, Any]] = (),
) -> str:
    """All tables as Markdown."""
    parts = [selection(results)]
    for title, (prefix, base) in _GROUPS.items():
        names = [r["name"] for r in results if r["name"].startswith(prefix)]
        if base not in names:
            names = [base, *names]
        chosen = [r for name in names for r in results if r["name"] == name]
        if len(chosen) > 1:
            parts.append(f"## {title}\n\n{_figures(chosen)}\n{_acceptance(chosen, accepted, base)}")
    parts += [trees(accepted), *lengths(by_length), matrix(accepted)]
    return "\n".join(part for part in parts if part)


def trees(accepted: Sequence[dict[str, Any]]) -> str:
    """Tokens per target call of trees beside those of the same head's chains."""
    found = {(r["head"], r["prompts"], r["temperature"]): r for r in accepted}
    names = dict.fromkeys(r["head"].partition("+")[0] for r in accepted if "+" in r["head"])
    rows = []
    for name in names:
        for shape in ("", "+static", "+dynamic"):
            records = [
                found.get((name + shape, prompts, t)) for t in (0.0, 1.0) for prompts in _SETS
            ]
            if any(records):
                cells = [
                    "–" if r is None else f"{r['tokens_per_target_call']:.3f}" for r in records
                ]
                rows.append([name, shape[1:] or "chain of 3", *cells])
    if not rows:
        return ""
    header = ["head", "drafts", *(f"{p}, T={t}" for t in (0, 1) for p in _SETS)]
    return f"## Trees: tokens per target call\n\n{markdown_table(header, rows)}\n"


def lengths(records: Sequence[dict[str, Any]]) -> list[str]:
    """For each head: tokens per second of plain decoding by batch size, and the speed-up over it by
    draft length, the best of a batch size in bold."""
    tables = []
    for name in dict.fromkeys(record["head"] for record in records):
        chosen = {(r["batch"], r["draft_tokens"]): r for r in records if r["head"] == name}
        # Of a run that was stopped, batches without plain decoding have nothing to be held against.
        plain = {batch for batch, count in chosen if not count}
        chosen = {key: r for key, r in chosen.items() if key[0] in plain}
        speed = {key: r["tokens"] / r["seconds"] for key, r in chosen.items()}
        counts = sorted({count for _, count in speed if count})
        rows = []
        for batch in sorted({batch for batch, _ in speed}):
            gains = {n: speed[batch, n] / speed[batch, 0] for n in counts if (batch, n) in speed}
            best = max(gains.values(), default=0.0)
            told = {n: f"**{g:.2f}×**" if g == best else f"{g:.2f}×" for n, g in gains.items()}
            cells = [told.get(n, "–") for n in counts]
            rows.append([str(batch), f"{speed[batch, 0]:.1f}", *cells])
        calls = {n: r["tokens_per_target_call"] for (_, n), r in reversed(chosen.items())}
        called = [f"K={n} ({calls[n]:.2f} a call)" for n in counts]
        table = markdown_table(["requests together", "plain, tokens/s", *called], rows)
        tables.append(f"## Draft length and batch size, {name}\n\n{table}\n")
    return tables


def curves(out: Path, results: list[dict[str, Any]], prefix: str) -> Path | None:
    """OUT/PREFIXcurves.png: what the runs of a phase learned over their steps; None where there is
    none."""
    told: dict[str, dict[str, list[tuple[float, float]]]] = {}
    titles = ("training cross-entropy, nats", "agreement of step 0")
    for record in results:
        path = out / record["name"] / "metrics.jsonl"
        if record["name"].startswith(prefix) and path.exists():
            lines = [line for line in read_metrics(path) if line["kind"] == "train"]
            for title, values in zip(
                titles,
                ([x["cross_entropy"] for x in lines], [x["agreement"][0] for x in lines]),
                strict=True,
            ):
                points = [(x["step"], value) for x, value in zip(lines, values, strict=True)]
                told.setdefault(title, {})[record["name"].removeprefix(prefix)] = points
    figure = comparison({}, told)
    if figure is None:
        return None
    path = out / f"{prefix}curves.png"
    atomic_write_bytes(path, png(figure))
    return path


def selection(results: list[dict[str, Any]]) -> str:
    """Held-out loss of every short run: rows are choices of norms, columns start and rate."""
    short = [r for r in results if r["name"].startswith("sel-")]
    if not short:
        return ""
    cells = {tuple(r["name"].split("-")[1:]): r for r in short}
    columns = sorted({key[1:] for key in cells})
    rows = []
    for norms in dict.fromkeys(key[0] for key in cells):
        losses = [_loss(cells.get((norms, *column))) for column in columns]
        known = [value for value in losses if value is not None]
        text = [
            "–" if v is None else f"**{v:.2f}**" if v == min(known) else f"{v:.2f}" for v in losses
        ]
        rows.append([norms, *text])
    header = ["norms", *(f"{start}, {rate}" for start, rate in columns)]
    return f"## Norms, short runs: held-out loss\n\n{markdown_table(header, rows)}\n"


def _loss(record: dict[str, Any] | None) -> float | None:
    return record["figures"]["loss"] if record is not None and "figures" in record else None


def _figures(chosen: Sequence[dict[str, Any]]) -> str:
    rows = []
    for record in chosen:
        figures = record.get("figures")
        if figures is None:
            rows.append([record["name"], record["error"][:60], *[""] * 5])
            continue
        rows.append(
            [
                record["name"],
                f"{figures['loss']:.3f}",
                _percent(figures["agreement"]),
                _percent(figures["conditional_agreement"]),
                f"{record['train'].get('lr', 2e-3):g}",
                f"{record['tokens']:,}",
                f"{record['params'] / 1e6:.1f} M",
            ]
        )
    header = ["run", "held-out loss", "agreement by step, %", "conditional, %"]
    return markdown_table([*header, "rate", "tokens read", "parameters"], rows) + "\n"


def _percent(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.1f}" for share in shares)


def _acceptance(chosen: Sequence[dict[str, Any]], accepted: list[dict[str, Any]], base: str) -> str:
    """Tokens per target call with the 95 % interval over prompts; the last column holds all prompts
    of the greedy runs together, less those of the base."""
    found = {(r["head"], r["prompts"], r["temperature"]): r for r in accepted}
    heads = [record["name"] for record in chosen]
    # A temperature at which some head was not measured is left out.
    temperatures = [
        t for t in (0.0, 1.0) if all((name, p, t) in found for name in heads for p in _SETS)
    ]
    if not temperatures:
        return ""
    names, rows = [*heads, "ngram"], []
    for name in names:
        cells = []
        for temperature in temperatures:
            for prompts in _SETS:
                record = found.get((name, prompts, temperature))
                cells.append("–" if record is None else _interval(ratio(_prompt_counts([record]))))
        rows.append([name, *cells, _against(name, base, found)])
    header = [f"{name}, T={temperature:g}" for temperature in temperatures for name in _SETS]
    return markdown_table(["tokens per target call", *header, f"T=0, less {base}"], rows) + "\n"


def _against(name: str, base: str, found: dict[Any, dict[str, Any]]) -> str:
    ours = [found.get((name, prompts, 0.0)) for prompts in _SETS]
    theirs = [found.get((base, prompts, 0.0)) for prompts in _SETS]
    pair = [r for r in ours if r is not None], [r for r in theirs if r is not None]
    if name == base or len(pair[0]) != len(_SETS) or len(pair[1]) != len(_SETS):
        return ""
    return _interval(difference(_prompt_counts(pair[0]), _prompt_counts(pair[1])), sign="+")


def _prompt_counts(records: Sequence[dict[str, Any]]) -> np.ndarray:
    """[P, 2]: tokens and target calls of each prompt."""
    lines = [p for record in records for p in record["per_prompt"]]
    return np.array([[p["decode_tokens"], p["target_calls"]] for p in lines], dtype=np.float64)


def _interval(interval: Any, sign: str = "") -> str:
    if interval is None:
        return "–"
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.2f} … {interval.high:{sign}.2f})"
