"""Converts configs of OmegaConf to plain data and back. Keeps unresolved interpolations, and the flags of a config."""

from __future__ import annotations

import logging
import sys
from typing import Any

from stagereg.errors import printable

_log = logging.getLogger(__name__)

_FLAGS = ("struct", "readonly")
KINDS = ("DictConfig", "ListConfig")  # read as dicts and lists if OmegaConf is not installed


def is_config(value: Any) -> bool:
    """Return whether a value is an OmegaConf config."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig))


def content_of(config: Any) -> Any:
    """Return the content of a config as plain containers. Interpolations and missing values stay strings."""
    return sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=False)


def flags_of(config: Any) -> list[bool | None]:
    """Return the flags ``struct`` and ``readonly`` of a config; ``None`` for a flag that is not set."""
    return [config._get_flag(flag) for flag in _FLAGS]


def expect_whole(config: Any) -> None:
    """Raise ``TypeError`` for a nested config if its interpolations would resolve differently without its parent."""
    if config._get_parent() is None:
        return
    convert = sys.modules["omegaconf"].OmegaConf.to_container
    try:
        alone = made(type(config).__name__, content_of(config), [None, None])
        same = convert(alone, resolve=True) == convert(config, resolve=True)
    except Exception:
        same = False
    if not same:
        raise TypeError("the value is part of a config, and its interpolations refer to other parts of that config")


def made(kind: str, content: Any, flags: list[bool | None]) -> Any:
    """Create a config of the type ``kind``, one of ``KINDS``. Without OmegaConf, return only the content."""
    try:
        import omegaconf
    except ImportError:
        return content
    config = getattr(omegaconf, kind)(content)
    for flag, value in zip(_FLAGS, flags, strict=True):
        config._set_flag(flag, value)
    return config


def of_type(live: Any, config: Any) -> Any:
    """Convert a config to the structured type of ``live``. Return it unchanged if the type rejects the content."""
    omegaconf = sys.modules["omegaconf"].OmegaConf
    kind: Any = omegaconf.get_type(live) if is_config(live) else None
    if not (hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__")):
        return config
    try:
        typed = omegaconf.merge(omegaconf.structured(kind), content_of(config))
    except Exception as error:
        why = printable(str(error))
        _log.warning("stagereg: A config of the checkpoint stays untyped, since %s rejects it: %s", kind.__name__, why)
        return config
    for flag, value in zip(_FLAGS, flags_of(config), strict=True):
        typed._set_flag(flag, value)
    return typed
