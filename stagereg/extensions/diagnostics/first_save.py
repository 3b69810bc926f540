"""Check the first saves of a run, and log a warning if a resumed run would not continue correctly.

A stager may change dtypes, so that ``load_state_dict`` rejects the checkpoint. An optimizer may train parameters that
are not in the state. A number in ``state = {"samples": samples}`` keeps its first value while the program's variable
changes. Without these checks, such mistakes would appear only in the next run. Errors in a check are ignored.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_state as optimizer_state
from stagereg.base.option_text import option
from stagereg.checkpoint.format.encoding import leaves
from stagereg.checkpoint.state.entries import TensorKind, memory_of
from stagereg.data import is_stateful
from stagereg.errors import listed

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOOKS = 10  # number of saves to check; a counter changes within this number of saves
_SEEN = 2  # number of different values of a variable that triggers a warning


def only_looks(check: Callable[P, T]) -> Callable[P, T | None]:
    """Wrap a check so that it logs its own errors and returns None. The save itself reports invalid entries."""

    @functools.wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return check(*args, **kwargs)
        except Exception:
            _log.debug("stagereg: skipped the check %s, which raised an error.", check.__qualname__, exc_info=True)
            return None

    return run


@only_looks
def kinds_of(state: Mapping[str, Any], captured: Mapping[str, Any], cast: bool) -> dict[str, tuple[TensorKind, bool]]:
    """Map each tensor's dotted name to (dtype and shape, whether the staged copy may have a different dtype).

    Includes only tensors in state dicts of objects. ``captured`` has the entries of ``state`` that are staged.
    """
    found: dict[str, tuple[TensorKind, bool]] = {}
    for name, value in state.items():
        converts = cast or bool(optimizer_state.optimizers_of(value))  # torch converts optimizer states
        if name in captured and (converts or module_state.modules_of(value) or is_stateful(value)):
            tensors = ((path, x) for path, x in leaves(captured[name], name) if isinstance(x, torch.Tensor))
            found |= {path: (TensorKind.of(x), converts) for path, x in tensors}
    return found


@only_looks
def warn_of_other_kinds(kinds: Mapping[str, tuple[TensorKind, bool]], stager: str, copy: Mapping[str, Any]) -> None:
    """Log the tensors whose dtype in the staged copy differs from the dtype in the state. Thread-safe."""
    every = (pair for name, value in copy.items() for pair in leaves(value, name))
    there = {path: TensorKind.of(x) for path, x in every if isinstance(x, torch.Tensor) and path in kinds}
    other = {path: kind for path, kind in there.items() if not kind.fits(*kinds[path])}
    if not other:
        return
    what = "Use"
    if all(each.fits(kinds[path][0], True) for path, each in other.items()):
        cast = option("checkpoint.restore.cast", True)
        what = f"For smaller checkpoints, {cast} makes restore() convert them; otherwise use"
    _log.warning(
        "stagereg: stage() of %s returns %d tensor%s of another dtype, which restore() does not accept: %s. "
        "%s another stager, such as 'overlapped'.",
        stager,
        len(other),
        "s" * (len(other) > 1),
        listed([f"{path} (expected {kinds[path][0]}, got {each})" for path, each in other.items()], 3),
        what,
    )


@only_looks
def warn_of_foreign_parameters(state: Mapping[str, Any], captured: Mapping[str, Any]) -> None:
    """Log the optimizers that train parameters that are not in the state."""
    optimizers = {name: each for name, value in state.items() if (each := optimizer_state.optimizers_of(value))}
    others = {name: value for name, value in state.items() if name not in optimizers and name in captured}
    known: set[Any] = set()
    for name, value in others.items():
        tensors = [x for _, x in leaves(captured[name], name) if isinstance(x, torch.Tensor)]
        modules = module_state.modules_of(value)
        if tensors and not modules and is_stateful(value):
            return  # this object may save copies of the parameters
        known.update(*(module.parameters() for module in modules), map(memory_of, tensors))
    known.discard(0)  # the address of empty tensors
    for name, each in optimizers.items() if known else ():
        trained = [x for one in each for x in optimizer_state.parameters_of(one) if x.requires_grad and memory_of(x)]
        if foreign := [x for x in trained if x not in known and memory_of(x) not in known]:
            _log.warning(
                "stagereg: %d of the %d parameters that %r trains are not in the state: they are not saved, and a "
                "resumed run initializes them again. Add their module to the state. If they should be parameters of "
                "the model in the state, construct the optimizer from model.parameters() after the model was replaced "
                "or wrapped, for example by fully_shard.",
                len(foreign),
                len(trained),
                name,
            )


class StaleNumbers:
    """Detects numbers in a state that keep an old value while the program's variable of the same name changes.

    If a program passes the same dict to each save, the dict keeps the first value of a number. That is a mistake unless
    the number is constant. A number is not constant if the variable of the same name changes between saves.
    """

    def __init__(self) -> None:
        self._state = 0  # the ID of the last dict, since a reference would keep all objects in the dict alive
        self._seen: dict[str, tuple[float, set[float]]] = {}
        self._left = _LOOKS

    @only_looks
    def look(self, state: Mapping[str, Any]) -> None:
        """Log a warning for one stale number. Call this method while the program's save runs on the training thread."""
        if not self._left:
            return
        self._left -= 1
        if id(state) != self._state:
            numbers = {name: value for name, value in state.items() if type(value) in (int, float)}
            self._state, self._seen = id(state), {name: (value, set()) for name, value in numbers.items()}
        self._seen = {name: each for name, each in self._seen.items() if state.get(name) == each[0]}
        variables = search_program(lambda space: {name: space[name] for name in self._seen if name in space})
        for name, value in variables.items():
            if type(value) not in (int, float):
                continue
            saved, others = self._seen[name]
            others |= {value} - {saved}
            if len(others) == _SEEN:
                self._left = 0
                _log.warning(
                    "stagereg: %r in the state is %r in each checkpoint so far, but the variable %s of the program is "
                    "now %r. A number in the state keeps the value from when the dict was created. Write state[%r] = "
                    "%s before each save, or create a new dict for each save.",
                    *(name, saved, name, value, name, name),
                )


def search_program(find: Callable[[Mapping[str, Any]], T]) -> T:
    """Call ``find`` with the local and global variables of the function that calls this package. Return its result."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("stagereg."):
        frame = frame.f_back
    own: Any = frame.f_locals
    found = find(ChainMap(own, frame.f_globals))
    # Until Python 3.12, the frame keeps this dict and its tensors alive. Clear the dict unless the program uses it too.
    if type(own) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(own) <= 3:
        own.clear()
    return found
