"""Rates checkpoints by a metric, for ``stagereg.Keep(best=...)``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from stagereg.base.option_text import option
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.keep import Keep
from stagereg.errors import nearest


def rate(keep: Keep, newest_first: Sequence[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the best checkpoints by metric, the best first: a dict from path to the reason for its retention."""
    name, sign = keep.metric or "", 1 if keep.direction == "min" else -1
    known = {each.path: metrics.get(each.path, {}).get(name, math.nan) for each in newest_first}
    values = {path: value for path, value in known.items() if not math.isnan(value)}
    best = sorted(values, key=lambda path: sign * values[path])[: keep.best]
    return {path: f"best {place} of {keep.best} by {name}={values[path]:g}" for place, path in enumerate(best, 1)}


def warnings(keep: Keep, root: str, old: Sequence[Checkpoint]) -> Iterator[str]:
    """Yield a warning if one of the checkpoints ``old``, which are about to be deleted, lacks the metric."""
    lacking = [each for each in old if keep.metric not in each.manifest.metrics]
    if keep.metric is not None and lacking:
        yield (
            f"a checkpoint without the metric {keep.metric!r} is deleted in {root}: {lacking[0].name}. "
            f"{option('checkpoint.keep.best')} does not rate checkpoints without the metric. Log the metric on "
            f"rank 0 before the save: stagereg.log(step, {keep.metric}=...)."
            f"{nearest(keep.metric, lacking[0].manifest.metrics)}"
        )
