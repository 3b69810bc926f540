"""What a component gets for what a config holds: each value is converted and checked by the parameter's annotation.

What ``schema.to_config`` makes of a value, :func:`from_config` turns into an equal one, also after a way through YAML.
Texts become objects, lists tuples, mappings dataclasses; what is wrong is a ``ConfigError`` with its key and what would
be right. Nodes with a ``_target_`` are left to the caller, wherever in a value they stand.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from omegaconf import MISSING

import stagereg.config.schema as schema
from stagereg.config.resolved_tree import Call, NodePath, is_missing
from stagereg.config.texts import value_type
from stagereg.errors import ConfigError, nearest

__all__ = ["Build", "factory_of", "from_config"]

Build = Callable[[NodePath, dict[str, Any], Any], Any]
"""Returns what a component gets for a node with a ``_target_``: its path, itself and the parameter's annotation."""

_PRODUCTS = {"AsyncStager": "stager", "JoinHook": "join_hook", "Joinable": "joinable"}
"""Kinds by the name of the class in ``Callable[..., JoinHook]``, which torch's class and ours share."""

_OTHERWISE: dict[Any, str] = {bool: ", true or false", int: ", or a whole number", float: ", or a number"}
"""What a value of a union may be beside its choices, in words."""


def from_config(path: NodePath, value: Any, hint: Any, build: Build) -> Any:
    """Return what a component gets for ``value``; a dataclass is a :class:`Call` that is still to be made.

    Raises:
        ConfigError: the value is missing, none of the choices, or not of the type ``hint``.
    """
    inner = functools.partial(from_config, build=build)
    plain, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if isinstance(value, dict) and "_target_" in value:
        return build(path, value, hint)
    if is_missing(value):
        raise ConfigError(f"{path.label} needs a value: {path.advice}.")
    if schema.is_factory(hint) and not callable(value):
        shown, kind = "null" if value is None else repr(value), factory_of(hint) or "component"
        raise ConfigError(f"{path} is {shown}, where the config of a {kind} is needed.")
    if known := value_type(hint):
        try:
            return known.read(value)
        except ConfigError as refusal:
            raise ConfigError(f"{path}: {refusal}") from refusal
    if plain is Literal and not _is_choice(value, arguments):
        raise ConfigError(_no_choice(path, value, arguments))
    if schema.is_union(hint):
        return _union(path, value, arguments, inner)
    if schema.is_dataclass(hint):
        return value if isinstance(value, hint) else _dataclass(path, value, hint, inner)
    if plain in (*schema.SEQUENCES, *schema.MAPPINGS) and value is not None and not _fits(value, hint):
        raise ConfigError(
            f"{path} is {value!r}, where a {'list' if plain in schema.SEQUENCES else 'mapping'} is needed."
        )
    if isinstance(value, (list, tuple)):
        return _sequence(path, value, plain, arguments, inner)
    if isinstance(value, dict):
        key_type, item_type = arguments if plain in schema.MAPPINGS and arguments else (Any, Any)
        return {inner(path, key, key_type): inner(path.child(key), item, item_type) for key, item in value.items()}
    return value


def factory_of(hint: Any) -> str | None:
    """Return the kind of what the factory of an annotation makes, empty for any; ``None`` where it asks for none."""
    members = typing.get_args(hint) if schema.is_union(hint) else (hint,)
    products = [typing.get_args(member)[1] for member in members if schema.is_factory(member)]
    return _PRODUCTS.get(getattr(products[0], "__name__", ""), "") if products else None


def _union(path: NodePath, value: Any, members: tuple[Any, ...], inner: Callable[..., Any]) -> Any:
    """What a union gets: what the member says that ``value`` already is; else what its text says; else the text."""
    choices = tuple(c for m in members if typing.get_origin(m) is Literal for c in typing.get_args(m))
    if (value is None and type(None) in members) or _is_choice(value, choices):
        return value
    others = [m for m in members if m is not type(None) and typing.get_origin(m) is not Literal]
    texts = [m for m in others if (known := value_type(m)) and known.write is not None]
    fitting = [m for m in others if _fits(value, m) and not (texts and m is str)]
    readable = [m for m in others if value_type(m) and m is not str]
    last = [str] if str in others and isinstance(value, (str, int, float)) else []
    refusals = []
    for member in dict.fromkeys([*fitting, *texts, *readable, *last]):
        try:
            return inner(path, value, member)
        except ConfigError as refusal:
            refusals.append(str(refusal))
    if choices:
        otherwise = "".join(words for member, words in _OTHERWISE.items() if member in others)
        also = "".join(f"\nOr as text: {refusal.removeprefix(f'{path}: ')}" for refusal in refusals[: len(texts)])
        raise ConfigError(f"{_no_choice(path, value, choices)}{otherwise}{also}")
    if refusals:
        raise ConfigError(refusals[0])
    for member in others:  # a container or dataclass that it is not says what it needs
        inner(path, value, member)
    return value


def _dataclass(path: NodePath, value: Any, original: Any, inner: Callable[..., Any]) -> Call:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}, where the fields of a {original.__name__} are needed.")
    takes = schema.parameters(original)
    for name in value:
        if name not in takes:
            what = f"{original.__name__} takes no {name!r}.{nearest(str(name), takes)} It takes: {', '.join(takes)}"
            raise ConfigError(f"{path.child(name)}: {what}")
    for name, (_, default) in takes.items():
        if default == MISSING and is_missing(value.get(name, MISSING)):
            raise ConfigError(f"{path.child(name)} needs a value: {path.child(name).advice}.")
    given = {name: item for name, item in value.items() if not is_missing(item)}
    return Call(original, [], {name: inner(path.child(name), item, takes[name][0]) for name, item in given.items()})


def _sequence(path: NodePath, value: Any, plain: Any, arguments: tuple[Any, ...], inner: Callable[..., Any]) -> Any:
    fixed = plain is tuple and arguments and Ellipsis not in arguments
    if fixed and len(value) != len(arguments):
        raise ConfigError(f"{path} has {len(value)} items, where {len(arguments)} are needed: {list(value)!r}")
    item = arguments[0] if arguments and plain in schema.SEQUENCES else Any
    hints = arguments if fixed else [item] * len(value)
    items = [inner(path.child(i), each, hint) for i, (each, hint) in enumerate(zip(value, hints, strict=True))]
    return tuple(items) if plain is tuple else items


def _is_choice(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(value == choice and isinstance(value, type(choice)) for choice in choices)


def _no_choice(path: NodePath, value: Any, choices: tuple[Any, ...]) -> str:
    near = nearest(str(value), [str(choice) for choice in choices])
    return f"{path} is {value!r}.{near} It is one of: {', '.join(map(repr, choices))}"


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the shape of what ``hint`` asks for."""
    plain = typing.get_origin(hint) or hint
    if plain in schema.SEQUENCES or plain in schema.MAPPINGS:
        return isinstance(value, (list, tuple) if plain in schema.SEQUENCES else Mapping)
    if schema.is_dataclass(plain):
        return isinstance(value, (plain, dict))
    try:
        return plain is Any or isinstance(value, (int, float) if plain is float else plain)
    except TypeError:  # a protocol that cannot tell
        return False
