"""`export` and `import` of EAGLE heads on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.conf.compose import composed, to_config
from draftsmith.models.formats import layout
from draftsmith.models.heads import HeadConfig, NormConfig, build_head, load_head, save_head
from draftsmith.models.target import fingerprint
from draftsmith.scripts.cli import main


def native(target: Path, out: Path, config: HeadConfig) -> Path:
    """A head for `target`, of which an eagle3 one drafts 40 ids."""
    ids = torch.arange(40) * 3 + 1 if config.kind == "eagle3" else None
    head = build_head(config, target, 2.0, draft_ids=ids)
    save_head(
        out,
        head,
        target_fingerprint=fingerprint(target),
        draft_ids=ids,
        trained_length=9,
        config={},
    )
    return out


def test_several_layouts_at_once_and_back(
    tiny_llama_folder: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each in its folder, read back by logits, every tensor's origin told; the layout is found and
    the head comes back bit for bit."""
    target = tiny_llama_folder(num_hidden_layers=8, hidden_size=32)
    head = native(target, tmp_path / "head", HeadConfig("eagle3"))
    words = [f"target.source={target}", f"work={tmp_path}"]
    layouts = "export.layout=[vllm,sglang-eagle3]"  # the former is vllm-eagle3 for such a head
    assert main(["export", f"export.head={head}", layouts, *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for name in ("vllm-eagle3", "sglang-eagle3"):
        folder = tmp_path / "export" / name
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert (folder / "provenance.json").exists()
        assert (
            f"{name}: read back, weights bit for bit, logits of 3 steps differ by at most 0" in told
        )
    assert "d2t 40 int64 map" in told and "lm_head.weight 40×32 float32 trained" in told
    assert "runs in SGLang 0.5.23 as LlamaForCausalLMEagle3" in told
    out = tmp_path / "back"
    source = f"import_head.folder={tmp_path}/export/sglang-eagle3"
    assert main(["import", source, f"import_head.out={out}", *words]) == 0
    assert "layout: sglang-eagle3" in capsys.readouterr().out
    ours, theirs = load_head(head), load_head(out)
    for name, value in ours.head.state_dict().items():
        assert torch.equal(theirs.head.state_dict()[name], value)
    assert theirs.draft_ids is not None and ours.draft_ids is not None
    assert torch.equal(theirs.draft_ids, ours.draft_ids)
    assert theirs.meta["training"]["imported_from"] == "sglang-eagle3"


def test_a_head_that_no_class_runs_is_refused(
    tiny_llama_folder: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, the reason, nothing written."""
    target = tiny_llama_folder(num_hidden_layers=8, hidden_size=32)
    head = native(target, tmp_path / "head", HeadConfig("eagle"))
    words = [f"target.source={target}", f"work={tmp_path}", f"export.head={head}"]
    assert main(["export", "export.layout=vllm-eagle", *words]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "EagleMistralForCausalLM: attention_input, output" in told
    assert not (tmp_path / "export").exists()


def test_layouts_are_one_or_a_list() -> None:
    """And never none."""
    assert to_config(composed(["export.layout=eagle"])).export.layouts == ("eagle",)
    several = to_config(composed(["export.layout=[eagle,vllm-eagle]"])).export
    assert several.layouts == ("eagle", "vllm-eagle")
    with pytest.raises(ValueError, match="name a layout, or a list of them"):
        to_config(composed(["export.layout=[]"]))


def test_a_folder_from_elsewhere_runs_as_it_lies(
    talking_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`generate` and `evaluate` take a foreign folder where they take a native one."""
    monkeypatch.chdir(tmp_path)
    bare = HeadConfig("eagle", norms=NormConfig(False, False, False, False))
    write, _ = layout("vllm-eagle")
    made = native(talking_folder, tmp_path / "head", bare)
    write(load_head(made), talking_folder, tmp_path / "theirs")
    words = [f"target.source={talking_folder}", "generate.prompt=why", "generate.max_new_tokens=6"]
    assert main(["generate", "engine.pool_tokens=512", "generate.head=theirs", *words]) == 0
    told = capsys.readouterr().out
    assert "the head is read from the layout vllm-eagle" in told
    assert "tokens per target call" in " ".join(told.split())
    asked = json.dumps({"prompt": "Name a river and a town in France."})
    (tmp_path / "asked.jsonl").write_text(asked)
    words = [
        f"target.source={talking_folder}",
        "engine.pool_tokens=512",
        "evaluate.head=theirs",
        "evaluate.prompts=[./asked.jsonl]",
        "evaluate.drafters=[head]",
        "evaluate.draft_tokens=[1]",
        "evaluate.limit=1",
        "evaluate.max_new_tokens=6",
    ]
    with pytest.warns(UserWarning, match="the head was trained on 9 at most"):
        assert main(["evaluate", "work=w", *words]) == 0
    runs = json.loads(Path("w/report.json").read_text())["runs"]
    assert any(run["drafter"] == "eagle" and run["num_draft_tokens"] for run in runs)
