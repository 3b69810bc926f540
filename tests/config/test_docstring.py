"""The description of a parameter is found in the docstring of its component, or of the class that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from stagereg.config.docstring import parameters


def described(one: int, two: str, three: float) -> None:
    """Do it.

    Note: this is prose.

    Example:
        none: not a parameter.

    Args:
        one: the first,
            with more: of it.

            And more.
        two (str, optional): the second.
        three, four: both of them.
        *args: the rest.

    Returns:
        nothing: at all.
    """


def test_names_and_texts_of_the_section_are_read() -> None:
    assert parameters(described) == {
        "one": "the first, with more: of it. And more.",
        "two": "the second.",
        "three": "both of them.",
        "four": "both of them.",
        "args": "the rest.",
    }
    assert parameters(lambda: None) == {}


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


def test_a_class_its_init_and_its_bases_are_read_the_nearest_first() -> None:
    assert parameters(Child) == {"kept": "by the base.", "both": "by the child.", "own": "of the child."}
