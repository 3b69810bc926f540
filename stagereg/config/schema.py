"""The typed config of a component, made from its signature, and what the component gets for what a config holds.

Each parameter that a config can hold becomes a field of a generated dataclass, with the signature's default; one
without a default is mandatory. What a config cannot hold (process groups, modules, tensors) is *runtime only*: it has
no field and is passed to ``stagereg.instantiate`` by the program. A parameter named like a kind of the registry
(``stager``) takes a component of that kind, so its field holds any config. So does one annotated ``Callable[..., X]``,
and a mapping or list of those: it gets callables that build what their configs describe.

Hydra and OmegaConf check single values of ``texts`` that a config holds as they are, and lists of them, while a config
is composed. Everything else is an untyped field: texts, choices of a ``Literal``, mappings, nested containers and
dataclasses, which a config shows as mappings of their fields. :func:`from_config` checks and converts all of it when
the component is built, so what :func:`to_config` makes of a value becomes an equal one, also after a way through YAML.
``hydra.utils.instantiate`` passes it to a component as it is in the config.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import stagereg.config.docstring as docstring
import stagereg.registry as registry
from stagereg.config.resolved_tree import Call, NodePath, is_missing
from stagereg.config.texts import value_type, written
from stagereg.errors import ConfigError, StageregError, nearest
from stagereg.registry import Entry
from stagereg.spec import refuse_unknown

__all__ = [
    "HYDRA_KEYS",
    "Option",
    "factory_of",
    "fields",
    "from_config",
    "makes_factories",
    "options",
    "runtime",
    "schema",
    "to_config",
]

HYDRA_KEYS = ("_target_", "_args_", "_convert_", "_isolate_", "_partial_", "_recursive_")
"""What Hydra gives a meaning in a node: never options, though a component may have parameters of these names."""

_SEQUENCES = (list, tuple, Sequence)
_MAPPINGS = (dict, Mapping)

_PRODUCTS = {"AsyncStager": "stager", "JoinHook": "join_hook", "Joinable": "joinable"}
"""Kinds by the name of the class in ``Callable[..., JoinHook]``, which torch's class and ours share."""

_OTHERWISE: dict[Any, str] = {bool: ", true or false", int: ", or a whole number", float: ", or a number"}
"""What a value of a union may be beside its choices, in words."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of a component that a config can hold.

    Attributes:
        name: of the parameter.
        hint: its annotation, resolved, with ``None`` where that is the default; ``typing.Any`` for a nested component.
        type: the annotation of the config field; ``typing.Any`` where OmegaConf checks nothing.
        default: the signature's default as the config shows it, or ``omegaconf.MISSING``.
        help: what the component's docstring says about it, one line; empty where it says nothing.
    """

    name: str
    hint: Any
    type: Any
    default: Any
    help: str


def options(entry: Entry) -> dict[str, Option]:
    """Return the parameters of a component that a config can hold, by name; imports the component.

    Raises:
        RegistryError: the component cannot be loaded.
    """
    return fields(entry.load())


def runtime(entry: Entry) -> list[str]:
    """Return the names of the parameters that only the program can pass, in their order; imports the component.

    Raises:
        RegistryError: the component cannot be loaded.
    """
    component = entry.load()
    parameters = inspect.signature(component).parameters.values()
    named = (p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [name for name in named if name not in fields(component)]


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
def _schema(kind: str, name: str, path: str, component: Callable[..., Any]) -> type:
    found = fields(component).values()
    made: list[Any] = [("_target_", str, path)]
    if any(typing.get_origin(o.type) is list or isinstance(o.default, (dict, DictConfig)) for o in found):
        made.append(("_convert_", str, "object"))  # Hydra then passes lists and dicts, not OmegaConf's containers
    made += [(o.name, o.type, _field(o.default, o.help)) for o in found]
    class_ = dataclasses.make_dataclass(f"{kind}/{name}", made)
    class_.__module__ = __name__
    class_.__doc__ = inspect.getdoc(component)
    return class_


@functools.cache
def fields(component: Callable[..., Any]) -> dict[str, Option]:
    """Return the parameters of a component, or of a dataclass in an option, that a config can hold."""
    help_ = docstring.parameters(component)
    found = (
        _option(name, hint, default, help_.get(name, "")) for name, (hint, default) in parameters(component).items()
    )
    return {option.name: option for option in found if option is not None}


def _option(name: str, hint: Any, default: Any, help_: str) -> Option | None:
    """The option of one parameter, or ``None`` when no config can hold it or its default."""
    nested = name in registry.kinds()
    hint, shown = Any if nested else hint, to_config(default)
    unexplained = _is_untyped(hint) and not nested and not makes_factories(hint)
    if not _can_hold(hint) or (unexplained and default in (MISSING, None)):
        return None  # nothing says what a config would have to hold: it is for the program to pass
    type_ = _config_type(hint)
    if default is None and type_ is not Any:
        type_ = type_ | None
    try:
        OmegaConf.structured(dataclasses.make_dataclass("probe", [(name, type_, _field(shown, ""))]))
    except (OmegaConfBaseException, TypeError, ValueError):
        return None
    return Option(name, hint, type_, shown, help_)


def _field(default: Any, help_: str) -> Any:
    return dataclasses.field(default_factory=lambda: default, metadata={"help": help_})  # OmegaConf copies it


def to_config(value: Any) -> Any:
    """Return a value as a config shows it: texts for objects, lists for tuples, fields by name for dataclasses.

    What no config can hold is returned as it is.
    """
    if isinstance(value, (list, tuple)):
        return [to_config(item) for item in value]
    if isinstance(value, dict):
        # Hydra lets a command line add no key to a config; a mapping has whatever keys it is given.
        shown = {to_config(key): to_config(item) for key, item in value.items()}
        return OmegaConf.create(shown, flags={"struct": False, "allow_objects": True})
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return written(value)
    original: Any = type(value)
    held = fields(original)
    for name, (_, default) in parameters(original).items():
        if name not in held and getattr(value, name) is not default:
            return value  # a mapping would lose this field
    return {name: to_config(getattr(value, name)) for name in held}


def parameters(component: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the resolved annotation and the default of each parameter that has a name, ``MISSING`` without one.

    An annotation is ``None`` where a name in it cannot be resolved, as those that only type checkers import.
    """
    found = {}
    own: dict[str, Any] = getattr(component, "__dataclass_fields__", {})
    for name, parameter in inspect.signature(component).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name in HYDRA_KEYS:
            continue
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if name in own and own[name].default_factory is not dataclasses.MISSING:
            default = own[name].default_factory()
        holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        try:  # one at a time: one that cannot be resolved must not spoil the others
            hint = typing.get_type_hints(holder, globalns=_scope(component, name))[name]
        except Exception:
            hint = None
        hint = Any if parameter.annotation is parameter.empty else hint
        if default is None and hint not in (None, Any):
            hint = typing.Optional[hint]  # noqa: UP045  # many write `x: int = None`
        found[name] = (hint, default)
    return found


def _scope(component: Any, name: str) -> dict[str, Any]:
    """The names that an annotation was written with: those of its module."""
    if _is_dataclass(component) and name in component.__dataclass_fields__:
        owner = next(c for c in component.__mro__ if name in vars(c).get("__annotations__", {}))
        return {**vars(sys.modules.get(owner.__module__, types)), owner.__name__: owner}
    function = inspect.unwrap(component.__init__ if isinstance(component, type) else component)  # type: ignore[misc]
    return getattr(function, "__globals__", None) or vars(inspect.getmodule(component) or types)


def _config_type(hint: Any) -> Any:
    """The type by which OmegaConf checks an option: of single values, unions of them and lists of either."""
    plain, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if known := value_type(hint):
        return hint if known.write is None else str
    if plain is Literal or _is_union(hint):
        inner = [type(a) if plain is Literal else a for a in arguments]
        types_ = [a if a is type(None) else _config_type(a) for a in inner if _can_hold(a)]
        if Any in types_ or any(typing.get_origin(t) is list for t in types_):
            return Any
        more = [int] if float in types_ and len(types_) > 1 else []  # in a union, OmegaConf takes no 3 for 3.0
        return functools.reduce(operator.or_, [*types_, *more])
    if plain in _SEQUENCES:
        items = {_config_type(a) for a in arguments if a is not Ellipsis}
        item = items.pop() if len(items) == 1 else Any
        return list[Any if typing.get_origin(item) is list else item]  # type: ignore[misc]
    return Any


def _can_hold(hint: Any) -> bool:
    """Whether a config can hold some value of the type ``hint``."""
    plain, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if _is_union(hint):
        return any(_can_hold(a) for a in arguments if a is not type(None))
    if plain in (*_SEQUENCES, *_MAPPINGS):
        return all(_can_hold(a) for a in arguments if a is not Ellipsis)
    known = hint is Any or plain is Literal or hint is type(None) or value_type(hint) is not None
    return known or _is_factory(hint) or _is_dataclass(hint)


def from_config(path: NodePath, value: Any, hint: Any, build: Callable[..., Any]) -> Any:
    """Return what a component gets for ``value``; a dataclass is a :class:`Call` that is still to be made.

    Args:
        path: where the value is in the config, for messages.
        value: as the config holds it, or an object of the program.
        hint: the annotation of the parameter that it is for.
        build: called with the path, the node and the annotation for each node with a ``_target_`` in the value;
            returns what takes its place.

    Raises:
        ConfigError: the value is missing, none of the choices, or not of the type ``hint``.
    """
    inner = functools.partial(from_config, build=build)
    plain, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if isinstance(value, dict) and "_target_" in value:
        return build(path, value, hint)
    if is_missing(value):
        raise ConfigError(f"{path.label} needs a value: {path.advice}.")
    if _is_factory(hint) and not callable(value):
        shown, kind = "null" if value is None else repr(value), factory_of(hint) or "component"
        raise ConfigError(f"{path} is {shown}, where the config of a {kind} is needed.")
    if known := value_type(hint):
        try:
            return known.read(value)
        except ConfigError as refusal:
            raise ConfigError(f"{path}: {refusal}") from refusal
    if plain is Literal and not _is_choice(value, arguments):
        raise ConfigError(_no_choice(path, value, arguments))
    if _is_union(hint):
        return _union(path, value, arguments, inner)
    if _is_dataclass(hint):
        return value if isinstance(value, hint) else _dataclass(path, value, hint, inner)
    if plain in (*_SEQUENCES, *_MAPPINGS) and value is not None and not _fits(value, hint):
        raise ConfigError(f"{path} is {value!r}, where a {'list' if plain in _SEQUENCES else 'mapping'} is needed.")
    if isinstance(value, (list, tuple)):
        return _sequence(path, value, plain, arguments, inner)
    if isinstance(value, dict):
        key_type, item_type = arguments if plain in _MAPPINGS and arguments else (Any, Any)
        return {inner(path, key, key_type): inner(path.child(key), item, item_type) for key, item in value.items()}
    return value


def factory_of(hint: Any) -> str | None:
    """Return the kind of what the factory of an annotation makes, empty for any; ``None`` where it asks for none."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    products = [typing.get_args(member)[1] for member in members if _is_factory(member)]
    return _PRODUCTS.get(getattr(products[0], "__name__", ""), "") if products else None


def _union(path: NodePath, value: Any, members: tuple[Any, ...], inner: Callable[..., Any]) -> Any:
    """What a union gets: from the member that ``value`` fits; else from one that can read it, ``str`` the last."""
    choices = tuple(c for m in members if typing.get_origin(m) is Literal for c in typing.get_args(m))
    if (value is None and type(None) in members) or _is_choice(value, choices):
        return value
    others = [m for m in members if m is not type(None) and typing.get_origin(m) is not Literal]
    texts = [m for m in others if (known := value_type(m)) and known.write is not None]
    fitting = [m for m in others if _fits(value, m) and not (texts and m is str)]
    readable = sorted((m for m in others if _can_hold(m)), key=lambda m: m is str)
    refusals = []
    for member in dict.fromkeys([*fitting, *texts, *readable]):
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
    return value


def _dataclass(path: NodePath, value: Any, original: Any, inner: Callable[..., Any]) -> Call:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}, where the fields of a {original.__name__} are needed.")
    for name in value:
        refuse_unknown(f"{path.child(name)}: {original.__name__}", [str(name)], original)
    takes = parameters(original)
    for name, (_, default) in takes.items():
        if default == MISSING and is_missing(value.get(name, MISSING)):
            raise ConfigError(f"{path.child(name)} needs a value: {path.child(name).advice}.")
    given = {name: item for name, item in value.items() if not is_missing(item)}
    return Call(original, [], {name: inner(path.child(name), item, takes[name][0]) for name, item in given.items()})


def _sequence(path: NodePath, value: Any, plain: Any, arguments: tuple[Any, ...], inner: Callable[..., Any]) -> Any:
    fixed = plain is tuple and arguments and Ellipsis not in arguments
    if fixed and len(value) != len(arguments):
        raise ConfigError(f"{path} has {len(value)} items, where {len(arguments)} are needed: {list(value)!r}")
    item = arguments[0] if arguments and plain in _SEQUENCES else Any
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
    if plain in _SEQUENCES or plain in _MAPPINGS:
        return isinstance(value, (list, tuple) if plain in _SEQUENCES else Mapping)
    if _is_dataclass(plain):
        return isinstance(value, (plain, dict))
    try:
        return plain is Any or isinstance(value, (int, float) if plain is float else plain)
    except TypeError:  # a protocol that isinstance does not know
        return False


def _is_untyped(hint: Any) -> bool:
    return hint in (Any, list, tuple, dict) or any(map(_is_untyped, typing.get_args(hint)))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_factory(hint: Any) -> bool:
    """Whether it is ``Callable[..., X]``; with its arguments spelt out, a function of the program's is meant."""
    return typing.get_origin(hint) is Callable and typing.get_args(hint)[0] is Ellipsis


def makes_factories(hint: Any) -> bool:
    """Whether the annotation is that of a factory, or a container or union with one in it."""
    return _is_factory(hint) or any(map(makes_factories, typing.get_args(hint)))
