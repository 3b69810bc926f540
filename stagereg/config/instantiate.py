"""``stagereg.instantiate`` builds the components of a config if all of them are registered or allowed.

Every ``_target_`` must be registered, or allowed by the program (``allow_list``), even if it is nested, in a list, in
``_args_``, or in a runtime argument. Nothing is imported before this check. Each argument is checked against the
component's signature (``schema``). Interpolations are resolved once, before the check, so a value cannot change between
check and use. This is not a sandbox: a registered component may do anything with its arguments (SECURITY.md).
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
    """Build the component that ``config`` describes, and all nested components.

    Args:
        config: a config node with a ``_target_``, or a mapping or list of such nodes; ``None`` returns ``None``.
        args: positional arguments for the component, which replace positional arguments in the config.
        allow: targets that the config may name in addition to the registry's components: full dotted paths, classes,
            functions, and ``"on_commit/command"``, which is registered but must be allowed.
            Unknown argument names of an allowed target are rejected. The types of the values are not checked, because
            an allowed target has no schema. If a component has a parameter ``allow``, pass it in the config.
        kwargs: keyword arguments, which replace values in the config. A config among them is checked and built. Values
            for options are checked like values in the config. All other objects are passed unchanged.

    Returns:
        The component. With ``_partial_: true``, a callable that builds the component.

    Raises:
        TargetNotAllowedError: A ``_target_`` is neither registered nor allowed. Nothing was imported or called.
        ConfigError: A key, type or choice is invalid, or a value is missing. The message has the key and a valid value.
        RegistryError: A component cannot be loaded, raised an exception (see ``__cause__``), or returned an object that
            does not implement the protocol of its kind.
    """
    allow_list = TargetAllowList(allow)
    if config is None:
        return None
    path = NodePath.of(config)
    tree = plain(config, path.key)
    is_node = isinstance(tree, dict) and "_target_" in (tree.keys() | kwargs.keys())
    if path.key in ("join", "checkpoint") and isinstance(tree, dict) and not is_node:
        raise ConfigError(f"the config has no component for {path.key!r}; {SWITCHES[path.key]}.")
    keys = _registered(tree, path, allow_list)
    if args or kwargs:
        if not is_node:
            raise ConfigError(f"{path} has no _target_, so no component can receive these arguments.")
        tree = _with_arguments(tree, args, kwargs)
        keys = _registered(tree, path, allow_list)
    with in_config(keys):
        return built(schema.from_config(path, tree, Any, functools.partial(_plan, allow_list=allow_list)))


def check_values(config: DictConfig) -> None:
    """Check option values of the top-level components in a composed config, before any component is built.

    If a component has a function ``check_options``, the function is called with these values. Only :func:`instantiate`
    checks missing values, ``null``, interpolations and nested components.
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
    """Return the ``_target_`` values of all registered components, or of the components of one kind. Imports nothing.

    Components that the program must allow explicitly, such as ``on_commit/command``, are not included.

    The result can be the allow-list of Hydra 1.4: ``hydra.utils.instantiate(cfg.stager,
    _execution_whitelist_=targets())``, or ``with hydra.utils.execution_whitelist(targets()):``.

    Raises:
        UnknownNameError: The kind does not exist.
    """
    if kind is not None:
        registry.names(kind)
    found = {entry.path for entry in registry.entries() if kind in (None, entry.kind)}
    return sorted(path for path in found - RESTRICTED.keys() if "<locals>" not in path)


def _registered(node: Any, path: NodePath, allow_list: TargetAllowList) -> dict[str, str]:
    """Check all targets in ``node``, and map each kind to the key of a component. Raises ``TargetNotAllowedError``."""
    keys: dict[str, str] = {}
    if isinstance(node, dict) and "_target_" in node:
        found = allow_list.find(node["_target_"], str(path))
        keys = {found.kind: path.key} if isinstance(found, Entry) else {}
    if isinstance(node, (dict, list, tuple)):  # OmegaConf 2.4 keeps tuples
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            keys = _registered(value, path.child(key), allow_list) | keys
    return keys


def _with_arguments(tree: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the node ``tree`` with the program's arguments added. An argument that is a config is merged."""
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
        except ValueError:  # a C function may have no signature; the call itself then checks the arguments
            self.signed = lambda *args, **kwargs: None
        self.parameters = list(inspect.signature(self.signed).parameters.values())
        self.positional = [p.name for p in self.parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.options = schema.options(self.function) if isinstance(target, Entry) else {}

    def refuse_misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any], path: NodePath) -> None:
        """Raise ``ConfigError`` if an argument is given twice, or the component does not have the parameter."""
        refuse_unknown(self.label, kwargs, self.signed)
        try:
            inspect.signature(self.signed).bind_partial(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{path.child('_args_')} of {self.label}: {error}.") from None

    def refuse_missing(self, given: Collection[str], path: NodePath) -> None:
        """Raise ``ConfigError`` if a required argument is missing; the message shows where to pass it."""
        for p in self.parameters:
            if p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in given:
                continue
            if p.name in self.options or self.entry is None:
                raise path.child(p.name).needs_value()
            call = f"stagereg.instantiate(cfg.{path.key or '...'}, {p.name}=...)"
            raise ConfigError(f"{self.label} needs {p.name} from the program: {call}.")


@dataclass(frozen=True)
class _Constructor:
    """Calls a class or factory function, and checks that the result implements the protocol of its kind."""

    what: str
    entry: Entry | None
    __wrapped__: Callable[..., Any]  # the component; ``inspect.signature`` uses its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            made = self.__wrapped__(*args, **kwargs)
        except StageregError:
            raise
        except Exception as error:
            raise RegistryError(
                f"{self.what} was not built: {summarize_exception(error, __file__)}. Correct its options or its code; "
                "set HYDRA_FULL_ERROR=1 for the whole traceback."
            ) from error
        return registry.checked(self.entry, self.__wrapped__, made) if self.entry else made


def _plan(
    path: NodePath, node: dict[str, Any], hint: Any, allow_list: TargetAllowList, kind: str = "", below: Any = None
) -> Call:
    """Check a component's config ``node``, including nested components; return the call that builds the component.

    ``hint`` and ``below`` are the annotation and the default of the parameter. ``kind``: its name, if that is a kind.
    Hydra merges the selected component into the default. Keys of the default that the component lacks are dropped.
    """
    component, product = _Component(allow_list.find(node["_target_"], str(path))), schema.factory_of(hint)
    needed = kind or product
    if needed and component.entry and component.entry.kind != needed:
        raise ConfigError(f"{path} takes {with_article(needed)}, not {component.label}.")
    for key, types, what in (("_partial_", (bool,), "true or false"), ("_args_", (list, tuple), "a list")):
        if not isinstance(node.get(key, types[0]()), types):
            raise ConfigError(f"{path.child(key)} must be {what}, not {node[key]!r}.")
    if node.get("_recursive_", True) is not True:
        raise ConfigError(
            f"{path.child('_recursive_')} is {node['_recursive_']!r}, but components never receive configs. "
            "Annotate the parameter as Callable[..., X]: then the component receives a callable that builds an X."
        )
    partial, args = node.get("_partial_", False), node.get("_args_", [])
    # If the parameter is a factory, the component calls it later, with runtime values and other components.
    later = {*registry.kinds(), *schema.runtime(component.function)} if component.entry and product is not None else ()
    named = dict(zip(component.positional, args, strict=False))
    takes, below = [p.name for p in component.parameters], below if isinstance(below, dict) else {}
    kwargs = {
        name: value
        for name, value in node.items()
        if name not in HYDRA_KEYS
        and not (is_missing(value) and (partial or name in later))
        and (name in takes or name not in below or value != below[name])
        and not isinstance(named.get(name), Given)  # positional arguments of the program replace the config's
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
        value = {**option.default, **value}  # A dict is the default of a dataclass only: its fields.
    kind = name if component.entry and name in registry.kinds() else ""  # also applies to items of lists and mappings
    build = functools.partial(_plan, allow_list=allow_list, kind=kind, below=option and option.default)
    return schema.from_config(inner, value, hint, build)
