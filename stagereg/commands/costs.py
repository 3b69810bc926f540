"""What a checkpoint of a job takes, for ``stagereg plan``: by given rates, by a recorded run, or measured here.

All costs are those of one rank, since all ranks copy and write at the same time: a rank's share of the state, and the
seconds that copying and writing it take. Each cost comes with its source, as a text for the user.

Measuring uses the cases of ``stagereg bench`` on a small state, a few rounds of each: seconds, not minutes.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import stagereg.machine as machine
import stagereg.output as output
from stagereg.errors import ConfigError
from stagereg.sweep.metric import counted

if TYPE_CHECKING:
    from stagereg.bench.measure import Case
    from stagereg.bench.states import State
    from stagereg.sweep.run import Run

__all__ = ["Costs", "Rates", "by_rates", "by_run", "measured", "size_text"]

_GIB = 2**30
_MOST_BYTES = 128 * 2**20
"""Of the state that is measured with; larger ones are no faster or slower by the byte."""
_LEAST_BYTES = 16 * 2**20
_ROUNDS = 4
_STORAGE = "dcp"


@dataclass(frozen=True)
class Rates:
    """How fast one rank is, in bytes a second.

    Attributes:
        stall: bytes of state over the seconds that the training loop is held.
        stage: bytes of state over the seconds until the copy is complete.
        write: bytes of state over the seconds until a copy is on the disk.
        sources: where that comes from, as texts.
    """

    stall: float | None = None
    stage: float | None = None
    write: float | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Costs:
    """What one checkpoint takes.

    Attributes:
        nbytes: of the state, all ranks together.
        ranks: how many there are.
        cost_s: seconds that training loses to it.
        write_s: seconds that its state is old when it is complete.
        step_s: seconds of a training step, ``None`` if unknown.
        sources: where that comes from, and what is assumed, as texts.
    """

    nbytes: int
    ranks: int
    cost_s: float
    write_s: float
    step_s: float | None
    sources: tuple[str, ...]


def by_rates(nbytes: int, ranks: int, rates: Rates) -> Costs:
    """Compute the costs of ``nbytes`` on ``ranks`` ranks from rates, which must all be there."""
    assert rates.stall is not None
    assert rates.stage is not None
    assert rates.write is not None
    share = nbytes / ranks
    sources = [
        *rates.sources,
        "Steps beside a checkpoint are taken to be as fast as others: only a run (--run) shows.",
    ]
    if ranks > 1:
        sources.append(
            f"Each of the {ranks} ranks copies and writes its share, {size_text(share)}, at these rates at once."
        )
    return Costs(nbytes, ranks, share / rates.stall, share / rates.stage + share / rates.write, None, tuple(sources))


def by_run(run: Run, nbytes: int | None, ranks: int | None) -> Costs:
    """Take the costs from a recorded run; scaled by the bytes of a rank where ``nbytes`` or ``ranks`` are others.

    Raises:
        ConfigError: the run has no complete checkpoint, or has not recorded its size.
    """
    from stagereg.sweep.checkpoints import saved
    from stagereg.sweep.figures import figures

    known = figures(run)
    ages = [one.end - one.start for one in saved(run) if one.state == "complete"]
    if not ages or "state_bytes" not in known or "stall_ms" not in known:
        raise ConfigError(
            f"--run {run.directory}: no checkpoint was completed in it, so there is nothing to plan with. Let it run "
            "until there are a few, or give --state (and rates, or they are measured here)."
        )
    world = int(run.ranks[0].start.get("world_size", len(run.ranks)))
    its_bytes = int(known["state_bytes"])
    count = len(ages)
    what = f"{counted(count, 'checkpoint')} of {size_text(its_bytes)} on {counted(world, 'rank')}"
    sources = [f"From {run.directory}: {what}."]
    if "lost_s" in known:
        cost = known["lost_s"] / count
        sources.append(
            "The cost is its lost training time: stalls, and by how much steps beside a checkpoint were slower."
        )
    else:
        cost = known["stall_ms"] / 1e3
        sources.append("The cost is the stall alone: too few of its steps had no checkpoint beside them for more.")
    costs = Costs(its_bytes, world, cost, statistics.median(ages), known.get("step_s"), ())
    wanted_bytes, wanted_ranks = nbytes or its_bytes, ranks or world
    factor = (wanted_bytes / wanted_ranks) / (its_bytes / world)
    if abs(factor - 1) > 1e-3:
        sources.append(f"A rank has {factor:.3g} times as many bytes as there: times are taken to grow with them.")
    cost_s, write_s = costs.cost_s * factor, max(costs.write_s, costs.cost_s) * factor
    return replace(
        costs, nbytes=wanted_bytes, ranks=wanted_ranks, cost_s=cost_s, write_s=write_s, sources=tuple(sources)
    )


def measured(given: Rates, share: float, stager: str, folder: str) -> Rates:
    """Measure here what is not given.

    Args:
        share: bytes of a rank, so that less than usual is measured with where there is less.
        stager: which copies; a name of the registry.
        folder: on the disk to write to.

    Raises:
        ConfigError: it cannot be measured here; the message has the reason.
    """
    import stagereg.bench.states as states
    from stagereg.bench.command import quiet

    nbytes = int(min(max(share, _LEAST_BYTES), _MOST_BYTES))
    state = states.make("large", nbytes / _GIB)
    found, sources = given, []
    with quiet():
        if given.stage is None:
            output.progress(f"copying {size_text(nbytes)} with {stager}")
            stall_s, stage_s = _stage_seconds(state, stager)
            found = replace(found, stall=state.nbytes / stall_s, stage=state.nbytes / stage_s)
            sources.append(
                f"Copying was measured on this machine: {state.nbytes / stage_s / _GIB:.3g} GiB/s, "
                f"with {stager} on {size_text(state.nbytes)} in host memory, "
                "by one process. Ranks of one machine share its memory: give --stage-gib-s if they are slower together."
            )
            if stall_s < 0.9 * stage_s:
                sources.append(f"The loop is held for {stall_s / stage_s:.0%} of that.")
        if given.write is None:
            output.progress(f"writing {size_text(nbytes)} to {folder}")
            rate = state.nbytes / _write_seconds(state, Path(folder))
            found = replace(found, write=rate)
            sources.append(
                f"Writing was measured on this machine: {rate / _GIB:.3g} GiB/s, durable, with {_STORAGE}, by "
                "one process. Ranks that share a storage write slower: give --write-gib-s, its rate by their number."
            )
    output.progress()
    if busy := machine.noise_warning(machine.describe("cpu")["load"][0], machine.cores()):
        sources.append(busy)
    return replace(found, sources=(*given.sources, *sources))


def _stage_seconds(state: State, stager: str) -> tuple[float, float]:
    """Seconds that the loop is held for, and until the copy is complete."""
    import stagereg.bench.staging as staging

    found = _medians([case for case in staging.cases(state, "cpu") if case.rows[0].partition(":")[0] == stager], state)
    return found[0], found[-1]


def _write_seconds(state: State, folder: Path) -> float:
    import stagereg.bench.write as write

    place = Path(tempfile.mkdtemp(prefix="stagereg-plan-", dir=folder))
    try:
        cases = write.cases(state, place, lambda text: None)
        return _medians([case for case in cases if case.rows[0] == _STORAGE], state)[0]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _medians(cases: Sequence[Case], state: State) -> list[float]:
    from stagereg.bench.measure import Stopwatch, interleave

    series = interleave(cases, _ROUNDS, Stopwatch(), state.change)
    for one in series:
        if not one.samples:
            raise ConfigError(f"{one.row} cannot be measured here ({one.missing or one.failure}): give its rate.")
    return [one.median for one in series]


def size_text(nbytes: float) -> str:
    """A number of bytes, to three digits."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 2**10:.3g} KiB"
