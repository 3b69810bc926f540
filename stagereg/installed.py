"""What is installed, read from metadata: the plugins that packages announce, and the stagereg that they require.

Nothing is imported. Each distribution is read by itself, so one with broken metadata hides no other; it is reported
instead. Of two distributions with one name the first on ``sys.path`` counts, as it does for an import. What an
announcement means is left to the registry.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from stagereg._version import __version__
from stagereg.errors import InstallationError, StageregError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

__all__ = ["DISTRIBUTION", "announced", "normalized", "refuse_foreign", "unmet"]

DISTRIBUTION = "hydra-stagereg"
"""What pip calls this project. The name ``stagereg`` in the Python package index belongs to an unrelated one."""

_FOREIGN = "stagereg"


def refuse_foreign(folder: str) -> None:
    """Refuse to run where the unrelated distribution ``stagereg`` is installed into the same ``folder``.

    Both write into ``folder/stagereg``, so which files are there depends on which was installed last. Lists the folder
    once and reads no file.

    Raises:
        InstallationError: with the commands that repair it.
    """
    try:
        beside = os.listdir(folder)
    except OSError:  # the package is in an archive
        return
    for name in beside:
        if name.startswith(f"{_FOREIGN}-") and name.endswith(".dist-info"):
            raise InstallationError(
                f"Two projects are installed into {os.path.join(folder, _FOREIGN)}: {DISTRIBUTION}, and {_FOREIGN}, "
                f"which is an unrelated project or an old name of this one ({name}).\n"
                f"Run: pip uninstall {_FOREIGN} && pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )


def announced(group: str) -> tuple[list[tuple[str, str, EntryPoint]], list[tuple[str, str]]]:
    """Return the entry points of ``group`` and the distributions that could not be read.

    Each entry point comes with its distribution's name and version, sorted by its own name. Each distribution that
    could not be read is its folder and the reason; one that does not mention the group is not looked into.
    """
    import importlib.metadata  # not above: it costs more than the rest of `import stagereg`

    found: dict[str, list[tuple[str, str, EntryPoint]]] = {}
    unreadable: list[tuple[str, str]] = []
    for each in importlib.metadata.distributions():
        try:
            if group not in (each.read_text("entry_points.txt") or ""):
                continue
            name, _ = _identity(each)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # its folder has another name
                each = importlib.metadata.distribution(name)
            found[normalized(name)] = [(*_identity(each), point) for point in each.entry_points.select(group=group)]
        except Exception as error:
            why = f"its entry_points.txt or METADATA cannot be read: {type(error).__name__}: {error}"
            folder = str(getattr(each, "_path", each))
            unreadable.append((folder, str(error) if isinstance(error, StageregError) else why))
    points = [point for points in found.values() for point in points]
    return sorted(points, key=lambda point: (point[2].name, point[2].value)), sorted(unreadable)


def unmet(distribution: str) -> str:
    """Return why an installed distribution does not fit this stagereg, by what it requires; empty if it fits."""
    import importlib.metadata

    from packaging.requirements import InvalidRequirement, Requirement

    try:
        lines = importlib.metadata.requires(distribution) or []
    except Exception:  # its entry points could be read; importing it shows what else is wrong
        return ""
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        name, needed = normalized(requirement.name), f"{DISTRIBUTION}{requirement.specifier}"
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name == _FOREIGN:
            return f"requires {line!r}, which is an unrelated project; its author has to write {needed!r}."
        if name == DISTRIBUTION and not requirement.specifier.contains(__version__, prereleases=True):
            return f"needs {needed}; this is {__version__}. Install one that fits: pip install '{needed}'"
    return ""


def normalized(distribution: str) -> str:
    """Return the name of a distribution as names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _identity(distribution: Distribution) -> tuple[str, str]:
    if not (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")):
        raise InstallationError("it has no METADATA")
    name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    if not name or not version:
        raise InstallationError(f"its METADATA lacks the {'version' if name else 'name'}")
    return name, version
