"""Compares a sweep with an earlier sweep, the baseline, and finds the combinations of options that became worse.

Both sweeps are documents that ``stagereg report DIR --json`` prints. A combination is worse if its median is worse by
more than a limit and a rank-sum test over at least four runs in each sweep is significant.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagereg.errors import MALFORMED, ConfigError, few_of
from stagereg.sweep.number_text import counted, parameter_text, percent
from stagereg.sweep.rank_sum import FEWEST, LEVEL, p_value

_LIMIT = re.compile(r"worse:(\d+(?:\.\d+)?)%")
_NAMED = 3

Document = Mapping[str, Any]  # a sweep, as printed by `stagereg report DIR --json`
_Key = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Change:
    """The comparison of one combination of options with the baseline."""

    combination: str  # the overrides in which combinations differ, in Hydra's syntax
    before: float | None  # median of the runs in the baseline; `None` if there are no runs
    now: float | None  # median of the runs in the new sweep
    change: float | None  # relative difference; positive if the value increased
    chance: float | None  # p-value of the rank-sum test; `None` if no test was made
    verdict: str  # `"worse"`, `"better"`, `"no significant difference"`, `"within 5 %"`, or why no test was made
    compared: bool = True


def limit(text: str) -> float:
    """Convert a limit such as ``worse:5%`` to a relative difference, here 0.05."""
    if (found := _LIMIT.fullmatch(text.strip())) is None:
        raise ConfigError(f"invalid limit {text!r}: write worse:PERCENT%, for example worse:5%")
    return float(found[1]) / 100


def read(path: Path) -> Document:
    """Read the baseline from a file that ``stagereg report DIR --json`` wrote."""
    try:
        document = json.loads(path.read_bytes())
        if not all(isinstance(document[name], str) for name in ("metric", "better")):
            raise TypeError("the metric is not a string")
        _rows(document, str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the baseline {path}: {error.strerror or error}") from error
    except ConfigError:
        raise
    except MALFORMED as error:
        raise ConfigError(
            f"{path} is not a baseline. Name the directory of a sweep, or the file that `stagereg report DIR "
            "--json > baseline.json` writes for a sweep."
        ) from error
    return document


def changes(
    before: Document, now: Document, least: float, names: Sequence[str] = ("the baseline", "now")
) -> list[Change]:
    """Compare the combinations of two documents by the metric that ranks ``now``.

    Args:
        before: the baseline.
        now: the document to compare with the baseline.
        least: a combination counts as unchanged if the relative difference of its medians is at most this number.
        names: the names of the two documents in error messages.

    Raises:
        ConfigError: The documents have no common combination, or different directions of the metric.
    """
    if before.get("metric") == now["metric"] and before.get("better", now["better"]) != now["better"]:
        raise ConfigError(
            f"{now['metric']}: {before['better']} is better in {names[0]}, but {now['better']} is better in "
            f"{names[1]}. Create the baseline again with the right --direction, or pass --direction here."
        )
    then, current = _rows(before, names[0]), _rows(now, names[1])
    if not then.keys() & current.keys():
        raise ConfigError(f"{' and '.join(names)} have no common combination{_difference([*then], [*current])}.")
    differing = [key for key, values in _values([*then, *current]).items() if len(values) > 1]
    found = []
    for key in dict.fromkeys([*current, *then]):
        given = dict(key)
        label = " ".join(f"{name}={parameter_text(given[name])}" for name in differing if name in given)
        found.append(_change(label or "as configured", then.get(key), current.get(key), now, least))
    return found


def _change(label: str, then: Document | None, current: Document | None, now: Document, least: float) -> Change:
    name, sign = now["metric"], -1 if now["better"] == "higher" else 1
    cells = [row["cells"].get(name, {}) if row else {} for row in (then, current)]
    old, new = ([float(each) for each in cell.get("values", ())] for cell in cells)
    before, after = (statistics.median(each) if each and all(map(math.isfinite, each)) else None for each in (old, new))

    def untested(why: str, compared: bool = False) -> Change:
        return Change(label, before, after, None, None, why, compared)

    if then is None:
        return untested("new", True)
    if not old and then["status"] != "completed":
        return untested("failed in the baseline", True)
    if not old:
        return untested(f"no {name} in the baseline")
    if current is None:
        return untested("missing")
    if current["status"] != "completed":
        return untested(current["status"])
    if not new:
        return untested(f"no {name}")
    if before is None:
        return untested("not finite in the baseline")
    if after is None:
        return untested("worse", True)  # diverged
    if min(len(old), len(new)) < FEWEST:
        return untested(f"too few runs: {len(old)} and {len(new)}")
    change = (after - before) / abs(before) if before else math.copysign(math.inf, after - before) if after else 0.0
    chance = p_value(old, new)
    verdict = "worse" if sign * change > 0 else "better"
    if chance > LEVEL or abs(change) <= least:
        verdict = f"within {percent(least)}" if abs(change) <= least else "no significant difference"
    return Change(label, before, after, change, chance, verdict)


def _rows(document: Document, name: str) -> dict[_Key, Document]:
    if document["kind"] != "sweep":
        raise ConfigError(f"{name} is a single run, not a sweep: only sweeps can be compared. Name a sweep.")
    found: dict[_Key, Document] = {}
    for row in document["rows"]:
        key = frozenset((str(name), str(value)) for name, value in row["combination"].items())
        if not isinstance(row["status"], str):
            raise TypeError("a status is not a string")
        for cell in row["cells"].values():
            [float(value) for value in cell["values"]]
        if not row["again"] and found.setdefault(key, row) is not row:
            raise ConfigError(f"cannot compare {name}: the sweep mixes results of different versions")
    return found


def _values(keys: Sequence[_Key]) -> dict[str, set[str | None]]:
    names = dict.fromkeys(name for key in keys for name, _ in sorted(key))
    return {name: {dict(key).get(name) for key in keys} for name in names}


def _difference(then: Sequence[_Key], current: Sequence[_Key]) -> str:
    old, new = _values(then), _values(current)
    names = [name for name in {**old, **new} if not old.get(name, {None}) & new.get(name, {None})]
    return f": every value of {few_of(names, _NAMED)} differs" if names else ""


def verdict(found: Sequence[Change], least: float) -> str:
    """Return a sentence that summarizes the changes.

    Raises:
        ConfigError: No combination is worse, but some combination of the baseline could not be compared.
    """
    worse = [each.combination for each in found if each.verdict == "worse"]
    open_ = [f"{each.combination}: {each.verdict}" for each in found if not each.compared]
    tested = sum(each.chance is not None for each in found)
    if worse:
        return f"Worse than the baseline by more than {percent(least)}: {few_of(worse, _NAMED, '; ')}."
    if open_ or not tested:
        raise ConfigError(
            f"{len(open_)} of {counted(len(found), 'combination')} could not be compared with the baseline "
            f"({few_of(open_, _NAMED, '; ') or 'no combination completed in the baseline'}). Each combination needs at "
            f"least {FEWEST} completed runs in both sweeps: run them with sweep.repeats={FEWEST}."
        )
    return f"0 of {counted(tested, 'combination')} are worse than the baseline by more than {percent(least)}."
