"""Values that a search may choose from, and how ``--over KEY=...`` names them: in the grammar of Hydra's sweeps.

A value is the text that stands behind the equals sign of an override. Hydra's own parser reads the grammar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stagereg.errors import ConfigError

__all__ = ["Choices", "Floats", "Ints", "SearchSpace", "Values", "refuse_sweeps", "search_space", "text"]

_WORD = re.compile(r"[A-Za-z_][\w./@-]*", re.ASCII)
_NO_WORDS = ("null", "true", "false", "nan", "inf")
"""What Hydra reads as something else than a text."""
_HOW = "Write its values as in KEY=a,b  KEY=choice(1,2,4)  KEY=range(1,9,2)  KEY=int(interval(1,64))."


@dataclass(frozen=True)
class Choices:
    """Values without an order."""

    values: tuple[str, ...]
    pattern: Any = None

    finite = True

    @classmethod
    def of(cls, values: Iterable[str]) -> Choices:
        """Those values, each once."""
        return cls(tuple(dict.fromkeys(values)))

    def texts(self) -> Sequence[str]:
        """All of them."""
        return self.values

    def has(self, value: str) -> bool:
        """Whether ``value`` is one of them."""
        return value in self.values

    def matching(self, names: list[str]) -> Choices:
        """The names that ``glob(..)`` stands for; itself where it was none."""
        return self if self.pattern is None else Choices(tuple(self.pattern.filter(names)))

    def __str__(self) -> str:
        return ",".join(self.values)


@dataclass(frozen=True)
class Ints:
    """Whole numbers from ``low`` to ``high``, both among them; ``log`` where their order of magnitude counts."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    finite = True

    def texts(self) -> Sequence[str]:
        """All of them."""
        return [str(value) for value in range(self.low, self.high + 1, self.step)]

    def has(self, value: str) -> bool:
        """Whether ``value`` is one of them."""
        whole = re.fullmatch(r"-?\d+", value)
        return bool(whole) and int(value) in range(self.low, self.high + 1, self.step)

    def __str__(self) -> str:
        every = f" in steps of {self.step}" if self.step != 1 else ""
        return f"{self.low} to {self.high}{every}{', by magnitude' if self.log else ''}"


@dataclass(frozen=True)
class Floats:
    """Numbers from ``low`` to ``high``; ``log`` where their order of magnitude counts."""

    low: float
    high: float
    log: bool = False

    finite = False

    def texts(self) -> Sequence[str]:
        """Raises ``ValueError``: there is no end of them."""
        raise ValueError("an interval of real numbers has no end of values")

    def has(self, value: str) -> bool:
        """Whether ``value`` is one of them."""
        try:
            return self.low <= float(value) <= self.high
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}{', by magnitude' if self.log else ''}"


Values = Choices | Ints | Floats


@dataclass(frozen=True)
class SearchSpace:
    """One ``--over``.

    Attributes:
        given: as the user wrote it.
        key: what stands before the equals sign.
        values: what the key may be.
    """

    given: str
    key: str
    values: Values

    @property
    def path(self) -> str:
        """The key as it is in the config."""
        return self.key.lstrip("+")


def search_space(given: str, default: Any = None) -> SearchSpace:
    """Read one ``--over``; ``default`` is what the program has there, which decides whether an interval is of integers.

    Raises:
        ConfigError: it cannot be read, or names fewer than two values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(given)
    except HydraException as error:
        raise ConfigError(f"--over {given} cannot be read: {str(error).splitlines()[0]}. {_HOW}") from error
    if parsed.is_delete() or "=" not in given:
        raise ConfigError(f"--over {given} names no values. {_HOW}")
    key = given.partition("=")[0]
    if not parsed.is_sweep_override():
        raise ConfigError(f"--over {given} is one value: give it as an override, without --over. {_HOW}")
    values = _interval(given, parsed.value(), default) if parsed.is_interval_sweep() else _discrete(given, parsed)
    return SearchSpace(given, key, values)


def refuse_sweeps(overrides: Iterable[str]) -> None:
    """Refuse overrides with several values.

    Raises:
        ConfigError: there is one, or one that cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for given in overrides:
        try:
            parsed = OverridesParser.create().parse_override(given)
        except HydraException as error:
            raise ConfigError(f"{given} is no override: {str(error).splitlines()[0]}.") from error
        if parsed.is_sweep_override():
            raise ConfigError(f"{given} has several values: to search among them, write --over {given}")


def text(value: Any) -> str:
    """A value of a config as it stands in an override, quoted where Hydra would read something else."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if hasattr(value, "with_quotes"):
        value = value.text
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{text(key)}:{text(item)}' for key, item in value.items())}}}"
    if not isinstance(value, str):
        return str(value)
    plain = _WORD.fullmatch(value) and value.lower() not in _NO_WORDS
    return value if plain else str(QuotedString(value, Quote.single).with_quotes())


def _interval(given: str, sweep: Any, default: Any) -> Values:
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    if not low < high or not math.isfinite(high - low) or (log and low <= 0):
        raise ConfigError(
            f"--over {given}: an interval goes from a smaller number to a greater one{', above 0' * log}."
        )
    whole = isinstance(default, int) and not isinstance(default, bool)
    if isinstance(low, int) or whole:
        return Ints(math.ceil(low), math.floor(high), log=log)
    return Floats(float(low), float(high), log)


def _discrete(given: str, parsed: Any) -> Values:
    from hydra.core.override_parser.types import Glob

    value = parsed.value()
    if isinstance(value, Glob):
        return Choices((), value)
    if parsed.is_range_sweep() and isinstance(steps := value.range(), range) and steps.step > 0 and len(steps) > 1:
        return Ints(steps[0], steps[-1], steps.step, "log" in value.tags and steps.step == 1 and steps[0] > 0)
    found = Choices.of(parsed.sweep_iterator(text))
    if len(found.values) < 2:
        raise ConfigError(f"--over {given} names fewer than two values. {_HOW}")
    return found
