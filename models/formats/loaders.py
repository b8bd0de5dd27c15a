"""What an engine's loader does with a checkpoint folder, as a description that can be run here.

An `Engine` finds the class that a config.json names; a `Loader` is such a class: the parameters
that it makes, what it does with a tensor that has none and with a parameter that has no tensor, the
keys it reads, and how it then runs. Running one gives a `Report`: what stops it, and (worse) what
it drops, leaves as it was allocated, or assumes without a word. Descriptions were read from the
engines' sources in the version that they name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

QKV = ("q_proj", "k_proj", "v_proj")
ALL_FOUR = (*QKV, "o_proj")


class Keys:
    """A config.json as a loader reads it.

    Attributes:
        read: every key that was asked for and is there. assumed: key -> the default that stood in
            for it. guessed: those of them that decide how the weights must be run.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.read: dict[str, Any] = {}
        self.assumed: dict[str, Any] = {}
        self.guessed: dict[str, Any] = {}

    def get(self, name: str, default: Any = None, guess: bool = False) -> Any:
        """The value of a key (`outer.inner` for a nested one), or the default."""
        value: Any = self._config
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                self.assumed[name] = default
                if guess:
                    self.guessed[name] = default
                return default
            value = value[part]
        self.read[name] = value
        return value

    def need(self, name: str) -> Any:
        """The value of a key without which the loader stops."""
        value = self.get(name, _ABSENT)
        if value is _ABSENT:
            del self.assumed[name]
            raise Stopped(f"config.json has no {name!r}")
        return value


_ABSENT = object()


class Stopped(Exception):
    """The loader raises; says why."""


@dataclass(frozen=True)
class Parameter:
    """What a class allocates, and what becomes of it where the folder has no tensor for it.

    `absent`: random (left as allocated), zeros, ones (left as those), raise, shared (the target's
    is used instead), unused (made, never read).
    """

    shape: tuple[int, ...]
    absent: str = "random"


Made = dict[str, Parameter]


@dataclass(frozen=True)
class Loader:
    """A class of an engine that loads a head.

    Attributes:
        name: as the engine registers it. architecture: what config.json must call it.
        made: keys, target's configuration -> its parameters by the names in the files.
        runs: the same -> how it runs, see `facts.facts`.
        rename: a file's name -> the parameter's, None for a tensor that it skips knowingly.
        unexpected: what it does with any other tensor, raise or drop. looks: whether it looks at a
            parameter's name at all, by those made; where not, it drops that even then.
        prefix: stands before every name in the files. layer: before those of the first layer.
        norms: our names of the norms that it runs. query_norms: its attention norms queries and
            keys.
        writes: further keys of its config.json. fills: tensors that it wants and no head has: name
            -> zeros, ones, or the target's tensor to copy. all_biases: its attention has four
            biases or none.
    """

    name: str
    architecture: str
    made: Callable[[Keys, Any], Made]
    runs: Callable[[Keys, Any, dict[str, Tensor]], dict[str, Any]]
    rename: Callable[[str], str | None] = lambda name: name
    unexpected: str = "raise"
    looks: Callable[[str, Made], bool] = lambda name, made: True
    prefix: str = ""
    layer: str = "layers.0."
    norms: tuple[str, ...] = ()
    query_norms: bool = False
    writes: dict[str, Any] = field(default_factory=dict)
    fills: dict[str, str] = field(default_factory=dict)
    all_biases: bool = False


@dataclass(frozen=True)
class Report:
    """What a loader did.

    Attributes:
        engine, loader: which one. raised: what stops it; empty where it loads.
        dropped: tensors that it ignored. random, zeros, ones: parameters that were left so. shared:
            those taken from the target.
        read, assumed, guessed: see `Keys`. runs: how the head is run then.
    """

    engine: str
    loader: str
    raised: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    ones: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    read: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    guessed: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Engine and class, for messages."""
        return f"{self.engine} {self.loader}".rstrip()

    def faults(self) -> list[str]:
        """What is wrong, a clause each: what raises, what is dropped, random or zero."""
        found = list(self.raised)
        for names, words in (
            (self.dropped, "drops {} without an error"),
            (self.random, "finds no {} and leaves it uninitialised"),
            (self.zeros, "finds no {} and leaves it zero"),
            (self.ones, "finds no {} and leaves it one"),
        ):
            found += [words.format(few(names))] if names else []
        return found


@dataclass(frozen=True)
class Engine:
    """An engine's way from a folder to a class.

    Attributes:
        name: with its version. resolve: keys -> the name of the class that it looks up.
        loaders: the classes that it registers, as far as they are known here.
        flat: a config.json -> the keys that the class sees, where they are laid out otherwise.
    """

    name: str
    resolve: Callable[[Keys], str]
    loaders: tuple[Loader, ...]
    flat: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config

    def load(self, config: dict[str, Any], tensors: dict[str, Tensor], target: Any) -> Report:
        """Do with a folder's configuration and tensors what the engine does.

        Args:
            tensors: file's name -> tensor; only shapes are read, but for the vocabulary map.
            target: transformers' configuration of the target.
        """
        try:
            keys = Keys(self.flat(config))
            wanted = self.resolve(keys)
        except Stopped as stop:
            return Report(self.name, "", raised=(str(stop),))
        loader = next((one for one in self.loaders if one.name == wanted), None)
        if loader is None:
            known = ", ".join(one.name for one in self.loaders)
            return Report(
                self.name,
                "",
                raised=(f"architectures name the class {wanted}, which is not one of {known}",),
            )
        try:
            made, runs = loader.made(keys, target), loader.runs(keys, target, tensors)
        except Stopped as stop:
            return Report(self.name, loader.name, raised=(str(stop),))
        return self._filled(loader, keys, made, runs, tensors)

    def _filled(
        self, loader: Loader, keys: Keys, made: Made, runs: dict[str, Any], tensors: Any
    ) -> Report:
        raised: list[str] = []
        dropped: list[str] = []
        found: set[str] = set()
        for name, value in tensors.items():
            place = loader.rename(name)
            if place is None:
                continue
            if place not in made:
                if loader.unexpected == "raise" and loader.looks(place, made):
                    raised.append(f"there is no parameter for {name}")
                else:
                    dropped.append(name)
                continue
            found.add(place)
            if tuple(value.shape) != made[place].shape:
                raised.append(
                    f"{name} has shape {list(value.shape)}, the class makes "
                    f"{list(made[place].shape)}"
                )
        # As the folder spells the first layer.
        short, left = any(name.startswith("midlayer.") for name in tensors), dict[str, list[str]]()
        for name, parameter in made.items():
            if name not in found:
                told = name.replace("layers.0.", "midlayer.") if short else name
                left.setdefault(parameter.absent, []).append(told)
        raised += [f"there is no tensor {name}" for name in left.get("raise", [])]
        parts = {part: tuple(left.get(part, ())) for part in ("random", "zeros", "ones", "shared")}
        return Report(
            self.name,
            loader.name,
            tuple(raised),
            tuple(dropped),
            **parts,
            read=keys.read,
            assumed=keys.assumed,
            guessed=keys.guessed,
            runs=runs,
        )


def layer_made(
    keys: Keys,
    prefix: str = "layers.0.",
    *,
    wide: bool = False,
    norms: Iterable[str] = ("input_layernorm", "post_attention_layernorm"),
    biases: Iterable[str] = (),
    query_norms: bool = False,
    square: bool = False,
    packed: str = "random",
    unset: str = "ones",
    bias: str = "",
) -> Made:
    """The parameters of a decoder layer of Llama's shape.

    Args:
        wide: its attention reads 2H. biases: projections that have one.
        query_norms: norms on queries and keys. square: the class takes H / heads for the width of a
            head whatever config.json says. packed: what becomes of a projection that it packs with
            others (q, k, v; gate, up) and that has no tensor. unset: of a norm without one. bias:
            of a bias, where not as of its matrix. Any other matrix stays random.
    """
    size, width = int(keys.need("hidden_size")), int(keys.need("intermediate_size"))
    heads, kv_heads, head_dim = head_shape(keys, square)
    reads = size * (2 if wide else 1)
    shapes = {
        "self_attn.q_proj": (heads * head_dim, reads),
        "self_attn.k_proj": (kv_heads * head_dim, reads),
        "self_attn.v_proj": (kv_heads * head_dim, reads),
        "self_attn.o_proj": (size, heads * head_dim),
        "mlp.gate_proj": (width, size),
        "mlp.up_proj": (width, size),
        "mlp.down_proj": (size, width),
    }
    made: Made = {}
    for name, shape in shapes.items():
        absent = "random" if name.endswith(("o_proj", "down_proj")) else packed
        made[f"{prefix}{name}.weight"] = Parameter(shape, absent)
        if name.rpartition(".")[2] in biases:
            made[f"{prefix}{name}.bias"] = Parameter(shape[:1], bias or absent)
    made |= {f"{prefix}{name}.weight": Parameter((size,), unset) for name in norms}
    if query_norms:
        made |= {
            f"{prefix}self_attn.{name}.weight": Parameter((head_dim,), unset)
            for name in ("q_norm", "k_norm")
        }
    return made


def head_shape(keys: Keys, square: bool = False) -> tuple[int, int, int]:
    """Query heads, key-value heads, width of a head."""
    heads = int(keys.need("num_attention_heads"))
    kv_heads = int(keys.get("num_key_value_heads", heads, guess=True) or heads)
    head_dim = None if square else keys.get("head_dim")
    return heads, kv_heads, int(head_dim or int(keys.need("hidden_size")) // heads)


def layer_runs(keys: Keys, rope: dict[str, Any], square: bool = False) -> dict[str, Any]:
    """What a class of Llama's shape makes of a layer's settings."""
    activation = keys.get("hidden_act", "silu")
    if activation != "silu":
        raise Stopped(f"hidden_act {activation!r}: the class knows silu alone")
    return {
        "layer": "plain",
        "activation": activation,
        "heads": head_shape(keys, square),
        "width": int(keys.need("intermediate_size")),
        "eps": float(keys.get("rms_norm_eps", 1e-6, guess=True)),
        "rope": rope,
        "window": None,
        "positions": int(keys.get("max_position_embeddings", 2048, guess=True)),
        "vocabulary": int(keys.need("vocab_size")),
        "order": ("embedding", "hidden"),
        "masked": False,
        "style": "rms",
        "modules": 1,
    }


def read_rope(keys: Keys, modern: bool = True) -> dict[str, Any]:
    """The rope of a config.json: `rope_parameters` (transformers 5; only where `modern`), else
    `rope_theta` and `rope_scaling` (transformers 4)."""
    given = keys.get("rope_parameters") if modern else None
    if given:
        if "rope_theta" not in given:
            given = {**given, "rope_theta": keys.get("rope_theta", 10000.0, guess=True)}
        return plain_rope(given)
    scaling = keys.get("rope_scaling") or {}
    return plain_rope({"rope_theta": keys.get("rope_theta", 10000.0, guess=True), **scaling})


def plain_rope(given: dict[str, Any]) -> dict[str, Any]:
    """A rope's settings without what says nothing."""
    kind = str(given.get("rope_type") or given.get("type") or "default")
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": float(given["rope_theta"])}
    for name, value in given.items():
        if name in (*rope, "type") or value is None:
            continue
        if name == "partial_rotary_factor":
            rope |= {} if float(value) == 1.0 else {name: float(value)}
        elif kind != "default":
            whole = name == "original_max_position_embeddings"
            number = isinstance(value, int | float)
            rope[name] = int(value) if whole else float(value) if number else value
    return rope


def few(names: Iterable[str]) -> str:
    """Names for a message, at most six."""
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
