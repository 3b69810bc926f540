"""``stagereg check``: try every promise of a plugin's contract, and print a table of what was kept and what broken.

Each component is tried in a child process (``check_cases``), which runs its contract by pytest. If that crashes or
hangs, the case that was running is broken, those after it are not tried, and the next component is. Here is the command
line, what its target means, and the table. Nothing is imported here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stagereg.output as output
import stagereg.registry as registry
from stagereg.commands.child import ChildCall
from stagereg.commands.listing import find
from stagereg.errors import ConfigError, nearest
from stagereg.installed import DISTRIBUTION, normalized, unmet
from stagereg.registry import Entry

__all__ = ["CONTRACTS", "add_to", "resolve", "run"]

CONTRACTS = "stagereg.contracts"
"""The entry points that announce contracts, by the names of their plugins."""
_VERDICTS = ("kept", "broken", "not shown", "skipped")
_START_S = 300.0
"""Seconds that a child process has to start and to import torch, which is not the plugin's doing."""
_BESIDE = 20
"""Columns of a line that neither a promise nor what was seen of it has."""
_USAGE = (
    "\nGive a package, its folder with the pyproject.toml, a module, a file (plugin.py) or kind/name of a component."
)

_LINES = 12
"""Lines of what was seen that the table shows."""

Case = dict[str, str]
"""One promise: its ``section``, ``name`` and ``promise``, the ``verdict`` (one of ``_VERDICTS``), what was ``seen``."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check`` to the commands of ``stagereg``."""
    help_ = "try what a plugin promises: a table of the promises it keeps and breaks"
    parser = output.add_command(commands, "check", help_, run)
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


def run(asked: argparse.Namespace) -> int:
    """Try all that ``asked.target`` has and print how it fared. Returns 0 if every promise was kept, 1 if not.

    Raises:
        ConfigError: there is nothing of that name to check, it does not take the options, or pytest is not installed.
    """
    if not asked.timeout > 0:
        raise ConfigError(f"--timeout takes seconds, more than 0, not {asked.timeout:g}.")
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError(f"Contracts are run by pytest, which is not installed: pip install '{DISTRIBUTION}[check]'")
    options = _options(asked.set)
    jobs, cases = resolve(asked.target)
    for job in jobs:
        cases += _tried(job, options, asked.timeout)
    output.progress()
    counts = Counter(case["verdict"] for case in cases)
    bad = counts["broken"] + counts["not shown"]
    if asked.json:
        output.as_json({"target": asked.target, "kept": not bad, "counts": counts, "cases": cases})
        return int(bad > 0)
    for title in dict.fromkeys(case["section"] for case in cases):
        rows = list(_rows([case for case in cases if case["section"] == title]))
        output.table(title, ("verdict", "promise", "seen"), rows, verdict="verdict")
        output.echo()
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict])
    output.echo(f"{asked.target}: {summary}", "bold red" if bad else "bold green")
    return int(bad > 0)


def _tried(target: str, options: dict[str, Any], limit_s: float) -> list[Case]:
    """Run the cases of a target in a child process."""
    with tempfile.TemporaryDirectory(prefix="stagereg-") as folder:
        events = Path(folder, "events")
        events.touch()

        def progress() -> int:
            lines = events.read_text().rpartition("\n")[0].splitlines()
            output.progress(f"{target}: {json.loads(lines[-1])['promise']}" if lines else target)
            return len(lines)

        with ChildCall("stagereg.commands.check_cases:run", folder, target, json.dumps(options)) as child:
            refusal, failure = child.result(limit_s, progress, _START_S)
        if refusal:
            raise ConfigError(refusal)
        rows = map(json.loads, events.read_text().splitlines())
        cases: dict[tuple[str, str], Case] = {(row["section"], row["name"]): row for row in rows}
    if failure:
        promise = "It leaves the process that uses it alone."
        running = [key for key, case in cases.items() if case["verdict"] == "running"] or [(target, "runs")]
        for section, name in running:
            case = cases.get((section, name), {"section": section, "name": name, "promise": promise})
            cases[section, name] = case | {"verdict": "broken", "seen": failure}
    return list(cases.values())


def _rows(cases: list[Case]) -> Iterator[list[str]]:
    """The rows of a table for people: nothing is repeated, and nothing is longer than a screen."""
    before, width = "", (output.line_width() - _BESIDE) // 2
    for case in cases:
        lines = case["seen"].splitlines()
        seen = "\n".join([*lines[:_LINES], f"[{len(lines) - _LINES} more lines; --json has them]"][: len(lines)])
        again = case["verdict"] != "kept" and seen == before
        yield [case["verdict"], textwrap.fill(case["promise"], width), "as above" if again and seen else seen]
        before = seen or before


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


# -- what the target means


def resolve(target: str) -> tuple[list[str], list[Case]]:
    """Find what ``target`` means: a file, a folder with a ``pyproject.toml``, ``kind/name``, a package, a module.

    Returns:
        What is to be tried, each in a process: ``kind/name``, or a module; and whether a package's metadata is right.

    Raises:
        ConfigError: it is none of these, or there is nothing in it to check; the message has what to give.
        UnknownNameError: there is no such component.
    """
    path = Path(target)
    if target.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"There is no file {target}.")
        return [_module_of(path.resolve())], []
    if (path / "pyproject.toml").is_file():
        return _project(path)
    if "/" in target and (target.partition("/")[0] in registry.kinds() or not path.exists()):
        return [_job(find(target))], []
    if not re.fullmatch(r"[\w.@-]+", target):
        raise ConfigError(f"{target!r} is nothing that can be checked.{_USAGE}")
    if package := _package(target):
        return package
    entries = registry.entries()
    if any(target in (entry.name, entry.bare) for entry in entries):
        return [_job(find(target))], []
    inside = [_job(e) for e in entries if f"{e.target.partition(':')[0]}.".startswith(f"{target}.")]
    if inside or _importable(target):
        return inside or [target], []
    known = [*(d.name for d in importlib.metadata.distributions() if d.name), *(entry.name for entry in entries)]
    near = f" Did you mean '{target}.py'?" if Path(f"{target}.py").is_file() else nearest(target, known)
    raise ConfigError(f"{target!r} is no installed package, module or component.{near}{_USAGE}")


def _job(entry: Entry) -> str:
    return f"{entry.kind}/{entry.name}"


def _module_of(file: Path) -> str:
    """The name that a file has for its neighbours, packages above it being those with ``__init__.py``."""
    parts, root = [file.stem], file.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    sys.path.insert(0, str(root))  # the child process has it then
    return ".".join(parts)


def _importable(module: str) -> bool:
    """Whether there is a module of that name; of a dotted one only the first part is looked for, which runs nothing."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _project(folder: Path) -> tuple[list[str], list[Case]]:
    try:
        name = str(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"])
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder / 'pyproject.toml'} does not name its package: {error!r}.") from error
    if found := _package(name):
        return found
    raise ConfigError(
        f"{folder} is the package {name}, which is not installed, so nothing in it can be chosen.\n"
        f"Run: python -m pip install --editable {folder}"
    )


def _package(name: str) -> tuple[list[str], list[Case]] | None:
    """The components of the installed distribution of that name, if there is one, and whether its metadata is right."""
    try:
        found = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    title = f"{found.name} {found.version}"
    announced = {point.name for point in found.entry_points if point.group == registry.ENTRY_POINTS}
    if not announced and normalized(found.name) != DISTRIBUTION:
        if _importable(name):
            return None
        raise ConfigError(
            f"The package {title} announces nothing under {registry.ENTRY_POINTS!r}, so nothing in it can be chosen.\n"
            'Write in its pyproject.toml: [project.entry-points."stagereg.plugins"] "stager.name" = "module:Class"'
        )
    jobs = [_job(e) for e in registry.entries() if normalized(e.distribution) == normalized(found.name)]
    needs = [normalized(re.split(r"[^\w.-]", line)[0]) for line in found.requires or []]
    problems = [why for who, why in registry.unreadable() if who == title]
    if wrong := unmet(found.name):
        problems.append(wrong)
    elif normalized(found.name) != DISTRIBUTION and DISTRIBUTION not in needs:
        problems.append(f'it requires no stagereg; write in its pyproject.toml: dependencies = ["{DISTRIBUTION}>=..."]')
    contracts = {point.name for point in found.entry_points if point.group == CONTRACTS}
    for each in sorted(contracts - announced):
        problems.append(f"there is no plugin for the contract {each!r}.{nearest(each, announced)}")
    promise = "It declares its plugins, their contracts, and which stagereg it needs."
    verdict = "broken" if problems else "kept"
    case = {"section": title, "name": "metadata", "promise": promise, "verdict": verdict, "seen": "\n".join(problems)}
    return jobs, [case]
