"""torchtitan's own classes: what its checkpointer saved is restored, and it reads what was saved here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from stagereg.testing.ranks import run_ranks

from ...support import splits

pytest.importorskip("torchtitan.components.checkpoint")


class TrainState:
    """What torchtitan's trainer saves of itself."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 10 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["ntokens_seen"] == 10 * state["step"]
        self.step = state["step"]


class Titan:
    """A split whose optimizer and scheduler are torchtitan's."""

    def __init__(self, name: str, groups: splits.Groups, seed: int, step: int = 0) -> None:
        from torchtitan.components.checkpoint import ModelWrapper
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

        logging.disable(logging.WARNING)
        make, size = splits.MAKERS[name][0], dist.get_world_size()
        self.split = splits.Split(groups[size], size, seed)
        make(self.split)
        for part in self.split.parts:
            part.requires_grad_(True)
        self.split.every = True  # torchtitan reads state of each parameter
        each = [
            ParamGroupConfig(pattern="bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 0.2}),
            ParamGroupConfig(pattern="up", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1, "betas": (0.8, 0.9)}),
        ]
        config = OptimizersContainer.Config(param_groups=each, implementation="for-loop")
        self.optimizers = OptimizersContainer(config, model_parts=self.split.parts)
        self.scheduler = LRSchedulersContainer.Config(warmup_steps=4).build(
            optimizers=self.optimizers, training_steps=9
        )
        self.split.optimizers = [*self.optimizers]
        self.train_state = TrainState(step)
        self.model = ModelWrapper(self.split.parts)
        for _ in range(step):
            self.split.step()
            self.scheduler.step()

    def manager(self, folder: str, **options: Any) -> Any:
        from torchtitan.components.checkpoint import CheckpointManager

        return CheckpointManager(
            CheckpointManager.Config(enable=True, folder=folder, interval=1, keep_latest_k=0, **options),
            dataloader=None,
            model_parts=self.split.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.scheduler,
            states={"train_state": self.train_state},
            sd_adapter=None,
        )

    @property
    def rest(self) -> dict[str, Any]:
        return {"lr_scheduler": self.scheduler, "train_state": self.train_state}

    def whole(self) -> dict[str, Any]:
        return self.split.whole() | {"epoch": self.scheduler.state_dict()["last_epoch"], "step": self.train_state.step}


def optimizers_of(parameters: Sequence[tuple[str, torch.Tensor]]) -> list[torch.optim.Optimizer]:
    """Optimizers of torch with as many groups as there were."""
    of = {each: [x for name, x in parameters if kind(name) == each] for each in ("bias", "up", "rest")}
    groups = [{"params": of["up"]}, {"params": of["rest"]}]
    return [torch.optim.Adam(of["bias"]), torch.optim.AdamW(groups)]


def kind(name: str) -> str:
    return "bias" if name.endswith("bias") else "up" if "up" in name else "rest"


def differing(saved: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [key for key in saved.keys() | found.keys() if found.get(key) != saved.get(key)]


def from_titan(rank: int, world_size: int, root: str, pairs: Sequence[tuple[str, str]]) -> list[Any]:
    """Save with torchtitan's checkpointer, and restore into its classes, and into optimizers of torch."""
    groups, wrong = splits.Groups(), []
    for source, target in pairs:
        titan = Titan(source, groups, seed=1, step=3)
        assert titan.manager(f"{root}/{source}").save(3)
        saved = titan.whole()
        fresh = Titan(target, groups, seed=2)
        with groups.checkpointer(world_size, f"{root}/own", resume=f"{root}/{source}/step-3") as keeper:
            assert keeper.restore({"model": fresh.split.parts, "optimizer": fresh.optimizers, **fresh.rest}) == 3
        wrong += [("torchtitan", source, target, each) for each in differing(saved, fresh.whole())]
        plain = Titan(target, groups, seed=3)
        named = [pair for part in plain.split.parts for pair in part.named_parameters()]
        plain.split.optimizers = optimizers_of(named)
        with groups.checkpointer(world_size, f"{root}/own", resume=f"{root}/{source}/step-3") as keeper:
            keeper.restore({"net": plain.split.parts, "adam": plain.split.optimizers})
        wrong += [("torch", source, target, each) for each in differing(titan.split.whole(), plain.split.whole())]
    return wrong


def to_titan(rank: int, world_size: int, root: str, pairs: Sequence[tuple[str, str]]) -> list[Any]:
    """Save in both layouts, and read with torchtitan's checkpointer, and with its classes in a template."""
    groups, wrong = splits.Groups(), []
    for source, target in pairs:
        titan, at = Titan(source, groups, seed=1, step=3), f"{root}/{source}"
        with groups.checkpointer(world_size, f"{at}/model") as keeper:
            keeper.save(3, {"model": titan.split.parts, "optimizer": titan.optimizers, **titan.rest})
        with groups.checkpointer(world_size, f"{at}/top") as keeper:
            keeper.save(3, {**titan.model.state_dict(), "optimizer": titan.optimizers, **titan.rest})
        dist.barrier()
        fresh = Titan(target, groups, seed=2)
        state = {"model": fresh.model, "optimizer": fresh.optimizers, **fresh.rest}
        dcp.load(state, checkpoint_id=f"{at}/model/latest")
        wrong += [("template", source, target, each) for each in differing(titan.whole(), fresh.whole())]
        fresh = Titan(target, groups, seed=3)
        options = {"initial_load_path": f"{at}/top/step-00000003", "initial_load_model_only": False}
        assert fresh.manager(f"{at}/none", exclude_from_loading=["dataloader"], **options).load()
        wrong += [("manager", source, target, each) for each in differing(titan.whole(), fresh.whole())]
    return wrong


@pytest.mark.parametrize("exchange", [from_titan, to_titan])
def test_torchtitan_and_this_restore_each_others(tmp_path: Path, exchange: Any) -> None:
    pairs = [("fsdp2", "ddp"), ("ddp", "interleaved"), ("interleaved", "fsdp2"), ("pp", "pp")]
    assert run_ranks(exchange, nproc=2, args=(str(tmp_path), pairs), timeout_s=120) == [[], []]
