"""``stagereg report``: reports the results of a sweep, or the metrics and checkpoints of a run, from their files.

The command works at any time: while a run trains, after a crash, or on another machine. Failed jobs are included in the
report; they do not make the command fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import stagereg.base.output as output
import stagereg.commands.baseline as baseline
import stagereg.sweep.render as render
import stagereg.sweep.render.tables as tables
from stagereg.base.overrides import by_key
from stagereg.commands.arguments import above_zero, add_command
from stagereg.commands.baseline import Change
from stagereg.commands.goodput import PHASES, Goodput, failures, goodput, starts
from stagereg.errors import ConfigError, printable
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Comparison
from stagereg.sweep.figures import Saved, saved
from stagereg.sweep.metric import METRICS, RETURNED, metric
from stagereg.sweep.number_text import counted, percent, quantity, shown
from stagereg.sweep.render.tables import Table, Value
from stagereg.sweep.result import JobResult, kind_of
from stagereg.sweep.run import RankRecord, Run, Started
from stagereg.sweep.selection import Source, compared, read_sources

_ENDS = 7  # number of rows shown at the start, and at the end, of a long table in a terminal
_FAILURES = 4  # maximum number of failures in the headline of a run; of more failures, only the last is shown
_STATUS = {"completed": "Completed", "failed": "Failed after", "unfinished": "Unfinished after"}
_CODES = (
    "Exit codes: 0, or 2 if the report cannot be created. With --fail-if: 0 if no combination is worse than the "
    "baseline, 1 if a combination is worse, 2 if a combination of the baseline could not be compared."
)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "print tables of a run or a sweep; for a sweep, also write plots and an HTML report"
    parser = add_command(commands, "report", help_, run, f"With --json, files are written only with --output. {_CODES}")
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="directory",
        help="directory of a run (hydra.run.dir) or of a sweep (hydra.sweep.dir); several are reported as one sweep",
    )
    parser.add_argument("--metric", default="", help="metric that ranks a sweep; default: the metric of the sweep")
    better = "whether lower or higher values of the metric are better; default: as in the sweep"
    parser.add_argument("--direction", choices=("minimize", "maximize"), help=better)
    where = "directory for the files of a sweep; default: the sweep's directory, or no files with several sweeps"
    parser.add_argument("--output", default="", metavar="DIR", help=where)
    what = "compare with an earlier sweep: its directory, or the output of `stagereg report DIR --json`"
    parser.add_argument("--baseline", default="", metavar="PATH", help=what)
    fails = "exit with code 1 if a median is worse by more than 5%% and a rank-sum test of at least 4 runs confirms it"
    parser.add_argument("--fail-if", type=above_zero(baseline.limit, or_zero=True), metavar="worse:5%", help=fails)


def run(asked: argparse.Namespace) -> int:
    """Print the report and write the files of a sweep. Return 0, or 1 if ``--fail-if`` finds a worse combination."""
    directories = [Path(each) for each in asked.directories]
    if asked.fail_if is not None and not asked.baseline:
        raise ConfigError(
            "--fail-if requires --baseline PATH: the directory of an earlier sweep, or a file written by "
            "`stagereg report DIR --json > baseline.json`."
        )
    if len(directories) > 1 or kind_of(directories[0]) == "sweep":
        return _report_sweep(asked, directories)
    if asked.metric or asked.direction or asked.output or asked.baseline:
        text = f"--metric, --direction, --output and --baseline require a sweep, but {directories[0]} is a single run."
        raise ConfigError(text)
    report = RunReport(directories[0])
    if asked.json:
        output.as_json(report.plain())
    else:
        report.show()
    return 0


def _report_sweep(asked: argparse.Namespace, directories: Sequence[Path]) -> int:
    if asked.baseline and len(directories) > 1:
        raise ConfigError("--baseline requires exactly one sweep. Name one directory.")
    sources = read_sources(directories, asked.metric, asked.direction)
    comparison = compared(sources, asked.metric, asked.direction)
    document = _plain(comparison) | {"sweeps": list(map(_plain_source, sources))}
    judged = _judged(asked, directories[0], document) if asked.baseline else []
    if not asked.json:
        tables.terminal(comparison)
        if judged:
            _show(judged, document)
    target = Path(asked.output or directories[0])
    try:
        files = _written(asked, directories, comparison, target)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot write in {target}: {why}. Choose another directory with --output DIR.") from error
    if asked.json:
        more = {"baseline": [dataclasses.asdict(each) for each in judged]} if asked.baseline else {}
        output.as_json({**document, "files": files, **more})
    elif files:
        output.echo(f"\nWrote to {os.path.relpath(target)}: {', '.join(path.name for path in files)}")
    if asked.fail_if is None:
        return 0
    (output.warn if asked.json else output.echo)(f"\n{baseline.verdict(judged, asked.fail_if)}")
    return int(any(each.verdict == "worse" for each in judged))


def _written(
    asked: argparse.Namespace, directories: Sequence[Path], comparison: Comparison, target: Path
) -> Sequence[Path]:
    """Write the files; again if a job ended meanwhile, because this may have replaced newer files of the sweep."""
    if not asked.output and (asked.json or len(directories) > 1):
        return ()
    while True:
        files = render.write(comparison, target)
        newer = compared(read_sources(directories, asked.metric, asked.direction), asked.metric, asked.direction)
        if _states(newer) == _states(comparison):
            return files
        comparison = newer


def _states(comparison: Comparison) -> list[tuple[Path, str]]:
    return [(job.directory, job.status) for row in comparison.rows for job in row.jobs]


def _plain(comparison: Comparison) -> dict[str, Any]:
    found, rows = answer(comparison), []
    for row in comparison.rows:
        more = {"status": row.status, "label": row.label, "combination": by_key(row.jobs[0].overrides)}
        rows.append(dataclasses.asdict(row) | more | {"jobs": [job.directory for job in row.jobs]})
    ranking = {"metric": comparison.ranking.name, "better": comparison.ranking.better}
    said = dataclasses.asdict(found) | {"answer": found.text, "undecided": sorted(comparison.undecided)}
    return dataclasses.asdict(comparison) | {"kind": "sweep", "rows": rows} | ranking | said


def _plain_source(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {"directory": source.directory, "others": source.others, "progress": None}
    if source.progress:
        progress = dataclasses.asdict(source.progress) | {"not_started": source.progress.not_started}
        found |= {"command": source.plan.command, "progress": progress}
    return found


def _judged(asked: argparse.Namespace, directory: Path, document: dict[str, Any]) -> list[Change]:
    path, direction = Path(asked.baseline), "maximize" if document["better"] == "higher" else "minimize"
    before: baseline.Document
    if path.is_dir():
        source = Source.of(path)
        own = source.metric == document["metric"]  # then the direction of that sweep applies
        before = _plain(compared([source], document["metric"], None if own and not asked.direction else direction))
    else:
        before = baseline.read(path)
    if asked.direction:
        before = {**before, "better": document["better"]}
    least = document["matters"] if asked.fail_if is None else asked.fail_if
    return baseline.changes(before, document, least, (str(path), str(directory)))


def _show(judged: Sequence[Change], document: dict[str, Any]) -> None:
    def text(value: float | None) -> str:
        return "-" if value is None else shown(value)

    rows = []
    for each in judged:
        change = "-" if each.change is None else f"{'+' if each.change > 0 else ''}{percent(each.change)}"
        rows.append((each.combination, text(each.before), text(each.now), change, text(each.chance), each.verdict))
    heads = ("combination", "baseline", "now", "change", "p-value", "verdict")
    name = document["metric"]
    output.echo()
    output.table(f"{name} compared with the baseline ({document['better']} is better)", heads, rows, verdict="verdict")


class RunReport:
    """The report on one run. The run may lack records, or its records may be unreadable."""

    def __init__(self, directory: Path) -> None:
        self._job, unread = JobResult.of_directory(directory), []
        try:
            self._run = Run.read(directory)
        except ConfigError as error:
            self._run = Run(directory, ())
            unread = [f"The run has no usable records: {error}"]
        self._warnings = [*_warnings(self._job, self._run), *unread]
        self._saved = saved(self._run) if self._run.ranks else []
        self._starts, self._failures, self._goodput = starts(self._run), failures(self._run), goodput(self._run)
        self._tables = [_time_of(self._goodput)] if self._goodput is not None else []
        self._tables += [_starts(self._starts)] if self._starts else []
        self._tables += [_restarts(self._failures)] if self._failures else []
        self._tables += [_checkpoints(self._saved)] if self._saved else []

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "headline": self._headline(),
            "attempts": len(self._run.attempts),
            "checkpoints": [dataclasses.asdict(one) for one in self._saved],
            "starts": [dataclasses.asdict(one) for one in self._starts],
        }
        if (life := self._goodput) is not None:
            found["goodput"] = {"share": life.share, **dataclasses.asdict(life), "rest": life.rest}
        return {"kind": "run", **dataclasses.asdict(self._job), **found, "warnings": self._warnings}

    def show(self) -> None:
        """Print the report. Of a long table, print only the first and last rows."""
        output.echo(f"{printable(str(self._job.directory), lines=False)}: {self._headline()}", "bold")
        for line in self._warnings:
            output.echo(line, "yellow")
        if found := self._job.figures:
            output.echo()
            of = f" of {counted(len(self._run.attempts), 'attempt')}" if self._run.earlier else ""
            output.table(f"Metrics{of}", (), [(name, figure_text(name, found[name])) for name in in_order(found)])
        for table in self._tables:
            rows = [tuple(map(_cell, row)) for row in table.rows]
            if len(rows) > 2 * _ENDS + 1:
                rows[_ENDS:-_ENDS] = [("…", *[""] * (len(table.columns) - 1))]
            output.echo()
            columns = tuple(map(str, table.columns))
            output.table(table.title, columns, rows, verdict="state" if "state" in columns else "")

    def _headline(self) -> str:
        run, life, found, status = self._run, self._goodput, self._job.figures, self._job.status
        if not run.ranks:
            return f"{status.capitalize()}."
        text = f"{_STATUS.get(status, status)} {counted(found.get('steps', 0), 'step')} on "
        text += f"{counted(run.world_size, 'rank')} in "
        if run.earlier and life is not None:
            text += f"{shown(life.seconds)} s, of which {percent(life.share)} were training."
        else:
            text += f"{shown(run.seconds)} s."
        if several := self._failures:
            after = [f"after step {at}" if (at := each.restored + each.again) else "before step 1" for each in several]
            resumed = [f"from step {each.restored}" if each.restored else "from the beginning" for each in several]
            many = len(several) > _FAILURES
            text += f" Failed {counted(len(several), 'time')}, last {after[-1]}" if many else f" Failed {_and(after)}"
            text += f", resumed {resumed[-1] if many else _and(resumed)}."
        if found.get("checkpoints"):
            text += f" {counted(found['checkpoints'], 'checkpoint')}"
            if "stall_ms" in found:
                text += f"; median stall of the training loop: {metric('stall_ms').text(found['stall_ms'])}"
            text += "."
        return text


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of metrics in display order: built-in metrics, then other metrics in alphabetical order."""
    order = [one.name for one in METRICS]
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def figure_text(name: str, value: float) -> str:
    """Return a metric with its unit. Values that the task returned have no known unit."""
    if name.startswith(RETURNED):
        return shown(value)
    if "bytes" in name:
        return quantity(value / 2**20, "MiB")
    return quantity(value, next((one.unit for one in METRICS if one.name == name), "s" if name.endswith("_s") else ""))


def _and(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _warnings(job: JobResult, recorded: Run) -> Iterator[str]:
    """Yield warnings about the run: a failure, skipped checkpoints, slow ranks and missing records."""
    if job.error:
        yield f"The run {'failed' if job.status == 'failed' else 'did not finish'}: {tables.first_line(job.error)}"
    if not recorded.ranks:
        return
    if recorded.others:
        yield (
            f"Left out: {counted(recorded.others, 'other run')} in this directory; the report is on the latest run. "
            "Give each run its own directory with hydra.run.dir=PATH."
        )
    records = [record for attempt in recorded.attempts for record in attempt.ranks]
    for step, steps, why in (each for record in records for each in record.fallbacks):
        text = f"The run resumed from step {step}, because a newer checkpoint was skipped ({tables.first_line(why)})"
        yield f"{text}: {counted(steps, 'step')} repeated."
    yield from _stragglers(records)
    if recorded.damaged:
        yield f"Skipped {counted(recorded.damaged, 'corrupt line')} of the records."
    there = {rank.rank for rank in recorded.ranks if rank.rank < recorded.world_size}
    if gone := recorded.world_size - len(there):
        first = itertools.islice((rank for rank in range(recorded.world_size) if rank not in there), 8)
        named = ", ".join(map(str, first)) + ", …" * (gone > 8)
        yield f"No records of {counted(gone, 'rank')} ({named}): the metrics cover only the other ranks."


def _time_of(life: Goodput) -> Table:
    parts = [
        ("training", life.training, "steps trained for the first time"),
        ("saves", life.saves, "stalls of the training loop during saves"),
        ("repeated steps", life.again, "steps trained again after a failure or a rollback"),
        ("starts", life.starts, "from the beginning, or from a regular exit, to the first step"),
        *((f"restarts: {name}", s, f"until {PHASES.get(name, name)}") for name, s in life.restarts.items()),
        ("other", life.rest, "attempts without a step, and the time after the last step"),
    ]
    rows = tuple((name, seconds, 100 * seconds / (life.seconds or 1.0), what) for name, seconds, what in parts)
    heads = ("part", "s", "%", "description")
    return Table("How the time was spent", heads, rows, "All attempts, measured on rank 0.")


def _starts(every: Sequence[Started]) -> Table:
    names = [name for name in PHASES if any(name in one.phases for one in every)]
    rows = tuple((one.number, *(one.phases.get(name) for name in names), one.seconds) for one in every)
    note = "Each phase begins when the previous one ends; the first, at launch or at the last step before a failure."
    return Table("Seconds of each start, by phase", ("restart", *names, "total"), rows, note)


def _restarts(every: Sequence[Started]) -> Table:
    rows = tuple((one.number, one.step, one.again, one.origin or None, tables.first_line(one.why)) for one in every)
    note = "Restored from: a tier, checkpoint storage or the emergency save; - if training started from scratch."
    return Table("Restarts", ("restart", "first step", "repeated steps", "restored from", "reason"), rows, note)


def _stragglers(records: Sequence[RankRecord]) -> Iterator[str]:
    told = [each for record in records for each in record.stragglers]
    for at, (rank, machine, since, slow, wait_s, step_s) in enumerate(told):
        if slow:
            until = next((step for other, _, step, still, *_ in told[at:] if other == rank and not still), None)
            span = f"from step {since}" if until is None else f"from step {since} to step {until}"
            wait = f"the other ranks waited {1e3 * wait_s:.3g} ms of each {1e3 * step_s:.3g} ms step"
            yield f"Rank {rank} on machine {machine} was slow {span}: {wait}."


def _checkpoints(every: Sequence[Saved]) -> Table:
    first = 0 if any(one.restart for one in every) else 1  # without restarts, omit the column
    heads = ("restart", "step", "saved at s", "stall ms", "staging ms", "writing ms", "total ms", "MiB", "state")
    rows = tuple(
        (
            one.restart,
            one.step,
            one.start,
            _ms(one.stall_s),
            _ms(one.stage_s),
            _ms(one.write_s),
            _ms(one.end - one.start) if one.state == "complete" else None,
            one.nbytes / 2**20,
            one.state + (f": {one.error}" if one.error else ""),
        )[first:]
        for one in every
    )
    return Table("Checkpoints", heads[first:], rows, "Times of the slowest rank; MiB: bytes staged by all ranks.")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _cell(value: Value) -> str:
    return "-" if value is None else shown(value) if isinstance(value, float) else str(value)
