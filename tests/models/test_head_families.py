"""Every head family: its equation written out, its engine form, its start, its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models.attention import PackedContext
from draftsmith.models.files import sha256_file
from draftsmith.models.heads import (
    Head,
    HeadConfig,
    InitConfig,
    MTPHead,
    NormConfig,
    build_head,
    load_head,
    recycle_spec,
    save_head,
    training_boundaries,
)
from draftsmith.models.trunk import Trunk

NO_NORMS = NormConfig(False, False, False, False)
FAMILIES = {
    "mtp": HeadConfig(),
    "mtp without output norm": HeadConfig(norms=NormConfig(output=False)),
    "mtp of 2 modules": HeadConfig(modules=2),
    "mtp as MiMo runs it": HeadConfig(
        hidden_first=True, mask_position_zero=True, projection_bias=True
    ),
    "mtp as GLM runs it": HeadConfig(modules=2, recycle_raw=True),
    "eagle": HeadConfig("eagle", norms=NO_NORMS),
    "eagle restored": HeadConfig("eagle"),
    "eagle3": HeadConfig("eagle3", boundaries=(1, 2, 3)),
    "eagle3 without norms": HeadConfig(
        "eagle3", boundaries=(1, 3), norms=NO_NORMS, num_layers=2, norm_before_fc="all"
    ),
    "eagle3 of 2 layers": HeadConfig(
        "eagle3",
        num_layers=2,
        boundaries=(0, 2),
        norm_before_residual=True,
        norm_output=True,
        norm_before_fc="each",
        projection_bias=True,
    ),
    "medusa": HeadConfig("medusa", modules=3, num_layers=2, own_lm_heads=True, norms=NO_NORMS),
}
MARKS = {"config": "a", "tokenizer": "b", "chat_template": "c", "weights": "d"}
IDS = torch.tensor([0, 2, 3, 77, 511])


@pytest.fixture
def folder(tiny_llama_folder: Callable[..., Path]) -> Path:
    """A tiny target of three layers."""
    return tiny_llama_folder()


def moved(config: HeadConfig, folder: Path, ids: Tensor | None = None) -> Head:
    """A head whose every weight differs from its start."""
    head = build_head(config, folder, 2.0, draft_ids=ids)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


def noise(*shape: int) -> Tensor:
    """Seeded, float64."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engines_form_equals_the_modules(folder: Path, name: str):
    """Lean layers and packed projections against the module, float64: what is fed, recycled and
    drafted, at the first steps."""
    head = moved(FAMILIES[name], folder).double()
    trunk = Trunk.load(folder, torch.float64)
    states = {k: noise(12, 64) + k for k in {*head.boundaries, 3}}
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    for lean in (True, False):
        function = head.for_inference(torch.float64, torch.device("cpu"), lean)
        with torch.no_grad():
            fed = head.feed(states, trunk)
            torch.testing.assert_close(function.feed(states, trunk), fed, rtol=1e-12, atol=1e-12)
            for step in range(3):
                inputs = (noise(12, 64), fed, positions + step)
                expected = head(*inputs, PackedContext([0, 5, 12]), step)
                out = function(*inputs, PackedContext([0, 5, 12]), step)
                for ours, right in zip(out, expected, strict=True):
                    torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-11)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with the tiny target's eps."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def attention(x: Tensor, w: dict[str, Tensor], prefix: str, positions: Tensor) -> Tensor:
    """Causal attention of 4 query and 2 key-value heads of width 16 with rotary positions."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))

    def heads(name: str) -> Tensor:
        return (x @ w[f"{prefix}{name}.weight"].T).view(len(x), -1, 16)

    def turned(h: Tensor) -> Tensor:
        return h * cos + torch.cat([-h[..., 8:], h[..., :8]], -1) * sin

    q, k, v = turned(heads("q_proj")), turned(heads("k_proj")), heads("v_proj")
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) / 4
    scores = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), float("-inf"))
    mixed = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).flatten(1)
    return mixed @ w[f"{prefix}o_proj.weight"].T


def mlp(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    """The gated MLP of a Llama layer, its norm included."""
    normed = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(normed @ w[f"{prefix}mlp.gate_proj.weight"].T)
    up = normed @ w[f"{prefix}mlp.up_proj.weight"].T
    return x + (gate * up) @ w[f"{prefix}mlp.down_proj.weight"].T


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_eagle3_is_its_equation(folder: Path, before: bool, after: bool):
    """Fusion, with norms before it or without, attention over 2H, residual before or after the
    norm, a second plain layer, recycled before or after the output norm: by hand in float64."""
    kind = ("none", "each") if before else ("none", "all")
    config = HeadConfig(
        "eagle3",
        1,
        2,
        (0, 2),
        norm_before_residual=before,
        norm_output=after,
        norm_before_fc=kind[after],
        projection_bias=after,
    )
    head = moved(config, folder, IDS).double()
    w = head.state_dict()
    states, embeds, positions = (
        {0: noise(6, 64), 2: noise(6, 64) * 2},
        noise(6, 64),
        torch.arange(6),
    )
    with torch.no_grad():
        g = head.feed(states | {3: noise(6, 64)}, Trunk.load(folder, torch.float64))
        out = head(embeds, g, positions, PackedContext([0, 6]))
    parts = [states[0], states[2]]
    if config.norm_before_fc == "each":
        parts = [rms(part, w[f"fed_norms.{i}.weight"]) for i, part in enumerate(parts)]
    side = torch.cat(parts, -1)
    if config.norm_before_fc == "all":
        side = rms(side, w["fed_norms.0.weight"])
    fused = side @ w["fc.weight"].T + (w["fc.bias"] if after else 0.0)
    torch.testing.assert_close(g, fused, rtol=1e-12, atol=1e-12)
    normed = rms(g, w["hnorm.weight"])
    read = torch.cat([rms(embeds, w["enorm.weight"]), normed], -1)
    x = (normed if before else g) + attention(read, w, "layers.0.self_attn.", positions)
    x = mlp(x, w, "layers.0.")
    second = rms(x, w["layers.1.input_layernorm.weight"])
    x = mlp(x + attention(second, w, "layers.1.self_attn.", positions), w, "layers.1.")
    drafted = rms(x, w["norm.weight"])
    # transformers' rotary tables are float32
    torch.testing.assert_close(out.drafted, drafted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.recycled, drafted if after else x, rtol=1e-5, atol=1e-5)
    assert head.lm_head is not None and head.lm_head.shape == (5, 64)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_mtp_is_its_equation(folder: Path, first: bool, raw: bool, masked: bool):
    """Order of the two parts, what is recycled, the embedding at position 0 of each of two texts:
    three steps by hand in float64."""
    config = HeadConfig(
        hidden_first=first, recycle_raw=raw, mask_position_zero=masked, projection_bias=raw
    )
    head = moved(config, folder).double()
    w = {name.removeprefix("blocks.0."): value for name, value in head.state_dict().items()}
    hidden, positions = noise(5, 64), torch.tensor([0, 1, 0, 1, 2])
    fed = hidden
    for step in range(3):
        embeds, now = noise(5, 64) + step, positions + step
        with torch.no_grad():
            out = head(embeds, fed, now, PackedContext([0, 2, 5]), step)
        e = embeds.clone()
        if masked and step == 0:
            e[[0, 2]] = 0.0
        parts = [rms(e, w["enorm.weight"]), rms(hidden, w["hnorm.weight"])]
        z = torch.cat(parts[::-1] if first else parts, -1) @ w["eh_proj.weight"].T
        z = z + (w["eh_proj.bias"] if raw else 0.0)
        x = []
        for rows in (slice(0, 2), slice(2, 5)):
            normed = rms(z[rows], w["layer.input_layernorm.weight"])
            x.append(z[rows] + attention(normed, w, "layer.self_attn.", now[rows]))
        x = mlp(torch.cat(x), w, "layer.")
        drafted = rms(x, w["norm.weight"])
        hidden, fed = (x if raw else drafted), out.recycled
        # transformers' rotary tables are float32
        torch.testing.assert_close(out.drafted, drafted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.recycled, hidden, rtol=1e-5, atol=1e-5)


def test_the_record_follows_from_the_settings_that_a_kind_reads():
    """One place derives it; what a kind ignores does not get into it."""
    glm = recycle_spec(HeadConfig(recycle_raw=True), "gemma")
    assert (glm.recycled, glm.norm_style) == ("pre-output-norm", "gemma")
    mimo = recycle_spec(HeadConfig("eagle", hidden_first=True, mask_position_zero=True))
    assert mimo.fusion_order == ("hidden", "embedding") and mimo.mask_position_zero
    with pytest.warns(UserWarning, match="hidden_first=True, recycle_raw=True: ignored"):
        ignored = HeadConfig("eagle3", hidden_first=True, recycle_raw=True)
    assert recycle_spec(ignored) == recycle_spec(HeadConfig("eagle3"))


def test_medusa_is_its_equation(folder: Path):
    """Step k is head k of the same state, which is passed on as it came."""
    head = moved(FAMILIES["medusa"], folder).double()
    w, hidden = head.state_dict(), noise(4, 64)
    for step in range(3):
        x = hidden
        for block in range(2):
            name = f"heads.{step}.{block}.linear"
            x = x + torch.nn.functional.silu(x @ w[f"{name}.weight"].T + w[f"{name}.bias"])
        out = head(noise(4, 64), hidden, torch.arange(4), PackedContext([0, 4]), step)
        torch.testing.assert_close(out.drafted, x)
        assert out.recycled is hidden
    assert head.num_layers == 0 and head.max_steps == 3


def test_eagle_with_all_norms_is_one_recycled_mtp_module(folder: Path):
    """Same tensors, same function; without them it lacks the four norms."""
    restored, mtp = (build_head(HeadConfig(kind), folder, 2.0) for kind in ("eagle", "mtp"))
    inputs = torch.randn(4, 64), torch.randn(4, 64), torch.arange(4), PackedContext([0, 4])
    assert torch.equal(restored(*inputs).drafted, mtp(*inputs).drafted)
    published = build_head(FAMILIES["eagle"], folder, 2.0)
    assert not any(name.endswith("input_layernorm.weight") for name in published.state_dict())
    assert len(mtp.state_dict()) - len(published.state_dict()) == 4


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "medusa"])
def test_a_head_without_norms_starts_about_where_one_with_them_does(folder: Path, name: str):
    """A switched-off norm is folded into the weights behind it: what lm_head reads has about the
    size and mostly the direction that it has with all norms."""
    trunk, generator = Trunk.load(folder, torch.float32), torch.Generator().manual_seed(0)
    raw = torch.randn(32, 64, generator=generator) * 3.0
    embeds = trunk.embed(torch.randint(512, (32,), generator=generator))

    def first(config: HeadConfig) -> Tensor:
        head = build_head(config, folder, 3.0)
        fed = head.feed(dict.fromkeys({*head.boundaries, 3}, raw), trunk)
        with torch.no_grad():
            return head(embeds, fed, torch.arange(32), PackedContext([0, 32])).drafted

    ours, whole = first(FAMILIES[name]), first(replace(FAMILIES[name], norms=NormConfig()))
    size = float(ours.square().mean().sqrt() / whole.square().mean().sqrt())
    assert 0.5 < size < 4.0, size  # without an output norm the layers may still add to it
    assert float(torch.cosine_similarity(ours, whole).mean()) > 0.7


def test_the_start_of_eagle3_reads_the_targets_own_rows(folder: Path):
    """lm_head: the rows of the draft ids; fusion: the highest boundary alone; random otherwise."""
    head = build_head(FAMILIES["eagle3"], folder, 3.0, draft_ids=IDS)
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert head.lm_head is not None and torch.equal(head.lm_head.detach(), rows[IDS])
    expected = torch.cat([torch.zeros(64, 128), torch.eye(64)], 1)
    assert torch.equal(head.state_dict()["fc.weight"], expected)
    config = HeadConfig("eagle3", boundaries=(1, 2, 3), init=InitConfig("random", "random"))
    other = build_head(config, folder, 3.0).state_dict()["fc.weight"]
    assert 0.1 < float(other.std()) < 0.3  # the tiny target's initializer_range is 0.2


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_folder_round_trips_for_every_family(
    folder: Path, tmp_path: Path, name: str, reduced: bool
):
    """Configuration, every tensor bit for bit, the draft vocabulary."""
    ids = IDS if reduced else None
    head = moved(FAMILIES[name], folder, ids)
    save_head(tmp_path, head, target_fingerprint=MARKS, draft_ids=ids, trained_length=40, config={})
    loaded = load_head(tmp_path, MARKS)
    assert loaded.head.config == head.config and type(loaded.head) is type(head)
    card = (tmp_path / "README.md").read_text()
    assert f"# A `{head.kind}` head" in card and loaded.meta["sha256"] in card
    assert f"| draft vocabulary | `{5 if reduced else 512} ids` |" in card
    assert (loaded.draft_ids is None) == (ids is None)
    theirs = loaded.head.state_dict()
    assert list(theirs) == list(head.state_dict())
    for tensor, value in head.state_dict().items():
        assert torch.equal(value, theirs[tensor]), tensor


def test_a_folder_of_the_first_format_is_read(folder: Path, tmp_path: Path):
    """It held one recycled mtp module under bare names and fewer settings."""
    head = moved(HeadConfig(), folder)
    save_head(
        tmp_path, head, target_fingerprint=MARKS, draft_ids=None, trained_length=40, config={}
    )
    tensors = load_file(tmp_path / "head.safetensors")
    bare = {name.removeprefix("blocks.0."): value for name, value in tensors.items()}
    save_file(bare, tmp_path / "head.safetensors")
    meta = json.loads((tmp_path / "config.json").read_text())
    meta |= {"format": 1, "sha256": sha256_file(tmp_path / "head.safetensors")}
    meta["head"] = {name: meta["head"][name] for name in ("kind", "norms", "init")}
    del meta["recycle"]["residual"]
    (tmp_path / "config.json").write_text(json.dumps(meta))
    loaded = load_head(tmp_path, MARKS).head
    assert isinstance(loaded, MTPHead)
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_other_inputs_than_trained_with_are_refused(folder: Path, tmp_path: Path):
    """The record of what is fed and recycled decides, not the version that happens to run."""
    head = moved(FAMILIES["eagle3"], folder)
    save_head(
        tmp_path, head, target_fingerprint=MARKS, draft_ids=None, trained_length=40, config={}
    )
    meta = json.loads((tmp_path / "config.json").read_text())
    meta["recycle"]["hidden_fed"] = "post-final-norm"
    (tmp_path / "config.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="hidden_fed='post-final-norm'"):
        load_head(tmp_path)


def test_boundaries_that_training_reads():
    """The head's own and L; the published choice of eagle3 needs seven layers."""
    assert training_boundaries(HeadConfig(), 30) == (30,)
    assert training_boundaries(HeadConfig("eagle3"), 30) == (2, 15, 27, 30)
    assert training_boundaries(HeadConfig("eagle3"), 7) == (2, 3, 4, 7)
    with pytest.raises(ValueError, match="too shallow"):
        training_boundaries(HeadConfig("eagle3"), 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": 0}, "head.modules=0"),
        ({"num_layers": 0}, "head.num_layers=0"),
        ({"boundaries": (3, 1)}, "ascending"),
        ({"boundaries": (-1, 1)}, "from 0 on"),
    ],
)
def test_wrong_shapes_are_refused(settings: dict, message: str):
    """By name and value."""
    with pytest.raises(ValueError, match=message):
        HeadConfig("eagle3", **settings)


def test_settings_that_a_kind_does_not_read_are_named():
    """A warning each, so that an ablation over nothing is noticed."""
    with pytest.warns(
        UserWarning, match=r"mtp does not read boundaries=\(1, 2\), norm_output=True"
    ):
        HeadConfig(boundaries=(1, 2), norm_output=True)
    with pytest.warns(UserWarning, match="norms.output=True"):
        HeadConfig("medusa", norms=NormConfig(False, False, False, True))
