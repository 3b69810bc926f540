"""The tensors of a state, of which some are copied at the end of each step. The others are watched.

A tensor is copied if code may write to it between the end of a step and the next optimizer step, and if it is small. In
host memory, these are buffers, because a forward pass may write them. On an accelerator, buffers are copied up to a
larger size, because such a copy is fast. If the state is on an accelerator, its tensors in host memory are copied too,
such as the step counts of torch's ``Adam``: the host writes to them although the accelerator has not begun the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.module_state as module_state
from stagereg.checkpoint.format.encoding import walk
from stagereg.checkpoint.format.wrappers import inner_tensors
from stagereg.checkpoint.ranks.merging import digest
from stagereg.checkpoint.state.optimizer_state import ParameterNames, optimizers_of
from stagereg.data import LoadsEveryRank

SMALL_BYTES = 1 << 16  # maximum size of a tensor in host memory that is copied at each step
COPIED_BYTES = 1 << 22  # maximum total size of these tensors
_DEVICE_BYTES = 1 << 26  # maximum total size of the buffers on accelerators, which are copied there at each step
FLAT = {int, float, str, bool, type(None)}  # types of plain values


def is_on_host(x: torch.Tensor) -> bool:
    """Return whether the host writes to a tensor itself; otherwise, it queues writes on an accelerator."""
    return x.is_cpu


class StateTensors:
    """A cache for the modules and optimizers in a state (``objects``, by entry), valid until one is replaced."""

    def __init__(self, state: Mapping[str, Any], objects: Mapping[str, Any], names: ParameterNames) -> None:
        self.objects, self._counted = objects, [each.state for each in _optimizers(objects)]
        self._names, self._counts = state.keys() - objects.keys(), [*map(len, self._counted)]
        self.known, self.kinds = known_objects(objects), ""  # ``kinds`` as in :class:`StepSnapshot`
        self.unfit = _unfit(state)  # why this state cannot be recorded at the end of a step; empty if it can
        self.configs: dict[int, tuple[Any, Any]] = {}  # configs in the state, each with a copy, by id
        self.groups = [group for each in _optimizers(objects) for group in each.param_groups]
        self.numbers: list[dict[Any, Any]] = []  # dicts of optimizer state with plain values, if on an accelerator
        self.modules: dict[str, Any] = {}  # entries of the modules, with references to live tensors
        self.small: list[torch.Tensor] = []  # tensors that a forward pass or the host may write; copied at each step
        self.watched: list[torch.Tensor] = []  # all other tensors
        if not self.unfit:
            for each in _optimizers(objects):
                names.for_optimizer(each, state)  # caches the names of parameters, which come from the whole state
            self._look(entries.capture(objects, 0, 0, 1, names))
        self.spare: list[list[torch.Tensor]] = []  # memory for copies of ``small``
        self.small.sort(key=_kind)
        counts = [len([*alike]) for _, alike in itertools.groupby(self.small, _kind)]
        self._alike = [slice(end - n, end) for n, end in zip(counts, itertools.accumulate(counts), strict=True)]
        self.devices = {x.device for x in (*self.small, *self.watched) if not is_on_host(x)}
        self.is_written_by_host = not self.devices or any(map(is_on_host, self.watched))
        if self.devices:
            found = _numbers_of(_optimizers(objects))
            self.numbers, self.is_written_by_host = found or [], self.is_written_by_host or found is None
        self._addresses = self._find_addresses()

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Return whether the cache is valid for ``state``. Checks only identities and sizes, which is fast."""
        return (
            len(state) == len(self.objects) + len(self._names)
            and all(state.get(name) is x for name, x in self.objects.items())
            and self._counts == [*map(len, self._counted)]
            and self._names <= state.keys()
        )

    def copy_small(self) -> list[torch.Tensor]:
        """Copy ``small`` on the current streams, into memory in ``spare`` if there is any."""
        copies = self.spare.pop() if self.spare else [*map(torch.empty_like, self.small)]
        with torch.no_grad():
            for alike in self._alike:  # one dtype and device per call, for which torch has a fast implementation
                torch._foreach_copy_(copies[alike], self.small[alike])
        return copies

    def has_moved(self) -> bool:
        """Whether the memory addresses of parameters or buffers have changed."""
        return self._addresses != self._find_addresses()

    def has_new_numbers(self) -> bool:
        """Whether the state of optimizers has plain values that are not in ``numbers``."""
        found = _numbers_of(_optimizers(self.objects))
        return found is None or not {*map(id, found)} <= {*map(id, self.numbers)}

    def _look(self, captured: Mapping[str, Any]) -> None:
        own = {name: captured[name] for name in self.objects}
        self.modules = {name: each for name, each in own.items() if module_state.modules_of(self.objects[name])}
        found = [(path, x) for path, x in walk(own) if isinstance(x, torch.Tensor)]
        self.kinds = digest(sorted((".".join(map(str, path)), str(x.dtype), [*x.shape]) for path, x in found)).hex()
        if not all(isinstance(x, torch.Tensor) and not x.is_inference() for _, x in walk(self.modules)):
            self.unfit = "the state of a module has values other than plain tensors"
            return
        tensors = [inner for _, each in found for inner in inner_tensors(each)]
        buffers = {inner.data_ptr() for each in self._buffers(self.objects) for inner in inner_tensors(each)}
        copies_host = not all(map(is_on_host, tensors))  # the host may be ahead of an accelerator
        most, left = {True: SMALL_BYTES, False: _DEVICE_BYTES}, {True: COPIED_BYTES, False: _DEVICE_BYTES}
        for x in tensors:
            on_host = is_on_host(x)
            may_change = x.data_ptr() in buffers or (on_host and copies_host)
            is_small = may_change and x.nbytes <= min(most[on_host], left[on_host])
            left[on_host] -= is_small * x.nbytes
            (self.small if is_small else self.watched).append(x)
        watched = {x.data_ptr() for x in self.watched if x.nbytes and not is_on_host(x)}
        broadcast = self._buffers({name: x for name, x in self.objects.items() if _may_be_broadcast(x)})
        if any(inner.data_ptr() in watched for x in broadcast for inner in inner_tensors(x)):
            self.unfit = "DistributedDataParallel may broadcast large buffers in each forward pass"

    def _buffers(self, objects: Mapping[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for value in objects.values():
            for each in (inner for module in module_state.modules_of(value) for inner in module.modules()):
                left_out = each._non_persistent_buffers_set
                found += [x for name, x in each._buffers.items() if x is not None and name not in left_out]
        return found

    def _find_addresses(self) -> list[int]:
        params = [x for each in _optimizers(self.objects) for group in each.param_groups for x in group["params"]]
        return [each.data_ptr() for x in (*params, *self._buffers(self.objects)) for each in inner_tensors(x)]


def _kind(x: torch.Tensor) -> str:
    return f"{x.device} {x.dtype}"


def _optimizers(objects: Mapping[str, Any]) -> list[Optimizer]:
    return [each for value in objects.values() for each in optimizers_of(value)]


def _may_be_broadcast(value: Any) -> bool:
    """Whether ``DistributedDataParallel``, also outside the state, may write the buffers of modules in a forward pass.

    Its broadcasts change no version counter. With gloo, the host waits for them, so they are complete.
    """
    if isinstance(value, DistributedDataParallel):
        return bool(value.broadcast_buffers)
    return not all(isinstance(module, FSDPModule) for module in module_state.modules_of(value))


def _numbers_of(optimizers: Iterable[Optimizer]) -> list[dict[Any, Any]] | None:
    """Return the dicts of optimizer state that have plain values; ``None`` if the state has other objects."""
    found: list[dict[Any, Any]] = []
    for each in optimizers:
        inner = each.optim if isinstance(each, ZeroRedundancyOptimizer) else each
        for own in inner.state.values():
            values = own.values() if isinstance(own, dict) else [own]
            kinds = {type(x) for x in values if not isinstance(x, torch.Tensor)}
            if not kinds <= FLAT:
                return None
            found += [own] if kinds - {type(None)} else []
    return found


def known_objects(objects: Mapping[str, Any]) -> list[object]:
    """Return a list that changes if a module, an optimizer or an entry of optimizer state is added or replaced."""
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
