"""Rows of a tree are those of its paths run as chains, in the target and in every head."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from small_heads import HEAD_CONFIGS, PROMPTS, away_from_its_start
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "models"))

from families import Exact, save_toy  # noqa: E402  # pyright: ignore[reportMissingImports]

from draftsmith.inference.batch import Batch, PagedContext  # noqa: E402
from draftsmith.inference.config import EngineConfig, SamplingParams  # noqa: E402
from draftsmith.inference.engine import Engine  # noqa: E402
from draftsmith.inference.head_drafter import HeadDrafter  # noqa: E402
from draftsmith.inference.pages import KVPool, PageAllocator  # noqa: E402
from draftsmith.inference.sequence import Sequence  # noqa: E402
from draftsmith.inference.tree import TreeConfig  # noqa: E402
from draftsmith.inference.tree_drafter import TreeHeadDrafter  # noqa: E402
from draftsmith.inference.tree_verify import close_up  # noqa: E402
from draftsmith.models.heads import HeadStep  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402

PARENTS = [-1, 0, 0, 1, 1, 2, 4]
"""Of the rows, the root first."""
TOKENS = [3, 11, 12, 13, 14, 15, 16]
KEPT = [[0, 1, 4, 6], [0, 2]]
"""Rows of the first and of the second sequence that become text."""
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)


class Prefilled:
    """Two prompts in scattered pages of a pool that is NaN elsewhere."""

    def __init__(self, target: Target, page_size: int) -> None:
        self.target = target
        self.pool = KVPool(target.num_layers, 128 * page_size, poison=True)
        allocator = PageAllocator(128)
        pages = allocator.allocate(128)
        assert pages is not None
        allocator.release(pages[::2])
        self.sequences = [Sequence.create("s", prompt, PARAMS) for prompt in PROMPTS[1:3]]
        for sequence in self.sequences:
            taken = allocator.allocate(-(-(len(sequence.tokens) + 7) // page_size))
            assert taken is not None
            sequence.pages, sequence.page_size = taken, page_size
        self.run(Batch.build([(one, 0, one.tokens) for one in self.sequences]))

    def run(self, batch: Batch) -> Tensor:
        """The last layer's states."""
        context = PagedContext(self.pool, batch)
        states = self.target.forward(batch.tokens, batch.positions, context, ())
        return states[self.target.num_layers]

    def drafted(self, rows: list[list[int]], parents: list[list[int]] | None = None) -> Batch:
        """The next rows of each sequence, by their places in `TOKENS`."""
        parts = [
            (one, len(one.tokens), [TOKENS[row] for row in chosen])
            for one, chosen in zip(self.sequences, rows, strict=True)
        ]
        return Batch.build(parts, parents=parents)

    def text(self, layer: int, index: int, count: int) -> Tensor:
        """Keys and values of a sequence's first rows, `count` of them behind its prompt."""
        sequence = self.sequences[index]
        slots = [sequence.slot(place) for place in range(len(sequence.tokens) + count)]
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        assert keys is not None and values is not None
        return torch.cat([keys[:, slots], values[:, slots]], -1)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama3 rope", "mistral", "gemma2"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_targets_rows_and_a_kept_path_are_those_of_chains(
    family: str, page_size: int, tmp_path: Path
):
    """States of every node, then keys and values of a path that was closed up: 1e-12. Mistral's
    window of five ends inside the tree."""
    with Exact():
        folder = save_toy(family, tmp_path)
        target = Target.load(TargetConfig(source=str(folder), dtype="float64", device="cpu"))
        tree = Prefilled(target, page_size)
        batch = tree.drafted([list(range(7))] * 2, [PARENTS] * 2)
        states = tree.run(batch).view(2, 7, -1)
        for path in ([0, 1, 3], [0, 1, 4, 6], [0, 2, 5]):
            chain = Prefilled(target, page_size)
            alone = chain.run(chain.drafted([path] * 2)).view(2, len(path), -1)
            torch.testing.assert_close(states[:, path], alone, atol=1e-12, rtol=0)
        close_up(tree.pool, batch, KEPT, target.num_layers)
        chain = Prefilled(target, page_size)
        chain.run(chain.drafted(KEPT))
        for layer, index in itertools.product(range(target.num_layers), (0, 1)):
            count = len(KEPT[index])
            closed, plain = (one.text(layer, index, count) for one in (tree, chain))
            torch.testing.assert_close(closed, plain, atol=1e-12, rtol=0)
        true, chosen = batch.keep(KEPT)
        assert chosen.tolist() == [0, 1, 4, 6, 7, 9] and true.starts == [0, 4, 6]
        assert true.tokens.tolist() == [TOKENS[row] for path in KEPT for row in path]
        ends = [len(one.tokens) for one in tree.sequences]
        assert true.positions.tolist() == [*range(ends[0], ends[0] + 4), ends[1], ends[1] + 1]
        assert torch.equal(true.slots, chain.drafted(KEPT).slots)


class RecordingTrees(TreeHeadDrafter):
    """Notes what each path of nodes is drafted from: (sequence, tokens of the path) -> [H]."""

    def propose(self, sequences, counts):
        """As the class does, with the rows of this call alone."""
        self.rows: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.rounds = getattr(self, "rounds", 0) + 1
        return super().propose(sequences, counts)

    def _row_each(self, sequences, trees, active, level, recycled):
        leaves = [(index, leaf) for index in active for leaf in trees[index].leaves]
        drafted, states = super()._row_each(sequences, trees, active, level, recycled)
        for row, (index, leaf) in enumerate(leaves):
            self._note(sequences[index], trees[index], leaf.index, drafted[row])
        return drafted, states

    def _row_for_all(self, sequences, trees, active, level, recycled):
        leaves = [(index, leaf) for index in active for leaf in trees[index].leaves]
        drafted, states = super()._row_for_all(sequences, trees, active, level, recycled)
        for index, leaf in leaves:
            self._note(sequences[index], trees[index], leaf.index, drafted[leaf.row])
        return drafted, states

    def _note(self, sequence, tree, node: int, row: Tensor) -> None:
        path = []
        while node >= 0:
            path.insert(0, tree.tokens[node])
            node = tree.parents[node]
        self.rows[sequence.id, tuple(path)] = row


class FollowingChain(HeadDrafter):
    """Drafts given tokens and notes what each would be followed by."""

    path: tuple[int, ...] = ()

    def _take(self, chains, active, logits):
        for index in active:
            chains.tokens[index].append(self.path[len(chains.tokens[index])])

    def _run(self, batch, tokens, hidden, step) -> HeadStep:
        out = super()._run(batch, tokens, hidden, step)
        self.last = out.drafted[-1]
        return out


@pytest.mark.parametrize("shape", ["published", "dynamic"])
@pytest.mark.parametrize("name", ["mtp", "eagle", "eagle3 of 2 layers", "medusa"])
def test_a_heads_rows_along_each_path_are_those_of_a_chain(target: Target, name: str, shape: str):
    """After steps that kept whatever they kept, every row that the head runs for a node of a tree
    equals the row of a chain of the node's path: 1e-12 of its size."""
    tree = TreeConfig("static") if shape == "published" else TreeConfig("dynamic", top_k=3, nodes=9)
    head = away_from_its_start(HEAD_CONFIGS[name], target)
    settings = EngineConfig(draft_tokens=4, page_size=4, pool_tokens=512, poison=True, tree=tree)
    drafter = RecordingTrees(head, None, tree)
    engine = Engine(target, settings, drafter)
    sequences = [engine.add(prompt, PARAMS) for prompt in PROMPTS[1:3]]
    before: list[list[int]] = []
    while drafter.__dict__.get("rounds", 0) < 3:
        before = [list(sequence.tokens) for sequence in sequences]
        engine.step()
    assert len(drafter.rows) >= 12
    chain = FollowingChain(head, None)
    plain = Engine(target, settings, chain)
    for sequence, text in zip(sequences, before, strict=True):
        again = plain.add(text[:-1], SamplingParams(max_new_tokens=8, ignore_eos=True))
        plain.step()  # computes text[:-1] and decides the token behind it
        assert again.tokens == text
        for identity, path in drafter.rows:
            if identity == sequence.id:
                chain.path = (*path, 0)
                with torch.inference_mode():
                    chain.propose([again], [len(path) + 1])
                row = drafter.rows[identity, path]
                size = float(row.abs().max())
                torch.testing.assert_close(chain.last, row, atol=1e-12 * max(1.0, size), rtol=0)
        plain.scheduler.cancel(again)
