"""Known faults of tokenizers and reduced vocabularies, each under its number."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.data.backend import byte_token_ids
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.data.vocabulary import DraftVocabulary, draft_vocabulary
from draftsmith.models.heads import HeadConfig, build_head, load_head, save_head
from draftsmith.models.target import eos_ids, fingerprint

V = 49152
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Written:
    """Supervised tokens from a list."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def supervised_tokens(self) -> Iterator[np.ndarray]:
        """In two pieces, as rows and caches give them."""
        half = len(self.tokens) // 2
        yield np.array(self.tokens[:half], np.int32)
        yield np.array(self.tokens[half:], np.int32)


@pytest.fixture
def rows(tmp_path: Path, smollm2_tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Twelve rows whose answers use words unevenly."""
    words = "the quick brown fox jumps over a lazy dog".split()
    records = [
        {
            "conversations": [
                {"from": "human", "value": f"question {n}"},
                {"from": "gpt", "value": " ".join(words[: 2 + n % 8])},
            ]
        }
        for n in range(12)
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(records))
    marks = {"tokenizer": "t", "chat_template": "c"}
    config = RowsConfig(str(path), holdout=0, max_length=128)
    return Rows.open(prepare(config, smollm2_tokenizer, marks, tmp_path / "rows").folder)


def test_case_38_ids_and_coverage(rows: Rows) -> None:
    """A reduced vocabulary without a map means ids 0 to N-1, and its loss looks fine. Right: the
    ids are those that the assistant writes most, ties by id, and the share that they express of
    any rows is told.
    """
    counts = Counter(t for row in rows for t in row.tokens[row.supervised].tolist())
    expected = sorted(counts, key=lambda token: (-counts[token], token))[:6]
    vocabulary = draft_vocabulary(rows, 6, {2}, V)
    assert vocabulary.ids.tolist() == sorted(expected)
    assert 2 in expected
    share = sum(counts[token] for token in expected) / sum(counts.values())
    assert vocabulary.coverage == pytest.approx(share, abs=1e-12)
    assert 0 < share < 1
    assert vocabulary.coverage_of(rows) == pytest.approx(share, abs=1e-12)
    held_out = Written(*expected[:3], 49000)
    assert vocabulary.coverage_of(held_out) == pytest.approx(0.75)
    assert math.isnan(vocabulary.coverage_of(Written()))
    with pytest.raises(ValueError, match="token 49152 lies beyond the vocabulary of 49152"):
        vocabulary.coverage_of(Written(49152))


def test_case_39_maps_are_offsets(rows: Rows) -> None:
    """Absolute ids read as offsets turn id i into 2i. Right: i + d2t[i] ascends strictly inside the
    vocabulary, and t2d marks that very set.
    """
    vocabulary = draft_vocabulary(rows, 100, {2}, V)
    ids = torch.arange(100) + vocabulary.d2t
    assert torch.equal(ids, vocabulary.ids)
    assert (ids.diff() > 0).all()
    assert vocabulary.t2d.shape == (V,)
    assert torch.equal(vocabulary.t2d.nonzero()[:, 0], ids)
    again = DraftVocabulary.from_offsets(vocabulary.d2t, V)
    assert torch.equal(again.ids, vocabulary.ids)
    assert math.isnan(again.coverage)


def test_case_40_a_head_folder_holds_its_map(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A map in a side file is lost when the weights are copied. Right: weights and configuration
    alone bring the ids along.
    """
    folder = tiny_llama_folder()
    ids = draft_vocabulary(Written(7, 7, 300, 5), 3, {2}, 512).ids
    head = build_head(HeadConfig(), folder, 1.0, AutoConfig.from_pretrained(folder))
    save_head(
        tmp_path / "head",
        head,
        target_fingerprint=fingerprint(folder),
        draft_ids=ids,
        trained_length=8,
        config={},
    )
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in ("head.safetensors", "config.json"):
        shutil.copy(tmp_path / "head" / name, copied / name)
    found = load_head(copied).draft_ids
    assert found is not None
    assert found.tolist() == ids.tolist() == [2, 5, 7]


def test_case_41_full_vocabulary(rows: Rows) -> None:
    """A map of zeros looks broken and is the identity. Right: so it is read; absolute ids in its
    place are refused.
    """
    vocabulary = draft_vocabulary(rows, V, {2}, V)
    assert not vocabulary.d2t.any()
    assert vocabulary.t2d.all()
    assert vocabulary.coverage == 1.0
    with pytest.raises(ValueError, match="offsets .* were perhaps taken for ids"):
        DraftVocabulary.from_offsets(torch.arange(V), V)


def test_case_42_padded_embedding() -> None:
    """A vocabulary as wide as the padded embedding is not a reduced one: it is the identity, and
    one row less is reduced.
    """
    written = Written(1, 1, 4, 2)
    assert not draft_vocabulary(written, 512, {2}, 512).d2t.any()
    assert draft_vocabulary(written, 511, {2}, 512).t2d.sum() == 511


def test_case_43_padding_rows_come_last() -> None:
    """Rows of the embedding that no token has must not be drafted. Right: nobody writes them, and
    among unwritten ids the smallest come first, so padding at the end is the last to be taken.
    """
    vocabulary = draft_vocabulary(Written(499, 499, 3), 500, {2}, 512)
    assert vocabulary.ids.tolist() == list(range(500))


def test_case_45_permuted_ids(
    rows: Rows,
    smollm2_folder: Path,
    tiny_llama_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """A tokenizer with permuted ids gives garbage and no error. Right: its fingerprint differs, and
    rows made with the other one are refused.
    """
    folders = []
    for name in ("same", "permuted"):
        folder = tmp_path / name
        shutil.copytree(tiny_llama_folder(num_hidden_layers=1), folder)
        for file in TOKENIZER_FILES:
            shutil.copy(smollm2_folder / file, folder / file)
        folders.append(folder)
    path = folders[1] / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[1000:1002]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    same, permuted = map(fingerprint, folders)
    assert same["tokenizer"] != permuted["tokenizer"]
    rows.manifest["tokenizer"] = same
    rows.require_tokenizer(same)
    with pytest.raises(ValueError, match="tokenizer of the rows is .*run prepare with this target"):
        rows.require_tokenizer(permuted)


def test_case_48_stop_ids_of_every_source(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Stop ids that stand in generation_config alone are ignored. Right: the union of the sources,
    and all of them inside a reduced vocabulary although nobody wrote them.
    """
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama_folder(), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0, 400]}))
    stops = eos_ids(folder, AutoConfig.from_pretrained(folder))
    assert stops == {0, 2, 400}
    assert {0, 2, 400} < set(draft_vocabulary(Written(7, 7, 9), 4, stops, 512).ids.tolist())


def test_every_byte_can_be_drafted(rows: Rows, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    """The single-byte tokens of a byte-level BPE, and the <0x..> of a SentencePiece vocabulary, are
    found, and are inside whatever the rows hold.
    """
    bytes_ = byte_token_ids(smollm2_tokenizer)
    assert len(bytes_) == 235  # this vocabulary has no token for 21 bytes that UTF-8 hardly uses
    assert smollm2_tokenizer.convert_tokens_to_ids("A") in bytes_
    vocabulary = draft_vocabulary(rows, 300, {2} | bytes_, V)
    assert bytes_ | {2} < set(vocabulary.ids.tolist())
    with pytest.raises(ValueError, match="size 200: must lie between 236 .*those of single bytes"):
        draft_vocabulary(rows, 200, {2} | bytes_, V)
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -1.0) for byte in range(256)), ("a", -1.0)]
    unigram = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=unigram)
    assert byte_token_ids(wrapped) == set(range(1, 257))
    words = Tokenizer(models.WordLevel({"a": 0}, "a"))
    assert byte_token_ids(PreTrainedTokenizerFast(tokenizer_object=words)) == set()
