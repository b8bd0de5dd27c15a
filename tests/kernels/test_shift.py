"""The alignment of DESIGN: which token meets which state, and which rows learn."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.shift import (
    insert_next,
    row_ends,
    shift_insert,
    shift_insert_reference,
    shift_tokens,
    supervision,
)

STARTS = torch.tensor([0, 4, 5, 9])
TOKENS = torch.tensor([10, 11, 12, 13, 20, 30, 31, 32, 33])


def test_nothing_is_shifted_across_a_border():
    """Row p takes the token of p + offset of its own row, and the fill behind its end."""
    assert shift_tokens(TOKENS, STARTS, 1).tolist() == [11, 12, 13, 0, 0, 31, 32, 33, 0]
    assert shift_tokens(TOKENS, STARTS, 3, fill=-1).tolist() == [13, -1, -1, -1, -1, 33, -1, -1, -1]
    assert shift_tokens(TOKENS, STARTS, 0).tolist() == TOKENS.tolist()
    assert row_ends(STARTS).tolist() == [4, 4, 4, 4, 5, 9, 9, 9, 9]


def test_a_negative_offset_is_refused():
    """Looking back would feed a head its own past as its future."""
    with pytest.raises(ValueError, match="offset -1"):
        shift_tokens(TOKENS, STARTS, -1)


def test_rows_learn_where_the_whole_run_was_written_by_the_assistant():
    """Row p of step k needs x_{p+1} .. x_{p+2+k}; two turns are never joined."""
    flags = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    masks = supervision(flags, STARTS, 3)
    assert masks[0].nonzero()[:, 0].tolist() == [0, 1]  # (x1,x2), (x2,x3); (x6,x7) is broken
    assert masks[1].nonzero()[:, 0].tolist() == [0]
    assert masks[2].nonzero()[:, 0].tolist() == []


def test_two_turn_chat_has_the_five_rows_worked_out_by_hand():
    """Hi/Hello!/Bye/Goodbye.: answers at 31-33 and 46-49 supervise rows 30, 31, 45, 46, 47."""
    flags = torch.zeros(51, dtype=torch.bool)
    flags[31:34] = True
    flags[46:50] = True
    rows = supervision(flags, torch.tensor([0, 51]), 1)[0].nonzero()[:, 0]
    assert rows.tolist() == [30, 31, 45, 46, 47]


def test_the_last_row_of_each_sequence_takes_the_decided_token():
    """The shifted buffer is completed by sampled tokens (or the next prompt token of a chunk)."""
    shifted = shift_tokens(TOKENS, STARTS, 1)
    done = insert_next(shifted, torch.tensor([3, 4, 8]), torch.tensor([14, 21, 34]))
    assert done.tolist() == [11, 12, 13, 14, 21, 31, 32, 33, 34]


@pytest.mark.parametrize("starts", [[0, 4], [0, 1, 2, 9], [0, 0, 3, 3, 7, 7]], ids=str)
def test_a_shift_completed_equals_its_definition(starts: list[int]):
    """Every place of a last true row, rows that hold nothing among others."""
    borders = torch.tensor(starts)
    tokens = torch.arange(10, 10 + starts[-1])
    full = [index for index, size in enumerate(borders.diff().tolist()) if size]
    for back in range(4):
        last = torch.tensor([max(starts[i], starts[i + 1] - 1 - back) for i in full])
        following = torch.arange(90, 90 + len(full))
        given = tokens, borders, last, following
        assert torch.equal(shift_insert(*given), shift_insert_reference(*given))
