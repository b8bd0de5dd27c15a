"""Training steps of other trainers' own code, run by their interpreter on the rows of `peers`.

Imports PyTorch and the peer alone, never this package. The process builds its case, tells of it in
one line of JSON, and then does one optimiser step for every line that it reads. Under bf16 autocast
over fp32 weights, as everyone in the comparison.

python -P _peer_steps.py {speculators,eagle} ROWS.safetensors SETTINGS
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], "tuple[Tensor, dict[str, Any]]"]
"""One forward pass: the loss to descend, and figures for the reader."""


def serve(
    model: nn.Module, forward: Step, optimizer: torch.optim.Optimizer, about: dict[str, Any]
) -> None:
    """Answer lines on stdin with one step each: its seconds by the clock and of the processor, its
    loss and figures, and by how much the resident set has grown at its peak since the first step
    began (MiB; Linux counts KiB)."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    # What is resident now: ru_maxrss would be the peak of building the case, which hides growth.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    about |= {
        "trained": sum(p.numel() for p in learnt),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        began, worked = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss, figures = forward()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        value = float(loss.detach())
        told = {
            "loss": value,
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - worked,
            "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - resident / 2**20,
        }
        print(json.dumps(figures | told), flush=True)


def speculators(rows: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """vllm-project/speculators: Eagle3DraftModel, its optimiser, its default loss (kl_div) in the
    form that needs no GPU, PyTorch's attention under its dense mask."""
    import importlib.metadata

    from speculators.losses import resolve_loss_config  # pyright: ignore[reportMissingImports]
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # pyright: ignore[reportMissingImports]
    from speculators.models.eagle3.data import shift_batch  # pyright: ignore[reportMissingImports]
    from speculators.train.optimizers import build_optimizers  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig

    steps, vocabulary = settings["steps"], settings["vocabulary"]
    target = LlamaConfig(**settings["target"] | {"num_hidden_layers": 1})
    target._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=target,
        draft_vocab_size=vocabulary,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
    )
    model = Eagle3DraftModel(config).train()
    if vocabulary != target.vocab_size:
        chosen = torch.arange(target.vocab_size) < vocabulary
        model.load_vocab_mappings(chosen, torch.zeros(vocabulary, dtype=torch.long))
    table = rows["table"].float()
    names = {"enorm.": "layers.0.input_layernorm.", "hnorm.": "layers.0.hidden_norm."}
    weights = _renamed(rows, names | {"lm_head": "lm_head.weight"})
    weights |= {"embed_tokens.weight": table, "verifier_lm_head.weight": table[:vocabulary]}
    weights["verifier_norm.weight"] = rows["norm"].float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and not set(missing) - {"t2d", "d2t"}, (missing, unexpected)
    # Published: the draft's lm_head stays what it was copied from.
    model.lm_head.weight.requires_grad_(settings["train_lm_head"])
    length = len(rows["tokens"])
    batch = shift_batch(
        {
            "input_ids": rows["tokens"],
            "hidden_states": rows["fused"],
            "verifier_last_hidden_states": rows["last"],
            "loss_mask": torch.ones(length, dtype=torch.bool),
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    del batch["lengths"]
    batch = {name: value[None] for name, value in batch.items()}
    batch["document_ids"] = torch.zeros_like(batch["input_ids"])
    loss_config = resolve_loss_config("kl_div", "eager")

    def forward() -> tuple[Tensor, dict[str, Any]]:
        _, loss, metrics = model(**batch, ttt_steps=steps, loss_config=loss_config)
        figures = {name: float(value) for name, value in metrics.items()}  # its trainer logs them
        return loss, {"kl": [figures[f"loss_{k}_sum"] for k in range(steps)]}

    recipe = SimpleNamespace(optimizer="adamw", lr=1e-4, weight_decay=0.01)
    (optimizer,) = build_optimizers(model, recipe)
    version = importlib.metadata.version("speculators")
    serve(model, forward, optimizer, {"form": f"speculators {version}"})


def eagle(rows: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """SafeAILab/EAGLE: `Model` of eagle/traineagle3/cnets.py in a checkout at settings["eagle"].

    Its target model, run inside its forward pass, is replaced by one that gives back the rows'
    states and computes the logits from the last of them.
    """
    norm, table = rows["norm"].float(), rows["table"].float()
    states = rows["fused"][None].chunk(3, -1)

    class Target(nn.Module):
        @classmethod
        def from_pretrained(cls, *_: object, **__: object) -> Target:
            return cls()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
            last = rows["last"][None].float()
            normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
            return SimpleNamespace(hidden_states=states, logits=normed @ table.T)

    stand_in = ModuleType("modeling_llama_kv")
    stand_in.LlamaForCausalLM = Target  # type: ignore[attr-defined]
    sys.modules["modeling_llama_kv"] = stand_in
    sys.path.insert(0, str(Path(settings["eagle"]) / "eagle/traineagle3"))
    from cnets import Model  # pyright: ignore[reportMissingImports]

    steps, vocabulary = settings["steps"], settings["vocabulary"]
    # Its own configuration class is of an older transformers; these are the fields that are read.
    config = SimpleNamespace(
        **settings["target"],
        draft_vocab_size=vocabulary,
        pad_token_id=0,
        hidden_act="silu",
        rope_scaling=None,
        pretraining_tp=1,
    )
    recipe = SimpleNamespace(gradient_checkpointing=settings["checkpointed"])
    model = Model(config, None, recipe, load_emb=False).train()
    model.length = steps
    with tempfile.TemporaryDirectory() as folder:  # where scandata looks for the draft vocabulary
        os.chdir(folder)
        chosen = torch.arange(config.vocab_size) < vocabulary
        torch.save({"d2t": torch.zeros(vocabulary, dtype=torch.long), "t2d": chosen}, "cache.pt")
        model.scandata(None, None)
        os.chdir("/")
    names = {"enorm.": "midlayer.input_layernorm.", "hnorm.": "midlayer.hidden_norm."}
    names |= {"layers.0.": "midlayer.", "lm_head": "lm_head.weight"}
    weights = _renamed(rows, names) | {"embed_tokens.weight": table}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and not set(missing) - {"t2d", "d2t"}, (missing, unexpected)
    model.lm_head.weight.requires_grad_(settings["train_lm_head"])
    tokens = rows["tokens"][None]

    def forward() -> tuple[Tensor, dict[str, Any]]:
        ones = torch.ones_like(tokens)
        losses, _, _ = model(input_ids=tokens, attention_mask=ones, loss_mask=ones)
        cross = [float(loss.detach()) for loss in losses]  # its trainer logs them
        weighted = torch.stack([0.8**k * loss for k, loss in enumerate(losses)])
        return weighted.sum(), {"cross": cross}

    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0)
    serve(model, forward, optimizer, {"form": "EAGLE"})


def _renamed(rows: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """The head's weights under a peer's names, by the beginnings of ours."""
    weights = {}
    for name, value in rows.items():
        if name.startswith("head."):
            name = name.removeprefix("head.")
            old = next((old for old in names if name.startswith(old)), "")
            weights[names.get(old, "") + name.removeprefix(old)] = value
    return weights


if __name__ == "__main__":
    from safetensors.torch import load_file

    peer, path, given = sys.argv[1:]
    {"speculators": speculators, "eagle": eagle}[peer](load_file(path), json.loads(given))
