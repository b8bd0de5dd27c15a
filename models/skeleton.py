"""The target as transformers builds it, without its memory.

A model on the meta device costs a tenth of a second whatever its size. A head takes its layer from
it, so that the layer is of the kind that the target's *last* one is (dense or experts, sliding or
full attention): the only layer of a one-layer copy of the configuration would be of the first's
kind. Parts of a checkpoint are read under the library's own rules for names: experts that the files
hold one by one and the module holds in one tensor, other prefixes of multimodal models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights

from . import attention, experts


def folder_config(folder: Path | str) -> Any:
    """transformers' configuration of a checkpoint folder. Only families that transformers has are
    read; code that lies in the folder is never run.

    Raises:
        ValueError: a family that it does not have, or a config.json whose values contradict each
        other.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except StrictDataclassError as error:
        raise ValueError(f"{folder}: config.json describes no model: {error}") from error
    except (ValueError, KeyError) as error:
        described = Path(folder) / "config.json"
        kind = json.loads(described.read_text()).get("model_type") if described.is_file() else None
        if kind in CONFIG_MAPPING:
            raise
        raise ValueError(
            f"{described}: model_type {kind!r} is no family of transformers "
            f"{transformers.__version__}, and model code that lies in a folder is not run; install "
            "a version of transformers that has the family, or give a checkpoint that was saved "
            "for one that it has"
        ) from error


def text_config(folder: Path | str) -> Any:
    """The configuration of a checkpoint folder; of a multimodal model, its text part."""
    return folder_config(folder).get_text_config(decoder=True)


def skeleton(config: Any) -> Any:
    """The causal language model of a configuration on the meta device, with our attention and
    experts; the configuration itself is left as it is."""
    with torch.device("meta"), no_init_weights():  # half of the time, and there is nothing to draw
        model = AutoModelForCausalLM.from_config(deepcopy(config), **implementations())
    model.tie_weights(recompute_mapping=False)  # which that leaves out
    return model


def implementations() -> dict[str, str]:
    """What makes transformers build a model with our functions, registered."""
    attention.register()
    experts.register()
    return {
        "attn_implementation": attention.IMPLEMENTATION,
        "experts_implementation": experts.IMPLEMENTATION,
    }


def name_of(model: nn.Module, part: nn.Module) -> str:
    """The dotted name of a module inside `model`."""
    return next(name for name, module in model.named_modules() if module is part)


def read_tensors(
    model: Any, files: dict[str, Path], prefixes: str | tuple[str, ...]
) -> dict[str, Tensor]:
    """What the files hold for the part of a model whose tensor names start with a prefix.

    Args:
        model: a skeleton. files: tensor name -> file, see `trunk.tensor_files`.
    Returns:
        tensor name in the model -> tensor, dtype as stored; whatever else lies in the files under
        such a name is there too, so that the caller can refuse it.
    """
    names = _Names(model)
    return held(model, _read(files, [key for key in files if names(key)[0].startswith(prefixes)]))


def stored_names(model: Any, files: dict[str, Path]) -> dict[str, str]:
    """Tensor name in the model -> its name in the files, of the tensors that both hold alike."""
    names = _Names(model)
    found = ((key, *names(key)) for key in files)
    return {name: key for key, name, converter in found if converter is None}


def held(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a checkpoint of the model's family spells them -> as its modules hold them: the
    experts of a layer in one. Whatever stands before a layer's own names is kept."""
    names, parts = _Names(model), dict[str, Any]()
    for key in sorted(tensors, key=dot_natural_key):  # experts in the order of their numbers
        name, pattern = names(key)
        rule = WeightRenaming(key, name) if pattern is None else names.converter(pattern)
        part = parts.setdefault(name, deepcopy(rule))
        part.add_tensor(name, key, key if pattern is None else pattern, tensors[key])
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        for target, value in part.convert(name, model=model, config=model.config).items():
            found[target] = value[0] if isinstance(value, list) else value
    return found


def spelt(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `held` (views); what is spelt so already stays."""
    return revert_weight_conversion(model, tensors)


class _Names:
    """The library's rules from the names in a checkpoint to those in a model."""

    def __init__(self, model: Any) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix, self._known = model.base_model_prefix, model.state_dict()

    def __call__(self, key: str) -> tuple[str, str | None]:
        """The name in the model, and the pattern by which a converter takes the tensor."""
        return rename_source_key(key, self._renamings, self._converters, self._prefix, self._known)

    def converter(self, pattern: str) -> WeightConverter:
        """The one that a pattern belongs to."""
        return next(rule for rule in self._converters if pattern in rule.source_patterns)


def _read(files: dict[str, Path], names: Iterable[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted({files[name] for name in names}):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in names if files[name] == path}
    return found
