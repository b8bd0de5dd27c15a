"""The engine on several ranks beside the engine on one, for `test_parallel`; run by torchrun.

ranks.py '{"cases": [{"name", "target", "drafter", ...}, ...], "out": FOLDER}'

The leader answers every case twice, on its own and with the other, and writes what it found to
out/leader.json; each rank writes what it was fed to out/rank-N.json. At last the other is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.append(str(Path(__file__).parent))

from small_heads import HEAD_CONFIGS, PROMPTS, away_from_its_start

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMDrafter
from draftsmith.inference.drafters import Drafter, Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.follower import Follower
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.inference.hybrid import HybridDrafter, NgramConfig
from draftsmith.inference.line import held
from draftsmith.inference.pages import KVPool
from draftsmith.inference.parallel import Load, SharedTarget, joined
from draftsmith.inference.sequence import Sequence
from draftsmith.inference.tree import TreeConfig
from draftsmith.inference.tree_drafter import TreeHeadDrafter
from draftsmith.kernels.packed_linear import PackedLinear
from draftsmith.models.heads import Head
from draftsmith.models.lean import LeanStack
from draftsmith.models.target import Target, TargetConfig
from draftsmith.models.trunk import Trunk

CONFIG = EngineConfig(pool_tokens=512, page_size=4, poison=True, max_batch=3, max_step_tokens=24)
TREES = {
    "dynamic": TreeConfig("dynamic", top_k=2, nodes=6),
    "static": TreeConfig("static", "full", top_k=2),
}
FEW = PROMPTS[::2]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=10, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=10, temperature=1.0, top_p=0.9, seed=3),
}
"""Of a request of the toys."""


def listen() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the shared layers of this process are fed and give, from now on."""
    heard: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = LeanStack.forward

    def listening(stack: LeanStack, embeds: torch.Tensor, *rest: Any) -> Any:
        out = forward(stack, embeds, *rest)
        if not isinstance(stack.layers[0].o, PackedLinear):
            heard.append((embeds.clone(), out[len(stack.layers)].clone()))
        return out

    mock.patch.object(LeanStack, "forward", listening).start()
    return heard


def drafter(case: dict[str, Any], target: Target) -> Drafter | None:
    """Of a case, fresh; its weights follow from the case alone."""
    kind = case["drafter"]
    if kind == "none":
        return None
    if kind == "draft-lm":
        model = Target.load(TargetConfig(case["draft_lm"], dtype="float64", device="cpu"))
        return DraftLMDrafter(DraftLM.paired(model, target))
    ids = torch.arange(0, 512, 3) if case.get("reduced") else None
    torch.manual_seed(0)
    head = away_from_its_start(HEAD_CONFIGS[kind], target, ids)
    if "tree" in case:
        trees = HintedTrees(head, TREES[case["tree"]], target)
        return HybridDrafter(NgramConfig(), trees, trees.tree) if case.get("look-up") else trees
    return HeadDrafter(head, ids)


class HintedTrees(TreeHeadDrafter):
    """A bad head whose last child of each node is the plain text's own token, so that kept rows
    have to move; of greedy requests alone, for a law must have drawn its drafts."""

    def __init__(self, head: Head, tree: TreeConfig, target: Target) -> None:
        super().__init__(head, None, tree)
        texts = Engine(target, CONFIG).run(FEW, PARAMS["greedy"])
        self.texts = {tuple(one.tokens[: one.num_prompt]): one.output for one in texts}

    def _offer(self, sequence: Sequence, leaf: Any, found: list[int]) -> list[int]:
        text = self.texts[tuple(sequence.tokens[: sequence.num_prompt])]
        place = len(sequence.output) + len(leaf.path)
        if not sequence.params.greedy or place >= len(text) or text[place] in found:
            return found
        return [*found[:-1], text[place]]


def answers(case: dict[str, Any], target: Target) -> tuple[dict[str, Any], Engine]:
    """Texts, drafts and counts of a case, greedy and sampled, and the last engine, which still has
    its pages."""
    found: dict[str, Any] = {}
    engine: Engine | None = None
    for name, params in PARAMS.items():
        config = replace(CONFIG, tree=TREES[case["tree"]]) if "tree" in case else CONFIG
        engine = Engine(target, config, drafter(case, target))
        with noted(engine.drafter) as found[f"{name} chains"]:
            found[name] = [sequence.output for sequence in engine.run(FEW, params)]
        counts = engine.metrics
        found[f"{name} drafts"] = [counts.num_draft_tokens, counts.num_accepted_tokens]
    assert engine is not None
    return found, engine


@contextlib.contextmanager
def noted(drafting: Drafter | None) -> Iterator[list[list[int]]]:
    """The chains that are proposed: the text alone would not show a draft that came out wrong."""
    chains: list[list[int]] = []
    if drafting is None:
        yield chains
        return
    propose = type(drafting).propose

    def noting(own: Drafter, *given: Any) -> list[Proposal]:
        proposals = propose(own, *given)
        chains.extend(proposal.tokens for proposal in proposals)
        return proposals

    with mock.patch.object(type(drafting), "propose", noting):
        yield chains


def weights_of(target: Target, case: dict[str, Any]) -> int:
    """Bytes that one rank alone holds of a case's target and head."""
    drafting = drafter(case, target)
    things: list[Any] = [target]
    if isinstance(drafting, HeadDrafter):
        drafting.attach(target, KVPool(0, 0), 0)
        things += [drafting.function, drafting.lm_heads[0]]
    return held(things, []).weights


def lead(load: Load, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Every case on one rank and on all."""
    found: dict[str, Any] = {}
    for case in cases:
        config = TargetConfig(case["target"], dtype="float64", device="cpu")
        alone, shared = Target.load(config), load(config)
        assert isinstance(shared, SharedTarget)
        right, _ = answers(case, alone)
        ours, engine = answers(case, shared)
        found[case["name"]] = {
            "alone": right,
            "shared": ours,
            "weights": weights_of(alone, case),
            "ranks": [asdict(one) for one in shared.memory()],
        }
    return found


def refusal(load: Load, folder: str) -> str:
    """What is said of a target that cannot be shared; the ranks go on."""
    try:
        load(TargetConfig(folder, dtype="float64", device="cpu"))
    except ValueError as error:
        return str(error)
    return ""


def loss(load: Load, case: dict[str, Any], out: Path) -> str:
    """What is said when the other rank ends in the middle of a call."""
    engine = Engine(load(TargetConfig(case["target"], dtype="float64", device="cpu")), CONFIG)
    (out / "end").touch()
    try:
        engine.run(FEW, PARAMS["greedy"])
    except ConnectionError as error:
        return str(error)
    return ""


def end_when_told(out: Path, last: Callable[[], None]) -> None:
    """Let a rank beside the leader be gone where it should multiply, once there is a file `end`."""
    rows = Follower._rows

    def ending(follower: Follower, number: int, values: list[int]) -> None:
        if (out / "end").exists():
            last()
            os._exit(0)
        rows(follower, number, values)

    mock.patch.object(Follower, "_rows", ending).start()


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    heard, out, cases = listen(), Path(given["out"]), given["cases"]

    def tell() -> None:
        """Rows of embeddings are told as the tokens that they are of."""
        table = Trunk.load(cases[0]["target"], torch.float64).embedding
        fed = [part for part, _ in heard if part.shape[1] == table.shape[1]]
        tokens = [(part[:, None] == table).all(-1).nonzero()[:, 1].tolist() for part in fed]
        told = {"tokens": tokens, "states": [float(states.sum()) for _, states in heard]}
        (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))

    end_when_told(out, tell)
    with joined() as load:
        assert load is not None
        found = {"refused": refusal(load, given["one_head"]), **lead(load, cases)}
        found["lost"] = loss(load, cases[0], out)
        tell()
        (out / "leader.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
