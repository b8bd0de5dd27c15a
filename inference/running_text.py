"""A request's text while its tokens come in, and where a stop string ends it.

A character may lie across several tokens, a stop string as well. Text is decoded piece by piece,
each with the piece before it as context, and a piece is settled when it ends in a whole character;
what no later token can change may be shown.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
"""What an incomplete character decodes to."""


class RunningText:
    """The text of a growing list of tokens; special tokens are left out.

    Args:
        tokenizer: the target's. stop: strings that end the text, each not empty.
    Attributes:
        closed: whether the text is whole: a stop string was met, or `close` was called.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.closed = False
        self._settled = ""
        self._pending = ""
        self._tokens: list[int] = []
        # Tokens before `context` are settled; those up to `read` too, but they are decoded again
        # with what follows, for how a token is written depends on the one before it.
        self._context, self._read = 0, 0

    @property
    def text(self) -> str:
        """Everything decoded so far, cut before a stop string; a last character that is not whole
        yet is left out."""
        return self._settled + self._pending.rstrip(BROKEN)

    @property
    def shown(self) -> str:
        """The part of `text` that no later token changes: without what may begin a stop string."""
        text = self.text
        if self.closed:
            return text
        held = max(
            (
                size
                for stop in self.stop
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
        return text[: len(text) - held]

    def add(self, token: int) -> bool:
        """Take in the next token; whether it completes a stop string."""
        assert not self.closed
        searched = len(self.text)
        self._tokens.append(token)
        before = self._decode(self._context, self._read)
        now = self._decode(self._context, len(self._tokens))
        self._pending = now[len(before) :]
        if self._pending and not self._pending.endswith(BROKEN):
            self._settled += self._pending
            self._pending = ""
            self._context, self._read = self._read, len(self._tokens)
        text = self.text
        found = [text.find(stop, max(0, searched - len(stop) + 1)) for stop in self.stop]
        places = [place for place in found if place >= 0]
        if places:
            self._settled, self._pending = text[: min(places)], ""
            self.closed = True
        return self.closed

    def close(self) -> None:
        """No token follows: a character that stayed incomplete is written as U+FFFD."""
        self._settled, self._pending = self._settled + self._pending, ""
        self.closed = True

    def _decode(self, first: int, end: int) -> str:
        text = self.tokenizer.decode(
            self._tokens[first:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
