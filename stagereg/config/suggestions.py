"""Suggests valid names if a config or a command line names a key or an option that does not exist.

The errors of Hydra and OmegaConf do not list similar names, and Hydra's advice to append the key with ``+`` only delays
the error. This module takes the valid names from the exception itself, so it works for typed components, for keys of an
app's own config, and for config groups. For ``GROUP=null``, the message shows how to omit a group.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import typing
from collections.abc import Iterable
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

import stagereg.config.docstring as docstring
import stagereg.registry as registry
from stagereg.base.spec import find_group, with_article
from stagereg.config.plugins import NAMED
from stagereg.config.resolved_tree import SWITCHES
from stagereg.config.schema import factory_of, options
from stagereg.errors import ConfigError, nearest

KEYS = (*SWITCHES, "plugins", "nproc", "restarts", "heartbeat_timeout", "numa", "prove")
"""The keys of the config ``stagereg``."""
_NOT_A_DEFAULT = re.compile(
    r"Could not override '([\w@./]+)'.*\n(?:Did you mean to override (\S+)\?\n)?"
    r"To append to your default list use (\+\S+)"
)
_CHOSEN = {
    "joinable": "+joinable@join.joinables.NAME",
    "join_hook": "+join_hook@join.joinables.NAME.hook",
    "on_commit": "+on_commit@checkpoint.on_commit.NAME",
}
"""Overrides that select an option of a kind, for kinds whose name alone does not select it."""


def explain(error: BaseException | None) -> str:
    """Return a line with the nearest name and all valid names, or ``""`` if the error has another cause."""
    line, composing = "", str(error).startswith("In '")
    while error is not None and not line:
        if isinstance(error, OmegaConfBaseException):
            line = _wrong_type(error) if isinstance(error, ValidationError) else _unknown_key(error)
            if line and composing and not isinstance(error, ValidationError):
                line += _missing_fields(error)
        elif isinstance(error, MissingConfigException):
            line = _unknown_option(error)
        elif found := re.match(
            r"Multiple values for ([\w@.]+)\. To override a value use 'override \1: (.*)'", str(error)
        ):
            line = f"{found[1]} is already selected. Write {found[1]}={found[2]}, without +"
        elif found := _NOT_A_DEFAULT.match(str(error)):
            near = f" Did you mean {found[2]}?" if found[2] else ""
            line = f"the defaults of the config do not contain {found[1]}, so it cannot be replaced.{near}"
            kind, _, name = found[3].partition("=")
            line = f"{line} To add it, write {_CHOSEN.get(kind[1:], kind)}={name}"
        elif isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
            line = "a config group takes the name of an option. For no option, write ~GROUP instead of GROUP=null"
            line = next((hint for group, hint in SWITCHES.items() if f"{group}=null" in sys.argv), line)
        error = error.__cause__ or error.__context__
    return line


def refuse_unused(config: DictConfig, overrides: Iterable[str]) -> None:
    """Raise ``ConfigError`` for keys without effect: a top-level ``+joinable=NAME``, or a misspelled ``defaults``."""
    for override in overrides:
        kind, _, name = override.removeprefix("+").partition("=")
        if override.startswith("+") and kind in _CHOSEN:
            whose = "the joinable's NAME, as in stagereg.instantiate(cfg.join, NAME=...)"
            raise ConfigError(
                f"{override} has no effect: nothing reads the key {kind} at the top level of the config. Write "
                f"{_CHOSEN[kind]}={name}, with {whose if 'join' in kind else 'a NAME of your choice'}."
            )
    tree: Any = OmegaConf.to_container(config)
    for key, value in tree.items():
        listed = set(map(str, value)) if isinstance(value, list) else set()
        if listed & {"_self_", "stagereg"} and (near := nearest(str(key), ["defaults"])):
            raise ConfigError(f"the config has a list {key!r}, but Hydra does not compose it.{near}")


def _unknown_key(error: OmegaConfBaseException) -> str:
    parent, owner = error.parent_node, error.object_type
    if not isinstance(parent, DictConfig) or parent._is_missing() or parent._is_none() or error.key in (None, *parent):
        return ""
    hint = _hint(parent)
    nested: Any = next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)
    if nested is not None and error.key in options(nested):
        whole, first = parent._get_full_key(None), next(iter(options(nested)))
        return f"{whole} is already set as a whole. Set fields instead: {error.full_key}=... and {whole}.{first}=..."
    if (kind := factory_of(hint)) is not None:
        return _unknown_in_factory(parent, kind or "component", error)
    if hint is not Any and nested is None:
        return f"{parent._get_full_key(None)} takes any key. To add a key, write +{error.full_key}=..."
    typed = (isinstance(owner, type) and dataclasses.is_dataclass(owner)) or hint is not Any
    what = owner.__name__ if dataclasses.is_dataclass(owner) else parent._get_full_key(None) or "the config"
    takes = [str(key) for key in parent if not str(key).startswith("_") and (what, key) != ("the config", "hydra")]
    near = _in_a_group(error) or _below(parent, error)
    more = "" if typed or near else f". To add it, write +{error.full_key}=..."
    near = near or nearest(str(error.key), takes)
    return f"{what} takes no {str(error.key)!r}.{near} It takes: {', '.join(takes) or 'nothing'}{more}"


def _unknown_in_factory(parent: DictConfig, kind: str, error: OmegaConfBaseException) -> str:
    """Return advice for an unknown key of a nested component (such as a hook), or if no component is selected."""
    where = parent._get_full_key(None)
    entry = registry.find_target(str(parent._get_node("_target_", validate_access=False)))
    if entry is None:
        named = f"+{kind}@{where}=NAME {error.full_key}={_given(error)}"
        names = registry.names(kind) if kind in registry.kinds() else ["your registered components"]
        return f"{where} has no options before a {kind} is selected. Write {named}, with one of: {', '.join(names)}"
    takes = list(options(entry.load()))
    near = nearest(str(error.key), takes)
    return f"{entry.kind}/{entry.name} takes no {str(error.key)!r}.{near} It takes: {', '.join(takes) or 'nothing'}"


def _missing_fields(error: OmegaConfBaseException) -> str:
    """Return advice if an app's dataclass comes before stagereg in the defaults, but lacks the keys of stagereg."""
    root, owner = error.parent_node, getattr(error.object_type, "__name__", "")
    if root is None or error.key != error.full_key or not dataclasses.is_dataclass(error.object_type):
        return ""
    lacking = [f"{key}: Any = MISSING" for key in dict.fromkeys((error.key, *KEYS)) if key not in root]
    return (
        f". {owner} comes first in the defaults, so it must have a field for each key of the other configs. List "
        f"{owner} after stagereg, or add to it: {'; '.join(lacking)}"
    )


def _component(config_type: Any) -> Any:
    """Return the component for which a config class was generated, or ``None`` for any other type."""
    kind, _, name = getattr(config_type, "__name__", "").partition("/")
    return registry.find(kind, name).load() if kind in registry.kinds() and name in registry.names(kind) else None


def _in_a_group(error: OmegaConfBaseException) -> str:
    component = _component(error.object_type)
    found = find_group(str(error.key), component) if component else None
    where = str(error.full_key).rpartition(".")[0]
    return f" Write {shlex.quote(f'{where}.{found[0]}.{error.key}={_given(error)}')}." if found else ""


def _below(parent: DictConfig, error: OmegaConfBaseException) -> str:
    """Return a line with the full keys below ``parent`` that end in the unknown name, such as ``checkpoint.resume``."""
    level: dict[str, DictConfig] = {"": parent}
    name, value = str(error.key), _given(error)
    while level:
        found = [shlex.quote(f"{path}{name}={value}") for path, node in level.items() if path and name in node]
        if found:
            return f" Write {' or '.join(sorted(found))}."
        level = {
            f"{path}{key!s}.": child
            for path, node in level.items()
            for key in node
            if (path, key) != ("", "hydra")
            and isinstance(child := node._get_node(key), DictConfig)
            and not (child._is_none() or child._is_missing() or child._is_interpolation())
        }
    return ""


def _given(error: OmegaConfBaseException) -> str:
    """Return the command-line value of the key that an error names, or ``...`` if no argument sets the key."""
    given = [each.partition("=")[2] for each in sys.argv if each.lstrip("+").startswith(f"{error.full_key}=")]
    return given[0] if given else "..."


def _hint(node: DictConfig) -> Any:
    """Return the annotation of the option with the value ``node``, or ``Any`` if no option has this value."""
    component = _component(OmegaConf.get_type(node._get_parent()))
    option = options(component).get(node._key()) if component else None
    return option.hint if option else Any


def _wrong_type(error: OmegaConfBaseException) -> str:
    if (component := _component(error.object_type)) is None:
        return ""
    about = docstring.parameters(component).get(str(error.key), "")
    meaning = f". It is: {about}" if about else ""
    return f"{error.full_key}: {str(error).splitlines()[0]}{meaning}"


def _unknown_option(error: MissingConfigException) -> str:
    if error.missing_cfg_file == "stagereg":
        return "Hydra does not find the config stagereg: install stagereg again, pip install . in its checkout"
    if error.missing_cfg_file and not error.options and nearest(error.missing_cfg_file, ["stagereg"]):
        return f"there is no config {error.missing_cfg_file!r} for the defaults of a config. Did you mean 'stagereg'?"
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or ())
    if why := registry.REGISTRY.uninstalled(group, name):
        return f"No {group} named {name!r}. {why}\nAvailable: {', '.join(options) or '-'}"
    if not options or not name:
        return ""
    others = [kind for kind in registry.kinds() if kind != group and name in registry.names(kind)]
    where = f" {name} is {with_article(others[0])}: {_CHOSEN.get(others[0], others[0])}={name}." if others else ""
    hint = where or nearest(name, options)
    if group in registry.kinds():
        unlisted = registry.REGISTRY.unlisted(name)
        return f"No {group} named {name!r}.{hint}\nAvailable: {', '.join(options)}{unlisted}\n{NAMED}"
    return f"there is no {group}={name}.{hint} Available: {', '.join(options)}"
