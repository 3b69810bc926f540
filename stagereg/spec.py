"""What a component of each kind has to have and may have, held against a class or an object without importing torch.

The contracts are in the protocols: ``stagers.async_stager``, ``join.joinable``, ``checkpoint.storage.protocol``. Their
shape is here, as the registry checks it: names, call signatures, attributes. A plugin's author meets it as an error
that shows the line to write.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from stagereg.errors import ConfigError, RegistryError, nearest

__all__ = ["SPECS", "Member", "check", "check_component", "refuse_unknown"]

_MISSING = object()

_NEAR = 0.7
"""How alike two names are, from 0 to 1, for one to be a slip of the other: ``pre_hook`` and ``post_hook`` are."""


@dataclass(frozen=True)
class Member:
    """One method or attribute of a protocol.

    Attributes:
        name: of it.
        definition: the line that defines it, as messages show it.
        args: how a method is called, as positional arguments; ``None`` for an attribute.
        optional: a component may lack it.
        keywords: the method must take any keyword arguments.
        own: a protocol's own definition, inherited, does not count.
    """

    name: str
    definition: str
    args: tuple[str, ...] | None = None
    optional: bool = False
    keywords: bool = False
    own: bool = False


def _optional(name: str, definition: str, *args: str) -> Member:
    return Member(name, definition, args if definition.startswith("def ") else None, optional=True)


SPECS: dict[str, tuple[Member, ...]] = {
    "stager": (
        Member("stage", "def stage(self, state_dict)", ("state_dict",), own=True),
        Member("synchronize_staging", "def synchronize_staging(self) -> None", ()),
        Member("close", "def close(self) -> None", ()),
        Member("should_synchronize_after_execute", "should_synchronize_after_execute: bool = True"),
    ),
    "join_hook": (
        Member("main_hook", "def main_hook(self) -> None", ()),
        Member("post_hook", "def post_hook(self, is_last_joiner: bool) -> None", ("is_last_joiner",)),
        _optional("before_step", "def before_step(self) -> None"),
        _optional("on_exhausted", "def on_exhausted(self) -> None"),
    ),
    "joinable": (
        Member("join_hook", "def join_hook(self, **kwargs) -> JoinHook", (), keywords=True),
        Member("join_device", "@property\n    def join_device(self) -> torch.device"),
        Member("join_process_group", "@property\n    def join_process_group(self)"),
        _optional("attach", "def attach(self, session) -> None", "session"),
        _optional("detach", "def detach(self) -> None"),
        _optional("needs_active_ranks", "def needs_active_ranks(self, divide) -> bool", "divide"),
        _optional("has_unfinished_step", "@property\n    def has_unfinished_step(self) -> bool"),
        _optional("has_no_collectives", "has_no_collectives: bool = False"),
        _optional("runs_first", "runs_first: bool = False"),
        _optional("announces_itself", "announces_itself: bool = False"),
        _optional("reduces_gradients", "reduces_gradients: bool = False"),
    ),
    "storage": (
        Member("reset", "def reset(self, checkpoint_id=None) -> None", ("checkpoint_id",)),
        Member("set_up_storage_writer", "def set_up_storage_writer(self, is_coordinator) -> None", ("is_coordinator",)),
        Member("prepare_local_plan", "def prepare_local_plan(self, plan) -> SavePlan", ("plan",)),
        Member("prepare_global_plan", "def prepare_global_plan(self, plans) -> list[SavePlan]", ("plans",)),
        Member("write_data", "def write_data(self, plan, planner) -> Future[list[WriteResult]]", ("plan", "planner")),
        Member("finish", "def finish(self, metadata, results) -> None", ("metadata", "results")),
        Member("storage_meta", "def storage_meta(self) -> StorageMeta | None", ()),
        Member("reader", "def reader(self, path) -> StorageReader", ("path",)),
        _optional("marks", "@property\n    def marks(self) -> Mapping[str, FileMark]"),
    ),
    "join": (),
    "checkpoint": (),
}


def check_component(kind: str, name: str, component: object) -> None:
    """Hold a class, or the class that a factory function promises to return, against the spec of ``kind``.

    Raises:
        RegistryError: it is neither class nor function, or :func:`check` refuses the class.
    """
    if isinstance(component, type):
        check(kind, name, component)
    elif not callable(component):
        raise RegistryError(f"{kind}/{name} is {component!r}: register a class or a function that returns one.")
    elif (promised := _promised_class(component)) is not None:
        check(kind, name, promised)


def check(kind: str, name: str, subject: object) -> None:
    """Hold a class or a finished object against the spec of ``kind``.

    Raises:
        RegistryError: with one line for each member that is missing, does not fit or is misspelt, and how to write it.
    """
    cls = subject if isinstance(subject, type) else type(subject)
    problems = [f"{problem}. Write:\n    {m.definition}" for m in SPECS[kind] if (problem := _problem(m, subject))]
    if lines := "".join(f"\n  {problem}" for problem in (*problems, *_misspelt(kind, cls))):
        raise RegistryError(f"{cls.__module__}.{cls.__qualname__} cannot be the {kind} {name!r}:{lines}")


def refuse_unknown(what: str, given: Collection[str], component: Callable[..., Any]) -> None:
    """Refuse argument names that ``component`` does not take, with the nearest one that it does.

    Raises:
        ConfigError: ``what`` (for instance ``"stager/pinned_cached"``) takes no such argument.
    """
    parameters = inspect.signature(component).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for unknown in (key for key in given if key not in takes):
        raise ConfigError(
            f"{what} takes no {unknown!r}.{nearest(unknown, takes)} It takes: {', '.join(takes) or 'nothing'}"
        )


def _problem(member: Member, subject: object) -> str:
    """What is wrong with one member of a class or an object; empty if nothing is."""
    raw = inspect.getattr_static(subject, member.name, _MISSING)
    if member.args is None:
        if isinstance(raw, types.FunctionType):
            return f"attribute {member.name!r} is a method"
        there = raw is not _MISSING or member.name in _annotated(subject) or hasattr(subject, member.name)
        return "" if member.optional or (there and not _abstract(raw)) else f"attribute {member.name!r} is missing"
    if member.optional and raw is _MISSING:
        return ""
    method = getattr(subject, member.name, None)
    if not callable(method) or _abstract(raw) or (member.own and _is_protocol(_owner(subject, member.name))):
        return f"method {member.name!r} is missing"
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # written in C: only the call itself shows it
        return ""
    # Seen on its class, a method still has its ``self`` to fill.
    unbound = isinstance(subject, type) and not isinstance(raw, (staticmethod, classmethod))
    try:
        signature.bind(*(["self"] if unbound else []), *member.args)
    except TypeError as error:
        return f"method {member.name}{signature} does not fit: {error}"
    if member.keywords and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return f"method {member.name}{signature} does not fit: it must take any keyword arguments"
    return ""


def _misspelt(kind: str, cls: type) -> Iterator[str]:
    """A line for each public name that looks like a member of the protocol which the class itself does not define.

    Only what the author of the class wrote counts: classes of the same top-level package. What it inherits from torch
    or from this package, such as a ``main_hook`` that does nothing, is not the author's.
    """
    package = cls.__module__.partition(".")[0]
    written = {name for c in cls.mro() if c.__module__.partition(".")[0] == package for name in vars(c)}
    members = [member.name for member in SPECS[kind]]
    lacking = [name for name in members if name not in written]
    for name in sorted(written.difference(members)):
        near = difflib.get_close_matches(name, lacking, n=1, cutoff=_NEAR)
        if near and not name.startswith("_"):
            yield f"{name!r} is no member of a {kind}. Did you mean {near[0]!r}? Write that, or another name."


def _annotated(subject: object) -> set[str]:
    """The attributes that a class declares by an annotation alone; an object has to have them."""
    classes = subject.mro() if isinstance(subject, type) else []
    return {name for c in classes for name in vars(c).get("__annotations__", {})}


def _owner(subject: object, name: str) -> type | None:
    classes = (subject if isinstance(subject, type) else type(subject)).mro()
    return next((c for c in classes if name in vars(c)), None)


def _is_protocol(cls: type | None) -> bool:
    return bool(getattr(cls, "_is_protocol", False))


def _abstract(raw: object) -> bool:
    return bool(getattr(raw, "__isabstractmethod__", False))


def _promised_class(factory: Callable[..., Any]) -> type | None:
    """The concrete class in a factory's return annotation; ``None`` when only what it builds can tell."""
    try:
        promised = typing.get_type_hints(factory).get("return")
    except Exception:  # an annotation for type checkers only, whose names do not exist when running
        return None
    if not isinstance(promised, type) or inspect.isabstract(promised) or _is_protocol(promised):
        return None
    return promised if promised not in (Any, object, type(None)) else None
