"""Lightning and Fabric: checkpoints in the background, complete or absent, verified; one line of the program.

    -trainer = Trainer(callbacks=[ModelCheckpoint(...)])
    +trainer = Trainer(callbacks=[ModelCheckpoint(...)], plugins=[StageregCheckpointIO()])

Everything else stays: ``ModelCheckpoint`` decides when, under which paths and how many, and ``ckpt_path=`` restores; in
Fabric, ``fabric.save`` and ``fabric.load``. What is saved to ``DIR/last.ckpt`` lies in ``DIR/.stagereg/step-00000007``,
the seventh save to ``DIR``, and ``last.ckpt`` is a link that moves there when it is complete. A checkpoint that
Lightning removes or replaces goes when the one after it is complete, not before.

What Lightning collects on rank 0 is rank 0's to write; of a ``ModelParallelStrategy`` (FSDP2, tensor parallelism) each
rank writes its own shards, and any other number of ranks reads them. Lightning calls a ``CheckpointIO`` on rank 0,
or, of sharded models, never. So the setter of ``Strategy.checkpoint_io`` is replaced here by one that has the plugin
take over the saving of the strategy it is given to; for any other plugin it does what it did.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning_utilities.core.apply_func import apply_to_collection

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.opened import open_checkpoint
from stagereg.errors import CheckpointError, ConfigError, InstallationError, StageregError, nearest
from stagereg.integrations.lightning_uneven import UnevenInputs
from stagereg.integrations.linked import LinkedCheckpoints, choose, delete, split
from stagereg.registry import build, names

__all__ = ["StageregCheckpointIO", "UnevenInputs"]

_VERSIONS = "2.5 to 2.6"
_LIGHTNINGS = {
    "dir": "ModelCheckpoint(dirpath=...)",
    "every": "ModelCheckpoint(every_n_train_steps=...)",
    "keep": "ModelCheckpoint(save_top_k=...)",
    "resume": "trainer.fit(ckpt_path=...)",
    "save_last": "ModelCheckpoint(save_last=True)",
    "grace": "Lightning's own handling of signals",
    "enable": "Trainer(enable_checkpointing=...)",
    "mtbf": "ModelCheckpoint(train_time_interval=...)",
    "process_group": "the strategy",
}


class StageregCheckpointIO(CheckpointIO):
    """Writes and reads the checkpoints of a ``Trainer`` or ``Fabric``: ``Trainer(plugins=[StageregCheckpointIO()])``.

    Saving stages the state and returns; writing and committing go on in the background, and the end of ``trainer.fit``,
    or of the process, waits for them. A save that fails is raised on all ranks by the next save, or by the end of
    ``trainer.fit``. Loading verifies; where a ``last.ckpt`` is damaged or missing, it goes back to the newest good
    checkpoint beside it and warns; any other one is an error. Files that Lightning itself wrote are read as ever.

    Args:
        **checkpoint_options: ``stager``, ``storage``, ``verify``, ``on_error``, ``timeout``, ``replicas``,
            ``verify_replicas`` and ``read`` of :class:`stagereg.Checkpointer`. ``stager`` and ``storage`` may be names;
            an object serves one directory and one ``fit``, since it is closed with it.

    Raises:
        ConfigError: an option is unknown, or Lightning's to decide; at once. Or the strategy writes checkpoints in a
            way of its own; when the ``Trainer`` is made.
        InstallationError: this version of Lightning saves in another way than those that this was written for.
    """

    def __init__(self, **checkpoint_options: Any) -> None:
        _expect_known_lightning()
        known = [*inspect.signature(Checkpointer).parameters]
        for name in checkpoint_options:
            if name in _LIGHTNINGS:
                raise ConfigError(f"StageregCheckpointIO takes no {name!r}: in Lightning that is {_LIGHTNINGS[name]}.")
            if name not in known:
                raise ConfigError(f"StageregCheckpointIO takes no {name!r}.{nearest(name, known)}")
        self._options = checkpoint_options
        self._used: set[str] = set()
        self._strategy: Any = None
        self._directories: dict[str, LinkedCheckpoints] = {}

    def attach(self, strategy: Any) -> None:
        """Take over the saving of ``strategy``; called when the ``Trainer`` or ``Fabric`` is made.

        Raises:
            ConfigError: the strategy writes its checkpoints by itself.
        """
        kind, plain = type(strategy), (FabricStrategy, Strategy)
        sharded = isinstance(strategy, FabricModelParallel | ModelParallelStrategy)
        if sharded and not strategy._save_distributed_checkpoint:
            raise ConfigError(
                f"StageregCheckpointIO saves shards: leave out {kind.__name__}(save_distributed_checkpoint=False). "
                "`stagereg convert` makes one file of a checkpoint."
            )
        if not sharded and kind.save_checkpoint not in [each.save_checkpoint for each in plain]:
            raise ConfigError(
                f"StageregCheckpointIO cannot serve {kind.__name__}, which writes its checkpoints by itself. Use the "
                "strategy ddp, or ModelParallelStrategy for a sharded model."
            )
        self._strategy = strategy
        shards = _ShardedFabric if isinstance(strategy, FabricModelParallel) else _Sharded
        attached = (shards if sharded else _Whole)(self, strategy)
        for name in attached.overrides:
            setattr(strategy, name, getattr(attached, name))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Stage ``checkpoint`` and have it written to ``path``; called on rank 0.

        Raises:
            CheckpointError: an earlier save has failed, or this one cannot be staged; on all ranks.
            ConfigError: ``path`` is a URL, or there are ``storage_options``.
        """
        _expect_nothing(storage_options=storage_options)
        self.save(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``, verified; called on all ranks. Loading runs no code from it.

        Also without a ``Trainer``, such as ``StageregCheckpointIO().load_checkpoint(path)["state_dict"]``.

        Raises:
            CheckpointError: it is damaged, incomplete or not there.
        """
        chosen = self.choose(path)
        if chosen is None:
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        device = "cpu" if map_location is None else map_location
        return _read(chosen, lambda tensor: tensor.to(device, copy=True), lambda name: True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove what is at ``path`` once every save so far is complete; called on rank 0."""
        parent, name = split(path)
        directory, remove = self._directories.get(parent), partial(delete, Path(parent) / name)
        if directory is None:
            remove()
        else:
            directory.after_saves(remove)

    def teardown(self) -> None:
        """Wait for all saves. Raises: ``CheckpointError`` if one has failed and no call has raised that yet."""
        directories, self._directories = self._directories, {}
        with contextlib.ExitStack() as every:
            for directory in directories.values():
                every.callback(directory.close)

    # -- for the strategy, on all ranks

    def save(self, state: Mapping[str, Any], path: str | Path | None) -> None:
        """Stage what this rank has of a checkpoint; the ``path`` of rank 0 counts."""
        parent, name = self._agree(lambda: split(path))
        directory = self._directories.get(parent)
        if directory is None:
            directory = self._directories[parent] = LinkedCheckpoints(parent, self._is_first, self._build_options())
        directory.save(state, name, self._agree(directory.next_number))

    def choose(self, path: str | Path) -> str | None:
        """Return the directory of the checkpoint to read, a good one; ``None`` for what Lightning itself wrote."""
        for directory in self._directories.values():
            directory.checkpointer.wait()
        verify = self._options.get("verify", "full") == "full"
        return self._agree(lambda: choose(str(path), verify))

    def restore(self, chosen: str, state: dict[str, Any]) -> None:
        """Load into the objects of ``state``, each rank its own shards."""
        scratch = self._agree(tempfile.mkdtemp)  # reading takes no lock where another run may write
        options = {name: self._options[name] for name in ("read", "timeout") if name in self._options}
        try:
            with Checkpointer(scratch, resume=chosen, verify="fast", grace=None, **options) as checkpointer:
                checkpointer.restore(state)
        finally:
            if self._is_first:
                shutil.rmtree(scratch, ignore_errors=True)

    @property
    def _is_first(self) -> bool:
        return self._strategy is None or self._strategy.is_global_zero

    def _agree(self, decide: Callable[[], Any]) -> Any:
        """Return what rank 0 decides, or raise its error, on all ranks."""
        answer: Any = None
        if self._is_first:
            try:
                answer = decide()
            except Exception as error:  # that the others must not wait for
                known = isinstance(error, StageregError)
                answer = error if known else CheckpointError(f"{type(error).__name__}: {error}")
        if self._strategy is not None:
            answer = self._strategy.broadcast(answer)
        if isinstance(answer, StageregError):
            raise answer
        return answer

    def _build_options(self) -> dict[str, Any]:
        options = dict(self._options)
        for kind in options.keys() & {"stager", "storage"}:
            if isinstance(options[kind], str):
                options[kind] = build(kind, options[kind])
            elif kind in self._used:
                raise ConfigError(
                    f"The {kind} given to StageregCheckpointIO serves one directory of checkpoints and one fit. Give "
                    f"its name, as in {kind}={names(kind)[0]!r}, and one is built for each."
                )
            else:
                self._used.add(kind)
        return options


class _Whole:
    """Saving where rank 0 has all of a checkpoint: DDP, a single device. The other ranks learn of what fails."""

    overrides: tuple[str, ...] = ("save_checkpoint",)

    def __init__(self, plugin: StageregCheckpointIO, strategy: Any) -> None:
        self.plugin, self.strategy = plugin, strategy

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        type(self.strategy).save_checkpoint(self.strategy, *args, **kwargs)
        if not self.strategy.is_global_zero:
            self.plugin.save({}, None)


class _Sharded(_Whole):
    """Saving and loading for the ``Trainer``'s ``ModelParallelStrategy``, in place of Lightning's own."""

    overrides = ("save_checkpoint", "load_checkpoint", "lightning_module_state_dict", "optimizer_state")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.strategy.lightning_module.state_dict()  # not copied to the CPU

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # the optimizer itself is saved

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        _expect_nothing(storage_options=storage_options)
        module, rest = self.strategy.lightning_module, dict(checkpoint)
        if rest.pop("state_dict").keys() != module.state_dict().keys():
            raise CheckpointError("on_save_checkpoint has changed state_dict; of a sharded model all of it is saved.")
        weights_only = rest.pop("optimizer_states", None) is None
        objects = self._objects() if not weights_only else {"state_dict": module}
        self.plugin.save({**(rest if self.strategy.is_global_zero else {}), **objects}, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        chosen = self.plugin.choose(checkpoint_path)
        if chosen is None:
            return type(self.strategy).load_checkpoint(self.strategy, checkpoint_path, weights_only)
        self.plugin.restore(chosen, self._objects())
        return _read(chosen, torch.clone, lambda name: name != "state_dict" and not name.startswith("optimizer_"))

    def _objects(self) -> dict[str, Any]:
        optimizers = {f"optimizer_{i}": each for i, each in enumerate(self.strategy.optimizers)}
        return {"state_dict": self.strategy.lightning_module, **optimizers}


class _ShardedFabric(_Whole):
    """Saving and loading for ``Fabric``'s ``ModelParallelStrategy``, in place of Lightning's own."""

    overrides = ("save_checkpoint", "load_checkpoint")

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        _expect_nothing(storage_options=storage_options, filter=filter)
        self.plugin.save(state, path)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        chosen = self.plugin.choose(path)
        if chosen is None:
            return type(self.strategy).load_checkpoint(self.strategy, path, state, strict, weights_only)
        if not isinstance(state, dict):
            raise ConfigError(f"{path} is loaded into a dict: fabric.load(path, {{'model': model, ...}}).")
        with open_checkpoint(chosen) as opened:
            wanted = {name: value for name, value in state.items() if strict or name in opened.entries}
        self.plugin.restore(chosen, wanted)
        state.update(wanted)
        return _read(chosen, torch.clone, lambda name: name not in wanted)


def _read(chosen: str, take: Callable[[torch.Tensor], torch.Tensor], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Return entries of a checkpoint, with tensors that ``take`` has made of those in its files."""
    with open_checkpoint(chosen) as opened:
        found = [name for name in opened.entries if wanted(name)]
        return {name: apply_to_collection(opened.entry(name), torch.Tensor, take) for name in found}


def _expect_nothing(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"StageregCheckpointIO takes no {name}.")


def _expect_known_lightning() -> None:
    """Raise ``InstallationError`` where what is overridden here has another signature than it had."""
    known = {
        Strategy: "self, checkpoint, filepath, storage_options",
        FabricStrategy: "self, path, state, storage_options, filter",
        ModelParallelStrategy: "self, checkpoint, filepath, storage_options",
        FabricModelParallel: "self, path, state, storage_options, filter",
    }
    for kind, expected in known.items():
        found = ", ".join(inspect.signature(kind.save_checkpoint).parameters)
        if found != expected:
            raise InstallationError(
                f"lightning {lightning.__version__} saves in another way than {_VERSIONS}, which stagereg was written "
                f"for: {kind.__module__}.{kind.__name__}.save_checkpoint has ({found}), not ({expected})."
            )


def _announce(kind: Any) -> None:
    """Have the setter of ``checkpoint_io`` attach the plugin to the strategy."""
    usual = kind.__dict__["checkpoint_io"]

    def give(strategy: Any, plugin: Any) -> None:
        inner = plugin.checkpoint_io if isinstance(plugin, _WrappingCheckpointIO) else None
        if isinstance(inner, StageregCheckpointIO):
            raise ConfigError(
                f"StageregCheckpointIO saves in the background by itself: leave out {type(plugin).__name__}."
            )
        if isinstance(plugin, StageregCheckpointIO):
            plugin.attach(strategy)
        if not (isinstance(plugin, StageregCheckpointIO) and kind is FabricModelParallel):
            usual.fset(strategy, plugin)

    kind.checkpoint_io = property(usual.fget, give)


for _kind in (Strategy, FabricStrategy, FabricModelParallel):
    _announce(_kind)
