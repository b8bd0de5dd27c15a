"""The target through our attention equals transformers' own model; boundaries, trunk and
fingerprint are exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.inference.capture import capture
from draftsmith.inference.config import EngineConfig
from draftsmith.inference.engine import Engine
from draftsmith.models.attention import PackedContext
from draftsmith.models.norm import use_own_norms
from draftsmith.models.target import Target, TargetConfig, fingerprint
from draftsmith.models.trunk import Trunk

ROWS = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 9, 40)]


def load(folder: Path, dtype: str = "float64", layers: str = "auto") -> Target:
    """A target on the CPU."""
    return Target.load(TargetConfig(source=str(folder), dtype=dtype, device="cpu", layers=layers))


@pytest.mark.parametrize("layers", ["lean", "transformers"])
def test_every_boundary_of_packed_rows_equals_transformers(
    tiny_llama_folder: Callable[..., Path], layers: str
):
    """Ragged rows packed together, boundaries 0..L and logits, float64, against one plain pass per
    row."""
    folder = tiny_llama_folder()
    target = load(folder, layers=layers)
    states = capture(target, ROWS, (0, 1, 2, 3))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    use_own_norms(plain)
    start = 0
    for row in ROWS:
        caught: dict[int, torch.Tensor] = {}
        hook = plain.model.norm.register_forward_pre_hook(
            lambda module, args, into=caught: into.__setitem__(3, args[0][0])
        )
        with torch.no_grad():
            out = plain(row[None], output_hidden_states=True)
        hook.remove()
        caught |= {k: out.hidden_states[k][0] for k in range(3)}
        rows = slice(start, start + len(row))
        for boundary in range(4):
            torch.testing.assert_close(
                states[boundary][rows], caught[boundary], rtol=1e-6, atol=1e-6
            )
        logits = target.logits(target.trunk.norm(states[3][rows]))
        torch.testing.assert_close(logits, out.logits[0], rtol=1e-5, atol=1e-5)
        start += len(row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lean_layers_equal_the_library_within_the_dtype(
    tiny_llama_folder: Callable[..., Path], dtype: str
):
    """The fused form rounds differently but not more."""
    folder = tiny_llama_folder()
    exact = capture(load(folder), ROWS, (3,))[3]
    scale = float(exact.abs().max())
    errors = {
        layers: float(
            (capture(load(folder, dtype, layers), ROWS, (3,))[3].double() - exact).abs().max()
        )
        for layers in ("lean", "transformers")
    }
    assert errors["lean"] <= 2 * errors["transformers"] + 1e-6 * scale


def test_a_boundary_outside_the_target_is_refused(tiny_llama_folder: Callable[..., Path]):
    """Boundaries are 0..L; the message says so."""
    for layers in ("lean", "transformers"):
        with pytest.raises(ValueError, match="boundaries 0 to 3"):
            capture(load(tiny_llama_folder(), layers=layers), ROWS, (4,))


def test_a_row_without_tokens_is_refused(tiny_llama_folder: Callable[..., Path]):
    """An empty row would shift every row behind it."""
    with pytest.raises(ValueError, match="every row needs a token"):
        capture(load(tiny_llama_folder()), [ROWS[0], torch.tensor([], dtype=torch.int64)], (3,))


def test_smollm2_from_gguf_answers_like_a_model(smollm2_folder: Path, smollm2_tokenizer):
    """The converted weights (q and k rows put back in order) continue real text sensibly, at
    boundary L + norm."""
    target = load(smollm2_folder, "float32")
    ids = torch.tensor(
        smollm2_tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    )
    raw = capture(target, [ids], (30,))[30]
    best = int(target.logits(target.trunk.norm(raw))[-1].argmax())
    assert smollm2_tokenizer.decode([best]).strip() == "Paris"
    assert target.trunk.tied and target.eos_ids == {2}


def test_trunk_reads_three_tensors_of_a_sharded_checkpoint(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
):
    """Embedding, norm and lm_head are found through the index although the layers' shard is
    unreadable."""
    folder = tmp_path / "sharded"
    shutil.copytree(tiny_llama_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    trunk_names = [name for name in tensors if "layers" not in name]
    (folder / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in trunk_names}, folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(b"not read")
    weight_map = {n: "a.safetensors" if n in trunk_names else "b.safetensors" for n in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    trunk = Trunk.load(folder, torch.float32)
    assert torch.equal(trunk.lm_head, tensors["lm_head.weight"]) and not trunk.tied
    ids = torch.tensor([5, 7])
    assert torch.equal(trunk.embed(ids), tensors["model.embed_tokens.weight"][ids])
    normed = trunk.norm(torch.randn(2, 64))
    assert torch.allclose(trunk.logits(normed, ids), trunk.logits(normed)[:, ids])


def test_case_37_an_untied_target_without_lm_head_is_refused(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
):
    """Never a fresh random head."""
    folder = tmp_path / "headless"
    shutil.copytree(tiny_llama_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor 'lm_head.weight'"):
        Trunk.load(folder, torch.float32)


def test_missing_weights_name_the_file(tiny_llama_folder: Callable[..., Path], tmp_path: Path):
    """A folder without weights, a cut file, an index that names what is not there."""
    folder = tmp_path / "broken"
    shutil.copytree(tiny_llama_folder(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        Trunk.load(folder, torch.float32)
    weights.unlink()
    with pytest.raises(ValueError, match="holds no"):
        Trunk.load(folder, torch.float32)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"x": "gone.safetensors"}}'
    )
    with pytest.raises(ValueError, match="gone.safetensors"):
        Trunk.load(folder, torch.float32)


def test_fingerprint_follows_content(
    tiny_llama_folder: Callable[..., Path], smollm2_folder: Path, tmp_path: Path
):
    """Template, tokenizer, config and weights each change their own entry and no other."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama_folder(), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / name, folder / name)
    before = fingerprint(folder)

    def changed() -> set[str]:
        now = fingerprint(folder)
        return {key for key in before if now[key] != before[key]}

    template = folder / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text + " ")
    assert changed() == {"chat_template"}
    template.write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert changed() == {"config"}
    (folder / "config.json").write_text(json.dumps(config))
    assert changed() == set()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert changed() == {"weights"}


def test_the_target_is_frozen_and_needs_the_context(tiny_llama_folder: Callable[..., Path]):
    """No parameter asks for a gradient; without a context the attention refuses."""
    target = load(tiny_llama_folder(), layers="transformers")
    decoder = target.stack.decoder  # pyright: ignore[reportAttributeAccessIssue]
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    with pytest.raises(ValueError, match="attention context"):
        decoder(torch.tensor([[1, 2]]), use_cache=False)


def test_packed_context_keeps_rows_apart(tiny_llama_folder: Callable[..., Path]):
    """A row's states do not depend on its neighbours in the pack."""
    target = load(tiny_llama_folder())
    tokens, positions = torch.cat(ROWS[1:]), torch.cat([torch.arange(9), torch.arange(40)])
    packed = target.forward(tokens, positions, PackedContext([0, 9, 49]))[3]
    alone = target.forward(ROWS[2], torch.arange(40), PackedContext([0, 40]))[3]
    torch.testing.assert_close(packed[9:], alone, rtol=0, atol=1e-10)


def test_layers_spread_over_memory_and_disk(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Too little memory for the layers: accelerate brings them from disk, the states are the same
    to the bit, and the engine, which could not share pages, refuses."""
    folder = tiny_llama_folder(num_hidden_layers=6)
    one = load(folder, "float32", "transformers")
    config = TargetConfig(
        source=str(folder),
        dtype="float32",
        device="cpu",
        folder=str(tmp_path),
        spread=True,
        max_memory={"cpu": "300KB"},
    )
    two = Target.load(config)
    assert any(p.device.type == "meta" for p in two.stack.decoder.parameters())  # type: ignore[attr-defined]
    tokens, positions = torch.arange(3, 40), torch.arange(37)
    context = PackedContext([0, 20, 37])
    states = [target.forward(tokens, positions, context, (1, 3)) for target in (one, two)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in (1, 3, 6))
    with pytest.raises(ValueError, match="spread over several places.*one device"):
        Engine(two, EngineConfig())


def test_what_cannot_be_spread(tiny_llama_folder: Callable[..., Path]) -> None:
    """Lean layers and float64; a limit without the setting is told of."""
    source = str(tiny_llama_folder())
    for dtype, layers in (("float64", "auto"), ("float32", "lean")):
        with pytest.raises(ValueError, match=r"target\.spread=true with .*transformers' own"):
            Target.load(TargetConfig(source, dtype, "cpu", layers=layers, spread=True))
    with pytest.warns(UserWarning, match="max_memory has no effect without target.spread"):
        TargetConfig(source=source, max_memory={"cpu": "1GB"})


def test_case_118_code_in_a_model_folder_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Remote model code calls what newer libraries removed. Right: families that transformers has;
    else its version and the remedy are told, nothing is asked and nothing is run."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "older", "auto_map": {"AutoConfig": "older.Config"}}'
    )
    (tmp_path / "older.py").write_text("raise AssertionError('this was run')")
    with pytest.raises(ValueError, match=r"no family of transformers .*install a version"):
        Target.load(TargetConfig(str(tmp_path)))
    assert not capsys.readouterr().out
