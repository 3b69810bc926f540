"""``stagereg report``: the tables, pictures and pages of a run or of a sweep, made again from what lies on disk.

For a sweep it is what the sweep ended with, for a run its figures, its checkpoints and its timeline. It can be asked at
any time: while a run goes on, after it was killed, on another machine. That jobs have failed is part of what is
reported, not a failure of the report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagereg import output
from stagereg.errors import ConfigError

if TYPE_CHECKING:
    from stagereg.sweep.compare import Comparison
    from stagereg.sweep.render.page import Picture, Table
    from stagereg.sweep.result import JobResult
    from stagereg.sweep.run import RankRecord, Run

__all__ = ["add_to", "run"]

_MIB = 2**20
_GIB = 2**30
_FIRST, _LAST = 6, 6
"""Checkpoints that a terminal shows of a run that has many."""
_WORDS = (
    "What every rank did when. A stall is a checkpoint holding up training; staging and writing that lie below steps "
    "cost training no more than what they slow it down."
)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` to the commands of ``stagereg``."""
    words = "show a run or a sweep again: tables, pictures, an HTML page"
    parser = commands.add_parser("report", help=words, description=words[0].upper() + words[1:] + ".")
    parser.add_argument("directory", help="of a run (hydra.run.dir) or of a sweep (hydra.sweep.dir)")
    parser.add_argument("--metric", default="", help="what a sweep is ranked by; what it was run with if not given")
    parser.add_argument("--direction", choices=("minimize", "maximize"), help="which way is better, if not the usual")
    parser.add_argument("--window", default="", metavar="A:B", help="of a run's timeline, seconds since its start")
    parser.add_argument("--output", default="", metavar="DIR", help="where the files go; next to the run if not given")
    parser.add_argument("--tensorboard", default="", metavar="DIR", help="write scalars and HParams for TensorBoard")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document in place of text; files only with --output"
    )
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Print the report and write its files. Returns 0, also where what is reported on has failed.

    Raises:
        ConfigError: the directory is neither a run nor a sweep, an option is not for what it is or has no meaning, a
            package is missing, or a file could not be written.
    """
    from stagereg.sweep import place, tensorboard

    directory = Path(asked.directory)
    window = _window(asked.window)
    kind = place.kind_of(directory)
    if asked.tensorboard:
        tensorboard.check()
    if kind == "sweep":
        if asked.window:
            raise ConfigError(f"--window is for the timeline of a run, and {directory} is a sweep: name a job of it.")
        _sweep(asked, directory)
    else:
        if asked.metric or asked.direction:
            raise ConfigError(f"--metric and --direction rank the jobs of a sweep, and {directory} is a single run.")
        _run(asked, directory, window)
    return 0


# -- a sweep


def _sweep(asked: argparse.Namespace, directory: Path) -> None:
    from stagereg.sweep import render, tensorboard
    from stagereg.sweep.compare import compare
    from stagereg.sweep.render import tables
    from stagereg.sweep.result import results

    jobs = results(directory)
    metric, direction = _ranking(jobs)
    if asked.metric:
        metric, direction = asked.metric, asked.direction
    comparison = compare(jobs, metric, asked.direction or direction)
    if asked.tensorboard:
        tensorboard.write_sweep(comparison, Path(asked.tensorboard))
    files, trouble = _written(asked, directory, lambda target: render.write(comparison, target))
    if asked.json:
        output.as_json({"kind": "sweep", **_plain(comparison), "files": files})
    else:
        tables.terminal(comparison)
    _say_where(files, asked, trouble)


def _ranking(jobs: Sequence[JobResult]) -> tuple[str, str | None]:
    """What the sweep was ranked by when it ran, by the config of the first job that says so, else what makes sense."""
    from omegaconf import OmegaConf

    from stagereg.sweep.metrics import usual

    for job in jobs:
        with contextlib.suppress(Exception):  # whatever YAML and OmegaConf have to say of a torn file
            config = OmegaConf.load(job.directory / ".hydra" / "config.yaml")
            if metric := OmegaConf.select(config, "sweep.metric"):
                return str(metric), OmegaConf.select(config, "sweep.direction")
    return usual(set().union(*(job.figures for job in jobs))), None


def _plain(comparison: Comparison) -> dict[str, Any]:
    return {
        "directory": comparison.directory,
        "answer": comparison.answer,
        "metric": comparison.ranking.name,
        "better": comparison.ranking.better,
        "repeats": comparison.repeats,
        "parameters": comparison.parameters,
        "constant": comparison.constant,
        "warnings": comparison.warnings,
        "rows": [
            {
                "parameters": row.parameters,
                "status": row.status,
                "again": row.again,
                "error": row.error,
                "note": row.note,
                "cells": {name: dataclasses.asdict(cell) for name, cell in row.cells.items()},
                "jobs": [job.directory for job in row.jobs],
            }
            for row in comparison.rows
        ],
    }


# -- a run


def _run(asked: argparse.Namespace, directory: Path, window: tuple[float, float] | None) -> None:
    from stagereg.sweep import tensorboard, timeline
    from stagereg.sweep.figures import figures
    from stagereg.sweep.result import JobResult
    from stagereg.sweep.run import Run

    job = JobResult.of_directory(directory)
    recorded = Run.read(directory) if any(directory.glob("metrics*.jsonl")) else None
    if window is not None and recorded is not None:
        timeline.check_window(recorded, window)
    found = figures(recorded, job.returned) if recorded is not None else job.figures
    if asked.tensorboard:
        if recorded is None:
            raise ConfigError(f"--tensorboard: {directory} has no metrics.jsonl, so there is nothing to write.")
        tensorboard.write_run(recorded, Path(asked.tensorboard))
    warnings = list(_warnings(job, recorded))

    def write(target: Path) -> list[Path]:
        return [] if recorded is None else _write(target, job, recorded, found, warnings, window)

    files, trouble = _written(asked, directory, write)
    if asked.json:
        output.as_json({"kind": "run", **_plain_run(job, recorded, found, warnings), "files": files})
    else:
        _print(job, recorded, found, warnings)
    _say_where(files, asked, trouble)


def _plain_run(
    job: JobResult, recorded: Run | None, found: dict[str, float], warnings: Sequence[str]
) -> dict[str, Any]:
    from stagereg.sweep.checkpoints import saved

    checkpoints = saved(recorded) if recorded is not None else []
    ranks = recorded.ranks if recorded is not None else ()
    return {
        "directory": job.directory,
        "status": job.status,
        "error": job.error,
        "overrides": job.overrides,
        "figures": found,
        "checkpoints": [dataclasses.asdict(one) for one in checkpoints],
        "ranks": [dict(zip(_RANK_NAMES, _rank(rank), strict=True)) for rank in ranks],
        "versions": job.versions,
        "environment": job.environment,
        "warnings": warnings,
    }


def _print(job: JobResult, recorded: Run | None, found: dict[str, float], warnings: Sequence[str]) -> None:
    output.say(f"{job.directory}: {_answer(job, recorded, found)}", "bold")
    for line in warnings:
        output.say(line, "yellow")
    if found:
        output.say()
        output.table("Figures", (), [(head, text) for head, text in _figures(found)])
    if recorded is None:
        output.say(f"\nThere is no metrics.jsonl in {job.directory}: nothing was recorded, so there is no timeline.")
        return
    for table in _tables(recorded):
        rows = table.rows
        if len(rows) > _FIRST + _LAST + 1:
            gap = ("…", *[""] * (len(table.columns) - 1))
            rows = (*rows[:_FIRST], gap, *rows[-_LAST:])
        output.say()
        shown = [tuple(_cell(value) for value in row) for row in rows]
        output.table(table.title, table.columns, shown, verdict="state")


def _answer(job: JobResult, recorded: Run | None, found: dict[str, float]) -> str:
    """What the run was, in a sentence or two."""
    from stagereg.sweep.metrics import counted, metric

    text = job.status.capitalize()
    if recorded is not None:
        text += f": {counted(found.get('steps', 0), 'step')} on {counted(recorded.world_size, 'rank')}"
        text += f" in {_number(recorded.seconds)} s"
    if found.get("checkpoints"):
        text += f". {counted(found['checkpoints'], 'checkpoint')}"
        if "stall_ms" in found:
            text += f", each held training for {metric('stall_ms').text(found['stall_ms'])} (median)"
        if "lost_percent" in found:
            text += f"; {metric('lost_percent').text(found['lost_percent'])} of training time lost"
    return f"{text}."


def _warnings(job: JobResult, recorded: Run | None) -> Iterator[str]:
    from stagereg.sweep.metrics import counted
    from stagereg.sweep.render.tables import first_line

    if job.error:
        yield f"It {'failed' if job.status == 'failed' else 'did not come to its end'}: {first_line(job.error)}"
    if recorded is None:
        return
    if recorded.damaged:
        one = recorded.damaged == 1
        are, they = ("is", "it is") if one else ("are", "they are")
        yield f"{counted(recorded.damaged, 'line')} of its records {are} damaged; {they} left out."
    if len(recorded.ranks) < recorded.world_size:
        there = {rank.rank for rank in recorded.ranks}
        gone = [str(rank) for rank in range(recorded.world_size) if rank not in there]
        shown = ", ".join(gone[:8]) + ", …" * (len(gone) > 8)
        ranks = "rank" if len(gone) == 1 else "ranks"
        yield f"There are no records of {ranks} {shown}: the figures are those of the others."


def _figures(found: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Heads and texts."""
    from stagereg.sweep.metrics import in_order, in_words

    for name in in_order(found):
        head, value, unit = in_words(name, found[name])
        yield head, f"{_number(value)} {unit}".rstrip()


_RANK_NAMES = ("rank", "host", "steps", "without_data", "stall_ms", "lost", "peak_gib", "state")


def _tables(recorded: Run) -> list[Table]:
    from stagereg.sweep.checkpoints import saved
    from stagereg.sweep.render.page import Table

    heads = ("step", "saved at s", "stall ms", "staging ms", "writing ms", "complete after ms", "MiB", "state")
    rows = tuple(
        (
            one.step,
            one.start,
            _ms(one.stall_s),
            _ms(one.stage_s),
            _ms(one.write_s),
            _ms(one.end - one.start) if one.state == "complete" else None,
            one.nbytes / _MIB,
            one.state + (f": {one.error}" if one.error else ""),
        )
        for one in saved(recorded)
    )
    words = "Times are the slowest rank's; MiB is what all ranks staged."
    ranks = tuple(_rank(rank) for rank in recorded.ranks)
    every = [Table("Checkpoints", heads, rows, words)] if rows else []
    heads = ("rank", "host", "steps", "without data", "stall ms in sum", "lost saves", "peak GiB", "state")
    return [*every, Table("Ranks", heads, ranks)]


def _rank(rank: RankRecord) -> tuple[str | float | int | None, ...]:
    end = rank.end or {}
    peak = end.get("peak_rss")
    return (
        rank.rank,
        rank.start.get("host"),
        len(rank.steps),
        int((rank.join or {}).get("shadowed", 0)),
        1e3 * sum(span.seconds for span in rank.stalls),
        len(rank.lost),
        peak / _GIB if isinstance(peak, (int, float)) else None,
        end.get("error") or end.get("status") or "told no end",
    )


def _write(
    target: Path,
    job: JobResult,
    recorded: Run,
    found: dict[str, float],
    warnings: Sequence[str],
    window: tuple[float, float] | None,
) -> list[Path]:
    """Write the pictures and the page; return their paths."""
    from stagereg.sweep.render import page

    target.mkdir(parents=True, exist_ok=True)
    documents, pictures = _pictures(recorded, window)
    text = page.run_page(
        recorded,
        found,
        pictures,
        answer=_answer(job, recorded, found),
        tables=_tables(recorded),
        config=_text(job.directory / ".hydra" / "config.yaml"),
        command=job.command,
        environment={**recorded.environment, **job.environment, **recorded.versions},
        warnings=warnings,
        error=(job.error or "") if "\n" in (job.error or "").strip() else "",
    )
    documents["report.html"] = text.encode()
    for name in ("timeline.svg", "timeline.png", "report.html"):
        if name in documents:
            (target / name).write_bytes(documents[name])
        else:
            (target / name).unlink(missing_ok=True)
    return [target / name for name in documents]


def _pictures(recorded: Run, window: tuple[float, float] | None) -> tuple[dict[str, bytes], list[Picture]]:
    """The files of the timeline by name, and the pictures of the page."""
    from stagereg.sweep.curves import curves_figure
    from stagereg.sweep.render import plots
    from stagereg.sweep.render.page import Picture
    from stagereg.sweep.timeline import timeline_figure

    documents: dict[str, bytes] = {}
    pictures = []
    try:
        if any(rank.steps or rank.stalls for rank in recorded.ranks):
            timeline = timeline_figure(recorded, window)
            svg = plots.svg_text(timeline)
            documents = {"timeline.svg": svg.encode(), "timeline.png": plots.png_bytes(timeline)}
            pictures.append(Picture("Timeline", svg, words=_WORDS))
        if (curves := curves_figure(recorded)) is not None:
            pictures.append(Picture("Logged", plots.svg_text(curves), words="What was logged with stagereg.log."))
    except ImportError:
        print("no picture: pip install 'stagereg[report]'", file=sys.stderr)
    return documents, pictures


# -- what both need


def _window(text: str) -> tuple[float, float] | None:
    """``10:20`` as a pair of seconds; a side that is left open is the run's own."""
    if not text:
        return None
    start, colon, end = text.partition(":")
    try:
        window = (float(start or 0.0), float(end or math.inf))
    except ValueError:
        window = (math.nan, math.nan)
    if not colon or not 0 <= window[0] < window[1]:
        raise ConfigError(
            f"--window takes seconds since the start of the run, as in 10:20 or 10: or :20, not {text!r}."
        )
    return window


def _written(
    asked: argparse.Namespace, directory: Path, write: Callable[[Path], list[Path]]
) -> tuple[list[Path], ConfigError | None]:
    """Write the files, if any are wanted, and return them, or why they could not be: the tables are of use anyway."""
    if asked.json and not asked.output:
        return [], None
    target = Path(asked.output or directory)
    try:
        return write(target), None
    except OSError as error:
        why = error.strerror or error
        return [], ConfigError(f"Cannot write in {target}: {why}. `--output DIR` names another place.")


def _say_where(files: Sequence[Path], asked: argparse.Namespace, trouble: ConfigError | None) -> None:
    if trouble is not None:
        raise trouble
    if asked.json:
        return
    if files:
        names = ", ".join(path.name for path in files)
        output.say(f"\nWritten to {os.path.relpath(files[0].parent)}: {names}")
    if asked.tensorboard:
        output.say(f"For TensorBoard: tensorboard --logdir {shlex.quote(asked.tensorboard)}")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _number(value: float) -> str:
    from stagereg.sweep.metrics import shown

    return shown(value)


def _cell(value: str | float | int | None) -> str:
    return "-" if value is None else _number(value) if isinstance(value, float) else str(value)
