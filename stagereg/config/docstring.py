"""Reads the help text of each option from docstrings.

Supports Google style (a section ``Args:``), NumPy style (``Parameters`` underlined) and reST fields (``:param x:``).
For a class, the docstrings of ``__init__``, the class and the base classes are read in this order. So a parameter
without documentation has the help text from a base class. A dataclass may use ``Attributes:`` instead of ``Args:``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

_TITLE = r"^(?i:(?:other )?parameters|params|(?:keyword )?arg(?:ument)?s|attributes)"
_NAMES = r"^(\*{0,2}\w+(?: *, *\*{0,2}\w+)*)"
_INDENTED = r"(?:\n(?:[ \t].*)?)*"

_STYLES = (
    (rf"{_TITLE}: *$({_INDENTED})", rf"{_NAMES} *(?:\(.*?\))? *:(?=\s|$)(.*{_INDENTED})"),
    (rf"{_TITLE} *\n-{{3,}} *$((?:\n(?!.+\n-{{3,}} *$).*)*)", rf"{_NAMES} *(?::.*)?$({_INDENTED})"),
    (r"\A([\s\S]*)\Z", rf"^:(?:param|parameter|arg|argument|key|keyword) +(?:[^:]* )?\*{{0,2}}(\w+) *:(.*{_INDENTED})"),
)
"""For Google, NumPy and reST: the pattern of the section with the items, and of the names and text of one item."""


def parameters(component: Any) -> dict[str, str]:
    """Return the help text of each documented parameter of a class or function, as one line per parameter."""
    texts = [inspect.getdoc(component)]
    if isinstance(component, type):  # the class and its bases, without object
        own = [vars(owner) for owner in component.__mro__[:-1]]
        texts = [text for of in own for text in (getattr(of.get("__init__"), "__doc__", ""), of.get("__doc__"))]
    found: dict[str, str] = {}
    for text in (inspect.cleandoc(text) for text in texts if text):
        for section, item in _STYLES:
            for body in re.findall(section, text, re.MULTILINE):
                for names, help_ in re.findall(item, textwrap.dedent(body), re.MULTILINE):
                    for name in re.findall(r"\w+", names):
                        found.setdefault(name, " ".join(help_.split()))
    return {name: help_ for name, help_ in found.items() if help_}
