"""Every target family: the engine's stack, the trunk and a head's layer compute what transformers
does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parent))

from families import FAMILIES, Exact, save_toy  # noqa: E402

from draftsmith.inference.capture import capture  # noqa: E402
from draftsmith.models.attention import PackedContext  # noqa: E402
from draftsmith.models.heads import InitConfig  # noqa: E402
from draftsmith.models.heads.start import Start  # noqa: E402
from draftsmith.models.layer import decoder_layer  # noqa: E402
from draftsmith.models.norm import use_own_norms  # noqa: E402
from draftsmith.models.target import Target, TargetConfig  # noqa: E402

ROWS = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 9, 23)]


@pytest.fixture(scope="module", params=list(FAMILIES))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A toy of each family in float64, by its own layers."""
    folder = save_toy(request.param, tmp_path_factory.mktemp("toy"))
    return load(folder)


def load(folder: Path, **settings) -> Target:
    """A target on the CPU."""
    settings = {"dtype": "float64", "device": "cpu"} | settings
    return Target.load(TargetConfig(source=str(folder), **settings))


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
    start = Start(InitConfig(), target.folder, target.config, 1.0, None)
    layer, rotary = decoder_layer(target.config)
    start.layer(layer, torch.ones(target.hidden_size))
    layer, rotary = layer.double().eval(), rotary.double()
    with torch.no_grad(), Exact():
        states = capture(target, ROWS, (last - 1, last))
        lengths = [len(row) for row in ROWS]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        x = states[last - 1][None]
        out = layer(
            x,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rotary(x, positions),
            draftsmith=PackedContext(starts),
        )
    out = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(out[0], states[last], rtol=1e-9, atol=1e-9)
