"""Check that a component's class or object has the members that its kind requires. Does not import torch.

Protocols define the members: ``stagers.async_stager``, ``join.joinable``, ``checkpoint.storage.protocol``,
``extensions.callbacks.on_commit``, ``checkpoint.store.keep``. This module repeats the names and signatures of the
members, so that the registry can check them. An error shows the lines of code that are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

from stagereg.errors import ConfigError, RegistryError, nearest

_F = TypeVar("_F", bound=Callable[..., None])
_MISSING = object()
_NEAR = 0.7  # minimum similarity of a name and the suggested member, such as pre_hook and post_hook

HYDRA_KEYS = ("_target_", "_args_", "_convert_", "_isolate_", "_partial_", "_recursive_")
"""Keys with a meaning for Hydra in a node of a config; they are never options."""

REQUIRED = {
    "stager": [
        "def stage(self, state_dict)",
        "def synchronize_staging(self) -> None",
        "def close(self) -> None",
        "should_synchronize_after_execute: bool = True",
    ],
    "join_hook": ["def main_hook(self) -> None", "def post_hook(self, is_last_joiner: bool) -> None"],
    "joinable": [
        "def join_hook(self, **kwargs) -> JoinHook",
        "@property\n    def join_device(self) -> torch.device",
        "@property\n    def join_process_group(self)",
    ],
    "storage": [
        "def reset(self, checkpoint_id=None) -> None",
        "def set_up_storage_writer(self, is_coordinator) -> None",
        "def prepare_local_plan(self, plan) -> SavePlan",
        "def prepare_global_plan(self, plans) -> list[SavePlan]",
        "def write_data(self, plan, planner) -> Future[list[WriteResult]]",
        "def finish(self, metadata, results) -> None",
        "def storage_meta(self) -> StorageMeta | None",
        "def reader(self, path) -> StorageReader",
    ],
    "on_commit": ["def committed(self, checkpoint) -> None"],
    "keep": ["def select(self, checkpoints, metrics) -> dict[str, str]"],
    "tier": ["def prepare(self) -> str", "def lacking(self, nbytes: int) -> str", "durable: bool = True"],
    "join": [],
    "checkpoint": [],
}
"""The required members of each kind's protocol, as lines of code for messages."""

OPTIONAL = {
    "stager": [
        "def expect_release(self) -> None",
        "def release(self, staged) -> None",
        "def watch(self, optimizer) -> None",
    ],
    "join_hook": ["def before_step(self) -> None", "def on_exhausted(self) -> None"],
    "joinable": [
        "def attach(self, session) -> None",
        "def detach(self) -> None",
        "def needs_active_ranks(self, divide_by_initial_world_size: bool) -> bool",
        "@property\n    def has_unfinished_step(self) -> bool",
        "has_no_collectives: bool = True",
        "announces_itself: bool = True",
        "reduces_gradients: bool = True",
    ],
    "storage": [
        "@property\n    def marks(self) -> Mapping[str, FileDigest]",
        "wraps: Storage | None = None",
        "@property\n    def finished(self) -> bytes | None",
        "remote: bool = False",
    ],
}
"""The optional members of each kind's protocol."""

_BASES = {
    "join_hook": "stagereg.join.joinable.JoinHook",
    "joinable": "stagereg.join.joinable.Joinable",
    "storage": "stagereg.checkpoint.storage.protocol.Storage",
    "tier": "stagereg.extensions.tiers.tier.Tier",
}
_ABSTRACT = {"stage"}  # methods that only raise an error in torch's protocol, so a component must override them


def with_article(kind: str) -> str:
    """Return a kind with its article: ``"an on_commit"``."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def check_component(kind: str, name: str, component: object) -> None:
    """Check a class, or the class in the return annotation of a factory function, with :func:`check`.

    Also raises ``RegistryError`` for an object that is not callable, and for a parameter name that Hydra reserves.
    """
    with contextlib.suppress(TypeError, ValueError):  # a component written in C may have no signature
        names = inspect.signature(cast("Any", component)).parameters
        if taken := [each for each in names if each in (*HYDRA_KEYS, "defaults")]:
            who = f"{getattr(component, '__module__', '')}.{getattr(component, '__qualname__', component)}"
            raise RegistryError(
                f"{who} cannot be the {kind} {name!r}:\n  its parameter {taken[0]!r} cannot be an option, because "
                "Hydra reserves that key in a config. Rename the parameter."
            )
    if isinstance(component, type):
        check(kind, name, component)
    elif not callable(component):
        raise RegistryError(f"{kind}/{name} is {component!r}: register a class or a function that returns one.")
    elif (promised := _promised_class(component)) is not None:
        check(kind, name, promised)


def check(kind: str, name: str, subject: object) -> None:
    """Raise ``RegistryError`` if a class or an object lacks members of ``kind``. The error shows the lines to write."""
    cls = subject if isinstance(subject, type) else type(subject)
    optional = OPTIONAL.get(kind, [])
    found = {line: _problem(line, subject, line in optional) for line in (*REQUIRED[kind], *optional)}
    problems = [f"{problem}. Write:\n    {line}" for line, problem in found.items() if problem]
    base = _BASES.get(kind, "builtins.object")
    if base not in [f"{c.__module__}.{c.__qualname__}" for c in cls.mro()]:
        unused = [name for name in map(_name, optional) if hasattr(cls, name)]
        problems += [f"{name!r} is only used on a subclass of {base}. Derive from that class." for name in unused]
    misspelt = _misspelt(kind, cls, set(map(_name, found)))
    if lines := "".join(f"\n  {problem}" for problem in (*problems, *misspelt)):
        raise RegistryError(f"{cls.__module__}.{cls.__qualname__} cannot be the {kind} {name!r}:{lines}")


def refuse_unknown(what: str, given: Collection[str], component: Callable[..., Any]) -> None:
    """Raise ``ConfigError`` if ``component`` does not take an argument. The error suggests the nearest valid name."""
    parameters = inspect.signature(component).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for unknown in (key for key in given if key not in takes):
        value = repr(given[unknown]) if isinstance(given, Mapping) else "..."
        near = instead(unknown, component, value) or nearest(unknown, takes)
        raise ConfigError(f"{what} takes no {unknown!r}.{near} It takes: {', '.join(takes) or 'nothing'}")


def find_group(name: str, component: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the parameter whose default is a dataclass with the field ``name``, and the dataclass's name; or None."""
    for each in inspect.signature(component).parameters.values():
        if dataclasses.is_dataclass(each.default) and name in [one.name for one in dataclasses.fields(each.default)]:
            return each.name, type(each.default).__name__
    return None


def instead(name: str, component: Callable[..., Any], value: str) -> str:
    """Return advice if ``name`` is an option in a group, such as ``restore``, of ``component``; otherwise empty."""
    found = find_group(name, component)
    return f" It is {found[0]}.{name}: {found[0]}={found[1]}({name}={value})." if found else ""


def suggests_arguments(init: _F) -> _F:
    """Decorate a constructor ``init``, so that it first passes its keyword arguments to :func:`refuse_unknown`."""

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        refuse_unknown(init.__qualname__.partition(".")[0], kwargs, functools.partial(init, *args[:1]))
        init(*args, **kwargs)

    return cast("_F", checked)


def _name(definition: str) -> str:
    return re.findall(r"(\w+)[(:]", definition)[0]


def _problem(definition: str, subject: object, optional: bool) -> str:
    cls, name = subject if isinstance(subject, type) else type(subject), _name(definition)
    raw = inspect.getattr_static(subject, name, _MISSING)
    if optional and raw is _MISSING:
        return ""
    abstract = getattr(raw, "__isabstractmethod__", False)
    called = re.match(r"def \w+\(self(.*?)\)", definition)
    if called is None:
        annotated = {each for c in cls.mro() for each in inspect.get_annotations(c)}
        there = raw is not _MISSING or (name in annotated if subject is cls else hasattr(subject, name))
        if isinstance(raw, types.FunctionType):
            return f"attribute {name!r} is a method"
        return "" if there and not abstract else f"attribute {name!r} is missing"
    method, owner = getattr(subject, name, None), next((c for c in cls.mro() if name in vars(c)), None)
    if not callable(method) or abstract or (name in _ABSTRACT and getattr(owner, "_is_protocol", False)):
        return f"method {name!r} is missing"
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a method written in C can only be checked by calling it
        return ""
    # On the class, a method is unbound and needs an argument for ``self``.
    unbound = subject is cls and not isinstance(raw, (staticmethod, classmethod))
    try:
        signature.bind(*(["self"] if unbound else []), *re.findall(r", (\w+)", called[1]))
    except TypeError as error:
        return f"method {name}{signature} has the wrong parameters: {error}"
    if "**" in definition and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return f"method {name}{signature} has the wrong parameters: it must accept any keyword arguments"
    return ""


def _misspelt(kind: str, cls: type, members: set[str]) -> Iterator[str]:
    """Yield a line for each public name of the class that looks like a typo of a missing member."""
    package = cls.__module__.partition(".")[0]  # the author cannot rename members of other packages' base classes
    written = {name for c in cls.mro() if c.__module__.partition(".")[0] == package for name in vars(c)}
    for name in sorted(written - members):
        lacking = [member for member in members - written if member[0] == name[0]]
        if (near := difflib.get_close_matches(name, lacking, n=1, cutoff=_NEAR)) and not name.startswith("_"):
            what = f"{name!r} is not a member of {with_article(kind)}"
            yield f"{what}. Did you mean {near[0]!r}? Otherwise choose a less similar name."


def _promised_class(factory: Callable[..., Any]) -> type | None:
    """Return the class in a factory's return annotation; ``None`` if the annotation names no concrete class."""
    try:
        promised = typing.get_type_hints(factory).get("return")
    except Exception:  # an annotation for type checkers only, whose names do not exist at run time
        return None
    if not isinstance(promised, type) or inspect.isabstract(promised) or getattr(promised, "_is_protocol", False):
        return None
    return promised if promised not in (Any, object, type(None)) else None
