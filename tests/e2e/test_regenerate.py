"""`regenerate` on the real small model and real conversations, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftsmith.data.rows import Rows
from draftsmith.data.runs import supervised_spans
from draftsmith.scripts.cli import main

pytestmark = pytest.mark.e2e


def test_the_real_model_answers_and_its_answers_are_dumped(
    smollm2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Four rows of ShareGPT: every id outside the answers is the prepared one, the shares are told,
    a second call finds the rows, and dump reads them where data.answers says so."""
    settings = [
        f"work={tmp_path}",
        f"target.folder={smollm2_folder}",
        "target.dtype=float32",
        "data.rows.max_records=8",
        "data.rows.max_length=128",
        "data.rows.holdout=1",
        "regenerate.max_rows=3",
        "regenerate.max_new_tokens=8",
        "regenerate.cut_answers=keep",
        "regenerate.drafter=ngram",
    ]
    assert main(["prepare", *settings]) == 0
    assert main(["regenerate", *settings]) == 0
    said = capsys.readouterr().out
    assert "of those by the target itself (100.0%)" in said
    assert "next: draftsmith dump" in said and "data.answers=regenerated" in said
    before = {row.index: row for row in Rows.open(tmp_path / "rows")}
    after = Rows.open(tmp_path / "rows-regenerated", verify=True)
    assert len(after) >= 2 and len(Rows.open(after.folder, "heldout")) == 1
    for row in after:
        first, _ = supervised_spans(row.supervised)[0]
        assert np.array_equal(row.tokens[:first], before[row.index].tokens[:first])
        assert 1 <= int(row.supervised[first:].sum()) <= 8 * len(supervised_spans(row.supervised))
    assert main(["regenerate", *settings]) == 0
    assert "reused: rows-regenerated" in capsys.readouterr().out
    assert main(["dump", *settings, "data.answers=regenerated"]) == 0
    manifest = json.loads((tmp_path / "cache-regenerated" / "manifest.json").read_text())
    assert manifest["rows_key"] == after.key
    assert (tmp_path / "cache-regenerated-heldout" / "manifest.json").exists()
    assert not (tmp_path / "cache").exists()
