"""Computes the ranking metric for each value of a swept option, aggregated over the values of the other options."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass

from stagereg.sweep.comparison import Comparison


@dataclass(frozen=True)
class Option:
    """A swept option, with the median of the ranking metric for each value of the option.

    A combination of the other options counts only if it ran with every value of this option and has finite results.
    Otherwise, a value that ran only with slow combinations would look slow itself.
    """

    name: str
    medians: dict[str | None, float]  # by value of the option: the median, best first; empty if no combination counts
    runs: dict[str | None, int]  # by value of the option: the number of runs
    counting: int  # number of combinations of the other options that count
    others: int  # number of all combinations of the other options


def options_of(comparison: Comparison) -> list[Option]:
    """Return the swept options. If fewer than two options have several values, return an empty list."""
    swept = [name for name in comparison.parameters if len({row.parameters.get(name) for row in comparison.rows}) > 1]
    return [_option(comparison, name) for name in swept] if len(swept) > 1 else []


def _option(comparison: Comparison, name: str) -> Option:
    found: defaultdict[tuple[object, ...], dict[str | None, list[float]]] = defaultdict(dict)
    for row in comparison.rows:
        cell = row.cells.get(comparison.ranking.name)
        if cell and not row.again and (values := [value for value in cell.values if math.isfinite(value)]):
            others = (row.versions, *(row.parameters.get(each) for each in comparison.parameters if each != name))
            found[others][row.parameters.get(name)] = values
    every = dict.fromkeys(value for values in found.values() for value in values)
    counting = [values for values in found.values() if values.keys() == every.keys()] if len(every) > 1 else []
    of_value = {value: [values[value] for values in counting] for value in every} if counting else {}
    medians = {value: statistics.median(map(statistics.median, several)) for value, several in of_value.items()}
    best_first = sorted(medians.items(), key=lambda each: comparison.ranking.sign * each[1])
    runs = {value: sum(map(len, several)) for value, several in of_value.items()}
    return Option(name, dict(best_first), runs, len(counting), len(found))
