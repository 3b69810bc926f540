"""Detect an optimizer, a scheduler or a sampler that is missing from the state, and step numbers that are never saved.

Each mistake is logged once per run, with the line of code to write. If the program is right, silence this logger.
"""

from __future__ import annotations

import logging
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import stagereg.checkpoint.state.entries as entries
import stagereg.extensions.diagnostics.first_save as first_save
from stagereg.base.hooks import AFTER_STEPS, PLATEAUS
from stagereg.checkpoint.format.encoding import leaves
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.state.module_state import modules_of
from stagereg.checkpoint.state.optimizer_state import optimizers_of, parameters_of
from stagereg.data import COUNTED, ResumableSampler

_log = logging.getLogger(__name__)
_State = Mapping[str, Any]

_SAVES = 10  # saves after which steps of optimizers are no longer observed
_REPEATS = 3  # calls that repeat the previous step number after an optimizer step
_CALLS = 1000  # calls with one step number, without an optimizer step; longer than any gradient accumulation
_CROSSED = 2  # skipped multiples of ``every`` that trigger a warning
_TEXTS = {
    "optimizer": "the state lacks {}: a resumed run begins with a new optimizer. Add the optimizer to the state before "
    "restore(): {}",
    "scheduler": "the state lacks the learning rate scheduler of {}: a resumed run begins the schedule from scratch, "
    "unless the program sets the scheduler to the right step. Add the scheduler to the state before restore(): {}",
    "sampler": "the state lacks {}, whose batches the program uses: a resumed run begins with its first sample again. "
    "Add the sampler to the state before restore(): {}",
}
_SILENCE = f". To silence this warning: logging.getLogger({__name__!r}).setLevel('ERROR')."


class ForgottenObjects:
    """Finds optimizers, schedulers and samplers that a program uses for its model but does not put into the state.

    torch marks an optimizer that has a scheduler, but not if it is a ``ReduceLROnPlateau``. Therefore the steps of each
    ``ReduceLROnPlateau`` are observed until :meth:`close`. All methods run on the training thread. ``stepped``: whether
    an optimizer has stepped since the attribute was set to False.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self.stepped = False
        self._ranks, self._saves = ranks, 0
        self._active: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers with a step since the last save
        self._plateaus: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
        self._judged: weakref.WeakSet[Any] = weakref.WeakSet(COUNTED)  # checked objects, and samplers of earlier loops
        self._replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # an optimizer in the state may replace these
        self._found: dict[str, str] = {}  # the message of each kind, empty once it is logged
        self._removes = [AFTER_STEPS.add(self._note_step), PLATEAUS.add(self._note_plateau)]

    def _note_step(self, optimizer: Optimizer) -> None:
        self.stepped = True
        if optimizer not in self._active:
            self._active.add(optimizer)

    def _note_plateau(self, scheduler: LRScheduler) -> None:
        self._plateaus.add(scheduler)

    @first_save.only_looks
    def look(self, state: _State, captured: _State, others: Iterable[_State | None]) -> None:
        """Search for objects that are missing from a save.

        ``state``: the state of the save. ``captured``: the entries of the state that are staged. ``others``: the states
        of other checkpointers, which may save optimizers of this state's parameters.
        """
        self._report()
        self._saves += 1
        if self._saves == _SAVES:
            self._removes[0]()
        new: list[Any] = [each for each in (*self._active, *self._plateaus) if each not in self._judged]
        self._active.clear()
        if new:
            optimizers = [each.optimizer if isinstance(each, LRScheduler) else each for each in new]
            self._judge({id(each.state): each for each in optimizers}, _Saved(state, captured), others)
            self._judged.update(each for each in new if each not in self._replaced)
        if samplers := [each for each in COUNTED if each not in self._judged]:
            self._judge_samplers(samplers, _Saved(state, captured), (state, *filter(None, others)))
            self._judged.update(samplers)
        if self._ranks.rank == 0:
            self._report()  # other ranks report in the next save, so that rank 0 comes first

    def close(self) -> None:
        """Log the remaining findings, and stop observing optimizers and schedulers. Idempotent."""
        self._report()
        for remove in self._removes:
            remove()

    def _judge(self, optimizers: Mapping[int, Optimizer], saved: _Saved, others: Iterable[_State | None]) -> None:
        of_others = [one for other in others if other for value in other.values() for one in optimizers_of(value)]
        own = [each for key, each in optimizers.items() if key not in {id(one.state) for one in of_others}]
        lines: dict[str, list[str]] = {"optimizer": [], "scheduler": []}
        names: dict[str, list[str]] = {"optimizer": [], "scheduler": []}
        trained = [(entry, each) for each in own if (entry := saved.trained_by(each)) is not None]
        for entry, each in sorted(trained, key=lambda pair: pair[0]):
            is_lost = not saved.has(each) and (_is_scheduled(each) or bool(_state_of(each)))
            if is_lost and saved.replaces(each) and each not in self._replaced:
                self._replaced.add(each)  # report it only if it steps again, in addition to the optimizer in the state
                continue
            self._replaced.discard(each)
            is_unscheduled = self._lacks_scheduler(each, saved)
            kind = "optimizer" if is_lost else "scheduler"
            if is_lost:
                lines[kind].append(_line("optimizer", saved, partial(operator.is_, each)))
            if is_unscheduled:
                lines[kind].append(_line("scheduler", saved, partial(saved.lacks, optimizer=each)))
            if is_lost or is_unscheduled:
                names[kind].append(f"{type(each).__name__}, which trains {entry!r}")
        for kind, found in names.items():
            if found:
                self._found.setdefault(kind, _TEXTS[kind].format(" and ".join(found), "; ".join(lines[kind])))

    def _judge_samplers(self, samplers: Iterable[ResumableSampler], saved: _Saved, states: Iterable[_State]) -> None:
        inside = {id(entries.value_of(state, name)) for state in states for name in state}
        lacking = [each for each in samplers if id(each) not in inside]
        if lacking and not saved.is_in_object("consumed"):
            lines = [_line("sampler", saved, partial(operator.is_, each)) for each in lacking]
            self._found.setdefault("sampler", _TEXTS["sampler"].format("a ResumableSampler", "; ".join(lines)))

    def _lacks_scheduler(self, optimizer: Optimizer, saved: _Saved) -> bool:
        """Return whether ``optimizer`` has a scheduler that is not in the state."""
        known = any(each.optimizer.state is optimizer.state for each in saved.schedulers)
        plateau = any(saved.lacks(each, optimizer) for each in self._plateaus)
        return (plateau or (_is_scheduled(optimizer) and not known)) and not saved.has_schedules

    def _report(self) -> None:
        for kind, text in self._found.items():
            if text:
                self._found[kind] = ""
                if self._ranks.is_first(f"forgotten {kind}"):
                    _log.warning("stagereg: %s%s", text, _SILENCE)


class _Saved:
    """The entries, optimizers, schedulers and parameters that a save contains."""

    def __init__(self, state: Mapping[str, Any], captured: Mapping[str, Any]) -> None:
        self.names = set(state)
        self.schedulers: list[LRScheduler] = []
        self._owners: dict[torch.Tensor, str] = {}  # parameter -> entry of its module
        self._optimizers: set[int] = set()  # IDs of ``optimizer.state``, which wrappers share with the inner optimizer
        self._trained: set[torch.Tensor] = set()
        self._captured, self._known = captured, set[str]()
        for name in state:
            value = entries.value_of(state, name)
            optimizers = optimizers_of(value)
            self._optimizers |= {id(each.state) for each in optimizers}
            self._trained |= {param for each in optimizers for param in parameters_of(each)}
            self._owners |= {param: name for module in modules_of(value) for param in module.parameters()}
            if isinstance(value, LRScheduler):
                self.schedulers += _with_inner(value)
            if optimizers or isinstance(value, LRScheduler):
                self._known.add(name)

    @cached_property
    def _memory(self) -> dict[object, str]:
        """Maps the memory address of each saved tensor to the name of its entry."""
        tensors = ((x, name) for name, value in self._captured.items() for _, x in leaves(value, name))
        found = {entries.memory_of(x): name for x, name in tensors if isinstance(x, torch.Tensor)}
        found.pop(0, None)  # the address of tensors without memory
        return found

    def is_in_object(self, key: str) -> bool:
        """Return whether an entry of another type saves a key ``key``, so it may contain an optimizer or scheduler."""
        unknown = (pair for pair in self._captured.items() if pair[0] not in self._known)
        return any(f".{key}." in f"{path}." for name, value in unknown for path, _ in leaves(value, name))

    @cached_property
    def has_schedules(self) -> bool:
        """Whether an entry that is not itself a scheduler may contain a scheduler."""
        return self.is_in_object("last_epoch")

    def trained_by(self, optimizer: Optimizer) -> str | None:
        """Return the name of an entry with parameters of ``optimizer``; ``None`` if no such entry exists."""
        params = parameters_of(optimizer)
        by_memory = (self._memory.get(entries.memory_of(x)) for x in params)
        return next(filter(None, chain(map(self._owners.get, params), by_memory)), None)

    def replaces(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer in the state trains parameters of ``optimizer``, and so may replace it."""
        return not self._trained.isdisjoint(parameters_of(optimizer))

    def lacks(self, scheduler: Any, optimizer: Optimizer) -> bool:
        """Return whether ``scheduler`` is a scheduler of ``optimizer`` that is not in the state."""
        own = isinstance(scheduler, LRScheduler) and scheduler.optimizer.state is optimizer.state
        return own and all(each is not scheduler for each in self.schedulers)

    def has(self, optimizer: Optimizer) -> bool:
        """Return whether any object in the save contains, or may contain, the state of ``optimizer``."""
        if id(optimizer.state) in self._optimizers or self.is_in_object("param_groups"):
            return True
        places = [entries.memory_of(x) for x in _state_of(optimizer) if isinstance(x, torch.Tensor)]
        return any(places) and all(each in self._memory for each in places if each)


def _with_inner(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return a scheduler and its inner schedulers, as in ``SequentialLR``."""
    return [scheduler, *(one for each in getattr(scheduler, "_schedulers", ()) for one in _with_inner(each))]


def _is_scheduled(optimizer: Optimizer) -> bool:
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _state_of(optimizer: Optimizer) -> list[Any]:
    return [x for each in optimizer.state.values() for _, x in leaves(each, "") if x is not None]


def _line(name: str, saved: _Saved, is_it: Callable[[Any], bool]) -> str:
    """Return the line of code that adds an object to the state. ``is_it`` finds the object among program variables."""
    key, number = name, 2
    while key in saved.names:
        key, number = f"{name}_{number}", number + 1
    saved.names.add(key)
    variable = first_save.search_program(lambda space: _variable(space, is_it)) or f"<the {name}>"
    return f"state[{key!r}] = {variable}"


def _variable(space: Mapping[str, Any], is_it: Callable[[Any], bool]) -> str:
    """Return the variable, or ``variable.attribute``, with a value that ``is_it`` accepts; empty if none exists."""
    plain = {name: x for name, x in space.items() if not isinstance(x, (types.ModuleType, type))}
    found = {name: x for name, x in plain.items() if is_it(x)}
    found = found or {
        f"{name}.{attribute}": x
        for name, value in plain.items()
        for attribute, x in list(getattr(value, "__dict__", {}).items())
        if is_it(x)
    }
    inner = [id(one) for each in found.values() for one in _with_inner(each)[1:]]  # IDs of inner schedulers
    return next((name for name, x in found.items() if id(x) not in inner), "")


class GivenSteps:
    """Checks the steps that a program passes to ``maybe_save``. Warns if they repeat, or if no save is ever due."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._saved: int | None = None
        self._calls = self._repeats = 0  # calls with a repeated step number; such calls after an optimizer step
        self._crossed: list[int] | None = []  # steps since the last save that skipped a multiple of ``every``
        self._warns = True

    def look(self, step: int, every: int | None, saved: int | None, stepped: bool) -> None:
        """Check the call of ``maybe_save`` for ``step``.

        ``every``: the number whose multiples are saved; ``None`` if saves do not depend on step numbers. ``saved``: the
        last saved step. ``stepped``: whether an optimizer has stepped since the previous call.
        """
        last, self._last = self._last, step
        if step == last:
            self._calls += 1
            self._repeats += stepped
            if self._warns and (self._repeats == _REPEATS or self._calls == _CALLS):
                self._warns = False
                _log.warning(
                    "stagereg: maybe_save() got step %d in %d calls in a row%s. A step that does not grow is never "
                    "saved, or saved repeatedly, and a resumed run loses progress. Count the batches of all epochs: "
                    "step += 1 before maybe_save(step, state); or call maybe_save(epoch, state) once, at the end of "
                    "each epoch.",
                    *(step, 1 + self._calls, ", and an optimizer stepped between them" * (self._repeats == _REPEATS)),
                )
            return
        self._calls = self._repeats = 0
        if self._crossed is None or every is None or last is None:
            return
        if saved != self._saved:
            self._saved, self._crossed = saved, []
        if step // every > last // every and step % every:
            self._crossed.append(step)
            if len(self._crossed) == _CROSSED:
                _log.warning(
                    "stagereg: maybe_save() saves multiples of every=%d only, and the program skips them: %s. Call "
                    "maybe_save(step, state) at the end of each step, with a step that grows by 1.",
                    *(every, ", ".join(f"step {x} instead of {x // every * every}" for x in self._crossed)),
                )
                self._crossed = None
