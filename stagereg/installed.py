"""What installed packages announce by entry points, read off their metadata: nothing is imported.

Each distribution is read by itself, so that one whose metadata is broken costs no other; it is told apart instead. Of
two with one name the first on ``sys.path`` counts, as it does for an import. What an announcement means is left to who
asks: the registry, and the command that looks for contracts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass

from stagereg.errors import StageregError

__all__ = ["Announcement", "announcements", "normalized", "unmet"]

_DECLARATIONS = "entry_points.txt"
_REFERENCE = re.compile(r"([\w.]+)\s*:\s*([\w.]+)\s*(\[.*\])?")


@dataclass(frozen=True, order=True)
class Announcement:
    """One entry point of one distribution.

    Attributes:
        name: left of the equals sign.
        value: right of it; ``"package.module:Name"`` without spaces and extras, or as it stands where it is none.
        distribution: the name of the distribution, as it spells it.
        version: of that distribution.
    """

    name: str
    value: str
    distribution: str
    version: str


class _BrokenMetadataError(StageregError):
    """Metadata that can be read and says too little."""


def announcements(group: str) -> tuple[list[Announcement], list[tuple[str, str]]]:
    """Return the entry points of ``group``, sorted, and the distributions that could not be read.

    Each of those is the distribution's name, or its folder where it has none, and the reason. One that never mentions
    the group is not looked at.
    """
    found: list[Announcement] = []
    broken: list[tuple[str, str]] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text(_DECLARATIONS) or ""
            if group not in text:
                continue
            name, version = _identity(distribution)
            if normalized(name) in seen or _hidden(name, text):
                continue
            points = [(point.name, point.value) for point in distribution.entry_points.select(group=group)]
        except Exception as error:
            broken.append((_label(distribution), _reason(error)))
            continue
        seen.add(normalized(name))
        found += [Announcement(point, _reference(value), name, version) for point, value in points]
    return sorted(found), sorted(broken)


@functools.lru_cache(maxsize=64)
def unmet(distribution: str, path: tuple[str, ...]) -> str:
    """Return what the distribution requires of stagereg and this version does not meet, or an empty string.

    ``path`` is ``sys.path``. Where ``packaging`` is not installed, nothing can be compared and nothing is unmet.
    """
    from stagereg._version import __version__

    try:
        lines = importlib.metadata.distribution(distribution).requires or []
    except Exception:  # whoever announced it has been read; what else is wrong with it is for its import to show
        return ""
    ours = [line for line in lines if normalized(re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0]) == "stagereg"]
    if not ours:
        return ""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return ""
    for line in ours:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.specifier.contains(__version__, prereleases=True):
            return f"stagereg{requirement.specifier}"
    return ""


def normalized(distribution: str) -> str:
    """Return the name of a distribution as names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    if not (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")):
        raise _BrokenMetadataError("it has no METADATA")
    name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    if not name or not version:
        raise _BrokenMetadataError(f"its METADATA lacks the {'version' if name else 'name'}")
    return name, version


def _hidden(name: str, text: str) -> bool:
    """Whether another distribution of that name, with other entry points, comes first."""
    try:
        return importlib.metadata.distribution(name).read_text(_DECLARATIONS) != text
    except importlib.metadata.PackageNotFoundError:  # its folder is called otherwise
        return False


def _reference(value: str) -> str:
    match = _REFERENCE.fullmatch(value.strip())
    return f"{match[1]}:{match[2]}" if match else value.strip()


def _label(distribution: importlib.metadata.Distribution) -> str:
    try:
        return _identity(distribution)[0]
    except Exception:
        return str(getattr(distribution, "_path", distribution))


def _reason(error: Exception) -> str:
    if isinstance(error, StageregError):
        return str(error)
    return f"its {_DECLARATIONS} or METADATA cannot be read: {type(error).__name__}: {error}"
