"""Whole layers in one call against the ops in turn, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from draftsmith.kernels import few_rows
from draftsmith.kernels.decoder_pass import DecoderPass, LayerWeights, Norm, PagedLayers
from draftsmith.kernels.few_rows import few_rows_attention
from draftsmith.kernels.kv_append import kv_append
from draftsmith.kernels.packed_linear import GatedLinear, PackedLinear, can_tile
from draftsmith.kernels.paged_rows import DraftedRows, PagedRows
from draftsmith.kernels.rms_norm import rms_norm
from draftsmith.kernels.rotary import rotate
from draftsmith.kernels.tree_build import ABSENT, build_trees_reference

pytestmark = pytest.mark.skipif(
    not (few_rows.serves(torch.empty(0)) and can_tile(torch.zeros(1, 32).bfloat16())),
    reason="needs a C++ compiler and a processor that multiplies bfloat16",
)
SIZE, INNER, HEADS, KEY_HEADS = 96, 160, 6, 2


def weights(width: int, read: int, special: bool, window: int | None, norm: bool) -> LayerWeights:
    """A random layer; `special` has biases and norms of heads."""

    def some(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.1).bfloat16()

    total = (HEADS + 2 * KEY_HEADS) * width
    return LayerWeights(
        Norm(some(SIZE) + 1, 1e-5) if norm else Norm(),
        PackedLinear(some(total, read)),
        some(total) if special else None,
        Norm(some(width) + 1, 1e-6) if special else Norm(),
        Norm(some(width) + 1, 1e-5) if special else Norm(),
        PackedLinear(some(SIZE, HEADS * width)),
        Norm(some(SIZE) + 1, 1e-6),
        GatedLinear(some(INNER, SIZE), some(INNER, SIZE)),
        PackedLinear(some(SIZE, INNER)),
        window,
    )


def in_turn(
    layer: LayerWeights,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: PagedLayers,
    index: int,
    read: Tensor | None,
) -> Tensor:
    """The definition."""

    product = turned(layer, normed(layer.input_norm, x) if read is None else read, cos, sin)
    heads = product.view(len(x), HEADS + 2 * KEY_HEADS, -1)
    q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
    keys, values = pages.keys[index], pages.values[index]
    kv_append(keys, values, k.transpose(0, 1), v.transpose(0, 1), pages.slots)
    mixed = few_rows_attention(
        q.transpose(0, 1), keys, values, pages.rows, scaling=0.2, window=layer.window
    )
    return after(layer, mixed.reshape(len(x), -1), x)


def normed(norm: Norm, rows: Tensor) -> Tensor:
    return rows if norm.weight is None else rms_norm(rows, norm.weight, norm.eps)


def turned(layer: LayerWeights, read: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What the attention reads, [N, (Hq + 2 Hk) D]."""
    product = layer.qkv(read)
    if layer.bias is not None:
        product += layer.bias
    heads = product.view(len(read), HEADS + 2 * KEY_HEADS, -1)
    q, k, _ = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
    for norm, part in ((layer.q_norm, q), (layer.k_norm, k)):
        part.copy_(normed(norm, part.reshape(-1, part.shape[2])).view(part.shape))
        rotate(part, cos, sin)
    return product


def after(layer: LayerWeights, mixed: Tensor, x: Tensor) -> Tensor:
    """The layer's result from what its attention gave."""
    x = layer.o(mixed, "add", x)
    return layer.down(layer.gated(normed(layer.mlp_norm, x)), "add", x)


def scene(width: int, page_size: int) -> tuple[PagedLayers, int]:
    """Three layers' pools with the past of five sequences of a few rows; one row is not stored."""
    counts, lengths = [1, 4, 2, 16, 1], [1, 37, 70, 48, 150]
    tables = [-(-length // page_size) for length in lengths]
    pages = torch.zeros(len(lengths), max(tables), dtype=torch.int32)
    order = torch.randperm(sum(tables) + 2).tolist()
    slots: list[int] = []
    for index, (count, length, rows) in enumerate(zip(tables, lengths, counts, strict=True)):
        pages[index, :count] = torch.tensor([order.pop() for _ in range(count)])
        place = torch.arange(length - rows, length)
        slots += (pages[index, place // page_size] * page_size + place % page_size).tolist()
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    rows = PagedRows(starts, torch.tensor(lengths), pages, page_size, 16, 150)
    pools = [
        torch.randn(KEY_HEADS, (sum(tables) + 2) * page_size, width).bfloat16() for _ in range(6)
    ]
    slots[6] = -1
    return PagedLayers(rows, torch.tensor(slots), pools[:3], pools[3:]), sum(counts)


def with_trees(pages: PagedLayers) -> PagedLayers:
    """The same rows as trees: each hangs on the one two before it."""
    counts = pages.rows.starts.diff().tolist()
    parents = torch.full((len(counts), max(counts)), ABSENT)
    for index, count in enumerate(counts):
        parents[index, :count] = (torch.arange(count) - 2).clamp(min=-1)
    ancestry = build_trees_reference(parents, max(counts)).ancestry
    tree = DraftedRows(
        torch.cat([ancestry[index, :count] for index, count in enumerate(counts)]),
        torch.tensor(counts),
        torch.zeros(sum(counts)).long(),
    )
    return dataclasses.replace(pages, rows=dataclasses.replace(pages.rows, tree=tree))


@pytest.mark.parametrize("drafted", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("special", [False, True], ids=["plain", "biases and norms"])
@pytest.mark.parametrize(("width", "page_size"), [(64, 16), (64, 1), (32, 8)])
def test_equals_the_ops_in_turn(special: bool, width: int, page_size: int, drafted: bool):
    """Results of all layers and what they left in the pools, windows among them."""
    torch.manual_seed(width + page_size)
    pages, n = scene(width, page_size)
    pages = with_trees(pages) if drafted else pages
    layers = [weights(width, SIZE, special, window, True) for window in (None, 20, None)]
    x, cos, sin = (torch.randn(n, size).bfloat16() for size in (SIZE, width, width))
    other = PagedLayers(
        pages.rows, pages.slots, [k.clone() for k in pages.keys], [v.clone() for v in pages.values]
    )
    assert DecoderPass.supports(layers)
    out = DecoderPass(layers, width, 0.2)(x, cos, sin, pages, kept=[0])
    assert set(out) == {0, 2}
    for index, layer in enumerate(layers):
        x = in_turn(layer, x, cos, sin, other, index, None)
        assert index == 1 or torch.equal(out[index], x)
    assert all(torch.equal(a, b) for a, b in zip(pages.keys, other.keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(pages.values, other.values, strict=True))


@pytest.mark.parametrize("wide", [SIZE, 2 * SIZE])
def test_a_layer_that_reads_something_else(wide: int):
    """A head's: its attention reads what it is given, or its input without a norm."""
    torch.manual_seed(wide)
    pages, n = scene(64, 16)
    layer = weights(64, wide, False, None, False)
    x, cos, sin = (torch.randn(n, size).bfloat16() for size in (SIZE, 64, 64))
    read = torch.randn(n, wide).bfloat16() if wide > SIZE else None
    out = DecoderPass([layer], 64, 0.2)(x, cos, sin, pages, read=read)[0]
    assert torch.equal(out, in_turn(layer, x, cos, sin, pages, 0, read))


@pytest.mark.parametrize("special", [False, True], ids=["plain", "biases and norms"])
def test_blocks_of_many_rows_between_attentions(special: bool):
    """Bit for bit the ops in turn, at both ends of the stack, too; x stays where it is kept."""
    torch.manual_seed(5)
    layers = [weights(64, SIZE, special, None, norm) for norm in (True, False)]
    x, cos, sin, mixed = (torch.randn(300, n).bfloat16() for n in (SIZE, 64, 64, HEADS * 64))
    qkv = x.new_full((300, (HEADS + 2 * KEY_HEADS) * 64), torch.nan)
    fused, given = DecoderPass(layers, 64, 0.2), x.clone()
    assert fused.between(None, None, x, qkv, cos, sin, keep=False) is x and torch.equal(x, given)
    assert torch.equal(qkv, turned(layers[0], normed(layers[0].input_norm, x), cos, sin))
    out = fused.between(0, mixed, x, qkv, cos, sin, keep=True)
    assert torch.equal(x, given) and torch.equal(out, after(layers[0], mixed, x))
    assert torch.equal(qkv, turned(layers[1], out, cos, sin))
    expected, before = after(layers[1], mixed, out), qkv.clone()
    assert fused.between(1, mixed, out, qkv, cos, sin, keep=False) is out
    assert torch.equal(out, expected) and torch.equal(qkv, before)


def test_float32_is_left_alone():
    """Its products have no form here."""
    layer = weights(64, SIZE, False, None, True)
    gated = GatedLinear(torch.randn(INNER, SIZE), torch.randn(INNER, SIZE))
    assert not DecoderPass.supports([LayerWeights(**{**vars(layer), "gated": gated})])


@pytest.mark.parametrize("what", ["norm", "bias"])
def test_vectors_that_are_not_read_as_bfloat16_go_another_way(what: str) -> None:
    """The call reads memory, so a float32 norm or bias must not get there."""
    layer = weights(16, SIZE, True, None, True)
    assert DecoderPass.supports([layer]) and layer.bias is not None
    wide = Norm(torch.ones(SIZE), 1e-6)
    changed = {"norm": {"mlp_norm": wide}, "bias": {"bias": layer.bias.float()}}[what]
    assert not DecoderPass.supports([layer, dataclasses.replace(layer, **changed)])
