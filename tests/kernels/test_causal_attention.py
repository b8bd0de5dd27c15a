"""One attention for prefill, chunks, decode and verify, against its definition with a materialised
mask."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.causal_attention import (
    _tiled,
    causal_attention,
    causal_attention_reference,
    packed_attention,
)

SHAPES = [(1, 1), (1, 37), (4, 4), (4, 61), (16, 200), (17, 17), (129, 129), (130, 391), (300, 300)]


@pytest.mark.parametrize(("n", "keys"), SHAPES, ids=lambda value: str(value))
@pytest.mark.parametrize("window", [None, 5, 150])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equals_the_definition(n: int, keys: int, window: int | None, softcap: float | None):
    """Every query count, with and without a past, grouped heads, values of another width, window,
    soft cap."""
    torch.manual_seed(n * 1000 + keys)
    q = torch.randn(6, n, 16, dtype=torch.float64)
    k = torch.randn(2, keys, 16, dtype=torch.float64)
    v = torch.randn(2, keys, 24, dtype=torch.float64)
    out = causal_attention(q, k, v, 0.3, window, softcap)
    expected = causal_attention_reference(q, k, v, 0.3, window, softcap)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [3, 200])
def test_reads_nothing_behind_the_query(n: int):
    """Other keys and values after a query's position change nothing before it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, 300, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = causal_attention(q[:, -n:], k, v, 0.5)
    k, v = k.clone(), v.clone()
    k[:, -1], v[:, -1] = 50.0, 1e9
    spoilt = causal_attention(q[:, -n:], k, v, 0.5)
    torch.testing.assert_close(spoilt[:, :-1], whole[:, :-1], rtol=0, atol=0)


def test_strided_views_of_a_pool_are_read_as_they_are(nan_memory: None):
    """Keys come as slices of a larger pool; the result is that of a contiguous copy."""
    pool = torch.randn(2, 500, 16, dtype=torch.float64)
    q = torch.randn(20, 4, 16, dtype=torch.float64).transpose(0, 1)
    k = pool[:, 100:160]
    out = causal_attention(q, k, k, 0.25)
    expected = causal_attention_reference(q.contiguous(), k.contiguous(), k.contiguous(), 0.25)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)


def test_bfloat16_stays_within_its_rounding():
    """Long blocks round scores to bfloat16: the error stays at the size of that rounding."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(heads, 260, 64) for heads in (6, 2, 2))
    rounded = [t.bfloat16().double() for t in (q, k, v)]
    exact = causal_attention_reference(rounded[0], rounded[1], rounded[2], 0.125)
    out = causal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.125).double()
    assert float((out - exact).abs().max()) < 0.03


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize(("n", "keys"), [(17, 17), (130, 391), (300, 300), (40, 700)])
def test_bfloat16_of_many_queries(n: int, keys: int, window: int | None, nan_memory: None):
    """With a past, a window, blocks that are not whole, values of another width, strided rows."""
    torch.manual_seed(n + keys)
    q = torch.randn(n, 6, 64).bfloat16().transpose(0, 1)
    k, v = torch.randn(keys, 2, 64 + 96).bfloat16().transpose(0, 1).split((64, 96), -1)
    out = causal_attention(q, k, v, 0.125, window)
    exact = causal_attention_reference(q.double(), k.double(), v.double(), 0.125, window)
    assert float((out.double() - exact).abs().max()) < 0.03


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_documents_are_those_alone(dtype: torch.dtype):
    """Bit for bit, in whatever threads they run; a document of NaN spoils no other."""
    torch.manual_seed(2)
    borders = [0, 1, 40, 333, 350]
    q, k, v = (torch.randn(heads, 350, 32, dtype=dtype) for heads in (6, 2, 2))
    k[:, 1:40] = v[:, 1:40] = float("nan")
    whole = packed_attention(q, k, v, borders, 0.2)
    for a, b in ((0, 1), (40, 333), (333, 350)):
        alone = packed_attention(q[:, a:b], k[:, a:b], v[:, a:b], [0, b - a], 0.2)
        assert whole[a:b].isfinite().all()
        torch.testing.assert_close(whole[a:b], alone, rtol=0, atol=0)


def test_bfloat16_in_chunks_is_bfloat16_at_once():
    """Where the C++ form runs, how a row is cut into passes of more than a few does not show."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(heads, 600, 64).bfloat16() for heads in (6, 2, 2))
    whole = causal_attention(q, k, v, 0.125)
    parts = [
        causal_attention(q[:, a:b], k[:, :b], v[:, :b], 0.125) for a, b in ((0, 70), (70, 600))
    ]
    difference = (torch.cat(parts, 1).double() - whole.double()).abs().max()
    assert float(difference) == 0 if _tiled(q, k, v) else float(difference) < 0.03
