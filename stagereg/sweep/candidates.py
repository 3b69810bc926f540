"""The space of a search: which keys of a program are worth varying, and over what.

Without options these are the stagers there are, the options of each that have a finite and sensible range, and
the checkpoint interval. ``--over`` adds keys, or replaces what a key may be, in Hydra's own grammar: ``a,b``,
``choice(..)``, ``range(..)``, ``interval(..)``, ``glob(..)`` over the options of a kind, with ``int(..)`` and
``tag(log, ..)``. What the user gives as an override is held fixed. An option of a component is asked for only where the
component chosen has it.

Reading ``--over`` is for :mod:`stagereg.sweep.search_space`.
"""

from __future__ import annotations

import enum
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Union

from omegaconf import MISSING

import stagereg.config.schema as schema
import stagereg.machine as machine
import stagereg.registry as registry
from stagereg.config.schema import Option
from stagereg.errors import ConfigError, RegistryError, UnknownNameError, nearest
from stagereg.registry import Entry
from stagereg.sweep.program import Composed
from stagereg.sweep.search_space import Choices, SearchSpace, Values, search_space, text
from stagereg.sweep.tune_space import Parameter, Space

__all__ = ["space"]

_INTERVAL = "checkpoint.every"
_UNTRUSTED = {"torch_default": "it breaks promises that the others keep; stagereg show stager/torch_default"}
"""Stagers that are tried only where they are named, and why."""


def _threads() -> tuple[int, ...]:
    """Powers of two up to the cores: more threads than these cannot copy faster."""
    cores = machine.cores()
    return tuple(sorted({1 << power for power in range(cores.bit_length())} | {cores}))


_NUMBERS: dict[str, Callable[[], tuple[int, ...]]] = {
    "threads": _threads,
    # Each copy costs as much host memory as the state; a fourth would only hide that writing cannot keep up.
    "max_in_flight": lambda: (1, 2, 3),
}
"""Options that are numbers and whose sensible values are known."""
_CHECKS = ("type_check", "verify")
"""Options that only check more: they cost time, so a search would do nothing but turn them off."""


def space(
    program: Composed, fixed: Iterable[str], given: Iterable[str], only: bool = False, interval: bool = False
) -> Space:
    """What to vary of a program; imports the components whose options are varied.

    Args:
        program: its config.
        fixed: the overrides it is always run with.
        given: of ``--over``.
        only: vary nothing but what is given.
        interval: whether the checkpoint interval is judged by what it costs, so that longer ones than the program's
            are tried too.

    Raises:
        ConfigError: what is given cannot be read or is no key of the program, or nothing is left to vary.
        RegistryError: a component that was named cannot be loaded.
    """
    held = {_path(given): given for given in fixed}
    added = [search_space(one, program.get(one.partition("=")[0].lstrip("+"))) for one in given]
    _check(added, program, held)
    builder = _Builder(program, held, {one.path: one for one in added}, only)
    groups = [builder.group(one) for one in added if one.path in program.choices]
    if not any(group.path == "stager" for group in groups) and not only:
        groups += builder.stagers()
    options = [p for kind in builder.kinds() for p in builder.options(kind, groups)]
    others = [Parameter(one.key, one.key, one.values) for one in added if builder.is_free(one.path)]
    if not only and _INTERVAL not in builder.given:
        others += builder.interval(interval)
    every = (*groups, *options, *others)
    if not every:
        raise ConfigError(
            "There is nothing to vary: the program has no stager that is not held fixed. "
            "Name keys and their values, as in --over checkpoint.every=25,50,100."
        )
    return Space(every, program, tuple(builder.left_out))


class _Builder:
    """Makes parameters, and notes what it leaves out."""

    def __init__(
        self, program: Composed, held: Mapping[str, str], given: Mapping[str, SearchSpace], only: bool
    ) -> None:
        self.program = program
        self.held = held
        self.given = given
        self.only = only
        self.left_out: list[str] = []

    def group(self, one: SearchSpace) -> Parameter:
        """A config group whose options were named."""
        if one.path not in registry.kinds():
            if isinstance(one.values, Choices) and one.values.pattern:
                kinds = ", ".join(_kinds(self.program))
                raise ConfigError(
                    f"--over {one.given}: glob(..) is for {kinds}; write out the options of other groups."
                )
            return Parameter(one.key, one.key, one.values)
        names = registry.names(one.path)
        values = one.values.matching(names) if isinstance(one.values, Choices) else one.values
        if not values.texts():
            raise ConfigError(f"--over {one.given} matches no {one.path}. There is: {', '.join(names)}")
        for name in values.texts():
            # What the registry does not know may be a preset in the program's own folder.
            if name not in names and (near := nearest(name, names)):
                raise UnknownNameError(f"--over {one.given}: no {one.path} named {name!r}.{near}")
        return Parameter(one.key, one.key, values)

    def kinds(self) -> list[str]:
        """The kinds some of whose options may be varied."""
        asked = {path.partition(".")[0] for path in self.given if "." in path} | (
            {"stager"} if not self.only else set()
        )
        return [kind for kind in _kinds(self.program) if kind in asked]

    def stagers(self) -> list[Parameter]:
        """The stagers there are, unless the program has none or one is held fixed."""
        if "stager" not in self.program.choices or "stager" in self.held:
            return []
        names = [name for name in registry.names("stager") if self._is_candidate(name)]
        default = self.program.choices["stager"]
        # The program's own is a candidate whatever it is: it is what the others are compared with.
        return [Parameter("stager", "stager", Choices.of([default, *names]))] if {*names} - {default} else []

    def interval(self, judged: bool) -> list[Parameter]:
        """The steps from one checkpoint to the next: shorter than the program's, and longer where that is judged."""
        every = self.program.get(_INTERVAL)
        if _INTERVAL in self.held or isinstance(every, bool) or not isinstance(every, int) or every < 1:
            return []
        longer = (2 * every, 4 * every) if judged else ()
        steps = sorted({max(1, every // 4), max(1, every // 2), every, *longer})
        return [Parameter(_INTERVAL, _INTERVAL, Choices(tuple(map(str, steps))))] if len(steps) > 1 else []

    def options(self, kind: str, groups: Iterable[Parameter]) -> list[Parameter]:
        """The options of the components of one kind that may be chosen, those that mean the same as one parameter."""
        group = next((g for g in groups if g.path == kind), None)
        names = group.values.texts() if group else (self.program.choices[kind],)
        meant: dict[tuple[str, Values], list[str]] = {}
        fields: set[str] = set()
        for name in names:
            entry = self._entry(kind, name)
            of = schema.options(entry.load()) if entry else {}
            fields |= of.keys()
            for key, values in self._values(kind, of):
                meant.setdefault((key, values), []).append(name)
        for path, one in self.given.items():
            if path.startswith(f"{kind}.") and path.split(".")[1] not in fields:
                field = path.split(".")[1]
                raise ConfigError(
                    f"--over {one.given}: no {kind} that is tried takes {field!r} ({', '.join(names)})."
                    f"{nearest(field, fields)}"
                )
        keys = [key for key, _ in meant]
        return [
            Parameter(key if keys.count(key) == 1 else f"{key} of {', '.join(having)}", key, values, kind, (*having,))
            for (key, values), having in sorted(meant.items(), key=lambda item: item[0][0])
        ]

    def is_free(self, path: str) -> bool:
        """Whether a given key is neither a group nor an option of a component."""
        return path not in self.program.choices and path.partition(".")[0] not in _kinds(self.program)

    def _entry(self, kind: str, name: str) -> Entry | None:
        """What a choice stands for: a component, or a preset of one in the program's own folder, where it is in use."""
        if name in registry.names(kind) or "@" in name:
            return registry.find(kind, name)
        target = self.program.get(f"{kind}._target_") if name == self.program.choices[kind] else None
        return registry.find_target(target) if isinstance(target, str) else None

    def _values(self, kind: str, of: Mapping[str, Option]) -> Iterator[tuple[str, Values]]:
        for path, one in self.given.items():
            if path.startswith(f"{kind}.") and path.split(".")[1] in of:
                yield one.key, one.values
        if kind != "stager" or self.only:
            return
        for name, option in of.items():
            key = f"{kind}.{name}"
            if key not in self.given and key not in self.held and name not in _CHECKS and (found := _known(option)):
                yield key, found

    def _is_candidate(self, name: str) -> bool:
        """Whether a stager is tried without having been named; the reason against it is noted."""
        why = _UNTRUSTED.get(name, "")
        try:
            of = schema.options(registry.find("stager", name).load()) if not why else {}
        except RegistryError as error:
            why = str(error).splitlines()[0]
        if not why:
            wanted = [key.split(".")[1] for key in self.held if key.startswith("stager.")]
            foreign = [field for field in wanted if field not in of]
            needs = [o.name for o in of.values() if o.default == MISSING and o.name not in wanted]
            why = f"it takes no {foreign[0]}" if foreign else f"it needs a value for {needs[0]}" if needs else ""
        if why and name != self.program.choices["stager"]:
            self.left_out.append(f"stager={name}: {why}")
        return not why


def _kinds(program: Composed) -> list[str]:
    """The kinds of the registry that the program chooses one of."""
    return [kind for kind in registry.kinds() if kind in program.choices]


def _known(option: Option) -> Values | None:
    """The values of an option of which there are few, with its default among them; ``None`` if unknown."""
    default = text(option.default)
    if option.name == "pin":
        # Without an accelerator it changes nothing; with one, None means to pin.
        return Choices((default, "false")) if _accelerated() and default != "false" else None
    if option.name in _NUMBERS and isinstance(option.default, int):
        return Choices(tuple(map(str, sorted({*_NUMBERS[option.name](), option.default}))))
    found = list(_choices(option.hint))
    return Choices.of([default, *found]) if len({default, *found}) > 1 and found else None


def _accelerated() -> bool:
    import torch

    return torch.cuda.is_available()


def _choices(hint: Any) -> Iterator[str]:
    """The texts of all values of a type that has a list of them; none of one that has not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        yield from ("false", "true")
    elif hint is type(None):
        yield "null"
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield from (text(member.name) for member in hint)
    elif origin is Literal:
        yield from map(text, arguments)
    elif origin in (Union, types.UnionType):
        every = [list(_choices(argument)) for argument in arguments]
        if all(every):
            yield from itertools.chain.from_iterable(every)


def _check(added: list[SearchSpace], program: Composed, held: Mapping[str, str]) -> None:
    known = program.keys()
    for one in added:
        if one.path in held:
            raise ConfigError(
                f"{held[one.path]} holds fixed what --over {one.given} is to vary: leave one of them out."
            )
        if [other.path for other in added].count(one.path) > 1:
            raise ConfigError(f"--over {one.path} is given twice: write all its values into one.")
        of_a_kind = one.path.partition(".")[0] in _kinds(program)
        if not one.key.startswith("+") and not of_a_kind and one.path not in known:
            raise ConfigError(
                f"--over {one.given}: the program has no {one.path!r}.{nearest(one.path, known)} "
                f"A key that it is to get is written +{one.path}."
            )


def _path(given: str) -> str:
    return given.lstrip("+~").partition("=")[0].partition("@")[0]
