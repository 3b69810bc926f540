"""Reports as one file of HTML each: the answer first, then the table, the pictures, the configs and the environment.

A page needs nothing but itself: style, script and pictures are inside, and its content policy forbids it the network.
Whatever comes out of a run (overrides, configs, errors, directory names) is text and stays text. Two pages stand on one
base template: :func:`compare_page` for a sweep and :func:`run_page` for a single run.

Writes no file; Jinja2 is imported when a page is made.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stagereg.sweep.render.sheets as sheets
import stagereg.sweep.render.tables as tables
from stagereg.sweep.answer import Confidence, confidence, repeated, sentences
from stagereg.sweep.metric import METRICS, counted
from stagereg.sweep.render.plots import COLOURS
from stagereg.sweep.render.sheets import Table

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Comparison, ComparisonRow
    from stagereg.sweep.result import JobResult
    from stagereg.sweep.run import Run

__all__ = ["Picture", "Table", "compare_page", "run_page"]

_LONGEST_CONFIG = 200_000
"""Characters of a config that a page takes."""
_LINE = 180
"""Characters that are still read on top of a page."""


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Attributes:
        title: its heading; for timelines of a sweep what the run is.
        svg: an SVG document as ``plots.svg_text`` makes it; it goes into the page and follows light and dark.
        png: a PNG file's bytes, for what is too much for SVG; used where ``svg`` is empty.
        caption: what there is to see, also for a screen reader.
    """

    title: str
    svg: str = ""
    png: bytes = b""
    caption: str = ""


@dataclass(frozen=True)
class _Tile:
    """One fact below the answer."""

    head: str
    text: str
    caption: str = ""
    kind: str = ""


@dataclass(frozen=True)
class _Drawn:
    """A picture as it goes into the page: ``svg`` is markup, ``png`` an address that holds the bytes."""

    title: str
    svg: str
    png: str
    caption: str


@dataclass(frozen=True)
class _Detail:
    """One combination, opened: where its jobs lie, how to run it again, and its config."""

    title: str
    verdict: str
    error: str
    note: str
    command: str
    config: str
    jobs: tuple[tuple[str, str, str], ...] = field(default_factory=tuple)


def compare_page(comparison: Comparison, pictures: Sequence[Picture] = (), timelines: Sequence[Picture] = ()) -> str:
    """Return the page of a sweep: the sentence, tiles, table, ``pictures``, ``timelines``, configs and environment."""
    rows = tables.ordered(comparison)
    jobs = [job for row in rows for job in row.jobs]
    best = comparison.best
    return _rendered(
        "compare.html",
        title=f"Sweep {comparison.directory.name}",
        directory=str(comparison.directory),
        when=_when(jobs),
        answer=sentences(comparison),
        verdict=_CERTAINTY[confidence(comparison)][2],
        tiles=_tiles(comparison, jobs),
        command=_again(best.jobs) if best else "",
        warnings=[*comparison.warnings, *_incomplete(rows)],
        notes=list(tables.notes(rows)),
        constant=list(comparison.constant),
        table=sheets.compared(comparison, rows),
        measured=any(map(tables.measured, rows)),
        ties=tables.TIES if tables.tied(rows) else "",
        again=tables.AGAIN if any(row.again for row in rows) else "",
        pictures=[_drawn(picture, f"p{index}-") for index, picture in enumerate(pictures)],
        timelines=[_drawn(picture, f"t{index}-") for index, picture in enumerate(timelines)],
        details=[_detail(row, comparison) for row in rows],
        environment=_facts([{**job.environment, **job.versions} for job in jobs]),
        report=f"stagereg report {comparison.directory}",
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
    return _rendered(
        "run.html",
        title=f"Run {run.directory.name}",
        directory=str(run.directory),
        answer=answer,
        verdict="good" if run.status == "completed" else "bad",
        tiles=_run_tiles(run, figures),
        warnings=list(warnings),
        figures=sheets.of_figures(figures),
        tables=[sheets.as_given(table) for table in tables],
        pictures=[_drawn(picture, f"p{index}-") for index, picture in enumerate(pictures)],
        config=_cut(config),
        command=command,
        error=error,
        environment=_facts([environment or {}]),
        report=f"stagereg report {run.directory}",
    )


def _rendered(template: str, **values: Any) -> str:
    import jinja2
    from markupsafe import Markup

    from stagereg._version import __version__

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    shelf = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = f"\n{loader.get_source(shelf, 'sort.js')[0]}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return shelf.get_template(template).render(
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        version=__version__,
        **values,
    )


def _drawn(picture: Picture, prefix: str) -> _Drawn:
    png = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}" if picture.png and not picture.svg else ""
    svg = _inline(picture.svg, prefix, f"{picture.title}. {picture.caption}") if picture.svg else ""
    return _Drawn(picture.title, svg, png, picture.caption)


def _inline(document: str, prefix: str, shown: str) -> Any:
    """The SVG as markup for a page: names of its own, no size of its own, and colours that the page may change.

    Trusts the document: matplotlib escapes all text in it.
    """
    from markupsafe import Markup, escape

    text = document[document.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", text)
    text = re.sub(r'^<svg([^>]*?) height="[^"]*"', r"<svg\1", text)
    text = re.sub(r"<[^>]+>", lambda tag: _of_the_page(tag[0], prefix), text)
    return Markup(f'<svg role="img" aria-label="{escape(shown)}"{text[4:]}')


def _of_the_page(tag: str, prefix: str) -> str:
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", tag)
    for name, colour in COLOURS.items():
        tag = tag.replace(f": {colour}", f": var(--plot-{name}, {colour})")
    return tag


_CERTAINTY = {
    Confidence.NO_BEST: ("unknown", "no combination completed with {metric}", "bad"),
    Confidence.ALONE: ("not known", "no other combination has this figure in all its runs", "open"),
    Confidence.TIE: ("a tie", "{ties} cannot be distinguished from the best", "open"),
    Confidence.ONCE: ("not proven", "one run has no spread; {repeats} would have one", "open"),
    Confidence.FEW: ("likely", "larger than the spread, but of few runs only", "open"),
    Confidence.REAL: ("real", "larger than the spread of the runs", "good"),
}
"""Whether the answer is one: in short, in a sentence, and which colour that has."""


def _tiles(comparison: Comparison, jobs: Sequence[JobResult]) -> list[_Tile]:
    ranking, best = comparison.ranking, comparison.best
    tiles = []
    if best is not None and (cell := tables.known(best, ranking)):
        shown = f"{tables.median_text(cell)} {tables.spread_text(cell)}".rstrip()
        tiles.append(_Tile(f"best {ranking.name}", shown, best.label, "best"))
    short, caption, kind = _CERTAINTY[confidence(comparison)]
    facts = {
        "metric": ranking.name,
        "ties": counted(len(comparison.ties), "other"),
        "repeats": repeated(comparison, 3),
    }
    tiles.append(_Tile("the difference is", short, caption.format(**facts), kind))
    done = sum(job.status == "completed" for job in jobs)
    rows = [row for row in comparison.rows if not row.again]
    repeats = f"{counted(len(rows), 'combination')}, {counted(comparison.repeats, 'run')} each"
    again = "; and the A/A row" if len(rows) < len(comparison.rows) else ""
    tiles.append(_Tile("runs", f"{done} of {len(jobs)} completed", repeats + again, "" if done == len(jobs) else "bad"))
    return tiles


def _incomplete(rows: Sequence[ComparisonRow]) -> list[str]:
    """What failed, in one line, to be seen before the table."""
    broken = [row for row in rows if row.status != "completed"]
    if not broken:
        return []
    # The table has no space for the error of a row with figures.
    shown = (f"{row.status}: {tables.first_line(row.error)}" if row.cells else row.status for row in broken)
    names = "; ".join(f"{tables.named(row)} ({status})" for row, status in zip(broken, shown, strict=True))
    where = names if len(names) < _LINE else "they are the last of the table, and their errors are with their configs"
    return [f"{len(broken)} of {counted(len(rows), 'row')} did not complete: {where}."]


def _detail(row: ComparisonRow, comparison: Comparison) -> _Detail:
    jobs = tuple(
        (
            str(job.directory),
            job.status,
            f"repeat {job.repeat}{', A/A' if job.again else ''}, {tables.number(job.seconds)} s"
            if job.seconds
            else f"repeat {job.repeat}",
        )
        for job in row.jobs
    )
    config = next((text for job in row.jobs if (text := _config(job.directory))), "")
    kind = tables.verdict(row, comparison)
    return _Detail(tables.named(row), kind, row.error, row.note, _again(row.jobs), config, jobs)


def _again(jobs: Sequence[JobResult]) -> str:
    return next((job.command for job in jobs if job.command), "")


def _config(directory: Path) -> str:
    try:
        return _cut((directory / ".hydra" / "config.yaml").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_CONFIG:
        return text
    return f"{text[:_LONGEST_CONFIG]}\n# {len(text) - _LONGEST_CONFIG} more characters are left out here"


def _when(jobs: Iterable[JobResult]) -> str:
    """When the first of the jobs began."""
    began = min((job.started for job in jobs if job.started > 0), default=None)
    return "" if began is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began))


def _facts(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and values; where the runs differ, all of them. The load is of the first run: it always differs."""
    shown: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for one in environments for name in one):
        values = [_text(one[name]) for one in environments if one.get(name) not in (None, "")]
        different = list(dict.fromkeys(values[:1] if name == "load" else values))
        if different:
            shown.append((name, "; ".join(different)))
    return shown


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return tables.number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return json.dumps(value, default=str)


def _run_tiles(run: Run, figures: Mapping[str, float]) -> list[_Tile]:
    kind = {"completed": "good", "failed": "bad"}.get(run.status, "open")
    tiles = [_Tile("status", run.status, f"after {tables.number(run.seconds)} s", kind)]
    for metric in METRICS:
        if metric.name in figures and len(tiles) < 4:
            caption = re.split(r"[:.]", metric.doc)[0]
            tiles.append(_Tile(metric.name, metric.text(figures[metric.name]), caption))
    return tiles
