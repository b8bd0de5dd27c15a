"""Every target family: the engine's stack, the trunk and a head's layer compute what transformers
does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3Config,
    LlamaConfig,
    LlamaModel,
)

sys.path.append(str(Path(__file__).parent))

from families import BASE, FAMILIES, Exact, move_all, save_toy  # noqa: E402

from draftsmith.inference.capture import capture  # noqa: E402
from draftsmith.models.attention import PackedContext  # noqa: E402
from draftsmith.models.heads import HeadConfig, InitConfig, MTPHead  # noqa: E402
from draftsmith.models.heads.start import Start  # noqa: E402
from draftsmith.models.layer import decoder_layer, drop_input_norm  # noqa: E402
from draftsmith.models.norm import use_own_norms  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402
from draftsmith.models.trunk import Trunk  # noqa: E402

Layer = Callable[[Tensor], Tensor]
ROWS = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 9, 23)]


def noise(rows: int) -> Tensor:
    """[rows, 64] float64, seeded."""
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).double()


@pytest.fixture(scope="module", params=list(FAMILIES))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A toy of each family in float64, by its own layers."""
    folder = save_toy(request.param, tmp_path_factory.mktemp("toy"))
    return load(folder)


def load(folder: Path, dtype: str = "float64", layers: str = "auto") -> Target:
    """A target on the CPU."""
    config = TargetConfig(source=str(folder), dtype=dtype, device="cpu", layers=layers)
    return Target.load(config)


def logits_of_transformers(folder: Path) -> list[Tensor]:
    """Each row by itself through the whole model, eager attention, float64 throughout."""
    plain = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    use_own_norms(plain)
    with torch.no_grad(), Exact():
        return [plain(row[None], use_cache=False).logits[0] for row in ROWS]


def started(target: Target, frame: Tensor | None = None, bare: bool = False) -> Layer:
    """The head's layer with the target's last weights, float64; for a stream in a frame, without
    its input norm."""
    start = Start(InitConfig(), target.folder, target.config, 1.0, None)
    layer, rotary = decoder_layer(target.config)
    if bare:
        drop_input_norm(layer)
    with torch.no_grad():
        start.layer(layer, torch.ones(target.hidden_size) if frame is None else frame)
    layer, rotary = layer.double().eval(), rotary.double()
    lengths = [len(row) for row in ROWS]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad(), Exact():
            out = layer(
                x[None],
                attention_mask=None,
                position_ids=positions,
                position_embeddings=rotary(x[None], positions),
                draftsmith=PackedContext(starts),
            )
        return (out[0] if isinstance(out, tuple) else out)[0]

    return run


@pytest.mark.parametrize("layers", ["auto", "transformers"])
def test_logits_of_packed_rows_equal_transformers(target: Target, layers: str):
    """Ragged rows packed together, 1e-9: window, soft caps, factors, rope, experts."""
    if layers == "auto":
        target = load(target.folder)
    with Exact():
        states = capture(target, ROWS, (target.num_layers,))[target.num_layers]
        ours = target.logits(target.trunk.norm(states))
        also = target.trunk.logits(target.trunk.norm(states))
    right = torch.cat(logits_of_transformers(target.folder))
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(also, right, rtol=1e-9, atol=1e-9)


def test_a_heads_layer_is_the_targets_last(target: Target):
    """Started from the files, it turns boundary L-1 into boundary L, 1e-9: its kind (experts or
    dense, sliding or full), norms, rotary, factors."""
    last = target.num_layers
    with Exact():
        states = capture(target, ROWS, (last - 1, last))
    out = started(target)(states[last - 1])
    torch.testing.assert_close(out, states[last], rtol=1e-9, atol=1e-9)


def test_a_stream_in_a_frame_runs_alike(target: Target):
    """With half of the stream's signs turned, what reads it, what adds to it and the norms behind
    that are turned with it: the output is the target's, turned; Gemma's weights are stored less
    one, which rounds them."""
    signs = torch.where(torch.arange(target.hidden_size) % 3 == 0, -1.0, 1.0)
    out = started(target, signs)(noise(33) * signs)
    torch.testing.assert_close(out, started(target)(noise(33)) * signs, rtol=1e-5, atol=1e-5)


def test_a_missing_input_norm_is_folded_into_what_reads_it(target: Target):
    """On rows of the size that the start was told of, the layer without its input norm is the
    target's; up to eps."""
    rows = torch.nn.functional.rms_norm(noise(33), (target.hidden_size,))
    out, right = started(target, bare=True)(rows), started(target)(rows)
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)


def test_no_tensor_of_a_head_is_uninitialised_memory(target: Target, nan_memory: None):
    """Built where `torch.empty` gives NaN, twice from one seed: every tensor is a number, the same
    one."""
    built = []
    for _ in range(2):
        torch.manual_seed(3)
        head = MTPHead(HeadConfig(), target.config)
        built.append([*head.parameters(), *head.buffers()])
    for first, second in zip(*built, strict=True):
        assert bool(first.isfinite().all()) and torch.equal(first, second)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["llama", "gemma", "gemma3", "granite"])
def test_embeddings_are_bit_for_bit_those_of_transformers(tmp_path: Path, name: str, dtype: str):
    """Gemma's factor is rounded to the weights' dtype, Granite's is not."""
    folder = save_toy(name, tmp_path)
    trunk = Trunk.load(folder, getattr(torch, dtype))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=trunk.dtype).eval()
    ids, entered = torch.arange(50), []
    plain.model.layers[0].register_forward_pre_hook(lambda _, args: entered.append(args[0][0]))
    with torch.no_grad():
        plain(ids[None], use_cache=False)
    assert torch.equal(trunk.embed(ids), entered[0])
    assert trunk.tied == (name != "granite")


def test_a_tensor_that_the_family_leaves_without_a_value_is_named(monkeypatch):
    """The check that guards families to come."""
    monkeypatch.setattr(LlamaModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match=r"leaves \['self_attn.q_proj.weight'.*without a value"):
        decoder_layer(LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=4))


def test_rotary_tables_follow_the_device_and_keep_their_dtype(target: Target):
    """They are no part of a checkpoint, stay float32 in a bfloat16 head, and move with it."""
    head = MTPHead(HeadConfig(), target.config).to(torch.bfloat16)
    tables = [(n, b) for n, b in head.named_buffers() if "rotary" in n]
    assert tables and all(b.dtype == torch.float32 for _, b in tables)
    assert not {name for name, _ in tables} & set(head.state_dict())
    moved = dict(head.to("meta").named_buffers())
    assert all(moved[name].device.type == "meta" for name, _ in tables)


def test_a_rope_that_changes_with_the_batch_is_named(tmp_path: Path):
    """Up to the original length it is exact, 1e-9; a head keeps its frequencies beyond."""
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
    folder = save_toy("llama", tmp_path, rope_parameters=rope, max_position_embeddings=32)
    with pytest.warns(UserWarning, match="rope_type dynamic change with the longest position"):
        target = load(folder)
    with Exact():
        states = capture(target, ROWS, (2, 3))
        ours = target.logits(target.trunk.norm(states[3]))
    torch.testing.assert_close(
        ours, torch.cat(logits_of_transformers(folder)), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(started(target)(states[2]), states[3], rtol=1e-9, atol=1e-9)
    _, rotary = decoder_layer(target.config)
    near, far = torch.arange(5)[None], torch.tensor([[0, 1, 2, 3, 100]])
    like = torch.zeros(1, 5, 64)
    assert torch.equal(rotary(like, near)[0][0, :4], rotary(like, far)[0][0, :4])


def test_a_layernorm_family_is_refused(tmp_path: Path):
    """Its norm would be run as an RMSNorm."""
    settings: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = CohereConfig(vocab_size=64, intermediate_size=32, pad_token_id=0, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="CohereLayerNorm; only RMSNorm"):
        Trunk.load(tmp_path, torch.float32)


def test_a_multimodal_target_is_read_under_its_own_names(tmp_path: Path):
    """Its decoder lies under another prefix: trunk, stack and last layer are found, 1e-9."""
    text = AutoConfig.for_model(
        **{**BASE, **FAMILIES["gemma3"], "vocab_size": 520, "tie_word_embeddings": True}
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**vision, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        image_token_index=515,
        boi_token_index=516,
        eoi_token_index=517,
        mm_tokens_per_image=4,
    )
    model = AutoModelForCausalLM.from_config(config)
    move_all(model.get_decoder())
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith("model.layers.") for name in names)
    target = load(tmp_path)
    with Exact():
        states = capture(target, ROWS, (2, 3))
        ours = target.logits(target.trunk.norm(states[3]))
    torch.testing.assert_close(
        ours, torch.cat(logits_of_transformers(tmp_path)), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(started(target)(states[2]), states[3], rtol=1e-9, atol=1e-9)
