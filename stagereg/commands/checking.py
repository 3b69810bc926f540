"""``stagereg check``: try every promise of a plugin's contract, and print a table of what was kept and what broken.

A plugin is imported and tried in processes of their own, so one that crashes, leaves or hangs costs a row and no more.
``target`` finds what is to be tried, ``check_trial`` and ``attempt`` try it; the promises are those of the
contracts in ``stagereg.testing``.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import stagereg.commands.attempt as attempt
import stagereg.output as output
from stagereg.commands.attempt import Section
from stagereg.commands.target import NOT_TRIED, resolve
from stagereg.errors import ConfigError

__all__ = ["add_to", "run"]

_VERDICTS = ("kept", "broken", "not shown", "skipped")
_BESIDE = 20
"""Columns of a line that neither a promise nor what was seen of it has."""
_LINES = 12
"""Lines of what was seen."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check`` to the commands of ``stagereg``."""
    help_ = "try what a plugin promises: a table of the promises it keeps and breaks"
    parser = commands.add_parser("check", help=help_, description=help_[0].upper() + help_[1:] + ".")
    parser.add_argument(
        "target",
        help="an installed package or its folder, a module, a file (plugin.py), or kind/name (stager/pinned_cached)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of a stager that has no contract of its own; may be given again",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds that each promise may take, %(default)g"
    )
    output.add_output_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Try all that ``asked.target`` has and print how it fared. Returns 0 if every promise was kept, 1 if not.

    Raises:
        ConfigError: there is nothing of that name to check, or it does not take the options.
    """
    if not asked.timeout > 0:
        raise ConfigError(f"--timeout takes seconds, more than 0, not {asked.timeout:g}.")
    options = _options(asked.set)
    target = resolve(asked.target)
    sections = [Section(target.package, "the metadata of the package", target.rows)] if target.rows else []
    try:
        for job in target.jobs:
            sections += attempt.run(job, options, asked.timeout, output.progress)
    finally:
        output.progress()
    counts = Counter(row.verdict for section in sections for row in section.rows)
    bad = counts["broken"] + counts["not shown"]
    if asked.json:
        output.as_json({"target": asked.target, "kept": not bad, "counts": counts, "sections": _plain(sections)})
        return int(bad > 0)
    for section in sections:
        title, heads = f"{section.title}  {section.origin}".strip(), ("verdict", "promise", "seen")
        output.table(title, heads, list(_rows(section)), verdict="verdict")
        output.echo()
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict])
    output.echo(f"{asked.target}: {summary}", "bold red" if bad else "bold green")
    return int(bad > 0)


def _rows(section: Section) -> Iterator[list[str]]:
    """The rows of a table for people: nothing is repeated, and nothing is longer than a screen."""
    before, width = "", (output.line_width() - _BESIDE) // 2
    tried = [row for row in section.rows if row.seen != NOT_TRIED]
    for row in tried:
        again = row.seen == before and row.verdict == "broken"
        yield [row.verdict, textwrap.fill(row.promise, width), "as above" if again else _shortened(row.seen)]
        before = row.seen or before
    if left := len(section.rows) - len(tried):
        yield ["skipped", f"The other {left} promises.", NOT_TRIED]


def _shortened(seen: str) -> str:
    lines = seen.splitlines()
    if len(lines) <= _LINES:
        return seen
    first, last = lines[: _LINES // 3], lines[_LINES // 3 - _LINES + 1 :]
    return "\n".join([*first, f"[{len(lines) - len(first) - len(last)} more lines; --json has them]", *last])


def _options(given: list[str]) -> dict[str, Any]:
    """The options of ``--set``, as a config reads them."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for one in given:
        key, equals, _ = one.partition("=")
        if not equals or not key.strip() or key.startswith("_"):
            raise ConfigError(f"--set {one}: write it as key=value, as in --set max_in_flight=3.")
    try:
        options: Any = OmegaConf.to_container(OmegaConf.from_dotlist(given), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"--set {' '.join(given)} cannot be read: {error}") from error
    return {str(key): value for key, value in options.items()}


def _plain(sections: list[Section]) -> list[dict[str, Any]]:
    return [{"title": s.title, "origin": s.origin, "rows": [vars(row) for row in s.rows]} for s in sections]
