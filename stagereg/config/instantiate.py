"""``stagereg.instantiate``: build what a config describes, if and only if all of it is registered.

A config comes from files and command lines, and Hydra calls whatever its ``_target_`` names. Here a ``_target_`` must
be the component of a registry entry, or allowed by the program's code (``lock``), wherever it stands: nested, in lists,
in ``_args_``, below ``_recursive_: false``, or in the arguments given at run time. Only then is anything imported. Each
component's own config is held against its schema once more, because a config may come from plain YAML: types, choices,
unknown keys, missing values. Interpolations are resolved once, before the check and never after it: the plan that was
checked is the plan that runs.

It is no sandbox: a registered component is trusted with its arguments (SECURITY.md). ``hydra.utils.instantiate`` builds
the same configs without these checks; from Hydra 1.4 on it wants an allow-list, which :func:`targets` is. Components
get plain lists, dicts and dataclasses, as with Hydra's ``_convert_: object``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

import stagereg.config.schema as schema
import stagereg.config.values as values
import stagereg.registry as registry
from stagereg.config.allow_list import Allowed, Lock, label
from stagereg.config.resolved_tree import (
    Place,
    as_node,
    describes,
    escaped,
    is_container,
    is_mapping,
    is_missing,
    merged,
    plain,
)
from stagereg.config.suggestions import explain
from stagereg.errors import ConfigError
from stagereg.registry import Entry
from stagereg.spec import refuse_unknown

__all__ = ["instantiate", "targets"]


def instantiate(config: Any, /, *args: Any, allow: Collection[str | Callable[..., Any]] = (), **kwargs: Any) -> Any:
    """Build the component that ``config`` describes, and those nested in it.

    Args:
        config: a config node with a ``_target_``, or a mapping or list of such nodes; ``None`` gives ``None``.
        args: positional arguments for the component, passed as they are.
        allow: what the config may name beside the registry's components: dotted paths in full, classes, functions.
            Keys that such a target does not take are refused too, but it has no schema: values are passed as they
            are. An argument ``allow`` of a component's own is given in its config.
        kwargs: keyword arguments, which replace the config's. Options of the component are checked like the config's,
            configs among them are checked and built; every other object is passed as it is.

    Returns:
        What the component built; with ``_partial_: true`` a callable that builds it.

    Raises:
        TargetNotAllowedError: a ``_target_`` is neither registered nor allowed; nothing was imported or called.
        ConfigError: a key, type, choice or missing value; the message has the key and what would be right.
        RegistryError: a component cannot be loaded, or built something that its kind does not allow.
    """
    lock = Lock(allow)
    if config is None:
        return None
    place = Place.of(config)
    tree = plain(config, place.key)
    _refuse_unregistered(tree, place, lock)
    if isinstance(tree, dict) and "_target_" in (tree.keys() | kwargs.keys()):
        return _build_one(tree, place, lock, args, kwargs)
    if args or kwargs:
        raise ConfigError(f"{place.label} has no _target_, so there is nothing to pass these arguments to.")
    return _built(_plan(tree, place, lock))


def targets(kind: str | None = None) -> list[str]:
    """Return the paths of all registered components, or of one kind's, as ``_target_`` has them; imports nothing.

    They are what a program gives Hydra 1.4 as its allow-list: ``hydra.utils.instantiate(cfg.stager,
    _execution_whitelist_=targets())``, or ``with hydra.utils.execution_whitelist(targets()):``.

    Raises:
        UnknownNameError: there is no such kind.
    """
    if kind is not None:
        registry.names(kind)
    found = {entry.path for entry in registry.entries() if kind in (None, entry.kind)}
    return sorted(path for path in found if "<locals>" not in path)


@dataclass(frozen=True)
class _Call:
    """One checked call of a registered component, or an allowed target; its arguments may hold further calls."""

    entry: Entry | Allowed
    component: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    partial: bool

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Make the nested calls, then this one; arguments given here come from the program and go before."""
        make = functools.partial(self._checked(), *(args or _built(self.args)), **{**_built(self.kwargs), **kwargs})
        return make if self.partial else make()

    def _checked(self) -> Callable[..., Any]:
        """The component; what a function returns is held against its kind's protocol each time."""
        entry, component = self.entry, self.component
        if isinstance(component, type) or not isinstance(entry, Entry):
            return component

        @functools.wraps(component)
        def checked(*args: Any, **kwargs: Any) -> Any:
            return registry.checked(entry, component, component(*args, **kwargs))

        return checked


@dataclass(frozen=True)
class _Holder:
    """A dataclass that the schema has made, some of whose fields have calls to make in them."""

    made: Any
    fields: dict[str, Any]

    def run(self) -> Any:
        """Make the calls and return a copy that has what they built."""
        new = copy.copy(self.made)
        for name, value in _built(self.fields).items():
            object.__setattr__(new, name, value)  # a frozen one is not complete before
        return new


def _build_one(tree: dict[str, Any], place: Place, lock: Lock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build the node ``tree`` with the program's arguments: options and configs join the tree, objects go direct."""

    def join(names: list[str]) -> dict[str, Any]:
        # Each argument is resolved once only: a second time, a resolver may give something else.
        more = {name: plain(values.held(v)) if is_container(v := direct.pop(name)) else v for name in names}
        joined = merged(tree, more)
        _refuse_unregistered(joined, place, lock)
        return joined

    direct = dict(kwargs)
    tree = join([n for n, v in kwargs.items() if n in schema.HYDRA_KEYS or _configures(v, tree.get(n))])
    entry = lock.find(tree["_target_"], place.label)
    options = _options(entry)
    tree = join([name for name in direct if name in options and _is_checked(options[name].hint)])
    given = [*direct, *_positional(entry.load())[: len(args)]]
    tree = {key: value for key, value in tree.items() if key not in given and not (args and key == "_args_")}
    call = _plan(tree, place, lock, given)
    assert isinstance(call, _Call)
    return call.run(*args, **direct)


def _plan(node: Any, place: Place, lock: Lock, given: Collection[str] = (), hint: Any = None) -> Any:
    """Check ``node`` and everything in it; return it with each component's node turned into a :class:`_Call`.

    ``given`` names what the program passes to this node's component directly. Where ``hint``, the annotation of what
    it is an argument for, asks for factories, the calls are left to whoever gets them.
    """
    factory = values.makes_factories(hint)
    if is_missing(node):
        raise ConfigError(f"{place.label} needs a value: {_advice(place)}.")
    if type(node) in (list, tuple):
        return type(node)(_plan(item, place.below(index), lock, hint=hint) for index, item in enumerate(node))
    if isinstance(node, _Holder):
        return _Holder(node.made, _plan(node.fields, place, lock))
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: _plan(value, place.below(key), lock, hint=hint) for key, value in node.items()}
    entry = lock.find(node["_target_"], place.label)
    component = entry.load()
    partial, recursive = _flag(node, "_partial_", False, place), _flag(node, "_recursive_", True, place)
    if factory:
        _refuse_other_kind(entry, values.factory_kind(hint), place)
    runtime = {*schema.runtime(entry), *registry.kinds()} if factory and isinstance(entry, Entry) else set[str]()
    kwargs = {
        key: value
        for key, value in node.items()
        if key not in schema.HYDRA_KEYS and not (is_missing(value) and (partial or key in runtime))
    }
    refuse_unknown(label(entry), [*kwargs, *(n for n in given if n not in _positional(component))], _signed(component))
    args, named = _arguments(entry, component, node, {*kwargs, *given}, place)
    kwargs.update(named)
    if not partial:
        _refuse_missing(entry, component, kwargs, {*given, *runtime}, place)
    typed = _typed(entry, kwargs, place) if isinstance(entry, Entry) else {}
    kwargs.update(typed)
    opened = kwargs | {key: _opened(value) for key, value in typed.items()}
    hints = {name: option.hint for name, option in _options(entry).items()}
    planned = {key: _plan(value, place.below(key), lock, hint=hints.get(key)) for key, value in opened.items()}
    if isinstance(entry, Entry):
        for name in planned.keys() & set(registry.kinds()):
            if isinstance(call := planned[name], _Call):
                _refuse_other_kind(call.entry, name, place.below(name))
    more = _plan(args, place.below("_args_"), lock)
    if not recursive:  # the component gets the configs and builds from them itself
        planned, more = {key: _config(value) for key, value in kwargs.items()}, list(map(_config, args))
    return _Call(entry, component, [*map(planned.pop, named), *more], planned, partial or factory)


def _arguments(
    entry: Entry | Allowed, component: Callable[..., Any], node: Mapping[str, Any], taken: Collection[str], place: Place
) -> tuple[list[Any], dict[str, Any]]:
    """The ``_args_`` of ``node``: those for ``*args``, and before them those that have names, under these names."""
    args = node.get("_args_")
    if args is not None and not isinstance(args, list):
        raise ConfigError(f"{place.below('_args_').key} is {args!r}; it is a list.")
    args, names = args or [], _positional(component)
    named = dict(zip(names, args, strict=False))
    for name in named.keys() & taken:
        raise ConfigError(f"{label(entry)} is given {name} twice: by {place.below('_args_').key} and by name.")
    if len(args) > len(names) and all(p.kind is not p.VAR_POSITIONAL for p in _parameters(component)):
        raise ConfigError(f"{label(entry)} takes {len(names)} positional arguments, and _args_ has {len(args)}.")
    return args[len(names) :], named


def _config(value: Any) -> Any:
    return as_node(escaped(value)) if is_container(value) else value


def _opened(value: Any) -> Any:
    """``value`` with a :class:`_Holder` in place of each dataclass in it that has a node in it."""
    if type(value) in (list, tuple):
        return type(value)(map(_opened, value))
    if isinstance(value, dict):
        return {key: _opened(item) for key, item in value.items()}
    if isinstance(value, type) or not is_dataclass(value):
        return value
    inside = {f.name: _opened(getattr(value, f.name, None)) for f in fields(value)}
    held = {name: item for name, item in inside.items() if _has_node(item)}
    return _Holder(value, held) if held else value


def _has_node(value: Any) -> bool:
    if isinstance(value, dict):
        return "_target_" in value or any(map(_has_node, value.values()))
    return isinstance(value, _Holder) or (isinstance(value, (list, tuple)) and any(map(_has_node, value)))


def _built(plan: Any) -> Any:
    if isinstance(plan, (_Call, _Holder)):
        return plan.run()
    if isinstance(plan, dict):
        return {key: _built(value) for key, value in plan.items()}
    return type(plan)(map(_built, plan)) if type(plan) in (list, tuple) else plan


def _typed(entry: Entry, given: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The options among ``given`` as the component takes them: converted by its schema, texts made objects."""
    options = {n: o for n, o in schema.options(entry).items() if n in given and not values.is_object(given[n], o.hint)}
    held = {name: values.held(given[name]) for name, option in options.items() if option.type is not Any}
    try:
        node: Any = OmegaConf.structured(schema.schema(entry))
        node.update({n: {} for n, v in held.items() if isinstance(v, dict) and values.is_mapping(options[n].type)})
        node.merge_with(escaped(held))
        done = {name: OmegaConf.to_object(v) if is_container(v := node[name]) else v for name in held}
    except OmegaConfBaseException as error:
        key = place.below(error.full_key or "").key.rstrip(".")
        if isinstance(error, MissingMandatoryValue):
            raise ConfigError(f"{key} needs a value: add {key}=... to the command line.") from error
        what = explain(error) or str(error).splitlines()[0]
        raise ConfigError(f"{key}: {what}\nIt is an option of {entry.kind}/{entry.name}.") from error
    done |= {name: given[name] for name in options if name not in done}
    return {name: values.made(place.below(name).key, done[name], option.hint) for name, option in options.items()}


def _refuse_unregistered(node: Any, place: Place, lock: Lock) -> None:
    """Refuse every ``_target_`` in ``node`` that is neither registered nor allowed, before anything is imported."""
    if isinstance(node, dict) and "_target_" in node:
        lock.find(node["_target_"], place.label)
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _refuse_unregistered(value, place.below(key), lock)


def _refuse_missing(
    entry: Entry | Allowed,
    component: Callable[..., Any],
    kwargs: Mapping[str, Any],
    given: Collection[str],
    place: Place,
) -> None:
    """Refuse to call a component without what it must have, telling where that is given."""
    options = _options(entry)
    for name in (name for name, value in kwargs.items() if is_missing(value)):
        raise ConfigError(f"{label(entry)} needs a value for {name}: {_advice(place.below(name))}.")
    for parameter in _parameters(component):
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in (*given, *kwargs):
            continue
        if parameter.default is parameter.empty:
            if name in options or isinstance(entry, Allowed):
                raise ConfigError(f"{label(entry)} needs a value for {name}: {_advice(place.below(name))}.")
            call = f"stagereg.instantiate(cfg.{place.key or '...'}, {name}=...)"
            raise ConfigError(f"{label(entry)} needs {name} from the program: {call}.")


def _advice(place: Place) -> str:
    return f"add {place.key or '...'}=... to the command line"


def _refuse_other_kind(entry: Entry | Allowed, kind: str, place: Place) -> None:
    if kind and isinstance(entry, Entry) and entry.kind != kind:
        raise ConfigError(f"{place.key} takes a {kind}, not {label(entry)}.")


def _flag(node: Mapping[str, Any], key: str, default: bool, place: Place) -> bool:
    value = node.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{place.below(key).key} is {value!r}; it is true or false.")
    return value


def _options(entry: Entry | Allowed) -> dict[str, schema.Option]:
    return schema.options(entry) if isinstance(entry, Entry) else {}


def _positional(component: Callable[..., Any]) -> list[str]:
    return [p.name for p in _parameters(component) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _parameters(component: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(_signed(component)).parameters.values())


def _signed(component: Callable[..., Any]) -> Callable[..., Any]:
    """What to read the signature of: one written in C may have none, and then only the call itself can tell."""
    try:
        inspect.signature(component)
    except ValueError:
        return lambda *args, **kwargs: None
    return component


def _is_checked(hint: Any) -> bool:
    """Whether the config's types go for an object of the program's too."""
    return hint is not Any and not values.makes_factories(hint)


def _configures(value: Any, there: Any) -> bool:
    """Whether a runtime argument joins the config, in which ``there`` stands by its name, rather than replacing it."""
    return describes(value) or (is_mapping(value) and is_mapping(there))
