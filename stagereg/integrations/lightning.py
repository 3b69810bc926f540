"""Lightning and Fabric: checkpoints in the background, complete or absent, verified; one line of the program.

    -trainer = Trainer(callbacks=[ModelCheckpoint(...)])
    +trainer = Trainer(callbacks=[ModelCheckpoint(...)], plugins=[StageregCheckpointIO()])

What Lightning collects on rank 0 is rank 0's to write; of a ``ModelParallelStrategy`` (FSDP2, tensor parallelism) each
rank writes its own shards. Lightning calls a ``CheckpointIO`` on rank 0, or, of sharded models, never. So the setter of
``Strategy.checkpoint_io`` is replaced here: this plugin takes over the saving of the strategy that it is given to.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from stagereg.integrations.lightning_strategies import SHARDED, kind_of, read_entries
from stagereg.integrations.lightning_uneven import UnevenInputs
from stagereg.integrations.named import NamedCheckpoints, choose, delete, restore, split
from stagereg.registry import build, names

__all__ = ["StageregCheckpointIO", "UnevenInputs"]

_OPTIONS = ("stager", "storage", "restore", "failure", "replicas")
_LIGHTNINGS = (
    "ModelCheckpoint(dirpath=, every_n_train_steps=, save_top_k=, save_last=), fit(ckpt_path=) or the strategy"
)
_FOLLOW = "`stagereg follow DIR/last.ckpt -- COMMAND` runs a command on each complete checkpoint there"
_TIER = "a training loop of your own saves to a tier, with stagereg.Checkpointer(dir, every=..., tier=...)"
_SAVING: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Strategy, ModelParallelStrategy), ("self", "checkpoint", "filepath", "storage_options")),
    **dict.fromkeys((FabricStrategy, FabricModelParallel), ("self", "path", "state", "storage_options", "filter")),
}
_HANDED_OVER = ".temp.ckpt"  # in which ddp_spawn and ddp_notebook hand weights to the process that started the ranks


class StageregCheckpointIO(CheckpointIO):
    """Writes and reads the checkpoints of a ``Trainer`` or ``Fabric``: ``Trainer(plugins=[StageregCheckpointIO()])``.

    Saving stages the state and returns; writing and committing go on in the background, and the end of ``trainer.fit``,
    or of the process, waits for them. A save that fails is raised on all ranks by the next save, or by the end of
    ``trainer.fit``. Loading verifies; where a ``last.ckpt`` is damaged or missing, it goes back to the newest good
    checkpoint beside it and warns; any other one is an error. Files that Lightning itself wrote are read as ever.

    Args:
        **checkpoint_options: those of :class:`stagereg.Checkpointer` that Lightning has none for: ``stager``,
            ``storage``, ``restore``, ``failure`` and ``replicas``. ``stager`` and ``storage`` may be names; an object
            serves one directory and one ``fit``, which closes it.

    Attributes:
        chosen: the directory that :meth:`load_checkpoint` has read last; ``None`` for what Lightning itself wrote.

    Raises:
        ConfigError: an option is unknown, or Lightning's to decide; at once. Or the strategy writes checkpoints in a
            way of its own; when the ``Trainer`` is made.
        InstallationError: this version of Lightning saves in another way than those that this was written for.
    """

    def __init__(self, **checkpoint_options: Any) -> None:
        for kind, arguments in _SAVING.items():
            expect_known("lightning", ">=2.5,<2.7", kind, {"save_checkpoint": arguments})
        for name in checkpoint_options.keys() - _OPTIONS:
            known = name in inspect.signature(Checkpointer).parameters
            usual = f"in Lightning that is said by {_LIGHTNINGS}"
            said_by = {"on_commit": _FOLLOW, "tier": _TIER}.get(name, usual)
            grouped = instead(name, Checkpointer, repr(checkpoint_options[name]))
            why = f": {said_by}." if known else f".{grouped or nearest(name, _OPTIONS)}"
            raise ConfigError(f"StageregCheckpointIO takes no {name!r}{why}")
        Checkpointer.check_options(checkpoint_options)
        self._options = checkpoint_options
        self._used: set[str] = set()
        self.chosen: str | None = None
        self._strategy: Any = SimpleNamespace(is_global_zero=True, broadcast=lambda answer: answer)  # until attached
        self._directories: dict[str, NamedCheckpoints] = {}

    def attach(self, strategy: Any) -> None:
        """Take over the saving of ``strategy``; called when the ``Trainer`` or ``Fabric`` is made."""
        kind, usual = type(strategy), (FabricStrategy.save_checkpoint, Strategy.save_checkpoint)
        saving, shards = kind_of(strategy), isinstance(strategy, tuple(SHARDED))
        if not shards and kind.save_checkpoint not in usual:
            raise ConfigError(
                f"{kind.__name__} writes its checkpoints by itself: use ddp, or ModelParallelStrategy for shards."
            )
        if shards and not strategy._save_distributed_checkpoint:
            raise ConfigError(
                f"StageregCheckpointIO saves shards. Remove {kind.__name__}(save_distributed_checkpoint=False). "
                "`stagereg convert` makes one file of a checkpoint."
            )
        self._strategy, attached = strategy, saving(self, strategy)
        for name in [name for name in dir(saving) if not name.startswith("_")]:
            setattr(strategy, name, getattr(attached, name))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Stage ``checkpoint`` and have it written to ``path``; called on rank 0.

        Raises:
            CheckpointError: an earlier save has failed, or this one cannot be staged; on all ranks.
            ConfigError: ``path`` is a URL, or there are ``storage_options``.
        """
        if Path(path).name == _HANDED_OVER:  # rank 0 alone saves that
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
        else:
            self.save(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Return the checkpoint at ``path``, verified; called on all ranks. Loading runs no code from it.

        Raises:
            CheckpointError: it is damaged, incomplete or not there.
        """
        chosen = self.chosen = self.choose(path)
        if chosen is None:
            given = {"map_location": map_location, "weights_only": weights_only}  # 2.5.0 has no weights_only
            return TorchCheckpointIO().load_checkpoint(path, **{name: x for name, x in given.items() if x is not None})
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        return read_entries(chosen, lambda name: not name.startswith(RESUME), device)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove what is at ``path`` once every save so far is complete; called on rank 0."""
        parent, name = split(path)
        if parent in self._directories:
            self._directories[parent].remove(name)
        else:
            delete(Path(parent) / name)

    def teardown(self) -> None:
        """Wait for all saves. Raises: ``CheckpointError`` if one has failed and no call has raised that yet."""
        with contextlib.ExitStack() as every:
            while self._directories:
                every.callback(self._directories.popitem()[1].close)

    def save(self, state: Mapping[str, Any], path: str | Path | None, **refused: Any) -> None:
        """Stage what this rank has of a checkpoint; the ``path`` of rank 0 counts."""
        for option in [option for option, value in refused.items() if value is not None]:
            raise ConfigError(f"StageregCheckpointIO takes no {option}.")
        parent, name = self.agree(lambda: split(path))
        directory = self.directory(parent)
        directory.save(state, self.agree(lambda: directory.begin(name)))
        if name.startswith("hpc_ckpt"):  # after which Lightning has Slurm end this job at once
            directory.checkpointer.wait()

    def directory(self, parent: str) -> NamedCheckpoints:
        """Return the checkpoints of a directory, the same on all ranks, which call this together."""
        directory = self._directories.get(parent)
        if directory is None or not directory.is_open:
            directory = NamedCheckpoints(parent, self._strategy.is_global_zero, self._build_options())
            self._directories[parent] = directory
        return directory

    def choose(self, path: str | Path, verify: bool = True) -> str | None:
        """Return the directory of the checkpoint to read, a good one; ``None`` for what Lightning itself wrote."""
        NamedCheckpoints.wait_for_all(self.agree)
        verify = verify and self._options.get("restore", Restore()).verify == "full"
        return self.agree(lambda: choose(str(path), verify))

    def restore(self, chosen: str, state: dict[str, Any]) -> None:
        """Load into the objects of ``state``, each rank its own shards."""
        options = {name: self._options[name] for name in self._options.keys() & {"failure"}}
        options["restore"] = replace(self._options.get("restore", Restore()), verify="fast")
        restore(chosen, state, self.agree, self._strategy.is_global_zero, **options)

    def agree(self, decide: Callable[[], Any]) -> Any:
        """Return what ``decide`` returns on rank 0, or raise its error, on all ranks."""
        return agreed(decide, self._strategy.is_global_zero, self._strategy.broadcast)

    def _build_options(self) -> dict[str, Any]:
        """Return options for one more checkpointer. Raises: ``ConfigError`` if one of them serves another already."""
        options = dict(self._options)
        for kind in options.keys() & {"stager", "storage"}:
            if isinstance(options[kind], str):
                options[kind] = build(kind, options[kind])
            elif kind in self._used:
                text = f"The {kind} given to StageregCheckpointIO serves one directory of checkpoints and one fit."
                raise ConfigError(f"{text} Give a name, as in {kind}={names(kind)[0]!r}: one is built for each.")
            self._used.add(kind)
        return options


def _announce(kind: Any) -> None:
    """Have the setter of ``checkpoint_io`` attach the plugin to the strategy."""
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
