"""The typed config of a component, made from its signature: one source of truth, no YAML beside the code.

Each parameter that a config can hold becomes a typed field of a generated dataclass, with the signature's default;
one without a default is mandatory. What a config cannot hold (process groups, modules, tensors) is *runtime only*: it
has no field and is passed to ``stagereg.instantiate`` by the program. A parameter named like a kind of the registry
(``stager``) takes a component of that kind, so its field holds any config.

Fields are ``str``, ``int``, ``float``, ``bool``, paths, enums, ``Literal``, unions of those with ``None``, lists,
tuples and dicts of those, and dataclasses of those. A dict or dataclass that is ``None`` by default is an untyped
field, as OmegaConf would let nobody override a typed one; it is checked when the component is built. ``torch.dtype``,
``torch.device``, ``datetime.timedelta`` and ``stagereg.ByteSize`` are text in a config (``texts``).
``stagereg.instantiate`` checks choices and texts and makes the objects again (``values``); ``hydra.utils.instantiate``
knows nothing of them and passes a component the text as it stands, a tuple as a list, an untyped field as a dict, and a
dataclass that has texts or choices in it as its mirror, an object of the same fields.

Each field carries what the component's docstring says about it as ``metadata["help"]``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import MISSING

import stagereg.config.docstring as docstring
import stagereg.config.values as values
import stagereg.registry as registry
from stagereg.errors import ConfigError, StageregError
from stagereg.registry import Entry

__all__ = ["HYDRA_KEYS", "Option", "options", "runtime", "schema"]

HYDRA_KEYS = ("_target_", "_args_", "_convert_", "_isolate_", "_partial_", "_recursive_")
"""What Hydra gives a meaning in a node: never options, though a component may have parameters of these names."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of a component that a config can hold.

    Attributes:
        name: of the parameter.
        hint: its annotation, resolved, with ``None`` where that is the default; ``typing.Any`` for a nested component.
        type: the annotation of the config field; other than ``hint`` where a config holds it in another form, or only
            part of it.
        default: the signature's default as the config shows it, or ``omegaconf.MISSING``.
        help: what the component's docstring says about it, one line; empty where it says nothing.
    """

    name: str
    hint: Any
    type: Any
    default: Any
    help: str = ""


def options(entry: Entry) -> dict[str, Option]:
    """Return the parameters of a component that a config can hold, by name; imports the component.

    Raises:
        RegistryError: the component cannot be loaded.
    """
    return _options(entry.load())


def runtime(entry: Entry) -> list[str]:
    """Return the names of the parameters that only the program can pass, in their order; imports the component.

    Raises:
        RegistryError: the component cannot be loaded.
    """
    component = entry.load()
    return [
        parameter.name
        for parameter in inspect.signature(component).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in _options(component)
    ]


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
    if any(values.holds_containers(type_) for option in found for type_ in (option.type, option.hint)):
        # Components get lists, dicts and dataclasses as they declare them, not OmegaConf's containers.
        fields.append(("_convert_", str, "object"))
    fields += [values.field(o.name, o.type, o.default, {"help": o.help}) for o in found]
    made = dataclasses.make_dataclass(f"{kind}/{name}", fields)
    made.__module__ = __name__
    made.__doc__ = inspect.getdoc(component)
    return made


def _find_options(component: Callable[..., Any]) -> Iterator[Option]:
    told = docstring.parameters(component)
    for parameter in inspect.signature(component).parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not by_name or parameter.name in HYDRA_KEYS:
            continue
        annotation = Any if parameter.name in registry.kinds() else _annotation(component, parameter)
        default = _default(component, parameter)
        hint = values.with_none(annotation, default)
        default = MISSING if default is parameter.empty else values.held(default, hint)
        option = _option(parameter.name, hint, default, told.get(parameter.name, ""))
        if option is not None:
            yield option


def _option(name: str, hint: Any, default: Any, help: str) -> Option | None:
    """The option of one parameter, or ``None`` when no config can hold it or its default."""
    type_ = values.config_type(hint)
    unknown = _untyped(hint) and name not in registry.kinds()
    unknown = unknown and not values.makes_factories(hint)
    if type_ is None or (unknown and default in (MISSING, None)):
        return None  # nothing tells what a config would have to hold: it is for the program to pass
    if default is None:
        type_ = values.or_none(type_)
    if values.field(name, type_, default, {}) is None:
        return None
    return Option(name, hint, type_, default, help)


def _annotation(component: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The resolved annotation of one parameter: ``Any`` without one, ``None`` when it cannot be resolved."""
    if parameter.annotation is parameter.empty:
        return Any
    field = _field(component, parameter)
    if field is not None:
        return values.field_hints(component)[field.name]  # read where the field was written
    function = inspect.unwrap(component.__init__ if isinstance(component, type) else component)  # type: ignore[misc]
    module = inspect.getmodule(component)
    scope = getattr(function, "__globals__", None) or vars(module or types)
    return values.resolved(parameter.name, parameter.annotation, scope)


def _default(component: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    field = _field(component, parameter)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return parameter.default


def _field(component: Callable[..., Any], parameter: inspect.Parameter) -> dataclasses.Field[Any] | None:
    """The field of a dataclass that a parameter of its generated ``__init__`` is for."""
    if not isinstance(component, type) or not dataclasses.is_dataclass(component):
        return None
    found = (field for field in dataclasses.fields(component) if field.name == parameter.name)
    return next((field for field in found if field.type == parameter.annotation), None)


def _untyped(hint: Any) -> bool:
    return hint in (Any, list, tuple, dict) or any(_untyped(argument) for argument in typing.get_args(hint))
