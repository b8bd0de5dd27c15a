"""Between the frozen dataclasses that the code uses and the mutable, typed nodes that Hydra
composes.

OmegaConf makes a frozen dataclass read-only before Hydra has merged anything into it, and knows no
`Literal`. So `schema_of` derives a mutable twin of a dataclass, field by field, and `build` turns
the composed values into the frozen original, whose own `__post_init__` then judges them. `describe`
reads the meaning of each field from the source, where it stands as a string under the field.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@cache
def schema_of(cls: type) -> type:
    """A mutable dataclass with the fields and defaults of the frozen dataclass `cls`, and of those
    nested in it."""
    hints = get_type_hints(cls)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            twin = schema_of(kind)
            fields.append((field.name, twin, dataclasses.field(default_factory=twin)))
        elif field.default_factory is not dataclasses.MISSING:
            fields.append(
                (field.name, _plain(kind), dataclasses.field(default_factory=field.default_factory))
            )
        elif field.default is not dataclasses.MISSING:
            fields.append((field.name, _plain(kind), _default(field.default)))
        else:
            fields.append((field.name, _plain(kind), dataclasses.field(default="???")))
    return dataclasses.make_dataclass(cls.__name__, fields)


def build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """The frozen dataclass `cls` from composed values (plain dicts and lists).

    Raises:
        ValueError: a required value is missing, a choice is not among those allowed, or `cls`
            itself refuses; the message begins with the full key.
    """
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        key, kind, value = f"{path}{field.name}", hints[field.name], values[field.name]
        if isinstance(value, str) and value == "???":
            raise ValueError(f"{key} has no value: give {key}=…")
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type) and isinstance(value, Mapping)
            arguments[field.name] = build(kind, value, f"{key}.")
        else:
            arguments[field.name] = _checked(kind, value, key)
    try:
        return cls(**arguments)
    except ValueError as error:
        section = path.rstrip(".")
        message = str(error)
        raise ValueError(
            message if not section or section in message else f"{section}: {message}"
        ) from error


def leaves(cls: type, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(full key, type, default) of every value below `cls`, in the order of the fields."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, kind = f"{path}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from leaves(kind, f"{key}.")
        elif field.default_factory is not dataclasses.MISSING:
            yield key, kind, field.default_factory()
        else:
            yield key, kind, None if field.default is dataclasses.MISSING else field.default


def describe(cls: type, path: str = "") -> dict[str, str]:
    """The meaning of every value below `cls` by full key: the first paragraph of the string under
    its field."""
    hints = get_type_hints(cls)
    meanings = {}
    for name, text in _field_docs(cls).items():
        meanings[f"{path}{name}"] = text
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            meanings |= describe(kind, f"{path}{field.name}.")
    return meanings


@cache
def _field_docs(cls: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[node.target.id] = " ".join(following.value.value.split("\n\n")[0].split())
    return docs


def _plain(kind: Any) -> Any:
    """`kind` in the types that OmegaConf knows: a `Literal` of strings becomes str."""
    origin = get_origin(kind)
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        return Union[tuple(_plain(part) for part in get_args(kind))]  # noqa: UP007
    if origin is tuple:
        return tuple[tuple(part if part is ... else _plain(part) for part in get_args(kind))]  # pyright: ignore
    return kind


def _default(value: Any) -> Any:
    return (
        dataclasses.field(default_factory=lambda: list(value))
        if isinstance(value, tuple)
        else value
    )


def _checked(kind: Any, value: Any, key: str) -> Any:
    """`value` in the type of its field: tuples restored, a `Literal` confined to its choices."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        rest = [part for part in parts if part is not type(None)]
        return _checked(rest[0], value, key) if len(rest) == 1 else value
    if origin is Literal:
        if value not in parts:
            raise ValueError(f"{key}={value} is not known; {nearest(str(value), map(str, parts))}")
        return value
    if origin is tuple:
        inner = parts[0] if parts else Any
        return tuple(_checked(inner, item, key) for item in value)
    return value


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Words that name the nearest of `known`, or all of them where none is near."""
    choices = list(known)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(choices)}"
