"""Weights and optimiser states of a run by parameter name, whatever ZeRO stage and number of ranks
hold them.

DeepSpeed keeps a rank's share of the optimiser in flat buffers. Each rank writes its own pieces,
and each reads from all files the pieces that fall into its share; nothing is gathered and nothing
is rounded, so the same ranks get back the same bits, and other ranks or another stage the same
numbers elsewhere.

```
weights.safetensors          NAME -> fp32 tensor, from rank 0
optimizer-00000.safetensors  KEY/NAME/START -> fp32 [n]: elements START..START+n-1 of the flattened
                             parameter's state KEY (exp_avg, exp_avg_sq, momentum_buffer);
                             step/NAME/0 -> [1]: how often it was updated
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..models.heads import Head
from .ranks import import_deepspeed, rank

WEIGHTS = "weights.safetensors"
_STEP = "step"
_MOMENTUM = "momentum_buffer"  # Muon's, laid out by whole parameters at stages 1 and 2


@dataclass(frozen=True)
class _Piece:
    """`numel` elements of the parameter `name` from `start` on, which this rank updates."""

    name: str
    start: int
    numel: int
    owner: Tensor
    """The tensor that the optimiser steps, its key to the states."""
    offset: int
    """Where the piece lies in a state of the owner."""
    size: torch.Size
    """Shape of such a state."""


def whole_weights(head: nn.Module, zero_stage: int, device: torch.device) -> dict[str, Tensor]:
    """Every weight in full, on every rank: the head's own tensors, or at stage 3 copies. All ranks
    must call it."""
    if zero_stage < 3:
        return {name: value.detach() for name, value in head.state_dict().items()}
    with import_deepspeed(device).zero.GatheredParameters(list(head.parameters())):
        return {name: value.detach().clone() for name, value in head.state_dict().items()}


def whole_head(head: Head, zero_stage: int, device: torch.device) -> Head:
    """The head with all its weights on every rank: itself, or at stage 3, where each rank keeps
    shards and a forward pass puts them back there, a copy as of now. All ranks must call it."""
    if zero_stage < 3:
        return head
    tensors = whole_weights(head, zero_stage, device)
    whole = type(head)(head.config, head.target_config, head.draft_vocab_size)
    if head.lm_head is not None:
        whole.lm_head = nn.Parameter(tensors["lm_head"])
    whole.load_state_dict(tensors)
    return whole.to(device).train()


def save_state(engine: Any, folder: Path) -> None:
    """Write the head's weights (rank 0) and this rank's optimiser states. All ranks must call
    it."""
    head = engine.module.head
    weights = whole_weights(head, engine.zero_optimization_stage(), engine.device)
    if rank() == 0:
        save_file({name: _on_cpu(value) for name, value in weights.items()}, folder / WEIGHTS)
    if engine.zero_optimization_stage() == 0 and rank() > 0:
        return  # every rank holds the same
    states, tensors = engine.basic_optimizer.state, {}
    for key in ("exp_avg", "exp_avg_sq", _MOMENTUM):
        for piece in _pieces(engine, key):
            state = states.get(piece.owner, {})
            if key in state:
                part = state[key].reshape(-1).narrow(0, piece.offset, piece.numel)
                tensors[f"{key}/{piece.name}/{piece.start}"] = _on_cpu(part)
            if _STEP in state:
                steps = torch.as_tensor(state[_STEP], dtype=torch.float32)
                tensors[f"{_STEP}/{piece.name}/0"] = steps.reshape(1).cpu().clone()
    save_file(tensors, folder / f"optimizer-{rank():05d}.safetensors")


@torch.no_grad()
def load_state(engine: Any, folder: Path) -> None:
    """Put back what `save_state` wrote, at any stage and on any number of ranks. All ranks must
    call it.

    Raises:
        ValueError: the files hold other parameters than the head.
    """
    _load_weights(engine, load_file(folder / WEIGHTS))
    states = engine.basic_optimizer.state
    states.clear()
    with _Files(sorted(folder.glob("optimizer-*.safetensors"))) as files:
        for key in ("exp_avg", "exp_avg_sq", _MOMENTUM):
            for piece in _pieces(engine, key):
                written = files.index.get((key, piece.name))
                if written is None:
                    continue
                state = states[piece.owner]
                if key not in state:
                    state[key] = torch.zeros(
                        piece.size, dtype=torch.float32, device=piece.owner.device
                    )
                part = state[key].view(-1).narrow(0, piece.offset, piece.numel)
                filled = files.read(written, piece.start, part)
                if filled < piece.numel:
                    raise ValueError(
                        f"{folder} holds {filled} of {piece.numel} elements of the optimiser's "
                        f"{key} of {piece.name}; remove this checkpoint and resume again"
                    )
                for steps in files.tensors((_STEP, piece.name)):
                    known = state.get(_STEP, torch.zeros((), dtype=torch.float32))
                    state[_STEP] = torch.maximum(known, steps[0])


def _load_weights(engine: Any, weights: dict[str, Tensor]) -> None:
    head, stage = engine.module.head, engine.zero_optimization_stage()
    expected = {name for name, _ in head.named_parameters()}
    if not expected <= set(weights):
        missing = ", ".join(sorted(expected - set(weights)))
        raise ValueError(
            f"the checkpoint lacks the head's {missing}: it is of another head; choose another "
            "work folder"
        )
    if stage < 3:
        head.load_state_dict(weights)
    else:
        gathered = import_deepspeed(engine.device).zero.GatheredParameters(
            list(head.parameters()), modifier_rank=0
        )
        with gathered:
            head.load_state_dict(weights)
    if stage > 0:
        engine.optimizer.refresh_fp32_params()


def _pieces(engine: Any, key: str) -> Iterator[_Piece]:
    """What this rank holds of the states `key`."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    trained = [(n, p) for n, p in engine.module.head.named_parameters() if p.requires_grad]
    if stage in (1, 2) and key == _MOMENTUM:
        names = {parameter: name for name, parameter in trained}
        for owner, parameters in zip(
            zero.single_partition_of_fp32_groups, zero.params_in_partition, strict=True
        ):
            total, offset = sum(p.numel() for p in parameters), 0
            for p in parameters:
                yield _Piece(names[p], 0, p.numel(), owner, offset, torch.Size([total]))
                offset += p.numel()
        return
    for name, parameter in trained:
        if stage == 0:
            yield _Piece(name, 0, parameter.numel(), parameter, 0, parameter.shape)
        elif stage < 3:
            mapping = parameter._hp_mapping
            if mapping is not None:
                owner = zero.single_partition_of_fp32_groups[mapping.param_group_index]
                part, place = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                yield _Piece(name, part.start, part.numel, owner, place.start, owner.shape)
        else:
            group, offset, share = zero.grad_position[zero.get_param_id(parameter)]
            owner = zero.fp32_partitioned_groups_flat[group]
            start = rank() * share
            numel = min(share, parameter.ds_numel - start)
            if numel > 0:
                yield _Piece(name, start, numel, owner, offset, owner.shape)


class _Files:
    """The pieces in all ranks' files, by (key, parameter name)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __enter__(self) -> _Files:
        self._open = [safe_open(path, framework="pt") for path in self._paths]
        self.index: dict[tuple[str, str], list[tuple[int, Any, str]]] = {}
        for file in self._open:
            for entry in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                key, name, start = entry.split("/")
                self.index.setdefault((key, name), []).append((int(start), file, entry))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def tensors(self, place: tuple[str, str]) -> Iterator[Tensor]:
        for _, file, entry in self.index.get(place, ()):
            yield file.get_tensor(entry)

    def read(self, written: list[tuple[int, Any, str]], start: int, out: Tensor) -> int:
        """Fill out [n] with elements start..start+n-1; how many were found without a gap."""
        reached = start
        for begin, file, entry in sorted(written, key=lambda piece: piece[0]):
            source = file.get_slice(entry)
            end = begin + source.get_shape()[0]
            first, last = max(begin, reached), min(end, start + out.numel())
            if first == reached and first < last:
                out[first - start : last - start] = source[first - begin : last - begin]
                reached = last
        return reached - start


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous()
