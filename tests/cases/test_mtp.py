"""CASES.md: heads that come from or go to a target's own MTP weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from draftsmith.models.attention import PackedContext
from draftsmith.models.formats import layout
from draftsmith.models.formats.source import find_source
from draftsmith.models.heads import (
    Head,
    HeadConfig,
    InitConfig,
    build_head,
    load_head,
    save_head,
    take_shape,
)
from draftsmith.models.target import fingerprint
from draftsmith.models.trunk import Trunk
from draftsmith.scripts.cli import main

IDS = torch.tensor([0, 2, 9, 77, 400])


def moved(head: Head) -> Head:
    """Every weight changed, as training does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


def kept(head: Head, out: Path, target: Path, ids: Tensor | None = None) -> Path:
    """The head in a native folder."""
    save_head(
        out,
        head,
        target_fingerprint=fingerprint(target),
        draft_ids=ids,
        trained_length=9,
        config={},
    )
    return out


def from_source(place: Path, target: Path, ids: Tensor | None = None) -> Head:
    """A head for `target` that starts from the one in `place`."""
    source = find_source(str(place), target, fingerprint(target))
    assert source is not None
    base = HeadConfig(init=InitConfig(source=str(place)))
    shape = take_shape(base, source.head.config, str(place))
    return build_head(shape, target, 2.0, draft_ids=ids, source=source)


def test_case_44_padding_rows_shut_no_head_out(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The same tokenizer with 128 rows more: an MTP head has no row of its own, and starts."""
    narrow, wide = tiny_llama_folder(), tiny_llama_folder(vocab_size=640)
    source = moved(build_head(HeadConfig(), narrow, 2.0))
    place = kept(source, tmp_path / "source", narrow)
    marks = {**fingerprint(wide), **{k: fingerprint(narrow)[k] for k in ("config", "weights")}}
    found = find_source(str(place), wide, marks)
    assert found is not None
    config = HeadConfig(init=InitConfig(source=str(place)))
    head = build_head(config, wide, 2.0, source=found)
    for name, value in source.state_dict().items():
        assert torch.equal(head.state_dict()[name], value), name


def test_case_47_a_tied_target_ties_no_head(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Saved, loaded and started from, the reduced lm_head stays its own, of its own shape."""
    target = tiny_llama_folder(tie_word_embeddings=True)
    config = HeadConfig("eagle3", boundaries=(1, 3))
    source = moved(build_head(config, target, 2.0, draft_ids=IDS))
    place = kept(source, tmp_path / "source", target, IDS)
    head = from_source(place, target, IDS)
    assert head.lm_head is not None and head.lm_head.shape == (5, 64)
    loaded = load_head(place)
    assert loaded.head.lm_head is not None and source.lm_head is not None
    assert torch.equal(loaded.head.lm_head.detach(), source.lm_head.detach())
    rows = Trunk.load(target, torch.float32).embedding[IDS]
    assert not torch.equal(head.lm_head.detach(), rows)


def test_case_49_the_tokenizer_is_the_targets(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A head from elsewhere brings no tokenizer that could stand in for the target's."""
    target = tiny_llama_folder()
    loaded = load_head(kept(build_head(HeadConfig(), target, 2.0), tmp_path / "native", target))
    write, _ = layout("deepseek-mtp")
    write(loaded, target, tmp_path / "theirs")
    (tmp_path / "theirs" / "draftsmith.json").unlink()
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    arguments = [f"import_head.folder={tmp_path / 'theirs'}", f"target.source={target}"]
    assert main(["import", *arguments, f"import_head.out={tmp_path / 'out'}"]) == 0
    assert load_head(tmp_path / "out").meta["target_fingerprint"] == fingerprint(target)
    assert not list((tmp_path / "out").glob("tokenizer*"))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with the tiny target's eps."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def one_row(w: dict[str, Tensor], embed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """One MTP row that sees itself alone: attention is its own value. (raw, normed)"""
    z = torch.cat([rms(embed, w["enorm.weight"]), rms(hidden, w["hnorm.weight"])], -1)
    z = z @ w["eh_proj.weight"].T
    read = rms(z, w["layer.input_layernorm.weight"])
    value = (read @ w["layer.self_attn.v_proj.weight"].T).view(-1, 2, 16)
    mixed = value.repeat_interleave(2, 1).flatten(1)
    x = z + mixed @ w["layer.self_attn.o_proj.weight"].T
    read = rms(x, w["layer.post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(read @ w["layer.mlp.gate_proj.weight"].T)
    x = x + (gate * (read @ w["layer.mlp.up_proj.weight"].T)) @ w["layer.mlp.down_proj.weight"].T
    return x, rms(x, w["norm.weight"])


def test_case_120_the_first_real_token_is_not_wiped(
    tiny_llama_folder: Callable[..., Path],
) -> None:
    """A prompt of one token: row 0 sees x_1, unless the head was trained with the mask."""
    target = tiny_llama_folder()
    head = moved(build_head(HeadConfig(), target, 2.0)).double()
    w = {name.removeprefix("blocks.0."): value for name, value in head.state_dict().items()}
    trunk = Trunk.load(target, torch.float64)
    embed, hidden = trunk.embed(torch.tensor([17])), trunk.norm(torch.ones(1, 64).double())
    masked = type(head)(replace(head.config, mask_position_zero=True), head.target_config)
    masked.load_state_dict(head.state_dict())
    for one, seen in ((head, embed), (masked.double(), torch.zeros_like(embed))):
        ours = one(embed, hidden, torch.tensor([0]), PackedContext([0, 1])).drafted
        right = trunk.logits(one_row(w, seen, hidden)[1])
        torch.testing.assert_close(trunk.logits(ours), right, rtol=1e-9, atol=1e-9)


def test_case_121_the_carried_state_is_normed_or_raw_as_trained(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The setting is in the head's folder and decides steps 1 and 2; raw and normed differ
    there."""
    target, drafted = tiny_llama_folder(), []
    for raw in (False, True):
        first = moved(build_head(HeadConfig(recycle_raw=raw), target, 2.0))
        head = load_head(kept(first, tmp_path / str(raw), target)).head.double()
        w = {name.removeprefix("blocks.0."): value for name, value in head.state_dict().items()}
        generator = torch.Generator().manual_seed(0)
        steps, hidden = [], torch.randn(1, 64, dtype=torch.float64, generator=generator)
        fed = hidden
        for step in range(3):
            embed = torch.randn(1, 64, dtype=torch.float64, generator=generator)
            out = head(embed, fed, torch.tensor([step]), PackedContext([0, 1]), step)
            x, normed = one_row(w, embed, hidden)
            torch.testing.assert_close(out.drafted, normed, rtol=1e-9, atol=1e-9)
            hidden, fed = (x if raw else normed), out.recycled
            steps.append(out.drafted)
        drafted.append(steps[-1])
    assert float((drafted[0] - drafted[1]).detach().abs().max()) > 1e-2


def test_case_122_123_an_export_holds_the_trained_weights_and_all_of_them(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Started from a published module and trained on: what was trained differs from it, the copies
    of the target are equal, no name is lost or new; the table says which is which."""
    target = tiny_llama_folder()
    write, read = layout("deepseek-mtp")
    published = build_head(HeadConfig(), target, 2.0)
    write(load_head(kept(published, tmp_path / "a", target)), target, tmp_path / "published")
    source = read(tmp_path / "published", target)
    head = type(source.head)(source.head.config, AutoConfig.from_pretrained(target))
    head.load_state_dict(source.head.state_dict())
    origin = write(load_head(kept(moved(head), tmp_path / "b", target)), target, tmp_path / "out")
    before, after = (load_file(tmp_path / n / "mtp.safetensors") for n in ("published", "out"))
    assert set(before) == set(after) == set(origin)
    for name, value in after.items():
        same = torch.equal(value, before[name])
        assert same == (origin[name] == "copied from the target"), name
