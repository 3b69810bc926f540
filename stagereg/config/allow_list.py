"""The allow-list of ``stagereg.instantiate``: the targets that a config may name, checked before any import.

A config may name the components of the registry. In a call to ``instantiate``, the program can allow further targets. A
name is compared as a whole string, without attribute access. If the program allows an object, such as
``torch.optim.AdamW``, the config may use any imported module that contains the object. The path to import comes from
the registry or the program, not from the config. Hydra's block-list is not used, so the known ways to bypass the
block-list (GHSA-2cp2-2r3c-7p7r, GHSA-37p2-j732-x8pj, GHSA-mwj6-rfh8-7qf4) have no effect.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

import stagereg.registry as registry
from stagereg.errors import ConfigError, RegistryError, TargetNotAllowedError, nearest
from stagereg.registry import Entry

RESTRICTED = {"stagereg.extensions.callbacks.shell_command.ShellCommand": "runs a shell command"}
"""Paths of registered components that a config may name only if the program allows them too, with the reason."""

_SHOWN = 200  # characters of a rejected name in a message


@dataclass(frozen=True)
class AllowedTarget:
    """An unregistered class or function that the program allows in one call to ``instantiate``."""

    path: str
    component: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        """Return the class or function. Imports it if the program passed only its path."""
        try:
            found = self.component or pkgutil.resolve_name(self.path)
            if not callable(found):
                raise TypeError(f"it is {found!r}, which cannot be called")
        except (Exception, SystemExit) as cause:
            raise RegistryError(
                f"{self.path} is allowed by the program, but cannot be loaded.\n{type(cause).__name__}: {cause}\n"
                "Correct the path in allow=..., or reinstall its package."
            ) from cause
        return found


class TargetAllowList:
    """The targets that the config of one call to ``stagereg.instantiate`` may name.

    Args:
        allow: targets in addition to the components of the registry: full dotted paths (``"package.module.Name"``);
            classes and functions, which the config names by any import path in an imported module; and
            ``"kind/name"`` of components in :data:`RESTRICTED`.

    Raises:
        UnknownNameError: No component has that name.
        ConfigError: ``allow`` is a config or part of a config, or has an item of another type, such as a pattern.
    """

    def __init__(self, allow: Collection[str | Callable[..., Any]] = ()) -> None:
        if isinstance(allow, (str, Mapping)) or OmegaConf.is_config(allow) or not isinstance(allow, Collection):
            raise ConfigError(
                f"allow={allow!r:.{_SHOWN}} is not a collection of targets.\n"
                'List the targets in code, never from a config: allow=("package.module.Name", a_function).'
            )
        self._allowed = {target.path: target for target in map(_allowed, allow)}

    def find(self, target: Any, where: str) -> Entry | AllowedTarget:
        """Return the entry for the value of a ``_target_`` key. ``where``: this key, for messages. Imports nothing."""
        path = _text(target)
        found = registry.find_target(path) or self._allowed.get(path) or self._given_as(path)
        if found is None:
            known = [*(entry.path for entry in registry.entries()), *self._allowed]
            raise TargetNotAllowedError(
                f"{where} names the _target_ {path!r:.{_SHOWN}}, which is not registered: nothing was imported or "
                f"called.{nearest(path[:_SHOWN], known)}\n"
                "If it is your component, decorate it with @stagereg.register(kind, name) and import its module first. "
                "Otherwise allow it in the program: stagereg.instantiate(..., allow=(...))."
            )
        if isinstance(found, Entry) and path in RESTRICTED and path not in self._allowed:
            name = f"{found.kind}/{found.name}"
            raise TargetNotAllowedError(
                f"{where} names {name}, which {RESTRICTED[path]}. The program must allow it: "
                f'stagereg.instantiate(..., allow=["{name}"]).'
            )
        return found

    def _given_as(self, path: str) -> Entry | AllowedTarget | None:
        """Return the allowed class or function that ``path`` names in an imported module, or ``None``."""
        module, _, name = path.rpartition(".")
        imported = sys.modules.get(module)
        # Attribute access could make the module import something.
        component = object.__getattribute__(imported, "__dict__").get(name) if imported is not None else None
        same = (each for each in self._allowed.values() if component is not None and each.component is component)
        found = next(same, None)
        return found and (registry.find_target(found.path) or found)


def _allowed(item: Any) -> AllowedTarget:
    kind, slash, name = item.partition("/") if isinstance(item, str) else ("", "", "")
    if slash:
        return AllowedTarget(registry.find(kind, name).path)
    if isinstance(item, str) and "." in item and all(part.isidentifier() for part in item.split(".")):
        return AllowedTarget(_text(item))
    if callable(item) and hasattr(item, "__qualname__"):
        return AllowedTarget(_text(item), item)
    raise ConfigError(
        f"allow has {item!r:.{_SHOWN}}, but accepts only classes, functions and full dotted paths such as "
        '"package.module.Name", without patterns.'
    )


def _text(target: Any) -> str:
    """Return the path of a target as a plain ``str``. A subclass of ``str`` could override the comparison."""
    if isinstance(target, str):
        return str.__str__(target)
    return f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else repr(target)
