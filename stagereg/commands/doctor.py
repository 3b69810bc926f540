"""``stagereg doctor``: whether this machine, this installation and its plugins will do, and what to do if not.

PyTorch and each component of another package are imported in child processes with a limit of time, a few at once, so
that one that crashes, exits or hangs is one row among the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import stagereg.commands.subprocess_runner as subprocess_runner
import stagereg.commands.system_checks as system_checks
import stagereg.output as output
import stagereg.registry as registry
from stagereg.commands.system_checks import Finding
from stagereg.errors import ConfigError, StageregError
from stagereg.installed import DISTRIBUTION
from stagereg.machine import cores
from stagereg.registry import Entry

__all__ = ["add_to", "load", "load_built_in", "run"]

_TORCH_LIMIT_S = 120.0
"""Seconds for PyTorch, whose first import from a network disk takes its time."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the commands of ``stagereg``."""
    help_ = "look at versions, limits, disks and plugins, and report what is broken"
    parser = commands.add_parser("doctor", help=help_, description=help_[0].upper() + help_[1:] + ".")
    parser.add_argument("--dir", default="", help="a directory that checkpoints go to; the current one if not given")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for importing each plugin, %(default)g"
    )
    output.add_output_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if something is broken, 0 otherwise.

    Raises:
        ConfigError: the limit of time is of no use.
    """
    if not asked.timeout > 0:
        raise ConfigError(f"--timeout must be above 0 seconds, not {asked.timeout:g}.")
    found = list(_findings(asked))
    output.progress()
    broken, warned = (sum(one.verdict == verdict for one in found) for verdict in ("broken", "warn"))
    if asked.json:
        output.as_json({"findings": [dataclasses.asdict(one) for one in found], "broken": broken, "warn": warned})
    else:
        rows = [(one.what, one.verdict, one.found + (f"\n-> {one.do}" if one.do else "")) for one in found]
        output.table("", ("what", "verdict", "found"), rows, verdict="verdict")
        output.echo(f"\n{broken} broken, {warned} to look at." if broken or warned else "\nNothing is broken.")
    return int(broken > 0)


def load(kind: str, name: str) -> int:
    """Load one component and make its config; return how many options it has. Runs in a child process.

    Raises:
        StageregError: it cannot be had.
    """
    import stagereg.config.schema as schema

    entry = registry.find(kind, name)
    schema.schema(entry)
    return len(schema.options(entry.load()))


def load_built_in() -> dict[str, str]:
    """Load every component of stagereg; return what is wrong with those that fail. Runs in a child process."""
    failures = {}
    for entry in registry.entries():
        if entry.distribution == DISTRIBUTION:
            try:
                load(entry.kind, entry.name)
            except StageregError as error:
                failures[f"{entry.kind}/{entry.name}"] = str(error)
    return failures


def _findings(asked: argparse.Namespace) -> Iterator[Finding]:
    others = [entry for entry in registry.entries() if entry.distribution not in ("", DISTRIBUTION)]
    output.progress(f"importing torch and {len(others)} plugins")
    # Whatever interrupts this, the children end first, and then the threads that wait for them.
    with ThreadPoolExecutor(max_workers=cores()) as several, subprocess_runner.SubprocessRunner() as children:
        torch = several.submit(children.ask, f"{system_checks.__name__}:torch_facts", (), _TORCH_LIMIT_S)
        built_in = several.submit(children.ask, f"{__name__}:load_built_in", (), _TORCH_LIMIT_S)
        plugins = [
            several.submit(children.ask, f"{__name__}:load", (entry.kind, entry.name), asked.timeout)
            for entry in others
        ]
        yield from system_checks.versions()
        yield from system_checks.host()
        yield from system_checks.torch_findings(torch.result().value, torch.result().failure)
        yield from system_checks.limits()
        yield from system_checks.directory(Path(asked.dir or "."), chosen=bool(asked.dir))
        yield _hydra()
        yield _built_in(built_in.result())
        for entry, one in zip(others, plugins, strict=True):
            yield _plugin(entry, one.result())
    yield from _unreadable()


def _hydra() -> Finding:
    try:
        found = importlib.util.find_spec("hydra_plugins.stagereg_plugin") is not None
    except ImportError:  # no plugin of any package is installed
        found = False
    if found:
        return Finding("Hydra options", "ok", "in every Hydra app")
    do = "Install stagereg (`pip install .` in a checkout)."
    return Finding("Hydra options", "warn", "only in apps that import stagereg", do)


def _built_in(result: subprocess_runner.SubprocessResult) -> Finding:
    what = "built-in components"
    failures = {"all of them": result.failure} if result.value is None else result.value
    if not failures:
        own = [entry for entry in registry.entries() if entry.distribution == DISTRIBUTION]
        return Finding(what, "ok", f"{len(own)}, all of them load")
    do = "Install stagereg again, with the versions of torch and hydra-core that it takes."
    return Finding(what, "broken", "\n".join(f"{name}: {why}" for name, why in failures.items()), do)


def _plugin(entry: Entry, result: subprocess_runner.SubprocessResult) -> Finding:
    what = f"{entry.kind}/{entry.name}"
    who = f"{entry.distribution} {entry.version}"
    value = {"distribution": entry.distribution, "version": entry.version, "target": entry.target}
    if result.failure:
        do = f"Repair, update or uninstall {entry.distribution}. Until then only runs that choose {what} fail."
        return Finding(what, "broken", f"{who}: {result.failure}", do, value)
    return Finding(what, "ok", f"{who}, {result.value} options", value=value)


def _unreadable() -> Iterator[Finding]:
    for package, reason in registry.unreadable():
        do = (
            "Install it again, update it, or report it to its author. Its other plugins are there, if they can be read."
        )
        yield Finding(package, "broken", reason, do)
