"""What a config holds for an annotation, and what a component gets for what the config holds.

Two directions over the same annotations: :func:`config_type` and :func:`held` make the type and the default of a config
field, :func:`made` makes the argument again, checks the choices of each ``Literal`` and says which key is wrong. What
:func:`held` makes of a value, :func:`made` turns into an equal one, also after a way through YAML.

A type of ``texts`` is held as text. A dataclass that OmegaConf cannot hold as it stands, because it is frozen or a
field of it is such a type or a ``Literal``, is held as its *mirror*, a generated dataclass of the same field names, and
made again field by field. Fields that no config can hold are left at their defaults. Tuples are held as lists. Unions
of more than single values, and containers in containers, are held untyped, and what is in them is told by its shape. A
config in them (a mapping with a ``_target_``) is left as it is, for ``instantiate`` to build.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import operator
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import stagereg.config.docstring as docstring
from stagereg.config.texts import Text, text_of, written
from stagereg.errors import ConfigError, nearest

__all__ = [
    "config_type",
    "factory_kind",
    "field",
    "field_hints",
    "held",
    "holds_containers",
    "is_mapping",
    "is_object",
    "made",
    "makes_factories",
    "or_none",
    "resolved",
    "with_none",
]

_SCALARS = (str, int, float, bool)
_SEQUENCES = (list, tuple, Sequence)
_MAPPINGS = (dict, Mapping)


def config_type(hint: Any, within: tuple[type, ...] = ()) -> Any:
    """Return the type a config field can have for an annotation, or ``None`` when a config cannot hold it.

    ``within`` are the dataclasses that are being mirrored, which may refer to themselves.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    inner = functools.partial(config_type, within=within)
    if text_of(hint) is not None:
        return str
    if _is_factory(hint):
        return Any  # the config of a component, whatever its keys
    if hint is Any or hint in _SCALARS or _is_a(hint, enum.Enum, pathlib.Path):
        return hint
    if _is_dataclass(hint):
        return None if hint in within else _mirror(hint, within)
    if origin is Literal:
        kinds = {type(choice) for choice in arguments}
        return _union([inner(kind) if kind is not type(None) else kind for kind in kinds])
    if _is_union(hint):
        return _union([a if a is type(None) else inner(a) for a in arguments])
    plain = origin or hint
    if plain in _SEQUENCES:
        items = {_nested(inner(a)) for a in arguments if a is not Ellipsis} or {Any}
        return None if None in items else list[items.pop() if len(items) == 1 else Any]  # type: ignore[misc]
    if plain in _MAPPINGS:
        key, item = (inner(a) for a in arguments or (str, Any))
        return None if key is None or item is None else dict[key, _nested(item)]  # type: ignore[valid-type, misc]
    return None


def or_none(type_: Any) -> Any:
    """Return the type of a field whose default is ``None``: untyped for a mapping or dataclass.

    In a typed one that is ``None``, OmegaConf lets no override set anything.
    """
    members = typing.get_args(type_) if _is_union(type_) else (type_,)
    closed = any(typing.get_origin(m) is dict or dataclasses.is_dataclass(m) for m in members)
    return Any if type_ is Any or closed else type_ | None


def held(value: Any, hint: Any = Any) -> Any:
    """Return a default as a config holds it: texts for objects, lists for tuples, mirrors for their dataclasses."""
    text = text_of(hint)
    if text is not None and isinstance(value, (str, int, float)) and value != MISSING:
        with contextlib.suppress(ConfigError):  # a default that is none is told when the component is built
            return text.write(text.read(str(value)))
    if isinstance(value, (list, tuple)):
        return [held(item) for item in value]
    if isinstance(value, dict):
        return {held(key): held(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _reflected(value)
    return written(value)


def made(where: str, value: Any, hint: Any) -> Any:
    """Return what a component gets for ``value`` of a config, whose place in it is ``where``.

    Raises:
        ConfigError: the value is none of the choices, or not the text of what ``hint`` asks for; the message has the
            key and what would be right.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    plain = origin or hint
    if isinstance(value, dict) and "_target_" in value:
        return value
    if _is_factory(hint) and not callable(value):
        shown, kind = "null" if value is None else repr(value), factory_kind(hint) or "component"
        raise ConfigError(f"{where} is {shown}, where the config of a {kind} is needed.")
    if text := text_of(hint):
        return value if isinstance(value, text.type) else _read(where, value, text)
    if origin is Literal:
        return _chosen(where, value, arguments)
    if _is_union(hint):
        return _one_of(where, value, arguments)
    if _is_dataclass(hint):
        return _dataclass(where, value, hint)
    if plain in _SEQUENCES and isinstance(value, (list, tuple)):
        return _sequence(where, value, plain, arguments)
    if plain in _MAPPINGS and isinstance(value, Mapping) and arguments:
        key, item = arguments
        return {made(where, k, key): made(f"{where}.{k}", v, item) for k, v in value.items()}
    if plain in _SCALARS or _is_a(plain, enum.Enum, pathlib.Path):
        return value if type(value) is plain else _scalar(where, value, plain)
    if plain in (*_SEQUENCES, *_MAPPINGS) and _is_plain(value) and not _fits(value, hint):
        needed = "list" if plain in _SEQUENCES else "mapping"
        raise ConfigError(f"{where} is {value!r}, where a {needed} is needed.")
    return value


def makes_factories(hint: Any) -> bool:
    """Whether the annotation is or holds ``Callable[..., X]``: its component calls what the config describes itself."""
    return _is_factory(hint) or any(map(makes_factories, typing.get_args(hint)))


def factory_kind(hint: Any) -> str:
    """Return the kind of what the factories of an annotation make; empty where it names no kind."""
    if not _is_factory(hint):
        return next(filter(None, map(factory_kind, typing.get_args(hint))), "")
    return _PRODUCTS.get(getattr(typing.get_args(hint)[1], "__name__", ""), "")


def is_object(value: Any, hint: Any) -> bool:
    """Whether ``value`` is already what ``hint`` asks for and nothing that a config holds: to be passed as it is."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    if any(text_of(member) is not None and isinstance(value, member) for member in members):
        return True
    if _is_plain(value):
        return False
    foreign = [m for m in members if config_type(m) is None or (_is_dataclass(m) and config_type(m) is not m)]
    with contextlib.suppress(TypeError):  # a protocol that cannot tell
        return any(isinstance(value, typing.get_origin(member) or member) for member in foreign)
    return False


def field(name: str, type_: Any, default: Any, metadata: Mapping[str, Any]) -> Any:
    """Return a field of a config for ``dataclasses.make_dataclass``, or ``None`` where OmegaConf cannot hold it."""
    if isinstance(default, dict):
        # Hydra lets a command line add no key to a config; a mapping has whatever keys it is given.
        made_field: Any = dataclasses.field(default_factory=lambda: _open(default), metadata=metadata)
    elif isinstance(default, list) or dataclasses.is_dataclass(default):
        made_field = dataclasses.field(default_factory=lambda: default, metadata=metadata)  # OmegaConf copies it
    else:
        made_field = dataclasses.field(default=default, metadata=metadata)
    try:
        OmegaConf.structured(dataclasses.make_dataclass("probe", [(name, type_, made_field)]))
    except (OmegaConfBaseException, TypeError, ValueError):
        return None
    return (name, type_, made_field)


def with_none(hint: Any, default: Any) -> Any:
    """Return an annotation as its default has it: many write ``x: int = None`` for an optional one."""
    return typing.Optional[hint] if default is None and hint not in (None, Any) else hint  # noqa: UP045


def resolved(name: str, annotation: Any, scope: Mapping[str, Any]) -> Any:
    """Return an annotation with the names in it looked up in ``scope``; ``None`` when one is not there.

    One at a time: an annotation that only type checkers can resolve must not spoil the others.
    """
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return typing.get_type_hints(holder, globalns=dict(scope))[name]
    except Exception:
        return None


def holds_containers(type_: Any) -> bool:
    """Whether a config field of this type holds lists, dicts or dataclasses."""
    inside = (type_, *typing.get_args(type_))
    return any(typing.get_origin(t) in (list, dict) or dataclasses.is_dataclass(t) for t in inside)


def is_mapping(type_: Any) -> bool:
    """Whether a config field of this type holds a dict, whose keys are the config's own."""
    return any(typing.get_origin(t) is dict for t in (type_, *typing.get_args(type_)))


def __getattr__(name: str) -> type:
    """Find a mirror by its name, the path of its dataclass: pickle looks for it here."""
    module, colon, path = name.replace("/", ".").partition(":")
    if colon:
        with contextlib.suppress(AttributeError, ImportError):
            original = functools.reduce(getattr, path.split("."), importlib.import_module(module))
            mirror = _mirror(original) if _is_dataclass(original) else None
            if isinstance(mirror, type):
                return mirror
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _open(default: dict[Any, Any]) -> Any:
    return OmegaConf.create(default, flags={"struct": False})


def _union(members: list[Any]) -> Any:
    """The union of what a config can hold among ``members``; ``None`` when that is nothing but ``None``."""
    known = [m for m in dict.fromkeys(members) if m is not None]
    some = [m for m in known if m is not type(None)]
    if Any in known or (len(some) > 1 and any(holds_containers(m) for m in some)):
        return Any  # OmegaConf has unions of single values only
    if float in some and len(some) > 1:
        known.append(int)  # in a union, OmegaConf takes no 3 for 3.0
    return functools.reduce(operator.or_, known) if some else None


def _nested(item: Any) -> Any:
    """The type of a container's items: ``Any`` for containers in it, in which OmegaConf converts nothing."""
    members = typing.get_args(item) if _is_union(item) else (item,)
    return Any if any(typing.get_origin(m) in (list, dict) for m in members) else item


_PRODUCTS = {"JoinHook": "join_hook", "Joinable": "joinable", "AsyncStager": "stager"}
"""Kinds by the name of the class in ``Callable[..., JoinHook]``, which torch's class and ours share."""


def _is_factory(hint: Any) -> bool:
    """Whether it is ``Callable[..., X]``; with its arguments spelt out, a function of the program's is meant."""
    return typing.get_origin(hint) is Callable and typing.get_args(hint)[:1] == (Ellipsis,)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


_mirrors: dict[type, Any] = {}


def _mirror(original: Any, within: tuple[type, ...] = ()) -> Any:
    """The dataclass that a config has in place of ``original``: itself where it can, ``None`` where nothing can."""
    if original not in _mirrors:
        _mirrors[original] = _find_mirror(original, (*within, original))
    return _mirrors[original]


def _find_mirror(original: type, within: tuple[type, ...]) -> Any:
    hints = field_hints(original)
    frozen = original.__dataclass_params__.frozen  # type: ignore[attr-defined]  # OmegaConf would let nobody override it
    if not frozen and not any(_is_foreign_field(f, hints[f.name], within) for f in dataclasses.fields(original)):
        with contextlib.suppress(OmegaConfBaseException, TypeError, ValueError):
            OmegaConf.structured(original)
            return original
    told = docstring.parameters(original)
    found = []
    for f in dataclasses.fields(original):
        metadata = {"help": told.get(f.name, ""), **f.metadata}
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        required = default is dataclasses.MISSING
        type_ = config_type(hints[f.name], within)
        as_held = MISSING if required else held(default, hints[f.name])
        if default is None and type_ is not None:
            type_ = or_none(type_)
        mirrored = field(f.name, type_, as_held, metadata) if f.init and type_ is not None else None
        if mirrored is not None:
            found.append(mirrored)
        elif required and f.init:
            return None
    mirror = dataclasses.make_dataclass(original.__name__, found)
    mirror.__module__ = __name__
    mirror.__qualname__ = f"{original.__module__}:{original.__qualname__}".replace(".", "/")
    mirror.__doc__ = original.__doc__
    return mirror


def _reflected(value: Any) -> Any:
    """A dataclass's object as its mirror; as it is where that would lose a field, so that a config cannot hold it."""
    original: Any = type(value)
    mirror, hints = _mirror(original), field_hints(original)
    if mirror is None or mirror is original:
        return value
    kept = {f.name for f in dataclasses.fields(mirror)}
    for f in dataclasses.fields(value):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if f.init and f.name not in kept and getattr(value, f.name) is not default:
            return value
    fields = {name: held(getattr(value, name), hints[name]) for name in kept}
    return mirror(**{name: _open(v) if isinstance(v, dict) else v for name, v in fields.items()})


def _is_foreign_field(f: dataclasses.Field[Any], hint: Any, within: tuple[type, ...]) -> bool:
    """Whether OmegaConf would not take a field as it stands, or not check it, or let no override set it."""
    if _is_foreign(hint, within):
        return True
    type_ = config_type(hint, within) if f.default is None else None
    return type_ not in (None, Any) and or_none(type_) is Any


def _is_foreign(hint: Any, within: tuple[type, ...]) -> bool:
    """Whether an annotation has something in it that OmegaConf would not take, or not check."""
    if text_of(hint) is not None or typing.get_origin(hint) is Literal:
        return True
    if _is_dataclass(hint):
        return hint not in within and _mirror(hint, within) is not hint
    return any(_is_foreign(argument, within) for argument in typing.get_args(hint))


@functools.cache
def field_hints(original: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, resolved in the modules that wrote them, ``None`` where not."""
    hints: dict[str, Any] = {}
    for owner in reversed(original.__mro__):
        scope = {**vars(sys.modules.get(owner.__module__, types)), owner.__name__: owner}
        for name, annotation in vars(owner).get("__annotations__", {}).items():
            hints[name] = resolved(name, annotation, scope)
    return {f.name: with_none(hints.get(f.name), f.default) for f in dataclasses.fields(original)}


def _dataclass(where: str, value: Any, original: Any) -> Any:
    hints, mirror = field_hints(original), _mirror(original)
    if isinstance(value, original):  # OmegaConf made it, with lists for tuples
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(original) if f.init}
        new = {name: made(f"{where}.{name}", v, hints[name]) for name, v in fields.items()}
        changed = {name: v for name, v in new.items() if v is not fields[name] and v != fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(mirror, type) and isinstance(value, mirror):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(mirror)}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}, where the fields of a {original.__name__} are needed.")
    takes = {f.name: f for f in dataclasses.fields(original) if f.init}
    for name in value:
        if name not in takes:
            told = f"{original.__name__} takes no {name!r}.{nearest(str(name), takes)} It takes: {', '.join(takes)}"
            raise ConfigError(f"{where}.{name}: {told}")
    given = {name: v for name, v in value.items() if v != MISSING}
    for f in takes.values():
        if f.name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}.{f.name} needs a value: add {where}.{f.name}=... to the command line.")
    return original(**{name: made(f"{where}.{name}", v, hints[name]) for name, v in given.items()})


def _sequence(where: str, value: Sequence[Any], plain: Any, arguments: tuple[Any, ...]) -> Any:
    fixed = plain is tuple and arguments and Ellipsis not in arguments
    if fixed and len(value) != len(arguments):
        raise ConfigError(f"{where} has {len(value)} items, where {len(arguments)} are needed: {list(value)!r}")
    hints = arguments if fixed else [arguments[0] if arguments else Any] * len(value)
    items = [made(f"{where}[{i}]", item, hint) for i, (item, hint) in enumerate(zip(value, hints, strict=True))]
    return tuple(items) if plain is tuple else items


def _one_of(where: str, value: Any, members: tuple[Any, ...]) -> Any:
    """What a union gets: the member that ``value`` already is; else what its text says; else the text itself."""
    choices = tuple(c for m in members if typing.get_origin(m) is Literal for c in typing.get_args(m))
    if (value is None and type(None) in members) or _is_choice(value, choices):
        return value
    others = [m for m in members if m is not type(None) and typing.get_origin(m) is not Literal]
    texts = [m for m in others if text_of(m) is not None]
    for member in others:
        if _fits(value, member) and not (texts and member is str):
            return made(where, value, member)
    refusals = []
    for member in (*texts, *(m for m in others if m not in texts and m is not str and config_type(m) is not None)):
        try:
            return made(where, value, member)
        except ConfigError as refusal:
            refusals.append(str(refusal))
    if str in others and isinstance(value, _SCALARS):
        return made(where, value, str)
    if choices:
        also = "".join(f"\nOr as text: {refusal.removeprefix(f'{where}: ')}" for refusal in refusals[: len(texts)])
        other = "".join(words for member, words in _OTHERWISE.items() if member in others)
        raise ConfigError(f"{_no_choice(where, value, choices)}{other}{also}")
    if refusals:
        raise ConfigError(refusals[0])
    return value


_OTHERWISE: dict[Any, str] = {bool: ", true or false", int: ", or a whole number", float: ", or a number"}
"""What a value of a union may be beside its choices, in words."""


def _chosen(where: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if not _is_choice(value, choices):
        raise ConfigError(_no_choice(where, value, choices))
    return value


def _is_choice(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(value == choice and isinstance(value, type(choice)) for choice in choices)


def _no_choice(where: str, value: Any, choices: tuple[Any, ...]) -> str:
    near = nearest(str(value), [str(choice) for choice in choices])
    return f"{where} is {value!r}.{near} It is one of: {', '.join(map(repr, choices))}"


def _read(where: str, value: Any, text: Text) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{where} is {value!r}, where the text of a {text.type.__name__} is needed.")
    try:
        return text.read(str(value))
    except ConfigError as refusal:
        raise ConfigError(f"{where}: {refusal}") from refusal


@functools.cache
def _single(type_: Any) -> Any:
    return OmegaConf.structured(dataclasses.make_dataclass("value", [("value", type_, MISSING)]))


def _scalar(where: str, value: Any, type_: Any) -> Any:
    """``value`` as OmegaConf converts it to a single type, never taking text for an interpolation."""
    try:
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{where}: {value!r} is not a {type_.__name__}.")
        return OmegaConf.merge(_single(type_), {"value": written(value)}).value
    except OmegaConfBaseException as refusal:
        raise ConfigError(f"{where}: {str(refusal).splitlines()[0]}") from refusal


def _fits(value: Any, hint: Any) -> bool:
    plain = typing.get_origin(hint) or hint
    if plain in _SEQUENCES:
        return isinstance(value, (list, tuple))
    if plain in _MAPPINGS:
        return isinstance(value, Mapping)
    if plain is float:
        return isinstance(value, (int, float))
    if _is_dataclass(plain):
        mirror = _mirror(plain)
        return isinstance(value, (plain, dict) if mirror is None else (plain, mirror, dict))
    return plain is Any or (isinstance(plain, type) and isinstance(value, plain))


def _is_plain(value: Any) -> bool:
    """Whether a config holds ``value`` as it is."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (*_SCALARS, bytes, enum.Enum, pathlib.Path))


def _is_a(hint: Any, *classes: type) -> bool:
    return isinstance(hint, type) and typing.get_origin(hint) is None and issubclass(hint, classes)


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)
