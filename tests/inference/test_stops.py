"""Where an answer ends: stop strings across tokens and rounds, stop ids, the target's last
position; and what a reader sees meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from drafting import GREEDY, Answers, Script, ScriptedDrafter, answers_of
from small_heads import PROMPTS
from transformers import PreTrainedTokenizerBase

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.engine import Engine
from draftsmith.inference.running_text import RunningText
from draftsmith.models.target import Target, TargetConfig

TEXTS = [
    "Grüße aus Köln: 東京タワー 🗼🏽 — naïve café.\n\n  def f(x):\n\treturn x**2  # ¼",
    "a\ufffdb",  # the sign of a broken character as a character
]


def whole(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The definition: all tokens at once."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def streams(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens of texts whose characters lie across tokens, and any tokens at all."""
    chance = random.Random(0)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    found += [[chance.randrange(49152) for _ in range(40)] for _ in range(20)]
    # Bytes of no character, special tokens among them.
    odd = tokenizer.encode("é🗼", add_special_tokens=False)
    return [*found, [odd[-1], odd[-1], 0, odd[0], 2, *odd, odd[-1]]]


def test_text_grows_as_it_is_decoded_at_once(smollm2_tokenizer: PreTrainedTokenizerBase):
    """After each token; what was shown is never taken back."""
    for tokens in streams(smollm2_tokenizer):
        running, shown = RunningText(smollm2_tokenizer, ("\n\n  d", "zz")), ""
        for index, token in enumerate(tokens):
            if running.add(token):
                break
            right = whole(smollm2_tokenizer, tokens[: index + 1]).rstrip("\ufffd")
            assert running.text.rstrip("\ufffd") == right
            assert running.shown.startswith(shown) and right.startswith(running.shown)
            shown = running.shown
        else:
            running.close()
            assert running.text == whole(smollm2_tokenizer, tokens)


def test_a_stop_string_is_met_where_the_text_first_holds_it(
    smollm2_tokenizer: PreTrainedTokenizerBase,
):
    """Strings of any length from anywhere in the text, two at a time: the first token after which
    the text holds one, cut before the one that begins first."""
    chance = random.Random(1)
    for tokens in streams(smollm2_tokenizer)[:8]:
        text = whole(smollm2_tokenizer, tokens)
        for _ in range(12):
            at = [chance.randrange(len(text)) for _ in range(2)]
            stops = tuple(text[place : place + chance.randint(1, 9)] for place in at)
            if any("\ufffd" in stop for stop in stops):
                continue
            running = RunningText(smollm2_tokenizer, stops)
            used = next(i for i, token in enumerate(tokens, 1) if running.add(token))
            so_far = [whole(smollm2_tokenizer, tokens[:count]) for count in (used - 1, used)]
            assert not any(stop in so_far[0] for stop in stops)
            begins = [so_far[1].find(stop) for stop in stops]
            first = min(place for place in begins if place >= 0)
            assert running.text == running.shown == so_far[1][:first]


def test_what_may_begin_a_stop_string_is_not_shown(smollm2_tokenizer: PreTrainedTokenizerBase):
    """Until the next character decides; at the end everything is."""
    tokens = [smollm2_tokenizer.encode(part)[0] for part in "ababc"]
    running = RunningText(smollm2_tokenizer, ("abac", "bx"))
    shown = []
    for token in tokens:
        running.add(token)
        shown.append(running.shown)
    assert shown == ["", "", "", "ab", "ababc"]
    running = RunningText(smollm2_tokenizer, ("abac",))
    running.add(tokens[0])
    running.close()
    assert running.shown == "a"


@pytest.fixture(scope="module")
def talking(talking_folder: Path) -> tuple[Target, Answers]:
    """A random target that speaks SmolLM2's tokens, and what it says."""
    target = Target.load(TargetConfig(source=str(talking_folder), dtype="float64", device="cpu"))
    return target, answers_of(target, PROMPTS[1:4], GREEDY)


@pytest.mark.parametrize("pattern", [[3], [1, 0, 2]], ids=str)
def test_stop_strings_end_an_answer_inside_an_accepted_run(
    talking: tuple[Target, Answers], pattern: list[int]
):
    """Wherever they end in a round: the tokens up to the one that completed them, nothing behind it
    in the counts, and the text before them."""
    target, answers = talking
    tokenizer = Engine(target, EngineConfig()).tokenizer
    # Read together in one step, so that all else is counted.
    config = EngineConfig(pool_tokens=2048, page_size=4, max_batch=18, poison=True)
    engine = Engine(target, config, ScriptedDrafter(Script(answers, pattern, target.vocab_size)))
    asked = []
    for prompt, answer in answers.items():
        for count in (2, 5, 6, 7, 8, 11):
            # The last two characters of a token and the first of the one behind it.
            before = whole(tokenizer, answer[:count])
            stop = whole(tokenizer, answer[: count + 1])[max(0, len(before) - 2) : len(before) + 1]
            if "\ufffd" not in stop:
                params = replace(GREEDY, stop=(stop, "never said"))
                asked.append((engine.add(list(prompt), params), stop, answer))
    assert len(asked) > 8
    while not engine.scheduler.idle:
        engine.step()
    for sequence, stop, answer in asked:
        used = next(i for i in range(1, 21) if stop in whole(tokenizer, answer[:i]))
        assert sequence.output == answer[:used] and sequence.finish_reason == "stop"
        assert sequence.text is not None and sequence.text.closed
        assert sequence.text.text == whole(tokenizer, answer[:used]).split(stop)[0]
    assert engine.metrics.decode_tokens == sum(len(one.output) - 1 for one, _, _ in asked)


def test_a_text_without_its_stop_string_is_whole(talking: tuple[Target, Answers]):
    """It ends by its length, and a cancelled one where it was."""
    target, answers = talking
    engine = Engine(target, EngineConfig(draft_tokens=0, pool_tokens=512))
    prompt, answer = next(iter(answers.items()))
    params = replace(GREEDY, stop=("never said",))
    kept, gone = (engine.add(list(prompt), params) for _ in range(2))
    for _ in range(3):
        engine.step()
    engine.cancel(gone)
    while not engine.scheduler.idle:
        engine.step()
    assert kept.text is not None and gone.text is not None
    assert kept.text.text == whole(engine.tokenizer, answer) and kept.finish_reason == "length"
    assert gone.text.shown == whole(engine.tokenizer, answer[:3])
    assert gone.finish_reason == "cancelled"


@pytest.mark.parametrize("place", range(5))
def test_a_stop_id_ends_an_answer_like_an_end_token(target: Target, place: int):
    """Also where end tokens are ignored."""
    answers = answers_of(target, [PROMPTS[2]])
    answer = answers[tuple(PROMPTS[2])]
    engine = Engine(
        target,
        EngineConfig(pool_tokens=256, page_size=4, poison=True),
        ScriptedDrafter(Script(answers, [3], target.vocab_size)),
    )
    params = replace(GREEDY, stop_ids=(answer[place], 511))
    (result,) = engine.run([PROMPTS[2]], params)
    used = min(answer.index(one) for one in params.stop_ids if one in answer) + 1
    assert result.output == answer[:used] and result.finish_reason == "stop"


def test_an_answer_ends_at_the_targets_last_position(tiny_llama_folder, target: Target):
    """With drafts up to it and none behind; no row is computed past it."""
    folder = tiny_llama_folder(max_position_embeddings=30)
    short = Target.load(TargetConfig(source=str(folder), dtype="float64", device="cpu"))
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[4][:29]]
    wide = answers_of(target, prompts, replace(GREEDY, max_new_tokens=24))
    places: list[int] = []
    forward = short.stack.forward

    def watched(embeds, positions, *rest):
        places.extend(positions.tolist())
        return forward(embeds, positions, *rest)

    short.stack.forward = watched  # type: ignore[method-assign]
    for pattern in ([3], [0, 2]):
        drafter = ScriptedDrafter(Script(wide, pattern, target.vocab_size))
        engine = Engine(short, EngineConfig(pool_tokens=128, page_size=4, poison=True), drafter)
        for prompt, result in zip(prompts, engine.run(prompts, GREEDY), strict=True):
            room = min(20, 30 - len(prompt))
            assert result.output == wide[tuple(prompt)][:room]
            assert result.finish_reason == "length"
    assert max(places) == 28


def test_a_stream_gives_each_steps_tokens(target: Target):
    """Of its own requests alone; leaving it cancels them, and nobody else."""
    answers = answers_of(target, PROMPTS)
    drafter = ScriptedDrafter(Script(answers, [2, 0], target.vocab_size))
    engine = Engine(target, EngineConfig(pool_tokens=512, page_size=4, poison=True), drafter)
    other = engine.add(PROMPTS[4], GREEDY)
    said: dict[str, list[int]] = {}
    for output in engine.stream(PROMPTS[1:3], GREEDY):
        assert output.tokens and output.sequence is not other
        said.setdefault(output.sequence.id, []).extend(output.tokens)
    assert list(said.values()) == [answers[tuple(prompt)] for prompt in PROMPTS[1:3]]
    left = engine.stream([PROMPTS[0], PROMPTS[3]], GREEDY)
    first = next(left).sequence
    left.close()  # type: ignore[attr-defined]
    assert first.finish_reason == "cancelled"
    while not engine.scheduler.idle:
        engine.step()
    assert other.output == answers[tuple(PROMPTS[4])]
    assert not any(engine.scheduler.allocator.users)


def test_stop_strings_need_a_tokenizer_and_a_length(target: Target):
    """The remedy is named."""
    engine = Engine(target, EngineConfig(pool_tokens=512))
    with pytest.raises(ValueError, match="no tokenizer.json.*give stop_ids"):
        engine.add([5], SamplingParams(stop=("a",)))
    assert engine.scheduler.idle
    for wrong in ("a", ("a", "")):
        with pytest.raises(ValueError, match="tuple of strings"):
            SamplingParams(stop=wrong)  # type: ignore[arg-type]
