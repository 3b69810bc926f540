"""Retention rules: the policy of ``checkpoint.keep``, or a component of the kind ``keep``. Does not access a disk.

A checkpoint is retained if it is the newest or a rule selects it. If the budget is exceeded, the oldest are deleted.
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
    """The protocol of custom retention rules, for ``Checkpointer(keep=...)`` or ``checkpoint/keep`` in a config.

    All ranks construct the rule. After each commit rank 0 alone calls ``select``, on the save thread. The newest
    checkpoint is always retained. If ``select`` raises an error, or returns nothing or a value of another type, no
    checkpoint is deleted.
    """

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]], /) -> Mapping[str, str]:
        """Return the paths of the checkpoints to retain, each with a short reason for ``stagereg ls``.

        Args:
            checkpoints: the complete checkpoints, newest first, including the new one.
            metrics: by the path of each checkpoint, the values that were logged before it was saved.
        """


@register("keep", "policy")
@dataclass(frozen=True)
class Keep:
    """Retention policy: a complete checkpoint is retained if one of the rules selects it and the budget has room.

    Args:
        newest: number of newest checkpoints to retain, at least 1.
        every: retain permanently each checkpoint whose step is a positive multiple of this number.
        best: number of checkpoints to retain for the best values of ``metric``; the newer one of equal values.
        metric: the name under which rank 0 logs the metric for the step of a checkpoint, with :func:`stagereg.log`,
            before the step is saved. A checkpoint without the metric, or with NaN, is not one of the best.
        direction: ``"min"`` if the lowest values are the best, ``"max"`` if the highest values are.
        budget: maximum size of all retained checkpoints together, such as ``"500GiB"``; the oldest are deleted first.
            The newest is retained even if it is larger. During a save, the disk needs space for one more.

    Raises:
        ConfigError: a value is invalid.
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
                f"{option('checkpoint.keep.best')} and {option('checkpoint.keep.metric')} must be given together "
                f"(rank 0 logs the metric with stagereg.log), got best={self.best!r} and metric={self.metric!r}."
            )
        if self.best and not has("retention"):  # otherwise no checkpoint would have a metric
            raise ConfigError(f"{option('checkpoint.keep.best', str(self.best))} {needs('retention')}")
        if self.budget is not None:
            object.__setattr__(self, "budget", ByteSize(self.budget))

    @classmethod
    def of(cls, keep: int | KeepRule) -> Keep | GuardedRule:
        """Return the rule for a checkpointer's ``keep``: a policy for a number, a guarded rule for a custom rule."""
        if isinstance(keep, GuardedRule) or type(keep) is Keep:
            return keep
        return GuardedRule(keep) if isinstance(keep, KeepRule) else cls(keep)

    def select(self, checkpoints: Iterable[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """Return the paths of the retained checkpoints, newest first, each with a reason; see :class:`KeepRule`."""
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
        """Yield the module of the extension that rates checkpoints by a metric, if ``best`` is set."""
        yield from providers("rating") if self.best else ()

    def warnings(self, made: Checkpoint, old: Sequence[Checkpoint]) -> Iterator[str]:
        """Yield warnings for the user when ``made`` is committed and ``old`` are no longer retained."""
        root = made.path.rpartition("/")[0]
        for module in self._raters():
            yield from module.warnings(self, root, old)
        if self.budget is not None and made.manifest.nbytes > self.budget:
            yield (
                f"One checkpoint in {root} has {made.manifest.nbytes:,} bytes, more than "
                f"{option('checkpoint.keep.budget', str(self.budget))}, so only the newest one is retained."
            )


class GuardedRule:
    """A custom rule whose errors do not fail saves; all checkpoints are then retained. Raises: ``ConfigError``."""

    def __init__(self, rule: KeepRule) -> None:
        if isinstance(rule, type):
            raise ConfigError(f"{option('checkpoint.keep')} is a class. Call it: keep={rule.__name__}(...)")
        self.name = f"{type(rule).__module__}.{type(rule).__qualname__}"
        self._rule, self._warned = rule, False
        try:
            check("keep", type(rule).__name__, rule)
        except RegistryError as error:
            raise ConfigError(
                f"{option('checkpoint.keep')} must be a number, a stagereg.Keep or a rule: {error}"
            ) from None

    def select(self, checkpoints: Iterable[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """Return the checkpoints that the rule retains, and the newest."""
        newest_first = sorted(checkpoints, key=lambda each: each.manifest.order, reverse=True)
        paths = [each.path for each in newest_first]
        try:
            kept = self._rule.select(newest_first, metrics) if paths else {}
            if not isinstance(kept, Mapping):
                wrong = f"it returned {kept!r:.100}, which is not a mapping"
            elif bad := [item for item in kept.items() if item[0] not in paths or not isinstance(item[1], str)]:
                wrong = f"it returned {bad[0]!r:.200}, which is not a checkpoint's path with a reason"
            elif kept or not paths:
                return {**dict.fromkeys(paths[:1], "newest"), **kept}
            else:
                wrong = "it selected no checkpoint"
        except Exception as error:
            wrong = summarize_exception(error, __file__)
        if not self._warned:
            self._warned = True
            text = "stagereg: %s failed, %s: %s. No checkpoint is deleted until it works, so the disk may fill up."
            _log.warning(text, option("checkpoint.keep"), self.name, wrong)
        return dict.fromkeys(paths, f"{self.name} failed")
