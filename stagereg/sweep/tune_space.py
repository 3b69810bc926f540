"""What a search may vary: keys of a program's config, the values each can take, and when it is asked for.

Every value is held as the text that stands in an override, so what is compared, stored and run is the same thing. What
:mod:`stagereg.sweep.candidates` chooses the keys and values; searching is for ``study``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagereg.sweep.program import Composed
from stagereg.sweep.search_space import Values, text

__all__ = ["Parameter", "Space"]

_ENUMERATED = 4096
"""Combinations that are looked at for one that has not been tried."""


@dataclass(frozen=True)
class Parameter:
    """One key to vary.

    Attributes:
        name: of it in a study; the key, and more where several components mean different things by it.
        key: what stands before the equals sign of its override.
        values: what it may be.
        group: the config group whose choice decides whether it is asked for; empty where it always is.
        options: the choices of that group with which it is.
    """

    name: str
    key: str
    values: Values
    group: str = ""
    options: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The key as it is in the config."""
        return self.key.lstrip("+")

    def plain(self) -> dict[str, Any]:
        """What it is, as JSON has it."""
        return {"key": self.key, "values": str(self.values), "group": self.group, "options": list(self.options)}


@dataclass(frozen=True)
class Space:
    """All keys to vary, groups before the options that depend on them.

    Attributes:
        parameters: the keys.
        program: the config of the program by itself.
        left_out: what might be expected here and is not, and why, one line each.
    """

    parameters: tuple[Parameter, ...]
    program: Composed
    left_out: tuple[str, ...] = ()

    def choose(self, ask: Callable[[Parameter], str]) -> dict[str, str]:
        """Ask for the value of every parameter that applies to what was chosen so far; values by key."""
        chosen: dict[str, str] = {}
        for parameter in self.parameters:
            if self._applies(parameter, chosen):
                chosen[parameter.key] = ask(parameter)
        return chosen

    def defaults(self) -> dict[str, str]:
        """What the program takes by itself for the parameters that apply to it; nothing where it has no such key."""
        chosen = self.choose(lambda parameter: self.default(parameter) or "")
        return {p.key: chosen[p.key] for p in self.applying(chosen) if self.default(p) is not None}

    def default(self, parameter: Parameter) -> str | None:
        """What the program takes by itself, or ``None`` where it has no such key."""
        if parameter.path in self.program.choices:
            return self.program.choices[parameter.path]
        return text(self.program.get(parameter.path)) if self.program.has(parameter.path) else None

    def applying(self, chosen: Mapping[str, str]) -> list[Parameter]:
        """The parameters that ``chosen`` has a value of."""
        return [p for p in self.parameters if p.key in chosen and self._applies(p, chosen)]

    def overrides(self, chosen: Mapping[str, str]) -> tuple[str, ...]:
        """The overrides that make the program run with ``chosen``; not those that would change nothing."""
        return tuple(f"{p.key}={chosen[p.key]}" for p in self.applying(chosen) if not self._is_default(p, chosen))

    def combinations(self) -> Iterator[dict[str, str]]:
        """Every combination there is, one after the other. Raises: ``ValueError`` where there is no end."""
        return self._extended({}, self.parameters)

    def untried(self, tried: Iterable[Mapping[str, str]]) -> list[dict[str, str]] | None:
        """Combinations that are not among ``tried``, the first thousands; ``None`` where there is no end of them."""
        if any(not parameter.values.finite for parameter in self.parameters):
            return None
        before = {tuple(sorted(one.items())) for one in tried}
        some = itertools.islice(self.combinations(), _ENUMERATED + len(before))
        return [one for one in some if tuple(sorted(one.items())) not in before]

    def plain(self) -> dict[str, Any]:
        """What it is, as JSON has it: two spaces are the same where this is."""
        return {parameter.name: parameter.plain() for parameter in self.parameters}

    def _applies(self, parameter: Parameter, chosen: Mapping[str, str]) -> bool:
        return not parameter.group or self._choice(parameter.group, chosen) in parameter.options

    def _choice(self, group: str, chosen: Mapping[str, str]) -> str:
        return chosen.get(group, self.program.choices.get(group, ""))

    def _is_default(self, parameter: Parameter, chosen: Mapping[str, str]) -> bool:
        # The config of the program has only the options of the component that it chooses.
        group = parameter.group
        if group and self._choice(group, chosen) != self.program.choices.get(group):
            return False
        return self.default(parameter) == chosen[parameter.key]

    def _extended(self, chosen: dict[str, str], left: tuple[Parameter, ...]) -> Iterator[dict[str, str]]:
        if not left:
            yield chosen
        elif not self._applies(left[0], chosen):
            yield from self._extended(chosen, left[1:])
        else:
            for value in left[0].values.texts():
                yield from self._extended({**chosen, left[0].key: value}, left[1:])
