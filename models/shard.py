"""One rank's share of the decoder layers of a target or a head (Megatron, arXiv 1909.08053, section
3).

Lean layers are shared here, those of other families by transformers:

    q, k, v, gate, up    by rows: a rank has whole key-value heads with the queries that read them,
                         and some of the MLP's columns
    o, down              by columns, the same ones; what the ranks get adds up to the layer's

The residual is added after the sum, once. Heads need not divide by the ranks: later ranks take one
more, and earlier ones make up for it in the MLP, so that all hold equally many weights. Norms are
whole on every rank. A share is read from the files by itself; nothing of the others passes through
memory.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from .decoder import HubStack
from .lean import LeanStack
from .norm import use_own_norms
from .skeleton import implementations, name_of, skeleton, stored_names
from .trunk import tensor_files

_BLOCK = 16
"""Columns of the MLP are dealt in blocks of it where they divide by it, as products like them."""


def leave_at_exit() -> None:
    """Leave the process group before the interpreter ends.

    A group's threads free Python objects; one that does so while the interpreter ends kills the
    process ("terminate called without an active exception"), and with it a run that had finished.
    """
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Group:
    """The ranks that hold one model between them.

    Attributes:
        rank, size: this process and how many there are. ranks: what collectives run in.
    """

    rank: int
    size: int
    ranks: dist.ProcessGroup = field(repr=False)

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        with self.connected():
            dist.all_reduce(part, group=self.ranks)
        return part

    def send(self, part: Tensor, rank: int) -> None:
        """To one rank, which must receive it."""
        with self.connected():
            dist.send(part.contiguous(), rank, group=self.ranks)

    def receive(self, part: Tensor, rank: int) -> None:
        """From one rank, into `part`."""
        with self.connected():
            dist.recv(part, rank, group=self.ranks)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Around whatever waits for other ranks.

        Raises:
            ConnectionError: one of them is gone, or kept this one waiting for too long.
        """
        try:
            yield
        except RuntimeError as error:
            first = str(error).splitlines()[0].split(". ")[0]
            raise ConnectionError(
                f"rank {self.rank} of {self.size} has lost another one ({first}); the rank that "
                "ended first says why"
            ) from error

    def borders(self, units: int) -> list[int]:
        """[size + 1] of a division that gives later ranks one more where it does not come out
        even."""
        return [units * rank // self.size for rank in range(self.size + 1)]

    def own(self, borders: list[int]) -> slice:
        """This rank's part."""
        return slice(borders[self.rank], borders[self.rank + 1])


class InnerShare(nn.Module):
    """Columns of a linear map that reads what the ranks hold between them.

    Args:
        weight: [out, this rank's part of in].
    """

    def __init__(self, weight: Tensor, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.total = group.sum


@dataclass(frozen=True)
class LayerShare:
    """What one rank has of a layer: rows of q (and columns of o), rows of k and v, of gate and up
    (and columns of down)."""

    q: slice
    kv: slice
    mlp: slice

    @classmethod
    def of(cls, layer: Any, group: Group, place: str) -> LayerShare:
        """The share of a `LlamaDecoderLayer`, whose weights may lie on the meta device.

        Raises:
            ValueError: fewer key-value heads than ranks.
        """
        attention, mlp = layer.self_attn, layer.mlp
        width = int(attention.head_dim)
        q_rows, reads = attention.q_proj.weight.shape
        kv_rows, (columns, size) = attention.k_proj.weight.shape[0], mlp.gate_proj.weight.shape
        heads, queries = kv_rows // width, q_rows // kv_rows
        if heads < group.size:
            raise ValueError(
                f"{place}: {heads} key-value heads cannot be shared by {group.size} ranks, of "
                f"which each takes at least one; launch at most {heads} processes"
            )
        borders = group.borders(heads)
        # Weights of one key-value head with its queries, and of one column of the MLP.
        head = width * (queries * (reads + attention.o_proj.weight.shape[0]) + 2 * reads)
        column = 3 * size
        block = _BLOCK if columns % _BLOCK == 0 else 1
        every = heads * head + columns * column
        fair = [
            round((every * rank / group.size - border * head) / (block * column)) * block
            for rank, border in enumerate(borders)
        ]
        # Ascending and inside, should the heads be more than the MLP can make up for.
        mlp_borders = [0]
        for border in fair[1:]:
            mlp_borders.append(min(max(border, mlp_borders[-1]), columns))
        kv = group.own([width * border for border in borders])
        q = slice(queries * kv.start, queries * kv.stop)
        return cls(q, kv, group.own(mlp_borders))

    def parts(self) -> dict[str, tuple[slice, slice]]:
        """Rows and columns of each weight, by its module's name in the layer."""
        every = slice(None)
        return {
            "self_attn.q_proj": (self.q, every),
            "self_attn.k_proj": (self.kv, every),
            "self_attn.v_proj": (self.kv, every),
            "self_attn.o_proj": (every, self.q),
            "mlp.gate_proj": (self.mlp, every),
            "mlp.up_proj": (self.mlp, every),
            "mlp.down_proj": (every, self.mlp),
        }


def narrow(layer: Any, group: Group, place: str) -> None:
    """Leave a decoder layer (weights in memory, no gradient) its rank's share, in place; a
    `LeanLayer` made of it gives the whole layer's output."""
    for name, (rows, columns) in LayerShare.of(layer, group, place).parts().items():
        part = layer.get_submodule(name)
        weight, bias = part.weight.detach(), getattr(part, "bias", None)
        _put(layer, name, weight[rows, columns].clone(), group)
        if bias is not None:
            part.bias = nn.Parameter(bias.detach()[rows].clone(), requires_grad=False)


def load_share(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, group: Group
) -> LeanStack:
    """One rank's share of a target's layers, read from its safetensors folder.

    Args:
        config: transformers' text configuration, of a family that `LeanStack` supports.
    Raises:
        ValueError: a tensor is missing, or there are more ranks than key-value heads.
    """
    model = skeleton(config)
    decoder = model.get_decoder()
    files = tensor_files(folder)
    stored = stored_names(model, files)

    def read(name: str, rows: slice, columns: slice | None) -> Tensor:
        key = stored.get(name)
        if key is None:
            raise ValueError(f"{folder}: no tensor {name!r}; the checkpoint is incomplete")
        with safe_open(files[key], framework="pt") as file:
            part = file.get_slice(key)
            tensor = part[rows] if columns is None else part[rows, columns]
        return tensor.to(device, dtype)

    def layers() -> Iterator[Any]:
        for layer in decoder.layers:
            prefix = name_of(model, layer)
            parts = LayerShare.of(layer, group, f"target {folder}").parts()
            for name, (rows, columns) in parts.items():
                _put(layer, name, read(f"{prefix}.{name}.weight", rows, columns), group)
                part = layer.get_submodule(name)
                if getattr(part, "bias", None) is not None:
                    bias = read(f"{prefix}.{name}.bias", rows, None)
                    part.bias = nn.Parameter(bias, requires_grad=False)
            # What is left are norms, which every rank has whole.
            for name, left in list(layer.named_parameters()):
                if left.is_meta:
                    module, _, which = name.rpartition(".")
                    weight = nn.Parameter(read(f"{prefix}.{name}", slice(None), None), False)
                    setattr(layer.get_submodule(module), which, weight)
            yield layer
            layer.to("meta")  # the lean layer has what it needs

    rotary = type(decoder.rotary_emb)(config=decoder.config).to(device)
    return LeanStack(SimpleNamespace(layers=layers(), rotary_emb=rotary))


def load_library_share(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, group: Group
) -> HubStack:
    """One rank's share of a target of another family, as transformers' own plan for it has it;
    embeddings are whole on every rank.

    Raises:
        ValueError: heads that do not divide by the ranks, or a family without a plan.
    """
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % group.size:
            raise ValueError(
                f"target {folder}: {name}={heads} does not divide by {group.size} ranks, as "
                f"transformers' layers of the family {config.model_type!r} need; launch a number "
                "of processes that it divides by"
            )
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(
            f"target {folder}: transformers has no plan by which ranks could share the family "
            f"{config.model_type!r}; run it in one process"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        distributed_config=DistributedConfig(tp_size=group.size, tp_plan="auto"),
        **implementations(),
    )
    model = model.to(device).eval().requires_grad_(False)
    if dtype == torch.float64:
        use_own_norms(model)
    return HubStack(model.get_decoder())


def _put(layer: Any, name: str, weight: Tensor, group: Group) -> None:
    if name.endswith(("o_proj", "down_proj")):
        layer.set_submodule(name, InnerShare(weight, group))
    else:
        layer.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
