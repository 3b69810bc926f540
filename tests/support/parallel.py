"""The ways to train one net on several ranks that the table of cases has as its columns.

Each wraps a net, makes its optimizer, and brings parameters and optimizer state back whole, under the net's own names,
so that every column is compared with one and the same reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


class Ddp:
    """``DistributedDataParallel`` and an optimizer that every rank steps in full."""

    def wrap(self, net: nn.Module, **kwargs: Any) -> nn.Module:
        return DistributedDataParallel(net, **kwargs)

    def optimizer(self, model: nn.Module, kind: Any, options: dict[str, Any]) -> Any:
        return kind(model.parameters(), **options)

    def gate(self, model: Any, sync: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a step whose gradients are reduced, or are kept for a later one that does."""
        return contextlib.nullcontext() if sync else model.no_sync()

    def clip(self, model: Any, most: float) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)

    def params(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {bare(name): full(param.detach()) for name, param in model.named_parameters()}

    def buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {bare(name): buffer.clone() for name, buffer in model.named_buffers()}

    def state(self, model: nn.Module, optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
        state = named_state(model, optimizer.state_dict()["state"])
        return {key: full(value) for key, value in state.items()}


class Zero(Ddp):
    """``DistributedDataParallel`` and torch's optimizer whose state is spread over the ranks."""

    def optimizer(self, model: nn.Module, kind: Any, options: dict[str, Any]) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), kind, **options)

    def state(self, model: nn.Module, optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
        state = {}
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=rank)  # torch gives it to one rank at a time
            if rank == dist.get_rank():
                state = named_state(model, optimizer.state_dict()["state"])
        return state


class Fsdp1(Ddp):
    """``FullyShardedDataParallel``: all of the net in one flat parameter, of which each rank has a shard."""

    def wrap(self, net: nn.Module, **kwargs: Any) -> nn.Module:
        return FullyShardedDataParallel(net, device_id=CPU, use_orig_params=True, **kwargs)

    def clip(self, model: Any, most: float) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        square = torch.tensor(sum(float(grad.square().sum()) for grad in grads), dtype=torch.float64)
        dist.all_reduce(square)  # torch's own way takes norms of float64 in float32, which is an error
        for grad in grads:
            grad.mul_((most / (square.sqrt() + 1e-6)).clamp(max=1.0))

    def params(self, model: nn.Module) -> dict[str, torch.Tensor]:
        whole = FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
        )
        with whole:
            return {bare(name): value.clone() for name, value in model.state_dict().items()}

    def state(self, model: nn.Module, optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
        # Of each parameter a rank has a piece, in rank order. (optim_state_dict gathers exp_avg and exp_avg_sq into the
        # same memory on the CPU.)
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, named_state(model, optimizer.state_dict()["state"]))
        whole = {}
        for name, param in self.params(model).items():
            for key in {key for own in pieces for owner, key in own if owner == name}:
                parts = [own[name, key] for own in pieces if (name, key) in own]
                whole[name, key] = torch.cat(parts).view_as(param) if parts[0].dim() else parts[0]
        return whole


class Fsdp2(Ddp):
    """``fully_shard``: every parameter is sharded by itself, and gathered layer by layer."""

    mesh: DeviceMesh | None = None

    def wrap(self, net: nn.Module, **kwargs: Any) -> nn.Module:
        for layer in net.children():
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=self.mesh, **kwargs)
        return fully_shard(net, mesh=self.mesh, **kwargs)

    @contextlib.contextmanager
    def gate(self, model: Any, sync: bool) -> Any:
        model.set_requires_gradient_sync(sync)
        yield


class Replicated(Fsdp2):
    """``fully_shard`` over pairs of ranks, of which each has all parameters."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class TensorParallel(Fsdp2):
    """Two ranks share each layer, on the same data, and ``fully_shard`` goes over the pairs."""

    def __init__(self) -> None:
        self._meshes = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
        self.mesh = self._meshes["data"]

    def wrap(self, net: nn.Module, **kwargs: Any) -> nn.Module:
        linear = [name for name, layer in net.named_children() if isinstance(layer, nn.Linear)]
        plan = {linear[0]: ColwiseParallel(), linear[-1]: RowwiseParallel()}
        return super().wrap(parallelize_module(net, self._meshes["tensor"], plan), **kwargs)


COLUMNS: dict[str, type[Ddp]] = {
    "ddp": Ddp,
    "zero": Zero,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "hsdp": Replicated,
    "tp": TensorParallel,
}


def bare(name: str) -> str:
    """A parameter's name in the net that was wrapped."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def named_state(model: nn.Module, state: dict[int, dict[str, Any]]) -> dict[tuple[str, str], torch.Tensor]:
    """The state of an optimizer of all of a model's parameters by their names, not their numbers."""
    names = [bare(name) for name, _ in model.named_parameters()]
    entries = ((names[i], key, value) for i, own in state.items() for key, value in own.items())
    return {(name, key): torch.as_tensor(value) for name, key, value in entries if value is not None}


def write_values(params: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Write values into parameters, each of them as a rank has it."""
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, with the parts that other ranks have. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
