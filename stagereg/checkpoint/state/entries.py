"""What a checkpoint holds: the caller's objects as entries.

An entry is a name and a state dict or plain value, of modules and optimizers by the names of parameters
(:mod:`.module_state`, :mod:`.optimizer_state`). Of what is the same on all ranks one copy is stored; what belongs to a
rank is an entry per rank, ``name.rank0``: what :class:`PerRank` marks, and positions in data (:mod:`stagereg.data`).
Entries under ``stagereg.`` hold the step, the number of ranks and each rank's random number generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_forms as optimizer_forms
import stagereg.checkpoint.state.optimizer_state as optimizer_state
import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.format.split_tensors import shape_of
from stagereg.checkpoint.format.wrappers import inner_tensors, wraps
from stagereg.checkpoint.state.generators import generator_state
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.data import is_position, is_stateful
from stagereg.errors import CheckpointError, StageregError, reason

RESERVED = "stagereg"  # what the names of entries of the project begin with, up to a dot
T = TypeVar("T")


class PerRank(Generic[T]):
    """Has a value of the state that each rank has for itself. Attributes: ``value``, as last given or restored."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"


def per_rank(value: T) -> PerRank[T]:
    """Return ``value`` marked as this rank's own: each rank's is saved, and restored by as many ranks as saved it.

    For what differs between ranks although it has one name: a position in a file, a list of losses. Given to
    :class:`.Checkpointer` as an entry of the state: ``{"model": model, "losses": per_rank(losses)}``. Data loaders and
    samplers need no mark; one that is marked stays as it is on another number of ranks, where it is an error else.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``, or a plain value. A plain one that was restored is
            in the attribute ``value``.
    """
    return PerRank(value)


def rank_name(name: str, rank: int) -> str:
    """Return the name of what a rank has for itself of the entry ``name``."""
    return f"{name}.rank{rank}"


def rng_name(rank: int) -> str:
    """Return the name of the entry with a rank's random number generators."""
    return rank_name(f"{RESERVED}.rng", rank)


def capture(
    state: Mapping[str, Any],
    step: int,
    rank: int,
    world_size: int,
    names: ParameterNames,
    generators: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the entries to save: references to live tensors, which a stager has yet to copy.

    ``generators`` is what :func:`.rng.note` has noted of them, in place of what they are now.

    Raises:
        CheckpointError: a name that is no text, or one that belongs to the project; two parameters of one name; an
            uninitialized parameter.
    """
    entries: dict[str, Any] = {
        f"{RESERVED}.step": step,
        f"{RESERVED}.world_size": world_size,
        rng_name(rank): rng.capture(generators),
    }
    for name, value in state.items():
        if not isinstance(name, str) or name.split(".")[0] == RESERVED:
            raise CheckpointError(
                f"The state has an entry named {name!r}; use text that does not begin with {RESERVED!r}."
            )
        own = isinstance(value, PerRank) or is_position(value)
        try:
            entries[rank_name(name, rank) if own else name] = found = current_value(state, name, names)
        except StageregError:
            raise
        except Exception as error:
            raise CheckpointError(f"{name!r} cannot be saved: its state_dict() fails: {reason(error)}") from error
        for key in filter(
            lambda key: is_lazy(found[key]), found if module_state.modules_of(value_of(state, name)) else ()
        ):
            raise CheckpointError(
                f"'{name}.{key}' cannot be saved: it is an uninitialized parameter of a lazy module, which gets its "
                "shape from the first batch. Run the module once before the first save."
            )
    return entries


def value_of(state: Mapping[str, Any], name: str) -> Any:
    """Return what the caller gave under a name, without the mark of :class:`PerRank`; a generator as an object."""
    value = state[name]
    value = value.value if isinstance(value, PerRank) else value
    return generator_state(value) or value


def current_value(state: Mapping[str, Any], name: str, names: ParameterNames) -> Any:
    """Return the state dict of an object that has one, else the value itself."""
    value = value_of(state, name)
    try:
        if modules := module_state.modules_of(value):
            return module_state.state_of(modules)
        if optimizers := optimizer_state.optimizers_of(value):
            each = [optimizer_state.state_of(one, names.for_optimizer(one, state)) for one in optimizers]
            return optimizer_forms.joined(each)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from error
    return value.state_dict() if is_stateful(value) else value


def buffers(state: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of the buffers of modules, in which replicas may drift apart.

    Those inside of inner modules are returned without the name of the entry as well.
    """
    found = {
        (name, module_state.plain_name(module, buffer))
        for name in state
        for module in module_state.modules_of(state[name])
        for buffer, _ in module.named_buffers(remove_duplicate=False)
    }
    return {f"{name}.{buffer}" for name, buffer in found} | {buffer for _, buffer in found if "." in buffer}


def written_in_forward(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the parameters that torch's own layers write in their forward pass: embeddings with ``max_norm``."""
    modules = (module for name in state for top in module_state.modules_of(state[name]) for module in top.modules())
    return [x for module in modules if getattr(module, "max_norm", None) is not None for x in module.parameters(False)]


def positions(state: Mapping[str, Any]) -> list[str]:
    """Return the names of positions in data, each rank's own."""
    return [name for name in state if is_position(value_of(state, name))]


def replicated(state: Mapping[str, Any]) -> list[str]:
    return [name for name, x in state.items() if module_state.modules_of(x) or optimizer_state.optimizers_of(x)]


class TensorKind(NamedTuple):
    """What has to be the same of a tensor that is saved and of the one that takes it."""

    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, x: Any) -> TensorKind:
        """Return that of a tensor, or of one that is stored."""
        return cls(x.dtype, shape_of(x))

    def fits(self, other: TensorKind, cast: bool) -> bool:
        """Whether they are the same, or with ``cast`` of one shape and both of floating point."""
        floating = cast and self.dtype.is_floating_point and other.dtype.is_floating_point
        return self.shape == other.shape and (self.dtype == other.dtype or floating)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {[*self.shape]}"


def memory_of(x: Any) -> object:
    """Return what is the same for tensors in the same memory; 0 for what has none."""
    if isinstance(x, ShardedTensor):  # of FSDP1, which copies
        return id(x)
    x = local_part(x)
    if wraps(x):
        return next(map(memory_of, inner_tensors(x)), id(x))
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and not x.is_nested else id(x)


def chunks_of(x: DTensor, name: str) -> list[ChunkStorageMetadata]:
    """Return this rank's parts of a tensor.

    Raises:
        CheckpointError: its placement is partial: each rank has a summand, and none has values to be saved.
    """
    if any(placement.is_partial() for placement in x.placements):
        raise CheckpointError(
            f"{name!r} cannot be saved: it is a DTensor of placements {x.placements}, so each rank has a summand of it "
            "alone. Save its sum: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)."
        )
    return x.__create_chunk_list__()


def local_part(x: Any) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return cast("torch.Tensor", x)
    return x._local_tensor if wraps(x) else x.to_local()  # which asks a subclass for a view
