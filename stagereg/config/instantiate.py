"""``stagereg.instantiate``: build what a config describes, if and only if all of it is registered.

A config comes from files and command lines, and Hydra calls whatever its ``_target_`` names. Here a ``_target_`` must
be the component of a registry entry, wherever it stands: nested, in lists, in ``_args_``, below ``_recursive_: false``,
or in the arguments given at run time. Only then is anything imported. Each component's own config is held against its
schema once more, because a config may come from plain YAML: types, choices, unknown keys, missing values.
Interpolations are resolved before the check and never after it: the plan that was checked is the plan that runs.

It is no sandbox: a registered component is trusted with its arguments. ``hydra.utils.instantiate`` builds the same
configs without these checks. Components get plain lists, dicts and dataclasses, as with Hydra's ``_convert_: object``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stagereg import registry
from stagereg.config import schema
from stagereg.config.advice import explain
from stagereg.errors import ConfigError, TargetNotAllowedError
from stagereg.registry import Entry
from stagereg.spec import refuse_unknown

__all__ = ["instantiate"]

_HYDRA_KEYS = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")
_MISSING = "???"
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def instantiate(config: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Build the component that ``config`` describes, and those nested in it.

    Args:
        config: a config node with a ``_target_``, or a mapping or list of such nodes; ``None`` gives ``None``.
        args: positional arguments for the component, passed as they are.
        kwargs: keyword arguments, which replace the config's. Options of the component are checked like the config's,
            configs among them are checked and built; every other object is passed as it is.

    Returns:
        What the component built; with ``_partial_: true`` a callable that builds it.

    Raises:
        TargetNotAllowedError: a ``_target_`` is not registered; nothing was imported or called.
        ConfigError: a key, type, choice or missing value; the message has the key and what would be right.
        RegistryError: a component cannot be loaded, or built something that its kind does not allow.
    """
    if config is None:
        return None
    place = _Place.of(config)
    tree = _plain(config, place.key)
    _refuse_unregistered(tree, place)
    _refuse_unregistered({name: _plain(value) for name, value in kwargs.items() if _describes(value)}, place)
    if isinstance(tree, dict) and "_target_" in (tree.keys() | kwargs.keys()):
        return _build_one(tree, place, args, kwargs)
    if args or kwargs:
        raise ConfigError(f"{place.label} has no _target_, so there is nothing to pass these arguments to.")
    return _built(_plan(tree, place))


@dataclass(frozen=True)
class _Place:
    """Where a node of the config stands, so that an error can name the override that mends it.

    Attributes:
        key: the full key; that of the original where the node only refers to it (``${stager}``).
        raw: the node before interpolations were resolved.
    """

    key: str
    raw: Any = None

    @classmethod
    def of(cls, config: Any) -> _Place:
        if not isinstance(config, (DictConfig, ListConfig)):
            return cls("")
        return cls(config._get_full_key(None), OmegaConf.to_container(config, resolve=False))

    @property
    def label(self) -> str:
        return self.key or "The config"

    def below(self, child: str | int) -> _Place:
        try:
            raw = self.raw[child]
        except (KeyError, IndexError, TypeError):
            raw = None
        reference = _REFERENCE.fullmatch(raw) if isinstance(raw, str) else None
        if reference:
            return _Place(reference[1])
        return _Place(f"{self.key}[{child}]" if isinstance(child, int) else f"{self.key}.{child}".lstrip("."), raw)


@dataclass(frozen=True)
class _Call:
    """One checked call of a registered component; its arguments may hold further calls."""

    entry: Entry
    component: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    partial: bool

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Make the nested calls, then this one; arguments given here come from the program and go before."""
        make = functools.partial(self.component, *(args or _built(self.args)), **{**_built(self.kwargs), **kwargs})
        return make if self.partial else registry.checked(self.entry, self.component, make())


def _build_one(tree: dict[str, Any], place: _Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build the node ``tree`` with the program's arguments: options and configs join the tree, objects go direct."""
    entry = _entry(kwargs.get("_target_", tree.get("_target_")), place)
    options, direct = schema.options(entry), {}
    for name, value in kwargs.items():
        typed = name in options and options[name].type is not Any
        if name in _HYDRA_KEYS or typed or _describes(value) or (_is_mapping(value) and _is_mapping(tree.get(name))):
            tree = _merged(tree, {name: _plain(value) if _is_container(value) else value})
        else:
            direct[name] = value
    given = [*direct, *_positional(entry.load())[: len(args)]]
    tree = {key: value for key, value in tree.items() if key not in given and not (args and key == "_args_")}
    call = _plan(tree, place, given)
    assert isinstance(call, _Call)
    return call.run(*args, **direct)


def _plan(node: Any, place: _Place, given: Collection[str] = ()) -> Any:
    """Check ``node`` and everything in it; return it with each component's node turned into a :class:`_Call`.

    ``given`` names what the program passes to this node's component directly.
    """
    if isinstance(node, list):
        return [_plan(item, place.below(index)) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: _plan(value, place.below(key)) for key, value in node.items()}
    entry = _entry(node["_target_"], place)
    component = entry.load()
    partial, recursive = _flag(node, "_partial_", False, place), _flag(node, "_recursive_", True, place)
    args = _plan(node.get("_args_") or [], place.below("_args_"))
    given = [*given, *_positional(component)[: len(args)]]
    kwargs = {
        key: value for key, value in node.items() if key not in _HYDRA_KEYS and not (partial and value == _MISSING)
    }
    refuse_unknown(f"{entry.kind}/{entry.name}", [*kwargs, *given], component)
    if not partial:
        _refuse_missing(entry, component, kwargs, given, place)
    kwargs.update(_typed(entry, kwargs, place))
    planned = {key: _plan(value, place.below(key)) for key, value in kwargs.items()}
    _refuse_other_kinds(planned, place)
    if not recursive:  # the component gets the configs and builds from them itself
        planned = {key: _node(_escaped(value)) if _is_container(value) else value for key, value in kwargs.items()}
    return _Call(entry, component, args, planned, partial)


def _built(plan: Any) -> Any:
    if isinstance(plan, _Call):
        return plan.run()
    if isinstance(plan, dict):
        return {key: _built(value) for key, value in plan.items()}
    return [_built(item) for item in plan] if isinstance(plan, list) else plan


def _typed(entry: Entry, values: Mapping[str, Any], place: _Place) -> dict[str, Any]:
    """The typed options among ``values``, converted by the component's schema."""
    typed = {n: o for n, o in schema.options(entry).items() if n in values and o.type is not Any}
    try:
        node: Any = OmegaConf.merge(
            OmegaConf.structured(schema.schema(entry)), _escaped({name: values[name] for name in typed})
        )
        done = {name: OmegaConf.to_object(v) if _is_container(v := node[name]) else v for name in typed}
    except OmegaConfBaseException as error:
        key = place.below(error.full_key or "").key.rstrip(".")
        what = explain(error) or str(error).splitlines()[0]
        raise ConfigError(f"{key}: {what}\nIt is an option of {entry.kind}/{entry.name}.") from error
    for name, option in typed.items():
        schema.refuse_choice(place.below(name).key, done[name], option.hint)
    return {name: typed[name].declared(value) if isinstance(value, list) else value for name, value in done.items()}


def _refuse_unregistered(node: Any, place: _Place) -> None:
    """Refuse every ``_target_`` in ``node`` that is not registered, before anything is imported."""
    if isinstance(node, dict) and "_target_" in node:
        _entry(node["_target_"], place)
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _refuse_unregistered(value, place.below(key))


def _entry(target: Any, place: _Place) -> Entry:
    path = f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else str(target)
    entry = registry.find_target(path)
    if entry is None:
        raise TargetNotAllowedError(
            f"{place.label} names the _target_ {path!r}, which is not registered: nothing was imported or called.\n"
            "If it is yours, put @stagereg.register(kind, name) on it and import its module first."
        )
    return entry


def _refuse_missing(
    entry: Entry, component: Callable[..., Any], kwargs: Mapping[str, Any], given: Collection[str], place: _Place
) -> None:
    """Refuse to call a component without what it must have, telling where that is given."""
    options = schema.options(entry)
    for parameter in inspect.signature(component).parameters.values():
        name = parameter.name
        absent = parameter.default is parameter.empty and name not in kwargs
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in given:
            continue
        if name in options and (absent or kwargs.get(name) == _MISSING):
            add = f"add {place.below(name).key}=... to the command line"
            raise ConfigError(f"{entry.kind}/{entry.name} needs a value for {name}: {add}.")
        if absent:
            call = f"stagereg.instantiate(cfg.{place.key or '...'}, {name}=...)"
            raise ConfigError(f"{entry.kind}/{entry.name} needs {name} from the program: {call}.")


def _refuse_other_kinds(planned: Mapping[str, Any], place: _Place) -> None:
    for name, value in planned.items():
        if isinstance(value, _Call) and name in registry.kinds() and value.entry.kind != name:
            raise ConfigError(f"{place.below(name).key} takes a {name}, not {value.entry.kind}/{value.entry.name}.")


def _plain(config: Any, where: str = "") -> Any:
    """A copy of a config as dicts and lists, its interpolations resolved; objects in it stay the same objects."""
    try:
        node = config if isinstance(config, (DictConfig, ListConfig)) else _node(config)
        return _listed(OmegaConf.to_container(node, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where or 'The config'} cannot be resolved: {error}") from error


def _listed(value: Any) -> Any:
    """``value`` with its tuples made lists: OmegaConf 2.4 keeps them, and what is not looked into is not checked."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _node(config: Any) -> DictConfig | ListConfig:
    if isinstance(config, (dict, list, tuple)):
        return OmegaConf.create(config, flags={"allow_objects": True})
    if is_dataclass(config):
        return OmegaConf.structured(config, flags={"allow_objects": True})
    raise ConfigError(f"{config!r} is a {type(config).__name__}, not a config: pass a node such as cfg.stager.")


def _escaped(value: Any) -> Any:
    """``value`` so that OmegaConf takes its strings as they are: they were resolved once, and no more than once."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _merged(tree: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    deeper = {k: _merged(tree[k], v) for k, v in more.items() if isinstance(v, dict) and isinstance(tree.get(k), dict)}
    return {**tree, **more, **deeper}


def _flag(node: Mapping[str, Any], key: str, default: bool, place: _Place) -> bool:
    value = node.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{place.below(key).key} is {value!r}; it is true or false.")
    return value


def _positional(component: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(component).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (dict, DictConfig))


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, DictConfig, ListConfig))


def _describes(value: Any) -> bool:
    """Whether a runtime argument is or holds the config of a component, rather than being an object to pass on."""
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, dict):
        return "_target_" in value or any(map(_describes, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_describes, value))
