"""The typed config of a component, made from its signature: one source of truth, no YAML beside the code.

Each parameter that a config can hold becomes a typed field of a generated dataclass, with the signature's default;
one without a default is mandatory. What a config cannot hold (process groups, modules, tensors) is *runtime only*: it
has no field and is passed to ``stagereg.instantiate`` by the program. A parameter named like a kind of the registry
(``stager``) takes a component of that kind, so its field holds any config.

Fields are ``str``, ``int``, ``float``, ``bool``, paths, enums, ``Literal`` (its choices are checked when instantiated),
unions of those with ``None``, lists, tuples and dicts of those, and dataclasses of those.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import operator
import pathlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stagereg import registry
from stagereg.errors import ConfigError, StageregError, nearest
from stagereg.registry import Entry

__all__ = ["Option", "options", "refuse_choice", "schema"]


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of a component that a config can hold.

    Attributes:
        name: of the parameter.
        hint: its annotation, resolved; ``typing.Any`` for a nested component.
        type: the annotation of the config field; narrower than ``hint`` where a config holds only part of it.
        default: the signature's default, or ``omegaconf.MISSING``.
    """

    name: str
    hint: Any
    type: Any
    default: Any

    def declared(self, value: list[Any]) -> Sequence[Any]:
        """Return a list from a config as the sequence that the parameter declares."""
        declared = (self.hint, *typing.get_args(self.hint))
        return tuple(value) if any((typing.get_origin(h) or h) is tuple for h in declared) else value


def options(entry: Entry) -> dict[str, Option]:
    """Return the parameters of a component that a config can hold, by name; imports the component.

    Raises:
        RegistryError: the component cannot be loaded.
    """
    return _options(entry.load())


def schema(entry: Entry) -> type:
    """Return the dataclass that describes the config of a component; imports the component.

    The same component gives the same class, which pickles by the component's kind and name.

    Raises:
        RegistryError: the component cannot be loaded.
        ConfigError: it is defined inside a function, where no config can name it.
    """
    if "<locals>" in entry.path:
        raise ConfigError(
            f"{entry.kind}/{entry.name} is defined inside a function ({entry.target}), where a config cannot name it.\n"
            "Move it to the top level of a module."
        )
    return _schema(entry.kind, entry.name, entry.path, entry.load())


def refuse_choice(where: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not among the choices of a ``Literal`` in ``hint``, however deep it is nested.

    Raises:
        ConfigError: ``where`` holds a value that is no choice; the message has the nearest one and the list.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            near = nearest(str(value), [str(a) for a in arguments])
            raise ConfigError(f"{where} is {value!r}.{near} It is one of: {', '.join(map(repr, arguments))}")
    elif origin in (Union, types.UnionType):
        choices = tuple(choice for a in arguments if typing.get_origin(a) is Literal for choice in typing.get_args(a))
        fitting = [a for a in arguments if typing.get_origin(a) is not Literal and _fits(value, a)]
        if choices and not fitting:
            refuse_choice(where, value, Literal[choices])
        for argument in fitting:
            refuse_choice(where, value, argument)
    elif isinstance(value, Mapping) and len(arguments) == 2:
        for key, item in value.items():
            refuse_choice(f"{where}.{key}", item, arguments[1])
    elif isinstance(value, Sequence) and not isinstance(value, str) and arguments:
        for index, item in enumerate(value):
            refuse_choice(f"{where}[{index}]", item, arguments[0])


def __getattr__(name: str) -> type:
    """Find a generated class by its name, ``"kind/name"``: pickle looks for it here."""
    kind, _, component = name.partition("/")
    try:
        return schema(registry.find(kind, component))
    except StageregError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error


@functools.cache
def _options(component: Callable[..., Any]) -> dict[str, Option]:
    return {option.name: option for option in _find_options(component)}


@functools.cache
def _schema(kind: str, name: str, path: str, component: Callable[..., Any]) -> type:
    found = _options(component).values()
    fields: list[Any] = [("_target_", str, path)]
    if any(_holds_containers(option.type) for option in found):
        # Components get lists, dicts and dataclasses as they declare them, not OmegaConf's containers.
        fields.append(("_convert_", str, "object"))
    fields += [(option.name, option.type, _field(option.default)) for option in found]
    made = dataclasses.make_dataclass(f"{kind}/{name}", fields)
    made.__module__ = __name__
    made.__doc__ = inspect.getdoc(component)
    return made


def _find_options(component: Callable[..., Any]) -> Iterator[Option]:
    for parameter in inspect.signature(component).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        hint = Any if parameter.name in registry.kinds() else _annotation(component, parameter)
        required = parameter.default is parameter.empty
        option = _option(parameter.name, hint, MISSING if required else _plain(parameter.default))
        if option is not None:
            yield option


def _option(name: str, hint: Any, default: Any) -> Option | None:
    """The option of one parameter, or ``None`` when no config can hold it or its default."""
    type_ = _config_type(hint)
    unknown = _untyped(hint) and name not in registry.kinds()
    if type_ is None or (unknown and default in (MISSING, None)):
        return None  # nothing tells what a config would have to hold: it is for the program to pass
    if default is None and type_ is not Any:
        type_ = type_ | None
    try:
        OmegaConf.structured(dataclasses.make_dataclass("probe", [(name, type_, _field(default))]))
    except (OmegaConfBaseException, TypeError, ValueError):
        return None
    return Option(name, hint, type_, default)


def _annotation(component: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The resolved annotation of one parameter: ``Any`` without one, ``None`` when it cannot be resolved."""
    if parameter.annotation is parameter.empty:
        return Any
    function = component.__init__ if isinstance(component, type) else inspect.unwrap(component)  # type: ignore[misc]
    module = inspect.getmodule(component)
    scope = getattr(function, "__globals__", None) or vars(module or types)
    # One at a time: an annotation that only type checkers can resolve must not spoil the others.
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(holder, globalns=scope)[parameter.name]
    except Exception:
        return None


def _config_type(hint: Any) -> Any:
    """The type a config field can have for an annotation, or ``None`` when a config cannot hold it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint in (str, int, float, bool):
        return hint
    if isinstance(hint, type) and origin is None and issubclass(hint, (enum.Enum, pathlib.Path)):
        return hint
    if dataclasses.is_dataclass(hint):
        return hint
    if origin is Literal:
        kinds = {type(choice) for choice in arguments}
        return _union([_config_type(kind) if kind is not type(None) else kind for kind in kinds])
    if origin in (Union, types.UnionType):
        return _union([a if a is type(None) else _config_type(a) for a in arguments])
    plain = origin or hint
    if plain in (list, tuple, Sequence):
        inner = {_config_type(a) for a in arguments if a is not Ellipsis} or {Any}
        return None if None in inner else list[inner.pop() if len(inner) == 1 else Any]  # type: ignore[misc]
    if plain in (dict, Mapping):
        key, item = (_config_type(a) for a in arguments or (str, Any))
        return None if key is None or item is None else dict[key, item]  # type: ignore[valid-type]
    return None


def _union(members: list[Any]) -> Any:
    """The union of what a config can hold among ``members``; ``None`` when that is nothing but ``None``."""
    held = [m for m in dict.fromkeys(members) if m is not None]
    some = [m for m in held if m is not type(None)]
    if Any in held or (len(some) > 1 and any(_holds_containers(m) for m in some)):
        return Any  # OmegaConf has unions of single values only
    return functools.reduce(operator.or_, held) if some else None


def _untyped(hint: Any) -> bool:
    return hint in (Any, list, tuple, dict) or any(_untyped(argument) for argument in typing.get_args(hint))


def _fits(value: Any, hint: Any) -> bool:
    plain = typing.get_origin(hint) or hint
    return isinstance(plain, type) and isinstance(value, plain)


def _holds_containers(type_: Any) -> bool:
    inside = (type_, *typing.get_args(type_))
    return any(typing.get_origin(t) in (list, dict) or dataclasses.is_dataclass(t) for t in inside)


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def _field(default: Any) -> Any:
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default)  # OmegaConf copies it
    return dataclasses.field(default=default)
