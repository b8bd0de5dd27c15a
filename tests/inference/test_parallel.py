"""Two ranks answer what one answers, hold half each, and end when one is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from draftsmith.models.shard import Group, LayerShare
from draftsmith.models.skeleton import skeleton, text_config

ODD = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "intermediate_size": 256,
    "tie_word_embeddings": True,
    "seed": 1,
}
"""Three key-value heads, of which one rank gets one and the other two."""
CASES = (
    "plain",
    "mtp of 3 modules",
    "eagle3",
    "medusa",
    "draft-lm",
    "another family",
    "dynamic trees",
    "static trees",
    "look-up beside trees",
)


@pytest.fixture(scope="module")
def found(
    tiny_llama_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `ranks.py` writes, in one launch: `leader`, and by number what each rank was fed."""
    out = tmp_path_factory.mktemp("ranks")
    even, odd = str(tiny_llama_folder()), str(tiny_llama_folder(**ODD))
    cases = [
        {"name": "plain", "target": even, "drafter": "none"},
        {"name": CASES[1], "target": even, "drafter": CASES[1], "reduced": True},
        {"name": "eagle3", "target": odd, "drafter": "eagle3"},
        {"name": "medusa", "target": even, "drafter": "medusa"},
        {"name": "draft-lm", "target": odd, "drafter": "draft-lm", "draft_lm": odd},
        {"name": CASES[5], "target": str(_olmo(out / "olmo")), "drafter": "mtp"},
        {"name": CASES[6], "target": odd, "drafter": "eagle3", "tree": "dynamic"},
        {"name": CASES[7], "target": even, "drafter": "mtp", "tree": "static"},
        {"name": CASES[8], "target": odd, "drafter": "mtp", "tree": "dynamic", "look-up": True},
    ]
    one_head = str(tiny_llama_folder(num_key_value_heads=1))
    told = json.dumps({"out": str(out), "cases": cases, "one_head": one_head})
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(Path(__file__).with_name("ranks.py")), told],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-9000:]
    names = ("leader", "rank-0", "rank-1")
    return {name: json.loads((out / f"{name}.json").read_text()) for name in names}


def _olmo(folder: Path) -> Path:
    """A family whose layers transformers shares."""
    shape = Olmo2Config(
        vocab_size=512,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Olmo2ForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_answer_what_one_answers(found: dict[str, Any], case: str) -> None:
    """Greedy and sampled, in float64, batched, prefilled in chunks: the same tokens, the same
    drafts, and as many of them accepted."""
    alone, shared = found["leader"][case]["alone"], found["leader"][case]["shared"]
    assert shared == alone
    assert all(len(text) == 10 for text in alone["greedy"])
    drafts, accepted = alone["greedy drafts"]
    assert (case == "plain") == (not alone["greedy chains"])
    if case == "draft-lm":  # it foresees itself
        assert accepted == drafts > 0
    if "trees" in case:  # it is told; what is kept stands behind what is not
        assert drafts > accepted > 0


def test_every_rank_is_fed_the_leaders_tokens(found: dict[str, Any]) -> None:
    """One rank decides, so all must have seen the same rows; and after each sum of shares all have
    the same states, to the last bit."""
    ours, others = found["rank-0"], found["rank-1"]
    assert len(ours["tokens"]) > 20 and all(ours["tokens"])
    assert others == ours


def test_each_rank_holds_about_half(found: dict[str, Any]) -> None:
    """Nothing is held twice but the norms; the leader has the embedding, a seventh to a third of
    these toys, so its half is the larger one."""
    for case in ("plain", "eagle3"):
        whole, ranks = found["leader"][case]["weights"], found["leader"][case]["ranks"]
        leader, other = (rank["weights"] for rank in ranks)
        assert 0.35 * whole < other <= leader < 0.62 * whole, case
        assert leader + other < 1.1 * whole, (case, whole, leader, other)
        pages = [rank["pages"] for rank in ranks]
        # By heads: 1 and 1, or 1 and 2.
        assert pages[1] == pages[0] * (1 if case == "plain" else 2) > 0, case


def test_what_cannot_be_shared_is_refused(found: dict[str, Any]) -> None:
    """On all ranks, which then go on with the next target."""
    assert "1 key-value heads cannot be shared by 2 ranks" in found["leader"]["refused"]


def test_a_lost_rank_ends_the_others(found: dict[str, Any]) -> None:
    """With words, and at once."""
    assert "rank 0 of 2 has lost another one" in found["leader"]["lost"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("overrides", [{}, ODD], ids=["even", "odd"])
def test_shares_cover_a_layer_evenly(
    tiny_llama_folder: Callable[..., Path], overrides: dict[str, Any], ranks: int
) -> None:
    """Every row belongs to one rank; queries go with their keys; ranks with fewer heads have more
    of the MLP."""
    layer = skeleton(text_config(tiny_llama_folder(**overrides))).get_decoder().layers[0]
    heads = layer.self_attn.k_proj.weight.shape[0] // layer.self_attn.head_dim
    groups = [Group(rank, ranks, None) for rank in range(ranks)]  # type: ignore[arg-type]
    if heads < ranks:
        with pytest.raises(ValueError, match=f"launch at most {heads} processes"):
            LayerShare.of(layer, groups[0], "here")
        return
    shares = [LayerShare.of(layer, group, "here") for group in groups]
    held = [0] * ranks
    for name in shares[0].parts():
        weight = layer.get_submodule(name).weight
        covered = torch.zeros(weight.shape, dtype=torch.int64)
        for rank, share in enumerate(shares):
            part = covered[share.parts()[name]]
            part += 1
            held[rank] += part.numel()
        assert bool((covered == 1).all()), name
    assert all(
        share.q.start == share.kv.start * layer.self_attn.num_key_value_groups for share in shares
    )
    # To a block of 16 columns in gate, up and down.
    assert max(held) - min(held) <= 16 * 3 * layer.mlp.gate_proj.in_features, held
