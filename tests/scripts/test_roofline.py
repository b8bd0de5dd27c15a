"""Floors follow from data sheets; measured times find their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.scripts.op_arguments import LATENTS, SIZES
from draftsmith.scripts.op_cases import CASES
from draftsmith.scripts.roofline import CARDS, floor, label, table

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text()
NAMED = {case.op: case for case in CASES}


def test_floors_follow_from_the_data_sheet():
    """Decode at Llama-70B's widths: 64 sequences of 4,096 keys are 1.07 GB, 321 µs at 3.35 TB/s; a
    prompt is bound by products."""
    llama, (h100, h200) = SIZES[0], CARDS
    decode = NAMED["paged_attention, decode"]
    moved = 2 * 64 * (4096 * 8 + 64) * 256
    assert decode.amounts(llama)[0] == moved
    assert floor(decode, llama, h100) == pytest.approx(moved / 3.35e12)
    prompt = NAMED["paged_attention, prompt"]
    assert floor(prompt, llama, h100) == pytest.approx(2048**2 * 64 * 256 / 989e12)
    assert floor(prompt, llama, h100) == floor(prompt, llama, h200)
    for case in CASES:
        assert f"`{case.op}`" in PAGE and f"`{case.bytes}`" in PAGE, "renew docs/kernels.md"


def test_latents_are_read_once():
    """One key head of 576, its values inside: a slot is 1,152 bytes, whatever the query heads."""
    decode, latent = NAMED["paged_attention, decode"], LATENTS[1]
    asked = 2 * 64 * 128 * (576 + 512)  # queries and outputs
    assert decode.amounts(latent)[0] == 64 * 4096 * 1152 + asked
    assert NAMED["kv_append"].amounts(latent)[0] == 2 * 256 * 1152


def test_measured_times_stand_in_their_rows():
    """In microseconds, at the model that was measured; other rows stay empty."""
    case, size = NAMED["kv_append"], SIZES[1]
    lines = table({"card": "a card", "seconds": {label(case, size): 2.5e-6}}).splitlines()
    filled = [line for line in lines[2:] if not line.endswith("|  |")]
    assert "measured on a card, µs" in lines[0]
    assert len(filled) == 1 and filled[0].endswith("| 2.5 |") and size.name in filled[0]
