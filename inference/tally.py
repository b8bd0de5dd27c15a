"""How often a text holds each token, kept up as the text grows: what penalties count."""

from __future__ import annotations

import numpy as np


class Tally:
    """The distinct tokens of a text, in the order they appeared, and how often each occurs in its
    output."""

    def __init__(self) -> None:
        self.num_read = 0
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.int64)

    def read(self, tokens: list[int], num_prompt: int) -> None:
        """Count what was appended to `tokens` since the last time."""
        assert self.num_read <= len(tokens), "a text only grows"
        for position in range(self.num_read, len(tokens)):
            place = self._place.setdefault(tokens[position], len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = tokens[position]
            self._counts[place] += position >= num_prompt
        self.num_read = len(tokens)

    @property
    def ids(self) -> np.ndarray:
        """[u] int64."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """[u] int64: occurrences in the output, 0 for a token of the prompt alone."""
        return self._counts[: len(self._place)]

    def count(self, token: int) -> int:
        """Occurrences of one token in the output."""
        place = self._place.get(token)
        return 0 if place is None else int(self._counts[place])
