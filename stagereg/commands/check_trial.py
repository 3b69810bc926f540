"""The process in which ``stagereg check`` imports plugins and tries their promises, so that only it can crash or hang.

It gets what to try and what was tried already. It sends a message before it tries a promise and one with the result, so
its parent knows what was in progress when it died. Each message is a line of JSON, through a pipe of its own, since a
plugin may print. :class:`Reporter` defines the messages; ``attempt`` starts, watches and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import stagereg.registry as registry
from stagereg.commands.target import CONTRACTS, KINDS, NOT_TRIED, CheckJob, bare
from stagereg.crash_report import summarize_exception
from stagereg.errors import ConfigError, StageregError
from stagereg.installed import DISTRIBUTION
from stagereg.registry import Entry

if TYPE_CHECKING:
    from stagereg.testing.contract import Contract

__all__ = ["main"]


class Unfit(Exception):
    """Something that everything after it needs is broken; that was reported."""


class Reporter:
    """Reports how the trial goes, and skips what an earlier process has tried.

    Args:
        pipe: a file descriptor.
        tried: what was tried already: section, name, and whether it was good.
        given_up: sections of which enough is known.
    """

    def __init__(self, pipe: int, tried: Sequence[tuple[str, str, bool]], given_up: Collection[str] = ()) -> None:
        self._pipe = pipe
        self._given_up = given_up
        self._tried = {(section, name): good for section, name, good in tried}
        self._section = ""

    def section(self, title: str, origin: str) -> None:
        """Begin a section: a component, or a contract on its own."""
        self._section = title
        self._send(event="section", section=title, origin=origin)

    def attempt(self, name: str, promise: str, attempt: Callable[[], str], needed: bool = False) -> None:
        """Try one thing, unless it was tried: ``attempt`` returns what was seen of a kept promise, or raises.

        Args:
            name: of the thing.
            promise: what is tried, one line.
            attempt: does it; where it is ``needed`` and was good, it is done once more in each process.
            needed: whether what comes after makes no sense without it.

        Raises:
            Unfit: it is broken and ``needed``.
        """
        if (self._section, name) not in self._tried:
            verdict, seen = self._verdict(name, promise, attempt)
            self.outcome(name, promise, verdict, seen)
        elif needed and self._tried[self._section, name]:
            attempt()
        if needed and not self._tried[self._section, name]:
            raise Unfit

    def outcome(self, name: str, promise: str, verdict: str, seen: str = "") -> None:
        """Report a result."""
        if (self._section, name) not in self._tried:
            self._tried[self._section, name] = verdict != "broken"
            self._send(
                event="outcome", section=self._section, name=name, promise=promise, verdict=verdict, seen=seen.strip()
            )

    def promises(self, contract: type[Contract]) -> None:
        """Try the promises of a contract, in its order."""
        for name, promise in contract.promises().items():
            if (self._section, name) in self._tried:
                continue
            if self._section in self._given_up:
                self.outcome(name, promise, "skipped", NOT_TRIED)
                continue
            self._trying(name, promise)
            try:
                found = contract.outcome(name)
            except BaseException as error:  # such as SystemExit: it would have ended the training
                self.outcome(name, promise, "broken", summarize_exception(error, __file__))
            else:
                verdict = {True: "kept", False: "broken", None: "skipped"}[found.kept]
                self.outcome(name, promise, verdict, found.seen)

    def refuse(self, why: str) -> NoReturn:
        """Report that what was asked for cannot be tried, and end the process."""
        self._send(event="refused", why=why)
        sys.exit(2)

    def end(self) -> None:
        """Report that everything has been tried."""
        self._send(event="end")

    def _verdict(self, name: str, promise: str, attempt: Callable[[], str]) -> tuple[str, str]:
        self._trying(name, promise)
        try:
            return "kept", attempt()
        except StageregError as error:
            return "broken", str(error)
        except BaseException as error:
            return "broken", summarize_exception(error, __file__)

    def _trying(self, name: str, promise: str) -> None:
        # What was printed from here on is what this attempt has printed.
        printed = os.fstat(sys.__stdout__.fileno()).st_size if sys.__stdout__ else 0
        self._send(event="trying", section=self._section, name=name, promise=promise, printed=str(printed))

    def _send(self, **what: str) -> None:
        os.write(self._pipe, (json.dumps(what) + "\n").encode())


def main(arguments: Sequence[str]) -> None:
    """Run a trial.

    Args:
        arguments: file descriptors of the pipe, of the file for stacks, and of a pipe that is open for as long as
            the parent runs; and as JSON the job, the options, what was tried, and of which sections enough is known.
    """
    pipe, stacks, leash = map(int, arguments[:3])
    job, options, tried, given_up = map(json.loads, arguments[3:])
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)  # its closing raises SIGIO, whose default is the end
    faulthandler.enable(file=stacks, all_threads=True)
    # Chained to the default action, which ends the process: whoever waits for the end has the whole dump.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=True)
    reporter = Reporter(pipe, [(section, name, good) for section, name, good in tried], given_up)
    logging.getLogger().addHandler(logging.NullHandler())  # hints for users would be taken for last output
    import torch  # not the plugin's time

    torch.set_num_threads(1)
    with contextlib.suppress(Unfit):
        if job["kind"]:
            _component(reporter, registry.find(job["kind"], job["name"]), job["contract"], options)
        else:
            _module(reporter, CheckJob(**job), options)
    reporter.end()


# -- one component


@dataclass(frozen=True)
class _ComponentTrial:
    """What is tried of one component, each by a method that returns what was seen, or raises."""

    entry: Entry
    contract: str | type[Contract]
    options: Mapping[str, Any]

    def loads(self) -> str:
        self.entry.load()
        return ""

    def agrees(self) -> str:
        one, target = bare(self.entry.name), self.entry.target
        others = sorted({bare(e.name) for e in registry.entries() if e.target == target} - {one})
        if others:
            raise ConfigError(f"it is announced as {one!r}, and decorated as {', '.join(map(repr, others))}")
        return ""

    def types(self) -> str:
        from omegaconf import OmegaConf

        import stagereg.config.schema as schema

        OmegaConf.structured(schema.schema(self.entry))
        found = ", ".join(schema.options(self.entry.load()))
        return f"options: {found}" if found else "no options"

    def finds(self) -> str:
        self.trial()
        return ""

    def builds(self) -> str:
        made = self.trial()().make()  # type: ignore[attr-defined]
        made.close()
        return ""

    def trial(self) -> type[Contract]:
        """The contract to try: the one that was given, or that of a stager built from a config."""
        if not self.contract:
            from stagereg.commands.configured import Configured, configure

            configure({**self.options, "_target_": self.entry.path}, self.entry.target.partition(":")[0])
            return Configured
        import stagereg.testing

        found: Any = self.contract
        if isinstance(found, str):
            module, _, name = found.partition(":")
            found = getattr(importlib.import_module(module), name, None)
        needed = KINDS[self.entry.kind]
        if not isinstance(found, type) or not issubclass(found, getattr(stagereg.testing, needed)):
            raise ConfigError(f"{self.contract} is no class that inherits stagereg.testing.{needed}")
        return found

    def why_not(self) -> str:
        """Why the options cannot be given; empty if they can."""
        from stagereg.config.instantiate import instantiate

        if self.options and (self.contract or self.entry.kind != "stager"):
            return f"it is for stagers without a contract; that of {self.entry.kind}/{self.entry.name} builds its own"
        try:
            instantiate({**self.options, "_target_": self.entry.path, "_partial_": True}) if self.options else None
        except ConfigError as error:
            return str(error)
        return ""

    def lacks(self) -> str:
        """What a stager without a contract cannot be built without, and was not given; empty if there is nothing."""
        from omegaconf import MISSING

        import stagereg.config.schema as schema

        asked = [
            n for n, o in schema.options(self.entry.load()).items() if o.default == MISSING and n not in self.options
        ]
        parameters = inspect.signature(self.entry.load()).parameters
        passed = [n for n in schema.runtime(self.entry.load()) if parameters[n].default is inspect.Parameter.empty]
        missing = []
        if asked:
            missing.append(f"it has no default for {', '.join(asked)}: add {' '.join(f'--set {n}=...' for n in asked)}")
        if passed:
            missing.append(f"the program has to pass {', '.join(passed)}")
        contract = "A class of its author that inherits stagereg.testing.StagerContract, with make(), can build it."
        return f"{'; '.join(missing)}\n{contract}" if missing else ""

    def how_to_show(self) -> str:
        """What the author of a component without a contract has to write."""
        kind, module = self.entry.kind, self.entry.target.partition(":")[0].partition(".")[0]
        if self.entry.distribution == DISTRIBUTION:
            return "it is built in: stagereg's own tests try it"
        group = f'[project.entry-points."{CONTRACTS}"] "{kind}.{bare(self.entry.name)}" = "{module}.contract:Name"'
        where = f"announce it: {group}" if self.entry.distribution else "put it beside the plugin"
        return (
            "only its author knows what one step of it is: write a class that inherits "
            f"stagereg.testing.{KINDS[kind]}, and {where}"
        )


def _component(reporter: Reporter, entry: Entry, contract: str | type[Contract], options: Mapping[str, Any]) -> None:
    """Try all of one component: what every one has to have, and what its contract promises."""
    reporter.section(f"{entry.kind}/{entry.name}", entry.origin)
    kind, component = entry.kind.replace("_", " "), _ComponentTrial(entry, contract, options)
    reporter.attempt("loads", f"It can be imported, and has what a {kind} has to have.", component.loads, needed=True)
    if entry.distribution:
        reporter.attempt("agrees", "It has one name, the one that is announced.", component.agrees)
    reporter.attempt("types", "Its signature makes a typed config.", component.types)
    promise = f"It keeps what a {kind} promises."
    if entry.kind not in KINDS:
        reporter.outcome("contract", promise, "skipped", f"there is no contract of a {kind}")
        return
    if not contract and entry.kind != "stager":
        reporter.outcome("contract", promise, "not shown", component.how_to_show())
        return
    if refusal := component.why_not():
        reporter.refuse(f"--set {' '.join(f'{key}={value}' for key, value in options.items())}: {refusal}")
    if not contract and (lacking := component.lacks()):
        reporter.outcome("contract", promise, "not shown", lacking)
        return
    if contract:
        reporter.attempt("contract", "Its contract can be imported.", component.finds, needed=True)
    if entry.kind == "stager":
        reporter.attempt("builds", "It can be built, and closed.", component.builds, needed=True)
    reporter.promises(component.trial())


# -- a file or a module


def _module(reporter: Reporter, job: CheckJob, options: Mapping[str, Any]) -> None:
    """Try what a file or module registers, and the contracts that are in it."""
    reporter.section(job.title, "")
    loaded: list[ModuleType] = []

    def imports() -> str:
        try:
            loaded.extend([_from_file(Path(job.file).resolve())] if job.file else _with_contract(job.module))
        except SystemExit as error:
            guard = 'what it does as a script belongs below `if __name__ == "__main__":`'
            raise ConfigError(
                f"importing it ends the process; {guard}\n{summarize_exception(error, __file__)}"
            ) from error
        return ""

    reporter.attempt("imports", "It can be imported.", imports, needed=True)
    contracts = [contract for module in loaded for contract in _contracts_in(module)]
    entries = _registered_by(loaded[0])
    if not entries and not contracts:
        reporter.refuse(
            f"{job.title} registers no plugin and has no contract.\n"
            'Put @stagereg.register("stager", "name") on a class in it, or write a class that inherits a contract.'
        )
    for entry in entries:
        own = _matching(entry, entries, contracts)
        contracts = [contract for contract in contracts if contract is not own]
        with contextlib.suppress(Unfit):
            _component(reporter, entry, own or "", options)
    for contract in contracts:
        reporter.section(contract.__name__, contract.__module__)
        reporter.promises(contract)


def _from_file(file: Path) -> ModuleType:
    """Import a file under the name that it has for its neighbours: packages above it are those with ``__init__.py``."""
    parts, root = [file.stem], file.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    sys.path.insert(0, str(root))
    name = ".".join(parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != file:
        raise ConfigError(f"{file.name} has the name of another module, {module.__file__ or name}: rename it")
    return module


def _with_contract(name: str) -> list[ModuleType]:
    module = importlib.import_module(name)
    below = f"{name}.contract"
    found = hasattr(module, "__path__") and importlib.util.find_spec(below) is not None
    return [module, importlib.import_module(below)] if found else [module]


def _registered_by(module: ModuleType) -> list[Entry]:
    """What the decorators in a module and its package have registered."""
    top = module.__name__.partition(".")[0] if "." in module.__name__ else module.__name__
    inside = [e for e in registry.entries() if f"{e.target.partition(':')[0]}.".startswith(f"{top}.")]
    return list({(entry.kind, entry.name): entry for entry in inside}.values())


def _contracts_in(module: ModuleType) -> Iterator[type[Contract]]:
    from stagereg.testing.contract import Contract

    for found in list(vars(module).values()):
        if isinstance(found, type) and issubclass(found, Contract) and not found.__module__.startswith("stagereg."):
            yield found


def _matching(entry: Entry, entries: Sequence[Entry], contracts: Sequence[type[Contract]]) -> type[Contract] | None:
    """The contract of a component: the one with its name in it, or the only one of the only component of a kind."""
    import stagereg.testing

    fitting = [c for c in contracts if issubclass(c, getattr(stagereg.testing, KINDS.get(entry.kind, ""), ()))]
    name = entry.name.replace("_", "").replace("-", "").lower()
    named = [contract for contract in fitting if name in contract.__name__.lower()]
    alone = sum(other.kind == entry.kind for other in entries) == 1 and len(fitting) == 1
    return named[0] if named else fitting[0] if alone else None
