"""The reports on a sweep and on one run: a sentence, warnings, figures, checkpoints and ranks.

Each goes to the terminal, into JSON, and with its pictures into a page. What is asked for, and where files go, is
decided in :mod:`stagereg.commands.reporting`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import stagereg.output as output
import stagereg.sweep.render as render
import stagereg.sweep.render.page as page
import stagereg.sweep.render.plots as plots
import stagereg.sweep.render.tables as tables
from stagereg.errors import ConfigError
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import compare
from stagereg.sweep.figures import figures, saved
from stagereg.sweep.metric import counted, in_order, labelled, metric, quantity, shown, usual
from stagereg.sweep.render.page import Picture
from stagereg.sweep.render.tables import Table, Value
from stagereg.sweep.result import JobResult, results
from stagereg.sweep.run import RankRecord, Run
from stagereg.sweep.timeline import timeline_figure
from stagereg.sweep.trace import trace_text

__all__ = ["RunReport", "SweepReport"]

_MIB = 2**20
_GIB = 2**30
_FIRST, _LAST = 6, 6
"""Checkpoints that a terminal shows of a run that has many."""
_CAPTION = (
    "What every rank did when. A stall is a checkpoint holding up training; staging and writing that lie below steps "
    "cost training no more than what they slow it down."
)


class SweepReport:
    """The comparison of a sweep's jobs, ranked by ``metric`` and ``direction``, else by what it was run with."""

    def __init__(self, directory: Path, metric: str, direction: str | None) -> None:
        jobs = results(directory)
        own, its_direction = _ranking(jobs)
        self._comparison = compare(jobs, metric or own, direction or (None if metric else its_direction))

    def write(self, target: Path) -> list[Path]:
        """Write its files and return their paths. Raises: ``OSError``."""
        return render.write(self._comparison, target)

    def show(self) -> None:
        """Print it."""
        tables.terminal(self._comparison)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        comparison, rows = self._comparison, []
        for row in comparison.rows:
            cells = {name: dataclasses.asdict(cell) for name, cell in row.cells.items()}
            shown = {"parameters": row.parameters, "status": row.status, "again": row.again, "error": row.error}
            rows.append({**shown, "note": row.note, "cells": cells, "jobs": [job.directory for job in row.jobs]})
        return {
            **{"kind": "sweep", "directory": comparison.directory, "answer": answer(comparison)},
            **{"metric": comparison.ranking.name, "better": comparison.ranking.better, "repeats": comparison.repeats},
            **{"parameters": comparison.parameters, "constant": comparison.constant},
            **{"warnings": comparison.warnings, "rows": rows},
        }


def _ranking(jobs: Sequence[JobResult]) -> tuple[str, str | None]:
    """What the sweep was ranked by when it ran, by the config of the first job that has it, else what makes sense."""
    for job in jobs:
        with contextlib.suppress(Exception):  # whatever YAML and OmegaConf raise for a torn file
            config = OmegaConf.load(job.directory / ".hydra" / "config.yaml")
            if chosen := OmegaConf.select(config, "sweep.metric"):
                return str(chosen), OmegaConf.select(config, "sweep.direction")
    return usual(set().union(*(job.figures for job in jobs))), None


class RunReport:
    """The report on one run, also on one that recorded nothing but its result, or whose records cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._job = JobResult.of_directory(directory)
        self._run: Run | None = None
        self._why, self._figures, environment = "", self._job.figures, {}
        try:
            self._run = run = Run.read(directory)
            self._figures, environment = figures(run, self._job.returned), run.environment
        except ConfigError as error:
            self._why = str(error)
        self._environment = environment | self._job.environment
        self._warnings = list(_warnings(self._job, self._run))

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        job, run = self._job, self._run
        return {
            **{"kind": "run", "directory": job.directory, "status": job.status, "error": job.error},
            "overrides": job.overrides,
            "figures": self._figures,
            "checkpoints": [dataclasses.asdict(one) for one in saved(run)] if run is not None else [],
            "ranks": [dict(zip(_RANK_NAMES, _rank(rank), strict=True)) for rank in (run.ranks if run else ())],
            "versions": job.versions,
            "environment": self._environment,
            "warnings": self._warnings,
        }

    def show(self) -> None:
        """Print it; of many checkpoints the first and the last ones."""
        output.echo(f"{self._job.directory}: {self._answer()}", "bold")
        for line in self._warnings:
            output.echo(line, "yellow")
        if self._figures:
            output.echo()
            labels = [labelled(name, self._figures[name]) for name in in_order(self._figures)]
            output.table("Figures", (), [(head, quantity(value, unit)) for head, value, unit in labels])
        for table in _tables(self._run) if self._run is not None else []:
            rows = table.rows
            if len(rows) > _FIRST + _LAST + 1:
                gap = ("…", *[""] * (len(table.columns) - 1))
                rows = (*rows[:_FIRST], gap, *rows[-_LAST:])
            output.echo()
            lines = [tuple(map(_cell, row)) for row in rows]
            output.table(table.title, tuple(map(str, table.columns)), lines, verdict="state")
        if self._why:
            output.echo(f"\nThere is no timeline: {self._why}")

    def write(self, target: Path) -> list[Path]:
        """Write the pictures and the page into ``target`` and return their paths. Raises: ``OSError``."""
        job, run = self._job, self._run
        if run is None:
            return []
        target.mkdir(parents=True, exist_ok=True)
        documents, pictures = _pictures(run)
        text = page.run_page(
            run,
            self._figures,
            pictures,
            answer=self._answer(),
            tables=_tables(run),
            config=page.config_text(job.directory),
            command=job.command,
            environment={**self._environment, **run.versions},
            warnings=self._warnings,
            error=(job.error or "") if "\n" in (job.error or "").strip() else "",
        )
        documents |= {"trace.json": trace_text(run).encode(), "report.html": text.encode()}
        for name in ("timeline.svg", "timeline.png", "trace.json", "report.html"):
            if name in documents:
                (target / name).write_bytes(documents[name])
            else:
                (target / name).unlink(missing_ok=True)
        return [target / name for name in documents]

    def _answer(self) -> str:
        """What the run was, in a sentence or two."""
        text, run, found = self._job.status.capitalize(), self._run, self._figures
        if run is not None:
            text += f": {counted(found.get('steps', 0), 'step')} on {counted(run.world_size, 'rank')}"
            text += f" in {shown(run.seconds)} s"
        if found.get("checkpoints"):
            text += f". {counted(found['checkpoints'], 'checkpoint')}"
            if "stall_ms" in found:
                text += f", each held training for {metric('stall_ms').text(found['stall_ms'])} (median)"
            if "lost_percent" in found:
                text += f"; {metric('lost_percent').text(found['lost_percent'])} of training time lost"
        return f"{text}."


def _warnings(job: JobResult, recorded: Run | None) -> Iterator[str]:
    """What to know before reading the figures: how it ended, if not well, and what is missing."""
    if job.error:
        yield f"It {'failed' if job.status == 'failed' else 'did not come to its end'}: {tables.first_line(job.error)}"
    if recorded is None:
        return
    for each in (each for rank in recorded.ranks for each in rank.fallbacks):
        why, lost = tables.first_line(each.why), counted(each.lost, "step")
        yield f"It went on from step {each.step}, since a newer checkpoint was damaged ({why}): {lost} lost."
    if recorded.damaged:
        yield f"Left out, being damaged: {counted(recorded.damaged, 'line')} of its records."
    if gone := sorted(set(range(recorded.world_size)) - {rank.rank for rank in recorded.ranks}):
        named = ", ".join(map(str, gone[:8])) + ", …" * (len(gone) > 8)
        yield f"There are no records of {counted(len(gone), 'rank')} ({named}): the figures are those of the others."


_RANK_NAMES = ("rank", "host", "steps", "without_data", "stall_ms", "lost", "peak_gib", "state")


def _tables(recorded: Run) -> list[Table]:
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
    caption = "Times are the slowest rank's; MiB is what all ranks staged."
    ranks = tuple(_rank(rank) for rank in recorded.ranks)
    every = [Table("Checkpoints", heads, rows, caption)] if rows else []
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
        end.get("error") or end.get("status") or "no end recorded",
    )


def _pictures(recorded: Run) -> tuple[dict[str, bytes], list[Picture]]:
    """The files of the timeline by name, and the pictures of the page."""
    documents: dict[str, bytes] = {}
    pictures = []
    try:
        if any(rank.steps or rank.stalls for rank in recorded.ranks):
            timeline = timeline_figure(recorded)
            documents = {f"timeline.{kind}": plots.document(timeline, kind) for kind in ("svg", "png")}
            pictures.append(Picture("Timeline", documents["timeline.svg"].decode(), caption=_CAPTION))
    except ImportError:
        print("no picture: pip install 'hydra-stagereg[report]'", file=sys.stderr)
    return documents, pictures


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _cell(value: Value) -> str:
    return "-" if value is None else shown(value) if isinstance(value, float) else str(value)
