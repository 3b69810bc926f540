"""What a docstring says about each parameter: the help text of the options.

Read is Google's style, a section ``Args:``; a dataclass may have ``Attributes:`` instead. For a class, its ``__init__``
and the class itself are read, then its bases in the order of inheritance, so a parameter that a class only passes on
keeps the help of the class that explained it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

_INDENTED = r"(?:\n(?:[ \t].*)?)*"
_SECTION = re.compile(rf"^(?:(?:Keyword )?Arg(?:ument)?s|Attributes): *$({_INDENTED})", re.MULTILINE)
_ITEM = re.compile(rf"^(\*{{0,2}}\w+(?: *, *\*{{0,2}}\w+)*) *(?:\(.*?\))? *:(?=\s|$)(.*{_INDENTED})", re.MULTILINE)
"""The names and the text of one item of a section."""


def parameters(component: Any) -> dict[str, str]:
    """Return what the docstrings of a class or function say about its parameters, each as one line of text."""
    texts = [inspect.getdoc(component)]
    if isinstance(component, type):  # the nearest first; the last class is object
        own = [vars(owner) for owner in component.__mro__[:-1]]
        texts = [text for of in own for text in (getattr(of.get("__init__"), "__doc__", ""), of.get("__doc__"))]
    found: dict[str, str] = {}
    for text in (inspect.cleandoc(text) for text in texts if text):
        for body in _SECTION.findall(text):
            for names, help_ in _ITEM.findall(textwrap.dedent(body)):
                for name in re.findall(r"\w+", names):
                    found.setdefault(name, " ".join(help_.split()))
    return {name: help_ for name, help_ in found.items() if help_}
