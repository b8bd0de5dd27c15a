"""A prepared row as a chain of prompts: the context's ids as they were, the answers' as generated.

    row      c c c A A A c c A A A      c context, A a supervised run (an answer, end id included)
    prompt   c c c                      -> a a         the target's answer, whatever its length
    prompt   c c c a a c c              -> a a a a
    new row  c c c a a c c a a a a      supervised exactly on what was generated

No id is made from text again, so each prefix is what serving would hold after the same exchange. A
conversation ends early where an answer was cut by a limit, ended with another id than the template
closes a turn with, or left no room for the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .rowfile import Row
from .runs import supervised_spans


@dataclass(eq=False)
class Chain:
    """One row on its way.

    Attributes:
        row: as prepared. end_ids: every id that ends a turn of the target. limit: tokens that a row
            may have.
        answers: those given so far, end id included.
    """

    row: Row
    end_ids: Collection[int]
    limit: int
    answers: list[list[int]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.spans = supervised_spans(self.row.supervised)

    @property
    def cut(self) -> bool:
        """Whether the last answer met a limit before its end."""
        return bool(self.answers) and self.answers[-1][-1] not in self.end_ids

    @property
    def other_end(self) -> bool:
        """Whether the last answer ended with another id than the found one in its place.

        A found answer that the row's length cut off says nothing about how turns are closed.
        """
        if not self.answers or self.cut:
            return False
        closing = int(self.row.tokens[self.spans[len(self.answers) - 1][1] - 1])
        whole = closing in self.end_ids or len(self.answers) < len(self.spans)
        return whole and self.answers[-1][-1] != closing

    @property
    def prompt(self) -> list[int] | None:
        """The ids that the next answer follows; None when the conversation is over."""
        if len(self.answers) == len(self.spans) or self.cut or self.other_end:
            return None
        behind = self.spans[len(self.answers) - 1][1] if self.answers else 0
        before = self.row.tokens[behind : self.spans[len(self.answers)][0]].tolist()
        ids = [*self.written()[0], *before]
        return ids if len(ids) < self.limit else None

    @property
    def unanswered(self) -> int:
        """Answers of the row that were not given anew."""
        return len(self.spans) - len(self.answers)

    def written(self, whole_only: bool = False) -> tuple[list[int], list[bool]]:
        """The new row so far: ids and mask.

        Args:
            whole_only: leave out a last answer that was cut.
        """
        ids: list[int] = []
        supervised: list[bool] = []
        behind = 0
        kept = self.answers[:-1] if whole_only and self.cut else self.answers
        for (start, end), answer in zip(self.spans, kept, strict=False):
            ids += [*self.row.tokens[behind:start].tolist(), *answer]
            supervised += [False] * (start - behind) + [True] * len(answer)
            behind = end
        return ids, supervised
