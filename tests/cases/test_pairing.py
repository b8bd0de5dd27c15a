"""Known faults of pairing a draft LM with a target, each under its number."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.draft_lm import DraftLM, DraftLMConfig, DraftLMDrafter
from draftsmith.inference.drafters import Proposal
from draftsmith.inference.engine import Engine
from draftsmith.inference.sequence import Sequence
from draftsmith.models.target import Target, TargetConfig


def load(folder: Path) -> Target:
    """A model of a test folder, in float64."""
    return Target.load(TargetConfig(source=str(folder), dtype="float64", device="cpu"))


@pytest.fixture
def spoken(tmp_path: Path, tiny_llama_folder: Callable[..., Path]) -> Callable[..., Path]:
    """A maker of toys with a tokenizer: words, rows of the embedding, added tokens, seed."""

    def make(words: list[str], rows: int, added: tuple[str, ...] = (), seed: int = 0) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
        shutil.copytree(tiny_llama_folder(vocab_size=rows, seed=seed, **shape), folder)
        table = {word: index for index, word in enumerate(words)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(table, unk_token=words[0]))
        )
        tokenizer.add_tokens(list(added))
        tokenizer.save_pretrained(folder)
        return folder

    return make


WORDS = [f"word{index}" for index in range(480)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("widths", [(512, 640), (640, 512), (512, 480)], ids=str)
def test_case_43_a_padded_vocabulary_pairs(
    spoken: Callable[..., Path], widths: tuple[int, int], temperature: float
):
    """Same tokenizer, different padding: engines refuse the pair or crash in a reshape. Right: no
    id beyond the tokenizer's is drafted, and a target's padding id in a text does no harm."""
    target, model = load(spoken(WORDS, widths[0])), load(spoken(WORDS, widths[1], seed=1))
    lm = DraftLM.paired(model, target)
    assert lm.num_ids == 480
    drafted: list[int] = []

    class Watched(DraftLMDrafter):
        def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
            proposals = super().propose(sequences, counts)
            drafted.extend(token for proposal in proposals for token in proposal.tokens)
            return proposals

    prompts = [[5, 400, 7], [widths[0] - 1, 3, widths[0] - 2]]  # padding ids of the target
    params = SamplingParams(24, temperature=temperature, coupled=True, ignore_eos=True)
    plain = Engine(target, EngineConfig(draft_tokens=0, pool_tokens=256))
    alone = [plain.run([prompt], params)[0].output for prompt in prompts]
    engine = Engine(target, EngineConfig(pool_tokens=256, page_size=4, poison=True), Watched(lm))
    assert [sequence.output for sequence in engine.run(prompts, params)] == alone
    assert drafted and max(drafted) < 480


def test_case_44_pairs_are_judged_by_their_tokens(spoken: Callable[..., Path]):
    """Pairing by size alone lets wrong drafts in; by a magic limit it shuts right ones out. Right:
    128 rows of padding more are accepted, two swapped ids are refused by the first of them."""
    target = load(spoken(WORDS, 512))
    assert DraftLM.paired(load(spoken(WORDS, 640)), target).num_ids == 480
    swapped = [*WORDS]
    swapped[7], swapped[9] = swapped[9], swapped[7]
    with pytest.raises(ValueError, match="id 7 is 'word9' here and 'word7' there"):
        DraftLM.paired(load(spoken(swapped, 512)), target)


def test_case_46_an_added_token_in_the_padding_rows_is_a_difference(spoken: Callable[..., Path]):
    """An extra token appended to one tokenizer falls into the padding rows and looks harmless.
    Right: refused by its id, whoever has it; the same one in both is no difference, whatever else
    the files hold."""
    plain, masked = load(spoken(WORDS, 512)), load(spoken(WORDS, 512, ("<mask>",)))
    with pytest.raises(ValueError, match="id 480 is '<mask>' here and no token there"):
        DraftLM.paired(masked, plain)
    with pytest.raises(ValueError, match="id 480 is no token here and '<mask>' there"):
        DraftLM.paired(plain, masked)
    written = load(spoken([*WORDS, "<mask>"], 512))  # other bytes, the same tokens
    assert written.fingerprint["tokenizer"] != masked.fingerprint["tokenizer"]
    assert DraftLM.paired(written, masked).num_ids == 481


def test_ids_without_a_row_warn(spoken: Callable[..., Path]):
    """A model narrower than its tokenizer drafts what it has."""
    target, narrow = load(spoken(WORDS, 512)), load(spoken(WORDS, 400))
    with pytest.warns(UserWarning, match="ids go up to 479, the model's to 399"):
        assert DraftLM.paired(narrow, target).num_ids == 400


def test_models_without_a_tokenizer_pair_by_equal_width_alone(
    tiny_llama_folder: Callable[..., Path], spoken: Callable[..., Path]
):
    """Nothing says what their ids mean, so nothing is guessed."""
    target = load(tiny_llama_folder())
    assert DraftLM.paired(load(tiny_llama_folder(num_hidden_layers=1)), target).num_ids == 512
    with pytest.raises(ValueError, match=r"640 ids against the target's 512.*tokenizer.json"):
        DraftLM.paired(load(tiny_llama_folder(vocab_size=640)), target)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        DraftLM.paired(load(spoken(WORDS, 512)), target)


def test_no_source_says_what_to_give():
    """The key, and what may stand there."""
    with pytest.raises(ValueError, match=r"give draft_lm\.source="):
        DraftLMConfig().model()
