"""The report on a sweep as one file of HTML: answer, table, pictures, configs and environment.

The page needs no other file: style and pictures are inside, its content policy forbids the network, and it has no
script. Overrides, configs, errors and directory names of a run stay text. Jinja2 is imported when a page is made.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stagereg.sweep.render.tables as tables_of
from stagereg.sweep.answer import answer as answer_of
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import shown
from stagereg.sweep.result import CONFIG


@dataclass(frozen=True)
class _Detail:
    title: str
    texts: Sequence[tuple[str, str]]
    verdict: str


def compare_page(comparison: Comparison, picture: bytes = b"") -> str:
    """Return the page of a sweep: the sentence, the table, the SVG, and of each row its config and command."""
    import jinja2

    from stagereg._version import __version__

    best = comparison.best
    jobs = [job for row in comparison.ranked for job in row.jobs]
    began = min((job.started for job in jobs if job.started > 0), default=None)
    when = "" if began is None else f" · {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(began))}"
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell_texts"] = tables_of.cell_texts
    environment.filters["css"] = lambda verdict: verdict.lower().replace("/", "")
    environment.filters["shown"] = shown
    return environment.get_template("page.html").render(
        version=__version__,
        marks=tables_of.MARKS,
        title=f"Sweep {comparison.directory.name}",
        kicker=f"stagereg sweep · {comparison.directory}{when}",
        directory=comparison.directory,
        answer=answer_of(comparison).text,
        warnings=comparison.warnings,
        command=_command(best) if best else "",
        table=tables_of.compare_table(comparison),
        remarks=tables_of.remarks(comparison),
        picture=base64.b64encode(picture).decode(),
        details=[_row_detail(row, comparison.ranking.name) for row in comparison.ranked],
        environment=_facts([{**job.environment, **job.versions} for job in jobs]),
    )


def _row_detail(row: ComparisonRow, ranking: str) -> _Detail:
    runs = [f"{job.directory} {job.status}, repeat {job.repeat}, {shown(job.seconds)} s" for job in row.jobs]
    files = (file for job in row.jobs if (file := job.directory / CONFIG).is_file())
    config = next((file.read_text(encoding="utf-8", errors="replace") for file in files), "")
    texts = [("Error", row.error), ("Command", _command(row)), ("Runs", "\n".join(runs)), ("Config", config)]
    return _Detail(tables_of.row_name(row), texts, row.verdict(ranking))


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
