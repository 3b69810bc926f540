"""``stagereg plan``: how often to save, from how often the job fails and what a checkpoint takes.

The formulas, and where they are from, are those of :mod:`stagereg.checkpoint.save.interval`, with which
``checkpoint.every=auto`` plans too. What a checkpoint takes is read from a recorded run, or given by rates; of a run
that was restarted, how often that was and what it takes are read, too. All costs are those of one rank, since all ranks
copy and write at the same time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import stagereg.checkpoint.save.interval as interval
import stagereg.output as output
from stagereg.durations import seconds_of, write_duration
from stagereg.errors import ConfigError
from stagereg.output import size_text
from stagereg.sizes import ByteSize
from stagereg.sweep.figures import figures, saved
from stagereg.sweep.goodput import failures, goodput
from stagereg.sweep.run import Run

_MODEL = (
    "Failures strike the job at random, independently, at any time, restarts included (exponential, after Daly).",
    "A failure falls back to the newest complete checkpoint; one that is being written does not count (after Vaidya).",
    "J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.",
    "J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006.",
    "N. H. Vaidya, Impact of checkpoint latency on overhead ratio of a checkpointing scheme, IEEE ToC 46(8), 1997.",
)

_RESTART_S = 300.0


@dataclass
class Job:
    """What is known of a job; times in seconds, as in :mod:`stagereg.checkpoint.save.interval`."""

    state_bytes: int  # of all ranks together
    ranks: int
    cost_s: float  # that training loses to a checkpoint
    write_s: float  # how old the state of a checkpoint is when it is complete
    sources: list[str]  # where these are from
    step_s: float | None = None  # unknown
    restart_s: float = 0.0
    mtbf_s: float = 0.0

    def loss(self, interval_s: float) -> dict[str, float]:
        """What is lost at an interval above 0, and to what, as parts of the time."""
        lost = interval.lost_fraction(interval_s, self.cost_s, self.mtbf_s, self.restart_s, self.write_s)
        held = max(self.cost_s, self.write_s - interval_s)  # the loop waits for a writer that is not done
        checkpoints = (1 - lost) * held / interval_s
        restarts = min(-math.expm1(-self.restart_s / self.mtbf_s), lost - checkpoints)
        parts = {"checkpoints": checkpoints, "twice": max(0.0, lost - checkpoints - restarts), "restarts": restarts}
        return {"interval_s": interval_s, "lost": lost, **parts}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "compute how often to save: what checkpoints cost against what failures undo"
    parser = output.add_command(commands, "plan", help_, run)
    for name, kind, read, text in (
        ("mtbf", "TIME", seconds_of, "mean time between failures of the whole job, as in 6h"),
        ("mtbf-per-node", "TIME", seconds_of, "instead, of one machine, as in 50000h; with --nodes"),
        ("nodes", "N", int, "machines of the job; any that fails stops it"),
        ("ranks", "N", int, "that share the state, 1 or those of --run"),
        ("state", "SIZE", ByteSize, "of a checkpoint, all ranks together, as in 1TiB"),
        ("restart", "TIME", seconds_of, "from a failure until training goes on, 5m"),
        ("step", "TIME", seconds_of, "of a training step, to show the interval in steps too"),
        ("stage-gib-s", "X", float, "GiB/s at which one rank copies its share, the loop waiting"),
        ("write-gib-s", "X", float, "GiB/s at which one rank writes its share"),
    ):
        parser.add_argument(f"--{name}", metavar=kind, type=output.above_zero(read, name == "restart"), help=text)
    help_ = "take what checkpoints cost from a recorded run, and if not given, from its restarts --mtbf and --restart"
    parser.add_argument("--run", metavar="DIR", dest="recorded", help=help_)


def run(asked: argparse.Namespace) -> int:
    measures = asked.recorded and not asked.stage_gib_s and not asked.write_gib_s
    recorded = Run.read(Path(asked.recorded)) if measures else None
    seen = "" if recorded is None else _take_failures(asked, recorded)
    each_s, nodes = asked.mtbf_per_node, asked.nodes
    if (asked.mtbf is None) == (each_s is None) or (nodes is None) != (each_s is None):
        if asked.mtbf is None and (each_s is None) != (nodes is None):
            raise ConfigError(f"{'--mtbf-per-node' if each_s is None else '--nodes'} is missing: the two go together.")
        text = "Give one: --mtbf 6h, of all its machines together; or --mtbf-per-node 50000h --nodes 128, of each."
        raise ConfigError(f"How often does the job fail? {text}")
    job = _costs(asked, recorded)
    job.mtbf_s = asked.mtbf or each_s / nodes
    job.restart_s = _RESTART_S if asked.restart is None else asked.restart
    job.step_s = asked.step or job.step_s
    job.sources += [*filter(None, [seen]), "The restart (--restart) changes what is lost, not the best interval."]
    best_s, least_s = interval.best(job.cost_s, job.mtbf_s, job.write_s), interval.least(job.cost_s, job.write_s)
    steps = interval.in_steps(best_s, job.step_s, least_s) if job.step_s else None
    if job.step_s and steps:
        best_s = steps * job.step_s
    named = {f"{factor:g} times that": best_s * factor for factor in (0.25, 0.5, 2, 4)}
    named |= {"Young 1974": interval.young(job.cost_s, job.mtbf_s), "Daly 2006": interval.daly(job.cost_s, job.mtbf_s)}
    named["least is lost"] = best_s
    table = {name: job.loss(named[name]) for name in sorted(named, key=lambda name: named[name])}
    if asked.json:
        plan = {"interval_s": best_s, "steps": steps, "least_s": least_s, "model": _MODEL}
        rows = [{"name": name, **loss} for name, loss in table.items()]
        output.as_json({**dataclasses.asdict(job), **plan, "intervals": rows})
    else:
        _print(job, best_s, steps, table)
    return 0


def _take_failures(asked: argparse.Namespace, run: Run) -> str:
    """Fill in what a run says of failures, where that is not given; return where it is from, if anything is."""
    found, life = failures(run), goodput(run)
    seen = []
    if found and life is not None and asked.mtbf is None and asked.mtbf_per_node is None:
        asked.mtbf = life.seconds / len(found)
        seen.append(f"{len(found)} in {_time(life.seconds)} (--mtbf)")
    if found and asked.restart is None:
        asked.restart = statistics.fmean(start.seconds for start in found)
        seen.append(f"{_time(asked.restart)} from the last step before one to the first after it (--restart)")
    return f"Failures, from there too: {', '.join(seen)}." if seen else ""


def _costs(asked: argparse.Namespace, run: Run | None) -> Job:
    nbytes, stage, write = asked.state, asked.stage_gib_s, asked.write_gib_s
    ranks = asked.ranks or 1
    if run is not None:
        return _of_run(run, nbytes, asked.ranks)
    if asked.recorded or not stage or not write:
        raise ConfigError(
            "What does a checkpoint take? Give --run DIR, which was recorded, or both rates in its place, as in\n"
            "--stage-gib-s 4 --write-gib-s 0.5; `stagereg report` shows those of a run."
        )
    if nbytes is None:
        raise ConfigError("How large is a checkpoint? Give --state, as in --state 1TiB, or --run DIR.")
    stage_s, write_s = (nbytes / ranks / rate / 2**30 for rate in (stage, write))
    source = f"Given: {stage:g} GiB/s a rank for copying, {write:g} for writing. Steps beside that are not slower."
    return Job(nbytes, ranks, stage_s, stage_s + write_s, [source])


def _of_run(run: Run, nbytes: int | None, ranks: int | None) -> Job:
    """The costs that a run has recorded, scaled to the bytes of a rank."""
    known, ages = figures(run), [one.end - one.start for one in saved(run) if one.state == "complete"]
    if not ages or "state_bytes" not in known or "stall_ms" not in known:
        raise ConfigError(f"{run.directory}: no checkpoint was completed in it, so there is nothing to plan with.")
    nbytes, ranks = nbytes or int(known["state_bytes"]), ranks or run.world_size
    factor = (nbytes / ranks) / (known["state_bytes"] / run.world_size)
    cost_s = known["lost_s"] / len(ages) if "lost_s" in known else known["stall_ms"] / 1e3
    what = "its lost training time" if "lost_s" in known else "the stall alone: there were too few steps for more"
    sources = [
        f"From {run.directory}: {len(ages)} checkpoints of {size_text(known['state_bytes'])}. The cost is {what}."
    ]
    if abs(factor - 1) > 1e-3:
        sources.append(f"A rank has {factor:.3g} times as many bytes as there: times are taken to grow with them.")
    write_s = max(statistics.median(ages), cost_s) * factor
    return Job(nbytes, ranks, cost_s * factor, write_s, sources, known.get("step_s"))


def _print(job: Job, best_s: float, steps: int | None, table: dict[str, dict[str, float]]) -> None:
    rows = [
        ("state", f"{size_text(job.state_bytes)} on {job.ranks} ranks", "of a checkpoint"),
        ("cost", _time(job.cost_s), "that training loses: the loop is held, and steps beside it are slower"),
        ("age", _time(max(job.write_s, job.cost_s)), "of the state when its checkpoint is complete"),
        ("restart", _time(job.restart_s), "from a failure until training goes on"),
        ("failures", _time(job.mtbf_s), "from one to the next on average, of the whole job"),
    ]
    output.table("", (), rows)
    lost, in_steps = job.loss(best_s)["lost"], f", every {steps:,} steps" if steps else ""
    a_day = f"{lost:.2%} of the time, {_time(lost * 86400)} a day,"
    output.echo(f"\nSave every {_time(best_s)}{in_steps}: {a_day} is lost.", "bold")
    if lost >= 0.5:
        output.echo("Training would hardly get on: no interval mends this, only faster checkpoints and restarts do.")
    output.echo()
    heads = ("interval", "lost", "checkpoints", "done twice", "restarts", "")
    parts = {name: [f"{part:.2%}" for part in list(loss.values())[1:]] for name, loss in table.items()}
    output.table("", heads, [(_time(table[name]["interval_s"]), *parts[name], name) for name in table])
    every = f"checkpoint.every={steps}; or " if steps else ""
    output.echo(f"\nSet {every}checkpoint.every=auto checkpoint.failure.mtbf={_time(job.mtbf_s)}, which")
    output.echo("measures all this while it trains, and follows it.\n")
    output.table("Where that comes from", (), [("-", line) for line in (*job.sources, *_MODEL)])


def _time(seconds: float) -> str:
    """``seconds`` as people write them, to three digits or so."""
    unit = 60 if seconds >= 3600 else 1
    rounded = float(f"{seconds:.3g}") if seconds < 60 else round(seconds / unit) * unit
    return write_duration(datetime.timedelta(seconds=rounded))
