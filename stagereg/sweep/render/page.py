"""Reports as one file of HTML each: the answer first, then the tables, the pictures, the configs and the environment.

A page needs nothing but itself: style and pictures are inside, and its content policy forbids it the network.
Whatever comes out of a run (overrides, configs, errors, directory names) is text and stays text. :func:`compare_page`
is the page of a sweep and :func:`run_page` that of a single run, both made by ``templates/page.html``.
There is no script.

Writes no file; Jinja2 is imported when a page is made.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import stagereg.sweep.render.tables as tables_of
from stagereg.sweep.answer import answer as answer_of
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import METRICS, in_order, labelled, shown
from stagereg.sweep.render.tables import Table
from stagereg.sweep.result import CONFIG, JobResult


@dataclass(frozen=True)
class _Detail:
    """A part of a page that is folded: texts by their labels."""

    title: str
    texts: Sequence[tuple[str, str]]
    verdict: str = ""


def compare_page(comparison: Comparison, picture: bytes = b"") -> str:
    """Return the page of a sweep: the sentence, the table, the SVG, and of each row its config and command."""
    table = tables_of.compare_table(comparison)
    best = comparison.best
    jobs = [job for row in comparison.ranked for job in row.jobs]
    began = min((job.started for job in jobs if job.started > 0), default=None)
    when = "" if began is None else f" · {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(began))}"
    return _rendered(
        title=f"Sweep {comparison.directory.name}",
        kicker=f"stagereg sweep · {comparison.directory}{when}",
        directory=comparison.directory,
        answer=answer_of(comparison),
        warnings=comparison.warnings,
        command_label="The best, once more",
        command=_command(best) if best else "",
        tables=[replace(table, title=f"Table: {table.title}")],
        remarks=tables_of.remarks(comparison),
        picture=base64.b64encode(picture).decode(),
        details=[_row_detail(row, comparison.ranking.name) for row in comparison.ranked],
        environment=_facts([{**job.environment, **job.versions} for job in jobs]),
    )


def _row_detail(row: ComparisonRow, ranking: str) -> _Detail:
    runs = [f"{job.directory} {job.status}, repeat {job.repeat}, {shown(job.seconds)} s" for job in row.jobs]
    config = next((text for job in row.jobs if (text := _config_text(job.directory))), "")
    texts = [("Error", row.error), ("Command", _command(row)), ("Runs", "\n".join(runs)), ("Config", config)]
    return _Detail(tables_of.row_name(row), texts, row.verdict(ranking))


def run_page(job: JobResult, answer: str, warnings: Sequence[str], tables: Sequence[Table]) -> str:
    """Return the page of a single run: the answer on top, warnings, figures, then ``tables``."""
    docs = {metric.name: metric.doc for metric in METRICS}
    rows = tuple((*labelled(name, job.figures[name]), docs.get(name, "")) for name in in_order(job.figures))
    error = job.error if job.error and "\n" in job.error.strip() else ""
    folded = (("Error", error), ("Config", _config_text(job.directory)))
    return _rendered(
        title=f"Run {job.directory.name}",
        kicker=f"stagereg run · {job.directory}",
        directory=job.directory,
        answer=answer,
        warnings=warnings,
        command_label="Run it again",
        command=job.command,
        tables=[Table("Figures", ("figure", "value", "unit", "what it is"), rows), *tables],
        remarks=(),
        picture="",
        details=[_Detail(name, [("", text)]) for name, text in folded if text],
        environment=_facts([{**job.environment, **job.versions}]),
    )


def _config_text(directory: Path) -> str:
    file = directory / CONFIG
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _rendered(**values: Any) -> str:
    import jinja2

    from stagereg._version import __version__

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell_texts"] = tables_of.cell_texts
    environment.filters["css"] = lambda verdict: verdict.lower().replace("/", "")
    environment.filters["shown"] = shown
    return environment.get_template("page.html").render(version=__version__, marks=tables_of.MARKS, **values)


def _command(row: ComparisonRow) -> str:
    return next((job.command for job in row.jobs if job.command), "")


def _facts(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and values; where the runs differ, all of them. The load is of the first run: it always differs."""
    found: dict[str, dict[str, None]] = {}
    for environment in environments:
        for name, value in environment.items():
            if value not in (None, "") and (name != "load" or name not in found):
                found.setdefault(name, {})[value if isinstance(value, str) else json.dumps(value, default=str)] = None
    return [(name, "; ".join(values)) for name, values in found.items()]
