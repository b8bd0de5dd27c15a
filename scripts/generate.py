"""`draftsmith generate`: chat with the target, plain or drafted; says how many tokens each step
gave."""

from __future__ import annotations

import sys
import time

from transformers import PreTrainedTokenizerBase

from ..conf.schema import Config
from ..data.render import Renderer
from ..inference.draft_lm import DraftLM
from ..inference.drafters import Drafter
from ..inference.engine import Engine
from ..inference.parallel import Load, joined
from ..inference.running_text import RunningText
from ..models.formats.source import NATIVE, read_head
from ..models.target import Target, load_tokenizer
from .acceptance import draft_model, drafter, drafts_with_head, say_shares
from .app import Invocation, Verb
from .artifacts import Artifacts


def run(config: Config, invocation: Invocation) -> None:
    """Answer one prompt, or question after question until an empty line."""
    with joined() as load:
        if load is not None:
            _chat(config, invocation, load)


def _chat(config: Config, invocation: Invocation, load: Load) -> None:
    settings = config.generate
    model = draft_model(config, [settings.drafter])
    target = load(config.target)
    say_shares(target, invocation)
    tokenizer = load_tokenizer(target.folder)
    lm = DraftLM.paired(model, target) if model else None
    engine = Engine(target, config.engine, _drafter(config, target, lm, invocation))
    messages = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    questions = iter([settings.prompt] if settings.prompt is not None else _asked())
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append(
            {
                "role": "assistant",
                "content": _answer(engine, tokenizer, messages, config, invocation),
            }
        )


def _drafter(
    config: Config, target: Target, lm: DraftLM | None, invocation: Invocation
) -> Drafter | None:
    """The drafter asked for. Without `generate.head`, a run that has no head yet decodes
    plainly."""
    name = config.generate.drafter
    if not drafts_with_head(name):
        return drafter(name, None, target, lm, ngram=config.ngram)
    artifacts = Artifacts.of(config)
    if config.generate.head is None and not (artifacts.head / "config.json").exists():
        invocation.say(f"{artifacts.head} holds no head yet: decoding plainly")
        return None
    folder = artifacts.head_or(config.generate.head)
    loaded = read_head(folder, target.folder, target.fingerprint)
    if loaded.meta["layout"] != NATIVE:
        invocation.say(f"[dim]the head is read from the layout {loaded.meta['layout']}[/]")
    return drafter(name, loaded, target, lm, config.engine.tree, config.ngram)


def _asked():
    """Questions from the terminal or a pipe."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def _answer(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    config: Config,
    invocation: Invocation,
) -> str:
    """Decode one answer, print it as it comes, and what it took."""
    settings = config.generate
    prompt = Renderer(tokenizer, config.data.rows.template_kwargs).prompt(messages)[1]
    sequence = engine.add(prompt, settings.sampling())
    sequence.text = text = sequence.text or RunningText(tokenizer)
    written = 0
    start = time.perf_counter()
    while not sequence.finished:
        engine.step()
        shown = text.shown
        invocation.console.print(shown[written:], end="", markup=False, highlight=False)
        written = len(shown)
    invocation.console.print()
    seconds, count = time.perf_counter() - start, len(sequence.output)
    calls = len(sequence.tokens_per_step)
    emitted = sum(sequence.tokens_per_step)
    steps = " ".join(map(str, sequence.tokens_per_step))
    invocation.say(
        f"[dim]{count} tokens in {seconds:.1f} s ({count / seconds:.1f}/s); "
        f"{emitted / max(calls, 1):.2f} tokens per target call; tokens per step: {steps}[/]"
    )
    return text.text


VERB = Verb(
    name="generate",
    task=run,
    reads=(
        "the target and, unless generate.drafter says otherwise, a head (WORK/train/head), or the "
        "language model of draft_lm.source"
    ),
    writes="nothing; it prints the answer and the tokens of each step",
    sections=(
        "work",
        "generate",
        "ngram",
        "draft_lm",
        "engine.draft_tokens",
        "engine.adaptive",
        "engine.tree",
        "target.dtype",
    ),
    examples=(
        "draftsmith generate experiment=demo",
        "draftsmith generate experiment=demo 'generate.prompt=\"Write a haiku about rivers.\"'",
        "draftsmith generate generate.drafter=none generate.temperature=0.7",
        "draftsmith generate generate.drafter=draft-lm draft_lm.source=a/small/model",
    ),
    kept="nothing is written",
)


def main() -> int:
    """`python -m draftsmith.scripts.generate`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
