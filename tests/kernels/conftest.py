"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from draftsmith.kernels import jit


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the variable as if the process began with it."""

    def set_variable(word: str) -> None:
        monkeypatch.setenv(jit.VARIABLE, word)
        jit.choice.cache_clear()

    yield set_variable
    jit.choice.cache_clear()
