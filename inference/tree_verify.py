"""What a target pass over trees decides, and how the kept path becomes text in the pages.

`kernels.accept_tree` is the law; a coupled request instead walks along the tokens that plain
decoding would draw.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.accept import draw
from ..kernels.accept_tree import accept_trees
from ..kernels.trees import Trees
from .batch import Batch
from .drafters import Proposal
from .pages import KVPool
from .processors import Row, row_logits
from .sampler import check_finite, laws
from .sequence import Lead, Sequence
from .tree import depths_of, rows_of
from .upload import upload
from .verifier import Verdict, best_of, note_logprobs


def verify_trees(
    batch: Batch, sequences: list[Sequence], proposals: list[Proposal], logits: Tensor
) -> Verdict:
    """Judge the trees of every sequence; chains may be among them. logits [N, V] of the batch's
    rows. Where all requests are greedy their few tokens are read and followed on the host.

    Raises:
        ValueError: logits that are not finite.
    """
    raw = logits
    if any(sequence.params.edits_logits for sequence in sequences):
        logits = row_logits(raw, _texts(sequences, proposals))
    best, choices, second = best_of(logits, leads=not all(one.tokens for one in proposals))
    if not bool(torch.isfinite(best).all()):
        check_finite(logits, f"verify rows of {[sequence.id for sequence in sequences][:4]}")
    if all(sequence.params.greedy for sequence in sequences):
        target, verdict = None, _greedy(batch, proposals, choices.tolist())
    else:
        sizes = map(len, (proposal.tokens for proposal in proposals))
        pairs = zip(sequences, sizes, strict=True)
        target = laws(logits, [one.params for one, size in pairs for _ in range(size + 1)])
        paths, following = accept_trees(
            _trees(batch, sequences, proposals, target), choices, target
        )
        kept = [[row - 1 for row in path if row >= 0] for path in paths.tolist()]
        verdict = Verdict(kept, following.tolist())
    for index, sequence in enumerate(sequences):
        first, end = batch.starts[index], batch.starts[index + 1]
        if sequence.params.greedy and not proposals[index].tokens:
            top, below = float(best[first]), float(second[first])
            sequence.leads.append(Lead(top, top - below))
        elif sequence.params.coupled and not sequence.params.greedy:
            assert target is not None
            path, token = _coupled(sequence, proposals[index], target[first:end])
            verdict.kept[index], verdict.following[index] = path, token
    for sequence, token in zip(sequences, verdict.following, strict=True):
        if token < 0:
            raise ValueError(
                f"request {sequence.id!r}: cannot sample, a row's law has no mass; the logits hold "
                "NaN or infinity"
            )
    drafts = [proposal.tokens for proposal in proposals]
    note_logprobs(sequences, drafts, batch.starts, verdict, raw)
    return verdict


def _texts(sequences: list[Sequence], proposals: list[Proposal]) -> list[Row]:
    """What every row follows: its sequence's text and the drafts on the way to it."""
    rows = []
    for sequence, proposal in zip(sequences, proposals, strict=True):
        paths: list[list[int]] = [[]]
        parents = rows_of(proposal.parents, len(proposal.tokens))
        for token, parent in zip(proposal.tokens, parents[1:], strict=True):
            paths.append([*paths[parent], token])
        rows += [Row(sequence, path) for path in paths]
    return rows


def _trees(
    batch: Batch, sequences: list[Sequence], proposals: list[Proposal], target: Tensor | None
) -> Trees:
    """The proposals as `accept_trees` takes them."""
    assert batch.trees is not None
    device, most = batch.tokens.device, max(batch.trees.columns)
    count = len(sequences)
    tokens = torch.zeros(count, most, dtype=torch.int64)
    uniforms = torch.zeros(count, most, dtype=torch.float64)
    law_rows = torch.full((count, most), -1, dtype=torch.int64)
    drafted_laws: list[Tensor] = []
    ids: Tensor | None = None
    walked, drawn, height, used = [], [], 1, 0
    for index, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True)):
        rows = rows_of(proposal.parents, len(proposal.tokens))
        tokens[index, 1 : len(rows)] = torch.tensor(proposal.tokens, dtype=torch.int64)
        walked.append(not sequence.params.greedy and not sequence.params.coupled)
        if walked[-1]:
            uniforms[index, : len(rows)] = torch.tensor(
                sequence.uniforms(len(rows)), dtype=torch.float64
            )
        drawn.append(proposal.law is not None)
        height = max(height, max(depths_of(rows)) - 1)
        if proposal.law is not None:
            inner = sorted(set(rows[1:]))
            law_rows[index, inner] = torch.arange(used, used + len(inner))
            used += len(inner)
            drafted_laws.append(proposal.law.probabilities)
            ids = proposal.law.ids
    columns = None
    if ids is not None and target is not None:
        columns = torch.full((target.shape[1],), -1, dtype=torch.int64, device=device)
        columns[ids] = torch.arange(len(ids), device=device)
    return Trees(
        tokens.to(device),
        upload(batch.starts, device),
        batch.trees.tables.first_child,
        batch.trees.tables.next_sibling,
        ~upload(walked, device),  # a coupled request's result is not read
        upload(drawn, device),
        uniforms.to(device),
        height,
        torch.cat(drafted_laws) if drafted_laws else None,
        law_rows.to(device) if drafted_laws else None,
        columns,
    )


def _greedy(batch: Batch, proposals: list[Proposal], choices: list[int]) -> Verdict:
    """The paths along the target's own choices [N]."""
    verdict = Verdict([], [])
    for proposal, first in zip(proposals, batch.starts, strict=False):
        own = choices[first:]
        path, token = _walk(proposal, lambda row, _, own=own: own[row])
        verdict.kept.append(path)
        verdict.following.append(token)
    return verdict


def _coupled(sequence: Sequence, proposal: Proposal, law: Tensor) -> tuple[list[int], int]:
    """The path along what plain decoding draws, one draw a token, and the token behind it."""
    parents = rows_of(proposal.parents, len(proposal.tokens))
    foreseen = sequence.foreseen(max(depths_of(parents)))
    path, token = _walk(proposal, lambda row, depth: draw(law[row], foreseen[depth]))
    sequence.uniforms(len(path) + 1)
    return path, token


def _walk(proposal: Proposal, choice: Callable[[int, int], int]) -> tuple[list[int], int]:
    """The drafts on the way along what is chosen behind each row (root: row 0), at each depth, and
    the first token that no draft has."""
    children: dict[tuple[int, int], int] = {}
    parents = rows_of(proposal.parents, len(proposal.tokens))
    for row, token in reversed(list(enumerate(proposal.tokens, 1))):
        children[parents[row], token] = row  # of equal children the first
    path: list[int] = []
    row, token = 0, choice(0, 0)
    while (row := children.get((row, token), -1)) >= 0:
        path.append(row - 1)
        token = choice(row, len(path))
    return path, token


def close_up(pool: KVPool, batch: Batch, paths: list[list[int]], num_layers: int) -> None:
    """Move the keys and values of the kept rows of every tree to the slots where they belong as
    text.

    Args:
        paths: of each sequence the rows that are kept, ascending from its first. num_layers: the
            pool's layers that hold these rows.
    """
    moved = [index for index, path in enumerate(paths) if path[-1] >= len(path)]
    if not moved:
        return
    size = batch.sequences[0].page_size
    first, tables = [], []
    for index in moved:
        length = batch.lengths[index]
        first.append(length - (batch.starts[index + 1] - batch.starts[index]))
        tables.append(batch.sequences[index].pages[: -(-length // size)])
    pool.close_up(tables, size, first, [paths[index] for index in moved], num_layers)
