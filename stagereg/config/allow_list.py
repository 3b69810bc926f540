"""The allow-list of ``stagereg.instantiate``: which targets a config may name, decided before anything is imported.

A config may name the components of the registry and, for one call, what the program allows in code. A name is compared
as text, whole, and no attribute of it is followed. Only an object that the program gives (``torch.optim.AdamW``) has
further names: those in modules that are imported already. The entry, not the config's text, is imported. Hydra's
block-list is not used, so the ways around it (GHSA-2cp2-2r3c-7p7r, GHSA-37p2-j732-x8pj, GHSA-mwj6-rfh8-7qf4) do
nothing.
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
"""Registered components that a config may name only where the program allows it too, and why, by their paths."""

_SHOWN = 200  # characters of a refused name, so that a message stays on one screen


@dataclass(frozen=True)
class AllowedTarget:
    """A class or function that is not registered, but that this one call's config may name by its path."""

    path: str
    component: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        """Import it, unless the program gave it."""
        try:
            found = self.component or pkgutil.resolve_name(self.path)
            if not callable(found):
                raise TypeError(f"it is {found!r}, which cannot be called")
        except (Exception, SystemExit) as cause:
            raise RegistryError(
                f"{self.path} is allowed by the program, but cannot be loaded.\n{type(cause).__name__}: {cause}\n"
                "Correct the path in allow=..., or repair the package it is in."
            ) from cause
        return found


class TargetAllowList:
    """What the config of one call of ``stagereg.instantiate`` may name.

    Args:
        allow: beside the registry's components, dotted paths in full (``"package.module.Name"``), and classes and
            functions themselves, each for the path of its definition and for its names in modules that are imported
            already; and ``"kind/name"`` of those in :data:`RESTRICTED`.

    Raises:
        UnknownNameError: there is no component of that name.
        ConfigError: ``allow`` is a config or part of one, or has something else in it, such as a pattern.
    """

    def __init__(self, allow: Collection[str | Callable[..., Any]] = ()) -> None:
        if isinstance(allow, (str, Mapping)) or OmegaConf.is_config(allow) or not isinstance(allow, Collection):
            raise ConfigError(
                f"allow={allow!r:.{_SHOWN}} is no collection of targets.\n"
                'Name them in code, never from a config: allow=("package.module.Name", a_function).'
            )
        self._allowed = {target.path: target for target in map(_allowed, allow)}

    def find(self, target: Any, where: str) -> Entry | AllowedTarget:
        """Return what a ``_target_``, a path or an object, names; imports nothing. ``where`` is its key."""
        path = _text(target)
        found = registry.find_target(path) or self._allowed.get(path) or self._given_as(path)
        if found is None:
            known = [*(entry.path for entry in registry.entries()), *self._allowed]
            raise TargetNotAllowedError(
                f"{where} names the _target_ {path!r:.{_SHOWN}}, which is not registered: nothing was imported or "
                f"called.{nearest(path[:_SHOWN], known)}\n"
                "If it is yours, put @stagereg.register(kind, name) on it and import its module first; "
                "what has no kind, the program names in stagereg.instantiate(..., allow=(...))."
            )
        if isinstance(found, Entry) and path in RESTRICTED and path not in self._allowed:
            name = f"{found.kind}/{found.name}"
            raise TargetNotAllowedError(
                f"{where} names {name}, which {RESTRICTED[path]}: a config may do so only where the program allows it, "
                f'by stagereg.instantiate(..., allow=["{name}"]).'
            )
        return found

    def _given_as(self, path: str) -> Entry | AllowedTarget | None:
        """Return the class or function that the program gave and that ``path`` names in a module already imported."""
        module, _, name = path.rpartition(".")
        imported = sys.modules.get(module)
        # Not by an attribute, which a module may import something for.
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
        f"allow has {item!r:.{_SHOWN}}: it takes classes, functions and dotted paths in full, "
        '"package.module.Name", and no patterns.'
    )


def _text(target: Any) -> str:
    """The path that a target is compared by: an exact ``str``, so that no method of the target's has a say in it."""
    if isinstance(target, str):
        return str.__str__(target)
    if hasattr(target, "__qualname__"):
        return f"{target.__module__}.{target.__qualname__}"
    return repr(target)
