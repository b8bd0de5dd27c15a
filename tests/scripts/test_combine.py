"""`combine` on the command line: training and held-out caches together, refusals in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.data.cache import Cache
from draftsmith.data.cache_writer import CacheWriter
from draftsmith.data.rowfile import token_hash
from draftsmith.data.shards import ShardRows, mask_hash
from draftsmith.data.store import Store
from draftsmith.scripts.cli import main


def write(folder: Path, split: str, first: int) -> None:
    """A cache of one row of four tokens, which begin with `first`."""
    tokens = torch.arange(first, first + 4, dtype=torch.int32)
    mask = torch.tensor([0, 0, 1, 1], dtype=torch.uint8)
    digest = token_hash(tokens.numpy())
    content = ShardRows(
        (0,), (f"id-{first}",), (4,), (digest,), (mask_hash(mask.numpy()),), (2,), ([2],), ()
    )
    about = {"engine": "e", "target": {"weights": "w"}, "target_dtype": "bfloat16", "dtype": "bf16"}
    about |= {"rows_key": f"rows-{first}", "split": split, "num_layers": 1, "probes": {}}
    about["identity"] = {}
    states = torch.full((4, 8), float(first)).to(torch.bfloat16)
    with CacheWriter(Store(folder), [f"key-{first}"], (1,), 8) as writer:
        writer.submit(0, content, {"tokens": tokens, "supervised": mask, "boundary_1": states})
        writer.finish(f"key-of-{first}", about)


def test_combine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both splits are combined; the next command names the folder."""
    for name, first in (("a", 10), ("b", 20)):
        write(tmp_path / name, "train", first)
        write(tmp_path / f"{name}-heldout", "heldout", first + 5)
    caches = f"combine.caches=[{tmp_path}/a,{tmp_path}/b]"
    assert main(["combine", caches, f"combine.out={tmp_path}/both"]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "both: 2 rows, 8 tokens in 2 shards of 2 caches; left out: none" in out
    assert f"draftsmith train data.dump.folder={tmp_path}/both" in out
    assert Cache.open(tmp_path / "both").ids == ["id-10", "id-20"]
    assert Cache.open(tmp_path / "both-heldout").ids == ["id-15", "id-25"]
    assert (tmp_path / "both" / "provenance.json").exists()


def test_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the rows of the first part, and does not overwrite what `train` finds."""
    write(tmp_path / "a" / "cache", "train", 10)
    (tmp_path / "a" / "rows").mkdir()
    (tmp_path / "a" / "rows" / "manifest.json").write_text("{}")
    out = tmp_path / "both"
    words = [f"combine.caches=[{tmp_path}/a/cache]", f"combine.out={out}", "overwrite=true"]
    assert main(["combine", *words, "train.lr=1e-4"]) == 0
    told = capsys.readouterr().out.replace("\n", " ")
    assert f"draftsmith train train.lr=1e-4 inputs={tmp_path}/a data.dump.folder={out}" in told
    assert "overwrite" not in told


def test_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache of the wrong split is no part of it."""
    write(tmp_path / "a", "train", 1)
    write(tmp_path / "b", "heldout", 2)
    caches = f"combine.caches=[{tmp_path}/a,{tmp_path}/b]"
    assert main(["combine", caches, f"combine.out={tmp_path}/both"]) == 2
    assert "its split is 'heldout', that of" in capsys.readouterr().err
