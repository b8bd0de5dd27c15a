"""The table of everything counted, from lines as the engine writes them."""

from __future__ import annotations

from typing import Any

from draftsmith.scripts.results_matrix import matrix


def line(head: str, temperature: float, contexts: dict[str, tuple[int, int]]) -> dict[str, Any]:
    calls, tokens = (sum(pair[i] for pair in contexts.values()) for i in (0, 1))
    return {
        "head": head,
        "prompts": "heldout",
        "temperature": temperature,
        "tokens_per_target_call": tokens / calls,
        "accepted_per_position": [5, 2],
        "drafted_per_position": [10, 8],
        "by_context": {edge: {"target_calls": c, "tokens": t} for edge, (c, t) in contexts.items()},
    }


def test_both_conventions_positions_and_contexts() -> None:
    """Positions are shares of all drafts, not of those that reached them; a bucket that a drafter
    never met is a dash."""
    table = matrix(
        [line("b", 0.0, {"0": (10, 15), "512": (10, 17)}), line("a", 1.0, {"0": (4, 5)})]
    )
    assert "| 0–511 tokens | 512 tokens and more |" in table
    assert table.splitlines()[-2:] == [
        "| a | heldout | 1 | 1.250 | 0.250 | 50 20 | 1.25 | – |",
        "| b | heldout | 0 | 1.600 | 0.600 | 50 20 | 1.50 | 1.70 |",
    ]


def test_a_drafter_that_never_drafted() -> None:
    """Look-up that found nothing has no positions."""
    silent = line("ngram", 0.0, {"0": (3, 3)})
    silent |= {"accepted_per_position": [], "drafted_per_position": []}
    assert "| ngram | heldout | 0 | 1.000 | 0.000 |  | 1.00 |" in matrix([silent])
    assert matrix([]) == ""
