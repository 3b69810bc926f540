"""Retention rules select the checkpoints to retain: the options ``checkpoint.keep``, or a user's component.

The newest checkpoint is always retained. If the budget is exceeded, the oldest selected checkpoints are deleted, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

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

    Every rank constructs the rule. After each commit only rank 0 calls ``select``, on the save thread. The newest
    checkpoint is always retained. If ``select`` raises an exception, selects no checkpoint, or returns a value of
    another type, no checkpoint is deleted.
    """

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]], /) -> Mapping[str, str]:
        """Return the paths of the checkpoints to retain, each with a short reason for ``stagereg ls``.

        Args:
            checkpoints: the complete checkpoints, newest first, including the new one.
            metrics: for the path of each checkpoint, the metrics that were logged before the checkpoint was saved.
        """


@register("keep", "policy")
@dataclass(frozen=True)
class Keep:
    """Retention policy: retains complete checkpoints that a rule selects, as long as their total size fits the budget.

    Args:
        newest: number of newest checkpoints to retain, at least 1.
        every: permanently retain each checkpoint whose step is a positive multiple of this number.
        best: number of checkpoints with the best values of ``metric`` to retain; of equal values, the newer counts.
        metric: name of the metric. Rank 0 must log a value with :func:`stagereg.log` for the step of a checkpoint,
            before the step is saved. A checkpoint without a value, or with NaN, is not one of the best.
        direction: ``"min"`` if lower values are better, ``"max"`` if higher values are better.
        budget: maximum total size of all retained checkpoints, such as ``"500GiB"``; the oldest are deleted first. The
            newest is retained even if it alone is larger. During a save, the disk needs space for one more checkpoint.
        weights_after: number of newest retained checkpoints that stay whole. Older ones lose the entries of optimizers,
            in the background, and keep all other entries. A run that restores an optimizer refuses them.

    Raises:
        ConfigError: a value is invalid.
    """

    newest: int = 2
    every: int | None = None
    best: int = 0
    metric: str | None = None
    direction: Literal["min", "max"] = "min"
    budget: ByteSize | None = None
    weights_after: int | None = None

    def __post_init__(self) -> None:
        at_least(1, option("checkpoint.keep.newest"), self.newest)
        at_least(1, option("checkpoint.keep.every"), 1 if self.every is None else self.every)
        at_least(1, option("checkpoint.keep.weights_after"), 1 if self.weights_after is None else self.weights_after)
        at_least(0, option("checkpoint.keep.best"), self.best)
        one_of(option("checkpoint.keep.direction"), self.direction, ("min", "max"))
        if bool(self.best) != bool(self.metric) or not isinstance(self.metric, (str, type(None))):
            raise ConfigError(
                f"{option('checkpoint.keep.best')} and {option('checkpoint.keep.metric')} must be given together "
                f"(rank 0 logs the metric with stagereg.log), got best={self.best!r} and metric={self.metric!r}."
            )
        for name, value in (("best", self.best), ("weights_after", self.weights_after)):
            if value and not has("retention"):  # only this extension records metrics in checkpoints, and rewrites them
                raise ConfigError(f"{option(f'checkpoint.keep.{name}', value)} {needs('retention')}")
        if self.budget is not None:
            object.__setattr__(self, "budget", ByteSize(self.budget))

    @classmethod
    def of(cls, keep: int | KeepRule) -> Keep | GuardedRule:
        """Convert the argument ``keep`` of a Checkpointer to a rule; a custom rule is wrapped in a guard."""
        if isinstance(keep, GuardedRule) or type(keep) is Keep:
            return keep
        return GuardedRule(keep) if isinstance(keep, KeepRule) else cls(keep)

    def select(self, checkpoints: Iterable[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """Map the path of each retained checkpoint to a short reason, newest first; see :meth:`KeepRule.select`."""
        newest_first = sorted(checkpoints, key=lambda each: each.manifest.order, reverse=True)
        why: dict[str, list[str]] = {each.path: [] for each in newest_first}
        for each in newest_first[: self.newest]:
            why[each.path].append("newest")
        for each in newest_first:
            if self.every is not None and each.manifest.step > 0 and each.manifest.step % self.every == 0:
                why[each.path].append(f"every {self.every}")
        for module in providers("rating") if self.best else ():
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

    def warnings(self, made: Checkpoint, old: Sequence[Checkpoint]) -> Iterator[str]:
        """Yield warnings for the user. ``made``: the newest checkpoint. ``old``: checkpoints that it made obsolete."""
        root = made.path.rpartition("/")[0]
        for module in providers("rating") if self.best else ():
            yield from module.warnings(self, root, old)
        if self.budget is not None and made.manifest.nbytes > self.budget:
            yield (
                f"One checkpoint in {root} has {made.manifest.nbytes:,} bytes, more than "
                f"{option('checkpoint.keep.budget', str(self.budget))}, so only the newest one is retained."
            )


class GuardedRule:
    """Wraps a custom rule: if the rule raises an exception, the save succeeds, and all checkpoints are retained."""

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
        """Return the selection of the custom rule, plus the newest checkpoint. The rule's first error is logged."""
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
