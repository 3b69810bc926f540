"""The end of a step: copies of the values that later code may change, and events on the accelerators."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import time
from collections.abc import Mapping
from typing import Any

import torch

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.rng as rng
import stagereg.extensions.recovery.state_tensors as state_tensors
from stagereg.checkpoint.format.split_tensors import carry
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.data import is_position, is_stateful
from stagereg.errors import CheckpointError, reason
from stagereg.extensions.recovery.state_tensors import COPIED_BYTES, FLAT, SMALL_BYTES, StateTensors
from stagereg.kernel.state_dict import flatten
from stagereg.registry import build

_ITEMS, _FLAT_ITEMS = 1 << 10, 1 << 17  # maximum items of a copied container; of one with only numbers and strings
_SLOW_S = 0.01  # maximum CPU seconds of one state_dict() call
_CHANGED = "code other than an optimizer has written to its state since the step ended"
_MOVED, _REPLACED = "the tensors of its modules were replaced", "its optimizer had replaced parts of its state"
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
        notes = Notes()
        self._noted = {name: x if name in seen.objects else notes.of(x) for name, x in state.items()}
        self._plain = notes.watched  # tensors in _noted that are not copied
        self._versions = self._find_versions()
        self._options = [(each, {key: each[key] for key in each if key != "params"}) for each in seen.groups]
        self._options += [(each, {key: x for key, x in each.items() if type(x) in FLAT}) for each in seen.numbers]
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
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device in self._devices:
                stack.enter_context(torch.Stream(device))
            for each, noted in self._options:
                each.update(noted)
            state = {name: self.seen.modules.get(name, x) for name, x in self._noted.items()}
            captured = entries.capture(state, self.step, rank, world_size, names, self._generators)
            if any(each.get(key) is not x for each, noted in self._options for key, x in noted.items()):
                raise CheckpointError(_CHANGED)  # by the training thread
            captured = self._with_copies(captured)
            return build("stager", "blocking").stage(captured) if self._devices else captured

    def _with_copies(self, captured: dict[str, Any]) -> dict[str, Any]:
        seen, is_begun = self.seen, self._is_begun
        if not self.copies and not is_begun:
            return captured
        spec, copies = flatten(captured), dict(zip(map(_place, seen.small), self.copies, strict=True))
        if is_begun:  # the host may have replaced tensors, or added state
            noted = {id(x) for name, x in self._noted.items() if name not in seen.objects for x in flatten(x).tensors}
            places = {_place(x) for x in spec.tensors if id(x) not in noted}
            known = copies.keys() | {*map(_place, seen.watched)}
            if seen.has_new_numbers() or not copies.keys() <= places <= known:
                raise CheckpointError(_REPLACED)
        whole: dict[str, Any] = spec.unflatten([copies.get(_place(x), x) for x in spec.tensors])
        return whole

    def _find_versions(self) -> list[int]:
        return [*map(_version_of, self.seen.watched), *map(_version_of, self._plain)]


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    return x.device, x.data_ptr(), x.dtype, x.shape, x.stride()


class Notes:
    """Records the current values of entries. ``watched``: the tensors in these values that are not copied.

    Raises: ``CheckpointError`` if recording an entry at each step would take too long.
    """

    def __init__(self) -> None:
        self.watched: list[torch.Tensor] = []
        self.devices: set[torch.device] = set()  # accelerators with tensors in these values
        self._nbytes = 0  # bytes copied from memory whose writes change no version counter

    def of(self, value: Any) -> Any:
        """Return the current value of an entry; for a stateful object, the value of its ``state_dict()``."""
        if isinstance(value, (int, float, str)):
            return value
        if (generator := rng.generator_state(value)) is not None:
            return generator.state_dict()
        if type(value) in (dict, list):
            return self._container(value)
        if type(value) is torch.Tensor:
            return self._tensor(value)
        if isinstance(value, entries.PerRank):
            noted = self.of(value.value)
            return noted if isinstance(noted, entries.PerRank) else entries.PerRank(noted)
        if is_position(value):
            return entries.PerRank(value.state_dict())
        if not is_stateful(value):
            return value
        began = time.thread_time()
        state = value.state_dict()
        if (seconds := time.thread_time() - began) > _SLOW_S:
            raise CheckpointError(f"state_dict() of {type(value).__qualname__} takes {seconds:.3f} s, which is slow")
        return self.of(dict(state) if isinstance(state, dict) else state)

    def _container(self, value: Any) -> Any:
        items = value.values() if type(value) is dict else value
        seen = items if len(value) <= _ITEMS else itertools.islice(items, 1)  # checks one item of a long one
        is_flat = {*map(type, seen)} <= FLAT
        if len(value) > (_FLAT_ITEMS if is_flat else _ITEMS):
            raise CheckpointError(f"a {type(value).__name__} has {len(value):,} items, too many to copy in each step")
        if is_flat:
            return copy.copy(value)
        return {key: self.of(x) for key, x in value.items()} if type(value) is dict else [*map(self.of, value)]

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
