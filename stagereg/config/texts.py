"""Single values: how a config shows each type and how a component gets it.

``str``, ``int``, ``float``, ``bool``, paths and enums are what they are in a config, converted as OmegaConf does it.
Other types are *texts* there: a config has text and the component gets an object; reading what was written gives an
equal object. Torch's types are known where torch has been imported, which a component with one in its signature has
done: nothing is imported here.

====================== =================================================================================================
``torch.dtype``        ``bfloat16``, ``torch.bfloat16``, and torch's other names for the same (``half``, ``long``)
``torch.device``       ``cpu``, ``cuda``, ``cuda:0``
``datetime.timedelta`` ``30s``, ``1h30m``, ``2 days``, ``500ms``, ``00:05:00``; or a number, of seconds
``stagereg.ByteSize``  ``4GiB``, ``512MB``; or a number, of bytes
====================== =================================================================================================
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import BooleanNode, FloatNode, IntegerNode, PathNode, StringNode, ValidationError

from stagereg.durations import duration, write_duration
from stagereg.errors import ConfigError, nearest
from stagereg.sizes import ByteSize

__all__ = ["ValueType", "value_type", "written"]


@dataclass(frozen=True)
class ValueType:
    """One type of single values.

    Attributes:
        type: what the component gets.
        read: makes it from what a config has; raises a ``ConfigError`` that says what is wrong and what would be right.
        write: makes the text that :attr:`read` takes for an equal object; ``None`` where a config holds the value as
            it is.
    """

    type: type
    read: Callable[[Any], Any]
    write: Callable[[Any], str] | None = None


_NODES = {
    str: StringNode("", is_optional=False),
    int: IntegerNode(0, is_optional=False),
    float: FloatNode(0.0, is_optional=False),
    bool: BooleanNode(False, is_optional=False),
    Path: PathNode(Path(), is_optional=False),
}
"""OmegaConf's own conversions."""


def value_type(hint: Any) -> ValueType | None:
    """Return how values of the type ``hint`` are read and written, or ``None`` where it is none of these."""
    if hint is ByteSize:
        return ValueType(ByteSize, _text_reader(ByteSize, ByteSize), str)
    if hint is datetime.timedelta:
        return ValueType(hint, _text_reader(hint, duration), write_duration)
    torch: Any = sys.modules.get("torch")
    if torch is not None and hint is torch.dtype:
        return ValueType(torch.dtype, _text_reader(hint, _dtype), lambda value: str(value).removeprefix("torch."))
    if torch is not None and hint is torch.device:
        return ValueType(torch.device, _text_reader(hint, _device), str)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ValueType(hint, lambda value: _member(value, hint))
    return ValueType(hint, lambda value: _converted(value, hint)) if hint in _NODES else None


def written(value: Any) -> Any:
    """Return ``value`` as a config holds it: the text of an object of these types, everything else as it is."""
    known = value_type(type(value))
    return known.write(value) if known is not None and known.write is not None else value


def _text_reader(type_: type, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if isinstance(value, type_):
            return value
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError(f"{value!r} is not the text of a {type_.__name__}.")
        return parse(str(value))

    return read


def _converted(value: Any, type_: type) -> Any:
    if type(value) is type_:
        return value
    try:
        return _NODES[type_].validate_and_convert(value)
    except ValidationError:
        raise ConfigError(f"{value!r} is not {_NEEDED[type_]}.") from None


_NEEDED = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


def _member(value: Any, type_: type[enum.Enum]) -> Any:
    """A member of an enum, from its name, from ``Enum.NAME`` or from its value where that is a number."""
    if isinstance(value, type_):
        return value
    name = str(value).removeprefix(f"{type_.__name__}.")
    if name in type_.__members__:
        return type_[name]
    if isinstance(value, int):
        with contextlib.suppress(ValueError):
            return type_(value)
    near, names = nearest(name, type_.__members__), ", ".join(type_.__members__)
    raise ConfigError(f"{value!r} is not a {type_.__name__}.{near} It is one of: {names}")


def _dtype(text: str) -> Any:
    torch: Any = sys.modules["torch"]
    name = text.strip().removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        dtypes = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
        common = [d for d in sorted(dtypes) if re.fullmatch(r"b?float\d+|u?int(8|16|32|64)|bool|complex\d+", d)]
        raise ConfigError(
            f"{text!r} is not a dtype.{nearest(name, common) or nearest(name, sorted(dtypes))} "
            f"It is one of: {', '.join(common)} and torch's other dtypes."
        )
    return found


def _device(text: str) -> Any:
    torch: Any = sys.modules["torch"]
    try:
        return torch.device(text.strip())
    except (RuntimeError, ValueError) as error:
        kind = text.strip().partition(":")[0]
        types = ["cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "meta"]
        near = "" if kind in types else nearest(kind, types)
        raise ConfigError(f"{text!r} is not a device.{near} Write it as cpu, cuda or cuda:0.") from error
