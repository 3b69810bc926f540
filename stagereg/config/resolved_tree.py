"""Resolves the config of ``stagereg.instantiate`` once into plain Python values, which are then checked and built.

OmegaConf containers resolve an interpolation at each access, so a value could change after it was checked. Therefore
this module converts a config to dicts and lists. :class:`NodePath` locates a node in the original config, for
messages. After the check, each node with a ``_target_`` becomes a :class:`Call`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stagereg.errors import ConfigError

_NOTHING_SAVED = "checkpoints need a stager and a storage; to train without checkpoints, write checkpoint.enable=false"
SWITCHES = {
    "join": "to train without a join, write join.enable=false",
    "checkpoint": "to train without checkpoints, write checkpoint.enable=false",
    "stager": _NOTHING_SAVED,
    "storage": _NOTHING_SAVED,
    "tier": "to train without a tier, write tier=none",
}
"""Advice for a config that lacks one of these groups."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True)
class NodePath:
    """The key path of a node in the config. Error messages use it to show an override that sets the node."""

    key: str  # the full key; for a reference such as `${stager}`, the key of the target
    raw: Any = None  # the node before interpolations were resolved

    @classmethod
    def of(cls, config: Any) -> NodePath:
        if not OmegaConf.is_config(config):
            return cls("")
        return cls(config._get_full_key(None), OmegaConf.to_container(config, resolve=False))

    def __str__(self) -> str:
        return self.key or "The config"

    def needs_value(self) -> ConfigError:
        return ConfigError(f"{self} needs a value: add {self.key or '...'}=... to the command line.")

    def child(self, name: Any) -> NodePath:
        try:
            raw = self.raw[name]
        except (KeyError, IndexError, TypeError):
            raw = None
        reference = _REFERENCE.fullmatch(raw) if isinstance(raw, str) else None
        if reference:
            return NodePath(reference[1])
        return NodePath(f"{self.key}[{name}]" if isinstance(name, int) else f"{self.key}.{name}".lstrip("."), raw)


@dataclass(frozen=True)
class Call:
    """A checked call that :func:`built` makes. Arguments may be calls, too. ``partial``: build a callable instead."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    partial: bool = False


@dataclass(frozen=True)
class Given:
    """An object that the program passes to the component unchanged."""

    value: Any


def built(plan: Any) -> Any:
    """Make all calls in ``plan``, and return ``plan`` with each call replaced by its result."""
    if isinstance(plan, Given):
        return plan.value
    if isinstance(plan, Call):
        call = functools.partial(plan.function, *built(plan.args), **built(plan.kwargs))
        return call if plan.partial else call()
    if isinstance(plan, dict):
        return {key: built(value) for key, value in plan.items()}
    return type(plan)(map(built, plan)) if type(plan) in (list, tuple) else plan


def plain(config: Any, where: str = "") -> Any:
    """Convert a config to dicts and lists with all interpolations resolved. Other objects are not copied."""
    try:
        if isinstance(config, (dict, list, tuple)):
            config = OmegaConf.create(config, flags={"allow_objects": True})
        elif is_dataclass(config):
            config = OmegaConf.structured(config, flags={"allow_objects": True})
        elif not OmegaConf.is_config(config):
            raise ConfigError(f"{config!r} is a {type(config).__name__}, not a config: pass a node such as cfg.stager.")
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        missing = re.search(r"Interpolation key '(\w+)' not found", str(error))
        hint = f". {SWITCHES[missing[1]]}" if missing and missing[1] in SWITCHES else ""
        if "HydraConfig was not set" in str(error):
            hint = f". Only Hydra jobs have an output directory: compose(..., overrides=['{error.full_key}=PATH'])"
        raise ConfigError(f"{where or 'The config'} cannot be resolved: {str(error).splitlines()[0]}{hint}") from error
    except RecursionError:
        raise ConfigError(f"{where or 'The config'} is nested too deeply.") from None


def merged(tree: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` after merging ``more`` recursively. Values that are not mappings are replaced."""
    deeper = {k: merged(tree[k], v) for k, v in more.items() if isinstance(v, dict) and isinstance(tree.get(k), dict)}
    return {**tree, **more, **deeper}


def describes(value: Any) -> bool:
    """Return whether a runtime argument is, or contains, the config of a component."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, dict):
        return "_target_" in value or any(map(describes, value.values()))
    return isinstance(value, (list, tuple)) and any(map(describes, value))


def is_missing(value: Any) -> bool:
    """Return whether a value is ``???``, which means in OmegaConf that the value is missing."""
    return isinstance(value, str) and value == MISSING
