"""The registry: every component by kind and name, without importing it.

A component is a class or a factory function. It is known because it is built in (a table of dotted paths below),
because an installed package announces it under the entry-point group ``stagereg.plugins`` (``stager.theirs =
"package.module:Name"``), or because a module that has run decorated it with :func:`register`.

What this room promises: listing imports nothing; a component is checked against the protocol of its kind when it is
registered or first loaded, so its author sees the mistake, not its user; a package that cannot be imported, or needs
another version of stagereg, fails only when its component is chosen; a name never silently changes its meaning. Where
several installed packages announce one name, each component goes by ``name@distribution``, and the bare name is an
error. What it leaves to others: reading metadata (``installed``), the protocols' contracts (``stagers``, ``join``),
options and their types (``config``).
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

from stagereg.errors import RegistryError, StageregError, UnknownNameError, nearest
from stagereg.installed import announcements, normalized, unmet
from stagereg.spec import SPECS, check, check_component, refuse_unknown

__all__ = [
    "ENTRY_POINTS",
    "Entry",
    "build",
    "entries",
    "find",
    "find_target",
    "imported",
    "kinds",
    "names",
    "register",
    "unreadable",
]

ENTRY_POINTS = "stagereg.plugins"

_BUILT_IN = {
    ("stager", "blocking"): "stagereg.stagers.blocking:BlockingStager",
    ("stager", "incremental"): "stagereg.stagers.incremental:IncrementalStager",
    ("stager", "overlapped"): "stagereg.stagers.overlapped:OverlappedStager",
    ("stager", "pinned_cached"): "stagereg.stagers.pinned_cached:PinnedCachedStager",
    ("stager", "shared"): "stagereg.stagers.shared:SharedStager",
    ("stager", "torch_default"): "stagereg.stagers.torch_default:TorchDefaultStager",
    ("join_hook", "checkpoint"): "stagereg.join.kinds.checkpoint:CheckpointHook",
    ("join_hook", "collective"): "stagereg.join.kinds.collective:CollectiveHook",
    ("join_hook", "ddp"): "stagereg.join.kinds.ddp:DdpHook",
    ("join_hook", "fsdp2"): "stagereg.join.kinds.fsdp2:Fsdp2Hook",
    ("join_hook", "metrics"): "stagereg.join.kinds.metrics:MetricsHook",
    ("join_hook", "module"): "stagereg.join.kinds.module:ModuleHook",
    ("join_hook", "step"): "stagereg.join.kinds.step:StepHook",
    ("join_hook", "zero"): "stagereg.join.kinds.zero:ZeroHook",
    ("joinable", "checkpoint"): "stagereg.join.kinds.checkpoint:CheckpointJoinable",
    ("joinable", "collective"): "stagereg.join.kinds.collective:CollectiveJoinable",
    ("joinable", "ddp"): "stagereg.join.kinds.ddp:DdpJoinable",
    ("joinable", "fsdp2"): "stagereg.join.kinds.fsdp2:Fsdp2Joinable",
    ("joinable", "metrics"): "stagereg.join.kinds.metrics:MetricsJoinable",
    ("joinable", "module"): "stagereg.join.kinds.module:ModuleJoinable",
    ("joinable", "step"): "stagereg.join.kinds.step:StepJoinable",
    ("joinable", "zero"): "stagereg.join.kinds.zero:ZeroJoinable",
    ("storage", "dcp"): "stagereg.checkpoint.storage.dcp:DcpStorage",
    ("storage", "direct"): "stagereg.checkpoint.storage.direct:DirectStorage",
    ("storage", "safetensors"): "stagereg.checkpoint.storage.safetensors:SafetensorsStorage",
    ("join", "default"): "stagereg.join.context:configured",
    ("checkpoint", "default"): "stagereg.checkpoint.checkpointer:Checkpointer",
}

# A name is an option on Hydra's command line and a file name there: no dot, slash, comma, equals sign or at sign.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

_TARGET = re.compile(r"[\w.]+:[\w.]+")

_OURS = "stagereg"
_CAUSE_LINES = 6

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """One registered component; making one imports nothing.

    Attributes:
        kind: ``"stager"``, ``"storage"``, ``"join_hook"``, ``"joinable"``, or the project's own ``"join"`` or
            ``"checkpoint"``.
        name: what a user writes: the name, or ``name@distribution`` where several packages announce that name.
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
        return f"{self.target} at {self.file}" if self.file else self.target

    @property
    def file(self) -> str:
        """``file:line`` of the decorator that has registered it; empty before its module has run, or without one."""
        decorated = self._record()
        return decorated.place if decorated else ""

    def load(self) -> Callable[..., Any]:
        """Import the component, check it against its kind's protocol and return it.

        Raises:
            RegistryError: its package needs another stagereg (nothing was imported then), its module cannot be
                imported, lacks the name, or holds something else than the kind asks.
        """
        if self.distribution != _OURS and (needs := unmet(self.distribution, tuple(sys.path))):
            raise RegistryError(
                f"{self.kind}/{self.name} of {self.distribution} {self.version} needs {needs}; "
                f"this is stagereg {_version()}. It was not imported.\n"
                f"Install one that fits: pip install '{needs}', or another version of {self.distribution}."
            )
        decorated = self._record()
        if decorated is not None and decorated.target == self.target:
            return decorated.component
        if not _TARGET.fullmatch(self.target):
            raise RegistryError(
                f"{self.kind}/{self.name} of {self.distribution} {self.version} is announced as {self.target!r}, "
                f"which names no component.\n"
                f'Its entry point has to be: {self.kind}.{_bare(self.name)} = "package.module:Name"'
            )
        module, _, qualname = self.target.partition(":")
        try:
            component: Any = functools.reduce(getattr, qualname.split("."), imported(module))
        except Exception as error:
            raise RegistryError(
                f"{self.kind} {self.name!r} cannot be loaded from {self.origin}.\n"
                f"{error if isinstance(error, RegistryError) else _told(error)}\n"
                f"Repair or uninstall that package, or choose another {self.kind}: "
                f"{', '.join(n for n in names(self.kind) if n != self.name)}"
            ) from (error.__cause__ or error)
        try:
            check_component(self.kind, self.name, component)
        except RegistryError as error:
            if not self.distribution:
                raise
            raise RegistryError(f"{error}\nIt is announced as {self.origin}.") from None
        return component

    def _record(self) -> _Decorated | None:
        """What the decorator has noted of this component, if its module has run."""
        name = (self.kind, _bare(self.name))
        return next((d for key, d in _decorated.items() if key[:2] == name and _is_same(self, d)), None)


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


_decorated: dict[tuple[str, str, str], _Decorated] = {}
"""By kind, name and target."""


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
        others = {key: old for key, old in _decorated.items() if key[:2] == (kind, name)}
        again = [key for key, old in others.items() if old.same_definition(new)]
        if not _announced(kind, name, target):
            for key, old in others.items():
                if key not in again and not _announced(*key):
                    raise RegistryError(_taken(kind, name, f"{old.target} at {old.place}", f"{target} at {new.place}"))
            built_in = _BUILT_IN.get((kind, name))
            if built_in is not None:
                raise RegistryError(_taken(kind, name, f"{built_in}, built in", f"{target} at {new.place}"))
        check_component(kind, name, component)
        for key in again:
            del _decorated[key]
        _decorated[kind, name, target] = new
        return component

    return decorate


def kinds() -> list[str]:
    """Return the kinds of component there are, sorted."""
    return sorted(SPECS)


def names(kind: str) -> list[str]:
    """Return the sorted names of all components of ``kind``; imports none of them.

    Where several packages announce one name, each of theirs is listed as ``name@distribution``, the bare one is not.

    Raises:
        UnknownNameError: there is no such kind.
    """
    _known_kind(kind)
    return sorted({entry.name for entry in entries() if entry.kind == kind})


def entries() -> tuple[Entry, ...]:
    """Return every component there is, sorted by kind and name; imports none of them.

    A component that an installed package announces and a decorator registers as well is one entry, the package's.
    """
    return tuple(sorted(_entries(), key=lambda entry: (entry.kind, entry.name, entry.target)))


def unreadable() -> list[tuple[str, str]]:
    """Return what installed packages announce and cannot be listed: a distribution or its folder, and the reason."""
    return list(_installed(tuple(sys.path))[1])


def find(kind: str, name: str) -> Entry:
    """Return the entry of one component; imports nothing.

    ``name`` may be ``name@distribution``, also where nothing is ambiguous; spelling of the distribution does not
    matter beyond what pip distinguishes.

    Raises:
        UnknownNameError: there is no such kind or name; the message has the nearest one and the list.
        RegistryError: several packages announce that name, or one does and a decorator registers another component.
    """
    _known_kind(kind)
    bare, at, distribution = str(name).partition("@")
    found = [entry for entry in _entries() if entry.kind == kind and _bare(entry.name) == bare]
    qualified = sorted(entry.name for entry in found if "@" in entry.name)
    if at:
        asked = normalized(distribution)
        packages = [e for e in _installed(tuple(sys.path))[0] if (e.kind, e.name) == (kind, bare)]
        target = next((e.target for e in packages if normalized(e.distribution) == asked), None)
        found = [entry for entry in found if entry.distribution and entry.target == target]
        qualified = [f"{bare}@{normalized(e.distribution)}" for e in packages]
    if not found:
        known = names(kind)
        near = nearest(name, [*qualified, *known])
        more = "" if near else "".join(f"\nNot known is what {who} announces: {why}." for who, why in unreadable()[:3])
        raise UnknownNameError(f"No {kind} named {name!r}.{near}\nThere is: {', '.join(known) or '-'}{more}")
    if qualified and not at:
        raise RegistryError(
            f"{len(qualified)} installed packages provide {kind}/{bare}; say which: {' or '.join(qualified)}"
        )
    if len(found) > 1:
        raise RegistryError(_taken(kind, bare, found[0].origin, found[1].origin))
    return found[0]


def imported(module: str) -> ModuleType:
    """Import a module, and with it what it registers.

    Raises:
        RegistryError: it cannot be imported, whatever ended that, ``sys.exit`` included; the message is the cause and
            its place in a few lines. Nothing that the module had registered before stays.
    """
    before = set(_decorated)
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        _forget_unfinished(before)
        raise RegistryError(_told(cause)) from cause


def find_target(path: str) -> Entry | None:
    """Return the entry whose component is at the dotted ``path`` (``"package.module.Name"``), if it is registered.

    A component may be at several: where its package announces it, and where its class is defined.
    """
    listed = list(_entries())
    for entry in listed:
        if entry.path == path:
            return entry
    for key, decorated in _decorated.items():
        if decorated.target.replace(":", ".") == path:
            for entry in listed:
                if (entry.kind, _bare(entry.name)) == key[:2] and _is_same(entry, decorated):
                    return replace(entry, target=decorated.target)
    return None


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
    """All entries, installed ones first, named so that each can be told from the others."""
    packages = _distinct(_installed(tuple(sys.path))[0])
    for rivals in packages.values():
        for entry in rivals:
            qualified = f"{entry.name}@{normalized(entry.distribution)}"
            yield replace(entry, name=qualified) if len(rivals) > 1 else entry
    for (kind, name, target), decorated in _decorated.items():
        if not any(_is_same(entry, decorated) for entry in packages.get((kind, name), ())):
            yield Entry(kind, name, target)


def _distinct(installed: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """What packages announce under each kind and name; the same component announced twice is there once."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in installed:
        rivals = found.setdefault((entry.kind, entry.name), [])
        if all(entry.target != rival.target for rival in rivals):
            rivals.append(entry)
    return found


# Reading the metadata of every installed package takes milliseconds, and Hydra asks dozens of times while composing.
@functools.lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> tuple[tuple[Entry, ...], tuple[tuple[str, str], ...]]:
    """The built-in components and those that packages on ``path`` (``sys.path``) announce; and what has to be left out.

    All have their bare names here.
    """
    found = [Entry(kind, name, target, _OURS, _version()) for (kind, name), target in _BUILT_IN.items()]
    announced, broken = announcements(ENTRY_POINTS)
    seen: dict[tuple[str, str, str], str] = {}
    for each in announced:
        kind, _, name = each.name.partition(".")
        first = seen.setdefault((each.distribution, kind, name), each.value)
        # A kind or name that this version does not know must not break the listing of the others.
        if kind not in SPECS:
            reason = f"it announces {each.name!r}, and there is no kind {kind!r} here.{nearest(kind, SPECS)}"
        elif not _NAME.fullmatch(name):
            reason = f"it announces {each.name!r}, and {name!r} is not a name: use letters, digits, '_' and '-'."
        elif first != each.value:
            reason = f"it announces {each.name!r} twice, as {first} and as {each.value}: the first counts."
        else:
            found.append(Entry(kind, name, each.value, each.distribution, each.version))
            continue
        broken.append((f"{each.distribution} {each.version}", reason))
    return tuple(found), tuple(broken)


def _announced(kind: str, name: str, target: str) -> bool:
    """Whether ``target`` is, or may yet turn out to be, what an installed package announces under that name.

    A class can be announced from where its package re-exports it; while it is being decorated, only the package tells.
    """
    top = target.partition(":")[0].partition(".")[0]
    rivals = _distinct(_installed(tuple(sys.path))[0]).get((kind, name), ())
    return any(
        entry.target == target
        or (entry.distribution != _OURS and entry.target.partition(":")[0].partition(".")[0] == top)
        for entry in rivals
    )


def _is_same(entry: Entry, decorated: _Decorated) -> bool:
    """Whether a decorated component is the entry's, be it under another path: re-exported, or run as ``__main__``."""
    if decorated.target == entry.target:
        return True
    module, _, qualname = entry.target.partition(":")
    try:
        if getattr(sys.modules.get(module), qualname, None) is decorated.component:
            return True
    except Exception:  # a module may make its attributes when they are asked for, and fail
        return False
    source = module.replace(".", os.sep) + ".py"
    return decorated.target == f"__main__:{qualname}" and os.path.abspath(decorated.file).endswith(os.sep + source)


def _forget_unfinished(before: set[tuple[str, str, str]]) -> None:
    """Forget what modules have registered that then failed to import."""
    for key in set(_decorated) - before:
        if key[2].partition(":")[0] not in sys.modules:
            del _decorated[key]


def _told(cause: BaseException) -> str:
    """What went wrong in an import, and where, in a few lines."""
    ours = isinstance(cause, StageregError)  # short already, and about what called us
    lines = f"{type(cause).__name__}: {cause}".rstrip(": ").splitlines()
    machinery = (__file__, importlib.__file__, *([check_component.__code__.co_filename] if ours else []))
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if f.filename not in machinery]
    frames = [f for f in frames if not f.filename.startswith("<")]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    shown = lines if ours or len(lines) <= _CAUSE_LINES else [*lines[:_CAUSE_LINES], "..."]
    return "\n".join(shown) + where


def _bare(name: str) -> str:
    return name.partition("@")[0]


def _version() -> str:
    from stagereg._version import __version__

    return __version__
