"""A snapshot of the state at the end of a step, which is valid until code writes to the state.

Between the end of a step and the next optimizer step, parameters and optimizer state keep their values, so the snapshot
refers to these tensors. At the end of each step, it copies the rest: random number states, plain values, data loader
states, options of optimizers, and small tensors that a forward pass may write, such as running statistics. The version
counters of the other tensors reveal writes outside optimizers. No large tensor is copied.
"""

from __future__ import annotations

import copy
import itertools
import operator
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.format.encoding import walk
from stagereg.checkpoint.format.split_tensors import carry
from stagereg.checkpoint.format.wrappers import inner_tensors
from stagereg.checkpoint.ranks.merging import digest
from stagereg.checkpoint.state.generators import generator_state
from stagereg.checkpoint.state.optimizer_state import ParameterNames, optimizers_of
from stagereg.data import LoadsEveryRank, is_position, is_stateful
from stagereg.errors import CheckpointError
from stagereg.stagers.guard import WriteGuard

_SMALL_BYTES = 1 << 16  # maximum size of a tensor that is copied at each step
_COPIED_BYTES = 1 << 22  # maximum total size of these tensors
_ITEMS, _FLAT_ITEMS = 1 << 10, 1 << 17  # maximum items of a copied container; of one with only numbers and strings
_SCALARS = (int, float, str)
_FLAT = {*_SCALARS, bool, type(None)}
_SLOW_S = 0.01  # maximum CPU seconds of one state_dict() call
_NONE_ENDED, _WRITTEN = "no step has completed", "its optimizer had begun the next step"
_CHANGED = "code other than an optimizer has written to its state since the step ended"
_version_of = operator.attrgetter("_version")


class StepSnapshot:
    """The snapshot of one rank's state. Only :meth:`note` and :meth:`close` are called on the training thread."""

    def __init__(self, names: ParameterNames) -> None:
        self.step: int | None = None  # the last completed step
        self.kinds = ""  # a digest of the names, shapes and dtypes of all tensors in modules and optimizers
        self._names = names
        self._seen: _Seen | None = None
        self._noted: dict[str, Any] = {}  # entry -> value at the end of the step
        self._plain: list[torch.Tensor] = []  # tensors in _noted that are not copied
        self._versions: list[int] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []  # param_groups and copies of their options
        self._generators: dict[str, Any] = {}
        self._events: list[torch.Event] = []
        self._why = _NONE_ENDED  # why the snapshot is not valid; empty if it is
        self._held = False
        self._lock = threading.Lock()
        self._guard = WriteGuard(self._before_write)

    def note(self, step: int, state: Mapping[str, Any]) -> bool:
        """Record the program's ``state`` at the end of a step. Return whether ``kinds`` has changed."""
        with self._lock:
            return not self._held and self._note(step, state)

    def _note(self, step: int, state: Mapping[str, Any]) -> bool:
        seen, changed = self._seen, False
        if seen is None or not seen.is_of(state):
            objects = {name: x for name, x in state.items() if module_state.modules_of(x) or optimizers_of(x)}
            changed = seen is None or seen.known != _known(objects)
            if seen is None or changed:
                seen = self._seen = _Seen(state, objects, self._names)
                self.kinds = seen.kinds
        if not seen.unfit:
            with torch.no_grad():
                torch._foreach_copy_(seen.copies, seen.small) if seen.small else None
            notes = _Notes()
            self._noted = {name: x if name in seen.objects else notes.of(x) for name, x in state.items()}
            self._plain = notes.watched
            self._versions = self._find_versions(seen)
            self._options = [(each, {key: each[key] for key in each if key != "params"}) for each in seen.groups]
            self._generators = rng.note()
            self._events = [torch.accelerator.current_stream(device).record_event() for device in seen.devices]
        self.step, self._why = step, seen.unfit
        return changed

    def close(self) -> bool:
        """Stop recording, and release the state unless :meth:`hold` was called. Return whether it was released."""
        with self._lock:
            if not self._held:
                self._guard.close()
                self._seen, self._why = None, _NONE_ENDED
                self._noted, self._plain, self._options, self._generators = {}, [], [], {}
            return not self._held

    def is_written(self) -> bool:
        """Whether an optimizer has begun its next step."""
        return self._why == _WRITTEN

    def hold(self) -> str:
        """Block all optimizers from now on. Return why the snapshot is invalid; an empty string if it is valid."""
        with self._lock:
            self._held = True
        if self._why or self._seen is None:
            return self._why
        if not all(event.query() for event in self._events):
            return "its accelerator has not finished the step"
        if self._seen.has_moved():
            return "the tensors of its modules were replaced"
        return "" if self._versions == self._find_versions(self._seen) else _CHANGED

    def expect_unchanged(self) -> None:
        """Raise ``CheckpointError`` if code has written to the state since the step ended."""
        assert self._seen is not None
        same = self._versions == self._find_versions(self._seen)
        if not same or not all(map(torch.equal, self._seen.small, self._seen.copies)):
            raise CheckpointError(_CHANGED)

    def take(self, rank: int, world_size: int) -> dict[str, Any]:
        """Restore copied tensors and optimizer options. Return the entries to save, which refer to live tensors."""
        seen, step = self._seen, self.step
        assert seen is not None
        assert step is not None
        with torch.no_grad():
            torch._foreach_copy_(seen.small, seen.copies) if seen.small else None
        for group, options in self._options:
            group.update(options)
        state = {name: seen.modules.get(name, x) for name, x in self._noted.items()}
        return entries.capture(state, step, rank, world_size, self._names, self._generators)

    def _find_versions(self, seen: _Seen) -> list[int]:
        return [*map(_version_of, seen.watched), *map(_version_of, self._plain)]

    def _before_write(self) -> None:
        with self._lock:
            if not self._held:
                self._why = self._why if self.step is None else _WRITTEN
                return
        threading.Event().wait()  # until this process exits


class _Seen:
    """A cache for the modules and optimizers in a state (``objects``, by entry), valid until one is replaced."""

    def __init__(self, state: Mapping[str, Any], objects: Mapping[str, Any], names: ParameterNames) -> None:
        self.objects, self._counted = objects, [each.state for each in _optimizers(objects)]
        self._names, self._counts = state.keys() - objects.keys(), [*map(len, self._counted)]
        self.known, self.kinds = _known(objects), ""  # ``kinds`` as in :class:`StepSnapshot`
        self.unfit = _unfit(state)  # why this state cannot be recorded at the end of a step; empty if it can
        self.groups = [group for each in _optimizers(objects) for group in each.param_groups]
        self.modules: dict[str, Any] = {}  # entries of the modules, with references to live tensors
        self.small: list[torch.Tensor] = []  # small buffers, which a forward pass may write; copied at each step
        self.watched: list[torch.Tensor] = []  # all other tensors
        if not self.unfit:
            for each in _optimizers(objects):
                names.for_optimizer(each, state)  # caches the names of parameters, which come from the whole state
            self._look(entries.capture(objects, 0, 0, 1, names))
        self.copies = [x.clone() for x in self.small]
        self.devices = {x.device for x in self.watched if not x.is_cpu}
        self._addresses = self._find_addresses()

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Return whether the cache is valid for ``state``. Checks only identities and sizes, which is fast."""
        return (
            len(state) == len(self.objects) + len(self._names)
            and all(state.get(name) is x for name, x in self.objects.items())
            and self._counts == [*map(len, self._counted)]
            and self._names <= state.keys()
        )

    def has_moved(self) -> bool:
        """Whether the memory addresses of parameters or buffers have changed."""
        return self._addresses != self._find_addresses()

    def _look(self, captured: Mapping[str, Any]) -> None:
        own = {name: captured[name] for name in self.objects}
        self.modules = {name: each for name, each in own.items() if module_state.modules_of(self.objects[name])}
        found = [(path, x) for path, x in walk(own) if isinstance(x, torch.Tensor)]
        self.kinds = digest(sorted((".".join(map(str, path)), str(x.dtype), [*x.shape]) for path, x in found)).hex()
        if not all(isinstance(x, torch.Tensor) and not x.is_inference() for _, x in walk(self.modules)):
            self.unfit = "the state of a module has values other than plain tensors"
            return
        buffers, nbytes = {inner.data_ptr() for each in self._buffers() for inner in inner_tensors(each)}, 0
        for x in (inner for _, each in found for inner in inner_tensors(each)):
            is_small = x.data_ptr() in buffers and x.nbytes <= _SMALL_BYTES and nbytes + x.nbytes <= _COPIED_BYTES
            nbytes += is_small * x.nbytes
            (self.small if is_small else self.watched).append(x)

    def _buffers(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for value in self.objects.values():
            for each in (inner for module in module_state.modules_of(value) for inner in module.modules()):
                left_out = each._non_persistent_buffers_set
                found += [x for name, x in each._buffers.items() if x is not None and name not in left_out]
        return found

    def _find_addresses(self) -> list[int]:
        params = [x for group in self.groups for x in group["params"]]
        return [each.data_ptr() for x in (*params, *self._buffers()) for each in inner_tensors(x)]


def _optimizers(objects: Mapping[str, Any]) -> list[Optimizer]:
    return [each for value in objects.values() for each in optimizers_of(value)]


def _known(objects: Mapping[str, Any]) -> list[object]:
    modules = [each for value in objects.values() for each in module_state.modules_of(value)]
    optimizers = _optimizers(objects)
    return [*objects, *map(id, modules), *map(id, optimizers), *(len(each.state) for each in optimizers)]


def _unfit(state: Mapping[str, Any]) -> str:
    values = [entries.value_of(state, name) for name in state]
    modules = [each for value in values for each in module_state.modules_of(value)]
    if any(is_lazy(param) for module in modules for param in (*module.parameters(), *module.buffers())):
        return "a module has uninitialized parameters"
    if module_state.has_flat_parameters(modules):
        return "FSDP1 gathers its state in a collective"
    groups = [group for value in values for each in optimizers_of(value) for group in each.param_groups]
    if any(group.get("capturable") for group in groups):
        return "an optimizer with capturable=True may write in a CUDA graph"
    for name in entries.positions(state):
        if not isinstance(entries.value_of(state, name), LoadsEveryRank):
            return f"the data loader state of {name!r} differs between ranks, and describes only the last batch"
    return ""


class _Notes:
    """Records the current values of entries. ``watched``: the tensors in these values that are not copied.

    Raises: ``CheckpointError`` if recording an entry at each step would take too long.
    """

    def __init__(self) -> None:
        self.watched: list[torch.Tensor] = []
        self._nbytes = 0  # bytes copied from memory whose writes change no version counter

    def of(self, value: Any) -> Any:
        """Return the current value of an entry; for a stateful object, the value of its ``state_dict()``."""
        if isinstance(value, _SCALARS):
            return value
        if (generator := generator_state(value)) is not None:
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
        is_flat = {*map(type, seen)} <= _FLAT
        if len(value) > (_FLAT_ITEMS if is_flat else _ITEMS):
            raise CheckpointError(f"a {type(value).__name__} has {len(value):,} items, too many to copy in each step")
        if is_flat:
            return copy.copy(value)
        return {key: self.of(x) for key, x in value.items()} if type(value) is dict else [*map(self.of, value)]

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.nbytes > _SMALL_BYTES:
            if value.untyped_storage().resizable() or not value.is_cpu:
                self.watched.append(value)
                return value
            self._nbytes += value.nbytes  # memory of NumPy, whose writes change no version counter
            if self._nbytes > _COPIED_BYTES:
                raise CheckpointError(f"NumPy tensors have {self._nbytes:,} bytes, too many to copy in each step")
        return carry(value, value.detach().clone())
