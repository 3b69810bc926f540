"""``stagereg plan``: how often to save, from how often the job fails and what a checkpoint takes.

The formulas, and where they are from, are those of :mod:`stagereg.checkpoint.interval`, with which
``checkpoint.every=auto`` plans too; :mod:`stagereg.commands.costs` finds out what a checkpoint takes. This module
has the command line and the texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stagereg.checkpoint.interval as interval
import stagereg.output as output
import stagereg.registry as registry
from stagereg.bench.command import check_writable
from stagereg.commands.cost_curve import CostModel, Loss, csv_text, duration_text, loss_figure
from stagereg.commands.costs import Costs, Rates, by_rates, by_run, measured, size_text
from stagereg.durations import duration, write_duration
from stagereg.errors import ConfigError, StageregError
from stagereg.sizes import ByteSize
from stagereg.sweep.metric import counted

__all__ = ["add_to", "run"]

_GIB = 2**30
_HARDLY = 0.5
"""From this part of lost time on, training is reported to get nowhere."""
_FLAT = 0.01
"""Of the time: what an interval may lose more than the best one and still be called as good."""
_RESTART = "5m"
_ASSUMED = "The restart is assumed (set --restart): it changes what is lost, and not which interval is best."
_SOURCES = (
    "J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.",
    "J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006.",
    "N. H. Vaidya, Impact of checkpoint latency on overhead ratio of a checkpointing scheme, IEEE ToC 46(8), 1997.",
)
_MODEL = (
    "Failures strike the job at random, independently, at any time, restarts included (exponential, after Daly).",
    "A failure falls back to the newest complete checkpoint; one that is being written does not count (after Vaidya).",
)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the commands of ``stagereg``."""
    help_ = "compute how often to save: what checkpoints cost against what failures undo"
    parser = commands.add_parser("plan", help=help_, description=help_[0].upper() + help_[1:] + ".")
    parser.set_defaults(run=run, as_a_rank=True)
    job = parser.add_argument_group("the job")
    job.add_argument("--mtbf", metavar="TIME", help="mean time between failures of the whole job, as in 6h or 1h30m")
    job.add_argument("--mtbf-per-node", metavar="TIME", help="instead, of one machine, as in 50000h; with --nodes")
    job.add_argument("--nodes", metavar="N", help="machines of the job; any that fails stops it")
    job.add_argument("--ranks", metavar="N", help="that share the state, 1 or those of --run")
    job.add_argument("--state", metavar="SIZE", help="of a checkpoint, all ranks together, as in 1TiB")
    job.add_argument(
        "--restart", metavar="TIME", help=f"from a failure until training goes on, {_RESTART} if not given"
    )
    job.add_argument("--step", metavar="TIME", help="of a training step, to show the interval in steps too")
    costs = parser.add_argument_group("what a checkpoint takes", "What is not given is measured here, in seconds.")
    costs.add_argument("--run", metavar="DIR", dest="recorded", help="take everything from a recorded run")
    costs.add_argument("--stage-gib-s", metavar="X", help="GiB/s at which one rank copies its share, the loop waiting")
    costs.add_argument("--write-gib-s", metavar="X", help="GiB/s at which one rank writes its share")
    costs.add_argument("--stager", default="pinned_cached", metavar="NAME", help="to measure with, %(default)s")
    costs.add_argument("--dir", default=".", help="a directory on the disk to measure, the current one")
    parser.add_argument("--output", default="", metavar="DIR", help="write plan.svg, plan.png and plan.csv there")
    output.add_output_options(parser)


def run(asked: argparse.Namespace) -> int:
    """Print the plan and write its files. Returns 0.

    Raises:
        ConfigError: what was asked for makes no sense, or cannot be measured here.
    """
    mtbf_s, failing = _mtbf(asked)
    restart_s = _seconds("--restart", _RESTART if asked.restart is None else asked.restart, least=0.0)
    given_step = None if asked.step is None else _seconds("--step", asked.step)
    folder = _folder(asked.output)
    costs = _costs(asked)
    if asked.restart is None:
        costs = dataclasses.replace(costs, sources=(*costs.sources, _ASSUMED))
    step_s = given_step or costs.step_s
    job = CostModel(costs.cost_s, costs.write_s, restart_s, mtbf_s)
    steps = interval.in_steps(job.best_s, step_s, job.least_s) if step_s else None
    best = job.loss(steps * step_s if steps and step_s else job.best_s)
    files = _write(folder, job, step_s, failing) if folder else []
    if asked.json:
        output.as_json(_plain(asked, costs, job, step_s, steps, best, files))
    else:
        _print(costs, job, step_s, steps, best, failing)
        for path in files:
            output.echo(f"wrote {path}")
    return 0


# -- what was asked for


def _mtbf(asked: argparse.Namespace) -> tuple[float, str]:
    """Seconds between failures of the job, and a line on them."""
    if asked.mtbf and asked.mtbf_per_node:
        raise ConfigError("--mtbf is of the whole job, --mtbf-per-node of one machine: give one of them.")
    if asked.mtbf:
        if asked.nodes:
            raise ConfigError("--mtbf is of the whole job already; --nodes goes with --mtbf-per-node.")
        mtbf_s = _seconds("--mtbf", asked.mtbf)
        return mtbf_s, f"A failure every {duration_text(mtbf_s)} on average, of the whole job."
    if not asked.mtbf_per_node:
        raise ConfigError(
            "How often does the job fail? --mtbf 6h gives that of the whole job, all its machines together;\n"
            "--mtbf-per-node 50000h --nodes 128 that of each machine."
        )
    if not asked.nodes:
        raise ConfigError("--mtbf-per-node needs --nodes, how many machines the job has.")
    nodes = _count("--nodes", asked.nodes)
    mtbf_s = _seconds("--mtbf-per-node", asked.mtbf_per_node) / nodes
    text = f"A failure every {duration_text(mtbf_s)} on average: {nodes} machines, any of which stops the job."
    return mtbf_s, text


def _costs(asked: argparse.Namespace) -> Costs:
    ranks = None if asked.ranks is None else _count("--ranks", asked.ranks)
    nbytes = None if asked.state is None else _read("--state", asked.state, ByteSize)
    if nbytes == 0:
        raise ConfigError("--state is 0 bytes, of which a checkpoint takes no time.")
    given = {name: _rate(f"--{name}-gib-s", getattr(asked, f"{name}_gib_s")) for name in ("stage", "write")}
    if asked.recorded:
        if any(given.values()):
            raise ConfigError("--run has how fast checkpoints are: leave --stage-gib-s and --write-gib-s out.")
        from stagereg.sweep.run import Run

        return by_run(Run.read(asked.recorded), nbytes, ranks)
    if nbytes is None:
        raise ConfigError("How large is a checkpoint? Give --state, as in --state 1TiB, or --run DIR.")
    ranks = ranks or 1
    sources = tuple(
        f"{'Copying' if name == 'stage' else 'Writing'} is given: {rate / _GIB:g} GiB/s a rank."
        for name, rate in given.items()
        if rate
    )
    rates = Rates(given["stage"], given["stage"], given["write"], sources)
    if rates.stage is None or rates.write is None:
        registry.find("stager", asked.stager)
        check_writable("--dir", Path(asked.dir))
        with output.stdout_to_stderr():
            rates = measured(rates, nbytes / ranks, asked.stager, asked.dir)
    return by_rates(nbytes, ranks, rates)


def _seconds(option: str, text: str, least: float | None = None) -> float:
    seconds: float = _read(option, text, duration).total_seconds()
    if seconds < 0 or (least is None and seconds == 0):
        raise ConfigError(f"{option} is a time {'above 0' if least is None else 'from 0 on'}, not {text!r}.")
    return seconds


def _read(option: str, text: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(text)
    except StageregError as error:
        raise ConfigError(f"{option}: {error}") from error


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{option} takes a whole number from 1 on, not {text!r}.")
    return int(text)


def _rate(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"{option} takes a number of GiB a second above 0, as in 2.5, not {text!r}.")
    return rate * _GIB


def _folder(name: str) -> Path | None:
    if not name:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be a directory: {error.strerror}.") from error
    check_writable("--output", folder)
    return folder


# -- the output


def _print(costs: Costs, job: CostModel, step_s: float | None, steps: int | None, best: Loss, failing: str) -> None:
    output.echo(f"A checkpoint of {size_text(costs.nbytes)} on {counted(costs.ranks, 'rank')}")
    rows = [
        ("cost", duration_text(job.cost_s), "that training loses: the loop is held, and steps beside it are slower"),
        ("age", duration_text(max(job.write_s, job.cost_s)), "of the state when its checkpoint is complete"),
        ("restart", duration_text(job.restart_s), "from a failure until training goes on"),
    ]
    output.table("", (), [*rows, ("step", duration_text(step_s), "of training")] if step_s else rows)
    output.echo(f"{failing}\n")
    interval_text = duration_text(best.interval_s) + (f", every {steps:,} steps" if steps else "")
    output.echo(f"Save every {interval_text}: {_lost(best.total)} is lost.", "bold")
    for line in _remarks(job, best):
        output.echo(line)
    output.echo()
    heads = ("interval", *(("steps",) if step_s else ()), "lost", "checkpoints", "done twice", "restarts", "")
    output.table("", heads, [_row(job.loss(at), step_s, label) for at, label in _intervals(job, best)])
    if steps:
        mtbf = write_duration(datetime.timedelta(seconds=round(job.mtbf_s) or job.mtbf_s)).replace(" ", "")
        output.echo(
            f"\nSet checkpoint.every={steps}; or checkpoint.every=auto checkpoint.mtbf={mtbf}, which measures all this"
        )
        output.echo("while it trains, and follows it.")
    else:
        output.echo("\nGive --step for the interval in steps; checkpoint.every=auto finds it out by itself.")
    output.echo()
    lines = (*costs.sources, *_MODEL, *_SOURCES)
    output.table("Where that comes from", (), [("-", line) for line in lines])


def _remarks(job: CostModel, best: Loss) -> list[str]:
    lines = []
    if best.total >= _HARDLY:
        parts = [f"{part / job.mtbf_s:.2g} of that" for part in (job.cost_s, job.write_s, job.restart_s)]
        lines.append(f"Training would hardly get on: of 100 hours, {100 * best.total:.0f} are lost.")
        lines.append(f"The job fails every {duration_text(job.mtbf_s)}. A checkpoint costs {parts[0]} and is complete")
        lines.append(f"after {parts[1]}, a restart takes {parts[2]}: no interval mends this, only faster ones do.")
    free = interval.optimum(job.cost_s, job.mtbf_s)
    if job.least_s > free:
        lines.append(f"Writing sets the interval: a checkpoint is complete after {duration_text(job.write_s)}, and the")
        lines.append(f"next one waits for that. Were it written faster, every {duration_text(free)} would be best.")
    low, high = job.near(_FLAT)
    edges = f"from {duration_text(low)} to {duration_text(high)}"
    lines.append(f"It need not be exact: {edges}, at most 1 % of the time is lost more.")
    return lines


def _intervals(job: CostModel, best: Loss) -> list[tuple[float, str]]:
    """Intervals to compare, from short to long; those that look alike are one."""
    named = [
        ("a quarter", best.interval_s / 4),
        ("half", best.interval_s / 2),
        ("least is lost", best.interval_s),
        ("double", best.interval_s * 2),
        ("four times", best.interval_s * 4),
        ("Young 1974", interval.young(job.cost_s, job.mtbf_s)),
        ("Daly 2006", interval.daly(job.cost_s, job.mtbf_s)),
    ]
    rows: dict[str, tuple[float, str]] = {}
    for label, at in named:
        if at > 0:
            kept, before = rows.get(duration_text(at), (at, ""))
            rows[duration_text(at)] = (kept, f"{before}, {label}" if before else label)
    return sorted(rows.values())


def _row(loss: Loss, step_s: float | None, label: str) -> tuple[str, ...]:
    steps = (f"{interval.in_steps(loss.interval_s, step_s):,}",) if step_s else ()
    parts = (_percent(part) for part in (loss.total, loss.checkpoints, loss.twice, loss.restarts))
    return (duration_text(loss.interval_s), *steps, *parts, label)


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _lost(part: float) -> str:
    return f"{_percent(part)} of the time, {duration_text(part * 86400)} a day,"


def _plain(
    asked: argparse.Namespace,
    costs: Costs,
    job: CostModel,
    step_s: float | None,
    steps: int | None,
    best: Loss,
    files: list[Path],
) -> dict[str, Any]:
    low, high = job.near(_FLAT)
    return {
        "mtbf_s": job.mtbf_s,
        "ranks": costs.ranks,
        "state_bytes": costs.nbytes,
        "cost_s": job.cost_s,
        "write_s": max(job.write_s, job.cost_s),
        "restart_s": job.restart_s,
        "step_s": step_s,
        "young_s": interval.young(job.cost_s, job.mtbf_s),
        "daly_s": interval.daly(job.cost_s, job.mtbf_s),
        "optimum_s": interval.optimum(job.cost_s, job.mtbf_s),
        "least_s": job.least_s,
        "interval_s": best.interval_s,
        "steps": steps,
        "lost": best.total,
        "hardly": best.total >= _HARDLY,
        "as_good_s": [low, high],
        "intervals": [dataclasses.asdict(job.loss(at)) | {"name": label} for at, label in _intervals(job, best)],
        "assumptions": [*costs.sources, *_MODEL],
        "sources": list(_SOURCES),
        "files": [str(path) for path in files],
    }


def _write(folder: Path, job: CostModel, step_s: float | None, failing: str) -> list[Path]:
    contents = {"plan.csv": csv_text(job, step_s).encode()}
    try:
        figure = loss_figure(job, step_s, f"What is lost to checkpoints and failures\n{failing}")
    except ModuleNotFoundError:
        print("no picture: pip install 'hydra-stagereg[report]'", file=sys.stderr)
    else:
        from stagereg.sweep.render.plots import png_bytes, svg_text

        contents |= {"plan.svg": svg_text(figure).encode(), "plan.png": png_bytes(figure)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]
