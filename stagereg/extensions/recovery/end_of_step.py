"""The end of a step: copies of the values that later code may change, and events on the accelerators."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.rng as rng
import stagereg.extensions.recovery.state_tensors as state_tensors
from stagereg.checkpoint.format.configs import content_of, is_config
from stagereg.checkpoint.format.split_tensors import carry
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.data import is_position, is_stateful
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.recovery.state_tensors import COPIED_BYTES, FLAT, SMALL_BYTES, StateTensors
from stagereg.kernel.copier import no_collection
from stagereg.kernel.state_dict import ATOMS, TreeSpec, flatten
from stagereg.registry import build

_ITEMS, _FLAT_ITEMS = 1 << 10, 1 << 17  # maximum items of a copied container; of one with only numbers and strings
_SLOW_S = 0.01  # maximum CPU seconds of one state_dict() call, and of all copies of objects
_CHANGED = "code other than an optimizer has written to its state since the step ended"
_MOVED, _REPLACED = "the tensors of its modules were replaced", "its optimizer had replaced parts of its state"
_KEPT = ATOMS | {torch.Tensor, torch.nn.Parameter}  # types of options that are not copied
_version_of = operator.attrgetter("_version")


class EndOfStep:
    """The values of the state at the end of a step that later code may change, and events on the accelerators."""

    def __init__(self, step: int, state: Mapping[str, Any], seen: StateTensors) -> None:
        self.step, self.seen, self.why = step, seen, seen.unfit  # why the step is not valid, as far as known
        self.is_sound = False  # whether the step was complete on the accelerators before any abort
        self.skipped = False  # whether the next step is not recorded
        self._is_begun = False  # whether the host has called the next step of an optimizer
        self.begun: dict[torch.Stream, torch.Event] = {}  # just before the next optimizer step, by its stream
        self.ended: list[torch.Event] = []  # one per accelerator with a part of the state
        self.copies: list[torch.Tensor] = []
        if seen.unfit:
            return
        self.copies = seen.copy_small()
        notes = Notes(seen.configs)
        self._noted = {name: x if name in seen.objects else notes.of(x) for name, x in state.items()}
        self._options = [(each, notes.of_options(each)) for each in seen.groups]
        self._options += [(each, {key: x for key, x in each.items() if type(x) in FLAT}) for each in seen.numbers]
        self._plain = notes.watched  # tensors in these values that are not copied
        self._versions = self._find_versions()
        self._configs = seen.configs = notes.configs
        self._long = notes.long
        self._generators = rng.note()
        self._devices = seen.devices | notes.devices
        self.ended = [torch.accelerator.current_stream(device).record_event() for device in self._devices]

    def has_ended(self) -> bool:
        """Whether the accelerators have reached the end of the step."""
        return all(event.query() for event in self.ended)

    def has_begun(self) -> bool:
        """Whether the next optimizer step may have written, on the host or on an accelerator."""
        is_written = self._is_begun and self.seen.is_written_by_host
        return is_written or any(event.query() for event in [*self.begun.values()])

    def record_begin(self) -> tuple[dict[torch.Stream, torch.Event], str]:
        """Record events before an optimizer step. Return new events, and why the step is invalid, if it is."""
        if not self.ended:
            return {}, ""
        try:
            streams = {torch.accelerator.current_stream(device) for device in self._devices}
            events = {stream: stream.record_event() for stream in streams - self.begun.keys()}
            return events, "" if self._is_begun or self._versions == self._find_versions() else _CHANGED
        except Exception as error:  # also raised by the optimizer
            return {}, reason(error)

    def begin(self, events: Mapping[torch.Stream, torch.Event], why: str) -> None:
        """Store the results of :meth:`record_begin`: an optimizer is about to step."""
        self._is_begun, self.why = True, self.why or why
        self.begun = {**events, **self.begun}

    def skip(self, later: EndOfStep) -> None:
        """Store that ``later``, the next step, is no longer recorded."""
        self.skipped, self.begun = True, {**later.begun, **self.begun}

    def find_changes(self) -> str:
        """Return why the state no longer holds the step, apart from writes of optimizers; otherwise an empty string."""
        if self.why:
            return self.why
        if self.seen.has_moved():
            return _MOVED
        if not self._is_begun:
            return "" if self._versions == self._find_versions() else _CHANGED
        last = zip(reversed(self._plain), reversed(self._versions), strict=False)
        return _CHANGED if any(state_tensors.is_on_host(x) and x._version != version for x, version in last) else ""

    def take(self, rank: int, world_size: int, names: ParameterNames) -> dict[str, Any]:
        """Return the entries to save, with the copied values instead of live ones."""
        if any(content_of(config) != content_of(copied) for config, copied in self._configs.values()):
            raise CheckpointError("code has changed a config in its state")
        if not all(_is_flat(x.values() if type(x) is dict else x) for x in self._long):
            raise CheckpointError(f"a container of more than {_ITEMS:,} items has other items than numbers and strings")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device in self._devices:
                stack.enter_context(torch.Stream(device))
            for each, noted in self._options:
                each.update(noted)
            state = {name: self.seen.modules.get(name, x) for name, x in self._noted.items()}
            captured = entries.capture(state, self.step, rank, world_size, names, self._generators)
            if any(each.get(key) is not x for each, noted in self._options for key, x in noted.items()):
                raise CheckpointError(_CHANGED)  # the training thread changed an option
            captured = self._with_copies(captured)
            return build("stager", "blocking").stage(captured) if self._devices else captured

    def _with_copies(self, captured: dict[str, Any]) -> dict[str, Any]:
        seen, is_begun = self.seen, self._is_begun
        if not self.copies and not is_begun:
            return captured
        spec, copies = flatten(captured), dict(zip(map(_place, seen.small), self.copies, strict=True))
        sources = _sources(spec)
        if is_begun:  # the host may have replaced tensors, or added state
            noted = {id(x) for name, x in self._noted.items() if name not in seen.objects for x in _sources(flatten(x))}
            places = {_place(x) for x in sources if id(x) not in noted}
            known = copies.keys() | {*map(_place, seen.watched)}
            if seen.has_new_numbers() or not copies.keys() <= places <= known:
                raise CheckpointError(_REPLACED)
        each = zip(sources, spec.tensors, strict=True)
        whole: dict[str, Any] = spec.unflatten([copies.get(_place(x), resolved) for x, resolved in each])
        return whole

    def _find_versions(self) -> list[int]:
        return [*map(_version_of, self.seen.watched), *map(_version_of, self._plain)]


def _sources(spec: TreeSpec) -> list[torch.Tensor]:
    """Return the tensors of the program, not the copies in which their lazy conjugation or negation was resolved."""
    return [spec.lazy.get(i, x) for i, x in enumerate(spec.tensors)]


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    return x.device, x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg()


def _is_flat(items: Iterable[Any]) -> bool:
    return {*map(type, items)} <= ATOMS


def _is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.number, numpy.bool_))


class Notes:
    """Records the current values of entries. ``watched``: the tensors in these values that are not copied.

    Immutable values are recorded themselves. All others are copied, except large tensors, and configs, whose copies in
    ``known`` are used again. ``configs``: the configs, each with its copy, by id.

    Raises: ``CheckpointError`` if recording the entries at each step would take too long; the error of a failed copy.
    """

    def __init__(self, known: Mapping[int, tuple[Any, Any]] | None = None) -> None:
        self._known, self.configs = known or {}, dict[int, tuple[Any, Any]]()
        self.long: list[Any] = []  # copies of long containers, whose items must be numbers and strings
        self._seconds = 0.0  # CPU seconds of copying objects
        self.watched: list[torch.Tensor] = []
        self.devices: set[torch.device] = set()  # accelerators with tensors in these values
        self._nbytes = 0  # bytes copied from memory whose writes change no version counter

    def of(self, value: Any) -> Any:
        """Return the current value of an entry; for a stateful object, the value of its ``state_dict()``."""
        if type(value) in ATOMS:
            return value
        if type(value) in (dict, list, tuple):
            return self._container(value)
        if type(value) is torch.Tensor:
            return self._tensor(value)
        if _is_number_of_numpy(value):
            return value
        if (generator := rng.generator_state(value)) is not None:
            return generator.state_dict()
        if isinstance(value, entries.PerRank):
            noted = self.of(value.value)
            return noted if isinstance(noted, entries.PerRank) else entries.PerRank(noted)
        if is_position(value):
            return entries.PerRank(self.of(value.state_dict()))
        if is_config(value):  # copied once, because a copy takes milliseconds
            self.configs[id(value)] = found = self._known.get(id(value)) or (value, copy.deepcopy(value))
            return found[1]
        if not is_stateful(value):
            return self._copied(value)
        began = time.thread_time()
        state = value.state_dict()
        if (seconds := time.thread_time() - began) > _SLOW_S:
            raise CheckpointError(f"state_dict() of {type(value).__qualname__} takes {seconds:.3f} s, which is slow")
        return self.of(state)

    def of_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the current options of an optimizer's group. Its tensors are recorded with the optimizer's state."""
        return {key: x if type(x) in _KEPT else self.of(x) for key, x in group.items() if key != "params"}

    @no_collection()
    def _copied(self, value: Any) -> Any:
        """Copy any other value, except its large tensors."""
        began, spec = time.thread_time(), flatten(value)
        copied = spec.unflatten([self._tensor(x.detach()) for x in spec.tensors])
        self._seconds += time.thread_time() - began
        if self._seconds > _SLOW_S:
            kind = type(value).__qualname__
            raise CheckpointError(f"copying values such as a {kind} takes {self._seconds:.3f} s, which is slow")
        return copied

    def _container(self, value: Any) -> Any:
        items = value.values() if type(value) is dict else value
        seen = items if len(value) <= _ITEMS else itertools.islice(items, 1)  # a save checks all items of a long one
        is_flat = _is_flat(seen)
        if len(value) > (_FLAT_ITEMS if is_flat else _ITEMS):
            raise CheckpointError(f"a {type(value).__name__} has {len(value):,} items, too many to copy in each step")
        if is_flat:
            copied = copy.copy(value)
            self.long += [copied] if len(copied) > _ITEMS else []
            return copied
        if type(value) is dict:
            return {key: self.of(x) for key, x in value.items()}
        return type(value)(map(self.of, value))

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        self.devices |= set() if state_tensors.is_on_host(value) else {value.device}
        if value.nbytes > SMALL_BYTES:
            if value.untyped_storage().resizable() or not value.is_cpu:
                self.watched.append(value)
                return value
            self._nbytes += value.nbytes  # memory of NumPy, whose writes change no version counter
            if self._nbytes > COPIED_BYTES:
                raise CheckpointError(f"NumPy tensors have {self._nbytes:,} bytes, too many to copy in each step")
        return carry(value, value.detach().clone())
