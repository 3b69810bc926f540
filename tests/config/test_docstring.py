"""The description of a parameter is found in the docstring of its component, or of the class that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stagereg.config.docstring import parameters

GOOGLE = """Do it.

    Note: this is prose.

    Example:
        none: not a parameter.

    Args:
        one: the first,
            with more: of it.
        two (str, optional): the second.
        three, four: both of them.
        *args: the rest.

    Returns:
        nothing: at all.
"""

NUMPY = """Do it.

    Parameters
    ----------
    one : int
        the first,
        with more: of it.
    two
        the second.
    three, four : float, default 1.0
        both of them.
    *args
        the rest.

    Returns
    -------
    nothing
        at all.
"""

REST = """Do it.

    :param one: the first,
        with more: of it.
    :param str two: the second.
    :arg float three: both of them.
    :param four: both of them.
    :param args: the rest.
    :returns: nothing at all.
"""


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_each_style_is_read(text: str) -> None:
    def component() -> None: ...

    component.__doc__ = text
    assert parameters(component) == {
        "one": "the first, with more: of it.",
        "two": "the second.",
        "three": "both of them.",
        "four": "both of them.",
        "args": "the rest.",
    }
    component.__doc__ = text.splitlines()[0]
    assert parameters(component) == {}


@dataclass
class Base:
    """Args of the class are read.

    Attributes:
        kept: by the base.
        both: by the base.
    """

    kept: int
    both: int


class Child(Base):
    """Describes no parameter."""

    def __init__(self, kept: int, both: int, own: int) -> None:
        """Make it.

        Args:
            both: by the child.
            own: of the child.
        """


def test_init_class_and_bases_are_read_the_nearest_first() -> None:
    assert parameters(Child) == {"kept": "by the base.", "both": "by the child.", "own": "of the child."}
