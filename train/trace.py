"""A training step on tensors that have shapes and no data: what it will hold and compute.

The step's own code runs (`unroll`, the head's layers, autograd) under torch's fake tensors, and
every allocation is followed from its birth to its death; so what autograd saves is not estimated,
it is what this head saves. Two pieces are stood in for: attention, whose blocks would take most of
the time and hold nothing of note, and the loss, whose chunks depend on the data (`forecast.Loss`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..data.batches import PackedBatch
from ..models import experts
from ..models.heads import Head, HeadConfig, head_class, training_boundaries
from ..models.norm import RMSNorm
from ..models.trunk import Trunk
from .config import TrainConfig
from .unroll import UnrollContext, unroll


@dataclass(frozen=True)
class Step:
    """One micro-batch of one rank: bytes, operations, parameters.

    Attributes:
        parameters: of the head, all trained. largest: of its largest tensor. saved: bytes alive
            when the unroll ends (activations that autograd keeps, and what the loss is given).
            unroll, backward: most bytes alive at once in each, above the parameters; the second
            holds all gradients at its end.
        forward_flops, backward_flops: multiplications and additions of the matrix products.
        query_width: Hq (D + Dv) of the attention's heads. key_width: Hkv (D + Dv), values of keys
            and values of one token and layer; both 0 without attention. own_head: whether the head
            has an lm_head of its own.
    """

    parameters: int
    largest: int
    saved: int
    unroll: int
    backward: int
    forward_flops: int
    backward_flops: int
    query_width: int
    key_width: int
    own_head: bool


class _Allocations(TorchDispatchMode):
    """Bytes of every storage that is alive, and the most there were since `restart`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def know(self, values: Iterable[Tensor]) -> None:
        """Tensors that were there before: a view of one is no allocation."""
        self._there = [value.untyped_storage() for value in values]
        self._known.update(self._there)

    def restart(self) -> None:
        self.most = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


class _Experts(TorchDispatchMode):
    """The product of grouped rows in any dtype; torch knows its shapes for bfloat16 alone."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        a, b, ends = args[0], args[1], args[2] if len(args) > 2 else (kwargs or {})["offs"]
        shape = (a.shape[0], b.shape[-1])
        return a.new_empty(shape if b.dim() == 3 else (ends.shape[0], *shape))


class _Attention:
    """`kernels.ttt_attention` without its blocks: what it takes, keeps and gives, and its products.

    Args:
        borders: of the documents.
    """

    def __init__(self, borders: tuple[int, ...]) -> None:
        pairs = zip(borders[:-1], borders[1:], strict=True)
        self._scores = sum((end - begin) * (end - begin + 1) // 2 for begin, end in pairs)
        self.flops = self.query_width = self.key_width = 0

    def __call__(
        self,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        chain_k: Sequence[Tensor],
        chain_v: Sequence[Tensor],
        starts: Sequence[int],
        **_: Any,
    ) -> Tensor:
        self.query_width = q.shape[0] * (q.shape[2] + v0.shape[2])
        self.key_width = k0.shape[0] * (q.shape[2] + v0.shape[2])
        self.flops += 2 * self._scores * self.query_width
        return _KeptByAttention.apply(q, k0, v0, *chain_k, *chain_v)


class _KeptByAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k0: Tensor, v0: Tensor, *chain: Tensor) -> Tensor:
        out = q.new_empty(q.shape[1], q.shape[0], v0.shape[2]).transpose(0, 1)
        log_sums = q.new_empty(q.shape[:2], dtype=torch.float32)  # of each query's softmax
        ctx.save_for_backward(q, k0, v0, out, log_sums, *chain)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, k0, v0, _, _, *chain = ctx.saved_tensors
        sums = [
            torch.empty_like(k0, dtype=torch.float32),
            torch.empty_like(v0, dtype=torch.float32),
        ]
        given = [torch.empty_like(q), *(part.to(k0.dtype) for part in sums)]
        return *given, *(torch.empty_like(part) for part in chain)


def meta_head(config: HeadConfig, target_config: Any, draft_vocab_size: int | None) -> Head:
    """The head without data: its parameters and their shapes."""
    with torch.device("meta"):
        head = head_class(config.kind)(config, target_config, draft_vocab_size)
    experts.group(head)
    return head


def trace_step(
    config: HeadConfig,
    target_config: Any,
    train: TrainConfig,
    *,
    row_tokens: int,
) -> Step:
    """One micro-batch of `train.tokens_per_batch` tokens in documents of `row_tokens`, forward and
    backward, on tensors without data.

    Raises:
        ValueError: the head does not fit the target, or cannot be unrolled so far.
    """
    head = meta_head(config, target_config, train.draft_vocab_size)
    boundaries = training_boundaries(config, int(target_config.num_hidden_layers))
    size, tokens = int(target_config.hidden_size), train.tokens_per_batch
    borders = [*range(0, tokens, max(1, min(row_tokens, tokens))), tokens]
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    starts = torch.tensor(borders, dtype=torch.int32)
    attention = _Attention(tuple(borders))
    # reads the borders, which a tensor without data does not allow
    context = UnrollContext(starts, attention)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _give_shapes(head)
        table = torch.empty(int(target_config.vocab_size), size, dtype=dtype)
        norm = RMSNorm(size, 1e-5)
        norm.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        trunk = Trunk(table, norm, table)
        states = {k: torch.empty(tokens, size, dtype=torch.bfloat16) for k in boundaries}
        batch = PackedBatch(
            tokens=torch.empty(tokens, dtype=torch.int64),
            supervised=torch.empty(tokens, dtype=torch.bool),
            hidden=states[boundaries[-1]],
            starts=starts,
            positions=torch.empty(tokens, dtype=torch.int64),
            row_ids=(),
        )
        with _counted() as (seen, flops):
            there = (table, norm.weight, batch.tokens, batch.positions)
            seen.know([*head.parameters(), *states.values(), *there])
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                drafted = unroll(head, trunk, batch, train.steps, states=states, context=context)
                rows = [drafted[k].roll(1 + k, 0) for k in range(train.steps)]
                students = torch.stack(rows).to(dtype)
            del drafted, rows
            forward, most, saved = flops.get_total_flops(), seen.most, seen.live
            products = attention.flops
            seen.restart()
            students.backward(torch.empty_like(students))
            return Step(
                parameters=sum(p.numel() for p in head.parameters()),
                largest=max(p.numel() for p in head.parameters()),
                saved=saved,
                unroll=most,
                backward=seen.most,
                forward_flops=forward + products,
                backward_flops=flops.get_total_flops() - forward + 5 * products // 2,
                query_width=attention.query_width,
                key_width=attention.key_width,
                own_head=head.lm_head is not None,
            )


def _give_shapes(head: Head) -> None:
    """Tensors of the mode that is on, in place of those on the meta device."""
    for module in head.modules():
        for name, value in module.named_parameters(recurse=False):
            empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            module.register_parameter(name, nn.Parameter(empty))
        for name, value in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(value.shape, dtype=value.dtype, device="cpu"))


@contextmanager
def _counted() -> Iterator[tuple[_Allocations, FlopCounterMode]]:
    products = {torch.ops.aten._grouped_mm: _grouped_flops}
    with (
        _Experts(),
        FlopCounterMode(display=False, custom_mapping=products) as flops,
        _Allocations() as seen,
    ):
        yield seen, flops


def _grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Every row of `a` meets one expert's matrix; in the gradient of those, every column its own
    rows."""
    return 2 * a.numel() * b[-1]
