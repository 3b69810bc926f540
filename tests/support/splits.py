"""One model, split over ranks in every way that CPU ranks can run, and its whole state whatever the split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from stagereg.assembly import Checkpointer, Preemption
from stagereg.registry import build
from stagereg.stagers.blocking import BlockingAsyncStager

LAYERS = 4


class Layer(torch.nn.Module):
    """Seven rows, and one: they fit no number of ranks. One parameter never gets a gradient, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 7)
        self.down = torch.nn.Linear(7, 6)
        self.gate = torch.nn.Linear(6, 1, bias=False)
        self.unused = torch.nn.Parameter(torch.randn(3))
        self.frozen = torch.nn.Parameter(torch.randn(5, 2), requires_grad=False)
        self.register_buffer("seen", torch.randn(4))


class Network(torch.nn.Module):
    """Has some of the layers, under the names that they have in the whole."""

    def __init__(self, seed: int, layers: Sequence[int] = range(LAYERS)) -> None:
        super().__init__()
        every = []
        for number in range(LAYERS):
            torch.manual_seed(10 * seed + number)
            every.append(Layer())
        self.layers = torch.nn.ModuleDict({str(number): every[number] for number in layers})


def groups(parameters: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's; what is frozen is in none."""
    trained = {name: x for name, x in parameters.items() if x.requires_grad}
    return [
        {
            "params": [x for name, x in trained.items() if name.endswith("bias")],
            "weight_decay": 0.0,
            "betas": (0.8, 0.9),
        },
        {"params": [x for name, x in trained.items() if not name.endswith("bias")], "lr": 0.05},
    ]


class Split:
    """A model and its optimizer on the ranks of a group.

    Attributes:
        state: for a checkpointer.
        parts: the modules of this rank without wrappers that change names, but for FSDP1.
        optimizers: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, seed: int) -> None:
        self.group, self.size, self.seed = group, size, seed
        self.rank = 0 if group is None else dist.get_rank(group)
        self.parts: list[Any] = []
        self.optimizers: list[Any] = []
        self.state: dict[str, Any] = {}
        self.every = False  # whether each parameter is trained, and has state

    def mesh(self, *names: str) -> DeviceMesh:
        if len(names) == 1:
            return DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=names)
        return MESHES[names]

    def use(self, model: Any, *parts: Any, optimizer: Any = None) -> None:
        """Take the model as it is saved, and the modules inside."""
        self.parts = list(parts) or [model]
        named = {name: x for part in self.parts for name, x in part.named_parameters()}
        self.optimizers = optimizer(groups(named)) if optimizer else [torch.optim.AdamW(groups(named), lr=0.1)]
        single = self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers
        self.state = {"model": model, "optimizer": single, "seen": [self.seed]}

    def step(self) -> None:
        """Take a step whose gradients differ in each element, and are alike in each split."""
        for part in self.parts:
            for name, x in part.named_parameters():
                if x.requires_grad and (self.every or "unused" not in name):
                    x.grad = (x * 1.7 + 0.3).detach()
        for optimizer in self.optimizers:
            optimizer.step()

    def whole(self) -> dict[str, Any]:
        """All parameters, buffers and optimizer state by name, gathered without the code that is tested."""
        found: dict[str, Any] = {}
        if isinstance(self.parts[0], FullyShardedDataParallel):
            return self._whole_of_fsdp1()
        params = {x: unwrapped(name) for part in self.parts for name, x in part.named_parameters()}
        for part in self.parts:
            found |= {f"model.{unwrapped(name)}": full(x) for name, x in part.state_dict().items()}
        for optimizer in self.optimizers:
            inner = getattr(optimizer, "optim", optimizer)
            for outer, group in zip(optimizer.param_groups, inner.param_groups, strict=True):
                for x in group["params"]:
                    name = params[x]
                    found |= {f"state.{name}.{key}": full(item) for key, item in inner.state.get(x, {}).items()}
                for x in outer["params"]:
                    options = {key: item for key, item in outer.items() if key not in ("params", "param_names")}
                    found[f"options.{params[x]}"] = options
        if self.group is None:
            return found
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, found, self.group)
        return {name: item for each in every for name, item in each.items()}

    def _whole_of_fsdp1(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.parts[0], self.optimizers, options=options)
        found = {f"model.{name}": full(x) for name, x in model.items()}
        for name, state in optimizer["state"].items():
            found |= {f"state.{name}.{key}": full(x) for key, x in state.items()}  # type: ignore[union-attr]
        for group in optimizer["param_groups"]:
            options_of = {key: item for key, item in group.items() if key != "params"}  # type: ignore[union-attr]
            found |= {f"options.{name}": options_of for name in group["params"]}  # type: ignore[index,union-attr,call-overload]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, found, self.group)  # torch gives rank 0 alone what is whole
        return every[0]


def unwrapped(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def full(x: Any) -> Any:
    """The bits of a tensor, and its dtype and shape."""
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.dtype, tuple(x.shape), x.detach().contiguous().view(-1).view(torch.uint8).tolist()


MESHES: dict[tuple[str, ...], DeviceMesh] = {}
"""Meshes of all four ranks, two by two."""


def plain(split: Split) -> None:
    split.use(Network(split.seed))


def compiled(split: Split) -> None:
    inner = Network(split.seed)
    split.use(torch.compile(inner), inner)


def activations(split: Split) -> None:
    inner = Network(split.seed)
    split.use(inner, inner)
    for name, layer in inner.layers.items():
        inner.layers[name] = checkpoint_wrapper(torch.compile(layer) if name == "2" else layer)


def ddp(split: Split) -> None:
    inner = Network(split.seed)
    split.use(DistributedDataParallel(inner, process_group=split.group), inner)


def zero(split: Split) -> None:
    inner = Network(split.seed)
    made = lambda params: [ZeroRedundancyOptimizer(params, torch.optim.AdamW, process_group=split.group, lr=0.1)]  # noqa: E731
    split.use(DistributedDataParallel(inner, process_group=split.group), inner, optimizer=made)


def fsdp2(split: Split) -> None:
    split.use(_sharded(Network(split.seed), split.mesh("dp")))


def hsdp(split: Split) -> None:
    split.use(_sharded(Network(split.seed), split.mesh("replicas", "shards")))


def _sharded(model: Network, mesh: DeviceMesh) -> Network:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tp(split: Split) -> None:
    split.use(_parallel(Network(split.seed), split.mesh("tp")))


def _parallel(model: Network, mesh: DeviceMesh) -> Network:
    for layer in model.layers.values():
        for module, name, dim in ((layer.up, "weight", 0), (layer.up, "bias", 0), (layer.down, "weight", 1)):
            x = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(dim)])
            setattr(module, name, torch.nn.Parameter(x))
        rest = ((layer, "unused"), (layer.gate, "weight"), (layer.down, "bias"))
        for module, name in rest:
            x = distribute_tensor(getattr(module, name).detach(), mesh, [Replicate()])
            setattr(module, name, torch.nn.Parameter(x))
    return model


def tp_fsdp2(split: Split) -> None:
    mesh = split.mesh("dp", "tp")
    split.use(_sharded(_parallel(Network(split.seed), mesh["tp"]), mesh["dp"]))


def pp(split: Split) -> None:
    """A stage a rank."""
    mine = [number for number in range(LAYERS) if number * split.size // LAYERS == split.rank]
    split.use(Network(split.seed, mine))


def interleaved(split: Split) -> None:
    """Two stages a rank, under one optimizer."""
    stages = [Network(split.seed, [number]) for number in range(split.rank, LAYERS, split.size)]
    split.use(stages, *stages)


def interleaved_each(split: Split) -> None:
    """Two stages a rank, each with an optimizer."""
    stages = [Network(split.seed, [number]) for number in range(split.rank, LAYERS, split.size)]

    def each(_: Any) -> list[Any]:
        return [torch.optim.AdamW(groups(dict(stage.named_parameters())), lr=0.1) for stage in stages]

    split.use(stages, *stages, optimizer=each)


def pp_fsdp2(split: Split) -> None:
    mesh = split.mesh("pp", "dp")
    stage = mesh.get_local_rank("pp")
    split.use(_sharded(Network(split.seed, range(2 * stage, 2 * stage + 2)), mesh["dp"]))


def pp_ddp(split: Split) -> None:
    mesh = split.mesh("pp", "dp")
    stage = mesh.get_local_rank("pp")
    inner = Network(split.seed, range(2 * stage, 2 * stage + 2))
    split.use(DistributedDataParallel(inner, process_group=mesh.get_group("dp")), inner)


def experts(split: Split) -> None:
    """Each layer on one rank, as experts are; parameters of one rank beside those of all."""
    inner = Network(split.seed, [0, *(number for number in range(1, LAYERS) if number % split.size == split.rank)])
    split.use(inner)


def _all_trained(split: Split) -> Network:
    split.every, model = True, Network(split.seed)
    for layer in model.layers.values():
        layer.frozen.requires_grad_(True)
    return model


def fsdp1(split: Split) -> None:
    """FSDP1, whose state torch alone can take apart, and only where each parameter has some."""
    device = torch.device("cpu")
    model = _all_trained(split)
    split.use(FullyShardedDataParallel(model, split.group, use_orig_params=True, device_id=device))


def plain_all(split: Split) -> None:
    split.use(_all_trained(split))


def fsdp2_all(split: Split) -> None:
    split.use(_sharded(_all_trained(split), split.mesh("dp")))


SPLITS: dict[str, tuple[Callable[[Split], None], int]] = {
    "plain": (plain, 1),
    "compiled": (compiled, 1),
    "activations": (activations, 1),
    "ddp": (ddp, 2),
    "zero": (zero, 3),
    "fsdp2": (fsdp2, 3),
    "hsdp": (hsdp, 4),
    "tp": (tp, 2),
    "tp_fsdp2": (tp_fsdp2, 4),
    "pp": (pp, 2),
    "pp4": (pp, 4),
    "interleaved": (interleaved, 2),
    "interleaved_each": (interleaved_each, 2),
    "pp_fsdp2": (pp_fsdp2, 4),
    "pp_ddp": (pp_ddp, 4),
    "experts": (experts, 3),
}
"""By name: what makes it, and on how many ranks."""
TRAINED: dict[str, tuple[Callable[[Split], None], int]] = {
    "fsdp1": (fsdp1, 2),
    "plain_all": (plain_all, 1),
    "fsdp2_all": (fsdp2_all, 3),
}
"""Those whose parameters all have state."""
MAKERS = SPLITS | TRAINED


class Groups:
    """The first ranks, for every number of them, and the rest."""

    def __init__(self) -> None:
        world = list(range(dist.get_world_size()))
        self._first = {size: dist.new_group(world[:size]) for size in range(1, len(world) + 1)}
        self._rest = {size: dist.new_group(world[size:]) for size in range(1, len(world))}
        if len(world) == 4:
            for names in (("replicas", "shards"), ("dp", "tp"), ("pp", "dp")):
                MESHES[names] = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)

    def __getitem__(self, size: int) -> dist.ProcessGroup:
        return self._first[size] if dist.get_rank() < size else self._rest[size]

    @contextmanager
    def checkpointer(self, size: int, root: str, storage: str = "dcp", **options: Any) -> Iterator[Checkpointer]:
        """A checkpointer on the first ranks; the others have one elsewhere.

        Torch names a group that only its own ranks make after the number of groups there were, which has to be the same
        on all of them.
        """
        own = root if dist.get_rank() < size else f"{root}-others"
        chosen = build("storage", storage)
        options |= {"storage": chosen, "process_group": self[size]}
        with Checkpointer(own, stager=BlockingAsyncStager(), preemption=Preemption(None), **options) as found:
            yield found


def shown(whole: Any, rank_of_it: int = 0) -> Any:
    """Return one rank's value on all ranks."""
    box = [whole]
    dist.broadcast_object_list(box, rank_of_it)
    return box[0]


def save(name: str, groups: Groups, root: str, storage: str) -> dict[str, Any]:
    """Save two steps of a split on the first ranks, and return all of its state on all ranks."""
    make, size = MAKERS[name]
    whole = None
    with groups.checkpointer(size, root, storage) as keeper:
        if dist.get_rank() < size:
            split = Split(groups[size], size, seed=1)
            make(split)
            split.step()
            split.step()
            keeper.save(3, split.state)
            keeper.wait()
            whole = split.whole()
    found: dict[str, Any] = shown(whole)
    return found


def restore(name: str, source: str, groups: Groups, root: str, saved: dict[str, Any]) -> list[str]:
    """Restore on the first ranks into another split, and return what is not as it was saved."""
    make, size = MAKERS[name]
    differing: list[str] = []
    with groups.checkpointer(size, root) as keeper:
        if dist.get_rank() < size:
            split = Split(groups[size], size, seed=2)
            make(split)
            if len(source) % 2:  # state that there is before is read into, state that is not is made
                split.step()
            assert keeper.restore(split.state) == 3
            found = split.whole()
            differing = [what for what in saved.keys() | found.keys() if found.get(what) != saved.get(what)]
            assert split.state["seen"] == [1]
            split.step()
    return [f"{source} -> {name}: {what}" for what in shown(differing)]


def restore_all(
    rank: int, world_size: int, root: str, pairs: Sequence[tuple[str, str]], storage: str
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Each pair: what is saved, and what is restored; what differs, and the whole of what was saved."""
    groups = Groups()
    wholes: dict[str, dict[str, Any]] = {}
    differing: list[str] = []
    for source, target in pairs:
        if source not in wholes:
            wholes[source] = save(source, groups, f"{root}/{source}", storage)
        differing += restore(target, source, groups, f"{root}/{source}", wholes[source])
    return differing, wholes
