"""Check each restore: warn if it replaces options, or if the run has a newer checkpoint than ``resume`` names.

``load_state_dict`` replaces options of optimizers and schedulers with the saved options. So a run that is restarted
with more steps, or with a new weight decay, continues with the old values. Values that change during training, such as
the learning rate of a schedule, are not options.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import stagereg.checkpoint.state.entries as entries
from stagereg.base.command import command_key
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, RestoreExtension, RestoreRequest
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.state.nested import code_of
from stagereg.checkpoint.state.optimizer_state import optimizers_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.extensions.diagnostics.first_save import only_looks

_log = logging.getLogger(__name__)

_MOVING = {"last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}  # change during training
_PRIVATE = {"_milestones", "_schedule_phases"}  # private attributes with constructor options
_RATES = {"lr", "initial_lr"}  # values of a parameter group that schedulers change
_MOMENTA = {"momentum", "betas"}  # values that schedulers change if the parameter group has a key in ``_CYCLES``
_CYCLES = {"base_momentum", "max_momentum"}
_MOST, _LONGEST = 10, 400  # maximum lines of a message, maximum characters of a value
_TEXT = (
    "stagereg: restore() set options of %s to their saved values, as load_state_dict() of torch does, but the program "
    "has other values. To use the values of the program, write after restore():%s"
)
_RATE = (
    "stagereg: restore() set the learning rate of %s to the saved value. If the program does not set it in each step, "
    "and should begin with another value, write after restore():%s"
)

Options = dict[tuple[str, str], list[Any]]  # (owner, name) in Python code -> values; for an optimizer, one per group


@only_looks
def options_of(state: Mapping[str, Any]) -> Options:
    """Return the options of all optimizers and schedulers in a state."""
    found: Options = {}
    values = {name: entries.value_of(state, name) for name in state}
    scheduled = [each.optimizer for each in values.values() if isinstance(each, LRScheduler)]
    for name, value in values.items():
        code = code_of(state, name)
        if isinstance(value, LRScheduler):
            found.update(_of_scheduler(code, value))
        for at, optimizer in enumerate(optimizers_of(value)):
            own = f"{code}[{at}]" if isinstance(value, (list, tuple)) else code
            found.update(_of_optimizer(own, optimizer, any(each is optimizer for each in scheduled)))
    return found


@only_looks
def warn_of_replaced(state: Mapping[str, Any], before: Options | None) -> None:
    """Log the options that a restore changed from ``before``, with lines of code that set the old values again."""
    after = options_of(state) or {}
    pairs = {key: (old, after[key]) for key, old in (before or {}).items() if key in after}
    lines: dict[str, list[str]] = {_TEXT: [], _RATE: []}
    owners: dict[str, list[str]] = {_TEXT: [], _RATE: []}
    for (owner, name), (old, new) in pairs.items():
        if old != new and len(old) == len(new):
            text = _RATE if name == "['lr']" else _TEXT
            lines[text] += _lines(owner, name, old, new)
            owners[text] += [owner] if owner not in owners[text] else []
    for text, found in lines.items():
        if found:
            more = [f"# and {len(found) - _MOST} more"] if len(found) > _MOST else []
            shown = "".join(f"\n  {line}" for line in [*found[:_MOST], *more])
            _log.log(logging.INFO if text is _RATE else logging.WARNING, text, ", ".join(owners[text][:_MOST]), shown)


def _lines(owner: str, name: str, old: list[Any], new: list[Any]) -> list[str]:
    def shown(value: Any) -> str:
        return f"{f'collections.{value!r}' if isinstance(value, Counter) else repr(value):.{_LONGEST}}"

    if name[0] == ".":
        return [f"{owner}{name} = {shown(old[0])}  # saved: {shown(new[0])}"]
    if len(old) > 1 and old == old[:1] * len(old) and new == new[:1] * len(new):
        return [f"for group in {owner}.param_groups: group{name} = {shown(old[0])}  # saved: {shown(new[0])}"]
    changed = [at for at in range(len(old)) if old[at] != new[at]]
    return [f"{owner}.param_groups[{at}]{name} = {shown(old[at])}  # saved: {shown(new[at])}" for at in changed]


def _of_optimizer(code: str, optimizer: Optimizer, is_scheduled: bool) -> Iterator[tuple[tuple[str, str], list[Any]]]:
    groups = optimizer.param_groups
    keys = {key for group in groups for key in group}
    is_scheduled = is_scheduled or "initial_lr" in keys or hasattr(optimizer.step, "_wrapped_by_lr_sched")
    moving = (_RATES if is_scheduled else set()) | (_MOMENTA if keys & _CYCLES else set())
    for key in sorted(keys - moving - {"params"}):
        values = [list(_plain(group.get(key))) for group in groups]
        if all(values):
            yield (code, f"[{key!r}]"), [value for [value] in values]


def _of_scheduler(code: str, scheduler: Any) -> Iterator[tuple[tuple[str, str], list[Any]]]:
    """Yield the options of a scheduler, of its inner schedulers, and of objects that compute its factors."""
    found = vars(scheduler)
    if not type(scheduler).__module__.startswith("torch.optim."):  # other attributes of a custom class may change
        found = {key: found[key] for key in inspect.signature(type(scheduler)).parameters if key in found}
    for key, value in found.items():
        if key in _PRIVATE or not (key in _MOVING or key.startswith("_")):
            for plain in _plain(value):
                yield (code, f".{key}"), [plain]
    for at, inner in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _of_scheduler(f"{code}._schedulers[{at}]", inner)
    for at, factor in enumerate(getattr(scheduler, "lr_lambdas", ())):
        for key, value in vars(factor).items() if not inspect.isroutine(factor) else ():
            for plain in _plain(value):
                yield (f"{code}.lr_lambdas[{at}]", f".{key}"), [plain]


def _plain(value: Any) -> Iterator[Any]:
    """Yield a copy of a number, string or container, with tuples as lists and tensors as numbers; otherwise nothing."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_meta:
            yield value.item()
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield value
    elif isinstance(value, (list, tuple)):
        items = [each for item in value for each in _plain(item)]
        if len(items) == len(value):
            yield items
    elif isinstance(value, dict):
        items = [each for item in value.values() for each in _plain(item)]
        if len(items) == len(value):
            copied = dict(zip(value, items, strict=True))
            yield Counter(copied) if isinstance(value, Counter) else copied


class RestoreChecks(RestoreExtension):
    def __init__(self) -> None:
        self._before: Options | None = None  # options before the restore, on rank 0

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        if self._before is None and request.ranks.rank == 0:
            self._before = options_of(request.state)

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if candidate is None or candidate.checkpoint is None or request.ranks.rank != 0:
            return
        warn_of_replaced(request.state, self._before)
        if request.own and request.is_path:
            _warn_of_newer(candidate.checkpoint, request.store)


@only_looks
def _warn_of_newer(restored: Checkpoint, store: CheckpointStore) -> None:
    """Log a warning if the run has a newer checkpoint than ``restored``, for example because the run was restarted.

    The run may count its steps from 0 again. So a checkpoint that the same command line wrote also counts as newer.
    """
    newest = store.latest()
    if newest is None:
        return
    ahead = newest.manifest.step - restored.manifest.step
    own = os.path.realpath(open_parent_store(restored.path).root) == os.path.realpath(store.root)
    if ahead > 0 or (not own and newest.manifest.command == command_key()):
        _log.warning(
            "stagereg: resumed from step %d in %s, which the resume option names, but this run already has %s%s. "
            "The new checkpoints of this run replace %s, and retention deletes it. To continue from it instead, stop "
            "this run now, and start it with %s.",
            *(restored.manifest.step, restored.path, newest.path, f", {ahead} steps ahead" * (ahead > 0)),
            *(newest.name, option("checkpoint.resume", "auto")),
        )


EXTENSIONS: tuple[type[RestoreExtension], ...] = (RestoreChecks,)
"""The checks of every restore."""
