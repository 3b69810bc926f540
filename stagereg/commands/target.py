"""The target of ``stagereg check``: which components, which contracts, and what a package's metadata declares.

Nothing is imported here. A component or contract is found by what installed packages announce, in the groups
``stagereg.plugins`` and ``stagereg.contracts``; what a file or a module registers is seen only by importing it, which
is left to a process of its own (``check_trial``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import stagereg.registry as registry
from stagereg.errors import ConfigError, nearest
from stagereg.installed import DISTRIBUTION, normalized, unmet
from stagereg.registry import Entry

__all__ = ["CONTRACTS", "KINDS", "NOT_TRIED", "CheckJob", "CheckRow", "CheckTarget", "bare", "resolve"]

CONTRACTS = "stagereg.contracts"
KINDS = {"stager": "StagerContract", "join_hook": "JoinHookContract", "joinable": "JoinableContract"}
"""The kinds that have a contract, and its class in ``stagereg.testing``."""

NOT_TRIED = "not tried: it hung, or ended its process, too often before"


@dataclass(frozen=True)
class CheckRow:
    """How one thing that was tried fared.

    Attributes:
        name: of the method or check that tried it.
        promise: what was promised, one line.
        verdict: ``"kept"``, ``"broken"``, ``"skipped"`` (cannot be tried here) or ``"not shown"`` (has no contract).
        seen: what was seen.
    """

    name: str
    promise: str
    verdict: str
    seen: str = ""


@dataclass(frozen=True)
class CheckJob:
    """What one process is to try: an announced component, or all that a file or module registers.

    Attributes:
        kind: of the component.
        name: of it.
        contract: where its contract class is, ``"package.module:Name"``; empty without one.
        file: path of a file to import instead.
        module: dotted name of a module to import instead.
    """

    kind: str = ""
    name: str = ""
    contract: str = ""
    file: str = ""
    module: str = ""

    @property
    def title(self) -> str:
        """A title for what is tried."""
        return f"{self.kind}/{self.name}" if self.kind else self.file or self.module


@dataclass(frozen=True)
class CheckTarget:
    """All that is to be tried.

    Attributes:
        jobs: one process each.
        package: name and version of the installed package; empty for a file, a module or one component.
        rows: what its metadata declares.
    """

    jobs: list[CheckJob]
    package: str = ""
    rows: list[CheckRow] = field(default_factory=list)


def resolve(target: str) -> CheckTarget:
    """Find what ``target`` means: a file, a folder with a ``pyproject.toml``, ``kind/name``, a package, a module.

    Raises:
        ConfigError: it is none of these, or there is nothing in it to check; the message has what to give.
        UnknownNameError: there is no such component.
    """
    path = Path(target)
    if target.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"There is no file {target}.")
        return CheckTarget([CheckJob(file=target)])
    if path.is_dir() and (path / "pyproject.toml").is_file():
        return _project(path)
    kind, slash, name = target.partition("/")
    if slash and (kind in registry.kinds() or not path.exists()):
        return CheckTarget([_announced(registry.find(kind, name))])
    if not re.fullmatch(r"[\w.@-]+", target):
        raise ConfigError(f"{target!r} is nothing that can be checked.{_usage()}")
    return _package(target) or _component(target) or _module(target) or _refuse(target)


def _project(folder: Path) -> CheckTarget:
    try:
        name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder / 'pyproject.toml'} does not name its package: {error!r}.") from error
    found = _package(str(name))
    if found is None:
        raise ConfigError(
            f"{folder} is the package {name}, which is not installed, so nothing in it can be chosen.\n"
            f"Run: python -m pip install --editable {folder}"
        )
    return found


def _package(target: str) -> CheckTarget | None:
    """The installed distribution of that name, if there is one."""
    try:
        found = importlib.metadata.distribution(target)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    announced = [point for point in found.entry_points if point.group == registry.ENTRY_POINTS]
    own = [entry for entry in registry.entries() if _same(entry.distribution, found.name)]
    if not own and not announced:
        if not _importable(target):
            raise ConfigError(
                f"The package {found.name} {found.version} announces nothing under {registry.ENTRY_POINTS!r}, so "
                "nothing in it can be chosen.\n"
                'Write in its pyproject.toml: [project.entry-points."stagereg.plugins"] "stager.name" = "module:Class"'
            )
        return None
    rows = [] if _same(found.name, DISTRIBUTION) else _metadata(found, own, [point.name for point in announced])
    return CheckTarget([_announced(entry) for entry in own], f"{found.name} {found.version}", rows)


def _metadata(found: importlib.metadata.Distribution, own: list[Entry], announced: list[str]) -> list[CheckRow]:
    """What the metadata of a package declares, for its plugins to be found and to be refused in time."""
    known = {f"{entry.kind}.{bare(entry.name)}" for entry in own}
    strange = [name for name in announced if name not in known]
    contracts = [point.name for point in found.entry_points if point.group == CONTRACTS]
    alone = [name for name in contracts if name not in announced]
    required = any(re.match(rf"{DISTRIBUTION}(?![\w-])", normalized(need)) for need in found.requires or [])
    nothing = f'nothing; write in its pyproject.toml: dependencies = ["{DISTRIBUTION}>=..."]'
    wrong = unmet(found.name) or ("" if required else nothing)
    return [
        _row(
            "announces",
            "Every plugin is announced by its kind and its name.",
            [
                f"{name!r} is no kind and name.{nearest(name, known)} Kinds are {', '.join(registry.kinds())}"
                for name in strange
            ],
        ),
        _row(
            "depends",
            "The package declares which stagereg it needs.",
            [wrong] if wrong else [],
        ),
        _row(
            "contracts",
            "Every contract has the name of its plugin.",
            [f"there is no plugin for the contract {name!r}.{nearest(name, announced)}" for name in alone],
        ),
    ]


def _row(name: str, promise: str, broken: list[str]) -> CheckRow:
    return CheckRow(name, promise, "broken" if broken else "kept", "\n".join(broken))


def _component(name: str) -> CheckTarget | None:
    """The component of that name, if one kind has it."""
    plain = [entry for entry in registry.entries() if entry.name == name and entry.kind in KINDS]
    kinds = sorted({entry.kind for entry in plain})
    if len(kinds) > 1:
        choices = " or ".join(f"{kind}/{name}" for kind in kinds)
        raise ConfigError(f"There is more than one {name!r}; choose one: {choices}")
    return CheckTarget([_announced(plain[0])]) if plain else None


def _module(target: str) -> CheckTarget | None:
    """An importable module: what packages announce in it, or else what importing it registers."""
    if not _importable(target):
        return None
    inside = [e for e in registry.entries() if f"{e.target.partition(':')[0]}.".startswith(f"{target}.")]
    return CheckTarget([_announced(entry) for entry in inside] or [CheckJob(module=target)])


def _refuse(target: str) -> CheckTarget:
    names = {distribution.name for distribution in importlib.metadata.distributions() if distribution.name}
    if Path(f"{target}.py").is_file():
        raise ConfigError(f"{target!r} is no installed package or module. Did you mean '{target}.py'?{_usage()}")
    there = [*names, *(entry.name for entry in registry.entries())]
    raise ConfigError(f"{target!r} is no installed package, module or component.{nearest(target, there)}{_usage()}")


def _usage() -> str:
    return (
        "\nGive a package, its folder with the pyproject.toml, a module, a file such as plugin.py, or a component such "
        "as stager/pinned_cached."
    )


def _importable(module: str) -> bool:
    """Whether there is a module of that name; of a dotted one only the first part is looked for, which runs nothing."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _announced(entry: Entry) -> CheckJob:
    return CheckJob(entry.kind, entry.name, _contract(entry))


def _contract(entry: Entry) -> str:
    """Where the contract of an announced component is, as its own package declares."""
    name = f"{entry.kind}.{bare(entry.name)}"
    for point in importlib.metadata.entry_points(group=CONTRACTS, name=name):
        if point.dist is not None and _same(point.dist.name, entry.distribution):
            return point.value
    return ""


def bare(name: str) -> str:
    """The name of a component without the distribution that it may be qualified by."""
    return name.partition("@")[0]


def _same(one: str, other: str) -> bool:
    return normalized(one) == normalized(other)
