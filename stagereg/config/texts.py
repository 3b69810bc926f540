"""Converts single values between a config and a component.

A config holds ``str``, ``int``, ``float``, ``bool``, paths and enums directly, converted by OmegaConf. Objects of the
types in the table are strings in the config. Converting an object to a string and back returns an equal object. Types
are matched by their full names, so this module does not need to import torch: a component with a torch type in its
signature has already imported torch.

====================== =================================================================================================
``torch.dtype``        ``bfloat16``, ``torch.bfloat16``, and torch's aliases (``half``, ``long``)
``torch.device``       ``cpu``, ``cuda``, ``cuda:0``
``datetime.timedelta`` ``30s``, ``1h30m``, ``2 days``, ``500ms``; or a number of seconds
``stagereg.ByteSize``  ``4GiB``, ``512MB``; or a number of bytes
====================== =================================================================================================
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import BooleanNode, EnumNode, FloatNode, IntegerNode, PathNode, StringNode, ValidationError

from stagereg.base.durations import duration, write_duration
from stagereg.base.sizes import ByteSize
from stagereg.errors import ConfigError, nearest


@dataclass(frozen=True)
class ValueType:
    """The conversions of one type."""

    read: Callable[[Any], Any]  # converts a config value; raises a `ConfigError` with examples of valid values
    # converts an object to text; `None` if a config holds the value directly
    write: Callable[[Any], str] | None = None


def value_type(hint: Any) -> ValueType | None:
    """Return the conversions for the annotation ``hint``, or ``None`` for an unsupported type."""
    if not isinstance(hint, type):
        return None
    if issubclass(hint, enum.Enum):
        return ValueType(functools.partial(_member, hint))
    if hint in _NODES:
        return ValueType(functools.partial(_converted, hint))
    text = _TEXTS.get(f"{hint.__module__}.{hint.__qualname__}")
    return ValueType(functools.partial(_parsed, hint, text[0]), text[1]) if text else None


def written(value: Any) -> Any:
    """Convert an object of a type in the module's table to a string. Any other value is returned unchanged."""
    known = value_type(type(value))
    return known.write(value) if known is not None and known.write is not None else value


_NODES: dict[type, tuple[Any, str]] = {
    str: (StringNode("", is_optional=False), "text"),
    int: (IntegerNode(0, is_optional=False), "a whole number"),
    float: (FloatNode(0.0, is_optional=False), "a number"),
    bool: (BooleanNode(False, is_optional=False), "true or false"),
    Path: (PathNode(Path(), is_optional=False), "a path"),
}
"""OmegaConf's own conversions, with a description of valid values."""


def _converted(type_: type, value: Any) -> Any:
    node, needed = _NODES[type_]
    try:
        return value if type(value) is type_ else node.validate_and_convert(value)
    except ValidationError:
        raise ConfigError(f"{value!r} is not {needed}.") from None


def _member(type_: type[enum.Enum], value: Any) -> Any:
    try:
        return EnumNode.validate_and_convert_to_enum(type_, value)
    except ValidationError:
        near, names = nearest(str(value), type_.__members__), ", ".join(type_.__members__)
        raise ConfigError(f"{value!r} is not a {type_.__name__}.{near} It must be one of: {names}") from None


def _parsed(type_: type, parse: Callable[[str], Any], value: Any) -> Any:
    if isinstance(value, type_):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        what = _MEANT.get(type_.__name__, type_.__name__)
        raise ConfigError(f"it must be a {what}, not {'null' if value is None else repr(value)}.")
    return parse(str(value))


_MEANT = {"ByteSize": "size such as 4GiB", "timedelta": "duration such as 30s"}


def _dtype(text: str) -> Any:
    torch: Any = sys.modules["torch"]
    found = getattr(torch, text.strip().removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found
    dtypes = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    near = nearest(text.removeprefix("torch."), dtypes)
    raise ConfigError(f"{text!r} is not a dtype.{near} Write the name of a torch dtype, such as bfloat16.")


def _device(text: str) -> Any:
    torch: Any = sys.modules["torch"]
    try:
        return torch.device(text.strip())
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{text!r} is not a device, such as cpu, cuda or cuda:0. {error}") from error


_TEXTS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "torch.dtype": (_dtype, lambda dtype: str(dtype).removeprefix("torch.")),
    "torch.device": (_device, str),
    "datetime.timedelta": (duration, write_duration),
    f"{ByteSize.__module__}.{ByteSize.__qualname__}": (ByteSize, str),
}
"""The functions that parse and write each text type, by the full name of the type."""
