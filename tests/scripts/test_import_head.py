"""`import` on the command line: which target a head from elsewhere is said to belong to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.models.formats import layout
from draftsmith.models.heads import HeadConfig, build_head, load_head, save_head
from draftsmith.models.target import fingerprint
from draftsmith.scripts.cli import main


@pytest.fixture
def make(tiny_llama_folder: Callable[..., Path]) -> Callable[..., Path]:
    """A maker of tiny targets."""
    return tiny_llama_folder


def exported(target: Path, out: Path, marks: dict[str, str]) -> Path:
    """A head for `target` in the DeepSeek-style layout."""
    head = build_head(HeadConfig(), target, 2.0)
    save_head(
        out / "native",
        head,
        target_fingerprint=marks,
        draft_ids=None,
        trained_length=9,
        config={},
        training={"step": 3},
    )
    write, _ = layout("deepseek-mtp")
    write(load_head(out / "native"), target, out / "theirs")
    return out / "theirs"


def imported(folder: Path, target: Path, out: Path) -> int:
    """The exit code."""
    return main(
        [
            "import",
            f"import_head.folder={folder}",
            f"import_head.out={out}",
            f"target.source={target}",
        ]
    )


def test_an_export_keeps_the_fingerprint_it_carries(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    """Other weights of the same shape only warn, and the head still says what it was trained on."""
    target, marks = make(), fingerprint(make())
    other = {**marks, "weights": "of-then"}
    folder = exported(target, tmp_path, other)
    with pytest.warns(UserWarning, match="another weights .of-then"):
        assert imported(folder, target, tmp_path / "out") == 0
    loaded = load_head(tmp_path / "out")
    assert loaded.meta["target_fingerprint"] == other
    assert loaded.meta["trained_length"] == 9 and loaded.meta["training"]["step"] == 3


def test_a_folder_without_a_fingerprint_gets_that_of_the_target(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    """A checkpoint from elsewhere, which fits."""
    target = make()
    folder = exported(target, tmp_path, {})
    (folder / "draftsmith.json").unlink()
    assert imported(folder, target, tmp_path / "out") == 0
    assert load_head(tmp_path / "out").meta["target_fingerprint"] == fingerprint(target)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden_size": 32}, "hidden_size 64, the target 32"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 3, the target 2"),
        ({"vocab_size": 640}, "vocab_size 512, the target 640"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 2, the target 4"),
    ],
)
@pytest.mark.parametrize("noted", [True, False])
def test_a_head_for_another_shape_is_refused(
    make: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shape: dict[str, Any],
    words: str,
    noted: bool,
) -> None:
    """With both values, before anything is written; with a note of its target or without."""
    folder = exported(make(), tmp_path, fingerprint(make()))
    if not noted:
        (folder / "draftsmith.json").unlink()
    assert imported(folder, make(**shape), tmp_path / "out") == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_family_is_refused(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shapes that agree by chance prove no kinship."""
    target = make()
    folder = exported(target, tmp_path, {})
    (folder / "draftsmith.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral"}
    (folder / "config.json").write_text(json.dumps(config))
    assert imported(folder, target, tmp_path / "out") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "model_type 'mistral', the target 'llama'" in told
    assert not (tmp_path / "out").exists()


def test_a_head_for_another_tokenizer_is_refused(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ids mean other tokens; nothing is written."""
    target = make()
    folder = exported(target, tmp_path, {**fingerprint(target), "tokenizer": "of-another"})
    assert imported(folder, target, tmp_path / "out") == 2
    assert "another tokenizer (of-another)" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
