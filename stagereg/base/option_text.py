"""Format options for messages: as a Hydra override, or in Python if the program constructs the component itself.

If :func:`stagereg.instantiate` built the checkpointer from a config, a message contains ``checkpoint.resume=never``; if
the program constructed it with ``stagereg.Checkpointer(...)``, the message contains ``resume="never"``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

_CLASSES = {"checkpoint": "Checkpointer", "join": "Join", "tier": "Tier"}
_ARGUMENTS = {"throw": "throw_on_early_termination"}
_OF_SHELLS = frozenset("*{ ")  # characters that a shell would expand or split at
_building: ContextVar[Mapping[str, str] | None] = ContextVar("building", default=None)  # the keys of the current call

# Global because code that writes a message has no reference to the component, and may run on another thread.
_keys: dict[str, str] = {}
"""The config key of the last component of each kind, without kinds that the program constructed itself."""


@contextlib.contextmanager
def in_config(keys: Mapping[str, str]) -> Iterator[None]:
    """Declare that a ``with`` block builds components from a config. ``keys`` maps kinds to config keys."""
    token = _building.set(keys)
    _keys.update(keys)
    try:
        yield
    finally:
        _building.reset(token)


def constructed(kind: str) -> None:
    """Record that the program constructs a component of a kind. Inside :func:`in_config`, this does nothing."""
    if kind not in (_building.get() or ()):
        _keys.pop(kind, None)


def option(name: str, *value: object) -> str:
    """Return an option in the syntax that the user needs, with or without a value.

    ``option("checkpoint.restore.cast", True)`` is ``checkpoint.restore.cast=true`` or ``restore=Restore(cast=True)``;
    without a value, ``checkpoint.restore.cast`` or ``Restore(cast=...)``.
    """
    kind, _, rest = name.partition(".")
    if (key := _keys.get(kind)) is not None:
        text = f"{key or kind}.{rest}" + "".join(f"={_in_config(each)}" for each in value)
        return shlex.quote(text) if {*text} & _OF_SHELLS else text
    group, _, field = rest.rpartition(".")
    text = f"{_ARGUMENTS.get(field, field)}={_in_python(value[0]) if value else '...'}"
    if value and not group and kind != "tier":
        return text
    called = f"{group.capitalize() if group else _CLASSES[kind]}({text})"
    return f"{group}={called}" if value and group else called


def choice(kind: str, name: str, **options: object) -> str:
    """Return the overrides, or the Python argument, that select a component of a checkpointer: ``tier=disk``."""
    if "checkpoint" in _keys:
        return " ".join([f"{kind}={name}", *(f"{kind}.{key}={_in_config(each)}" for key, each in options.items())])
    more = "".join(f", {key}={_in_python(each)}" for key, each in options.items())
    return f'{kind}=stagereg.build("{kind}", "{name}"{more})' if options else f'{kind}="{name}"'


def _in_config(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_in_config(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_in_config, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _in_python(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_in_python(key)}: {_in_python(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_in_python, value))}]"
    return json.dumps(os.fspath(value), ensure_ascii=False) if isinstance(value, (str, os.PathLike)) else repr(value)
