"""``stagereg.instantiate``: build what a config describes, if and only if all of it is registered.

A config comes from files and command lines, and Hydra calls whatever its ``_target_`` names. Here a ``_target_`` must
be the component of a registry entry, or allowed by the program's code (``allow_list``), wherever it stands: nested, in
lists, in ``_args_``, below ``_recursive_: false``, or in the arguments given at run time. Only then is anything
imported. Each argument is checked against the component's signature (``schema``), because a config may come from plain
YAML: types, choices, unknown keys, missing values. Interpolations are resolved once, before the check and never after
it: the plan that was checked is the plan that runs.

It is no sandbox: a registered component is trusted with its arguments (SECURITY.md). ``hydra.utils.instantiate`` builds
the same configs without these checks; from Hydra 1.4 on it wants an allow-list, which :func:`targets` is. Components
get plain lists, dicts and dataclasses, as with Hydra's ``_convert_: object``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from omegaconf import OmegaConf

import stagereg.config.schema as schema
import stagereg.registry as registry
from stagereg.config.allow_list import AllowedTarget, TargetAllowList, label
from stagereg.config.resolved_tree import Call, Given, NodePath, as_config, built, describes, is_missing, merged, plain
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
            configs among them are checked and built; every other object is passed as it is, with what is in it.

    Returns:
        What the component built; with ``_partial_: true`` a callable that builds it.

    Raises:
        TargetNotAllowedError: a ``_target_`` is neither registered nor allowed; nothing was imported or called.
        ConfigError: a key, type, choice or missing value; the message has the key and what would be right.
        RegistryError: a component cannot be loaded, or built something that its kind does not allow.
    """
    allow_list = TargetAllowList(allow)
    if config is None:
        return None
    path = NodePath.of(config)
    tree = plain(config, path.key)
    _refuse_unregistered(tree, path, allow_list)
    if isinstance(tree, dict) and "_target_" in (tree.keys() | kwargs.keys()):
        return _build_one(tree, path, allow_list, args, kwargs)
    if args or kwargs:
        raise ConfigError(f"{path.label} has no _target_, so there is nothing to pass these arguments to.")
    return built(_plan(path, tree, Any, allow_list))


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


def _refuse_unregistered(node: Any, path: NodePath, allow_list: TargetAllowList) -> None:
    """Refuse every ``_target_`` in ``node`` that is neither registered nor allowed, before anything is imported."""
    if isinstance(node, dict) and "_target_" in node:
        allow_list.find(node["_target_"], path.label)
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _refuse_unregistered(value, path.child(key), allow_list)


class _Component:
    """A loaded component or allowed target, and what its signature says."""

    def __init__(self, target: Entry | AllowedTarget) -> None:
        self.target = target
        self.label = label(target)
        self.registered = isinstance(target, Entry)
        self.function = self.signed = target.load()
        try:
            inspect.signature(self.function)
        except ValueError:  # one written in C may have no signature: then the call itself checks
            self.signed = lambda *args, **kwargs: None
        self.parameters = list(inspect.signature(self.signed).parameters.values())
        self.positional = [p.name for p in self.parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.options = schema.options(target) if isinstance(target, Entry) else {}

    def checked(self) -> Callable[..., Any]:
        """Return the component; what a function returns is held against its kind's protocol each time."""
        entry, function = self.target, self.function
        if isinstance(function, type) or not isinstance(entry, Entry):
            return function

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            return registry.checked(entry, function, function(*args, **kwargs))

        return checked

    def split(self, args: Any, taken: Collection[str], path: NodePath) -> tuple[list[Any], dict[str, Any]]:
        """Return the ``_args_`` of a node: those for ``*args``, and before them those that have names, by name."""
        if not isinstance(args, list):
            raise ConfigError(f"{path.child('_args_')} is {args!r}; it is a list.")
        named, more = dict(zip(self.positional, args, strict=False)), args[len(self.positional) :]
        for name in named.keys() & taken:
            raise ConfigError(f"{self.label} is given {name} twice: by {path.child('_args_')} and by name.")
        if more and all(p.kind is not p.VAR_POSITIONAL for p in self.parameters):
            count = len(self.positional)
            raise ConfigError(f"{self.label} takes {count} positional arguments, and _args_ has {len(args)}.")
        return more, named

    def refuse_missing(self, kwargs: Mapping[str, Any], given: Collection[str], path: NodePath) -> None:
        """Refuse a call without what the component must have, and say where that is given."""
        required = [p for p in self.parameters if p.default is p.empty]
        needed = [p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given]
        for name in [*(n for n in kwargs if is_missing(kwargs[n])), *(n for n in needed if n not in kwargs)]:
            if name in self.options or name in kwargs or not self.registered:
                raise ConfigError(f"{self.label} needs a value for {name}: {path.child(name).advice}.")
            call = f"stagereg.instantiate(cfg.{path.key or '...'}, {name}=...)"
            raise ConfigError(f"{self.label} needs {name} from the program: {call}.")


def _build_one(
    tree: dict[str, Any], path: NodePath, allow_list: TargetAllowList, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Build the node ``tree`` with the program's arguments: options and configs are checked, other objects are not."""
    configs = {name: v for name, v in kwargs.items() if name in schema.HYDRA_KEYS or _is_config(v, tree.get(name))}
    # Each argument is resolved once only: a second time, a resolver may give something else.
    resolved = {name: plain(schema.to_config(v)) if _is_container(v) else v for name, v in configs.items()}
    tree = merged(tree, resolved)
    _refuse_unregistered(tree, path, allow_list)
    component = _Component(allow_list.find(tree["_target_"], path.label))
    if args:
        named = component.positional[: len(args)]
        tree = {key: v for key, v in tree.items() if key not in named} | {"_args_": [Given(value) for value in args]}
    for name, value in kwargs.items():
        if name in configs:
            continue
        hint = component.options[name].hint if name in component.options else Any
        if hint is Any or schema.makes_factories(hint):
            tree[name] = Given(value)
        else:
            tree[name] = plain(value) if OmegaConf.is_config(value) else value
    return built(_plan_call(path, tree, None, allow_list))


def _plan(path: NodePath, value: Any, hint: Any, allow_list: TargetAllowList) -> Any:
    """Check a value and everything in it; return it with a :class:`Call` in place of each node."""
    if isinstance(value, Given):
        return value
    return schema.from_config(path, value, hint, functools.partial(_plan_call, allow_list=allow_list))


def _plan_call(path: NodePath, node: dict[str, Any], hint: Any, allow_list: TargetAllowList) -> Call:
    """Check the node of a component and everything in it.

    ``hint`` is the annotation of the parameter that it is for: where that asks for a factory, the component that gets
    it makes the call.
    """
    component, kind = _Component(allow_list.find(node["_target_"], path.label)), schema.factory_of(hint)
    _refuse_other_kind(component.target, kind, path)
    partial, recursive = _flag(node, "_partial_", False, path), _flag(node, "_recursive_", True, path)
    later: Collection[str] = ()
    if kind is not None and isinstance(component.target, Entry):
        # A factory is called with what no config holds, and with other components.
        later = {*registry.kinds(), *schema.runtime(component.target)}
    kwargs = {key: value for key, value in node.items() if key not in schema.HYDRA_KEYS}
    kwargs = {key: v for key, v in kwargs.items() if not (is_missing(v) and (partial or key in later))}
    refuse_unknown(component.label, kwargs, component.signed)
    args, named = component.split([] if node.get("_args_") is None else node["_args_"], kwargs, path)
    kwargs.update(named)
    if not partial:
        component.refuse_missing(kwargs, later, path)

    def planned(name: str, value: Any) -> Any:
        option, inner = component.options.get(name), path.child(name)
        if option and isinstance(value, dict) and isinstance(option.default, dict):
            value = {**option.default, **value}  # fields of a dataclass; the default of a mapping is a DictConfig
        plan = _plan(inner, value, option.hint if option else Any, allow_list)
        if name in registry.kinds() and component.registered and isinstance(value, dict) and "_target_" in value:
            _refuse_other_kind(allow_list.find(value["_target_"], path.label), name, inner)
        # Without recursion, the component gets the configs and builds from them itself.
        return plan if recursive or not _is_container(value) else as_config(value)

    arguments = {name: planned(name, value) for name, value in kwargs.items()}
    more = [planned(f"_args_[{index}]", value) for index, value in enumerate(args, len(named))]
    return Call(component.checked(), [*map(arguments.pop, named), *more], arguments, partial or kind is not None)


def _refuse_other_kind(entry: Entry | AllowedTarget, kind: str | None, path: NodePath) -> None:
    if kind and isinstance(entry, Entry) and entry.kind != kind:
        raise ConfigError(f"{path} takes a {kind}, not {label(entry)}.")


def _flag(node: Mapping[str, Any], key: str, default: bool, path: NodePath) -> bool:
    value = node.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{path.child(key)} is {value!r}; it is true or false.")
    return value


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) or OmegaConf.is_config(value)


def _is_config(value: Any, current: Any) -> bool:
    """Whether a runtime argument joins the config, in which ``current`` has its name, rather than replacing it."""
    return describes(value) or (isinstance(current, dict) and (isinstance(value, dict) or OmegaConf.is_dict(value)))
