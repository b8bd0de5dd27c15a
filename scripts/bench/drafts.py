"""What drafts win over plain decoding at batch 1: speed, and tokens a target call, in one run.

Requests are answered one after another, greedily, to their end or `--tokens`. All forms take turns
at a request, the best of a form's turns counts, and these are added up; tokens per second are of
the whole request, prompt and all. Engines are made before.

    python -m draftsmith.scripts.bench.drafts [--head FOLDER] [--prompts humaneval,mt_bench] \
        [--drafts ngram:4,chain:1,full:2:3,dynamic:3:4:7,…] [OUT.json]

    ngram:K      look-up                 comb:K:C, full:K:C   a head's static trees of K levels,
    chain:K      a head's chains of K                         C children a node
    adaptive:K   up to K                 dynamic:K:C:N        of the best N nodes
    ngram+…      any of a head's: look-up in the place of chains, or beside trees, there a branch of
                 as many tokens as a last number says (8)
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...data.prompts import load_prompts
from ...inference.config import EngineConfig, SamplingParams
from ...inference.drafters import Drafter, NgramDrafter
from ...inference.engine import Engine
from ...inference.head_drafter import HeadDrafter
from ...inference.hybrid import HybridDrafter, NgramConfig
from ...inference.tree import TreeConfig
from ...inference.tree_drafter import TreeHeadDrafter
from ...models.files import atomic_write_json
from ...models.heads import load_head
from ...models.heads.checkpoint import LoadedHead
from ...models.target import Target, TargetConfig, load_tokenizer, prepare_folder
from ._passes import take_turns

DRAFTS = (
    "ngram:4,chain:1,chain:2,ngram+chain:3,full:2:3,dynamic:2:4:7,dynamic:3:4:7,"
    "ngram+dynamic:2:5:9:6,ngram+dynamic:3:5:9:6"
)
"""Of these, what needs a head is left out where there is none."""


@dataclass(frozen=True)
class Form:
    """One way to draft.

    Attributes:
        kind, levels: see the module's table. tree: of a tree, else chains. head: what drafts
            beside look-up. lookup: whether look-up drafts with the head.
    """

    kind: str
    levels: int
    tree: TreeConfig
    head: LoadedHead | None
    lookup: bool = False

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(
            draft_tokens=self.levels,
            max_batch=1,
            max_step_tokens=512,
            pool_tokens=2048,
            prefix_reuse=False,  # a prompt is answered again and again
            adaptive=self.kind == "adaptive",
            tree=self.tree,
        )

    def drafter(self) -> Drafter | None:
        """A new one; None for plain decoding."""
        if self.kind == "ngram" or self.head is None:
            return NgramDrafter() if self.levels else None
        head, ids = self.head.head, self.head.draft_ids
        trees = self.tree.kind != "none"
        model = TreeHeadDrafter(head, ids, self.tree) if trees else HeadDrafter(head, ids)
        return HybridDrafter(NgramConfig(), model, self.tree) if self.lookup else model


PLAIN = Form("plain", 0, TreeConfig(), None)


def form_of(words: str, head: LoadedHead | None) -> Form:
    """See the module's table.

    Raises:
        ValueError: there is no such form, or it needs a head and there is none.
    """
    lookup = words.startswith("ngram+")
    kind, *given = words.removeprefix("ngram+").split(":")
    numbers = [int(number) for number in given if number.isdecimal()]
    tree = TreeConfig()
    match kind, numbers:
        case "ngram", [levels] if not lookup:
            pass
        case (("chain" | "adaptive"), [levels]):
            pass
        case (("comb" | "full"), [levels, top_k, *branch]) if len(branch) <= lookup:
            shape: Literal["comb", "full"] = "comb" if kind == "comb" else "full"
            tree = TreeConfig("static", shape, top_k, lookup=[8, *branch][-1])
        case "dynamic", [levels, top_k, nodes, *branch] if len(branch) <= lookup:
            tree = TreeConfig("dynamic", top_k=top_k, nodes=nodes, lookup=[8, *branch][-1])
        case _:
            levels = 0
    if levels < 1 or len(numbers) < len(given):
        raise ValueError(f"{words} is no form of drafts: write as in {DRAFTS}")
    if head is None and kind != "ngram":
        raise ValueError(f"{words} needs a head: give --head FOLDER")
    return Form(kind, levels, tree, head, lookup)


def measure(
    target: Target,
    prompts: list[list[int]],
    forms: dict[str, Form],
    tokens: int,
    turns: int,
) -> list[dict[str, Any]]:
    """Every form's speed and what it comes to against plain decoding."""
    engines = {
        name: Engine(target, form.config, form.drafter())
        for name, form in ({"plain": PLAIN} | forms).items()
    }
    params = SamplingParams(max_new_tokens=tokens)
    seconds, made = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    for number, prompt in enumerate(prompts):
        written: dict[str, int] = {}

        def answer(name: str, prompt: Any = prompt, written: Any = written) -> None:
            written[name] = len(engines[name].run([prompt], params)[0].output)

        calls = {name: lambda name=name, answer=answer: answer(name) for name in engines}
        for name, best in take_turns(calls, turns, warm=number == 0).items():
            seconds[name] += best
            made[name] += written[name]
    found: list[dict[str, Any]] = []
    for name, engine in engines.items():
        metrics = engine.metrics
        spent = {part: 1e3 * t / metrics.target_calls for part, t in metrics.seconds.items()}
        found.append(
            {
                "drafts": name,
                "tokens": made[name],
                "tokens_per_second": made[name] / seconds[name],
                "tokens_per_target_call": metrics.tokens_per_target_call,
                "ms_per_call": spent,
                "ratio_to_plain": made[name] / seconds[name] * seconds["plain"] / made["plain"],
            }
        )
    return found


def main() -> int:
    """Print every form's line; write JSON where a path is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", help="JSON to write")
    parser.add_argument("--head", type=Path, help="a head's folder")
    parser.add_argument("--prompts", default="humaneval,mt_bench", help="sets, see data.prompts")
    parser.add_argument("--rows", type=Path, help="a folder of rows, for the set `heldout`")
    parser.add_argument("--drafts", help=f"forms (default: {DRAFTS})")
    parser.add_argument("--limit", type=int, default=4, help="requests of each set")
    parser.add_argument("--tokens", type=int, default=96, help="the most tokens of an answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--target", default=str(Path("work") / "target" / "smollm2"))
    asked = parser.parse_args()
    config = TargetConfig(folder=asked.target)
    folder = prepare_folder(config)
    target, tokenizer = Target.load(config), load_tokenizer(folder)
    named = asked.drafts or ("ngram:4" if asked.head is None else DRAFTS)
    try:
        head = None if asked.head is None else load_head(asked.head, target.fingerprint)
        forms = {words: form_of(words, head) for words in named.split(",")}
        sets = {
            name: load_prompts(name, limit=asked.limit, tokenizer=tokenizer, rows=asked.rows)
            for name in asked.prompts.split(",")
        }
    except ValueError as error:
        parser.error(str(error))
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name, prompts in sets.items():
        lines = measure(target, [one.tokens for one in prompts], forms, asked.tokens, asked.turns)
        results[name] = {line["drafts"]: line for line in lines}
        print(f"{name}, {len(prompts)} requests")
        for line in lines:
            parts = ", ".join(f"{part} {ms:.1f}" for part, ms in line["ms_per_call"].items())
            print(
                f"  {line['drafts']:<23}{line['ratio_to_plain']:>6.2f}x"
                f"{line['tokens_per_second']:>8.1f} tok/s"
                f"{line['tokens_per_target_call']:>7.2f} a call   ms a call: {parts}",
                flush=True,
            )
    if asked.out:
        atomic_write_json(asked.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
