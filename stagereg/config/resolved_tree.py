"""The config of ``stagereg.instantiate`` as plain Python: what is read once, checked, and then built from.

OmegaConf's containers resolve an interpolation each time they are read, so a check of one says nothing about the next
reading. Here a config becomes dicts and lists with everything resolved, once; and each node of it knows its place in
the original, for messages. What may stand in it is decided elsewhere (``lock``, ``schema``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stagereg.errors import ConfigError

__all__ = ["Place", "as_node", "describes", "escaped", "is_container", "is_mapping", "is_missing", "merged", "plain"]

_MISSING = "???"
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True)
class Place:
    """Where a node of the config stands, so that an error can name the override that mends it.

    Attributes:
        key: the full key; that of the original where the node only refers to it (``${stager}``).
        raw: the node before interpolations were resolved.
    """

    key: str
    raw: Any = None

    @classmethod
    def of(cls, config: Any) -> Place:
        if not OmegaConf.is_config(config):
            return cls("")
        return cls(config._get_full_key(None), OmegaConf.to_container(config, resolve=False))

    @property
    def label(self) -> str:
        return self.key or "The config"

    def below(self, child: str | int) -> Place:
        try:
            raw = self.raw[child]
        except (KeyError, IndexError, TypeError):
            raw = None
        reference = _REFERENCE.fullmatch(raw) if isinstance(raw, str) else None
        if reference:
            return Place(reference[1])
        return Place(f"{self.key}[{child}]" if isinstance(child, int) else f"{self.key}.{child}".lstrip("."), raw)


def plain(config: Any, where: str = "") -> Any:
    """Return a copy of a config as dicts and lists, its interpolations resolved; objects in it stay the same objects.

    Raises:
        ConfigError: an interpolation cannot be resolved, or it is no config; ``where`` is its key.
    """
    try:
        node = config if OmegaConf.is_config(config) else as_node(config)
        return _listed(OmegaConf.to_container(node, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where or 'The config'} cannot be resolved: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where or 'The config'} is nested too deeply to be looked through.") from None


def _listed(value: Any) -> Any:
    """``value`` with its tuples made lists: OmegaConf 2.4 keeps them, and what is not looked into is not checked."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def as_node(config: Any) -> DictConfig | ListConfig:
    """Return a mapping, list or dataclass as OmegaConf's container, in which any object may stand.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(config, (dict, list, tuple)):
        return OmegaConf.create(config, flags={"allow_objects": True})
    if is_dataclass(config):
        return OmegaConf.structured(config, flags={"allow_objects": True})
    raise ConfigError(f"{config!r} is a {type(config).__name__}, not a config: pass a node such as cfg.stager.")


def escaped(value: Any) -> Any:
    """``value`` so that OmegaConf takes its strings as they are: they were resolved once, and no more than once."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if isinstance(value, Enum):  # which may be a string as well
        return value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def merged(tree: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
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
    return isinstance(value, str) and value == _MISSING


def is_mapping(value: Any) -> bool:
    """Whether it is a mapping that can join a config."""
    return isinstance(value, (dict, DictConfig))


def is_container(value: Any) -> bool:
    """Whether it can hold nodes of a config."""
    return isinstance(value, (dict, list, tuple)) or OmegaConf.is_config(value)
