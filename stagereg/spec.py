"""What a component of each kind must have, held against a class or an object without importing torch.

The protocols proper, with their contracts, are in ``stagers.protocol``, ``join.protocol`` and
``checkpoint.storage.protocol``; here is only their shape, as the registry checks it: names, call signatures,
attributes. The registry and the config room use it; a plugin author meets it as an error that shows the line to write.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from stagereg.errors import ConfigError, RegistryError, nearest

__all__ = ["SPECS", "check", "check_component", "refuse_unknown"]

_MISSING = object()


@dataclass(frozen=True)
class Member:
    """One thing a component must have.

    Attributes:
        name: of the method or attribute.
        example: the line that defines it, shown when it is missing.
        args: how a method is called, as positional arguments; ``None`` for an attribute.
        keywords: the method must take any keyword arguments.
        own: a protocol's own definition, inherited, does not count.
    """

    name: str
    example: str
    args: tuple[str, ...] | None = None
    keywords: bool = False
    own: bool = False


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
    ),
    "joinable": (
        Member("join_hook", "def join_hook(self, **kwargs) -> JoinHook", (), keywords=True),
        Member("join_device", "@property\n    def join_device(self) -> torch.device"),
        Member("join_process_group", "@property\n    def join_process_group(self)"),
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
    ),
    "join": (),
    "checkpoint": (),
}


def check_component(kind: str, name: str, component: object) -> None:
    """Hold a class, or the class that a factory function promises to return, against the spec of ``kind``.

    Raises:
        RegistryError: it is neither class nor function, or something is missing or has the wrong signature.
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
        RegistryError: with one line for each thing that is missing or has the wrong signature, and how to write it.
    """
    problems = [(member, problem) for member in SPECS[kind] if (problem := _problem(member, subject))]
    if problems:
        what = subject if isinstance(subject, type) else type(subject)
        lines = "".join(f"\n  {problem}. Write:\n    {member.example}" for member, problem in problems)
        raise RegistryError(f"{what.__module__}.{what.__qualname__} cannot be the {kind} {name!r}:{lines}")


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


def _problem(member: Member, subject: object) -> str | None:
    raw = inspect.getattr_static(subject, member.name, _MISSING)
    if member.args is None:
        annotated = isinstance(subject, type) and any(
            member.name in vars(c).get("__annotations__", {}) for c in subject.mro()
        )
        there = raw is not _MISSING or annotated or (not isinstance(subject, type) and hasattr(subject, member.name))
        return None if there and not _abstract(raw) else f"attribute {member.name!r} is missing"
    method = getattr(subject, member.name, None)
    if not callable(method) or _abstract(raw) or (member.own and _protocols(subject, member.name)):
        return f"method {member.name!r} is missing"
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # written in C: the call itself will tell
        return None
    # Seen on its class, a method still has its ``self`` to fill.
    unbound = isinstance(subject, type) and not isinstance(raw, (staticmethod, classmethod))
    try:
        signature.bind(*(["self"] if unbound else []), *member.args)
    except TypeError as error:
        return f"method {member.name}{signature} does not fit: {error}"
    if member.keywords and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return f"method {member.name}{signature} does not fit: it must take any keyword arguments"
    return None


def _protocols(subject: object, name: str) -> bool:
    """Whether the method is the one that a ``typing.Protocol`` has, which only says what is to be written."""
    classes = (subject if isinstance(subject, type) else type(subject)).mro()
    owner = next((c for c in classes if name in vars(c)), None)
    return bool(getattr(owner, "_is_protocol", False))


def _abstract(raw: object) -> bool:
    return bool(getattr(raw, "__isabstractmethod__", False))


def _promised_class(factory: Callable[..., Any]) -> type | None:
    """The concrete class in a factory's return annotation; ``None`` when only what it builds can tell."""
    try:
        promised = typing.get_type_hints(factory).get("return")
    except Exception:  # an annotation for type checkers only, whose names do not exist when running
        return None
    if not isinstance(promised, type) or inspect.isabstract(promised) or getattr(promised, "_is_protocol", False):
        return None
    return promised if promised not in (Any, object, type(None)) else None
