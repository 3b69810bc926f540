"""Makes torchtitan save and resume with a Checkpointer. Change one line in the function that returns the config::

    - checkpoint=CheckpointManager.Config(interval=500, last_save_model_only=False),
    + checkpoint=StageregCheckpointManager.Config(interval=500, last_save_model_only=False),

The checkpoints have the same entries and format as torchtitan's: parameters by name without a prefix, ``optimizer``,
``lr_scheduler``, ``train_state`` and ``dataloader``. So torchtitan's own manager and scripts can read them, and this
manager can restore checkpoints of torchtitan's own manager, even with a different parallelism layout.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import stagereg.integrations.written as written
from stagereg.assembly import Checkpointer
from stagereg.base.spec import refuse_unknown
from stagereg.checkpoint.format.manifest import MANIFEST, METADATA, step_of
from stagereg.checkpoint.hold import SCRATCH
from stagereg.config.instantiate import instantiate
from stagereg.data import is_position
from stagereg.errors import CheckpointError, ConfigError, InstallationError, MissingEntryError
from stagereg.integrations.agreed import agreed, expect_known
from stagereg.integrations.proofs import is_proof
from stagereg.registry import build

_WRITTEN_FOR = "0.3"
_FOUND = version("torchtitan")
try:
    from torchtitan.components.checkpointer import base, dcp
    from torchtitan.tools import filesystem
except ImportError as error:
    raise InstallationError(
        f"torchtitan {_FOUND} is not supported: its checkpoint managers differ from version {_WRITTEN_FOR} "
        f"({error}). Run: pip install 'torchtitan>={_WRITTEN_FOR}'"
    ) from error

__all__ = ["StageregCheckpointManager"]

_METHODS = {
    "dcp_load": ("self", "state_dict", "checkpoint_id", "from_hf", "from_quantized"),
    "dcp_save": ("self", "state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf"),
    "_load": ("self", "step"),
    "_save": ("self", "curr_step", "last_step"),
    "_maybe_wait_for_staging": ("self",),
    "_wait_for_saving": ("self",),
    "_close": ("self",),
}
_DECIDED = ["dir", "enable", "every", "keep", "process_group", "resume", "stager", "storage"]
_MODEL_ALONE = (
    "This checkpoint contains only the model: last_save_model_only saved it at the end of a run. To resume from an "
    "earlier step, set checkpoint.load_step. To start a run from it, set initial_load_path and a new checkpoint.folder."
)


class _NotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint folder has no checkpoint of the requested step."""


class StageregCheckpointManager(base.BaseCheckpointManager):
    """Replaces torchtitan's ``CheckpointManager``, and saves and restores with :class:`stagereg.Checkpointer`.

    The constructor is collective. ``save`` returns when the state is staged; a background thread writes and commits the
    checkpoint. Before each optimizer step, the Trainer calls ``maybe_wait_for_staging``, which waits until the stager
    no longer reads the live tensors. If a save fails, the next save or ``close`` raises the error. Both wait for
    pending saves, and so does the exit of the process. After SIGTERM or SIGUSR1, all ranks save at the end of the step
    and exit with code 75 (see ``preemption.grace_period``).

    ``load`` restores the newest valid checkpoint in the folder, even if torchtitan's own manager wrote it. If the world
    size is the same, ``load`` also restores the random number generators of every rank. With a ``tier`` (local copies)
    in ``checkpoint_options``, the steps selected by ``tier.every`` are also saved to the tier, and ``load`` also
    searches the tier. ``last_save_model_only`` and ``export_dtype`` are supported.

    Args:
        config: see :class:`Config`.
        dataloader: this and the other arguments are those of torchtitan's ``CheckpointManager``. The Trainer passes
            them.

    Raises:
        ConfigError: an option is invalid, or ``last_save_in_hf`` is set without ``sd_adapter``.
        InstallationError: this version of torchtitan is not supported.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(base.BaseCheckpointManager.Config):
        """The checkpoint options of torchtitan, and three options of stagereg."""

        stager: str = "overlapped"
        """Name of the stager that copies the state. ``stagereg list`` prints all names."""

        storage: str = "dcp"
        """Name of the storage that writes the files. torchtitan's own tools can read only ``dcp``."""

        checkpoint_options: dict[str, Any] = field(default_factory=dict)
        """Other options of ``stagereg.Checkpointer``, such as ``{"restore": {"verify": "fast"}}``."""

        def __post_init__(self) -> None:
            base.BaseCheckpointManager.Config.__post_init__(self)
            for name in self.checkpoint_options.keys() & set(_DECIDED):
                raise ConfigError(f"checkpoint_options must not contain {name!r}: torchtitan's own options decide it.")
            refuse_unknown("checkpoint_options", self.checkpoint_options, Checkpointer)

    def __new__(cls, *args: Any, **kwargs: Any) -> StageregCheckpointManager:
        called = {*_METHODS, *base.BaseCheckpointManager.__abstractmethods__}
        methods = {name: _METHODS.get(name, ()) for name in sorted(called)}
        expect_known("torchtitan", f"=={_WRITTEN_FOR}.*", dcp.CheckpointManager, methods)
        return super().__new__(cls)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ConfigError("checkpoint.last_save_in_hf requires a state dict adapter, which this model lacks.")
        self.config, self.folder, self.sd_adapter = config, filesystem.join(base_folder, config.folder), sd_adapter
        others = {"optimizer": optimizers, "dataloader": dataloader, "lr_scheduler": lr_schedulers, **states}
        self.states = {**others, base.MODEL: base.ModelWrapper(model_parts)}
        self._others = {  # Wrap data loaders: in torchtitan's format, they put the rank into their own state.
            name: SimpleNamespace(state_dict=x.state_dict, load_state_dict=x.load_state_dict) if is_position(x) else x
            for name, x in others.items()
        }
        self._stager = build("stager", config.stager)
        # With load_only, do not lock the folder, write to it, or handle signals.
        self._scratch = agreed(lambda: tempfile.mkdtemp(prefix=SCRATCH)) if config.load_only else None
        others_of = dict(config.checkpoint_options)
        if config.load_only:
            others_of.pop("tier", None)
            others_of["preemption"] = {"grace_period": None}
        self._has_tier = others_of.get("tier") is not None
        self._checkpointer = instantiate(
            {"_target_": "stagereg.assembly.Checkpointer"},
            dir=self._scratch or self.folder,
            every=config.interval,
            keep=config.keep_latest_k or sys.maxsize,
            stager=self._stager,
            storage=build("storage", config.storage),
            **{**others_of, "save_last": False},
        )
        if (observer := self._checkpointer.observer) is not None:  # the state has parameters instead of modules
            observer.observe({base.MODEL: model_parts, **self._others})

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if the step is a multiple of the interval or the last step, or if all ranks agreed to be preempted."""
        if self.config.load_only:
            return False
        first = curr_step == 1 and self.config.enable_first_step_checkpoint
        if not (self._checkpointer.should_save(curr_step) or first or last_step) or is_proof():
            return False
        export = last_step and self.config.last_save_model_only
        if export and self.config.last_save_in_hf:
            self._checkpointer.wait()
            self._export_hf(curr_step)
            return True
        state = self._exported() if export else {**self._others, **self.states[base.MODEL].state_dict()}
        # torchtitan expects checkpoints of the first and last step in the folder, even if `every` does not select them.
        self._checkpointer.save(curr_step, state, everywhere=first or last_step)
        self.save_future = self.save_future or Future()
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Wait until the last save has copied the state. Called before the optimizer changes the state."""
        if self.save_future is not None:
            self._stager.synchronize_staging()

    def _wait_for_saving(self) -> None:
        self._checkpointer.wait()
        if self.save_future is not None:
            self.save_future.set_result(None)
            self.save_future = None

    def _close(self) -> None:
        if not hasattr(self, "_checkpointer"):
            return
        try:
            self._checkpointer.close()
        finally:
            if self._scratch is not None and not (dist.is_initialized() and dist.get_rank()):
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _load(self, step: int = -1) -> bool:
        """Restore a checkpoint from the folder, or ``initial_load_path`` if the folder has no checkpoint."""
        self.maybe_wait_for_saving()
        if is_proof():
            return self._restore(None, model_only=False)
        of_titan, own = agreed(lambda: _steps_in(self.folder))
        there = {**of_titan, **own}
        if self._has_tier and step == -1 and max(of_titan, default=-1) <= max(own, default=-1):
            return self._restore(None, model_only=False) or self._load_initial()
        if step != -1 and step not in there:
            raise _NotFoundError(
                f"--checkpoint.load_step={step} was not found in {self.folder}. Steps with a checkpoint: "
                f"{', '.join(map(str, sorted(there))) or 'none'}."
            )
        if not there:
            return self._load_initial()
        newest = max(there) if step == -1 else step
        source = self.folder if step == -1 and newest in own else there[newest]
        return self._restore(source, model_only=newest == 0)

    def _load_initial(self) -> bool:
        path, in_hf, adapter = self.config.initial_load_path, self.config.initial_load_in_hf, self.sd_adapter
        if in_hf:
            path = path or getattr(adapter, "hf_assets_path", None)
            if adapter is None or path is None:
                raise ConfigError("checkpoint.initial_load_in_hf requires a state dict adapter and initial_load_path.")
        if path is None:
            return False
        if not filesystem.isdir(path):
            raise ConfigError(f"checkpoint.initial_load_path={path} is not a directory.")
        if in_hf:
            model = self.states[base.MODEL].state_dict()
            dcp.CheckpointManager.dcp_load(self, model, path, True, self.config.initial_load_in_hf_quantized)
            return True
        return self._restore(path, self.config.initial_load_model_only)

    def _restore(self, source: str | None, model_only: bool) -> bool:
        """Restore ``source``, by default the newest checkpoint of folder and tier. Return False if none exists."""
        excluded = self.config.exclude_from_loading
        if unknown := [name for name in excluded if name not in self._others]:
            raise ConfigError(f"checkpoint.exclude_from_loading contains {unknown[0]!r}, which is not in the state.")
        state = {} if model_only else {name: x for name, x in self._others.items() if name not in excluded}
        state |= self.states[base.MODEL].state_dict()
        try:
            if self._checkpointer.restore(state, source) is None:
                return False
        except MissingEntryError as error:
            if "'optimizer'" not in str(error):
                raise
            raise CheckpointError(f"{error}\n{_MODEL_ALONE}") from error
        self.states[base.MODEL].load_state_dict(state)  # needed by modules whose state_dict returns copies of tensors
        return True

    def _exported(self) -> dict[str, Any]:
        found, dtype = dict(self.states[base.MODEL].state_dict()), getattr(torch, self.config.export_dtype)
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found[name] = value.detach().to(dtype)
        return found

    def _export_hf(self, step: int) -> None:
        """Write the model in Hugging Face format to the directory ``step-N-hf``, atomically. Collective."""
        final = os.path.join(self.folder, f"step-{step}-hf")
        hidden = agreed(lambda: written.begin(final))

        def commit() -> None:
            shutil.rmtree(os.path.join(hidden, "sharded"), ignore_errors=True)
            written.commit(hidden, final)

        dcp.CheckpointManager.dcp_save(self, self._exported(), hidden, dcp.AsyncMode.DISABLED, to_hf=True)
        if dist.is_initialized():
            dist.barrier()
        agreed(commit)


def _steps_in(folder: str) -> tuple[dict[int, str], dict[int, str]]:
    """Find the checkpoints in ``folder``. Return two dicts from step to path: written by torchtitan, by stagereg."""
    plain, own = dict[int, str](), dict[int, str]()
    for name in filesystem.listdir(folder) if filesystem.isdir(folder) else ():
        path = filesystem.join(folder, name)
        if (step := step_of(name)) is not None:
            if filesystem.isfile(filesystem.join(path, MANIFEST)):
                own[step] = path
            elif filesystem.isfile(filesystem.join(path, METADATA)):
                plain[step] = path
    return plain, own
