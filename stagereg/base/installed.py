"""Read package metadata: plugins that packages register as entry points, and the stagereg version that each requires.

Imports no plugin. Broken metadata of one distribution is reported, and other distributions are still read. If two
distributions have the same name, the first on ``sys.path`` is used.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
from importlib.metadata import Distribution, EntryPoint

from stagereg.base.version import __version__
from stagereg.errors import InstallationError, StageregError

DISTRIBUTION = "hydra-stagereg"
"""The name of this project's distribution. ``stagereg`` in the Python package index is an unrelated project."""


def announced(group: str) -> tuple[list[tuple[str, str, EntryPoint]], list[tuple[str, str]]]:
    """Return the sorted entry points of ``group``, each with its distribution's name and version, and a second list.

    The second list has a pair (directory, reason) for each distribution that mentions the group but cannot be read.
    """
    found: dict[str, list[tuple[str, str, EntryPoint]]] = {}
    unreadable: list[tuple[str, str]] = []
    for each in importlib.metadata.distributions():
        try:
            if group not in (each.read_text("entry_points.txt") or ""):
                continue
            name, _ = _identity(each)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # its directory has a different name
                each = importlib.metadata.distribution(name)
            found[normalized(name)] = [(*_identity(each), point) for point in each.entry_points.select(group=group)]
        except Exception as error:
            why = f"its entry_points.txt or METADATA cannot be read: {type(error).__name__}: {error}"
            folder = str(getattr(each, "_path", each))
            unreadable.append((folder, str(error) if isinstance(error, StageregError) else why))
    points = [point for points in found.values() for point in points]
    return sorted(points, key=lambda point: (point[2].name, point[2].value)), sorted(unreadable)


def unmet(distribution: str) -> str:
    """Return why a distribution's requirements exclude the installed version of stagereg; empty if they allow it."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(distribution) or []]
    except Exception:  # the import of the plugin reports any other error
        return ""
    for each in requirements:
        needed = f"{DISTRIBUTION}{each.specifier}"
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        if normalized(each.name) == "stagereg":
            return f"requires {str(each)!r}, which is an unrelated project; its author must require {needed!r}."
        if normalized(each.name) == DISTRIBUTION and not each.specifier.contains(__version__, prereleases=True):
            return f"requires {needed}, but {__version__} is installed. Install a matching version of either project."
    return ""


def normalized(distribution: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _identity(distribution: Distribution) -> tuple[str, str]:
    there = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    known = distribution.metadata if there else None
    name, version = (known[key] if known is not None and key in known else "" for key in ("Name", "Version"))
    if not name or not version:
        raise InstallationError("its METADATA lacks the name or the version")
    return name, version


def expect_installed(package: str, extra: str) -> None:
    """Raise ``InstallationError`` unless a package is installed. A directory of that name does not count."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise InstallationError(f"{package} is missing. Next to the checkout, run: pip install './stagereg[{extra}]'")
