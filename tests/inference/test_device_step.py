"""Steps whose state stays on the device write the text of plain decoding."""

from __future__ import annotations

import pytest
from drafting import GREEDY
from small_heads import PROMPTS

from draftsmith.inference.config import EngineConfig
from draftsmith.inference.device_step import DeviceSteps
from draftsmith.inference.engine import Engine
from draftsmith.models.heads import Head
from draftsmith.models.target import Target


@pytest.mark.parametrize("count", [1, 3])
def test_text_and_drafts_are_the_engines(target: Target, head: Head, count: int):
    """Prompts of all lengths side by side; the drafts that are kept are the engine's, too."""
    settings = EngineConfig(draft_tokens=0, pool_tokens=1024, page_size=4, max_batch=5)
    plain = Engine(target, settings).run(PROMPTS, GREEDY)
    steps = DeviceSteps(target, head, PROMPTS, 80, count, page_size=4)
    texts = [[int(token)] for token in steps.tokens[:, 0]]
    for _ in range(12):
        steps.step()
        for text, emitted in zip(texts, steps.emitted.tolist(), strict=True):
            text += [token for token in emitted if token >= 0]
    for text, sequence in zip(texts, plain, strict=True):
        assert text[: len(sequence.output)] == sequence.output[: len(text)]
        assert len(text) > 12


def test_a_prompt_without_room_is_refused(target: Target, head: Head):
    """The number says what would do."""
    with pytest.raises(ValueError, match="longest prompt has 33 tokens; give room for 2 more"):
        DeviceSteps(target, head, PROMPTS, 33, page_size=1)
