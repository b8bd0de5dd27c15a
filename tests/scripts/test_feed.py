"""Training reads the cache of its own split, over its own rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.conf.compose import composed, to_config
from draftsmith.conf.schema import Config
from draftsmith.data.cache_writer import CacheWriter
from draftsmith.data.rows import Rows, RowsConfig, prepare
from draftsmith.data.runs import supervised_runs
from draftsmith.data.shards import ShardRows, mask_hash
from draftsmith.data.store import Store
from draftsmith.scripts.feed import CacheFeed

MARKS = {"tokenizer": "t", "chat_template": "c"}


def write(rows: Rows, out: Path) -> None:
    """A cache of the first row with states of ones, at boundary 1."""
    row = rows[0]
    mask, size = row.supervised, len(row.tokens)
    marks = ((row.sha256,), (mask_hash(mask),), (int(mask.sum()),), (supervised_runs(mask),))
    content = ShardRows((0,), (row.id,), (size,), *marks, ())
    about = {"engine": "e", "target": MARKS, "target_dtype": "bfloat16", "dtype": "bf16"}
    about |= {"rows_key": rows.key, "split": rows.split, "num_layers": 1, "probes": {}}
    tensors = {
        "tokens": torch.from_numpy(row.tokens.copy()),
        "supervised": torch.from_numpy(mask.copy()).to(torch.uint8),
        "boundary_1": torch.ones(size, 8, dtype=torch.bfloat16),
    }
    with CacheWriter(Store(out), ["key"], (1,), 8) as writer:
        writer.submit(0, content, tensors)
        writer.finish("whole", {**about, "identity": {}})


@pytest.fixture
def config(smollm2_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Config:
    """A work folder with rows and caches of both splits."""
    source = tmp_path / "chats.json"
    texts = [("user", "Name a river."), ("assistant", "The river Seine, in France.")]
    chats = [
        {"messages": [{"role": role, "content": f"{text} {number}"} for role, text in texts]}
        for number in range(6)
    ]
    source.write_text(json.dumps(chats))
    rows = RowsConfig(str(source), holdout=2, max_length=256)
    prepare(rows, smollm2_tokenizer, MARKS, tmp_path / "rows")
    write(Rows.open(tmp_path / "rows"), tmp_path / "cache")
    write(Rows.open(tmp_path / "rows", "heldout"), tmp_path / "cache-heldout")
    return to_config(composed([f"work={tmp_path}"]))


def feed(config: Config) -> CacheFeed:
    return CacheFeed(config, Rows.open(Path(config.work) / "rows"), MARKS, (1,))


def test_each_split_has_its_cache(config: Config) -> None:
    """Rows of the one are never learnt from as those of the other."""
    read = feed(config)
    held = read.heldout()
    assert len(read.train().lengths) == 1 and held is not None and len(held.lengths) == 1
    swapped = replace(config.data.dump, folder=f"{config.work}/cache-heldout")
    with pytest.raises(ValueError, match="split of the cache is 'heldout', .* asks for 'train'"):
        feed(replace(config, data=replace(config.data, dump=swapped)))
    write(Rows.open(Path(config.work) / "rows"), Path(config.work) / "cache-heldout")
    with pytest.raises(ValueError, match="split of the cache is 'train', .* asks for 'heldout'"):
        feed(config).heldout()
