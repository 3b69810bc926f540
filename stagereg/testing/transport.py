"""Carry a call into a fresh process that has none of the caller's modules.

Pickle names functions and classes by module and attribute; a test module that pytest imported by file path has a name
under which no other process finds it. So the files of the caller's own modules travel along, and the other side imports
them from the same files under the same names, each when it is first needed. Nothing is added to ``sys.path``.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Shipment", "pack", "unpack"]

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Where modules lie that an ordinary import finds."""


@dataclass(frozen=True)
class Shipment(MetaPathFinder):
    """A call in bytes, and for each of the caller's modules its file and, of a package, its folders."""

    call: bytes
    modules: dict[str, tuple[str | None, list[str] | None]]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module of the caller's in its file."""
        file, folders = self.modules.get(name, (None, None))
        if file is not None:
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        if folders is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shipment:
    """Describe the call ``fn(*args, **kwargs)``; ``ValueError`` when it cannot be pickled."""
    wrong = f"{fn!r} is not in other processes: define it with `def` at the top of a module"
    try:
        pickle.dumps(fn)
        wrong = f"the arguments for {fn!r} cannot be sent to other processes"
        return Shipment(pickle.dumps((fn, args, kwargs)), _own_modules())
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"{wrong}: {error}") from error


def unpack(shipment: Shipment) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Import what the call names, from the files it came from; return the function and its arguments."""
    sys.meta_path.insert(0, shipment)
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.loads(shipment.call)
    return call


def _own_modules() -> dict[str, tuple[str | None, list[str] | None]]:
    """The loaded modules that are not installed. ``__main__`` is multiprocessing's own affair."""
    found: dict[str, tuple[str | None, list[str] | None]] = {}
    for name, module in list(sys.modules.items()):
        facts = vars(module) if isinstance(module, ModuleType) else {}
        file, folders = facts.get("__file__"), facts.get("__path__")
        lies_in = str(file or next(iter(folders or ()), ""))
        if os.path.isabs(lies_in) and not lies_in.startswith(_INSTALLED) and name not in ("__main__", "__mp_main__"):
            found[name] = file, None if folders is None else list(folders)
    for name in list(found):
        above = name.rpartition(".")[0]
        while above and above not in found and not hasattr(sys.modules.get(above), "__path__"):
            found[above] = None, []  # made up by pytest, for a folder that is no package
            above = above.rpartition(".")[0]
    return found
