"""What a docstring says about each parameter: the help text of the options.

Read are Google's style (a section ``Args:``), NumPy's (``Parameters`` underlined) and reST's fields (``:param x:``).
For a class, its ``__init__`` and the class itself are read, then its bases in the order of inheritance, so a parameter
that a class only passes on keeps the words of the class that explained it. A dataclass may say ``Attributes:`` instead.
Anything else in a docstring is left alone, and a docstring in no style at all simply says nothing.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["parameters"]

_SECTIONS = (
    "args",
    "arguments",
    "attributes",
    "keyword args",
    "keyword arguments",
    "other parameters",
    "parameters",
    "params",
)
_NAMES = r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)"
_GOOGLE = re.compile(_NAMES + r"\s*(?:\(.*?\))?\s*:(?:\s+(.*)|$)")
_NUMPY = re.compile(_NAMES + r"\s*(?::.*)?$")
_REST = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")


def parameters(component: Any) -> dict[str, str]:
    """Return what the docstrings of a class or function say about its parameters, each as one line of text."""
    told: dict[str, str] = {}
    for text in _docstrings(component):
        lines = inspect.cleandoc(text).splitlines()
        for name, words in (*_google(lines), *_numpy(lines), *_rest(lines)):
            told.setdefault(name, words)
    return {name: words for name, words in told.items() if words}


def _docstrings(component: Any) -> Iterator[str]:
    """The docstrings that may explain the parameters, the nearest first."""
    if not isinstance(component, type):
        yield inspect.getdoc(component) or ""
        return
    for owner in component.__mro__[:-1]:  # the last is object
        yield getattr(vars(owner).get("__init__"), "__doc__", None) or ""
        yield vars(owner).get("__doc__") or ""


def _google(lines: list[str]) -> Iterator[tuple[str, str]]:
    for start, line in enumerate(lines):
        if line.endswith(":") and line[:-1].strip().lower() in _SECTIONS and not line[0].isspace():
            yield from _items(_indented(lines[start + 1 :]), _GOOGLE)


def _numpy(lines: list[str]) -> Iterator[tuple[str, str]]:
    headers = [i for i, line in enumerate(lines[1:]) if re.fullmatch(r"-{3,}\s*", line) and lines[i].strip()]
    for header, end in itertools.pairwise([*headers, len(lines)]):
        if lines[header].strip().lower() in _SECTIONS:
            yield from _items(lines[header + 2 : end], _NUMPY)


def _rest(lines: list[str]) -> Iterator[tuple[str, str]]:
    for start, line in enumerate(lines):
        if found := _REST.match(line.strip()):
            yield found[1], _joined([found[2], *_indented(lines[start + 1 :], below=_indent(line))])


def _items(lines: Iterable[str], head: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Each parameter of a section and its words; what is indented deeper than its head belongs to it."""
    lines = list(lines)
    margin = min((_indent(line) for line in lines if line.strip()), default=0)
    names, words = "", list[str]()
    for line in [*lines, " " * margin + ":"]:  # a head of nobody ends the last one
        if _indent(line) > margin or not line.strip():
            words.append(line)
            continue
        for name in filter(None, re.split(r"[\s,*]+", names)):
            yield name, _joined(words)
        found = head.match(line.strip())
        names, words = (found[1], [found[2] if found.lastindex == 2 else ""]) if found else ("", [])


def _indented(lines: list[str], below: int = 0) -> Iterator[str]:
    """The first ``lines`` that are indented deeper than ``below``, empty ones between them included."""
    for line in lines:
        if line.strip() and _indent(line) <= below:
            return
        yield line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
