"""The registry: every component by kind and name, without importing it.

A component is a class or a factory function. It is known because it is built in (a table of dotted paths below),
because an installed package announces it under the entry-point group ``stagereg.plugins`` (``stager.theirs =
"package.module:Name"``), or because a module that has run decorated it with :func:`register`.

What this room promises: listing imports nothing; a component is checked against the protocol of its kind when it is
registered or first loaded, so its author sees the mistake, not its user; a package that cannot be imported fails only
when its component is chosen; a name never silently changes its meaning. What it leaves to others: the protocols'
contracts (``stagers``, ``join``), options and their types (``config``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from stagereg.errors import RegistryError, UnknownNameError, nearest
from stagereg.spec import SPECS, check, check_component, refuse_unknown

__all__ = ["ENTRY_POINTS", "Entry", "build", "find", "find_target", "kinds", "names", "register"]

ENTRY_POINTS = "stagereg.plugins"

_BUILT_IN = {
    ("stager", "blocking"): "stagereg.stagers.blocking:BlockingStager",
    ("stager", "incremental"): "stagereg.stagers.incremental:IncrementalStager",
    ("stager", "overlapped"): "stagereg.stagers.overlapped:OverlappedStager",
    ("stager", "pinned_cached"): "stagereg.stagers.pinned_cached:PinnedCachedStager",
    ("stager", "shared"): "stagereg.stagers.shared:SharedStager",
    ("stager", "torch_default"): "stagereg.stagers.torch_default:TorchDefaultStager",
    ("join_hook", "checkpoint"): "stagereg.join.hooks.checkpoint:CheckpointHook",
    ("join_hook", "collective"): "stagereg.join.hooks.collective:CollectiveHook",
    ("join_hook", "ddp"): "stagereg.join.hooks.ddp:DdpHook",
    ("join_hook", "fsdp2"): "stagereg.join.hooks.fsdp2:Fsdp2Hook",
    ("join_hook", "metrics"): "stagereg.join.hooks.metrics:MetricsHook",
    ("join_hook", "module"): "stagereg.join.hooks.module:ModuleHook",
    ("join_hook", "step"): "stagereg.join.hooks.step:StepHook",
    ("join_hook", "zero"): "stagereg.join.hooks.zero:ZeroHook",
    ("joinable", "checkpoint"): "stagereg.join.joinables.checkpoint:CheckpointJoinable",
    ("joinable", "collective"): "stagereg.join.joinables.collective:CollectiveJoinable",
    ("joinable", "ddp"): "stagereg.join.joinables.ddp:DdpJoinable",
    ("joinable", "fsdp2"): "stagereg.join.joinables.fsdp2:Fsdp2Joinable",
    ("joinable", "metrics"): "stagereg.join.joinables.metrics:MetricsJoinable",
    ("joinable", "module"): "stagereg.join.joinables.module:ModuleJoinable",
    ("joinable", "step"): "stagereg.join.joinables.step:StepJoinable",
    ("joinable", "zero"): "stagereg.join.joinables.zero:ZeroJoinable",
    ("storage", "dcp"): "stagereg.checkpoint.storage.dcp:DcpStorage",
    ("storage", "direct"): "stagereg.checkpoint.storage.direct:DirectStorage",
    ("storage", "safetensors"): "stagereg.checkpoint.storage.safetensors:SafetensorsStorage",
    ("join", "default"): "stagereg.join.context:configured",
    ("checkpoint", "default"): "stagereg.checkpoint.checkpointer:Checkpointer",
}

# A name is an option on Hydra's command line and a file name there: no dot, slash, comma, equals sign or at sign.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """One registered component; making one imports nothing.

    Attributes:
        kind: ``"stager"``, ``"storage"``, ``"join_hook"``, ``"joinable"``, or the project's own ``"join"`` or
            ``"checkpoint"``.
        name: the name a user chooses.
        target: where the class or factory is, ``"package.module:Name"``.
        distribution: the installed package that announces it; empty when only a decorator did.
        version: of that package.
    """

    kind: str
    name: str
    target: str
    distribution: str = ""
    version: str = ""

    @property
    def path(self) -> str:
        """``target`` as Hydra writes it in ``_target_``: ``"package.module.Name"``."""
        return self.target.replace(":", ".")

    @property
    def origin(self) -> str:
        """Who provides it, for messages: the package and version, or the place of the decorator."""
        if self.distribution:
            return f"{self.target} of {self.distribution} {self.version}"
        decorated = _decorated.get((self.kind, self.name))
        return f"{self.target} at {decorated.place}" if decorated else self.target

    def load(self) -> Callable[..., Any]:
        """Import the component, check it against its kind's protocol and return it.

        Raises:
            RegistryError: its module cannot be imported, lacks the name, or holds something else than the kind asks.
        """
        decorated = _decorated.get((self.kind, self.name))
        if decorated is not None and decorated.target == self.target:
            return decorated.component
        module, _, qualname = self.target.partition(":")
        try:
            component: Any = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
        except Exception as cause:
            raise RegistryError(
                f"{self.kind} {self.name!r} cannot be loaded from {self.origin}.\n"
                f"{type(cause).__name__}: {cause}\n"
                f"Repair or uninstall that package, or choose another {self.kind}: "
                f"{', '.join(n for n in names(self.kind) if n != self.name)}"
            ) from cause
        check_component(self.kind, self.name, component)
        return component


@dataclass(frozen=True)
class _Decorated:
    target: str
    component: Callable[..., Any]
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def same_definition(self, other: _Decorated) -> bool:
        """One definition seen again: its module reloaded, or run as ``__main__`` and imported as well."""
        (module, _, name), (other_module, _, other_name) = self.target.partition(":"), other.target.partition(":")
        return name == other_name and (module == other_module or self.file == other.file)


_decorated: dict[tuple[str, str], _Decorated] = {}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Register the decorated class or factory function under ``name``; it is returned unchanged.

    The component is checked against the protocol of ``kind`` here: a class at once, a factory function by its return
    annotation if that is a class, otherwise by what it returns each time it builds.

    Args:
        kind: ``"stager"``, ``"storage"``, ``"join_hook"`` or ``"joinable"``.
        name: letters, digits, ``_`` and ``-``; what a user writes in ``stager=name``.

    Raises:
        UnknownNameError: there is no such kind.
        RegistryError: the name is taken by another definition (the message names both places), is not a name, or the
            component lacks a method of its kind's protocol (the message shows the right signature).
    """
    _known_kind(kind)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RegistryError(f"{name!r} is not a name for a {kind}: use letters, digits, '_' and '-'.")
    caller = sys._getframe(1)
    file, line = caller.f_code.co_filename, caller.f_lineno

    def decorate(component: T) -> T:
        if not callable(component) or not hasattr(component, "__qualname__"):
            raise RegistryError(f"{kind}/{name} is {component!r}: register a class or a function that returns one.")
        target = f"{component.__module__}:{component.__qualname__}"
        new = _Decorated(target, component, file, line)
        old = _decorated.get((kind, name))
        if old is not None and not old.same_definition(new):
            raise RegistryError(_taken(kind, name, f"{old.target} at {old.place}", f"{target} at {new.place}"))
        built_in = _BUILT_IN.get((kind, name))
        if built_in is not None and built_in != target:
            raise RegistryError(_taken(kind, name, f"{built_in}, built in", f"{target} at {new.place}"))
        check_component(kind, name, component)
        _decorated[kind, name] = new
        return component

    return decorate


def kinds() -> list[str]:
    """Return the kinds of component there are, sorted."""
    return sorted(SPECS)


def names(kind: str) -> list[str]:
    """Return the sorted names of all components of ``kind``; imports none of them.

    Raises:
        UnknownNameError: there is no such kind.
    """
    _known_kind(kind)
    return sorted({entry.name for entry in _entries() if entry.kind == kind})


def find(kind: str, name: str) -> Entry:
    """Return the entry of one component; imports nothing.

    Raises:
        UnknownNameError: there is no such kind or name; the message has the nearest one and the list.
        RegistryError: two packages announce that name for different components.
    """
    _known_kind(kind)
    found = [entry for entry in _entries() if (entry.kind, entry.name) == (kind, name)]
    if not found:
        known = names(kind)
        raise UnknownNameError(f"No {kind} named {name!r}.{nearest(name, known)}\nThere is: {', '.join(known) or '-'}")
    for entry in found[1:]:
        if entry.target != found[0].target and not _same_definition(found[0], entry):
            raise RegistryError(_taken(kind, name, found[0].origin, entry.origin))
    return found[0]


def find_target(path: str) -> Entry | None:
    """Return the entry whose component is at the dotted ``path`` (``"package.module.Name"``), if it is registered."""
    return next((entry for entry in _entries() if entry.path == path), None)


def build(kind: str, name: str, /, **kwargs: Any) -> Any:
    """Build one component: load it and call it with ``kwargs``.

    Raises:
        UnknownNameError: there is no such kind or name.
        ConfigError: the component takes no argument of one of these names; the message has the nearest one.
        RegistryError: it cannot be loaded, or a factory returned something that its kind does not allow.
    """
    entry = find(kind, name)
    component = entry.load()
    refuse_unknown(f"{kind}/{name}", kwargs, component)
    return checked(entry, component, component(**kwargs))


def checked(entry: Entry, component: Callable[..., Any], built: T) -> T:
    """Return what ``component`` built; what a factory returned is held against its kind's protocol first."""
    if not isinstance(component, type):
        check(entry.kind, entry.name, built)
    return built


def _known_kind(kind: str) -> None:
    if not isinstance(kind, str) or kind not in SPECS:
        raise UnknownNameError(
            f"No kind {kind!r} of component.{nearest(str(kind), SPECS)}\nThere is: {', '.join(kinds())}"
        )


def _taken(kind: str, name: str, one: str, other: str) -> str:
    return f"Two components want to be the {kind} {name!r}:\n  {one}\n  {other}\nGive one of them another name."


def _entries() -> Iterator[Entry]:
    """All entries, installed ones before decorated ones, so that the first of a name tells who provides it."""
    yield from _installed(tuple(sys.path))
    for (kind, name), decorated in _decorated.items():
        yield Entry(kind, name, decorated.target)


# Reading the metadata of every installed package takes milliseconds, and Hydra asks dozens of times while composing.
@functools.lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> tuple[Entry, ...]:
    """The built-in components and those that packages on ``path`` (``sys.path``) announce."""
    from stagereg import __version__

    entries = [Entry(kind, name, target, "stagereg", __version__) for (kind, name), target in _BUILT_IN.items()]
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        kind, _, name = point.name.partition(".")
        # A kind or name that this version does not know must not break the listing of the others.
        if kind in SPECS and _NAME.fullmatch(name):
            dist = point.dist
            entries.append(Entry(kind, name, point.value, dist.name if dist else "", dist.version if dist else ""))
    return tuple(entries)


def _same_definition(installed: Entry, other: Entry) -> bool:
    """Whether a decorated component is the installed one under another path: re-exported, or run as ``__main__``."""
    decorated = _decorated.get((other.kind, other.name))
    if decorated is None or decorated.target != other.target:
        return False
    module, _, qualname = installed.target.partition(":")
    if getattr(sys.modules.get(module), qualname, None) is decorated.component:
        return True
    source = module.replace(".", os.sep) + ".py"
    return other.target == f"__main__:{qualname}" and os.path.abspath(decorated.file).endswith(os.sep + source)
