"""``stagereg.instantiate``: build what a config describes, if and only if all of it is registered.

A ``_target_`` must be the component of a registry entry, or allowed by the program's code (``allow_list``), wherever it
stands: nested, in lists, in ``_args_``, or in the arguments given at run time. Only then is anything imported. Each
argument is checked against the component's signature (``schema``). Interpolations are resolved once, before the check
and never after it: the plan that was checked is the plan that runs. It is no sandbox: a registered component is trusted
with its arguments (SECURITY.md).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import Container, DictConfig, OmegaConf

import stagereg.config.schema as schema
import stagereg.registry as registry
from stagereg.base.crash_report import summarize_exception
from stagereg.base.option_text import in_config
from stagereg.base.spec import HYDRA_KEYS, refuse_unknown, with_article
from stagereg.config.allow_list import RESTRICTED, AllowedTarget, TargetAllowList
from stagereg.config.resolved_tree import SWITCHES, Call, Given, NodePath, built, describes, is_missing, merged, plain
from stagereg.errors import ConfigError, RegistryError, StageregError
from stagereg.registry import Entry


def instantiate(config: Any, /, *args: Any, allow: Collection[str | Callable[..., Any]] = (), **kwargs: Any) -> Any:
    """Build the component that ``config`` describes, and those nested in it.

    Args:
        config: a config node with a ``_target_``, or a mapping or list of such nodes; ``None`` gives ``None``.
        args: positional arguments for the component, which replace the config's.
        allow: what the config may name beside the registry's components: dotted paths in full, classes, functions;
            and ``"on_commit/command"``, which is registered and yet refused without.
            Keys that such a target does not take are refused too, but it has no schema: values are passed as they
            are. An argument ``allow`` of a component's own is given in its config.
        kwargs: keyword arguments, likewise; configs among them are checked and built. What is for an option of the
            component is checked like the config's; every other object is passed as it is, with what is in it.

    Returns:
        What the component built; with ``_partial_: true`` a callable that builds it.

    Raises:
        TargetNotAllowedError: a ``_target_`` is neither registered nor allowed; nothing was imported or called.
        ConfigError: a key, type, choice or missing value; the message has the key and what would be right.
        RegistryError: a component cannot be loaded, raised an error that is none of the project's, which is the cause,
            or built something that its kind does not allow.
    """
    allow_list = TargetAllowList(allow)
    if config is None:
        return None
    path = NodePath.of(config)
    tree = plain(config, path.key)
    is_node = isinstance(tree, dict) and "_target_" in (tree.keys() | kwargs.keys())
    if path.key in ("join", "checkpoint") and isinstance(tree, dict) and not is_node:
        raise ConfigError(f"the config leaves {path.key} out; {SWITCHES[path.key]}.")
    keys = _registered(tree, path, allow_list)
    if args or kwargs:
        if not is_node:
            raise ConfigError(f"{path} has no _target_, so there is nothing to pass these arguments to.")
        tree = _with_arguments(tree, args, kwargs)
        keys = _registered(tree, path, allow_list)
    with in_config(keys):
        return built(schema.from_config(path, tree, Any, functools.partial(_plan, allow_list=allow_list)))


def check_values(config: DictConfig) -> None:
    """Check the values that a composed config has for the components at its top, before anything is built.

    A component may have a function ``check_options`` that takes the values which are known, by name. Not known yet is
    what is missing or ``null``, what has an interpolation or a component in it; that is checked by :func:`instantiate`.
    """
    for key, node in cast("dict[Any, Any]", OmegaConf.to_container(config)).items():
        target = node.get("_target_") if isinstance(node, dict) else None
        entry = registry.find_target(target) if isinstance(target, str) else None
        if entry is None:
            continue
        component, given = entry.load(), {}
        with in_config({entry.kind: str(key)}):
            for name, option in schema.options(component).items():
                value = node.get(name)
                if value is not None and not any(mark in str(value) for mark in ("${", "???", "_target_")):
                    path = NodePath(str(key), node).child(name)
                    given[name] = built(schema.from_config(path, value, option.hint, _plan))
            if check := getattr(component, "check_options", None):
                check(given)


def targets(kind: str | None = None) -> list[str]:
    """Return the paths of all registered components, or of one kind's, as ``_target_`` has them; imports nothing.

    Without those that a config may name only where the program allows it, such as ``on_commit/command``.

    They are what a program gives Hydra 1.4 as its allow-list: ``hydra.utils.instantiate(cfg.stager,
    _execution_whitelist_=targets())``, or ``with hydra.utils.execution_whitelist(targets()):``.

    Raises:
        UnknownNameError: there is no such kind.
    """
    if kind is not None:
        registry.names(kind)
    found = {entry.path for entry in registry.entries() if kind in (None, entry.kind)}
    return sorted(path for path in found - RESTRICTED.keys() if "<locals>" not in path)


def _registered(node: Any, path: NodePath, allow_list: TargetAllowList) -> dict[str, str]:
    """Return the key of a component of each kind in ``node``. Raises: ``TargetNotAllowedError``."""
    keys: dict[str, str] = {}
    if isinstance(node, dict) and "_target_" in node:
        found = allow_list.find(node["_target_"], str(path))
        keys = {found.kind: path.key} if isinstance(found, Entry) else {}
    if isinstance(node, (dict, list, tuple)):  # OmegaConf 2.4 keeps tuples
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            keys = _registered(value, path.child(key), allow_list) | keys
    return keys


def _with_arguments(tree: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a node with the program's arguments: configs among them are merged into it, resolved once only."""
    configs: dict[str, Any] = {}
    for name, value in kwargs.items():
        joins = isinstance(tree.get(name), dict) and isinstance(value, (dict, DictConfig))
        if name in HYDRA_KEYS or joins or describes(value):
            is_node = isinstance(value, (dict, list, tuple, Container))
            configs[name] = plain(schema.to_config(value)) if is_node else value
    objects = {name: Given(value) for name, value in kwargs.items() if name not in configs}
    return {**merged(tree, configs), **objects, **({"_args_": [Given(value) for value in args]} if args else {})}


class _Component:
    def __init__(self, target: Entry | AllowedTarget) -> None:
        self.entry = target if isinstance(target, Entry) else None
        self.label = f"{target.kind}/{target.name}" if isinstance(target, Entry) else target.path
        self.function = self.signed = target.load()
        try:
            inspect.signature(self.function)
        except ValueError:  # one written in C may have no signature: then the call itself checks
            self.signed = lambda *args, **kwargs: None
        self.parameters = list(inspect.signature(self.signed).parameters.values())
        self.positional = [p.name for p in self.parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.options = schema.options(self.function) if isinstance(target, Entry) else {}

    def refuse_misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any], path: NodePath) -> None:
        """Refuse arguments that the component does not take, and one that is given twice."""
        refuse_unknown(self.label, kwargs, self.signed)
        try:
            inspect.signature(self.signed).bind_partial(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{path.child('_args_')} of {self.label}: {error}.") from None

    def refuse_missing(self, given: Collection[str], path: NodePath) -> None:
        """Refuse a call without what the component must have, and say where that is given."""
        for p in self.parameters:
            if p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in given:
                continue
            if p.name in self.options or self.entry is None:
                raise path.child(p.name).needs_value()
            call = f"stagereg.instantiate(cfg.{path.key or '...'}, {p.name}=...)"
            raise ConfigError(f"{self.label} needs {p.name} from the program: {call}.")


@dataclass(frozen=True)
class _Constructor:
    """Calls a component; what a function returns is held against its kind's protocol each time."""

    what: str
    entry: Entry | None
    __wrapped__: Callable[..., Any]  # whose signature this has

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            made = self.__wrapped__(*args, **kwargs)
        except StageregError:
            raise
        except Exception as error:
            raise RegistryError(
                f"{self.what} was not built: {summarize_exception(error, __file__)}. Correct its options or its code; "
                "HYDRA_FULL_ERROR=1 shows the whole traceback."
            ) from error
        return registry.checked(self.entry, self.__wrapped__, made) if self.entry else made


def _plan(
    path: NodePath, node: dict[str, Any], hint: Any, allow_list: TargetAllowList, kind: str = "", below: Any = None
) -> Call:
    """Check the node of a component and everything in it; return the call that it describes.

    ``hint`` is the annotation of its parameter, ``kind`` the parameter's name if it is a kind. ``below`` is the
    parameter's default, over which Hydra merges a chosen component: keys left from it are dropped.
    """
    component, product = _Component(allow_list.find(node["_target_"], str(path))), schema.factory_of(hint)
    needed = kind or product
    if needed and component.entry and component.entry.kind != needed:
        raise ConfigError(f"{path} takes {with_article(needed)}, not {component.label}.")
    for key, types, what in (("_partial_", (bool,), "true or false"), ("_args_", (list, tuple), "a list")):
        if not isinstance(node.get(key, types[0]()), types):
            raise ConfigError(f"{path.child(key)} is {node[key]!r}; it is {what}.")
    if node.get("_recursive_", True) is not True:
        raise ConfigError(
            f"{path.child('_recursive_')} is {node['_recursive_']!r}, but a component gets no configs to build from. "
            "Annotate its parameter as Callable[..., X]: then it gets what builds an X."
        )
    partial, args = node.get("_partial_", False), node.get("_args_", [])
    # A factory is called with what no config holds, and with other components.
    later = {*registry.kinds(), *schema.runtime(component.function)} if component.entry and product is not None else ()
    named = dict(zip(component.positional, args, strict=False))
    takes, below = [p.name for p in component.parameters], below if isinstance(below, dict) else {}
    kwargs = {
        name: value
        for name, value in node.items()
        if name not in HYDRA_KEYS
        and not (is_missing(value) and (partial or name in later))
        and (name in takes or name not in below or value != below[name])
        and not isinstance(named.get(name), Given)  # what the program gives by position replaces the config's
    }
    component.refuse_misfit(args, kwargs, path)
    kwargs.update(named)
    if not partial:
        component.refuse_missing({*kwargs, *later}, path)
    arguments = {name: _argument(component, name, value, path, allow_list) for name, value in kwargs.items()}
    more = [_argument(component, f"_args_[{i}]", args[i], path, allow_list) for i in range(len(named), len(args))]
    constructor = _Constructor(f"{path}: {component.label}", component.entry, component.function)
    return Call(constructor, [*map(arguments.pop, named), *more], arguments, partial or product is not None)


def _argument(component: _Component, name: str, value: Any, path: NodePath, allow_list: TargetAllowList) -> Any:
    option, inner = component.options.get(name), path.child(name)
    hint = option.hint if option else Any
    if isinstance(value, Given):
        if hint is Any:
            return value
        value = plain(value.value) if OmegaConf.is_config(value.value) else value.value
    if option and isinstance(value, dict) and isinstance(option.default, dict) and "_target_" not in value:
        value = {**option.default, **value}  # fields of a dataclass; the default of a mapping is a DictConfig
    kind = name if component.entry and name in registry.kinds() else ""  # also of each in a list or a mapping
    build = functools.partial(_plan, allow_list=allow_list, kind=kind, below=option and option.default)
    return schema.from_config(inner, value, hint, build)
