"""The table at the end of `make bench`."""

from __future__ import annotations

from draftsmith.scripts.bench.__main__ import BY_HAND, names, ratios


def test_every_ratio_of_a_benchs_numbers_is_found():
    """Named at the leaf or above it, in rows with a label and without, against something or not."""
    found = ratios(
        {
            "threads": 2,
            "lengths": [53, 78],
            "passes": [{"what": "1 x 4 rows", "ms": 3.0, "ratio_to_own_linears": 0.9}],
            "batch": {"speeds": {"ours": 5.0}, "ratio_to": {"generate_batch": 7.0}},
            "plain": [{"ratio": 2.0, "name": "x"}],
        }
    )
    assert list(found) == [
        ("passes 1 x 4 rows ratio", 0.9, "own linears"),
        ("batch ratio", 7.0, "generate batch"),
        ("plain 0 ratio", 2.0, ""),
    ]


def test_a_list_of_ratios_is_taken_as_it_is():
    """Whatever else stands beside it."""
    given = [{"what": "loss", "ratio": 2.4, "against": "dense"}]
    assert list(ratios({"ratio": 1.0, "ratios": given})) == [("loss", 2.4, "dense")]


def test_what_runs_by_hand_is_there():
    """`make bench` runs all others."""
    assert {"engine", "drafts", "dump", "train"} <= set(names())
    assert not set(BY_HAND) & set(names())
