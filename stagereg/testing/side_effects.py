"""What a join could leave behind on a joinable and on what it watched, in a form that can be compared.

A walk from some objects through their attributes, a few levels deep. Of modules and optimizers it lists which
attributes they have of their own and how many hooks; of other objects also the values of simple attributes, since a
flag that stays set is a side effect too. The caller finds what training itself changes, by a walk before and after
training without a join.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["changed", "side_effects", "strict"]

_DEPTH = 4
_MANY = 64
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
_SETS_ITSELF = {"_authoritative_rank"}
"""What torch sets on a module before each use of it, and never looks at before."""
_STRICT = ("hooks on", "attributes of", "join of", "Python's warning filters")


def side_effects(roots: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """List what there is to compare.

    Args:
        roots: objects, each with what to call it.

    Returns:
        What is comparable by ``==``, by where it was seen.
    """
    walk = _Walk()
    for name, thing in roots:
        walk.visit(name, thing, _DEPTH)
    walk.found["Python's warning filters"] = list(warnings.filters)
    return walk.found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return what is not as it was, by where, one text each."""
    # What is reached on one side only was made or dropped; what leads to it has changed, and is listed.
    return {place: _text(place, was, after[place]) for place, was in before.items() if after.get(place, was) != was}


def strict(place: str) -> bool:
    """Whether training itself changes nothing at this place, once it has taken a step."""
    return place.startswith(_STRICT)


def _text(place: str, before: Any, after: Any) -> str:
    if isinstance(before, frozenset) and isinstance(after, frozenset):
        more, less = sorted(after - before), sorted(before - after)
        new = [f"now also {', '.join(more)}"] if more else []
        lost = [f"no longer {', '.join(less)}"] if less else []
        return f"{place}: {'; '.join(new + lost)}"
    if isinstance(before, list):
        return f"{place}: changed"
    return f"{place}: was {before}, is {after}"


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._known: set[int] = set()
        self._kept: list[Any] = []  # an id is one only while its object lives

    def visit(self, name: str, thing: Any, depth: int) -> None:
        from torch import Tensor, nn
        from torch.optim import Optimizer

        if depth == 0 or id(thing) in self._known or isinstance(thing, (*_SIMPLE, type, types.ModuleType)):
            return
        self._known.add(id(thing))
        self._kept.append(thing)
        if isinstance(thing, Tensor):
            self._hooks(name, {"backward hooks": thing._backward_hooks})
        elif isinstance(thing, nn.Module):
            self._module(name, thing)
        elif isinstance(thing, Optimizer):
            self._own(name, thing)
            self._hooks(name, vars(thing))
        elif isinstance(thing, (list, tuple, Mapping)):
            self._members(name, thing, depth)
        elif isinstance(thing, types.MethodType):
            self.visit(name.removesuffix("()"), thing.__self__, depth)
        elif _is_own(thing):
            self._object(name, thing, depth)

    def _members(self, name: str, things: Sequence[Any] | Mapping[Any, Any], depth: int) -> None:
        pairs = list(things.items() if isinstance(things, Mapping) else enumerate(things))
        for key, each in pairs[:_MANY]:
            self.visit(f"{name}[{key!r}]", each, depth - 1)

    def _module(self, name: str, module: Any) -> None:
        for path, part in module.named_modules():
            where = f"{name}.{path}" if path else name
            self._known.add(id(part))
            self._own(where, part)
            self._hooks(where, vars(part))
            self._join(where, part)
        for path, parameter in module.named_parameters():
            self.visit(f"{name}.{path}", parameter, 1)

    def _own(self, name: str, thing: Any) -> None:
        self.found[f"attributes of {name}"] = frozenset(vars(thing)) - _SETS_ITSELF

    def _hooks(self, name: str, attributes: Mapping[str, Any]) -> None:
        counts = {
            attribute.strip("_").replace("_", " "): len(hooks)
            for attribute, hooks in attributes.items()
            if attribute.endswith("hooks") and isinstance(hooks, Mapping) and hooks
        }
        self.found[f"hooks on {name}"] = counts or "none"

    def _join(self, name: str, thing: Any) -> None:
        config = getattr(thing, "_join_config", None)
        if config is not None:
            on = bool(getattr(config, "enable", False))
            self.found[f"join of {name}"] = "switched on" if on else "switched off"

    def _object(self, name: str, thing: Any, depth: int) -> None:
        self._join(name, thing)
        self._own(name, thing)
        for attribute, value in vars(thing).items():
            if attribute != "_join_config":
                self.found[f"{name}.{attribute}"] = _worth(value)
                self.visit(f"{name}.{attribute}", value, depth - 1)


def _worth(value: Any) -> Any:
    if isinstance(value, _SIMPLE):
        return value if not isinstance(value, str) else repr(value)
    kind = type(value).__name__
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the {kind} {value.__qualname__}"
    if isinstance(value, (list, dict, set, tuple)):
        return f"a {kind} of {len(value)}"
    return f"a {kind}"


def _is_own(thing: Any) -> bool:
    """Whether an object is written in Python, and not one of torch's, which lead to all the world."""
    functions = (types.FunctionType, types.BuiltinFunctionType, types.GeneratorType)
    foreign = type(thing).__module__.partition(".")[0] in ("torch", "builtins")
    return hasattr(thing, "__dict__") and not foreign and not isinstance(thing, functions)
