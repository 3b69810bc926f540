"""The typed config of a component, generated from its signature, and the conversion of config values to arguments.

Each parameter that a config can hold becomes a field of a generated dataclass, with the same default. Process groups,
modules, tensors and similar objects are *runtime only*: the program passes them to ``stagereg.instantiate``. If a
parameter has the name of a registered kind, its field holds the config of a component of that kind. If this parameter
has a default, the field may also hold other values of the annotated type. A parameter annotated ``Callable[..., X]``,
or a mapping or list of these, receives callables that build the described objects.

While a config is composed, OmegaConf checks fields of type ``int``, ``float``, ``bool``, ``str``, path or enum, and
``X | None`` and ``list[X]`` of these. Other fields are untyped. :func:`from_config` converts the result of
:func:`to_config` back to an equal value, even after the config was written to YAML and read again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import stagereg.config.docstring as docstring
import stagereg.registry as registry
from stagereg.base.spec import HYDRA_KEYS, refuse_unknown
from stagereg.config.resolved_tree import Call, NodePath, is_missing
from stagereg.config.texts import value_type, written
from stagereg.errors import ConfigError, StageregError, nearest

_SEQUENCES = (list, tuple, Sequence)
_MAPPINGS = (dict, Mapping)

_PRODUCTS = {"AsyncStager": "stager", "JoinHook": "join_hook", "Joinable": "joinable"}
"""Kinds by the class name X in ``Callable[..., X]``. The classes of torch and stagereg have the same names."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of a component that a config can hold."""

    name: str  # name of the parameter
    hint: Any  # resolved annotation, with `| None` if the default is `None`; `typing.Any` for a component
    type: Any  # the annotation of the config field; `typing.Any` if OmegaConf does not check it
    default: Any  # the signature's default as the config shows it, or `omegaconf.MISSING`
    help: str  # help text from the component's docstring, one line; may be empty


@functools.cache
def options(component: Callable[..., Any]) -> dict[str, Option]:
    """Return the parameters of a component or dataclass that a config can hold, by name."""
    help_ = docstring.parameters(component)
    found = {}
    for name, (hint, default) in parameters(component).items():
        nested = name in registry.kinds() and default in (MISSING, None)
        hint = Any if nested else hint
        if not _can_hold(hint, anything=nested or default not in (MISSING, None)):
            continue  # a config cannot hold values of this type, so the program passes the argument
        shown = _own_hook(component) if default is None and factory_of(hint) == "join_hook" else None
        option = Option(name, hint, _config_type(hint), shown or to_config(default), help_.get(name, ""))
        try:
            OmegaConf.structured(dataclasses.make_dataclass("probe", [_field(option)]))
            found[name] = option
        except (OmegaConfBaseException, TypeError, ValueError) as error:  # OmegaConf rejects the default
            if isinstance(default, (str, int, float)) and value_type(hint) is not None:
                who = getattr(component, "__qualname__", component)
                text = f"{who}: the default of {name}, {default!r}, does not have the annotated type {hint.__name__}."
                raise ConfigError(text) from error
    return found


def _own_hook(component: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the config of a joinable's default hook, or ``None`` if the hook cannot be configured by options."""
    own: Any = getattr(component, "own_hook", None)
    entry = registry.find_target(f"{own.__module__}.{own.__qualname__}") if isinstance(own, type) else None
    defaults = {} if entry is None else {name: option.default for name, option in options(own).items()}
    if entry is None or not defaults or MISSING in defaults.values():
        return None
    # The config describes a factory (``_partial_``), because the joinable constructs the hook.
    return {"_target_": entry.path, "_partial_": True, **defaults}


def runtime(component: Callable[..., Any]) -> list[str]:
    """Return the names of the runtime-only parameters in order. A config cannot hold these parameters."""
    others = [p for p in inspect.signature(component).parameters.values() if p.name not in options(component)]
    return [p.name for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def schema(entry: registry.Entry) -> type:
    """Return the generated config dataclass of a component, always the same class. Imports the component."""
    if "<locals>" in entry.path:
        raise ConfigError(
            f"{entry.kind}/{entry.name} is defined inside a function ({entry.target}), so a config cannot name it.\n"
            "Move it to the top level of a module."
        )
    return _schema(entry.kind, entry.name, entry.path, entry.load())


def __getattr__(name: str) -> type:
    """Return a generated dataclass by its name ``"kind/name"``. Pickle calls this function to load a config."""
    kind, _, component = name.partition("/")
    try:
        return schema(registry.find(kind, component))
    except StageregError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {error}") from error


@functools.cache
def _schema(kind: str, name: str, path: str, component: Callable[..., Any]) -> type:
    found = options(component).values()
    made: list[Any] = [("_target_", str, path)]
    if any(typing.get_origin(o.hint) in _SEQUENCES or isinstance(o.default, (list, dict, DictConfig)) for o in found):
        made.append(("_convert_", str, "object"))  # Hydra then passes lists and dicts, not OmegaConf's containers
    class_ = dataclasses.make_dataclass(f"{kind}/{name}", [*made, *map(_field, found)])
    class_.__module__ = __name__
    class_.__doc__ = inspect.getdoc(component)
    return class_


def _field(option: Option) -> tuple[str, Any, Any]:
    default: Any = dataclasses.field(default_factory=lambda: option.default, metadata={"help": option.help})
    return option.name, option.type, default


def to_config(value: Any) -> Any:
    """Convert a value to config form: objects become strings, tuples lists, and dataclasses mappings."""
    if isinstance(value, (list, tuple)):
        return [to_config(item) for item in value]
    if isinstance(value, dict):
        # Without this flag, Hydra would reject new keys of a mapping on the command line.
        shown = {to_config(key): to_config(item) for key, item in value.items()}
        return OmegaConf.create(shown, flags={"struct": False, "allow_objects": True})
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return written(value)
    class_: Any = type(value)
    held = options(class_)
    others = {name: default for name, (_, default) in parameters(class_).items() if name not in held}
    if any(getattr(value, name) is not default for name, default in others.items()):
        return value  # a mapping could not hold all fields
    return {name: to_config(getattr(value, name)) for name in held}


def parameters(component: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Map each parameter name to the annotation (``None`` if unresolvable) and the default (or ``MISSING``)."""
    found = {}
    own: dict[str, Any] = getattr(component, "__dataclass_fields__", {})
    for name, parameter in inspect.signature(component).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name in HYDRA_KEYS:
            continue
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if name in own and own[name].default_factory is not dataclasses.MISSING:
            default = own[name].default_factory()
        holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        try:  # one annotation at a time, because others may be unresolvable
            hint = typing.get_type_hints(holder, globalns=_scope(component, name))[name]
        except Exception:
            hint = None
        hint = Any if parameter.annotation is parameter.empty else hint
        if default is None and hint not in (None, Any):
            hint = typing.Optional[hint]  # noqa: UP045  # allows `x: int = None`
        found[name] = (hint, default)
    return found


def _scope(component: Any, name: str) -> dict[str, Any]:
    if _is_dataclass(component) and name in component.__dataclass_fields__:
        owner = next(c for c in component.__mro__ if name in vars(c).get("__annotations__", {}))
        return {**vars(sys.modules.get(owner.__module__, types)), owner.__name__: owner}
    function = inspect.unwrap(component.__init__ if isinstance(component, type) else component)  # type: ignore[misc]
    return getattr(function, "__globals__", None) or vars(inspect.getmodule(component) or types)


def _config_type(hint: Any) -> Any:
    """Return the type that OmegaConf checks while a config is composed, or ``Any`` if OmegaConf cannot check it."""
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    is_outer = _is_union(hint) or typing.get_origin(hint) is list
    known = value_type(inner[0] if is_outer and len(inner) == 1 else hint)
    return hint if known is not None and known.write is None else Any


def _can_hold(hint: Any, anything: bool) -> bool:
    """Return whether a config can hold a value of type ``hint``. ``anything``: the result for the type ``Any``."""
    plain, arguments = _parts(hint)
    inner = [a for a in arguments if a not in (Ellipsis, type(None))]
    if _is_union(hint):
        return any(_can_hold(a, anything) for a in inner)
    if plain in (*_SEQUENCES, *_MAPPINGS):
        return all(_can_hold(a, anything) for a in inner or [Any])
    known = plain is Literal or value_type(hint) is not None or _is_factory(hint) or _is_dataclass(hint)
    return anything if hint is Any else known


def from_config(path: NodePath, value: Any, hint: Any, build: Callable[..., Any]) -> Any:
    """Convert a config value to the argument that a component receives. A dataclass becomes a :class:`Call`.

    ``path``: the key path of the value in the config, for messages. ``value``: the value in the config, or an object
    that the program passed. ``hint``: the annotation of the parameter. ``build`` converts a nested component; it is
    called with the key path, the config node, and the annotation.
    """
    inner = functools.partial(from_config, build=build)
    plain, arguments = _parts(hint)
    if isinstance(value, dict) and "_target_" in value:
        return build(path, value, hint)
    if is_missing(value):
        raise path.needs_value()
    if _is_union(hint):
        return _first_that_reads(path, value, arguments, inner)
    if known := value_type(hint):
        try:
            return known.read(value)
        except ConfigError as refusal:
            raise ConfigError(f"{path}: {refusal}") from None
    if misfit := _misfit(value, hint):
        raise ConfigError(f"{path} is {'null' if value is None else repr(value)}{misfit.replace('@KEY', f'@{path}')}")
    if isinstance(value, (list, tuple)):
        return _sequence(path, value, plain, arguments, inner)
    if isinstance(value, dict) and _is_dataclass(hint):
        return _dataclass(path, value, hint, inner)
    if isinstance(value, dict):
        key_type, item_type = arguments if plain in _MAPPINGS and arguments else (Any, Any)
        return {inner(path, key, key_type): inner(path.child(key), item, item_type) for key, item in value.items()}
    return value


def factory_of(hint: Any) -> str | None:
    """Return the kind X of an annotation ``Callable[..., X]``, ``""`` if X is not a kind, and ``None`` without X."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    products = [typing.get_args(member)[1] for member in members if _is_factory(member)]
    return _PRODUCTS.get(getattr(products[0], "__name__", ""), "") if products else None


def _first_that_reads(path: NodePath, value: Any, members: tuple[Any, ...], inner: Callable[..., Any]) -> Any:
    """Convert ``value`` to the first union member that accepts it. ``str`` is tried last: it accepts most values."""
    refusals = []
    given = [member for member in members if member is not type(None) or value is None]
    # A protocol type describes objects that the program passes, and cannot convert a string.
    found = [each for each in given if not getattr(each, "_is_protocol", False) or not _misfit(value, each)] or given
    for member in sorted(found, key=lambda m: (_parts(m)[0] is not Literal, bool(_misfit(value, m)), m is str)):
        try:
            return inner(path, value, member)
        except ConfigError as refusal:
            refusals.append(str(refusal))
    others = [each.removeprefix(f"{path}: {value!r} is not ") for each in refusals[1:]]
    raise ConfigError((", or " if "It must be one of: " in refusals[0] else "\nOr: ").join([refusals[0], *others]))


def _dataclass(path: NodePath, value: dict[Any, Any], original: Any, inner: Callable[..., Any]) -> Call:
    refuse_unknown(f"{path}: {original.__name__}", [str(name) for name in value], original)
    given = {}
    for name, (hint, default) in parameters(original).items():
        item = value.get(name, MISSING)
        if default == MISSING or not is_missing(item):
            given[name] = inner(path.child(name), item, hint)
    return Call(original, [], given)


def _sequence(path: NodePath, value: Any, plain: Any, arguments: tuple[Any, ...], inner: Callable[..., Any]) -> Any:
    fixed = plain is tuple and arguments and Ellipsis not in arguments
    if fixed and len(value) != len(arguments):
        raise ConfigError(f"{path} must have {len(arguments)} items, not {len(value)}: {list(value)!r}")
    hints = arguments if fixed else [*arguments[:1], Any][:1] * len(value)
    items = [inner(path.child(i), each, hint) for i, (each, hint) in enumerate(zip(value, hints, strict=True))]
    return tuple(items) if plain is tuple else items


def _misfit(value: Any, hint: Any) -> str:
    """Return the end of an error message if ``value`` does not fit the annotation ``hint``, and ``""`` if it fits."""
    plain, arguments = _parts(hint)
    known, classes, what = value_type(hint), plain, f"a {getattr(plain, '__name__', plain)}"
    if plain is Literal:
        is_one = any(value == choice and isinstance(value, type(choice)) for choice in arguments)
        near = nearest(str(value), map(str, arguments))
        return "" if is_one else f".{near} It must be one of: {', '.join(map(repr, arguments))}"
    if _is_factory(hint):
        kind = factory_of(hint) or "component"
        what = f"the config of a {kind} (+{kind}@KEY=NAME, without + if one is chosen; for none ~{kind}@KEY)"
    elif plain in (*_SEQUENCES, *_MAPPINGS):
        classes, what = ((list, tuple), "a list") if plain in _SEQUENCES else (Mapping, "a mapping")
    elif _is_dataclass(hint):
        classes, what = (hint, dict), f"a mapping of the fields of {hint.__name__}"
    elif known is not None and known.write is not None:
        classes = (hint, str)
    try:
        fits = plain is Any or isinstance(value, (int, float) if plain is float else classes)
    except TypeError:  # isinstance does not support the annotation, such as a protocol or an unresolved name
        fits = True
    return "" if fits else f", but must be {what}."


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint) or hint, typing.get_args(hint)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_factory(hint: Any) -> bool:
    """Return whether a type is a factory, ``Callable[..., X]``, and not a ``Callable`` with listed arguments."""
    return typing.get_origin(hint) is Callable and typing.get_args(hint)[0] is Ellipsis
