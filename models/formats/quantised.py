"""Quantised targets: float8 matrices multiplied out, and a `quantization_config` with MTP modules
that are not quantised in its checkpoint.

An engine makes every linear map of such a checkpoint in the quantised form unless its name is on a
list, and then reads plain weights as if they were codes. The lists, from the sources of vLLM 0.33.0
(layers/quantization: fp8, compressed_tensors/utils, auto_awq, utils/gptq_utils), SGLang 0.5.23 (the
same folder: fp8, utils, compressed_tensors/utils, awq/awq) and, of gptq, GPTQModel
(quantization/config.py, dynamic_get):

    fp8                  ignored_layers, else modules_to_not_convert: names of modules, whole
                         (SGLang: or parts of a name between dots)
    compressed-tensors   ignore: names, or `re:` and a pattern that the name begins with
    awq                  modules_to_not_convert: parts of names. Where there are none, vLLM takes
                         every module for plain whose tensors are, so a list that is begun holds
                         those, too
    gptq                 dynamic: a pattern after `-:` that the name begins with; the first counts.
                         `modules_in_block_to_quantize` (vLLM: parts of names; where there are none,
                         every module with a tensor that is not plain) is asked before, and a
                         pattern takes a module out of that, too

transformers leaves MTP modules out and reads the same lists for the rest (by whole names, patterns
or ends of names: should_convert_module). Names are those that the engine gives its modules, which
are the checkpoint's but for MiMo in vLLM (`model.layers.{L+i}.`), DeepSeek and GLM in SGLang
(`model.decoder.`) and ERNIE there (`model.mtp_block.`).
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ..trunk import tensor_files

_METHODS = ("fp8", "compressed-tensors", "awq", "gptq")


def leave_plain(
    config: dict[str, Any], prefixes: dict[str, str], modules: list[str], target: Path
) -> dict[str, Any]:
    """A target's config.json with its MTP modules on the list of what is not quantised.

    Args:
        prefixes: what the names of such modules begin with in an engine -> in the checkpoint.
        modules: the checkpoint's names of all linear maps in them. target: its folder.
    Raises:
        ValueError: a way of quantising whose list is not known here.
    """
    settings = config.get("quantization_config")
    if not settings:
        return config
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise ValueError(
            f"the target is quantised by {method!r}, and how engines are told there that the MTP "
            f"modules are not is known for {', '.join(_METHODS)} alone: name a copy of the target "
            "that is not quantised, target.source=…, or keep the native folder"
        )
    changed: dict[str, Any] = copy.deepcopy(config)
    settings = changed["quantization_config"]
    patterns = [re.escape(prefix) for prefix in prefixes]
    if method == "compressed-tensors":
        _add(settings, "ignore", [f"re:{pattern}" for pattern in patterns])
    elif method == "gptq":
        settings["dynamic"] = {
            **{f"-:{pattern}": {} for pattern in patterns},
            **(settings.get("dynamic") or {}),
        }
    elif method == "awq":
        key = "modules_to_not_convert"
        _add(settings, key, [] if settings.get(key) else plain_modules(target))
        _add(settings, key, list(prefixes))
    else:
        # Experts are one module in an engine.
        names = {re.sub(r"\.experts\..*", ".experts", name) for name in modules}
        spelt = [
            here + name.removeprefix(there)
            for here, there in prefixes.items()
            for name in sorted(names)
            if name.startswith(there)
        ]
        before = settings.get("ignored_layers") or settings.get("modules_to_not_convert") or []
        for key in ("ignored_layers", "modules_to_not_convert"):
            settings[key] = list(before)
            _add(settings, key, spelt)
    return changed


def plain_modules(folder: Path) -> list[str]:
    """Names of a checkpoint's modules whose weight is a matrix that is not quantised."""
    files, found = tensor_files(folder), list[str]()
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in [name for name, place in files.items() if place == path]:
                held = file.get_slice(name)
                matrix = name.endswith(".weight") and len(held.get_shape()) == 2
                if matrix and held.get_dtype() in ("F16", "BF16", "F32"):
                    found.append(name.removesuffix(".weight"))
    return sorted(found)


def dequantise(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Float8 matrices with a scale for each block of rows and columns, as float32; the scales are
    taken out."""
    settings = config.get("quantization_config") or {}
    rows, columns = settings.get("weight_block_size") or (128, 128)
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        matrix = name.removesuffix("_scale_inv")
        if matrix not in tensors:
            continue  # told as unknown
        weight, scale = tensors[matrix].float(), tensors.pop(name).float()
        scale = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        tensors[matrix] = weight * scale[..., : weight.shape[-2], : weight.shape[-1]]


def _add(settings: dict[str, Any], key: str, names: list[str]) -> None:
    held = list(settings.get(key) or [])
    settings[key] = held + [name for name in names if name not in held]
