"""Find the modules of the installed extensions. Users may delete any directory in ``stagereg/extensions``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_EXTENSIONS = Path(__file__).parents[1] / "extensions"


@functools.cache
def folders() -> tuple[str, ...]:
    """Return the names of the extensions that are installed, sorted."""
    return tuple(sorted(each.parent.name for each in _EXTENSIONS.glob("*/__init__.py")))


def has(extension: str) -> bool:
    """Return whether an extension is installed."""
    return extension in folders()


def providers(module: str) -> Iterator[ModuleType]:
    """Import ``stagereg.extensions.EXTENSION.MODULE`` of each extension that has such a module, sorted by extension."""
    for each in folders():
        if (_EXTENSIONS / each / f"{module}.py").is_file():
            yield importlib.import_module(f"stagereg.extensions.{each}.{module}")


def needs(extension: str) -> str:
    """Return "needs stagereg/extensions/X, which is missing ...", with advice, as part of a message."""
    how = "which is missing in this installation: reinstall stagereg, or restore that directory."
    return f"needs stagereg/extensions/{extension}, {how}"


def missing(path: str) -> str:
    """Return a sentence for a message if a dotted path is in an extension that is not installed; otherwise empty."""
    parts = path.replace(":", ".").split(".")
    if parts[:2] != ["stagereg", "extensions"] or len(parts) < 3 or has(parts[2]):
        return ""
    return f"It {needs(parts[2])}"
