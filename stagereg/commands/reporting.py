"""``stagereg report``: what a sweep ended with, or the figures and checkpoints of a run, made again from their files.

It works at any time: while a run trains, after a kill, on another machine. Failed jobs are part of the report, and do
not make the report fail.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import stagereg.launch.phases as phases
import stagereg.output as output
import stagereg.sweep.render as render
import stagereg.sweep.render.tables as tables
from stagereg.errors import ConfigError
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Comparison, compare
from stagereg.sweep.figures import Saved, saved
from stagereg.sweep.goodput import Goodput, failures, goodput, starts
from stagereg.sweep.metric import counted, in_order, labelled, metric, quantity, shown, usual
from stagereg.sweep.render.tables import Table, Value
from stagereg.sweep.result import JobResult, kind_of, results
from stagereg.sweep.run import Run, Started

_FIRST, _LAST = 7, 7
"""Rows that a terminal shows of a table that has many."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "show a run or a sweep again: tables, and of a sweep pictures and an HTML page"
    parser = output.add_command(commands, "report", help_, run, "With --json it writes files only with --output.")
    parser.add_argument("directory", help="of a run (hydra.run.dir) or of a sweep (hydra.sweep.dir)")
    parser.add_argument("--metric", default="", help="what a sweep is ranked by; what it was run with if not given")
    parser.add_argument("--direction", choices=("minimize", "maximize"), help="which way is better, if not the usual")
    parser.add_argument(
        "--output", default="", metavar="DIR", help="where the files of a sweep go; its directory if not given"
    )


def run(asked: argparse.Namespace) -> int:
    """Print the report, and write the files of a sweep; return 0, also where what is reported on has failed."""
    directory = Path(asked.directory)
    if kind_of(directory) == "sweep":
        _report_sweep(asked, directory)
        return 0
    if asked.metric or asked.direction or asked.output:
        raise ConfigError(f"--metric, --direction and --output are for a sweep, and {directory} is a single run.")
    report = RunReport(directory)
    if asked.json:
        output.as_json(report.plain())
    else:
        report.show()
    return 0


def _report_sweep(asked: argparse.Namespace, directory: Path) -> None:
    jobs = results(directory)
    own, its_direction = _ranking(jobs)
    comparison = compare(jobs, asked.metric or own, asked.direction or (None if asked.metric else its_direction))
    if not asked.json:
        tables.terminal(comparison)
    target = Path(asked.output or directory)
    try:
        files = render.write(comparison, target) if asked.output or not asked.json else []
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"Cannot write in {target}: {why}. `--output DIR` names another directory.") from error
    if asked.json:
        output.as_json({**_plain(comparison), "files": files})
    else:
        output.echo(f"\nWritten to {os.path.relpath(target)}: {', '.join(path.name for path in files)}")


def _plain(comparison: Comparison) -> dict[str, Any]:
    rows = []
    for row in comparison.rows:
        jobs = [job.directory for job in row.jobs]
        rows.append(dataclasses.asdict(row) | {"status": row.status, "jobs": jobs})
    ranking = {"metric": comparison.ranking.name, "better": comparison.ranking.better}
    return dataclasses.asdict(comparison) | {"kind": "sweep", "answer": answer(comparison).text, "rows": rows} | ranking


def _ranking(jobs: Sequence[JobResult]) -> tuple[str, str | None]:
    """What the sweep was ranked by when it ran, by the config of the first job that has it, else what makes sense."""
    from omegaconf import OmegaConf

    for job in jobs:
        with contextlib.suppress(Exception):  # whatever YAML and OmegaConf raise for a torn file
            config = OmegaConf.load(job.directory / ".hydra" / "config.yaml")
            if chosen := OmegaConf.select(config, "sweep.metric"):
                return str(chosen), OmegaConf.select(config, "sweep.direction")
    return usual(set().union(*(job.figures for job in jobs))), None


class RunReport:
    """The report on one run, also on one that recorded nothing but its result, or whose records cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._job, unread = JobResult.of_directory(directory), []
        try:
            self._run = Run.read(directory)
        except ConfigError as error:
            self._run = Run(directory, ())
            unread = [f"There are no records: {error}"]
        self._warnings = [*_warnings(self._job, self._run), *unread]
        self._saved = saved(self._run) if self._run.ranks else []
        self._starts, self._failures, self._goodput = starts(self._run), failures(self._run), goodput(self._run)
        self._tables = [_time_of(self._goodput)] if self._goodput is not None else []
        self._tables += [_starts(self._starts)] if self._starts else []
        self._tables += [_restarts(self._failures)] if self._failures else []
        self._tables += [_checkpoints(self._saved)] if self._saved else []

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "checkpoints": [dataclasses.asdict(one) for one in self._saved],
            "starts": [dataclasses.asdict(one) for one in self._starts],
        }
        if (life := self._goodput) is not None:
            found["goodput"] = {"share": life.share, **dataclasses.asdict(life), "rest": life.rest}
        return {"kind": "run", **dataclasses.asdict(self._job), **found, "warnings": self._warnings}

    def show(self) -> None:
        """Print it; of many checkpoints the first and the last ones."""
        output.echo(f"{self._job.directory}: {self._answer()}", "bold")
        for line in self._warnings:
            output.echo(line, "yellow")
        if found := self._job.figures:
            output.echo()
            labels = [labelled(name, found[name]) for name in in_order(found)]
            output.table("Figures", (), [(head, quantity(value, unit)) for head, value, unit in labels])
        for table in self._tables:
            rows = [tuple(map(_cell, row)) for row in table.rows]
            if len(rows) > _FIRST + _LAST + 1:
                rows[_FIRST:-_LAST] = [("…", *[""] * (len(table.columns) - 1))]
            output.echo()
            columns = tuple(map(str, table.columns))
            output.table(table.title, columns, rows, verdict="state" if "state" in columns else "")

    def _answer(self) -> str:
        text, run, found = self._job.status.capitalize(), self._run, self._job.figures
        if run.ranks:
            text += f": {counted(found.get('steps', 0), 'step')} on {counted(run.world_size, 'rank')}"
            text += f" in {shown(run.seconds)} s"
        if self._failures and self._goodput is not None:
            text += f". After {counted(len(self._failures), 'failure')} it was started again"
            text += f": {self._goodput.share:.1%} of {shown(self._goodput.seconds)} s in all was training"
        if found.get("checkpoints"):
            text += f". {counted(found['checkpoints'], 'checkpoint')}"
            if "stall_ms" in found:
                text += f", each held training for {metric('stall_ms').text(found['stall_ms'])} (median)"
        return f"{text}."


def _warnings(job: JobResult, recorded: Run) -> Iterator[str]:
    """What to know before reading the figures: how it ended, if not well, and what is missing."""
    if job.error:
        yield f"It {'failed' if job.status == 'failed' else 'did not come to its end'}: {tables.first_line(job.error)}"
    if not recorded.ranks:
        return
    if recorded.others:
        yield (
            f"Left out: {counted(recorded.others, 'other run')} in this directory. This is the run that began last; "
            "hydra.run.dir=PATH gives each run a directory of its own."
        )
    for step, steps, why in (each for rank in recorded.ranks for each in rank.fallbacks):
        text = f"It resumed from step {step}, since a newer checkpoint was skipped ({tables.first_line(why)})"
        yield f"{text}: {counted(steps, 'step')} lost."
    yield from _stragglers(recorded)
    if recorded.damaged:
        yield f"Left out, being damaged: {counted(recorded.damaged, 'line')} of its records."
    if gone := sorted(set(range(recorded.world_size)) - {rank.rank for rank in recorded.ranks}):
        named = ", ".join(map(str, gone[:8])) + ", …" * (len(gone) > 8)
        yield f"There are no records of {counted(len(gone), 'rank')} ({named}): the figures are those of the others."


def _time_of(life: Goodput) -> Table:
    parts = [
        ("training", life.training, "steps taken for the first time"),
        ("saves", life.saves, "that held the training loop"),
        ("again", life.again, "steps that had been taken before"),
        ("starts", life.starts, "from the beginning, or an end in order, to the first step"),
        *((f"restarts: {name}", s, f"until {phases.PHASES.get(name, name)}") for name, s in life.restarts.items()),
        ("the rest", life.rest, "starts that came to no step, and what follows the last step"),
    ]
    rows = tuple((name, seconds, 100 * seconds / life.seconds, what) for name, seconds, what in parts)
    return Table("Where the time went", ("part", "s", "%", "what it is"), rows, "Of all attempts, by rank 0.")


def _starts(every: Sequence[Started]) -> Table:
    names = [name for name in phases.PHASES if any(name in one.phases for one in every)]
    rows = tuple((one.number, *(one.phases.get(name) for name in names), one.seconds) for one in every)
    note = "Each is the time since the one before; the first, since the last step before a failure, or the beginning."
    return Table("Seconds of each start, by phase", ("restart", *names, "in all"), rows, note)


def _restarts(every: Sequence[Started]) -> Table:
    rows = tuple((one.number, one.step, one.again, one.origin or None, tables.first_line(one.why)) for one in every)
    note = "Read from: the tier, the store, or what the survivors had saved there; nothing where training began anew."
    return Table("Restarts", ("restart", "first step", "done again", "read from", "after"), rows, note)


def _stragglers(recorded: Run) -> Iterator[str]:
    told = [each for rank in recorded.ranks for each in rank.stragglers]
    for at, (rank, machine, since, slow, wait_s, step_s) in enumerate(told):
        if slow:
            until = next((step for other, _, step, still, *_ in told[at:] if other == rank and not still), None)
            span = f"from step {since} on" if until is None else f"from step {since} to {until}"
            for_it = f"the others waited {1e3 * wait_s:.3g} ms of each {1e3 * step_s:.3g} ms step for it"
            yield f"Rank {rank} on machine {machine} was slow {span}: {for_it}."


def _checkpoints(every: Sequence[Saved]) -> Table:
    heads = ("step", "saved at s", "stall ms", "staging ms", "writing ms", "complete after ms", "MiB", "state")
    rows = tuple(
        (
            one.step,
            one.start,
            _ms(one.stall_s),
            _ms(one.stage_s),
            _ms(one.write_s),
            _ms(one.end - one.start) if one.state == "complete" else None,
            one.nbytes / 2**20,
            one.state + (f": {one.error}" if one.error else ""),
        )
        for one in every
    )
    return Table("Checkpoints", heads, rows, "Times are the slowest rank's; MiB is what all ranks staged.")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _cell(value: Value) -> str:
    return "-" if value is None else shown(value) if isinstance(value, float) else str(value)
