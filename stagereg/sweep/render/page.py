"""Creates the HTML report of a sweep in one file: result, tables, plot, configs and environment.

The content security policy of the report forbids network access, and all scripts except one that sorts and filters the
table. Without scripts, the report still shows everything. Text from runs is escaped. Jinja2 is imported on first use.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stagereg.sweep.render.tables as tables_of
from stagereg.base.small_files import read_small
from stagereg.errors import printable
from stagereg.sweep.answer import answer
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.files import YAML_BYTES
from stagereg.sweep.number_text import shown
from stagereg.sweep.result import CONFIG

_TEMPLATES = Path(__file__).parent / "templates"


def compare_page(comparison: Comparison, picture: bytes = b"") -> str:
    """Return the HTML report of a sweep. ``picture``: the plot as SVG, or empty for no plot."""
    import jinja2
    from markupsafe import Markup

    from stagereg.base.version import __version__

    jobs = [job for row in comparison.ranked for job in row.jobs]
    began = min((job.started for job in jobs if job.started > 0), default=None)
    when = "" if began is None else f" · {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(began))}"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters["css"] = lambda verdict: verdict.lower().replace("/", "")
    environment.filters |= {"shown": shown, "name": tables_of.row_name}
    environment.filters["parts"] = re.compile(r"[^_.]*[_.]?").findall  # splits a name where a line may break
    table = tables_of.compare_table(comparison)
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        version=__version__,
        script=Markup(script),  # not escaped, because it is a file of this package
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        tables=tables_of,
        title=f"Sweep {comparison.directory.name}",
        kicker=f"stagereg sweep · {comparison.directory}{when}",
        answer=answer(comparison),
        table=table,
        comparison=comparison,
        rows=[(row, each, _details(row)) for row, each in zip(comparison.ranked, table.rows, strict=True)],
        remarks=tables_of.remarks(comparison, comparison.ranked),
        options=tables_of.option_table(comparison),
        picture=base64.b64encode(picture).decode(),
        environment=_facts([{**job.environment, **job.versions} for job in jobs]),
    )


def _details(row: ComparisonRow) -> list[tuple[str, str]]:
    runs = [f"{job.directory} {job.status}, repeat {job.repeat}, {shown(job.seconds)} s" for job in row.jobs]
    config = next(filter(None, (_text_of(job.directory / CONFIG) for job in row.jobs)), "")
    command = next((job.command for job in row.jobs if job.command), "")
    return [("Error", row.error), ("Command", command), ("Runs", "\n".join(runs)), ("Config", config)]


def _text_of(path: Path) -> str:
    """Return the text of a config, or "" if it is unreadable or a link, which could expose a file of the reader."""
    with contextlib.suppress(OSError):
        return read_small(path, YAML_BYTES).decode(errors="replace")
    return ""


def _shown(value: Any) -> Any:
    return printable(str(value)) if isinstance(value, (str, Path)) and not hasattr(value, "__html__") else value


def _facts(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (name, values) pairs: all distinct values in the environments; for ``load``, only the first value."""
    found: dict[str, dict[str, None]] = {}
    for environment in environments:
        for name, value in environment.items():
            if value not in (None, "") and (name != "load" or name not in found):
                text = value if isinstance(value, str) else json.dumps(value, default=str).strip("[]")
                found.setdefault(name, {})[text] = None
    return [(name, "; ".join(values)) for name, values in found.items()]
