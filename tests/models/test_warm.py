"""A head that starts from another one: its shape, its weights, its draft ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.attention import PackedContext
from draftsmith.models.formats.source import find_source
from draftsmith.models.heads import (
    Head,
    HeadConfig,
    InitConfig,
    NormConfig,
    build_head,
    save_head,
    take_shape,
)

MARKS = {"config": "a", "tokenizer": "b", "chat_template": "c", "weights": "d"}
IDS = torch.tensor([0, 2, 9, 77, 400])


@pytest.fixture
def folder(tiny_llama_folder: Callable[..., Path]) -> Path:
    """A tiny target of three layers."""
    return tiny_llama_folder()


def kept(folder: Path, out: Path, config: HeadConfig, ids: Tensor | None = None) -> Head:
    """A head whose every weight was moved, in a native folder."""
    head = build_head(config, folder, 2.0, draft_ids=ids)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_head(out, head, target_fingerprint=MARKS, draft_ids=ids, trained_length=40, config={})
    return head


def again(folder: Path, place: Path, ids: Tensor | None = None, **settings: Any) -> Head:
    """A head that starts from the one in `place`."""
    source = find_source(str(place), folder, MARKS)
    assert source is not None
    base = HeadConfig(init=InitConfig(source=str(place)), **settings)
    shape = take_shape(base, source.head.config, str(place))
    return build_head(shape, folder, 2.0, draft_ids=ids, source=source)


@pytest.mark.parametrize(
    "config",
    [
        HeadConfig(modules=2, norms=NormConfig(output=False), recycle_raw=True, hidden_first=True),
        HeadConfig("eagle3", boundaries=(1, 3), norm_output=True),
        HeadConfig("medusa", modules=2, norms=NormConfig(False, False, False, False)),
    ],
    ids=lambda config: config.kind,
)
def test_it_begins_as_the_others_exact_function(folder: Path, tmp_path: Path, config: HeadConfig):
    """Shape, every weight, what is drafted and recycled at two steps."""
    source = kept(folder, tmp_path / "source", config)
    head = again(folder, tmp_path / "source")
    assert replace(head.config, init=config.init) == config
    for name, value in source.state_dict().items():
        assert torch.equal(head.state_dict()[name], value), name
    embeds, hidden = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        inputs = (embeds, hidden, torch.arange(4) + step)
        for a, b in zip(
            head(*inputs, PackedContext([0, 4]), step),
            source(*inputs, PackedContext([0, 4]), step),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_a_contradicting_setting_is_refused_with_both_values():
    """What differs from its default, or was named; what stands at its default is taken over."""
    source = HeadConfig(modules=2, norms=NormConfig(output=False))
    taken = take_shape(HeadConfig(init=InitConfig(source="x")), source, "x")
    assert taken == replace(source, init=InitConfig(source="x"))
    with pytest.raises(ValueError, match="head.modules=3, where that head has 2"):
        take_shape(HeadConfig(modules=3), source, "x")
    with pytest.raises(ValueError, match=r"head.norms.output=true, where that head has false"):
        take_shape(HeadConfig(), source, "x", {"norms.output"})
    with pytest.raises(ValueError, match="head.kind=eagle3, where that head has mtp"):
        take_shape(HeadConfig("eagle3"), source, "x")
    take_shape(HeadConfig(modules=2), source, "x", {"modules"})


def test_rows_of_an_own_lm_head_follow_the_target_ids(folder: Path, tmp_path: Path):
    """A subset is selected anew; an id without a row refuses, and the remedy is told."""
    config = HeadConfig("eagle3", boundaries=(1, 3))
    source = kept(folder, tmp_path / "reduced", config, IDS)
    assert source.lm_head is not None
    fewer = again(folder, tmp_path / "reduced", torch.tensor([2, 77, 400]))
    assert fewer.lm_head is not None
    assert torch.equal(fewer.lm_head.detach(), source.lm_head.detach()[[1, 3, 4]])
    same = again(folder, tmp_path / "reduced", IDS)
    assert torch.equal(same.state_dict()["lm_head"], source.lm_head.detach())
    with pytest.raises(ValueError, match=r"for 2 of the 3 ids .*first: \[3, 511\].*size=5 keeps"):
        again(folder, tmp_path / "reduced", torch.tensor([2, 3, 511]))
    with pytest.raises(ValueError, match="draft_vocab_size=null asks for all.*size=5 keeps"):
        again(folder, tmp_path / "reduced")
    whole = kept(folder, tmp_path / "whole", config)
    part = again(folder, tmp_path / "whole", IDS)
    assert torch.equal(part.state_dict()["lm_head"], whole.state_dict()["lm_head"][IDS])


def test_a_head_without_lm_head_takes_any_draft_ids(folder: Path, tmp_path: Path):
    """Its states are read by the target's rows, whichever those are."""
    kept(folder, tmp_path / "source", HeadConfig(), IDS)
    assert again(folder, tmp_path / "source", torch.tensor([1, 3])).lm_head is None


def test_what_does_not_fit_is_named(
    folder: Path, tiny_llama_folder: Callable[..., Path], tmp_path: Path
):
    """Another shape of target, no head, a foreign folder, another tokenizer, a lost file."""
    kept(folder, tmp_path / "source", HeadConfig())
    narrow = tiny_llama_folder(hidden_size=32)
    with pytest.raises(ValueError, match=r"eh_proj.weight is \[64, 128\], not \[32, 64\]"):
        again(narrow, tmp_path / "source")
    with pytest.raises(ValueError, match="no head there"):
        find_source(str(tmp_path / "nowhere"), folder, MARKS)
    with pytest.raises(ValueError, match="draftsmith import. makes one"):
        find_source(str(folder), folder, MARKS)
    with pytest.raises(ValueError, match="another tokenizer"):
        find_source(str(tmp_path / "source"), folder, {**MARKS, "tokenizer": "other"})
    with pytest.warns(UserWarning, match="another weights"):
        find_source(str(tmp_path / "source"), folder, {**MARKS, "weights": "other"})
    with pytest.raises(ValueError, match="no head to start from"):
        build_head(HeadConfig(init=InitConfig(source="x")), folder, 2.0)


def test_the_content_counts_and_not_the_place(folder: Path, tmp_path: Path):
    """A copy elsewhere is the same source, other weights in the same place are another."""
    kept(folder, tmp_path / "one", HeadConfig())
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    marks = [find_source(str(tmp_path / name), folder, MARKS) for name in ("one", "two")]
    contents = [one.meta["content"] for one in marks if one is not None]
    assert contents[0] == contents[1]
    kept(folder, tmp_path / "two", HeadConfig(modules=2))
    other = find_source(str(tmp_path / "two"), folder, MARKS)
    assert other is not None and other.meta["content"] != contents[0]
    meta = json.loads((tmp_path / "two" / "config.json").read_text())
    assert other.meta["content"] == meta["sha256"]


def test_settings_that_a_source_overrides_warn():
    """They would start a fresh head."""
    with pytest.warns(UserWarning, match=r"head.init.layer=random: ignored, since all weights"):
        InitConfig(layer="random", source="x")
