"""``stagereg check``: tests a plugin against its contract, and prints the promises (requirements) it keeps or breaks.

pytest tests each component in a child process (``check_cases``). If the process crashes or hangs, the running case is
broken and the other cases of the component are skipped. This module has the command line, the target and the table.
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

CONTRACTS = "stagereg.contracts"  # entry point group; the contract of a plugin has the plugin's name
_VERDICTS = ("kept", "broken", "not shown", "skipped")
_START_S = 300.0  # seconds for a child process to start and import torch, in addition to the plugin's limit
_OTHER_WIDTH = 20  # characters per line for all columns except `promise` and `seen`
_TARGET = (
    "an installed package with plugins, the folder of a package that is not installed, a module, a file (plugin.py), "
    "or kind/name of a component (stager/shared)"
)

Case = dict[str, str]
"""A test: ``section``, ``name``, ``promise``, ``verdict`` (one of ``_VERDICTS``) and ``seen`` (what happened)."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "test a plugin against its contract and list the promises it keeps and breaks"
    parser = add_command(commands, "check", help_, run)
    parser.add_argument("target", help=_TARGET)
    add_timeout(parser, "each promise, in addition to the timeouts of its contract")


def run(asked: argparse.Namespace) -> int:
    """Test ``asked.target`` and print the results. Return 0 if every promise was kept, otherwise 1."""
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("`stagereg check` needs pytest, which is not installed: pip install './stagereg[check]'")
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
        _print("Not kept: ", [case for case in cases if case["verdict"] in ("broken", "not shown")])
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict])
    output.echo(f"{asked.target}: {summary}", "bold red" if bad else "bold green")
    return int(bad > 0)


def _print(before: str, cases: list[Case]) -> None:
    wide = (output.line_width() - _OTHER_WIDTH) // 2
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
        promise = "The plugin neither crashes nor blocks the process that uses it."
        for case in running or [{"section": target, "name": "runs", "promise": promise}]:
            cases[case["section"], case["name"]] = case | {"verdict": "broken", "seen": failure}
    return list(cases.values())


def resolve(target: str) -> tuple[list[str], list[Case]]:
    """Return the ``kind/name`` or module to test in each child process, and the cases for a package's metadata."""
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise ConfigError(f"the file {target} does not exist")
        parts, root = [Path(target).stem], Path(target).resolve().parent
        while (root / "__init__.py").is_file():
            parts, root = [root.name, *parts], root.parent
        sys.path.insert(0, str(root))  # the child process inherits it
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
    top = target.partition(".")[0]  # `find_spec` imports nothing for a top-level module
    if top and "/" not in top and importlib.util.find_spec(top) is not None:
        return [target], []
    if folder.is_dir():
        return _project(folder)
    known = [*(d.name for d in importlib.metadata.distributions() if d.name), *(entry.name for entry in entries)]
    text = f"{target!r} is not an installed package, module or component.{nearest(target, known)}\nName {_TARGET}."
    raise ConfigError(text)


def _package(name: str) -> tuple[list[str], list[Case]] | None:
    """Return the components of an installed package and the case for its metadata. ``None`` if not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    title, own = f"{found.name} {found.version}", normalized(found.name)
    if not found.entry_points.select(group=registry.ENTRY_POINTS) and own != DISTRIBUTION:
        return None
    problems = [*(why for who, why in registry.unreadable() if who == title), *filter(None, [unmet(found.name)])]
    promise = "The package declares its plugins and the stagereg version that it requires."
    verdict = "broken" if problems else "kept"
    case = {"section": title, "name": "metadata", "promise": promise, "verdict": verdict, "seen": "\n".join(problems)}
    mine = [entry for entry in registry.entries() if normalized(entry.distribution) == own]
    return [f"{entry.kind}/{entry.name}" for entry in mine], [case]


def _project(folder: Path) -> tuple[list[str], list[Case]]:
    """Like :func:`_package`, for a package in a folder. Adds the folder of the package's metadata to ``sys.path``."""
    described = folder / "pyproject.toml"
    try:
        project = tomllib.loads(described.read_text()).get("project", {}) if described.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{described} is not valid TOML: {error}") from error
    points = project.get("entry-points", {})
    if "name" not in project or registry.ENTRY_POINTS not in points:
        raise ConfigError(
            f"the folder {folder} has no pyproject.toml with a project name and "
            f'[project.entry-points."{registry.ENTRY_POINTS}"].\nName a file in the folder, for example `stagereg '
            f"check {folder / 'plugin.py'}`, or install the package (`pip install -e {folder}`) and use its name."
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
    # The child process inherits these paths.
    sys.path[:0] = [str(each) for each in (metadata, folder.resolve(), folder.resolve() / "src")]
    found = _package(name)
    assert found is not None
    return found
