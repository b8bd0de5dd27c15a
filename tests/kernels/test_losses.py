"""Every distillation loss against its float64 definition by autograd: values, gradients of students
and of their head, and the places where a plain formula gives NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.kernels.distill_loss import distill_loss
from draftsmith.kernels.losses import LOSSES, STATES, LossConfig, Pair, mix, parse, smooth_l1

ALL = [*LOSSES, STATES]
EAGLE_ONE = "smooth-l1+0.1*kl"
MIXES = ["0.9*tv+0.1*ce", EAGLE_ONE, "lk-alpha+0.5*topk+2*reverse-kl"]


def _by_definition(
    kind: str, z: Tensor, target: Tensor, label: Tensor, config: LossConfig
) -> Tensor:
    """The plain formula over finished logits [m, V]; what autograd makes of it is the gradient."""
    log_q, log_p = z.log_softmax(-1), target.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if kind == "kl":
        return -(p * log_q).sum(-1)
    if kind == "ce":
        picked = log_q.gather(-1, label.clamp(min=0)[..., None]).squeeze(-1)
        return -torch.where(label >= 0, picked, 0.0)
    if kind == "reverse-kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "tv":
        return (q - p).abs().sum(-1) / 2
    if kind == "lk-alpha":
        return -torch.minimum(log_p, log_q).logsumexp(-1)
    if kind == "lk-lambda":
        alpha = torch.minimum(p, q).sum(-1)
        blend = torch.exp(-config.eta * alpha.detach())
        return blend * (p * (log_p - log_q)).sum(-1) + (1 - blend) * (1 - alpha)
    assert kind == "topk"
    top = target.topk(min(config.top_k, target.shape[-1] - 1), -1).indices
    kept = torch.zeros_like(target, dtype=torch.bool).scatter(-1, top, True)
    rest = torch.where(kept, -math.inf, log_q).logsumexp(-1)
    return -(p * log_q * kept).sum(-1) - (p * ~kept).sum(-1) * rest


def _config(kind: str) -> LossConfig:
    return LossConfig(kind, top_k=3) if "topk" in kind else LossConfig(kind)


class _Case:
    """Random inputs of one call; `own`: the students have a head and a width of their own."""

    def __init__(
        self,
        steps: int,
        rows: int,
        columns: int,
        *,
        hidden: int = 16,
        own: int | None = None,
        dtype: torch.dtype = torch.float64,
        spread: float = 2.0,
    ) -> None:
        generator = torch.Generator().manual_seed(steps * 1000 + rows + columns)

        def make(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        self.teacher = make(rows, hidden)
        self.head = make(columns, hidden, scale=spread / hidden**0.5)
        self.student_head = None
        width = hidden
        if own is not None:
            width = own
            self.student_head = make(columns, own, scale=spread / own**0.5).requires_grad_()
        self.students = make(steps, rows, width).requires_grad_()
        weight = torch.rand(steps, rows, generator=generator)
        self.weight = weight * (torch.rand(steps, rows, generator=generator) > 0.3)
        self.labels = torch.randint(columns, (rows,), generator=generator)
        self.labels[::4] = -1

    @property
    def learning(self) -> list[Tensor]:
        return [x for x in (self.students, self.student_head) if x is not None]

    def ours(self, kind: str, **options: Any) -> tuple[Tensor, Any]:
        return distill_loss(
            self.students,
            self.teacher,
            self.weight,
            self.head,
            student_head=self.student_head,
            loss=_config(kind),
            **options,
        )

    def exact(
        self,
        kind: str,
        *,
        labels: Tensor | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
    ) -> Tensor:
        def finish(raw: Tensor, scale: float, cap: float | None) -> Tensor:
            return scale * raw if cap is None else cap * torch.tanh(scale * raw / cap)

        own = self.head if self.student_head is None else self.student_head
        scale, cap = logit_scale, softcap
        if self.student_head is not None:
            scale, cap = 1.0, None  # read plainly
        target = finish(self.teacher.double() @ self.head.double().T, logit_scale, softcap)
        z = finish(self.students.double() @ own.double().T, scale, cap)
        label = target.argmax(-1) if labels is None else labels
        total = torch.zeros((), dtype=torch.float64)
        for name, weight in parse(kind).items():
            if name == STATES:
                d = (self.students.double() - self.teacher.double()).abs()
                value = torch.where(d < 1, d.square() / 2, d - 0.5).mean(-1)
            else:
                wanted, picked = target.expand_as(z), label.expand(z.shape[:-1])
                value = _by_definition(name, z, wanted, picked, _config(kind))
            total = total + weight * (value * self.weight.double()).sum()
        return total

    def compare(self, kind: str, tolerance: float, chunk: int | None = None, **options: Any) -> Any:
        loss, stats = self.ours(kind, chunk=chunk, **options)
        exact = self.exact(kind, **options)
        torch.testing.assert_close(loss.double(), exact, rtol=tolerance, atol=tolerance)
        ours = torch.autograd.grad(3 * loss, self.learning)
        right = torch.autograd.grad(3 * exact, self.learning, allow_unused=True)
        for a, b in zip(ours, right, strict=True):
            b = torch.zeros_like(a) if b is None else b
            scale = max(1.0, float(b.abs().max()))
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * scale)
        return stats


@pytest.mark.parametrize("columns", [1, 2, 17, 600])
@pytest.mark.parametrize("kind", [*ALL, *MIXES])
def test_value_and_gradient_equal_the_definition(kind: str, columns: int) -> None:
    """Students read through the teacher's head, any pattern of weights, chunks of 7."""
    _Case(3, 23, columns).compare(kind, 1e-10, 7)


@pytest.mark.parametrize("kind", [*ALL, *MIXES])
def test_a_head_of_the_students_own_learns(kind: str) -> None:
    """Its gradient, summed over chunks, and the students' through it; the target's scale and cap
    are the teacher's alone. Its width may differ from the target's where no states are compared."""
    case = _Case(3, 23, 300, own=16 if STATES in kind else 12)
    case.compare(kind, 1e-10, 16, logit_scale=1.3, softcap=2.5)
    case.compare(kind, 1e-10, 16)


@pytest.mark.parametrize("kind", list(LOSSES))
def test_soft_cap_and_scale_of_the_target_are_honoured(kind: str) -> None:
    """Without a head of their own, students are finished as the teacher is."""
    _Case(2, 19, 300, spread=6.0).compare(kind, 1e-10, 8, logit_scale=1.7, softcap=2.5)


@pytest.mark.parametrize("kind", ALL)
def test_whole_vocabularies(kind: str) -> None:
    """A handful of rows, with a student head of its own: 49,152 columns in fp64, 151,936 in fp32 as
    near as a softmax allows that sums to 1 + 1e-5 over so many, and a column where p and q agree in
    all their bits, which may take the other side of its kink."""
    single = 1e-3 if kind in ("tv", "lk-alpha", "lk-lambda") else 1e-4
    _Case(2, 3, 49152, hidden=8, own=8, spread=3.0).compare(kind, 1e-10)
    wide = _Case(1, 3, 151936, hidden=8, own=8, dtype=torch.float32, spread=3.0)
    wide.compare(kind, single)


@pytest.mark.parametrize("kind", ["kl", "ce", "reverse-kl", "topk", STATES])
def test_smooth_losses_pass_gradcheck(kind: str) -> None:
    """Numerical derivatives by students and student head, away from kinks."""
    case = _Case(2, 3, 5, hidden=3, own=3)

    def loss(students: Tensor, student_head: Tensor) -> Tensor:
        case.students, case.student_head = students, student_head
        return case.ours(kind, chunk=6)[0]

    assert torch.autograd.gradcheck(loss, tuple(case.learning))


def _pair(target: Tensor, z: Tensor, config: LossConfig) -> Pair:
    """What the walk would hand a loss, from finished logits [m, V]."""
    p, q = target.softmax(-1), z.softmax(-1)
    top_k = min(config.top_k, z.shape[1] - 1)
    top = target.topk(top_k, -1).indices
    return Pair(
        p=p,
        q=q,
        teacher_logits=target,
        logits=z,
        cross=z.logsumexp(-1) - (p * z).sum(-1),
        label=target.argmax(-1),
        top=top,
        config=config,
    )


def _extremes(columns: int) -> tuple[Tensor, Tensor]:
    """Teacher and student logits: +-1e4 at random, one-hot against one-hot (the same and another
    column), one-hot against flat, flat against one-hot, and flat against flat."""
    generator = torch.Generator().manual_seed(columns)
    noise = torch.randn(2, 4, columns, generator=generator)
    random = noise.sign() * 1e4 + noise.round(decimals=2)
    hot = torch.full((3, columns), -1e4)
    hot[range(3), [5, 5, 9]] = 1e4
    flat = torch.zeros(1, columns)
    target = torch.cat([random[0], hot[[0]], hot[[0]], hot[[0]], flat, flat])
    return target, torch.cat([random[1], hot[[1]], hot[[2]], flat, hot[[2]], flat])


@pytest.mark.parametrize("columns", [40, 151936])
@pytest.mark.parametrize("kind", [*LOSSES, "0.9*tv+0.1*ce"])
def test_saturated_and_one_hot_rows(kind: str, columns: int) -> None:
    """fp32 logits of +-1e4, where most probabilities are 0 to the last bit and p and q may share
    none: finite, and the float64 definition's value and gradient."""
    target, z = _extremes(columns)
    config = LossConfig(kind)
    value, gradient = mix(parse(kind), _pair(target, z, config))
    exact_z = z.double().requires_grad_()
    exact = sum(
        weight * _by_definition(name, exact_z, target.double(), target.argmax(-1), config)
        for name, weight in parse(kind).items()
    )
    assert isinstance(exact, Tensor)
    (right,) = torch.autograd.grad(exact.sum(), exact_z)
    assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
    torch.testing.assert_close(value.double(), exact.detach(), rtol=2e-5, atol=2e-5)
    scale = max(1.0, float(right.abs().max()))
    torch.testing.assert_close(gradient.double(), right, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("kind", list(LOSSES))
def test_saturated_rows_through_the_whole_walk(kind: str) -> None:
    """States whose logits reach 1e4: in float64 the definition's, with the student head's
    gradient."""
    case = _Case(2, 19, 300, own=16, spread=3e3)
    case.compare(kind, 1e-8, 16)


@pytest.mark.parametrize("kind", list(LOSSES))
def test_a_soft_cap_that_is_reached_everywhere(kind: str) -> None:
    """Logits of 1e4 under a cap of 30 are +-30 to the last bit: the cap's derivative is 0 or nearly
    so, and nothing is NaN."""
    _Case(2, 19, 300, spread=3e3).compare(kind, 1e-8, 16, logit_scale=1.7, softcap=30.0)


def test_states_far_apart_and_equal() -> None:
    """smooth-l1 of states 1e4 apart, of the width of its kink, and equal ones: PyTorch's own."""
    wanted = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    apart = torch.tensor([[1e4], [-1e4], [1.0], [-1.0], [0.0]])
    states = (wanted.double() + apart).requires_grad_()
    value, gradient = smooth_l1(states.detach(), wanted.double())
    exact = torch.nn.functional.smooth_l1_loss(states, wanted.double(), reduction="none").mean(-1)
    torch.testing.assert_close(value, exact.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(exact.sum(), states)[0])
    assert not bool(gradient[4].any()) and float(value[4]) == 0.0


@pytest.mark.parametrize("own", [None, 12])
@pytest.mark.parametrize("kind", list(LOSSES))
def test_a_reduced_vocabulary_renormalises_the_teacher(kind: str, own: int | None) -> None:
    """p is the whole distribution cut to the draft ids and divided by what is left; q runs over
    the draft ids alone."""
    case = _Case(2, 19, 600, own=own)
    whole, ids = case.head, torch.arange(0, 600, 3)
    p = (case.teacher @ whole.T).softmax(-1)[:, ids]
    target = (p / p.sum(-1, keepdim=True)).log()
    case.head = whole[ids]
    if case.student_head is not None:
        case.student_head = case.student_head.detach()[ids].requires_grad_()
    loss, _ = case.ours(kind, chunk=16)
    z = case.students @ (case.head if case.student_head is None else case.student_head).T
    label = target.argmax(-1).expand(z.shape[:-1])
    value = _by_definition(kind, z, target.expand_as(z), label, _config(kind))
    exact = (value * case.weight.double()).sum()
    torch.testing.assert_close(loss, exact, rtol=1e-10, atol=1e-10)
    right = torch.autograd.grad(exact, case.learning)
    for a, b in zip(torch.autograd.grad(loss, case.learning), right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("kind", [k for k in LOSSES if k != "ce"])
def test_a_student_that_equals_its_teacher_stays(kind: str) -> None:
    """p = q: gradient 0 although every column is a kink of min(p, q), and no distance."""
    z = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 4
    value, gradient = LOSSES[kind](_pair(z, z.clone(), LossConfig(kind)))
    assert float(gradient.abs().max()) < 2e-7
    if kind not in ("kl", "topk"):  # cross-entropies keep the teacher's own entropy
        assert float(value.abs().max()) < 2e-6


@pytest.mark.parametrize("kind", ["tv", "lk-alpha", "lk-lambda"])
def test_the_subgradient_at_a_kink_is_the_middle(kind: str) -> None:
    """Student and teacher swap two columns and agree on the others to the bit: autograd's halves
    at a tie of min(p, q), and its 0 at |0|, are ours."""
    target = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]], dtype=torch.float64)
    z = target[:, [1, 0, 2, 3, 4]].clone().requires_grad_()
    p, q = target.softmax(-1), z.detach().softmax(-1)
    assert bool((p == q)[:, 2:].all())
    _, gradient = LOSSES[kind](_pair(target, z.detach(), LossConfig(kind)))
    exact = _by_definition(kind, z, target, target.argmax(-1), LossConfig(kind))
    torch.testing.assert_close(gradient, torch.autograd.grad(exact.sum(), z)[0])


@pytest.mark.parametrize("kind", [*ALL, *MIXES])
def test_rows_without_weight_are_never_read(kind: str) -> None:
    """NaN states where nothing is supervised change no bit of loss and gradients."""
    case = _Case(3, 31, 100, own=16, dtype=torch.float32)
    case.weight[:, 4:9] = 0
    loss, _ = case.ours(kind, chunk=16)
    grads = torch.autograd.grad(loss, case.learning)
    learned = case.weight > 0
    clean = case.students.detach()
    case.students = torch.where(learned[..., None], clean, math.nan).requires_grad_()
    case.teacher = torch.where(learned.any(0)[:, None], case.teacher, math.nan)
    again, _ = case.ours(kind, chunk=16)
    assert torch.equal(loss, again)
    for a, b in zip(grads, torch.autograd.grad(again, case.learning), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [*ALL, *MIXES])
def test_nothing_supervised_adds_exactly_zero(kind: str) -> None:
    """Loss 0 and gradients of zeros for students and head, whatever is minimised."""
    case = _Case(2, 9, 64, own=16, dtype=torch.float32)
    case.weight.zero_()
    loss, _ = case.ours(kind)
    assert float(loss.detach()) == 0.0
    assert not any(bool(g.any()) for g in torch.autograd.grad(loss, case.learning))


def test_hard_labels_from_the_data() -> None:
    """`ce` takes the columns it is given; a row whose label is -1 adds nothing."""
    case = _Case(2, 40, 30)
    case.compare("ce", 1e-10, 8, labels=case.labels)
    loss, _ = case.ours("ce", labels=torch.full((40,), -1))
    assert float(loss.detach()) == 0.0
    with pytest.raises(ValueError, match=r"labels\[3\] is 30"):
        case.ours("ce", labels=torch.tensor([0, 1, 2, 30] * 10))
    with pytest.raises(ValueError, match=r"labels \[39\]"):
        case.ours("ce", labels=case.labels[1:])


@pytest.mark.parametrize("kind", ALL)
def test_statistics_do_not_depend_on_what_is_minimised(kind: str) -> None:
    """Soft cross-entropy, KL, acceptance and agreement are measured beside any loss."""
    case = _Case(2, 19, 300)
    _, usual = case.ours("kl")
    loss, stats = case.ours(kind)
    for name in ("weight", "rows", "cross", "kl", "acceptance", "agreement", "teacher_top"):
        torch.testing.assert_close(getattr(stats, name), getattr(usual, name))
    torch.testing.assert_close(stats.loss.sum(), loss.detach())


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_mass_outside_a_draft_vocabulary(softcap: float | None) -> None:
    """Measured per step over the rows it learns, with the target's scale and cap; it changes no
    loss."""
    case = _Case(3, 23, 600)
    whole, ids = case.head, torch.arange(0, 600, 3)
    case.head = whole[ids]
    finish = {"logit_scale": 1.2, "softcap": softcap}
    z = 1.2 * case.teacher @ whole.T
    p = (z if softcap is None else softcap * torch.tanh(z / softcap)).softmax(-1)
    outside = (1 - p[:, ids].sum(-1)) * (case.weight > 0)
    loss, stats = case.ours("kl", full_head=whole, chunk=16, **finish)
    torch.testing.assert_close(stats.outside, outside.sum(1))
    assert torch.equal(loss, case.ours("kl", chunk=16, **finish)[0])


def test_the_student_head_gradient_is_summed_in_fp32() -> None:
    """Under bf16 autocast: fp32, within bf16 rounding of the definition, over many chunks."""
    case = _Case(2, 400, 200, hidden=32, own=32, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = case.ours("kl", chunk=8)
    ours = torch.autograd.grad(loss, case.learning)
    right = torch.autograd.grad(case.exact("kl"), case.learning)
    for a, b in zip(ours, right, strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.02


class _Largest(TorchDispatchMode):
    """The largest tensor any operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("kind", [*ALL, *MIXES])
def test_only_a_chunk_of_logits_ever_exists(kind: str) -> None:
    """No operation returns more than chunk * V elements, with a student head, and with the mass
    outside the draft vocabulary measured over a vocabulary eight times as large (74)."""
    case = _Case(2, 150, 250, hidden=4, own=4, dtype=torch.float32)
    full = torch.randn(2000, 4)
    with _Largest() as seen:
        case.ours(kind, chunk=32, full_head=full)[0].backward()
    assert 0 < seen.numel <= 32 * 250


@pytest.mark.parametrize(
    ("kind", "terms"),
    [
        ("kl", {"kl": 1.0}),
        (EAGLE_ONE, {STATES: 1.0, "kl": 0.1}),
        ("1e+1*kl", {"kl": 10.0}),
        ("1.e+1*kl+2E+0*ce+tv", {"kl": 10.0, "ce": 2.0, "tv": 1.0}),
        ("ce+1e-1*kl", {"ce": 1.0, "kl": 0.1}),
        (" 0.9 * tv + 0.1*ce", {"tv": 0.9, "ce": 0.1}),
    ],
)
def test_weighted_sums_are_read(kind: str, terms: dict[str, float]) -> None:
    """Weights in any notation of a number; the + of an exponent joins nothing."""
    assert parse(kind) == terms


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "kll"}, "'kll' is no loss.*lk-alpha"),
        ({"kind": "-1*kl"}, "positive weight"),
        ({"kind": "nan*kl"}, "positive weight"),
        ({"kind": "much*kl"}, "positive weight"),
        ({"kind": "kl+"}, "'' is no loss"),
        ({"kind": "kl+0.5*kl"}, "names kl twice"),
        ({"top_k": 0}, "top_k=0"),
        ({"eta": -1.0}, "eta=-1"),
        ({"labels": "both"}, "labels='both'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    """Named, with what would do."""
    with pytest.raises(ValueError, match=words):
        LossConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"top_k": 5}, "topk"), ({"eta": 1.0}, "lk-lambda"), ({"labels": "data"}, "ce")],
)
def test_a_setting_that_no_term_reads_warns(settings: dict[str, Any], words: str) -> None:
    """It names the term that would read it; with that term there is nothing to say."""
    with pytest.warns(UserWarning, match=f"no term {words}"):
        LossConfig("kl", **settings)
    LossConfig(f"kl+{words}", **settings)


def test_students_and_head_that_do_not_fit_are_refused() -> None:
    """Widths, and states that cannot be compared."""
    case = _Case(2, 9, 64, own=12)
    with pytest.raises(ValueError, match="students have width 12, the teacher 16"):
        case.ours(EAGLE_ONE)
    case.student_head = None
    with pytest.raises(ValueError, match="do not fit"):
        case.ours("kl")
