"""What a docstring says about each parameter: the help text of the options.

Read are Google's style (a section ``Args:``), NumPy's (``Parameters`` underlined) and reST's fields (``:param x:``).
For a class, its ``__init__`` and the class itself are read, then its bases in the order of inheritance, so a parameter
that a class only passes on keeps the help of the class that explained it. A dataclass may have ``Attributes:`` instead.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["parameters"]

_SECTION = re.compile(r"((other )?parameters|params|(keyword )?arg(ument)?s|attributes):?", re.IGNORECASE)
_NAMES = r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)"
_GOOGLE = re.compile(_NAMES + r"\s*(?:\(.*?\))?\s*:(?:\s+(.*)|$)")
_NUMPY = re.compile(_NAMES + r"\s*(?::.*)?()$")
_REST = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")


def parameters(component: Any) -> dict[str, str]:
    """Return what the docstrings of a class or function say about its parameters, each as one line of text."""
    found: dict[str, str] = {}
    for text in _docstrings(component):
        for names, lines in _items(inspect.cleandoc(text).splitlines()):
            for name in filter(None, re.split(r"[\s,*]+", names)):
                found.setdefault(name, " ".join(" ".join(lines).split()))
    return {name: help_ for name, help_ in found.items() if help_}


def _docstrings(component: Any) -> Iterator[str]:
    """The docstrings that may explain the parameters, the nearest first."""
    if not isinstance(component, type):
        yield inspect.getdoc(component) or ""
        return
    for owner in component.__mro__[:-1]:  # the last is object
        yield getattr(vars(owner).get("__init__"), "__doc__", None) or ""
        yield vars(owner).get("__doc__") or ""


def _items(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The name or names of each item, and its lines: the rest of its first line and what is indented deeper."""
    style: re.Pattern[str] | None = None
    margin: int | None = None  # the indentation of the section's items, that of its first one
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.strip() and not indent and re.fullmatch(r"-{3,}\s*", following):
            style, margin = (_NUMPY if _SECTION.fullmatch(line.strip()) else None), 0
        elif line.strip() and not indent and style is not _NUMPY:
            style, margin = (_GOOGLE if line.endswith(":") and _SECTION.fullmatch(line.strip()) else None), None
        elif style is not None and line.strip():
            margin = indent if margin is None else margin
            if indent == margin and (item := style.match(line.strip())):
                yield item[1], [item[2] or "", *_below(lines[number + 1 :], indent)]
        if item := _REST.match(line.strip()):
            yield item[1], [item[2], *_below(lines[number + 1 :], indent)]


def _below(lines: list[str], indent: int) -> Iterator[str]:
    """The first ``lines`` that are indented deeper than ``indent``, empty ones between them included."""
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return
        yield line
