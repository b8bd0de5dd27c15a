"""What `doctor` asks of a hidden-state cache: is every state what it says, and would it teach?

Each check gives one `Finding`: what was looked at, the number, a verdict, and the remedy where
there is a fault. The checks go from cheap to dear, and the first fault that makes the others
meaningless (unreadable files) ends them.

    files    every checksum, format, schema, token hash
    rows     made of the token rows at hand
    target   the fingerprint of the target at hand against the one that made the states
    mask     how much is supervised, and whether a row teaches at all
    values   sampled states are finite, and none is cut off where float16 ends
    shift    h_p must predict x_{p+1}, not x_p or x_{p+2}          (probes.py)
    norm     states must be raw: the final norm must help          (probes.py)
    states   sampled rows are extracted again, one by one, and compared token by token; where they
             differ, every boundary, shift and the final norm are tried, to say what is stored
    policy   how often the target itself would have said what the text says
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..inference.capture import capture
from ..models.target import Target
from ..models.trunk import Trunk
from .cache import Cache, CacheRow
from .findings import Finding, faults_of, mask_finding
from .probes import INCONCLUSIVE, OK, ProbeReport, probe_states

TOLERANCE = {"bf16": 0.06, "fp8": 0.10, "int8": 0.30}
"""Median over a row's tokens of |cached - fresh| / |fresh|: what rounding (of the dtype, and of a
row run alone instead of packed) explains."""
FOREIGN = 0.5
"""A single token that differs by more than this belongs to something else."""
_HALF_END = float(torch.tensor(torch.finfo(torch.float16).max).bfloat16())
"""What a state that float16 could not hold was cut to, as the cache keeps it."""


@dataclass(frozen=True)
class Examination:
    """All findings, and what the probes measured on the sample (None where they did not run)."""

    findings: tuple[Finding, ...]
    cache: Cache | None
    sample: tuple[int, ...]
    probes: ProbeReport | None

    @property
    def faults(self) -> list[Finding]:
        """The findings that must be mended before anything is trained."""
        return faults_of(self.findings)


def examine_cache(
    folder: Path | str,
    target: Target | None,
    trunk: Trunk,
    fingerprint: dict[str, str],
    *,
    rows: int = 16,
    seed: int = 0,
    made_of: str | None = None,
) -> Examination:
    """Examine a finished cache.

    Args:
        made_of: the key of the token rows that it should hold the states of; None asks nothing.
        target: extracts the sampled rows again; None leaves that check out.
        trunk: the target's embedding, final norm and lm_head, for the probes.
        fingerprint: of the target at hand. rows: how many rows are sampled. seed: of the sample.
    Raises:
        ValueError: fewer than one row to sample.
    """
    if rows < 1:
        raise ValueError(f"doctor.rows {rows}: at least one row must be looked at")
    try:
        cache = Cache.open(folder, verify=True)
    except ValueError as error:
        unread = Finding("files", "fault", str(error), "delete what is damaged and dump again")
        return Examination((unread,), None, (), None)
    sample = _sample(cache, rows, seed)
    findings = [_files(cache), *([] if made_of is None else [_rows(cache, made_of)])]
    values = _values(cache, sample)
    if values.verdict == "fault":
        return Examination((*findings, values), cache, sample, None)
    sizes = _other_sizes(cache, sample, target, trunk)
    findings += [_target(cache, fingerprint, sizes), _mask(cache), values]
    if sizes:
        return Examination(tuple(findings), cache, sample, None)
    report = _probe(cache, trunk, sample)
    if report is None:
        findings.append(Finding("shift", "note", "boundary L is not in this cache: not looked at"))
    else:
        findings += _probed(report)
    if target is None:
        findings.append(Finding("states", "note", "not looked at (doctor.target=false)"))
    else:
        findings.append(_states(cache, target, sample))
    if report is not None:
        findings.append(_policy(cache, trunk, sample))
    return Examination(tuple(findings), cache, sample, report)


def _sample(cache: Cache, rows: int, seed: int) -> tuple[int, ...]:
    """Row numbers, ascending: the first, the longest, the last, then a seeded draw of others."""
    fixed = [0, int(np.argmax(cache.lengths)), len(cache) - 1]
    drawn = np.random.default_rng(seed).permutation(len(cache)).tolist()
    return tuple(sorted(list(dict.fromkeys([*fixed, *drawn]))[:rows]))


def _files(cache: Cache) -> Finding:
    counts = cache.manifest["counts"]
    size = sum(shard["bytes"] for shard in cache.manifest["shards"])
    left_out = f", {counts['quarantined']} rows quarantined" if counts["quarantined"] else ""
    return Finding(
        "files",
        "ok",
        f"{len(cache.manifest['shards'])} shards, {size / 1e6:,.1f} MB, {counts['rows']:,} rows, "
        f"{counts['tokens']:,} tokens: every checksum holds{left_out}",
    )


def _other_sizes(
    cache: Cache, sample: tuple[int, ...], target: Target | None, trunk: Trunk
) -> list[str]:
    """In which sizes the cache does not fit the target: nothing but the mask can be examined
    then."""
    told: list[str] = []
    if trunk.hidden_size != cache.hidden_size:
        told.append(f"hidden size ({cache.hidden_size}, the target's {trunk.hidden_size})")
    if target is not None and target.num_layers != _last(cache):
        told.append(f"layers ({_last(cache)}, the target's {target.num_layers})")
    highest = max(int(cache.row(index).tokens.max()) for index in sample)
    if highest >= trunk.vocab_size:
        told.append(f"vocabulary (token {highest}, the target's ends at {trunk.vocab_size - 1})")
    return told


def _target(cache: Cache, fingerprint: dict[str, str], sizes: list[str]) -> Finding:
    made = cache.manifest["target"]
    differing = [name for name in made if made[name] != fingerprint.get(name)] + sizes
    if differing:
        return Finding(
            "target",
            "fault",
            f"the states come from another target: {', '.join(differing)} differ",
            "name the target that made the cache (target=…), or dump again with this one",
        )
    return Finding("target", "ok", f"fingerprint ({', '.join(made)}) is that of the target at hand")


def _rows(cache: Cache, key: str) -> Finding:
    held = cache.manifest["rows_key"]
    keys = held if isinstance(held, list) else [held]
    told = f"made of rows {', '.join(one[:12] for one in keys)}, at hand is {key[:12]}"
    if key not in keys:
        remedy = "dump again from these rows, or name the cache that belongs to them"
        return Finding("rows", "fault", told, remedy)
    return Finding("rows", "ok", told)


def _mask(cache: Cache) -> Finding:
    """From the index alone: rows with a supervised head row, and the share of supervised tokens."""
    counts = cache.manifest["counts"]
    (idle,) = np.nonzero(cache.supervised_counts(1)[:, 0] == 0)
    names = [cache.ids[row] for row in idle.tolist()]
    return mask_finding(counts["supervised"], counts["tokens"], names, len(cache))


def _values(cache: Cache, sample: tuple[int, ...]) -> Finding:
    """Largest size of the sampled states, and how many tokens are cut off at float16's end."""
    largest, cut, count = 0.0, 0, 0
    for index in sample:
        try:
            row = cache.row(index)
        except ValueError as error:
            remedy = "keep the target in bfloat16 or float32 (target.dtype) and dump again"
            return Finding("values", "fault", str(error), remedy)
        sizes = torch.stack([state.abs().amax(-1) for state in row.states.values()]).amax(0)
        largest = max(largest, float(sizes.max()))
        cut += int((sizes == _HALF_END).sum())
        count += len(sizes)
    told = f"largest of {count:,} tokens' states is {largest:,.0f}"
    if cut > 1 and largest == _HALF_END:
        told += f", and {cut:,} of them end exactly there: cut off where float16 ends (65,504)"
        return Finding(
            "values", "fault", told, "keep the target in bfloat16 or float32, dump again"
        )
    return Finding("values", "ok", f"{told}, all finite")


def _probe(cache: Cache, trunk: Trunk, sample: tuple[int, ...]) -> ProbeReport | None:
    if _last(cache) not in cache.boundaries:
        return None
    read = [cache.row(index) for index in sample]
    read = [row for row in read if len(row.tokens) >= 3]
    if not read:
        return None
    starts = torch.tensor([0, *(len(row.tokens) for row in read)]).cumsum(0)
    states = torch.cat([row.states[_last(cache)] for row in read]).to(trunk.device)
    return probe_states(trunk, states, torch.cat([row.tokens for row in read]), starts)


def _probed(report: ProbeReport) -> Iterator[Finding]:
    told = ", ".join(f"{name}: {value:.2f}" for name, value in report.shift_nll.items())
    numbers = {
        "shift": f"negative log-likelihood by shift {told} over {report.positions:,} positions",
        "norm": f"{report.shift_nll['0']:.2f} nats with the final norm, {report.raw_nll:.2f} "
        "without",
    }
    for name, verdict in report.verdicts.items():
        if verdict == OK:
            yield Finding(name, "ok", numbers[name])
        elif verdict == INCONCLUSIVE:
            yield Finding(name, "note", f"{numbers[name]}: too little to tell")
        else:
            yield Finding(name, "fault", verdict, "dump again; train nothing on these states")


def _states(cache: Cache, target: Target, sample: tuple[int, ...]) -> Finding:
    """Sampled rows run anew, each alone."""
    tolerance = TOLERANCE[cache.manifest["dtype"]]
    medians: list[float] = []
    for index in sample:
        row = cache.row(index)
        fresh = capture(target, [row.tokens], cache.boundaries)
        for boundary in cache.boundaries:
            errors = _relative(row.states[boundary], fresh[boundary])
            medians.append(float(errors.median()))
            if medians[-1] > tolerance or float(errors.max()) > FOREIGN:
                place = int((errors > max(tolerance, FOREIGN / 2)).nonzero()[0])
                stored = _instead(row, boundary, place, target)
                return Finding(
                    "states",
                    "fault",
                    f"row {index} (id {cache.ids[index]!r}), boundary {boundary}, from token "
                    f"{place} of {len(errors)}: median difference {medians[-1]:.1%}, largest "
                    f"{float(errors.max()):.1%} (rounding explains {tolerance:.0%}); {stored}",
                    "dump again; rows of one shard are rebuilt when that shard is deleted",
                )
    return Finding(
        "states",
        "ok",
        f"{len(sample)} rows extracted again one by one, boundaries {list(cache.boundaries)}: "
        f"median difference {float(np.median(medians)):.2%}, worst row {max(medians):.2%} "
        f"(rounding explains {tolerance:.0%})",
    )


def _instead(row: CacheRow, boundary: int, place: int, target: Target) -> str:
    """What the stored states are, if they are anything of this row's."""
    stored = row.states[boundary]
    every = capture(target, [row.tokens], tuple(range(target.num_layers + 1)))
    last = every[target.num_layers]
    candidates = {
        f"the states of boundary {k}": state for k, state in every.items() if k != boundary
    }
    candidates["the states after the final norm"] = target.trunk.norm(last)
    candidates["shifted: state p is that of token p-1"] = every[boundary].roll(1, 0)
    candidates["shifted: state p is that of token p+1"] = every[boundary].roll(-1, 0)
    # A roll carries one state around the end; it is left out of every comparison.
    inner = slice(max(1, place), len(stored) - 1)
    if len(stored[inner]):
        found = {
            name: float(_relative(stored[inner], state[inner]).median())
            for name, state in candidates.items()
        }
        best = min(found, key=lambda name: found[name])
        if found[best] <= TOLERANCE["int8"]:
            return f"what is stored is {best} (difference {found[best]:.1%})"
    return "it is nothing of this row's: another row, other weights, or damage before the checksum"


def _policy(cache: Cache, trunk: Trunk, sample: tuple[int, ...]) -> Finding:
    """How often the target's own first choice is the token that the text holds, over answers."""
    agreed = total = 0
    for index in sample:
        row = cache.row(index)
        places = torch.nonzero(row.supervised[1:])[:, 0]
        if len(places):
            states = row.states[_last(cache)][places].to(trunk.device, trunk.dtype)
            chosen = trunk.logits(trunk.norm(states)).argmax(-1).cpu()
            agreed += int((chosen == row.tokens[places + 1]).sum())
            total += len(places)
    share = agreed / max(total, 1)
    told = (
        f"the target's first choice is the text's token at {share:.1%} of {total:,} answer tokens"
    )
    if share < 0.75:
        told += "; answers of its own (`draftsmith regenerate`) are nearer to what it will verify"
    return Finding("policy", "note", told)


def _last(cache: Cache) -> int:
    return int(cache.manifest["num_layers"])


def _relative(stored: Tensor, fresh: Tensor) -> Tensor:
    """[n] of |stored - fresh| / |fresh| for each token."""
    a, b = stored.float().cpu(), fresh.float().cpu()
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)
