"""The description of a parameter is found in docstrings of each usual style."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from stagereg.config.docstring import parameters


def google(one: int, two: str, three: float) -> None:
    """Do it.

    Args:
        one: the first,
            with more: of it.

            And more.
        two (str, optional): the second.
        three, four: both of them.
        *args: the rest.
        **kwargs: the named rest.

    Returns:
        nothing: at all.
    """


def numpy(one: int, two: str, three: float) -> None:
    """Do it.

    Parameters
    ----------
    one : int
        the first,
        with more: of it.

        And more.
    two
        the second.
    three, four : float, default 1.0
        both of them.
    *args, **kwargs
        the rest.

    Returns
    -------
    nothing
        at all.
    """


def rest(one: int, two: str, three: float) -> None:
    """Do it.

    :param one: the first,
        with more: of it.

        And more.
    :param str two: the second.
    :arg float three: both of them.
    :param four: both of them.
    :returns: nothing at all.
    """


@pytest.mark.parametrize("function", [google, numpy, rest], ids=lambda f: f.__name__)
def test_each_style_is_read(function: Callable[..., None]) -> None:
    found = parameters(function)
    found = {name: text for name, text in found.items() if name not in ("args", "kwargs")}
    assert found == {
        "one": "the first, with more: of it. And more.",
        "two": "the second.",
        "three": "both of them.",
        "four": "both of them.",
    }


class Base:
    """Args of the class are read.

    Args:
        kept: by the base.
        both: by the base.
    """

    def __init__(self, kept: int, both: int) -> None: ...


class Child(Base):
    """Describes no parameter."""

    def __init__(self, kept: int, both: int, own: int) -> None:
        """Make it.

        Args:
            both: by the child.
            own: of the child.
        """


def test_a_class_its_init_and_its_bases_are_read_the_nearest_first() -> None:
    assert parameters(Child) == {"kept": "by the base.", "both": "by the child.", "own": "of the child."}
    assert parameters(Net) == {"port": "where it listens."}


@dataclass
class Net:
    """A net.

    Attributes:
        port: where it listens.
    """

    port: int = 1


def test_a_docstring_that_describes_no_parameter_gives_nothing() -> None:
    def plain() -> None:
        """Note: this is prose.

        Example:
            one: not a parameter.
        """

    @dataclass
    class Bare:
        port: int = 1

    assert parameters(plain) == parameters(Bare) == parameters(lambda: None) == {}
