"""Digests of everything that decides how training continues. Two runs with equal digests have equal bits.

A snapshot maps ``"kind: name"`` to a value. The value of a tensor is a list: its dtype and shape with the digests of
its local bytes, the norm of its local values, and the number of ranks that hold the same shard (0: unknown). All other
values are strings.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import stagereg.checkpoint.state.rng as rng
from stagereg.base.pages import view_of
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.pickled import is_generator
from stagereg.checkpoint.format.wrappers import inner_tensors
from stagereg.checkpoint.state.entries import PerRank
from stagereg.checkpoint.state.module_state import modules_of, plain_name
from stagereg.checkpoint.state.optimizer_state import optimizers_of
from stagereg.data import is_position, is_stateful

STEP, DATA, RANDOM, LOSS, SCHEDULE, SCALE = "step", "data", "random numbers", "loss", "schedule", "loss scale"
GRADIENT, OPTIMIZER, PARAMETER, BUFFER, VALUE = "gradient", "optimizer state", "parameter", "buffer", "value"
VARIABLE = "variable"  # a plain value or tensor outside the state, which may explain a difference
TIED, OUTSIDE = " (tied to)", " (not in the state)"  # ends of names
Snapshot = dict[str, Any]

_WIDTH = 1024  # words in a row of a digest's table; also the largest number of a sample's words in a digest
_SMALL_BYTES = 1 << 16  # smaller CPU tensors get a CRC-32, which takes one call
_MOST_VALUES = 1000  # maximum number of values that one object or one frame adds to a snapshot
_MOST_BYTES = 1 << 20  # maximum size of a tensor outside the state that is not a list's or a module's
_GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio: spreads consecutive numbers over all bits
_LIBRARIES = f"{sysconfig.get_path('stdlib')}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}", "<frozen"
_PLAIN = bool, int, float, str, torch.Tensor
_KINDS = bool, int, float, str, torch.nn.Module, LRScheduler, Optimizer
_resolving = threading.Lock()  # windows that overlap share snapshots
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")


def digest(x: torch.Tensor) -> torch.Tensor | str:
    """Return a digest of a dense tensor's values: a string, or an int64 scalar on the tensor's device.

    The digest adds the rows and the columns of the bytes, as a table of 64-bit words, with different odd weights.
    Integer sums do not depend on the order of the additions, so a device repeats its digests in each run.
    """
    flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if x.is_cpu and flat.numel() < _SMALL_BYTES:
        return f"{crc32(view_of(flat)):08x}"
    flat = flat.clone() if flat.data_ptr() % 8 else flat
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    table = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    parts = table.sum(0), table.sum(1), words[table.numel() :], flat[8 * words.numel() :].to(torch.int64)
    return torch.stack([(part * _weights(part)).sum() * (2 * at + 3) for at, part in enumerate(parts)]).sum()


def _weights(part: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, len(part) + 1, dtype=torch.int64, device=part.device) * _GOLDEN | 1


def samples(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return an int64 sum over the samples of a batch, which does not depend on how ranks divide a global batch.

    A sample is an index of the first dimension, in all tensors with as many samples as the first one.
    """
    batch = [x.detach().contiguous().view(len(x), -1) for x in tensors if x.ndim and x.numel()]
    total: Any = torch.zeros(1, dtype=torch.int64, device="cpu")
    for at, x in enumerate(each for each in batch if len(each) == len(batch[0])):
        rows = x[:, :: -(-x.shape[1] // _WIDTH)].contiguous().view(torch.uint8).to(torch.int64)
        total = ((rows + 1) * _weights(rows[0])).sum(1) * (2 * at + 3) + (total if at else 0)
    total = total * _GOLDEN
    return ((total ^ total >> 29) * _GOLDEN).sum()


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the local dense tensors in a tree, and those inside of tensor subclasses."""
    for x in pytree.tree_leaves(tree):
        if isinstance(x, torch.Tensor) and not is_lazy(x):
            for inner in inner_tensors(x):
                if inner.layout is torch.strided and not inner.is_nested and inner.device.type != "meta":
                    yield inner


def tensor_value(x: torch.Tensor) -> list[Any]:
    """Return the value of a tensor in a snapshot. Scalars may still be on the device; see :func:`resolved`."""
    parts = [each.detach() for each in tensors_of(x)]
    norms: list[Any] = [
        torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32))
        for each in parts
        if each.is_floating_point() or each.is_complex()
    ]
    mesh = zip(x.device_mesh.shape, x.placements, strict=True) if isinstance(x, DTensor) else [(0, Replicate())]
    copies = prod(size for size, placement in mesh if placement.is_replicate())
    kind = f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}"
    return [[kind, *map(digest, parts)], norms[0] if len(norms) == 1 else 0.0, copies]


def resolved(snapshots: list[Snapshot]) -> list[Snapshot]:
    """Replace the scalars that are still on a device by Python values, with one wait per device and dtype."""
    groups: dict[Any, list[tuple[list[Any], int]]] = {}
    with _resolving:
        for value in (value for one in snapshots for value in one.values() if isinstance(value, list)):
            for each in (value, value[0]):
                for at, x in enumerate(each):
                    if isinstance(x, torch.Tensor):
                        groups.setdefault((x.device, x.dtype), []).append((each, at))
        for (_, dtype), own in groups.items():
            found = torch.stack([each[at].reshape(()) for each, at in own]).tolist()
            for (each, at), number in zip(own, found, strict=True):
                each[at] = f"{number & (1 << 64) - 1:016x}" if dtype is torch.int64 else abs(number)
    return snapshots


def generators(values: Mapping[str, Any]) -> Snapshot:
    """Return digests of the states of this process's random number generators, and of those in ``values``."""
    found: dict[str, Any] = {f"generator of {name}": state for name, state in rng.capture().items()}
    found |= {name: rng.GeneratorState(each).state_dict() for name, each in values.items() if is_generator(each)}
    return {f"{RANDOM}: {name}": _text(state) for name, state in found.items()}


def snapshot(state: Mapping[str, Any], values: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot of :func:`values_of` a state. Not collective.

    Reads the attributes of modules and optimizers; calls ``state_dict`` only for other objects.
    """
    found = generators(values)
    names: dict[int, str] = {}  # names of parameters and buffers, by ID
    for name, value in values.items():
        for module in modules_of(value):
            if name in state:
                found[f"{VARIABLE}: {name}.training"] = str(module.training)
            parts: list[Any] = [(PARAMETER, *pair) for pair in module.named_parameters(remove_duplicate=False)]
            for kind, at, x in (*parts, *((BUFFER, *pair) for pair in module.named_buffers(remove_duplicate=False))):
                path = _inside(name, plain_name(module, at))
                if (first := names.setdefault(id(x), path)) == path:
                    found[f"{kind}: {path}"] = tensor_value(x)
                elif name in state:
                    found[f"{kind}: {path}{TIED}"] = first
    for name, value in values.items():
        optimizers = optimizers_of(value)
        for number, (optimizer, group) in enumerate((one, group) for one in optimizers for group in one.param_groups):
            options = {key: option for key, option in group.items() if key != "params"}
            _add(found, SCHEDULE, _inside(name, f"param_groups.{number}"), options)
            inner: Any = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer has one
            own = (inner if isinstance(inner, Optimizer) else optimizer).state
            for param in (each for each in group["params"] if each in own):
                at = names.setdefault(id(param), f"parameter {len(names)}")
                _add(found, OPTIMIZER, _inside(name, at), own[param])
        if not (modules_of(value) or optimizers or is_generator(value) or is_position(value)):
            is_scaler = type(value).__name__.endswith("GradScaler")
            plain = VARIABLE if name not in state and isinstance(value, _PLAIN) else VALUE
            kind = SCHEDULE if isinstance(value, LRScheduler) else SCALE if is_scaler else plain
            _add(found, kind, name, value.state_dict() if is_stateful(value) else value)
    return found


def _add(found: Snapshot, kind: str, name: str, value: Any) -> None:
    """Add the tensors and plain values in nested dicts and lists."""
    for path, leaf in pytree.tree_flatten_with_path(value)[0][:_MOST_VALUES]:
        at = _inside(name, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path))
        if isinstance(leaf, torch.Tensor):
            found[f"{kind}: {at}"] = tensor_value(leaf)
        elif leaf is None or isinstance(leaf, (bool, int, float, complex, str)):
            found[f"{kind}: {at}"] = repr(leaf) if len(repr(leaf)) < 80 else _text(leaf)


def _inside(name: str, *parts: str) -> str:
    """Append the parts of a path to a name, before its end :data:`OUTSIDE`."""
    end = OUTSIDE * name.endswith(OUTSIDE)
    return ".".join((name.removesuffix(OUTSIDE), *(part for part in parts if part))) + end


def _text(value: Any) -> str:
    return f"{crc32(repr(value).encode()):08x}"


def gradients(state: Mapping[str, Any], optimizer: Any = None) -> Snapshot:
    """Return the gradients of the parameters in the state, or of an optimizer's parameters, by name."""
    groups = () if optimizer is None else optimizer.param_groups
    ours = {id(x) for group in groups for x in group["params"]}
    every = ((name, one, *pair) for name in state for one in modules_of(state[name]) for pair in one.named_parameters())
    return {
        f"{GRADIENT}: {name}.{plain_name(module, inner)}": tensor_value(x.grad)
        for name, module, inner, x in every
        if x.grad is not None and (optimizer is None or id(x) in ours)
    }


# -- variables of the program


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a state, and the variables of the calling functions that may decide how training continues.

    These are generators, modules, lists or dicts of tensors with the shapes of a module's parameters (such as
    averages), and plain values. Attributes of the program's objects are included; objects of the state are not.
    """
    found = {name: value.value if isinstance(value, PerRank) else value for name, value in state.items()}
    modules = [module for value in found.values() for module in modules_of(value)]
    shapes = [[x.shape for x in one.parameters() if x.requires_grad or every] for one in modules for every in (0, 1)]
    known = {id(x) for one in modules for x in (*one.parameters(), *one.buffers(), *one.modules())}
    known |= {id(value) for value in found.values()}
    known |= {id(one.state) for value in found.values() for one in optimizers_of(value)}  # a wrapper and its optimizer
    variables: list[tuple[str, Any]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_program(frame.f_code.co_filename):
            variables += [(f"{frame.f_code.co_name}().{name}", value) for name, value in _locals(frame).items()]
            variables += [*frame.f_globals.items()][:_MOST_VALUES]
        frame = frame.f_back
    loaders = [value for _, value in variables if isinstance(value, DataLoader)]  # the batches show their generators
    known |= {id(each) for one in loaders for each in (one.generator, getattr(one.sampler, "generator", None))}
    variables = [pair for pair in variables if id(pair[1]) not in known]
    for name, value in (*((name, value) for name, value in found.items() if modules_of(value)), *variables):
        for path, each in _parts(name, value):
            if path not in found and not path.startswith("_") and _matters(each, known, shapes):
                found[f"{path}{OUTSIDE}"] = each
    return found


def _is_program(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and not _PACKAGES.search(file)


def _locals(frame: FrameType) -> dict[str, Any]:
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # the variables of a module are its globals
    found = dict(frame.f_locals) if is_function else {}
    if is_function and sys.version_info < (3, 13):
        frame.f_locals.clear()  # only a copy of the variables, which would keep the values alive
    return found


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a variable, the attributes of an object of the program, and those of each module inside of a module."""
    yield name, value
    if isinstance(value, torch.nn.Module):
        for inner, module in value.named_modules():
            if (type(module).__module__ or "").partition(".")[0] != "torch":
                path = f"{name}.{inner}".rstrip(".")
                yield from ((f"{path}.{key}", each) for key, each in vars(module).items() if key != "training")
    elif not isinstance(value, type):
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        if file is not None and _is_program(file):
            yield from ((f"{name}.{key}", each) for key, each in getattr(value, "__dict__", {}).items())


def _matters(value: Any, known: set[int], shapes: list[list[torch.Size]]) -> bool:
    if id(value) in known or (isinstance(value, Optimizer) and id(value.state) in known):
        return False
    if isinstance(value, _KINDS) or is_generator(value) or type(value).__name__.endswith("GradScaler"):
        return True
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None and value.nbytes <= _MOST_BYTES
    values = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(values, list) or not values or not all(isinstance(x, torch.Tensor) for x in values):
        return False
    return [x.shape for x in values] in shapes
