"""Reports as one file of HTML each: the answer first, then the tables, the pictures, the configs and the environment.

A page needs nothing but itself: style, script and pictures are inside, and its content policy forbids it the network.
Whatever comes out of a run (overrides, configs, errors, directory names) is text and stays text. :func:`compare_page`
is the page of a sweep and :func:`run_page` that of a single run; what they have in common is ``templates/base.html``.
Tables are sorted by any column: numbers as numbers, by all their digits, whatever of them is written.

Writes no file; Jinja2 is imported when a page is made.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stagereg.sweep.render.tables as tables
from stagereg.sweep.answer import answer as answer_of
from stagereg.sweep.metric import METRICS, counted, in_order, labelled
from stagereg.sweep.render.plots import COLOURS
from stagereg.sweep.render.tables import ComparisonTable, first_line, number, one_line

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Comparison
    from stagereg.sweep.result import JobResult
    from stagereg.sweep.run import Run

__all__ = ["Picture", "Table", "compare_page", "run_page"]

_LONGEST_CONFIG = 200_000
"""Characters of a config that a page takes."""


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Attributes:
        title: its heading; for timelines of a sweep what the run is.
        svg: an SVG document as ``plots.svg_text`` makes it; it goes into the page and follows light and dark.
        caption: what there is to see, also for a screen reader.
    """

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a page that can be sorted by each column: numbers as numbers, the rest as text, None as a gap, last.

    Attributes:
        title: its heading.
        columns: the heads.
        rows: as many values each as there are columns; floats are written with few digits and sorted with all.
        caption: a line below the heading.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    caption: str = ""


def compare_page(comparison: Comparison, pictures: Sequence[Picture] = (), timelines: Sequence[Picture] = ()) -> str:
    """Return the page of a sweep: the sentence, tiles, table, ``pictures``, ``timelines``, configs and environment."""
    table = ComparisonTable.of(comparison)
    ranking, best = comparison.ranking, comparison.best
    jobs = [job for one in table.rows for job in one.row.jobs]
    found = answer_of(comparison)
    done = sum(job.status == "completed" for job in jobs)
    rows = [row for row in comparison.rows if not row.again]
    repeats = f"{counted(len(rows), 'combination')}, {counted(comparison.repeats, 'run')} each"
    again = "; and the A/A row" if len(rows) < len(comparison.rows) else ""
    tiles = [
        ("the difference is", found.difference, found.why, found.kind),
        ("runs", f"{done} of {len(jobs)} completed", repeats + again, "" if done == len(jobs) else "bad"),
    ]
    if best is not None:
        tiles.insert(0, (f"best {ranking.name}", one_line(best.cells[ranking.name]), best.label, "best"))
    began = min((job.started for job in jobs if job.started > 0), default=None)
    when = "" if began is None else f" · {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(began))}"
    return _rendered(
        "compare.html",
        title=f"Sweep {comparison.directory.name}",
        kicker=f"stagereg sweep · {comparison.directory}{when}",
        directory=comparison.directory,
        answer=found.text,
        warnings=comparison.warnings,
        tiles=tiles,
        command_label="The best, once more",
        command=_command(best.jobs) if best else "",
        table=table,
        metrics=comparison.metrics,
        ranking=ranking,
        pictures=pictures,
        timelines=timelines,
        environment=_facts([{**job.environment, **job.versions} for job in jobs]),
    )


def run_page(
    run: Run,
    figures: Mapping[str, float],
    pictures: Sequence[Picture] = (),
    *,
    answer: str,
    tables: Sequence[Table] = (),
    config: str = "",
    command: str = "",
    environment: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    error: str = "",
) -> str:
    """Return the page of a single run.

    Args:
        run: its records; they give the heading and how it ended.
        figures: its figures as ``figures.figures`` gives them.
        pictures: the timeline, the loss curve …, in this order.
        answer: the sentence on top.
        tables: further tables below the figures, such as one of its checkpoints.
        config: the text of its config (YAML).
        command: the command line that runs it again.
        environment: names and values, as ``machine.describe`` gives them.
        warnings: lines for the top of the page.
        error: what the run has failed of, in full; folded, for a line of it is expected among the warnings.
    """
    kind = {"completed": "good", "failed": "bad"}.get(run.status, "open")
    tiles = [("status", run.status, f"after {number(run.seconds)} s", kind)]
    metrics = [metric for metric in METRICS if metric.name in figures][:3]
    tiles += [(one.name, one.text(figures[one.name]), re.split(r"[:.]", one.doc)[0], "") for one in metrics]
    docs = {metric.name: metric.doc for metric in METRICS}
    rows = tuple((*labelled(name, figures[name]), docs.get(name, "")) for name in in_order(figures))
    return _rendered(
        "run.html",
        title=f"Run {run.directory.name}",
        kicker=f"stagereg run · {run.directory}",
        directory=run.directory,
        answer=answer,
        warnings=warnings,
        tiles=tiles,
        command_label="Run it again",
        command=command,
        pictures=pictures,
        tables=[Table("Figures", ("figure", "value", "unit", "what it is"), rows), *tables],
        config=_cut(config),
        error=error,
        environment=_facts([environment or {}]),
    )


def _rendered(template: str, **values: Any) -> str:
    import jinja2
    from markupsafe import Markup

    from stagereg._version import __version__

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"css": lambda verdict: verdict.lower().replace("/", ""), "number": number}
    environment.tests["finite"] = lambda value: value is not None and math.isfinite(value)
    script = f"\n{loader.get_source(environment, 'sort.js')[0]}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        version=__version__,
        drawn=_Drawn(),
        number=number,
        median_text=tables.median_text,
        spread_text=tables.spread_text,
        first_line=first_line,
        marks=tables.MARKS,
        command_of=_command,
        config_of=_config,
        **values,
    )


class _Drawn:
    """Turns the pictures of a page into markup, each with names of its own."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, picture: Picture) -> Any:
        """The SVG without a size of its own and with colours that the page may change.

        Trusts the document: matplotlib escapes all text in it.
        """
        from markupsafe import Markup, escape

        shown = escape(f"{picture.title}. {picture.caption}")
        self._count += 1
        text = picture.svg[picture.svg.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        head, _, rest = text.partition(">")
        head = re.sub(r' (width|height)="[^"]*"', "", head).replace("<svg", f'<svg role="img" aria-label="{shown}"')
        rest = re.sub(r"<[^>]+>", lambda tag: self._of_the_page(tag[0]), rest)
        return Markup(f"{head}>{rest}")

    def _of_the_page(self, tag: str) -> str:
        tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>p{self._count}-", tag)
        for name, colour in COLOURS.items():
            tag = tag.replace(f": {colour}", f": var(--plot-{name}, {colour})")
        return tag


def _command(jobs: Sequence[JobResult]) -> str:
    return next((job.command for job in jobs if job.command), "")


def _config(jobs: Sequence[JobResult]) -> str:
    """The config of the first job that has one."""
    for job in jobs:
        file = job.directory / ".hydra" / "config.yaml"
        if file.is_file():
            return _cut(file.read_text(encoding="utf-8", errors="replace"))
    return ""


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_CONFIG:
        return text
    return f"{text[:_LONGEST_CONFIG]}\n# {len(text) - _LONGEST_CONFIG} more characters are left out here"


def _facts(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and values; where the runs differ, all of them. The load is of the first run: it always differs."""
    shown: dict[str, dict[str, None]] = {}
    for environment in environments:
        for name, value in environment.items():
            if value not in (None, "") and (name != "load" or name not in shown):
                shown.setdefault(name, {})[value if isinstance(value, str) else json.dumps(value, default=str)] = None
    return [(name, "; ".join(values)) for name, values in shown.items()]
