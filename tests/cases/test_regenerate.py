"""Field faults in regenerated answers and in states of speculated text, under their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data.cache import Cache
from draftsmith.data.dump import DumpConfig, dump
from draftsmith.data.regenerate import RegenerateConfig, Regenerated, regenerate
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.data.runs import supervised_spans
from draftsmith.inference.capture import capture
from draftsmith.inference.config import EngineConfig
from draftsmith.inference.drafters import NgramDrafter
from draftsmith.models.target import Target, TargetConfig, load_tokenizer

ENGINE = EngineConfig(pool_tokens=2048, max_batch=4)


@pytest.fixture(scope="module")
def target(talking_folder: Path) -> Target:
    """In float64, where every schedule gives the same tokens."""
    return Target.load(TargetConfig(source=str(talking_folder), dtype="float64", device="cpu"))


@pytest.fixture(scope="module")
def tokenizer(target: Target) -> PreTrainedTokenizerBase:
    """SmolLM2's."""
    return load_tokenizer(target.folder)


def records(count: int) -> list[dict[str, Any]]:
    """Conversations of two rounds."""
    return [
        {
            "id": f"talk-{n}",
            "conversations": [
                {"from": ("human", "gpt")[turn % 2], "value": f"turn {turn} of talk number {n}"}
                for turn in range(4)
            ],
        }
        for n in range(count)
    ]


def prepared(folder: Path, given: list[Any], target: Target, holdout: int = 2) -> Path:
    """Rows of these conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "talks.json").write_text(json.dumps(given))
    config = RowsConfig(str(folder / "talks.json"), holdout=holdout, max_length=2048)
    prepare(config, load_tokenizer(target.folder), target.fingerprint, folder / "rows")
    return folder / "rows"


def answered(out: Path, rows: Path, target: Target, **settings: Any) -> Regenerated:
    """Regenerated rows."""
    drafter, progress = settings.pop("drafter", None), settings.pop("progress", None)
    config = RegenerateConfig(**{"max_new_tokens": 24, "save_seconds": 0, **settings})
    tokenizer = load_tokenizer(target.folder)
    return regenerate(config, rows, target, ENGINE, tokenizer, out, drafter, progress=progress)


def test_case_05_one_state_per_token_of_speculated_text(tmp_path: Path, target: Target) -> None:
    """Answers made while speculating have a state for each token, of their own row, in place: each
    state's likeliest token is the one that the engine emitted behind it."""
    rows = prepared(tmp_path, records(6), target)
    done = answered(tmp_path / "out", rows, target, drafter=NgramDrafter())
    made = Rows.open(done.folder)
    config = DumpConfig(shard_tokens=256, tokens_per_batch=128)
    cache = Cache.open(dump(config, made, target, tmp_path / "cache").folder)
    assert cache.lengths.tolist() == made.lengths.tolist()
    for index in range(len(made)):
        row = made[index]
        (cached,) = cache.row(index).states.values()
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        states = capture(target, [ids], (target.num_layers,))[target.num_layers]
        torch.testing.assert_close(cached, states.bfloat16(), rtol=0.02, atol=0.02)
        choices = target.logits(target.trunk.norm(states)).argmax(-1)
        behind = torch.from_numpy(np.flatnonzero(row.supervised))
        assert torch.equal(choices[behind - 1], ids[behind])


def test_case_24_generated_ids_are_kept_and_never_rendered_again(
    tmp_path: Path, target: Target, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Text does not give the ids back, so a second rendering would train on a prefix that serving
    never holds; here the prefix of the second answer is the first prompt, the first answer's ids
    and the second question, each as it was."""
    rows = prepared(tmp_path, records(8), target, 0)
    done = answered(tmp_path / "out", rows, target)
    before = {row.id: row for row in Rows.open(rows)}
    rewritten = second = 0
    for row in Rows.open(done.folder):
        spans, found = supervised_spans(row.supervised), supervised_spans(before[row.id].supervised)
        for start, end in spans:
            ids = row.tokens[start:end].tolist()
            again = tokenizer.encode(str(tokenizer.decode(ids)), add_special_tokens=False)
            rewritten += again != ids
        if len(spans) == 2:
            second += 1
            assert np.array_equal(
                row.tokens[: spans[1][0]],
                np.concatenate(
                    [
                        before[row.id].tokens[: found[0][0]],
                        row.tokens[slice(*spans[0])],
                        before[row.id].tokens[found[0][1] : found[1][0]],
                    ]
                ),
            )
    assert rewritten > 0 and second > 0


def test_case_59_resume_is_by_content_and_cut_answers_are_left_out(
    tmp_path: Path, target: Target
) -> None:
    """Stopped half-way, the source shuffled: nothing is answered twice or for another row. An
    answer without its end is counted and left out, and no row is without an answer."""
    talks = records(30)
    rows = prepared(tmp_path / "first", talks, target, 5)
    kept = 0

    def stop(tokens: int, _: int | None) -> None:
        nonlocal kept
        kept = tokens
        if tokens > 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the same command goes on there"):
        answered(tmp_path / "out", rows, target, max_new_tokens=8, progress=stop)
    shuffled = prepared(tmp_path / "second", talks[15:][::-1] + talks[:15], target, 5)
    done = answered(tmp_path / "out", shuffled, target, max_new_tokens=8)
    alone = answered(tmp_path / "alone", shuffled, target, max_new_tokens=8)
    assert 3 < done.resumed < 30 and done.generated < alone.generated
    for name in ("train.parquet", "heldout.parquet", "ledger.json", "manifest.json"):
        assert (done.folder / name).read_bytes() == (alone.folder / name).read_bytes()
    assert done.ledger["answers"]["cut"] > 0
    for split in ("train", "heldout"):
        for row in Rows.open(done.folder, split):
            assert row.supervised.any() and row.tokens[-1] == 2


def test_case_101_the_share_of_on_policy_tokens_is_told(tmp_path: Path, target: Target) -> None:
    """Heads that learn from another's answers accept less, so the ledger says whose they are: all
    supervised tokens of regenerated rows are the target's own, and greedy ones its argmax."""
    rows = prepared(tmp_path, records(6), target)
    done = answered(tmp_path / "out", rows, target)
    tokens = done.ledger["tokens"]
    assert tokens["on_policy"] == tokens["supervised"] > 0
    assert done.manifest["counts"]["on_policy"] == tokens["on_policy"]
    found = json.loads((rows / "ledger.json").read_text())["tokens"]
    assert found.get("on_policy", 0) == 0 < found["supervised"]
