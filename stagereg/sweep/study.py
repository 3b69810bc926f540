"""The search itself: Optuna chooses what to try next, and keeps what came of it in a database.

One study, one process at a time. Trials are asked for and finished one by one, so the one under way when a search is
ended is all that is lost of it; the next search on the same database goes on from there. A study belongs to one space
and one goal: what was measured for another is refused, not mixed in.

This is the only module that imports Optuna, any version from 2.10 on.
"""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stagereg.errors import ConfigError
from stagereg.sweep.search_space import Choices, Ints
from stagereg.sweep.tune_space import Parameter, Space

__all__ = ["Study", "Trial", "require"]

_NAME = "stagereg"
_STARTUP = 6
"""Trials that are drawn at random before Optuna's sampler has enough to learn from; its own ten are half a search."""
_FINISHED = ("completed", "failed")


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: in the study, from 0 on; the program's defaults are tried first.
        chosen: values by key.
        overrides: what the program was run with, beside what every run is given.
        status: ``"completed"``, ``"failed"``, or what it is until then: ``"interrupted"``.
        value: what was measured; ``None`` where it failed.
        error: why it failed, one line.
        seconds: it took.
        figures: all that was measured.
    """

    number: int
    chosen: dict[str, str]
    overrides: tuple[str, ...]
    status: str = "interrupted"
    value: float | None = None
    error: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


def require() -> Any:
    """Return the module ``optuna``, with its log silenced.

    Raises:
        ConfigError: it is not installed.
    """
    with _quiet():
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"Searching needs Optuna ({error}): pip install 'hydra-stagereg[tune]'") from None
        optuna.logging.set_verbosity(logging.ERROR)
    return optuna


class Study:
    """A study in a database.

    Args:
        database: an SQLite file, made if it is not there; or a URL of another database, with ``://``.
        space: what to vary.
        goal: what is measured, and all else that makes values comparable, by name; as JSON has it.
        maximize: whether greater values are better.
        seed: of the sampler.

    Raises:
        ConfigError: Optuna is not installed, the database cannot be used, or holds a study of another space or goal.
    """

    def __init__(self, database: str, space: Space, objective: Mapping[str, Any], maximize: bool, seed: int) -> None:
        self._optuna = require()
        self._space = space
        self._maximize = maximize
        try:
            with _quiet():
                self._study = self._open(database, seed)
                self._take(database, {"space": space.plain(), **objective})
                self._ended = self._kept()
        except ConfigError:
            raise
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"Optuna {self._optuna.__version__} cannot use {database} as its database: {why}\n"
                "Name another with --database, or another directory with --output."
            ) from error
        self._random = random.Random(f"{seed} {len(self.tried())}")

    def tried(self) -> list[Trial]:
        """Every trial that has come to its end, well or not, in their order."""
        return list(self._ended)

    def best(self) -> Trial | None:
        """The best trial, the first of several; ``None`` while there is none."""
        measured = [one for one in self.tried() if one.value is not None]
        sign = -1 if self._maximize else 1
        return min(measured, key=lambda one: sign * (one.value or 0.0), default=None)

    def ask(self) -> Trial | None:
        """What to try next: the defaults first, then what Optuna chooses; ``None`` when everything was tried.

        What was tried already is not tried again; where Optuna chooses it, another combination is drawn.
        """
        tried = [one.chosen for one in self.tried()]
        with _quiet():
            if not tried:
                return self._given(self._space.defaults())
            others = self._space.untried(tried)
            if others is not None and not others:
                return None
            drawn = self._drawn()
            if others is None or drawn.chosen not in tried:
                return drawn
            self._fail(drawn.number)
            return self._given(self._random.choice(others))

    def tell(self, tried: Trial) -> None:
        """Keep what came of a trial; one that was interrupted is as good as not asked for."""
        with _quiet():
            self._trials.pop(tried.number).set_user_attr(_NAME, asdict(tried))
            if tried.value is None:
                self._fail(tried.number)
            else:
                self._study.tell(tried.number, tried.value)
        if tried.status in _FINISHED:
            self._ended.append(tried)

    def _open(self, database: str, seed: int) -> Any:
        optuna, url = self._optuna, database
        if "://" not in database:
            Path(database).parent.mkdir(parents=True, exist_ok=True)
            url = f"sqlite:///{Path(database).resolve()}"
        # Optuna 2.10 leaves the commit of its schema's version to SQLAlchemy, which does it by itself only before 2.0.
        kept = optuna.storages.RDBStorage(url, engine_kwargs={"isolation_level": "AUTOCOMMIT"})
        try:
            study = optuna.load_study(study_name=_NAME, storage=kept)
        except KeyError:
            direction = "maximize" if self._maximize else "minimize"
            study = optuna.create_study(study_name=_NAME, storage=kept, direction=direction)
        # The same seed again would draw the same trials again.
        seen = len(study.get_trials(deepcopy=False))
        study.sampler = optuna.samplers.TPESampler(seed=seed + seen, n_startup_trials=_STARTUP)
        self._trials: dict[int, Any] = {}
        return study

    def _take(self, database: str, belongs: dict[str, Any]) -> None:
        """Make the study this search's, or see that it is."""
        before = self._study.user_attrs.get(_NAME)
        if before is None and not self._study.get_trials(deepcopy=False):
            self._study.set_user_attr(_NAME, belongs)
        elif before != belongs:
            raise ConfigError(
                f"{database} holds a search of another kind:\n{_difference(before or {}, belongs)}\n"
                "Its values cannot be mixed with these. Ask for the same again, or name another --output."
            )
        # What a search that was killed has left.
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name in ("RUNNING", "WAITING"):
                self._fail(self._study.ask().number if trial.state.name == "WAITING" else trial.number)

    def _kept(self) -> list[Trial]:
        """What searches before this one have tried."""
        kept = [trial.user_attrs.get(_NAME) for trial in self._study.get_trials(deepcopy=False)]
        every = [Trial(**{**one, "overrides": tuple(one["overrides"])}) for one in kept if one]
        return [one for one in every if one.status in _FINISHED]

    def _drawn(self) -> Trial:
        """What Optuna chooses."""
        trial = self._study.ask()
        return self._begun(trial, self._space.choose(lambda parameter: _suggested(trial, parameter)))

    def _given(self, chosen: Mapping[str, str]) -> Trial:
        """A trial of values that are chosen already; Optuna gets only those that it could have chosen."""
        known = [p for p in self._space.applying(chosen) if p.values.has(chosen[p.key])]
        self._study.enqueue_trial({p.name: _number(p, chosen[p.key]) for p in known})
        trial = self._study.ask()
        for parameter in known:
            _suggested(trial, parameter)
        return self._begun(trial, dict(chosen))

    def _begun(self, trial: Any, chosen: dict[str, str]) -> Trial:
        self._trials[trial.number] = trial
        return Trial(trial.number, chosen, self._space.overrides(chosen))

    def _fail(self, number: int) -> None:
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)


def _suggested(trial: Any, parameter: Parameter) -> str:
    values = parameter.values
    if isinstance(values, Choices):
        return str(trial.suggest_categorical(parameter.name, list(values.values)))
    if isinstance(values, Ints):
        return str(trial.suggest_int(parameter.name, values.low, values.high, step=values.step, log=values.log))
    return repr(float(trial.suggest_float(parameter.name, values.low, values.high, log=values.log)))


def _number(parameter: Parameter, value: str) -> str | int | float:
    """A value as Optuna has it."""
    if isinstance(parameter.values, Choices):
        return value
    return int(value) if isinstance(parameter.values, Ints) else float(value)


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What two searches do not have in common, one line each."""
    lines = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if name == "space" and isinstance(old, dict) and isinstance(new, dict):
            of = [(f"the values of {key}", _values(old.get(key)), _values(new.get(key))) for key in {**new, **old}]
            lines += [f"  {what}: it has {one}, this asks for {other}" for what, one, other in of if one != other]
        elif old != new:
            lines.append(f"  {name}: it has {_plain(old)}, this asks for {_plain(new)}")
    return "\n".join(lines)


def _values(parameter: Any) -> str:
    if not isinstance(parameter, dict):
        return "none"
    where = f" with {parameter['group']}={','.join(parameter['options'])}" if parameter.get("group") else ""
    return f"{parameter.get('values')}{where}"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) or "-" if isinstance(value, list) else "none" if value is None else str(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out warnings: of Optuna's experiments, and of what it and the libraries below it think of each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
