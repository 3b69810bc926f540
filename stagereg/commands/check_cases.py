"""The part of ``stagereg check`` that runs in a child process: imports plugins, and runs their contracts by pytest.

Whatever is tried is a case, with a section, a name and a promise. A line of JSON is written before each case and one
with its verdict after it, so that the parent knows which one was running when the process crashed or hung.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import stagereg.config.schema as schema
import stagereg.registry as registry
import stagereg.testing
from stagereg.commands.checking import CONTRACTS
from stagereg.config.instantiate import instantiate
from stagereg.crash_report import summarize_exception
from stagereg.errors import BrokenPromiseError, ConfigError, StageregError
from stagereg.installed import normalized
from stagereg.registry import Entry
from stagereg.stagers.async_stager import AsyncStager
from stagereg.testing import Contract, StagerContract

__all__ = ["KINDS", "ConfiguredContract", "run"]

KINDS = {"stager": "StagerContract", "join_hook": "JoinHookContract", "joinable": "JoinableContract"}
"""The kinds that have a contract, and its class in ``stagereg.testing``."""
_CONFIG = "STAGEREG_CHECK_CONFIG"
"""Of the environment: the ranks that a promise is tried on get it, too."""


def run(folder: str, what: str, target: str, options: str) -> str:
    """Try a target; return why it cannot be tried, or nothing.

    Args:
        folder: where ``events``, the lines of JSON, are written.
        what: ``"component"``, ``"file"`` or ``"module"``.
        target: ``kind/name``, the path of a file, or the dotted name of a module.
        options: of a stager that has no contract, as JSON.
    """
    import torch  # not the plugin's time

    torch.set_num_threads(1)
    cases = _Cases(Path(folder))
    try:
        if what == "component":
            kind, _, name = target.partition("/")
            entry = registry.find(kind, name)
            cases.component(entry, _announced_contract(entry), json.loads(options))
        else:
            _module(cases, what, target, json.loads(options))
    except ConfigError as error:
        return str(error)
    cases.run_contracts()
    kept_alive = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if kept_alive:
        cases.begin(target, "ends", "The process that has used it comes to its end.")
        cases.end("broken", f"these threads would hold it up: {', '.join(thread.name for thread in kept_alive)}")
    return ""


class ConfiguredContract(StagerContract):
    """The contract of a stager that has none of its own: it is built from the config that the environment has."""

    def make(self) -> AsyncStager:
        """Build one."""
        config, module = json.loads(os.environ[_CONFIG])
        importlib.import_module(module)  # ranks have not imported it
        made: AsyncStager = instantiate(config)
        return made


class _Cases:
    """What is tried, and how it went; also the plugin that pytest reports to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contracts: list[tuple[str, type[Contract]]] = []
        self._row: dict[str, str] = {}

    def begin(self, section: str, name: str, promise: str, verdict: str = "running") -> None:
        """Write that a case begins."""
        self._row = {"section": section, "name": name, "promise": promise}
        self.end(verdict, "not tried: the process has ended" if verdict == "skipped" else "")

    def end(self, verdict: str, seen: str = "") -> None:
        """Write how the case went that has begun."""
        with (self._folder / "events").open("a") as file:
            file.write(json.dumps({**self._row, "verdict": verdict, "seen": seen.strip()}) + "\n")

    def attempt(self, section: str, name: str, promise: str, do: Callable[[], str]) -> bool:
        """Try one thing, of which ``do`` returns what was seen; return whether it was good."""
        self.begin(section, name, promise)
        try:
            self.end("kept", do())
        except StageregError as error:
            self.end("broken", str(error))
        except BaseException as error:  # such as SystemExit: it would have ended the training
            self.end("broken", summarize_exception(error, __file__))
        else:
            return True
        return False

    def component(self, entry: Entry, contract: str | type[Contract], options: Mapping[str, Any]) -> None:
        """Try what every component has to have, and add its contract to those that are run.

        Raises:
            ConfigError: it does not take the options.
        """
        section, kind = f"{entry.kind}/{entry.name}  {entry.origin}", entry.kind.replace("_", " ")
        promise = f"It can be imported by one name, has what a {kind} has to have, and its signature makes a config."
        if not self.attempt(section, "loads", promise, lambda: _loaded(entry)):
            return
        if options and (contract or entry.kind != "stager"):
            raise ConfigError(
                f"--set is for stagers without a contract; that of {entry.kind}/{entry.name} builds its own."
            )
        promise = f"It keeps what a {kind} promises."
        if entry.kind not in KINDS:
            self.begin(section, "contract", promise)
            self.end("skipped", f"there is no contract of a {kind}")
        elif contract:
            self.attempt(
                section, "contract", "Its contract can be imported.", lambda: self._add(section, entry, contract)
            )
        elif lacking := "only its author knows a step of it" if entry.kind != "stager" else _configured(entry, options):
            self.begin(section, "contract", promise)
            self.end("not shown", f"{lacking}; {_how_to_show(entry)}")
        else:
            self.contract(section, ConfiguredContract)

    def contract(self, section: str, contract: type[Contract]) -> None:
        """Add a contract to those that are run."""
        self._contracts.append((section, contract))

    def _add(self, section: str, entry: Entry, given: str | type[Contract]) -> str:
        found: Any = given
        if isinstance(given, str):
            module, _, name = given.partition(":")
            found = vars(importlib.import_module(module)).get(name)
        if not isinstance(found, type) or not issubclass(found, getattr(stagereg.testing, KINDS[entry.kind])):
            raise ConfigError(f"{given} is no class that inherits stagereg.testing.{KINDS[entry.kind]}")
        self.contract(section, found)
        return ""

    def run_contracts(self) -> None:
        """Run the contracts by pytest, without the configuration of whatever project is in this directory."""
        os.environ.pop("PYTEST_ADDOPTS", None)
        file = self._folder / "contracts"
        file.touch()
        options = (
            "-s",
            "-c",
            os.devnull,
            "--rootdir",
            str(self._folder),
            "-p",
            "no:cacheprovider",
            "-p",
            "no:faulthandler",
        )
        if self._contracts:
            pytest.main([*options, str(file)], plugins=[self])

    # -- hooks of pytest

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Module:
        """Return a module in memory, which has every contract under a name that pytest takes for one of a test."""
        module: pytest.Module = pytest.Module.from_parent(parent, path=file_path)
        module.obj = types.ModuleType("contracts")
        for number, (_, contract) in enumerate(self._contracts):
            setattr(module.obj, f"Test{number}", contract)
        return module

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write what is going to be tried, in case that the process ends before."""
        for item in session.items:
            self._begin(item, "skipped")

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Write that a case begins."""
        self._begin(item)

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Write how a case went."""
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, (unittest.SkipTest, pytest.skip.Exception)):
            self.end("skipped", str(error))
        elif error is not None:
            seen = str(error) if isinstance(error, BrokenPromiseError) else summarize_exception(error, __file__)
            self.end("broken", seen)
        elif call.when == "call":
            self.end("kept")

    def _begin(self, item: pytest.Item, verdict: str = "running") -> None:
        assert isinstance(item, pytest.Function)
        number = int(item.nodeid.split("::")[1].removeprefix("Test"))
        promise = (inspect.getdoc(item.obj) or item.name).splitlines()[0]
        self.begin(self._contracts[number][0], item.name, promise, verdict)


# -- one component


def _loaded(entry: Entry) -> str:
    """Import a component and make its config; return what options it has."""
    options = ", ".join(schema.options(entry.load()))
    OmegaConf.structured(schema.schema(entry))
    others = sorted({e.bare for e in registry.entries() if e.target == entry.target} - {entry.bare})
    if entry.distribution and others:
        raise ConfigError(f"it is announced as {entry.bare!r}, and decorated as {', '.join(map(repr, others))}")
    return f"options: {options}" if options else ""


def _announced_contract(entry: Entry) -> str:
    """Where the contract of a component is, ``"package.module:Name"``, as its own package announces it."""
    for point in entry_points(group=CONTRACTS, name=f"{entry.kind}.{entry.bare}"):
        if point.dist is not None and normalized(point.dist.name) == normalized(entry.distribution):
            return point.value
    return ""


def _configured(entry: Entry, options: Mapping[str, Any]) -> str:
    """Put the config of a stager into the environment; return why it cannot be built from it, if it cannot."""
    config = {**options, "_target_": entry.path}
    instantiate({**config, "_partial_": True})  # refuses options that it does not take
    try:
        instantiate(config).close()
    except Exception as error:
        return f"--set OPTION=VALUE does not build it: {summarize_exception(error, __file__)}"
    os.environ[_CONFIG] = json.dumps([config, entry.target.partition(":")[0]])
    return ""


def _how_to_show(entry: Entry) -> str:
    module = entry.target.partition(":")[0].partition(".")[0]
    group = f'[project.entry-points."{CONTRACTS}"] "{entry.kind}.{entry.bare}" = "{module}.contract:Name"'
    where = f"announce it: {group}" if entry.distribution else "put it beside the plugin"
    return f"write a class that inherits stagereg.testing.{KINDS[entry.kind]}, and {where}"


# -- a file or a module


def _module(cases: _Cases, what: str, target: str, options: Mapping[str, Any]) -> None:
    """Try what a file or module registers, and the contracts that are in it."""
    loaded: list[types.ModuleType] = []

    def imports() -> str:
        loaded.append(importlib.import_module(target) if what == "module" else _from_file(Path(target).resolve()))
        return ""

    if not cases.attempt(target, "imports", "It can be imported.", imports):
        return
    top = loaded[0].__name__.partition(".")[0]
    entries = [e for e in registry.entries() if e.target.partition(":")[0].partition(".")[0] == top]
    contracts = list(_contracts_in(loaded[0]))
    if not entries and not contracts:
        raise ConfigError(
            f"{target} registers no plugin and has no contract.\n"
            'Put @stagereg.register("stager", "name") on a class in it, or write a class that inherits a contract.'
        )
    for entry in {(e.kind, e.name): e for e in entries}.values():
        own = _matching(entry, entries, contracts)
        contracts = [contract for contract in contracts if contract is not own]
        cases.component(entry, own or "", options)
    for contract in contracts:
        cases.contract(contract.__name__, contract)


def _from_file(file: Path) -> types.ModuleType:
    """Import a file under the name that it has for its neighbours: packages above it are those with ``__init__.py``."""
    parts, root = [file.stem], file.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    if Path(module.__file__ or "").resolve() != file:
        raise ConfigError(f"{file.name} has the name of another module, {module.__file__ or module}: rename it")
    return module


def _contracts_in(module: types.ModuleType) -> Iterator[type[Contract]]:
    for found in list(vars(module).values()):
        if isinstance(found, type) and issubclass(found, Contract) and not found.__module__.startswith("stagereg."):
            yield found


def _matching(entry: Entry, entries: Sequence[Entry], contracts: Sequence[type[Contract]]) -> type[Contract] | None:
    """The contract of a component: the one with its name in it, or the only one of the only component of a kind."""
    fitting = [c for c in contracts if issubclass(c, getattr(stagereg.testing, KINDS.get(entry.kind, ""), ()))]
    name = entry.name.replace("_", "").replace("-", "").lower()
    named = [contract for contract in fitting if name in contract.__name__.lower()]
    alone = sum(other.kind == entry.kind for other in entries) == 1 and len(fitting) == 1
    return named[0] if named else fitting[0] if alone else None
