"""The child process of ``stagereg check``: imports plugins and runs the tests of their contracts with pytest.

Each test is a case: it belongs to a section of the output, has a name, and tests one promise (requirement of the
contract). The child writes a line of JSON before each case and another line with the verdict, so that the parent can
identify the running case after a crash or a timeout.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import tempfile
import types
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import stagereg.config.schema as schema
import stagereg.registry as registry
import stagereg.testing as testing
import stagereg.testing.ranks as ranks
from stagereg.base.crash_report import summarize_exception
from stagereg.base.installed import normalized
from stagereg.base.providers import has
from stagereg.base.spec import with_article
from stagereg.commands.checking import CONTRACTS
from stagereg.config.instantiate import instantiate
from stagereg.config.no_tier import NoTier
from stagereg.errors import BrokenPromiseError, ConfigError, StageregError
from stagereg.registry import Entry
from stagereg.testing import Contract

_KINDS: dict[str, type[Contract]] = {
    "stager": testing.StagerContract,
    "join_hook": testing.JoinHookContract,
    "joinable": testing.JoinableContract,
    "keep": testing.KeepContract,
    "storage": testing.StorageContract,
}
if has("callbacks"):
    _KINDS["on_commit"] = testing.OnCommitContract
if has("tiers"):
    _KINDS["tier"] = testing.TierContract
_KEEPS = "The component keeps the contract of {}."
_TARGET = "STAGEREG_CHECK_TARGET_{}"  # environment variable for each kind; ranks that a test starts inherit it


def run(folder: str, target: str) -> str:
    """Test ``target``, write the results to ``folder/events``, and return an error message, or an empty string."""
    import torch  # imported now, so that the import does not count towards the plugin's time limit

    torch.set_num_threads(1)
    cases = _Cases(Path(folder))
    try:
        if "/" in target:
            entry = registry.find(*target.split("/", 1))
            cases.component(entry, _announced(entry))
        else:
            cases.module(target)
    except ConfigError as error:
        return str(error)
    cases.run_contracts()
    return ""


class ConfiguredStagerContract(testing.StagerContract):
    """The contract of a stager whose package declares no contract. Builds the stager with its default options."""

    def make(self) -> Any:
        return _made("stager")


class ConfiguredKeepContract(testing.KeepContract):
    """The contract of a retention rule whose package declares no contract. Builds the rule with its default options."""

    def make(self) -> Any:
        return _made("keep")


class ConfiguredStorageContract(testing.StorageContract):
    """The contract of a storage whose package declares no contract. Builds the storage with its default options."""

    def make(self) -> Any:
        return _made("storage")


_CONFIGURED = {"stager": ConfiguredStagerContract, "keep": ConfiguredKeepContract, "storage": ConfiguredStorageContract}

if has("tiers"):

    class ConfiguredTierContract(testing.TierContract):
        """The contract of a tier whose package declares none. Builds the tier with options that every tier has."""

        def make(self, dir: str, **options: Any) -> Any:
            return _made("tier", dir=dir, **options)

    class ConfiguredMemoryTierContract(ConfiguredTierContract):
        """The contract of a tier that does not accept a directory on disk."""

        root = "/dev/shm"


def _made(kind: str, **options: Any) -> Any:
    path, module = json.loads(os.environ[_TARGET.format(kind)])
    importlib.import_module(module)  # registers the component: a new rank process has not imported it
    return instantiate({"_target_": path, **options})


class _Cases:
    """The cases of a target and their verdicts. Also the pytest plugin that records the verdicts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contracts: list[tuple[str, type[Contract]]] = []  # (section, contract)
        self._targets: dict[str, tuple[str, str]] = {}  # (environment variable, value), by section

    def write(self, section: str, name: str, promise: str, verdict: str = "running", seen: str = "") -> None:
        self._append({"section": section, "name": name, "promise": promise, "verdict": verdict, "seen": seen.strip()})

    def _append(self, row: dict[str, Any]) -> None:
        with (self._folder / "events").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def attempt(self, section: str, name: str, promise: str, do: Callable[[], object]) -> bool:
        """Run ``do`` as a case. Return whether it raised no error. A string that it returns is an observation."""
        self.write(section, name, promise)
        try:
            verdict, seen = "kept", do()
        except StageregError as error:
            verdict, seen = "broken", str(error)
        except BaseException as error:  # even SystemExit, which would terminate training
            verdict, seen = "broken", summarize_exception(error, __file__)
        self.write(section, name, promise, verdict, seen if isinstance(seen, str) else "")
        return verdict == "kept"

    def module(self, name: str) -> None:
        """Test the plugins and contracts of a module. Raises: ``ConfigError`` if the module contains none."""
        if not self.attempt(name, "imports", "The module can be imported.", lambda: importlib.import_module(name)):
            return
        top, loaded = name.partition(".")[0], vars(importlib.import_module(name))
        found = [e for e in registry.entries() if e.target.partition(":")[0].partition(".")[0] == top]
        entries = list({(e.kind, e.name): e for e in found}.values())
        contracts = [c for c in loaded.values() if _is_contract(c) and not c.__module__.startswith("stagereg.")]
        if not entries and not contracts:
            raise ConfigError(
                f"{name} registers no plugin and has no contract.\n"
                'Decorate a class with @stagereg.register("stager", "name"), or add a class that inherits a contract.'
            )
        tried = [e for e in entries if e.kind == "joinable" and _matching(e, entries, contracts)]
        for entry in entries:
            own = _matching(entry, entries, contracts)
            hooks = ((e.name, getattr(e.component, "own_hook", None)) for e in tried)
            owner = next((name for name, hook in hooks if hook is entry.component is not None), "")
            if owner and own is None:
                section, promise = f"{entry.kind}/{entry.name}  {entry.origin}", _KEEPS.format("a join_hook")
                self.write(section, "contract", promise, "skipped", f"the contract of joinable/{owner} tests this hook")
                continue
            contracts = [contract for contract in contracts if contract is not own]
            self.component(entry, own or "")
        self._contracts += [(contract.__name__, contract) for contract in contracts]

    def component(self, entry: Entry, contract: str | type[Contract]) -> None:
        section, kind = f"{entry.kind}/{entry.name}  {entry.origin}", entry.kind
        promise = f"The component can be imported, has the methods of {with_article(kind)}, and has a valid config."
        if not self.attempt(section, "loads", promise, lambda: _loaded(entry)):
            return
        promise = _KEEPS.format(with_article(kind))
        if entry.kind not in _KINDS or entry.load() is NoTier:
            why = f"no contract exists for {with_article(kind)}" if entry.kind not in _KINDS else "it stores nothing"
            self.write(section, "contract", promise, "skipped", why)
            return
        if contract:
            promise = "The contract can be imported."
            self.attempt(section, "contract", promise, lambda: self._add(section, entry, contract))
        elif isinstance(found := _configured(entry), str):
            module = f"{entry.target.partition(':')[0].partition('.')[0]}.contract"
            where = f'declare it: [project.entry-points."{CONTRACTS}"] "{entry.kind}.{entry.bare}" = "{module}:Name"'
            write = f"write a class that inherits stagereg.testing.{_KINDS[entry.kind].__name__}, and {where}"
            self.write(section, "contract", promise, "not shown", f"{found}; {write}")
        else:
            variable = _TARGET.format(entry.kind)
            self._targets[section] = variable, os.environ[variable]
            self._contracts.append((section, found))

    def _add(self, section: str, entry: Entry, contract: Any) -> None:
        found = contract
        if isinstance(contract, str):
            module, _, name = contract.partition(":")
            found = vars(importlib.import_module(module)).get(name)
        if not _is_contract(found, _KINDS[entry.kind]):
            raise ConfigError(f"{contract} does not inherit stagereg.testing.{_KINDS[entry.kind].__name__}")
        self._contracts.append((section, found))

    def run_contracts(self) -> None:
        """Run the contracts with pytest, ignoring the pytest configuration of the current directory."""
        if not self._contracts:
            return
        os.environ.pop("PYTEST_ADDOPTS", None)
        ranks.before_wait = lambda limit_s: self._append({"limit_s": limit_s})  # extends the parent's timeout
        file = self._folder / "contracts"
        file.touch()
        options = ["-s", "-c", os.devnull, "--rootdir", str(self._folder), "-p", "no:cacheprovider"]
        pytest.main([*options, "-p", "no:faulthandler", str(file)], plugins=[self])

    # -- hooks of pytest

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Module:
        """Return a module, built in memory, that contains every contract under a name that pytest collects."""
        module: pytest.Module = pytest.Module.from_parent(parent, path=file_path)
        module.obj = types.ModuleType("contracts")
        for number, (_, contract) in enumerate(self._contracts):
            setattr(module.obj, f"Test{number}", contract)
        return module

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write every collected case as skipped. When a case runs, it overwrites this verdict."""
        for item in session.items:
            self.write(*self._case(item), "skipped", "not run: the process terminated first")

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        case = self._case(item)
        os.environ.update([self._targets[case[0]]] if case[0] in self._targets else [])  # one component at a time
        self.write(*case)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, pytest.skip.Exception):  # pytest has converted unittest.SkipTest to it
            self.write(*self._case(item), "skipped", str(error))
        elif error is not None:
            seen = str(error) if isinstance(error, BrokenPromiseError) else summarize_exception(error, __file__)
            self.write(*self._case(item), "broken", seen)
        elif call.when == "call":
            self.write(*self._case(item), "kept")

    def _case(self, item: pytest.Item) -> tuple[str, str, str]:
        assert isinstance(item, pytest.Function)
        number = int(item.nodeid.split("::")[1].removeprefix("Test"))
        return self._contracts[number][0], item.name, (inspect.getdoc(item.obj) or item.name).splitlines()[0]


def _loaded(entry: Entry) -> str:
    options = ", ".join(schema.options(entry.load()))
    OmegaConf.structured(schema.schema(entry))
    return f"options: {options}" if options else ""


def _announced(entry: Entry) -> str:
    """Return the contract that the package of a component declares, as ``"package.module:Name"``, or ``""``."""
    for point in entry_points(group=CONTRACTS, name=f"{entry.kind}.{entry.bare}"):
        if point.dist is not None and normalized(point.dist.name) == normalized(entry.distribution):
            return point.value
    return ""


def _configured(entry: Entry) -> type[Contract] | str:
    """Return a contract that builds the component from its default config, or why that is impossible."""
    os.environ[_TARGET.format(entry.kind)] = json.dumps([entry.path, entry.target.partition(":")[0]])
    try:
        if found := _CONFIGURED.get(entry.kind):
            made = instantiate({"_target_": entry.path})
            if entry.kind == "stager":
                made.close()
            return found
        if entry.kind == "tier":
            with tempfile.TemporaryDirectory(prefix="stagereg-") as folder:
                tier = instantiate({"_target_": entry.path, "dir": folder})
                try:
                    tier.prepare()
                except ConfigError:
                    return ConfiguredMemoryTierContract
            return ConfiguredTierContract
    except Exception as error:
        options = "from the option dir alone" if entry.kind == "tier" else "without options"
        return f"the component cannot be built {options}: {summarize_exception(error, __file__)}"
    return "no generic contract can test this component"


def _matching(entry: Entry, entries: Sequence[Entry], contracts: Sequence[type[Contract]]) -> type[Contract] | None:
    """Return the contract with the component's name, or the only contract if the kind has one component."""
    base = _KINDS.get(entry.kind)
    fitting = [contract for contract in contracts if base is not None and _is_contract(contract, base)]
    name = entry.name.replace("_", "").replace("-", "").lower()
    named = [contract for contract in fitting if name in contract.__name__.lower()]
    alone = len(fitting) == 1 and sum(other.kind == entry.kind for other in entries) == 1
    return (named or fitting)[0] if named or alone else None


def _is_contract(found: object, base: type[Contract] = Contract) -> bool:
    return isinstance(found, type) and issubclass(found, base)
