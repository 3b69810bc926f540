"""``stagereg check``: try every promise of a plugin's contract, and print a table of what was kept and what broken.

Each component is tried in a child process (``check_cases``) by pytest. If the process crashes or hangs, the running
case is broken and the rest of that component is not tried. This module has the command line, the target and the table.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

import stagereg.base.output as output
import stagereg.registry as registry
from stagereg.base.installed import DISTRIBUTION, normalized, unmet
from stagereg.commands.arguments import add_command, add_timeout
from stagereg.commands.child import call_in_child
from stagereg.commands.listing import find
from stagereg.errors import ConfigError, nearest

CONTRACTS = "stagereg.contracts"  # the entry points that announce contracts, by the names of their plugins
_VERDICTS = ("kept", "broken", "not shown", "skipped")
_START_S = 300.0  # seconds that a child process has to start and to import torch, which is not the plugin's doing
_BESIDE = 20  # columns of a line that neither a promise nor what was seen of it has
_TARGET = (
    "a package that announces plugins, the folder of one that is not installed, a module, a file (plugin.py), or "
    "kind/name of a component (stager/shared)"
)

Case = dict[str, str]
"""One promise: its ``section``, ``name`` and ``promise``, the ``verdict`` (one of ``_VERDICTS``), what was ``seen``."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "try what a plugin promises: a table of the promises it keeps and breaks"
    parser = add_command(commands, "check", help_, run)
    parser.add_argument("target", help=_TARGET)
    add_timeout(parser, "that each promise may take, besides the waits that its contract limits")


def run(asked: argparse.Namespace) -> int:
    """Try all that ``asked.target`` has and print how it fared; return 0 if every promise was kept, 1 if not."""
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError(f"Contracts are run by pytest, which is not installed: pip install '{DISTRIBUTION}[check]'")
    targets, cases = resolve(asked.target)
    for target in targets:
        cases += _tried(target, asked.timeout)
    output.progress()
    counts = Counter(case["verdict"] for case in cases)
    bad = counts["broken"] + counts["not shown"]
    if asked.json:
        output.as_json({"target": asked.target, "kept": not bad, "counts": counts, "cases": cases})
        return int(bad > 0)
    _print("", cases)
    if 0 < bad < len(cases):
        _print("Once more, what is not kept: ", [case for case in cases if case["verdict"] in ("broken", "not shown")])
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict])
    output.echo(f"{asked.target}: {summary}", "bold red" if bad else "bold green")
    return int(bad > 0)


def _print(before: str, cases: list[Case]) -> None:
    wide = (output.line_width() - _BESIDE) // 2
    for title in dict.fromkeys(case["section"] for case in cases):
        mine = [case for case in cases if case["section"] == title]
        rows = [(case["verdict"], textwrap.fill(case["promise"], wide), case["seen"]) for case in mine]
        output.table(f"{before}{title}", ("verdict", "promise", "seen"), rows, verdict="verdict")
        output.echo()


def _tried(target: str, limit_s: float) -> list[Case]:
    with tempfile.TemporaryDirectory(prefix="stagereg-") as folder:
        events = Path(folder, "events")
        events.touch()

        def progress() -> tuple[int, float]:
            rows = [json.loads(line) for line in events.read_text().rpartition("\n")[0].splitlines()]
            promises = [row["promise"] for row in rows if "promise" in row]
            output.progress(f"{target}: {promises[-1]}" if promises else target)
            return len(rows), rows[-1].get("limit_s", 0.0) if rows else 0.0

        refusal, failure = call_in_child(
            "stagereg.commands.check_cases:run", folder, target, limit_s=limit_s, start_s=_START_S, progress=progress
        )
        if refusal:
            raise ConfigError(refusal)
        rows = [json.loads(line) for line in events.read_text().splitlines()]
        cases: dict[tuple[str, str], Case] = {(row["section"], row["name"]): row for row in rows if "name" in row}
    if failure:
        running = [case for case in cases.values() if case["verdict"] == "running"]
        promise = "It leaves the process that uses it alone."
        for case in running or [{"section": target, "name": "runs", "promise": promise}]:
            cases[case["section"], case["name"]] = case | {"verdict": "broken", "seen": failure}
    return list(cases.values())


def resolve(target: str) -> tuple[list[str], list[Case]]:
    """Return what ``target`` names, a ``kind/name`` or module for each process, and cases of a package's metadata."""
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise ConfigError(f"There is no file {target}.")
        parts, root = [Path(target).stem], Path(target).resolve().parent
        while (root / "__init__.py").is_file():
            parts, root = [root.name, *parts], root.parent
        sys.path.insert(0, str(root))  # the child process has it then
        return [".".join(parts)], []
    if package := _package(target):
        return package
    folder, entries = Path(target), registry.entries()
    named = any(target in (entry.name, entry.bare) for entry in entries)
    if not named and (folder / "pyproject.toml").is_file():
        return _project(folder)
    kind, _, name = target.partition("/")
    if named or (name and (kind in registry.kinds() or not folder.is_dir())):
        entry = find(target)
        return [f"{entry.kind}/{entry.name}"], []
    top = target.partition(".")[0]  # which is looked for without running anything
    if top and "/" not in top and importlib.util.find_spec(top) is not None:
        return [target], []
    if folder.is_dir():
        return _project(folder)
    known = [*(d.name for d in importlib.metadata.distributions() if d.name), *(entry.name for entry in entries)]
    raise ConfigError(
        f"{target!r} is no installed package, module or component.{nearest(target, known)}\nGive {_TARGET}."
    )


def _package(name: str) -> tuple[list[str], list[Case]] | None:
    """The components of the installed distribution of that name, if there is one, and whether its metadata is right."""
    try:
        found = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    title, own = f"{found.name} {found.version}", normalized(found.name)
    if not found.entry_points.select(group=registry.ENTRY_POINTS) and own != DISTRIBUTION:
        return None
    problems = [*(why for who, why in registry.unreadable() if who == title), *filter(None, [unmet(found.name)])]
    promise = "It declares its plugins, and which stagereg it needs."
    verdict = "broken" if problems else "kept"
    case = {"section": title, "name": "metadata", "promise": promise, "verdict": verdict, "seen": "\n".join(problems)}
    mine = [entry for entry in registry.entries() if normalized(entry.distribution) == own]
    return [f"{entry.kind}/{entry.name}" for entry in mine], [case]


def _project(folder: Path) -> tuple[list[str], list[Case]]:
    """As :func:`_package`, of a package in a folder: its metadata goes where that of installed ones is looked for."""
    described = folder / "pyproject.toml"
    try:
        project = tomllib.loads(described.read_text()).get("project", {}) if described.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{described} is not valid TOML: {error}") from error
    points = project.get("entry-points", {})
    if "name" not in project or registry.ENTRY_POINTS not in points:
        raise ConfigError(
            f"{folder} is a folder without a pyproject.toml that has a name and "
            f'[project.entry-points."{registry.ENTRY_POINTS}"].\nGive a file in it, as in stagereg check '
            f"{folder / 'plugin.py'}, or install it (pip install -e {folder}) and give its name."
        )
    metadata = Path(tempfile.mkdtemp(prefix="stagereg-"))
    atexit.register(shutil.rmtree, metadata, ignore_errors=True)
    name, version = project["name"], project.get("version", "0")
    info = metadata / f"{normalized(name).replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {each}\n" for each in project.get("dependencies", []))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    with (info / "entry_points.txt").open("w") as file:
        for group, named in points.items():
            file.write(f"[{group}]\n" + "".join(f"{point} = {to}\n" for point, to in named.items()))
    # The child has them then.
    sys.path[:0] = [str(each) for each in (metadata, folder.resolve(), folder.resolve() / "src")]
    found = _package(name)
    assert found is not None
    return found
