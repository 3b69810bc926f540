"""The registry finds components by kind and name, without importing them.

A component is a class or a factory function. There are three sources: the table of built-in components below, entry
points of installed packages in the group ``stagereg.plugins`` (``stager.theirs = "package.module:Name"``), and modules
that decorate a component with :func:`register`. The functions of this module are the methods of :data:`REGISTRY`. A
component is checked against the protocol of its kind when it is registered or first loaded. If several packages have an
entry point with the same name, each component is named ``name@distribution``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, ModuleType
from typing import Any, TypeVar

from stagereg.base.crash_report import summarize_exception
from stagereg.base.installed import DISTRIBUTION, announced, normalized, unmet
from stagereg.base.providers import missing
from stagereg.base.spec import REQUIRED, check, check_component, refuse_unknown, with_article
from stagereg.base.version import __version__
from stagereg.errors import RegistryError, UnknownNameError, nearest

ENTRY_POINTS = "stagereg.plugins"

_log = logging.getLogger(__name__)

_BUILT_IN = {
    ("stager", "blocking"): "stagereg.stagers.blocking:BlockingStager",
    ("stager", "overlapped"): "stagereg.stagers.overlapped:OverlappedStager",
    ("stager", "pinned_cached"): "stagereg.stagers.pinned_cached:PinnedCachedStager",
    ("stager", "torch_default"): "stagereg.extensions.interop.torch_default:TorchDefaultStager",
    ("joinable", "auto"): "stagereg.join.adapt:auto",
    ("on_commit", "copy_to"): "stagereg.extensions.callbacks.copy_to:CopyTo",
    ("storage", "dcp"): "stagereg.checkpoint.storage.dcp:DcpStorage",
    ("storage", "safetensors"): "stagereg.extensions.interop.safetensors:SafetensorsStorage",
    ("storage", "torch_dcp"): "stagereg.checkpoint.storage.dcp:TorchDcpStorage",
    ("on_commit", "command"): "stagereg.extensions.callbacks.shell_command:ShellCommand",
    ("on_commit", "huggingface"): "stagereg.extensions.interop.huggingface:HuggingFaceExport",
    ("on_commit", "prove"): "stagereg.extensions.callbacks.prove:StartProofs",
    ("on_commit", "mlflow"): "stagereg.extensions.callbacks.mlflow:MlflowArtifact",
    ("on_commit", "wandb"): "stagereg.extensions.callbacks.wandb:WandbArtifact",
    ("tier", "none"): "stagereg.config.no_tier:NoTier",
    ("tier", "memory"): "stagereg.extensions.tiers.memory:MemoryTier",
    ("tier", "disk"): "stagereg.extensions.tiers.disk:DiskTier",
    ("keep", "policy"): "stagereg.checkpoint.store.keep:Keep",
    ("keep", "proven"): "stagereg.extensions.retention.proven:KeepProven",
    ("join", "default"): "stagereg.join.context:configured",
    ("checkpoint", "default"): "stagereg.assembly:Checkpointer",
}
for _kind in ("ddp", "fsdp2", "metrics", "module", "step", "zero"):  # each in one file with its hook
    _where = "join.kinds" if _kind in ("ddp", "module", "step") else "extensions.joinables"
    _BUILT_IN["joinable", _kind] = f"stagereg.{_where}.{_kind}:{_kind.title()}Joinable"
    _BUILT_IN["join_hook", _kind] = f"stagereg.{_where}.{_kind}:{_kind.title()}Hook"

# Names are used on Hydra's command line and as file names, so they contain no dot, slash, comma, equals or at sign.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_MEANINGS = {"null", "true", "false", "_self_"}
_TARGET = re.compile(r"([\w.]+)\s*:\s*([\w.]+)\s*(\[.*\])?")

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A registered component. Constructing an entry does not import the component."""

    kind: str  # one of :func:`kinds`, such as ``"stager"``
    name: str  # the name that users write; ``name@distribution`` if several packages have an entry point of this name
    target: str  # the path of the class or factory function, ``"package.module:Name"``
    distribution: str = ""  # the installed package that contains the entry point; empty if there is only a decorator
    version: str = ""  # the version of that package
    # ``file:line`` of the decorator; empty if there is no decorator or its module was not imported yet.
    file: str = field(default="", compare=False)
    # The decorated class or function; ``None`` if ``load`` must import it.
    component: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    # The code object of the module or function that called the decorator.
    code: CodeType | None = field(default=None, compare=False, repr=False)

    @property
    def bare(self) -> str:
        """The name without the distribution."""
        return self.name.partition("@")[0]

    @property
    def path(self) -> str:
        """The target in the form of Hydra's ``_target_``: ``"package.module.Name"``."""
        return self.target.replace(":", ".")

    @property
    def origin(self) -> str:
        """The origin of the component, for messages: its package and version, or the line of its decorator."""
        if self.distribution:
            return f"{self.target} of {self.distribution} {self.version}"
        return f"{self.target} at {self.file}"

    def load(self) -> Callable[..., Any]:
        """Import the component, check it against the protocol of its kind, and return it."""
        if self.component is not None:
            return self.component
        who = f"{self.kind}/{self.name} of {self.distribution} {self.version}"
        if self.distribution != DISTRIBUTION and (why := unmet(self.distribution)):
            raise RegistryError(f"{who} {why}\nIt was not imported.")
        if not _TARGET.fullmatch(self.target):
            raise RegistryError(
                f"{who} has an invalid entry point: {self.target!r}.\n"
                f'The entry point must be: {self.kind}.{self.bare} = "package.module:Name"'
            )
        module, _, qualname = self.target.partition(":")
        rivals = REGISTRY._installed().get((self.kind, self.bare), [])
        alike = [own for own in REGISTRY.decorated if _is_alike(own, self, rivals)]
        try:
            component: Any = functools.reduce(getattr, qualname.split("."), imported(module))
            check_component(self.kind, self.name, component)
        except Exception as error:
            others = [name for name in names(self.kind) if name != self.name]
            raise RegistryError(
                f"{self.kind} {self.name!r} cannot be loaded from {self.origin}.\n"
                f"{error if isinstance(error, RegistryError) else summarize_exception(error, __file__)}\n"
                f"Repair or uninstall that package, or choose another {self.kind}: {', '.join(others)}"
            ) from (error.__cause__ or error)
        for own in alike:
            is_known = own.target == self.target or own.target.startswith("__main__:")
            if not is_known and own.component is not component:  # only the import shows that they differ
                raise _taken(self, own)
        return component


class Registry:
    """The components by kind and name: built-in ones, entry points of installed packages, and decorated ones."""

    def __init__(self, built_in: Mapping[tuple[str, str], str]) -> None:
        self.built_in = dict(built_in)  # ``"package.module:Name"`` by (kind, name)
        self.decorated: list[Entry] = []  # registered by decorators
        # A cache: reading the metadata of all packages takes milliseconds, and Hydra queries names dozens of times.
        self._path: list[str] | None = None  # ``sys.path`` when the entry points were read; ``None`` to read them again
        self._packages: dict[tuple[str, str], list[Entry]] = {}
        self._unreadable: list[tuple[str, str]] = []

    def register(self, kind: str, name: str = "") -> Callable[[T], T]:
        """Register the decorated class or factory function under ``name``, and return it unchanged.

        The component is checked against the protocol of ``kind``: a class immediately; a factory function by its return
        annotation, or, without one, by each object that it returns. If a module is reloaded, or a notebook cell runs
        again, the new component replaces the old one, which is logged at level INFO. A stager may change values and
        dtypes of a state dict, but not its structure: each save checks this.

        Args:
            kind: ``"stager"``, ``"storage"``, ``"joinable"``, ``"join_hook"``, ``"on_commit"``, ``"keep"`` or
                ``"tier"``.
            name: the name that users write in ``stager=name``: letters, digits, ``_`` and ``-``.

        Raises:
            UnknownNameError: The kind does not exist.
            RegistryError: The name is invalid or already registered (the message contains both definitions), or the
                component lacks members of the protocol (the message contains the lines to add).
        """
        if callable(kind):
            raise RegistryError('Write @stagereg.register("stager", "my_name"): a kind, and the name for users.')
        _require_kind(kind)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RegistryError(f"invalid name for {with_article(kind)}: {name!r}. Use letters, digits, '_' and '-'.")
        if name.lower() in _MEANINGS:
            raise RegistryError(f"invalid name for {with_article(kind)}: {name!r} is a reserved word in configs.")
        caller = sys._getframe(1)
        file = f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def decorate(component: T) -> T:
            if not callable(component) or not hasattr(component, "__qualname__"):
                raise RegistryError(f"{kind}/{name} is {component!r}. Register a class or a function.")
            target = f"{component.__module__}:{component.__qualname__}"
            new = Entry(kind, name, target, file=file, component=component, code=caller.f_code)
            for old in self.decorated:
                if _is_second(new, old):
                    raise _taken(old, new)
            if not any(_is_same(new, package) for package in self._installed().get((kind, name), [])):
                for old in self._named(kind, name):
                    if old.distribution in ("", DISTRIBUTION) and not _is_again(new, old):
                        raise _taken(old, new)
            check_component(kind, name, component)
            kept = [old for old in self.decorated if not _is_again(new, old)]
            if len(kept) < len(self.decorated):
                _log.info("stagereg: registered %s/%s again, at %s.", kind, name, file)
            self.decorated = [*kept, new]
            return component

        return decorate

    def names(self, kind: str) -> list[str]:
        """Return the sorted names of all components of ``kind``. Imports no component.

        If several packages have an entry point with the same name, each is listed as ``name@distribution``.

        Raises:
            UnknownNameError: The kind does not exist.
        """
        _require_kind(kind)
        return sorted({entry.name for entry in self._entries() if entry.kind == kind})

    def entries(self) -> tuple[Entry, ...]:
        """Return every registered component, sorted by kind and name. Imports no component.

        A component with several entry points, or an entry point and a decorator, is listed once, for the first package.
        """
        distinct = {(entry.kind, entry.name, entry.target): entry for entry in reversed(self._entries())}
        return tuple(distinct[key] for key in sorted(distinct))

    def unreadable(self) -> list[tuple[str, str]]:
        """Return the invalid entry points of packages, as (distribution or its directory, reason)."""
        self._installed()
        return list(self._unreadable)

    def unlisted(self, name: str) -> str:
        """Return lines about invalid entry points, at most three, or ``""``. Entry points named ``name`` come first."""
        found = sorted(self.unreadable(), key=lambda each: f".{name}'" not in each[1])
        return "".join(f"\nstagereg skipped an entry point of {who}: {why}" for who, why in found[:3])

    def uninstalled(self, kind: str, name: str) -> str:
        """Return a sentence if the component belongs to an extension that is not installed, otherwise ``""``."""
        return missing(self.built_in.get((kind, name), ""))

    def find(self, kind: str, name: str) -> Entry:
        """Return the entry of a component. Imports no component. ``name`` may be ``name@distribution``."""
        _require_kind(kind)
        bare, at, distribution = str(name).partition("@")
        found = self._named(kind, bare)
        qualified = [_qualified(entry) for entry in found if entry.distribution]
        if at:
            found = [e for e in found if e.distribution and normalized(e.distribution) == normalized(distribution)]
        if not found:
            known, why = self.names(kind), self.uninstalled(kind, bare)
            hint, more = (f" {why}", "") if why else (nearest(name, [*qualified, *known]), self.unlisted(name))
            raise UnknownNameError(f"No {kind} named {name!r}.{hint}\nAvailable: {', '.join(known) or '-'}{more}")
        if "@" in found[0].name and not at:
            number, choices = len(qualified), " or ".join(qualified)
            raise RegistryError(f"{number} installed packages provide {kind}/{bare}. Write one of: {choices}")
        if found[0].target != found[-1].target:
            raise _taken(found[0], found[-1])
        return found[0]

    def find_target(self, path: str) -> Entry | None:
        """Return the entry of the component with the dotted path ``"package.module.Name"``, or ``None``.

        A component may have several paths: the path in its entry point, and the path of its definition.
        """
        listed = self._entries()
        if path.startswith("__main__."):  # the script may have been imported as a module too
            target = path.replace(".", ":", 1)
            listed += [replace(own, target=target) for own in self.decorated if _is_in_script(own, target)]
        aliases = [own for own in self.decorated if own.path == path]
        also = [replace(entry, target=own.target) for own in aliases for entry in listed if _is_same(own, entry)]
        return next((entry for entry in (*listed, *also) if entry.path == path), None)

    def build(self, kind: str, name: str, /, **kwargs: Any) -> Any:
        """Build one component: load it and call it with ``kwargs``.

        Raises:
            UnknownNameError: The kind or the name does not exist.
            ConfigError: The component does not accept an argument; the message contains the nearest valid name.
            RegistryError: The component cannot be loaded, or a factory returned an object that lacks required members.
        """
        entry = self.find(kind, name)
        component = entry.load()
        refuse_unknown(f"{kind}/{name}", kwargs, component)
        return checked(entry, component, component(**kwargs))

    def imported(self, module: str) -> ModuleType:
        """Import a module that registers components. If this fails, undo its registrations and raise the cause."""
        before = self.decorated
        try:
            return importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as cause:
            self.decorated = [d for d in self.decorated if d in before or d.target.partition(":")[0] in sys.modules]
            raise RegistryError(summarize_exception(cause, __file__, importlib.__file__)) from cause

    def __reduce__(self) -> str:
        return "REGISTRY"  # so that its methods, such as `stagereg.build`, are pickled by name

    def _named(self, kind: str, bare: str) -> list[Entry]:
        decorated = [own for own in self.decorated if (own.kind, own.bare) == (kind, bare)]
        return _distinct(self._installed().get((kind, bare), []), decorated)

    def _entries(self) -> list[Entry]:
        keys = dict.fromkeys([*self._installed(), *((own.kind, own.bare) for own in self.decorated)])
        return sorted((each for key in keys for each in self._named(*key)), key=lambda entry: not entry.distribution)

    def _installed(self) -> dict[tuple[str, str], list[Entry]]:
        if self._path == sys.path:
            return self._packages
        points, self._unreadable = announced(ENTRY_POINTS)
        self._path = list(sys.path)
        self._packages = {
            (kind, name): [Entry(kind, name, target, DISTRIBUTION, __version__)]
            for (kind, name), target in self.built_in.items()
            if not missing(target)
        }
        for distribution, version, point in points:
            kind, _, name = point.name.partition(".")
            match = _TARGET.fullmatch(point.value.strip())
            target = f"{match[1]}:{match[2]}" if match else point.value.strip()
            # An entry point with an unknown kind or an invalid name must not prevent listing the other components.
            if kind in REQUIRED and _NAME.fullmatch(name):
                self._packages.setdefault((kind, name), []).append(Entry(kind, name, target, distribution, version))
                continue
            why = f"{name!r} is not a valid name: use letters, digits, '_' and '-'."
            why = why if kind in REQUIRED else f"there is no kind {kind!r}.{nearest(kind, REQUIRED)}"
            self._unreadable.append((f"{distribution} {version}", f"it announces {point.name!r}, but {why}"))
        return self._packages


REGISTRY = Registry(_BUILT_IN)
"""The components of this process. Global, because modules register components when they are imported."""

register, names, entries, unreadable = REGISTRY.register, REGISTRY.names, REGISTRY.entries, REGISTRY.unreadable
find, find_target, build, imported = REGISTRY.find, REGISTRY.find_target, REGISTRY.build, REGISTRY.imported


def kinds() -> list[str]:
    """Return the kinds of components, sorted."""
    return sorted(REQUIRED)


def checked(entry: Entry, component: Callable[..., Any], built: T) -> T:
    """Return the built object. If a factory function built it, first check it against the protocol of its kind."""
    if not isinstance(component, type):
        check(entry.kind, entry.name, built)
    return built


def _distinct(packages: list[Entry], decorated: list[Entry]) -> list[Entry]:
    """Return the entries with one name, packages first. If several packages have the name, qualify their names."""
    several = len({entry.target for entry in packages}) > 1
    found = []
    for entry in packages:
        file = next((own.file for own in decorated if _is_alike(own, entry, packages)), "")
        name = _qualified(entry) if several else entry.name
        found.append(replace(entry, name=name, file=file) if several or file else entry)
    return [*found, *(own for own in decorated if not any(_is_alike(own, entry, packages) for entry in packages))]


def _is_alike(own: Entry, entry: Entry, packages: list[Entry]) -> bool:
    """Return the result of ``_is_same``, but False if a different entry of ``packages`` has the target of ``own``."""
    elsewhere = own.target != entry.target and any(own.target == each.target for each in packages)
    return not elsewhere and _is_same(own, entry)


def _is_same(own: Entry, entry: Entry) -> bool:
    """Return whether a decorated component is a package's entry point, even if re-exported or run as ``__main__``."""
    if (own.kind, own.bare) != (entry.kind, entry.bare):
        return False
    module, _, qualname = entry.target.partition(":")
    first, *rest = qualname.split(".")
    announced: Any = vars(sys.modules[module]).get(first) if module in sys.modules else None  # does not run __getattr__
    for name in rest:
        announced = getattr(announced, name, None)
    # Before the module of the entry point is imported, only names can be compared; Entry.load compares the objects.
    unknown = announced is None and entry.distribution != DISTRIBUTION and own.target.endswith(f":{qualname}")
    source = os.sep + module.replace(".", os.sep) + ".py:"
    as_main = own.target == f"__main__:{qualname}" and source in os.path.abspath(own.file)
    return own.target == entry.target or announced is own.component or unknown or as_main


def _is_in_script(own: Entry, target: str) -> bool:
    script, qualname = getattr(sys.modules["__main__"], "__file__", None) or "", target.partition(":")[2]
    in_script = os.path.abspath(script) == os.path.abspath(own.file.rpartition(":")[0])
    return in_script and own.target.endswith(f":{qualname}")


def _is_again(new: Entry, old: Entry) -> bool:
    """Return whether ``new`` redefines ``old``: its module was reloaded, or both imported and run as ``__main__``."""
    (module, _, name), (old_module, _, old_name) = new.target.partition(":"), old.target.partition(":")
    same_file = new.file.rpartition(":")[0] == old.file.rpartition(":")[0]
    return (new.kind, new.bare, name) == (old.kind, old.bare, old_name) and (module == old_module or same_file)


def _is_second(new: Entry, old: Entry) -> bool:
    """Return whether one run of a module or notebook cell defines two components with the same name and class."""
    same = (new.kind, new.bare, new.target) == (old.kind, old.bare, old.target)
    return same and new.code is old.code and new.file != old.file


def _qualified(entry: Entry) -> str:
    return f"{entry.bare}@{normalized(entry.distribution)}"


def _require_kind(kind: str) -> None:
    if not isinstance(kind, str) or kind not in REQUIRED:
        text = f"Unknown kind of component: {kind!r}.{nearest(str(kind), REQUIRED)}\nAvailable: {', '.join(kinds())}"
        raise UnknownNameError(text)


def _taken(one: Entry, other: Entry) -> RegistryError:
    return RegistryError(
        f"Two components are registered as the {one.kind} {one.bare!r}:\n  {one.origin}\n  {other.origin}\n"
        "Rename one of them."
    )
