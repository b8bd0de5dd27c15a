"""What the ops of `kernels/` are called with at the widths of real models.

A `Maker` gives the same arguments every time, on any device; on the meta device they have no
content and cost nothing. `op_cases` has the ops themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.chains import Chains
from ..kernels.paged_rows import DraftedRows, PagedRows
from ..kernels.tree_build import build_trees_reference
from ..kernels.trees import Trees

PAGE = 16
CHAIN = 2
"""Steps of the unroll whose attention is called."""


@dataclass(frozen=True)
class Size:
    """A real model's widths."""

    name: str
    hidden: int
    heads: int
    key_heads: int
    key_width: int
    value_width: int
    vocabulary: int
    window: int | None = None
    softcap: float | None = None
    inside: bool = False
    """The values are the keys' first columns."""


SIZES = (
    Size("Llama-70B", 8192, 64, 8, 128, 128, 128256),
    Size("DeepSeek-V2-Lite", 2048, 16, 16, 192, 128, 102400),
    Size("SmolLM2-135M", 576, 9, 3, 64, 64, 49152),
)
CAPPED = Size("Gemma-2-2B", 2304, 8, 4, 256, 256, 256000, window=4096, softcap=50.0)
"""A model with a window and soft caps, for the ops that know them."""
LATENTS = (
    Size("DeepSeek-V2-Lite, latents", 2048, 16, 1, 576, 512, 102400, inside=True),
    Size("DeepSeek-V3, latents", 7168, 128, 1, 576, 512, 129280, inside=True),
)
"""Attention on latents, for the ops of the pool: one key head whose first columns are the
values."""


class Maker:
    """Arguments of one call, the same ones each time. On the meta device they have no content.

    Args:
        size: the model. numbers: the workload's. dtype: of states, keys and logits.
    """

    def __init__(
        self, size: Size, numbers: dict[str, int], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.size, self.numbers = size, numbers
        self.dtype, self.device = dtype, torch.device(device)
        torch.manual_seed(0)

    def __getitem__(self, name: str) -> int:
        return self.numbers[name]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random values."""
        return torch.randn(*shape, dtype=dtype or self.dtype, device=self.device)

    def place(self, tensor: Tensor) -> Tensor:
        """A tensor of the host where the call runs."""
        return tensor.to(self.device)

    def below(self, limit: int, *shape: int) -> Tensor:
        """[...] int64 in [0, limit)."""
        return self.place(torch.randint(0, limit, shape))

    def law(self, *shape: int) -> Tensor:
        """Float32 rows that sum to 1."""
        return torch.softmax(self.normal(*shape, dtype=torch.float32), -1)

    def uniforms(self, *shape: int) -> Tensor:
        """Float64 in [0, 1)."""
        return self.place(torch.rand(*shape, dtype=torch.float64))

    def pool(self, slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        size = self.size
        keys = self.normal(size.key_heads, slots, size.key_width)
        if size.inside:
            return keys, keys[..., : size.value_width]
        return keys, self.normal(size.key_heads, slots, size.value_width)

    def pages(self, batch: int, most: int) -> Tensor:
        """[B, P] int32 of scattered pages, each once."""
        return torch.randperm(batch * most).view(batch, most).int()


def states(count: int, weights: int) -> Callable[[Maker], tuple[Any, ...]]:
    """So many [N, H] states and [H] weights."""

    def make(m: Maker) -> tuple[Any, ...]:
        hidden = m.size.hidden
        states = [m.normal(m["N"], hidden) for _ in range(count)]
        return *states, *(m.normal(hidden).abs() + 0.5 for _ in range(weights))

    return make


def shift_arguments(m: Maker) -> tuple[Any, ...]:
    batch = m["B"]
    starts = torch.arange(batch + 1) * m["R"]
    last = starts[:-1] + torch.arange(batch) % m["R"]
    tokens = m.below(m.size.vocabulary, int(starts[-1]))
    return tokens, m.place(starts), m.place(last), m.below(m.size.vocabulary, batch)


def place_arguments(m: Maker) -> tuple[Any, ...]:
    batch, most = m["B"], 64
    limits = torch.full((batch,), most * PAGE)
    first = limits - 1 - torch.arange(batch) % (most * PAGE)
    return m.place(first), m.place(limits), m.place(m.pages(batch, most)), PAGE, m["R"]


def append_arguments(m: Maker) -> tuple[Any, ...]:
    size, rows = m.size, m["N"]
    keys, values = m.pool(4 * rows)
    k = m.normal(rows, size.key_heads, size.key_width).transpose(0, 1)
    v = k[..., : size.value_width]
    if not size.inside:
        v = m.normal(rows, size.key_heads, size.value_width).transpose(0, 1)
    return keys, values, k, v, m.place(torch.randperm(4 * rows)[:rows])


def copy_arguments(m: Maker) -> tuple[Any, ...]:
    count = m["P"]
    order = torch.randperm(4 * count)
    keys, values = m.pool(4 * count * PAGE)
    return keys, values, m.place(order[:count]), m.place(order[count : 2 * count]), PAGE


def path_arguments(m: Maker) -> tuple[Any, ...]:
    batch, most = m["B"], 8
    keys, values = m.pool(batch * most * PAGE)
    path = torch.arange(m["K"]) + 1 + torch.arange(batch)[:, None] % 3
    first = torch.arange(batch) % PAGE + PAGE
    return keys, values, m.place(m.pages(batch, most)), PAGE, m.place(first), m.place(path)


def forest(batch: int, columns: int) -> tuple[Tensor, int]:
    """Parents [B, C] on the host of trees of four children a node, and their height."""
    one = torch.tensor([-1, *((column - 1) // 4 for column in range(1, columns))])
    height, node = 1, columns - 1
    while node > 0:
        height, node = height + 1, int(one[node])
    return one.expand(batch, -1).contiguous(), height


def paged_arguments(m: Maker) -> tuple[Any, ...]:
    """R rows of each of B sequences of about L keys; T: the rows are those of a tree."""
    size, batch, rows, longest = m.size, m["B"], m["R"], m["L"]
    lengths = longest - torch.arange(batch) % 3 if longest > rows else torch.full((batch,), longest)
    most = -(-longest // PAGE)
    keys, values = m.pool(batch * most * PAGE)
    starts = torch.arange(batch + 1) * rows
    tree = None
    if "T" in m.numbers:
        ancestry = build_trees_reference(*forest(1, rows)).ancestry[0]
        depth = (ancestry > 0).sum(1) - 1
        tree = DraftedRows(
            m.place(ancestry.repeat(batch, 1)),
            m.place(torch.full((batch,), rows)),
            m.place((lengths[:, None] - rows + depth).flatten()),
        )
    table = PagedRows(
        m.place(starts), m.place(lengths), m.place(m.pages(batch, most)), PAGE, rows, longest, tree
    )
    q = m.normal(batch * rows, size.heads, size.key_width).transpose(0, 1)
    return q, keys, values, table, size.key_width**-0.5, size.window, size.softcap


def _columns(m: Maker, width: int) -> tuple[Tensor, Tensor | None]:
    """Target ids [Vd] of a draft vocabulary on the host, and the table of their columns [V]."""
    size = m.size.vocabulary
    if width >= size:
        return torch.arange(size), None
    ids = torch.arange(width) * (size // width)
    table = torch.full((size,), -1)
    table[ids] = torch.arange(width)
    return ids, m.place(table)


def chain_arguments(m: Maker) -> tuple[Any, ...]:
    """Sampled and greedy chains side by side; Vd: the drafts are drawn from so many ids."""
    batch, count, size = m["B"], m["K"], m.size.vocabulary
    ids, columns = _columns(m, m.numbers.get("Vd", size))
    rows = batch * (count + 1)
    greedy = torch.arange(batch) % 4 == 3
    chains = Chains(
        m.place(ids[torch.randint(0, len(ids), (batch, count))]),
        m.place(torch.arange(batch + 1) * (count + 1)),
        m.place(greedy),
        m.place(torch.arange(batch) % 3 > 0),
        m.uniforms(batch, count + 1) ** 4,
        m.law(batch, count, len(ids)),
        columns,
    )
    return chains, m.below(size, rows), m.law(rows, size)


def block_arguments(m: Maker) -> tuple[Any, ...]:
    """The chains of `chain_arguments`, all sampled."""
    chains, _, target = chain_arguments(m)
    return chains, target


def typical_arguments(m: Maker) -> tuple[Any, ...]:
    """The same, with a request's usual limits."""
    limits = (torch.full((m["B"],), limit, dtype=torch.float64) for limit in (0.09, 0.3))
    return *block_arguments(m), *(m.place(limit) for limit in limits)


def tree_arguments(m: Maker) -> tuple[Any, ...]:
    batch, columns, size = m["B"], m["C"], m.size.vocabulary
    ids, table = _columns(m, m.numbers.get("Vd", size))
    parents, height = forest(batch, columns)
    tables = build_trees_reference(parents, height)
    order = torch.arange(columns)
    inner = (columns + 2) // 4  # nodes with children come first
    law_rows = torch.where(order < inner, order, -1) + torch.arange(batch)[:, None] * inner
    trees = Trees(
        m.place(ids[(7 * order + torch.arange(batch)[:, None]) % len(ids)]),
        m.place(torch.arange(batch + 1) * columns),
        m.place(tables.first_child),
        m.place(tables.next_sibling),
        m.place(torch.arange(batch) % 4 == 3),
        m.place(torch.arange(batch) % 3 > 0),
        m.uniforms(batch, columns) ** 4,
        height,
        m.law(batch * inner, len(ids)),
        m.place(torch.where(order < inner, law_rows, -1)),
        table,
    )
    return trees, m.below(size, batch * columns), m.law(batch * columns, size)


def forest_arguments(m: Maker) -> tuple[Any, ...]:
    parents, height = forest(m["B"], m["C"])
    return m.place(parents), height


def score_arguments(m: Maker) -> tuple[Any, ...]:
    parents, _ = forest(m["B"], m["C"])
    gains, scores = -torch.rand(parents.shape), torch.zeros(parents.shape)
    for column in range(1, m["C"]):
        scores[:, column] = scores[:, (column - 1) // 4] + gains[:, column]
    return m.place(scores), m.place(parents), m["keep"]


def sampler_arguments(m: Maker) -> tuple[Any, ...]:
    batch = m["B"]
    order = torch.arange(batch)
    settings = (0.5 + order % 3 / 4, order % 5 * 20, 1 - order % 4 / 10, order % 2 / 100)
    logits = 2 * m.normal(batch, m.size.vocabulary, dtype=torch.float32)
    return logits, *(m.place(setting) for setting in settings)


def chunk_arguments(m: Maker) -> tuple[Any, ...]:
    size = m.size
    students, teachers = (m.normal(m[name], size.vocabulary) for name in ("M", "T"))
    return students, teachers, m.below(m["T"], m["M"]), size.softcap


def unroll_arguments(m: Maker) -> tuple[Any, ...]:
    size, tokens = m.size, m["N"]
    widths = [size.key_width, size.value_width]
    heads = [(size.heads, size.key_width)] + [(size.key_heads, width) for width in widths]
    heads += [(size.key_heads, size.key_width)] * CHAIN + [
        (size.key_heads, size.value_width)
    ] * CHAIN
    leaves = [m.normal(tokens, count, width).transpose(0, 1) for count, width in heads]
    return size.key_width**-0.5, size.window, size.softcap, *leaves
