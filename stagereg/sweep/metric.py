"""The figures of runs: what they are called, what they mean, which way is better, and numbers as people read them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from stagereg.errors import ConfigError, nearest
from stagereg.sweep.number_text import quantity

RETURNED = "returned."  # what the name of a figure begins with that a task returns in a dict
DIRECTIONS = {"minimize": "lower", "maximize": "higher"}  # as Hydra's sweepers name them
_MATTERS = 0.05


@dataclass(frozen=True)
class Metric:
    """A figure of a run."""

    name: str  # as configs and files name it
    head: str  # of its column, with the unit
    unit: str  # of its numbers; empty for plain numbers
    better: str  # `"lower"`, `"higher"`, or empty where neither is
    doc: str  # what it is, in one or two sentences

    @property
    def sign(self) -> int:
        """-1 where higher is better, else 1: the best has the least product of this and its value."""
        return -1 if self.better == "higher" else 1

    def text(self, value: float) -> str:
        return quantity(value, self.unit)


_DOCS = {
    "stall_ms": "How long a checkpoint holds the training loop: the slowest rank's stall, median over the checkpoints "
    "of a run.",
    "lost_percent": "Training time lost to checkpoints, of the time from the first step to the last: all stalls, and "
    "what the steps that staging or writing overlapped took longer, in sum, than as many undisturbed ones, by their "
    "median. Of the slowest rank; never below 0. Where fewer than three steps were undisturbed, it is unknown.",
    "samples_per_s": "Samples that all ranks together saw in a second of training time, stalls included: as logged "
    "with stagereg.log(step, samples=...), or else as counted by join.iterate.",
    "staged_gib_per_s": "Tensor data that all ranks copied for a checkpoint, by the seconds until the slowest rank's "
    "copy was complete; median over the checkpoints of a run.",
    "write_gib_per_s": "Bytes of a checkpoint's files, by the seconds from when all ranks had staged to the commit; "
    "median over the checkpoints of a run.",
    "peak_host_gib": "The most host memory that each rank ever had resident, summed over the ranks.",
    "loss": "The number that the task returned, or what it returned as 'loss', or else the loss that rank 0 logged "
    "last.",
    "shadowed_steps": "Steps that ranks took along without data of their own, summed over the ranks.",
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
"""All figures that have a name of their own, in the order of their columns."""
_BY_NAME = {one.name: one for one in METRICS}


def metric(name: str) -> Metric:
    """Return the metric of that name; ``returned.KEY`` is a number that tasks return under ``KEY``."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    start, _, key = str(name).partition(RETURNED)
    if key and not start:
        return Metric(name, key, "", "", f"The number that the task returned as {key!r}.")
    raise ConfigError(
        f"There is no metric {name!r}.{nearest(str(name), _BY_NAME)} There are: {', '.join(_BY_NAME)}; and "
        f"{RETURNED}KEY, for a number that the task returns in a dict under KEY."
    )


def directed(name: str, direction: str | None = None) -> Metric:
    """Return the metric with the direction it is ranked in; ``None`` is the metric's own."""
    found = metric(name)
    if direction is not None and direction not in DIRECTIONS:
        near = nearest(str(direction), DIRECTIONS)
        raise ConfigError(f"The direction is minimize or maximize, not {direction!r}.{near}")
    if not (better := DIRECTIONS.get(direction or "", found.better)):
        raise ConfigError(
            f"Say which {name} is better, a low or a high one: sweep.direction=minimize or "
            "sweep.direction=maximize (--direction of `stagereg report`)."
        )
    return replace(found, better=better)


def least_difference(name: str, matters: float | str | None) -> float:
    """Return the relative difference by a metric up to which combinations tie, from 0 to below 1."""
    if matters is None:  # the scale of the loss and of what the task returns is the program's
        return 0.0 if name in ("loss", "shadowed_steps") or name.startswith(RETURNED) else _MATTERS
    text = str(matters).strip()
    with contextlib.suppress(ValueError):
        part = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        if 0 <= part < 1 and not isinstance(matters, bool):
            return part
    raise ConfigError(f"sweep.matters={matters} is not a part from 0% to below 100%: use such as sweep.matters=5%.")


def usual(known: Collection[str]) -> str:
    """Return the name of what to rank by if none is given: the stall of a checkpoint, or of what has none the loss."""
    return "loss" if "stall_ms" not in known and "loss" in known else "stall_ms"


def lacking(who: str, name: str, known: Iterable[str]) -> str:
    """Return a message: ``who`` has no figure of that name, the nearest name, and the figures that exist."""
    names, key = [one.name for one in columns(set(known))], name.removeprefix(RETURNED)
    near = [each for each in names if nearest(key, [each.removeprefix(RETURNED)])]
    return f"{who} {name}.{nearest(name, near)} Figures there are: {', '.join(names) or 'none'}."


def columns(names: Collection[str]) -> list[Metric]:
    """Return the metrics among these figures, in order; what tasks return has no better side by itself."""
    returned = (metric(name) for name in sorted(names) if name.startswith(RETURNED))
    return [*(one for one in METRICS if one.name in names), *returned]
