"""Implements saves and loads for each kind of Lightning strategy. Used by :mod:`.lightning`.

Each public method of a class in this module replaces the method of the same name in a strategy object.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection

import stagereg
from stagereg.errors import CheckpointError, ConfigError
from stagereg.integrations.lightning_resume import RESUME, ResumedFit
from stagereg.integrations.proofs import is_proof


class WholeSaving:
    """Methods for strategies that collect all state on rank 0, such as DDP. All ranks raise rank 0's error."""

    def __init__(self, plugin: Any, strategy: Any) -> None:
        self.plugin, self.strategy = plugin, strategy

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        type(self.strategy).save_checkpoint(self.strategy, *args, **kwargs)
        if not self.strategy.is_global_zero:
            self.plugin.save({}, None, storage_options=kwargs.get("storage_options"))


class _WholeFabric(WholeSaving):
    """Methods for ``Fabric``. A load also restores the random number generators of each rank."""

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = type(self.strategy).load_checkpoint(self.strategy, path, state, *args, **kwargs)
        if self.plugin.chosen is not None and isinstance(state, dict):
            self.plugin.restore(self.plugin.chosen, {})
        return loaded


class _WholeFit(WholeSaving):
    """Methods for the ``Trainer``. A resumed ``fit`` continues with the same random numbers and batches."""

    def __init__(self, plugin: Any, strategy: Any) -> None:
        super().__init__(plugin, strategy)
        self._resumed = ResumedFit(plugin.proofs.end_step)

    def setup_environment(self) -> None:
        trainer = self.strategy.lightning_module.trainer
        if is_proof() and trainer.loggers:
            trainer.loggers = [DummyLogger()]
        type(self.strategy).setup_environment(self.strategy)

    def setup(self, trainer: Any) -> None:
        self._resumed.follow(trainer.fit_loop)
        type(self.strategy).setup(self.strategy, trainer)

    def on_train_start(self) -> None:
        type(self.strategy).on_train_start(self.strategy)
        self._resumed.begin_training()
        if is_proof():
            trainer = self.strategy.lightning_module.trainer
            trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, Checkpoint)]
            self._observe()
            self.plugin.proofs.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.plugin.proofs.batch(batch)
        type(self.strategy).on_train_batch_start(self.strategy, batch, batch_idx)

    def _observe(self) -> None:
        optimizers = {f"optimizer_{i}": each for i, each in enumerate(self.strategy.optimizers)}
        schedulers = {f"scheduler_{i}": each.scheduler for i, each in enumerate(self.strategy.lr_scheduler_configs)}
        self.plugin.proofs.observe({"model": self.strategy.lightning_module, **optimizers, **schedulers})

    def teardown(self) -> None:
        self._resumed.forget()
        type(self.strategy).teardown(self.strategy)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **kwargs: Any) -> None:
        self._observe()
        own = self._resumed.state(checkpoint)
        type(self.strategy).save_checkpoint(self.strategy, {**checkpoint, **own}, filepath, **kwargs)
        if not self.strategy.is_global_zero:
            self.plugin.save(own, None, storage_options=kwargs.get("storage_options"))

    def load_checkpoint(self, checkpoint_path: Any, **more: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = type(self.strategy).load_checkpoint(self.strategy, checkpoint_path, **more)
        if self.plugin.chosen is not None and self._fits:
            self._restore(self.plugin.chosen, {})
        return loaded

    @property
    def _fits(self) -> bool:
        return self.strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def _restore(self, chosen: str, objects: dict[str, Any]) -> None:
        ranks = self.strategy.lightning_module.trainer.world_size
        self._resumed.restore(chosen, ranks, partial(self.plugin.restore, chosen), objects)


class _Sharded(_WholeFit):
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.strategy.lightning_module.state_dict()  # Lightning's own method would copy it to the CPU.

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # save_checkpoint saves the optimizer object instead

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **refused: Any) -> None:
        module, rest = self.strategy.lightning_module, dict(checkpoint)
        if rest.pop("state_dict").keys() != module.state_dict().keys():
            raise CheckpointError("on_save_checkpoint must not change the keys of a sharded model's state_dict.")
        self._observe()
        objects = self._objects(model_only=rest.pop("optimizer_states", None) is None)
        own = {**objects, **self._resumed.state(checkpoint)}
        self.plugin.save({**(rest if self.strategy.is_global_zero else {}), **own}, filepath, **refused)

    def load_checkpoint(self, checkpoint_path: Any, **more: Any) -> dict[str, Any]:
        chosen = self.plugin.choose(checkpoint_path)
        if chosen is None:
            return type(self.strategy).load_checkpoint(self.strategy, checkpoint_path, **more)
        self._restore(chosen, self._objects(model_only=not self._fits))
        return read_entries(chosen, lambda name: not re.fullmatch(rf"state_dict|optimizer_\d+|{RESUME}.*", name))

    def _objects(self, model_only: bool = False) -> dict[str, Any]:
        optimizers = [] if model_only else self.strategy.optimizers
        return {"state_dict": self.strategy.lightning_module, **{f"optimizer_{i}": x for i, x in enumerate(optimizers)}}


class _ShardedFabric(WholeSaving):
    def save_checkpoint(self, path: Any, state: dict[str, Any], **refused: Any) -> None:
        self.plugin.save(state, path, **refused)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **more: Any) -> dict[str, Any]:
        chosen = self.plugin.choose(path)
        if chosen is None:
            return type(self.strategy).load_checkpoint(self.strategy, path, state, strict, **more)
        if not isinstance(state, dict):
            raise ConfigError(f"{path} must be loaded into a dict. Call fabric.load(path, {{'model': model, ...}}).")
        with stagereg.open_checkpoint(chosen) as opened:
            wanted = {name: value for name, value in state.items() if strict or name in opened.entries}
        self.plugin.restore(chosen, wanted)
        state.update(wanted)
        return read_entries(chosen, lambda name: name not in wanted)


SHARDED: dict[type[Any], type[WholeSaving]] = {FabricModelParallel: _ShardedFabric, ModelParallelStrategy: _Sharded}
KINDS: dict[Any, type[WholeSaving]] = {**SHARDED, FabricStrategy: _WholeFabric, Strategy: _WholeFit}
"""By strategy class, the most specific first: the class whose methods replace those of a strategy."""


def read_entries(chosen: str, wanted: Callable[[str], bool], device: Any = "cpu") -> dict[str, Any]:
    """Return the entries of the checkpoint ``chosen`` for which ``wanted(name)`` is true, with copied tensors."""
    copied = partial(torch.Tensor.to, device=device, copy=True)
    with stagereg.open_checkpoint(chosen) as opened:
        found = [name for name in opened.entries if wanted(name)]
        return {name: apply_to_collection(opened.entry(name), torch.Tensor, copied) for name in found}
