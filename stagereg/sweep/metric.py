"""Defines the metrics of runs: name, description, direction and number format."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from stagereg.errors import ConfigError, nearest
from stagereg.sweep.number_text import quantity

RETURNED = "returned."  # prefix of metrics that a task returns in a dict
DIRECTIONS = {"minimize": "lower", "maximize": "higher"}  # keys: the names that Hydra's sweepers use
_MATTERS = 0.05


@dataclass(frozen=True)
class Metric:
    """The definition of a metric of runs."""

    name: str  # name in configs and files
    head: str  # column head in tables, with the unit
    unit: str  # empty for plain numbers
    better: str  # `"lower"` or `"higher"`; empty if neither is better
    doc: str  # description in one or two sentences

    @property
    def sign(self) -> int:
        """-1 if a higher value is better, otherwise 1. The best value has the smallest product of sign and value."""
        return -1 if self.better == "higher" else 1

    def text(self, value: float) -> str:
        return quantity(value, self.unit)


_DOCS = {
    "stall_ms": "How long a checkpoint stalls the training loop, on the slowest rank; median over the checkpoints of a "
    "run.",
    "lost_percent": "Training time lost to checkpoints, as a percentage of the time from the first step to the last: "
    "all stalls, plus the extra time of steps that overlap staging or writing, relative to the median undisturbed "
    "step. Slowest rank; at least 0. Unknown with fewer than three undisturbed steps.",
    "samples_per_s": "Samples of all ranks per second of training time, including stalls; logged with "
    "stagereg.log(step, samples=...), otherwise counted by join.iterate.",
    "staged_gib_per_s": "Tensor data that all ranks copied for a checkpoint, divided by the seconds until the slowest "
    "rank's copy was complete; median over the checkpoints of a run.",
    "write_gib_per_s": "Bytes of a checkpoint's files, divided by the seconds between the end of staging on all ranks "
    "and the commit; median over the checkpoints of a run.",
    "peak_host_gib": "Peak resident host memory of each rank, summed over the ranks.",
    "loss": "The number that the task returned, or the entry 'loss' of its dict, otherwise the loss that rank 0 "
    "logged last.",
    "shadowed_steps": "Steps in which ranks took part without data of their own, summed over the ranks.",
}
METRICS = (
    Metric("stall_ms", "stall ms", "ms", "lower", _DOCS["stall_ms"]),
    Metric("lost_percent", "lost %", "%", "lower", _DOCS["lost_percent"]),
    Metric("samples_per_s", "samples/s", "samples/s", "higher", _DOCS["samples_per_s"]),
    Metric("staged_gib_per_s", "staged GiB/s", "GiB/s", "higher", _DOCS["staged_gib_per_s"]),
    Metric("write_gib_per_s", "write GiB/s", "GiB/s", "higher", _DOCS["write_gib_per_s"]),
    Metric("peak_host_gib", "host GiB", "GiB", "lower", _DOCS["peak_host_gib"]),
    Metric("loss", "loss", "", "lower", _DOCS["loss"]),
    Metric("shadowed_steps", "shadowed steps", "steps", "", _DOCS["shadowed_steps"]),
)
"""All named metrics, in the order of table columns."""
_BY_NAME = {one.name: one for one in METRICS}


def metric(name: str) -> Metric:
    """Return the metric ``name``. ``returned.KEY`` is the number that the task returns in a dict under ``KEY``."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    start, _, key = str(name).partition(RETURNED)
    if key and not start:
        return Metric(name, key, "", "", f"The number that the task returned as {key!r}.")
    raise ConfigError(
        f"unknown metric {name!r}.{nearest(str(name), _BY_NAME)} Metrics are: {', '.join(_BY_NAME)}; and "
        f"{RETURNED}KEY for a number that the task returns in a dict under KEY."
    )


def directed(name: str, direction: str | None = None) -> Metric:
    """Return a metric with the given ranking direction. ``None`` keeps the default direction of the metric."""
    found = metric(name)
    if direction is not None and direction not in DIRECTIONS:
        near = nearest(str(direction), DIRECTIONS)
        raise ConfigError(f"direction must be minimize or maximize, got {direction!r}.{near}")
    if not (better := DIRECTIONS.get(direction or "", found.better)):
        raise ConfigError(
            f"{name} has no direction of its own. Set sweep.direction=minimize or sweep.direction=maximize "
            "(--direction of `stagereg report`)."
        )
    return replace(found, better=better)


def least_difference(name: str, matters: float | str | None) -> float:
    """Parse ``matters``, the relative difference of a metric up to which combinations tie: at least 0, below 1."""
    if matters is None:  # For the loss and returned values, 0: stagereg does not know their scale.
        return 0.0 if name in ("loss", "shadowed_steps") or name.startswith(RETURNED) else _MATTERS
    text = str(matters).strip()
    with contextlib.suppress(ValueError):
        part = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        if 0 <= part < 1 and not isinstance(matters, bool):
            return part
    raise ConfigError(f"sweep.matters={matters} must be at least 0% and below 100%, for example sweep.matters=5%.")


def usual(known: Collection[str]) -> str:
    """Return the name of the default ranking metric: the loss if only the loss is known, otherwise the stall."""
    return "loss" if "stall_ms" not in known and "loss" in known else "stall_ms"


def lacking(who: str, name: str, known: Iterable[str]) -> str:
    """Return an error message that begins with ``who`` and suggests a similar name and the available metrics."""
    names, key = [one.name for one in columns(set(known))], name.removeprefix(RETURNED)
    near = [each for each in names if nearest(key, [each.removeprefix(RETURNED)])]
    return f"{who} {name}.{nearest(name, near)} Available metrics: {', '.join(names) or 'none'}."


def columns(names: Collection[str]) -> list[Metric]:
    """Return the metrics with the given names, in the order of table columns. Returned values come last."""
    returned = (metric(name) for name in sorted(names) if name.startswith(RETURNED))
    return [*(one for one in METRICS if one.name in names), *returned]
