"""Rendered text with its answers -> token ids and an exact mask.

A text is tokenised once, whole. An answer is marked where its borders are borders of tokens, its
last token is a special one, and its prompt has the same ids when it is tokenised alone, as it is in
serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from .backend import plain_backend, special_texts
from .spans import Answer

_KNOWN_TAILS = 1024
_BATCH_CHARS = 2_000_000


@dataclass(frozen=True)
class Part:
    """Token ids of one stable prefix and, of the same length, whether the assistant wrote each
    one.
    """

    tokens: list[int]
    supervised: list[bool]


@dataclass
class Layout:
    """The text of a part and its answers, each with its turn's number. A `raw` text has no turns:
    all of it is supervised but the first token.
    """

    text: str
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    raw: bool = False


class Marker:
    """Tokenises and marks layouts with one fast tokenizer, adding, cutting and padding nothing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = plain_backend(tokenizer)
        self._special_ids = {
            self._backend.token_to_id(text) for text in special_texts(tokenizer)
        } - {None}
        self._tails: dict[str, list[int]] = {}
        self._opening: list[int] | None = None
        self._tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def mark(self, layouts: Sequence[Layout]) -> Iterator[tuple[Part, list[tuple[int, str]]]]:
        """For each layout its part, and (turn, why) of the answers that could not be marked."""
        for layout, encoding in zip(layouts, self._encode(layouts), strict=True):
            if layout.raw:
                opening = self._before_raw()
                opened = encoding.ids[: len(opening)] == opening
                tokens = encoding.ids if opened else [*opening, *encoding.ids]
                yield Part(tokens, [place > 0 for place in range(len(tokens))]), []
                continue
            tokens = encoding.ids
            part, unproven = Part(tokens, [False] * len(tokens)), []
            for place, answer in layout.answers:
                borders = self._borders(encoding, tokens, layout.text, answer)
                if isinstance(borders, str):
                    unproven.append((place, borders))
                else:
                    first, end = borders
                    part.supervised[first:end] = [True] * (end - first)
            yield part, unproven

    def _encode(self, layouts: Sequence[Layout]) -> Iterator[Encoding]:
        """Encodings in order. What is held at once is bounded by characters, since an encoding
        takes a hundred times the memory of its ids.
        """
        texts = [layout.text for layout in layouts]
        begin = 0
        while begin < len(texts):
            end, chars = begin + 1, len(texts[begin])
            while end < len(texts) and chars + len(texts[end]) <= _BATCH_CHARS:
                chars += len(texts[end])
                end += 1
            yield from self._backend.encode_batch(texts[begin:end], add_special_tokens=False)
            begin = end

    def _borders(
        self, encoding: Encoding, tokens: list[int], text: str, answer: Answer
    ) -> tuple[int, int] | str:
        """Tokens [first, end) of an answer, or why they cannot be told. A special token may have
        swallowed the white space behind it; it is the answer's last all the same.
        """
        first = encoding.char_to_token(answer.start)
        last = encoding.char_to_token(answer.end - 1)
        begins = None if first is None else encoding.token_to_chars(first)
        if first is None or last is None or begins is None or begins[0] != answer.start:
            return "unproven_token_across_border"
        if tokens[last] not in self._special_ids:
            return "unproven_no_end_of_turn"
        if not self._served(encoding, tokens, text, first, answer.start):
            return "unproven_prompt_ids"
        return first, last + 1

    def _served(
        self, encoding: Encoding, tokens: list[int], text: str, first: int, start: int
    ) -> bool:
        """Whether the prompt, tokenised without the answer, has the ids that stand before it here.
        Special tokens part a text for good, so what follows the last of them is enough.
        """
        begin = first
        while begin:
            begin -= 1
            if tokens[begin] in self._special_ids:
                break
        chars = encoding.token_to_chars(begin) if begin else (0, 0)
        assert chars is not None
        tail = text[chars[0] : start]
        ids = self._tails.get(tail)
        if ids is None:
            ids = self.ids(tail)
            if len(self._tails) < _KNOWN_TAILS and len(tail) < 256:
                self._tails[tail] = ids
        return ids == tokens[begin:first]

    def _before_raw(self) -> list[int]:
        """The token that the tokenizer puts before every text, where it does: serving a plain text
        puts it there too.
        """
        if self._opening is None:
            given = list(self._tokenizer("")["input_ids"])  # pyright: ignore[reportArgumentType]
            self._opening = [id for id in given[:1] if id == self._tokenizer.bos_token_id]
        return self._opening
