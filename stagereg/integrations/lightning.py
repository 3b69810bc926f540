"""Saves checkpoints of Lightning and Fabric atomically, in the background, with checksums. One line changes::

    -trainer = Trainer(callbacks=[ModelCheckpoint(...)])
    +trainer = Trainer(callbacks=[ModelCheckpoint(...)], plugins=[StageregCheckpointIO()])

With most strategies, Lightning collects all state on rank 0, which writes it. With a ``ModelParallelStrategy`` (FSDP2,
tensor parallelism), each rank writes its own shards. Lightning calls a ``CheckpointIO`` only on rank 0, and never for
sharded models. This module therefore replaces the setter of ``Strategy.checkpoint_io``: when the plugin is assigned to
a strategy, the plugin replaces the strategy's methods for saving and loading.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy

from stagereg.assembly import Checkpointer
from stagereg.base.spec import instead
from stagereg.checkpoint.options import Restore
from stagereg.errors import ConfigError, nearest
from stagereg.integrations.agreed import agreed, expect_known
from stagereg.integrations.lightning_resume import RESUME
from stagereg.integrations.lightning_strategies import KINDS, SHARDED, read_entries
from stagereg.integrations.lightning_uneven import UnevenInputs
from stagereg.integrations.named import NamedCheckpoints, choose, delete, restore, split
from stagereg.integrations.proofs import Proofs, is_proof
from stagereg.registry import build, names

__all__ = ["StageregCheckpointIO", "UnevenInputs"]

_OPTIONS = ("stager", "storage", "restore", "failure", "replicas", "prove")
_LIGHTNING = "ModelCheckpoint(dirpath=, every_n_train_steps=, save_top_k=, save_last=), fit(ckpt_path=) or the strategy"
_FOLLOW = "`stagereg follow DIR/last.ckpt -- COMMAND` runs a command on each new checkpoint"
_TIER = "tiers are only supported in your own training loop, with stagereg.Checkpointer(dir, every=..., tier=...)"
_SAVING: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Strategy, ModelParallelStrategy), ("self", "checkpoint", "filepath", "storage_options")),
    **dict.fromkeys((FabricStrategy, FabricModelParallel), ("self", "path", "state", "storage_options", "filter")),
}
_HANDED_OVER = ".temp.ckpt"  # name of the file in which ddp_spawn and ddp_notebook pass weights to the parent process


class StageregCheckpointIO(CheckpointIO):
    """Writes and reads the checkpoints of a ``Trainer`` or ``Fabric``: ``Trainer(plugins=[StageregCheckpointIO()])``.

    A save returns as soon as the state is staged. A background thread writes and commits the checkpoint; the end of
    ``trainer.fit`` and the exit of the process wait for this thread. If a save fails, the next save or the end of
    ``trainer.fit`` raises the error on all ranks. A load verifies checksums. If ``last.ckpt`` is corrupt or missing, a
    load logs a warning and uses the newest valid checkpoint in the same directory; with any other path, it raises an
    error. Files that Lightning itself wrote are loaded as usual.

    Args:
        **checkpoint_options: these options of :class:`stagereg.Checkpointer`: ``stager``, ``storage``, ``restore``,
            ``failure``, ``replicas`` and, for a ``Trainer``, ``prove``. Lightning's arguments replace the other
            options. A ``stager`` or ``storage`` object, unlike a name, can be used for one directory and one ``fit``
            only, which closes the object.

    Attributes:
        chosen: the directory that the last :meth:`load_checkpoint` read; ``None`` if Lightning itself wrote the file.
        proofs: reports the training steps to ``stagereg prove``.

    Raises:
        ConfigError: an option is unknown, or an argument of Lightning replaces it. A ``Trainer`` raises it when it is
            created with a strategy that writes its own checkpoints.
        InstallationError: this version of Lightning is not supported.
    """

    def __init__(self, **checkpoint_options: Any) -> None:
        for kind, arguments in _SAVING.items():
            expect_known("lightning", ">=2.5,<2.7", kind, {"save_checkpoint": arguments})
        for name in checkpoint_options.keys() - _OPTIONS:
            known = name in inspect.signature(Checkpointer).parameters
            usual = f"Lightning decides it with {_LIGHTNING}"
            said_by = {"on_commit": _FOLLOW, "tier": _TIER}.get(name, usual)
            grouped = instead(name, Checkpointer, repr(checkpoint_options[name]))
            why = f": {said_by}." if known else f".{grouped or nearest(name, _OPTIONS)}"
            raise ConfigError(f"StageregCheckpointIO does not take {name!r}{why}")
        Checkpointer.check_options(checkpoint_options)
        self._options = checkpoint_options
        self._used: set[str] = set()
        self.chosen: str | None = None
        self.proofs = Proofs(checkpoint_options)
        # Until the plugin is attached to a strategy, act as a single process.
        self._strategy: Any = SimpleNamespace(is_global_zero=True, broadcast=lambda answer: answer)
        self._directories: dict[str, NamedCheckpoints] = {}

    def attach(self, strategy: Any) -> None:
        """Replace the checkpoint methods of ``strategy``. Called when a ``Trainer`` or ``Fabric`` is created."""
        kind, usual = type(strategy), (FabricStrategy.save_checkpoint, Strategy.save_checkpoint)
        if isinstance(strategy, FabricStrategy) and not isinstance(strategy, Strategy) and "prove" in self._options:
            raise ConfigError("StageregCheckpointIO supports prove with a Trainer, but not with Fabric. Remove prove.")
        saving = next(KINDS[base] for base in KINDS if isinstance(strategy, base))
        shards = isinstance(strategy, tuple(SHARDED))
        if not shards and kind.save_checkpoint not in usual:
            text = f"{kind.__name__} writes its own checkpoints. Use ddp, or ModelParallelStrategy for sharded models."
            raise ConfigError(text)
        if shards and not strategy._save_distributed_checkpoint:
            raise ConfigError(
                "StageregCheckpointIO saves only sharded checkpoints. Remove the argument save_distributed_checkpoint="
                f"False of {kind.__name__}. `stagereg convert` converts a checkpoint to a single file."
            )
        self._strategy, attached = strategy, saving(self, strategy)
        for name in [name for name in dir(saving) if not name.startswith("_")]:
            setattr(strategy, name, getattr(attached, name))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Stage ``checkpoint``; a background thread writes it to ``path``. Lightning calls this on rank 0 only.

        Raises:
            CheckpointError: an earlier save failed, or ``checkpoint`` cannot be staged. All ranks raise this error.
            ConfigError: ``path`` is a URL, or ``storage_options`` is not ``None``.
        """
        if Path(path).name == _HANDED_OVER:  # The other ranks do not save this file, so the save cannot be collective.
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
        else:
            self.save(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Verify and return the checkpoint at ``path``. Called on all ranks. Does not execute code from the file.

        Raises:
            CheckpointError: the checkpoint is corrupt, incomplete or missing.
        """
        chosen = self.chosen = self.choose(path)
        if chosen is None:
            given = {"map_location": map_location, "weights_only": weights_only}  # 2.5.0 has no weights_only
            return TorchCheckpointIO().load_checkpoint(path, **{name: x for name, x in given.items() if x is not None})
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        return read_entries(chosen, lambda name: not name.startswith(RESUME), device)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the checkpoint at ``path``, after all pending saves are complete. Called on rank 0."""
        parent, name = split(path)
        if parent in self._directories:
            self._directories[parent].remove(name)
        elif not is_proof():
            delete(Path(parent) / name)

    def teardown(self) -> None:
        """Wait for all saves. Raises ``CheckpointError`` if a save failed and no earlier call has raised the error."""
        with contextlib.ExitStack() as every:
            every.callback(self.proofs.close)
            while self._directories:
                every.callback(self._directories.popitem()[1].close)

    def save(self, state: Mapping[str, Any], path: str | Path | None, **refused: Any) -> None:
        """Stage the entries that this rank contributes to a checkpoint. Collective. Uses the ``path`` of rank 0."""
        for option in [option for option, value in refused.items() if value is not None]:
            raise ConfigError(f"StageregCheckpointIO does not support {option}.")
        if is_proof():
            return
        parent, name = self.agree(lambda: split(path))
        directory = self._directories.get(parent)
        if directory is None or not directory.is_open:
            directory = NamedCheckpoints(parent, self._strategy.is_global_zero, self._build_options())
            self._directories[parent] = directory
        self.proofs.add(directory.checkpointer)
        directory.save(state, self.agree(partial(directory.begin, name)))
        if name.startswith("hpc_ckpt"):  # Lightning requeues the Slurm job immediately after this save
            directory.checkpointer.wait()

    def choose(self, path: str | Path, verify: bool = True) -> str | None:
        """Return the directory of a valid checkpoint, or ``None`` if Lightning itself wrote ``path``. Collective."""
        NamedCheckpoints.wait_for_all(self.agree)
        path = self.proofs.checkpoint(os.path.abspath(path)) or path
        verify = verify and self._options.get("restore", Restore()).verify == "full"
        return self.agree(lambda: choose(str(path), verify))

    def restore(self, chosen: str, state: dict[str, Any]) -> None:
        """Load the checkpoint directory ``chosen`` into the objects of ``state``. Collective."""
        options = {name: self._options[name] for name in self._options.keys() & {"failure"}}
        options["restore"] = replace(self._options.get("restore", Restore()), verify="fast")
        restore(chosen, state, self.agree, self._strategy.is_global_zero, **options)

    def agree(self, decide: Callable[[], Any]) -> Any:
        """Call ``decide`` on rank 0, and return its result or raise its error on all ranks. Collective."""
        return agreed(decide, self._strategy.is_global_zero, self._strategy.broadcast)

    def _build_options(self) -> dict[str, Any]:
        """Return options for a new checkpointer. Raises ``ConfigError`` if a stager or storage object is in use."""
        options = dict(self._options)
        for kind in options.keys() & {"stager", "storage"}:
            if isinstance(options[kind], str):
                options[kind] = build(kind, options[kind])
            elif kind in self._used:
                text = f"A {kind} object passed to StageregCheckpointIO serves only one directory and one fit."
                raise ConfigError(f"{text} Pass a name, for example {kind}={names(kind)[0]!r}, to build one for each.")
            self._used.add(kind)
        return options


def _announce(kind: Any) -> None:
    """Replace the setter of ``checkpoint_io`` in the class ``kind``, so that it attaches the plugin to the strategy."""
    usual = kind.__dict__["checkpoint_io"]

    def give(strategy: Any, plugin: Any) -> None:
        if isinstance(getattr(plugin, "checkpoint_io", None), StageregCheckpointIO):
            raise ConfigError(f"StageregCheckpointIO already saves in the background. Remove {type(plugin).__name__}.")
        ours = isinstance(plugin, StageregCheckpointIO)
        if ours:
            plugin.attach(strategy)
        if not (ours and kind is FabricModelParallel):
            usual.fset(strategy, plugin)

    kind.checkpoint_io = property(usual.fget, give)


for _kind in (Strategy, FabricStrategy, FabricModelParallel):
    _announce(_kind)
