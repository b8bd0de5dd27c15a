"""The DeepSpeed engine around a head: the same on one CPU process and on many GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import PackedBatch
from ..kernels.distill_loss import DistillStats
from ..models.heads import Head
from .config import TrainConfig
from .objective import Objective
from .ranks import import_deepspeed, quiet_imports


class _Learner(nn.Module):
    """What DeepSpeed sees: the head's parameters and nothing of the trunk, which hides in the
    objective."""

    def __init__(self, head: Head, objective: Objective) -> None:
        super().__init__()
        self.head = head
        self.objective = objective

    def forward(self, batch: PackedBatch, steps: int) -> tuple[Tensor, DistillStats]:
        return self.objective(self.head, batch, steps)


def make_engine(head: Head, objective: Objective, cfg: TrainConfig) -> Any:
    """A DeepSpeed engine; `engine(batch, steps)` is the objective's (loss, statistics).

    head: on the trunk's device, fp32. The process group must be up (`ranks.start`).
    """
    deepspeed = import_deepspeed(objective.trunk.device)
    with quiet_imports():
        return deepspeed.initialize(
            model=_Learner(head, objective),
            model_parameters=_parameter_groups(head, cfg.weight_decay),
            config=deepspeed_config(cfg),
        )[0]


def deepspeed_config(cfg: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration of a run. The learning rate is set by the loop each step, and no
    scheduler is used."""
    adam = {"betas": list(cfg.betas), "eps": 1e-8, "torch_adam": True, "adam_w_mode": True}
    muon = {"muon_lr": cfg.muon_lr, "adam_lr": cfg.lr, "momentum": 0.95}
    zero: dict[str, Any] = {"stage": cfg.zero_stage, "overlap_comm": False}
    if cfg.optimizer == "muon":
        zero["reduce_scatter"] = False  # Muon needs whole gradients
    if cfg.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if cfg.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": cfg.accumulation,
        "gradient_clipping": cfg.grad_clip,
        "optimizer": {
            "type": "Muon" if cfg.optimizer == "muon" else "AdamW",
            "params": adam | (muon if cfg.optimizer == "muon" else {"lr": cfg.lr}),
        },
        "zero_optimization": zero,
        # torch's AdamW on the host too: DeepSpeed's own is compiled on first use.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if cfg.precision == "bf16":
        # No module is "safe" in DeepSpeed's sense, which would reduce its gradients in bf16: they
        # are summed in fp32.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    return config


def set_rate(engine: Any, rate: float, cfg: TrainConfig) -> None:
    """Set the learning rate: AdamW's is `rate`, Muon's the same share of its own peak."""
    for group in engine.optimizer.param_groups:
        muon = group.get("use_muon", False)
        group["lr"] = rate * cfg.muon_lr / cfg.lr if muon else rate


def gradient_norm(engine: Any) -> float | None:
    """Global norm of the step's averaged gradients before clipping, where it can be had before the
    step: at stage 0, where DeepSpeed itself keeps none. None at the others, which keep it."""
    if engine.zero_optimization_stage() > 0:
        return None
    gradients = [p.grad for p in engine.module.head.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def _parameter_groups(head: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in head.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in head.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
