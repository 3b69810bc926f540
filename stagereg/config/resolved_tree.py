"""The config of ``stagereg.instantiate`` as plain Python: what is resolved once, checked, and then built from.

OmegaConf's containers resolve an interpolation each time they are read, so a check of one says nothing about the next
reading. Here a config becomes dicts and lists with everything resolved, once; :class:`NodePath` keeps where each node
was in the original, for messages, and :class:`Call` is what a checked node turns into.
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

_NOTHING_SAVED = "checkpoints need a stager and a storage; to save nothing write checkpoint.enable=false"
SWITCHES = {
    "join": "to train without a join write join.enable=false: the join then does nothing",
    "checkpoint": "to save nothing write checkpoint.enable=false: the checkpointer then does nothing",
    "stager": _NOTHING_SAVED,
    "storage": _NOTHING_SAVED,
}
"""What to write in place of leaving out a group that programs build."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True)
class NodePath:
    """Where a node of the config is, so that an error can name the override that corrects it."""

    key: str  # the full key; that of the original where the node only refers to it (`${stager}`)
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
    """One checked call that is still to be made, or if ``partial`` a callable that makes it; may hold further calls."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    partial: bool = False


@dataclass(frozen=True)
class Given:
    """An object of the program's, which the component gets as it is."""

    value: Any


def built(plan: Any) -> Any:
    """Return ``plan`` with the result of each call in the place of the call."""
    if isinstance(plan, Given):
        return plan.value
    if isinstance(plan, Call):
        call = functools.partial(plan.function, *built(plan.args), **built(plan.kwargs))
        return call if plan.partial else call()
    if isinstance(plan, dict):
        return {key: built(value) for key, value in plan.items()}
    return type(plan)(map(built, plan)) if type(plan) in (list, tuple) else plan


def plain(config: Any, where: str = "") -> Any:
    """Return a copy of a config as dicts and lists, its interpolations resolved; objects in it stay the same."""
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
            hint = f". Only a job of Hydra has an output directory: compose(..., overrides=['{error.full_key}=PATH'])"
        raise ConfigError(f"{where or 'The config'} cannot be resolved: {str(error).splitlines()[0]}{hint}") from error
    except RecursionError:
        raise ConfigError(f"{where or 'The config'} is nested too deeply to be looked through.") from None


def merged(tree: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with ``more`` in it, mapping by mapping; what is no mapping is replaced."""
    deeper = {k: merged(tree[k], v) for k, v in more.items() if isinstance(v, dict) and isinstance(tree.get(k), dict)}
    return {**tree, **more, **deeper}


def describes(value: Any) -> bool:
    """Whether a runtime argument is or holds the config of a component, rather than being an object to pass on."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, dict):
        return "_target_" in value or any(map(describes, value.values()))
    return isinstance(value, (list, tuple)) and any(map(describes, value))


def is_missing(value: Any) -> bool:
    """Whether it is OmegaConf's ``???``, a value that is still to be given."""
    return isinstance(value, str) and value == MISSING
