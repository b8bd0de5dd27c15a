"""What is asked of a tokenizer beside ids: its control tokens, byte tokens and plain offsets."""

from __future__ import annotations

import json

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase


def special_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Every text that becomes a control token when it stands in the input."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {text for text in added | set(tokenizer.all_special_tokens) if text}


def byte_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that write a single byte, from which any text can be put together: the tokens
    <0x00> to <0xFF> of a SentencePiece vocabulary, or the one-byte tokens of a byte-level BPE.
    Bytes that the vocabulary lacks are left out; a tokenizer without either has none.
    """
    backend = _backend(tokenizer)
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if all(backend.token_to_id(name) is None for name in names):
        parts = json.loads(backend.to_str())
        kinds = json.dumps([parts.get("pre_tokenizer"), parts.get("decoder")])
        names = ByteLevel.alphabet() if '"ByteLevel"' in kinds else []
    found = (backend.token_to_id(name) for name in names)
    return frozenset(id for id in found if id is not None)


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the fast tokenizer that adds, cuts and pads nothing, and whose offsets are
    untrimmed.

    The post-processor is left out: without special tokens it changes no id, only (ByteLevel) the
    offsets.
    """
    backend = Tokenizer.from_str(_backend(tokenizer).to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    found: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if found is None:
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} gives no character offsets; convert it to a "
            "fast one (tokenizer.json)"
        )
    return found
