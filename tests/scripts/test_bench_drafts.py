"""How the bench of drafts reads what is to be compared."""

from __future__ import annotations

import pytest

from draftsmith.inference.drafters import NgramDrafter
from draftsmith.scripts.bench.drafts import PLAIN, form_of


def test_look_up_needs_no_head():
    """Of a plain form nothing drafts."""
    form = form_of("ngram:4", None)
    assert isinstance(form.drafter(), NgramDrafter) and form.config.draft_tokens == 4
    assert PLAIN.drafter() is None and PLAIN.config.draft_tokens == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chain:2", "needs a head: give --head"),
        ("dynamic:3:4:7", "needs a head"),
        ("dynamic:3:4", "no form of drafts"),
        ("ngram:0", "no form"),
        ("ngram:four", "no form"),
        ("full:2", "no form"),
        ("published:4", "no form"),
        ("dynamic:3:4:7:6", "no form"),
        ("ngram+ngram:4", "no form"),
        ("ngram+full:2:3", "needs a head"),
        ("ngram+dynamic:2:5:9:6", "needs a head"),
        ("ngram+dynamic:2:5:9:6:1", "no form"),
    ],
)
def test_what_is_no_form_is_told(words: str, said: str):
    """The value and how to write one."""
    with pytest.raises(ValueError, match=said) as told:
        form_of(words, None)
    assert words in str(told.value)
