"""Retention rules: the policy of ``checkpoint.keep``, or a component of the kind ``keep``. Touches no disk.

A checkpoint stays if one rule of the policy keeps it; over the budget the least recent go first. The newest stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from stagereg.base.crash_report import summarize_exception
from stagereg.base.option_text import option
from stagereg.base.providers import has, needs, providers
from stagereg.base.sizes import ByteSize
from stagereg.base.spec import check
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.errors import ConfigError, RegistryError, at_least, one_of
from stagereg.registry import register

_log = logging.getLogger(__name__)


@runtime_checkable
class KeepRule(Protocol):
    """What ``Checkpointer(keep=...)`` takes in the place of a number, and ``checkpoint/keep`` in a config.

    All ranks construct it. After each commit ``select`` is called on rank 0 alone, on the thread that saves. The newest
    checkpoint stays whatever it returns. If it raises, keeps nothing, or returns something else, none is deleted then.
    """

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]], /) -> Mapping[str, str]:
        """Return those that stay, by their paths, and why each does, in a few words for ``stagereg ls``.

        Args:
            checkpoints: the complete ones, the newest first, which is the new one.
            metrics: of each, by its path, the values that were logged before it was saved.
        """


@register("keep", "policy")
@dataclass(frozen=True)
class Keep:
    """Which complete checkpoints stay: all that one of the rules keeps, as far as they fit into the budget.

    Args:
        newest: so many of the newest, at least 1.
        every: for good, those whose step is a positive multiple of this.
        best: so many with the best values of ``metric`` among those that are there; of equal ones the newer.
        metric: the name under which rank 0 logs it for the step of a checkpoint, with :func:`stagereg.log`, before the
            step is saved. A checkpoint without the metric, or with NaN, is not one of the best.
        direction: ``"min"`` if the least values are the best, ``"max"`` for the greatest.
        budget: of all that stay together, such as ``"500GiB"``; the least recent go first, and the newest stays even
            if it is larger. While a checkpoint is written, the disk needs space for one more.

    Raises:
        ConfigError: a value is of no use.
    """

    newest: int = 2
    every: int | None = None
    best: int = 0
    metric: str | None = None
    direction: Literal["min", "max"] = "min"
    budget: ByteSize | None = None

    def __post_init__(self) -> None:
        at_least(1, option("checkpoint.keep.newest"), self.newest)
        at_least(1, option("checkpoint.keep.every"), 1 if self.every is None else self.every)
        at_least(0, option("checkpoint.keep.best"), self.best)
        one_of(option("checkpoint.keep.direction"), self.direction, ("min", "max"))
        if bool(self.best) != bool(self.metric) or not isinstance(self.metric, (str, type(None))):
            raise ConfigError(
                f"{option('checkpoint.keep.best')} and {option('checkpoint.keep.metric')} go together: how many stay, "
                f"and the name that rank 0 logs (stagereg.log), not best={self.best!r} and metric={self.metric!r}."
            )
        if self.best and not has("retention"):  # otherwise no checkpoint would have a metric
            raise ConfigError(f"{option('checkpoint.keep.best', str(self.best))} {needs('retention')}")
        if self.budget is not None:
            object.__setattr__(self, "budget", ByteSize(self.budget))

    @classmethod
    def of(cls, keep: int | KeepRule) -> Keep | GuardedRule:
        """Return what ``keep`` of a checkpointer means: a policy, how many of the newest, or another rule, guarded."""
        if isinstance(keep, GuardedRule) or type(keep) is Keep:
            return keep
        return GuardedRule(keep) if isinstance(keep, KeepRule) else cls(keep)

    def select(self, checkpoints: Iterable[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """Return the paths of those that stay, the newest first, and why each does. Arguments: as :class:`KeepRule`."""
        newest_first = sorted(checkpoints, key=lambda each: each.manifest.order, reverse=True)
        why: dict[str, list[str]] = {each.path: [] for each in newest_first}
        for each in newest_first[: self.newest]:
            why[each.path].append("newest")
        for each in newest_first:
            if self.every is not None and each.manifest.step > 0 and each.manifest.step % self.every == 0:
                why[each.path].append(f"every {self.every}")
        for module in self._raters():
            for path, reason in module.rate(self, newest_first, metrics).items():
                why[path].append(reason)
        stay: dict[str, str] = {}
        nbytes = 0
        for each in (each for each in newest_first if why[each.path]):
            nbytes += each.manifest.nbytes
            if stay and self.budget is not None and nbytes > self.budget:
                break
            stay[each.path] = "; ".join(why[each.path])
        return stay

    def _raters(self) -> Iterator[Any]:
        """Yield the module of the extension that rates checkpoints, if some are retained by a metric."""
        yield from providers("rating") if self.best else ()

    def warnings(self, made: Checkpoint, old: Sequence[Checkpoint]) -> Iterator[str]:
        """Yield what a user should learn when ``made`` is committed and ``old`` are no longer retained."""
        root = made.path.rpartition("/")[0]
        for module in self._raters():
            yield from module.warnings(self, root, old)
        if self.budget is not None and made.manifest.nbytes > self.budget:
            yield (
                f"one checkpoint in {root} has {made.manifest.nbytes:,} bytes, more than "
                f"{option('checkpoint.keep.budget', str(self.budget))}, so the newest one alone is kept."
            )


class GuardedRule:
    """A rule whose errors do not reach the save: all checkpoints stay, with one warning. Raises: ``ConfigError``."""

    def __init__(self, rule: KeepRule) -> None:
        if isinstance(rule, type):
            raise ConfigError(f"{option('checkpoint.keep')} is a class; call it: keep={rule.__name__}(...)")
        self.name = f"{type(rule).__module__}.{type(rule).__qualname__}"
        self._rule, self._warned = rule, False
        try:
            check("keep", type(rule).__name__, rule)
        except RegistryError as error:
            raise ConfigError(
                f"{option('checkpoint.keep')} must be a number, a stagereg.Keep or a rule: {error}"
            ) from None

    def select(self, checkpoints: Iterable[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """Return what the rule keeps, and the newest."""
        newest_first = sorted(checkpoints, key=lambda each: each.manifest.order, reverse=True)
        paths = [each.path for each in newest_first]
        try:
            kept = self._rule.select(newest_first, metrics) if paths else {}
            if not isinstance(kept, Mapping):
                wrong = f"it returned {kept!r:.100}, which is no mapping"
            elif bad := [item for item in kept.items() if item[0] not in paths or not isinstance(item[1], str)]:
                wrong = f"it returned {bad[0]!r:.200}, which is not the path of a checkpoint and a text"
            elif kept or not paths:
                return {**dict.fromkeys(paths[:1], "newest"), **kept}
            else:
                wrong = "it keeps none"
        except Exception as error:
            wrong = summarize_exception(error, __file__)
        if not self._warned:
            self._warned = True
            text = "stagereg: %s failed, %s: %s. While it does, none is deleted, and the disk may fill up."
            _log.warning(text, option("checkpoint.keep"), self.name, wrong)
        return dict.fromkeys(paths, f"{self.name} failed")
