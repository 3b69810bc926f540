"""torchtitan saves and resumes through a Checkpointer: one line of the function that returns the trainer's config::

    - checkpoint=CheckpointManager.Config(interval=500, last_save_model_only=False),
    + checkpoint=StageregCheckpointManager.Config(interval=500, last_save_model_only=False),

Checkpoints have torchtitan's entries: parameters by their names with nothing before them, ``optimizer``,
``lr_scheduler``, ``train_state`` and ``dataloader``, in torch's format. So torchtitan's own manager and scripts read
them, and what these have saved is restored here, sharded over ranks in any other way.
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
from stagereg.errors import CheckpointError, ConfigError, InstallationError
from stagereg.integrations.agreed import agreed, expect_known
from stagereg.registry import build

_WRITTEN_FOR = "0.3"
_FOUND = version("torchtitan")
try:
    from torchtitan.components.checkpointer import base, dcp
    from torchtitan.tools import filesystem
except ImportError as error:
    raise InstallationError(
        f"torchtitan {_FOUND} has no checkpoint managers as {_WRITTEN_FOR} has them, for which this adapter was "
        f"written ({error}): pip install 'torchtitan>={_WRITTEN_FOR}'"
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
    "It is the model alone, left by last_save_model_only at the end of a run. To train on from before, set "
    "checkpoint.load_step; to begin with it, name it as checkpoint.initial_load_path of another folder."
)


class _NotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint of the step that was asked for."""


class StageregCheckpointManager(base.BaseCheckpointManager):
    """Saves and restores as torchtitan's ``CheckpointManager`` does, through :class:`stagereg.Checkpointer`.

    ``save`` returns when the state is staged; it is written and committed in the background. Before each optimizer step
    the Trainer calls ``maybe_wait_for_staging``, where a stager that reads live memory finishes. A save that failed is
    raised by the next one and by ``close``, which wait for what is under way; so does the end of the process. SIGTERM
    and SIGUSR1 have all ranks save after their step, and exit with status 75 (``preemption.grace_period``).

    With a ``tier`` among ``checkpoint_options``, each step of its ``every`` goes there, and ``load`` looks there too.
    ``load`` takes the newest undamaged checkpoint in the folder, also one of torchtitan's own manager. Every rank's
    random numbers are restored too, where as many ranks saved. ``last_save_model_only`` and ``export_dtype`` are kept.

    Args:
        config: see :class:`Config`.
        dataloader: and the others as for torchtitan's ``CheckpointManager``, from the Trainer. Call it on all ranks.

    Raises:
        ConfigError: an option is of no use, or ``last_save_in_hf`` without ``sd_adapter``.
        InstallationError: torchtitan's managers have other methods than those that this was written for.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(base.BaseCheckpointManager.Config):
        """torchtitan's options for checkpoints, and those of stagereg."""

        stager: str = "overlapped"
        """Copies the state: the name of a stager (``stagereg list``)."""

        storage: str = "dcp"
        """Writes the files: the name of a storage; torchtitan's own tools read ``dcp``."""

        checkpoint_options: dict[str, Any] = field(default_factory=dict)
        """Others of ``stagereg.Checkpointer``, as a config has them: ``{"restore": {"verify": "fast"}}``."""

        def __post_init__(self) -> None:
            base.BaseCheckpointManager.Config.__post_init__(self)
            for name in self.checkpoint_options.keys() & set(_DECIDED):
                raise ConfigError(f"checkpoint_options has {name!r}: torchtitan's options of checkpoint decide it.")
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
            raise ConfigError("checkpoint.last_save_in_hf needs a state dict adapter, which this model has none of.")
        self.config, self.folder, self.sd_adapter = config, filesystem.join(base_folder, config.folder), sd_adapter
        others = {"optimizer": optimizers, "dataloader": dataloader, "lr_scheduler": lr_schedulers, **states}
        self.states = {**others, base.MODEL: base.ModelWrapper(model_parts)}
        self._others = {  # a loader names its rank itself, in torchtitan's format
            name: SimpleNamespace(state_dict=x.state_dict, load_state_dict=x.load_state_dict) if is_position(x) else x
            for name, x in others.items()
        }
        self._stager = build("stager", config.stager)
        # What is only loaded from is neither locked nor written to, and no signal is answered.
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

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save at multiples of the interval, at the last step, and when the ranks have agreed to leave."""
        if self.config.load_only:
            return False
        first = curr_step == 1 and self.config.enable_first_step_checkpoint
        if not (self._checkpointer.should_save(curr_step) or first or last_step):
            return False
        export = last_step and self.config.last_save_model_only
        if export and self.config.last_save_in_hf:
            self._checkpointer.wait()
            self._export_hf(curr_step)
            return True
        state = self._exported() if export else {**self._others, **self.states[base.MODEL].state_dict()}
        # torchtitan wants a checkpoint of these, whatever the tier wants
        self._checkpointer.save(curr_step, state, everywhere=first or last_step)
        self.save_future = self.save_future or Future()
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Wait until the copy of the last save is complete, before the optimizer writes what it is made of."""
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
        """Restore a checkpoint of the folder, or what ``initial_load_path`` says if there is none."""
        self.maybe_wait_for_saving()
        of_titan, own = agreed(lambda: _steps_in(self.folder))
        there = {**of_titan, **own}
        if self._has_tier and step == -1 and max(of_titan, default=-1) <= max(own, default=-1):
            return self._restore(None, model_only=False) or self._load_initial()
        if step != -1 and step not in there:
            raise _NotFoundError(
                f"--checkpoint.load_step={step} was not found in {self.folder}, which has "
                f"{', '.join(map(str, sorted(there))) or 'no checkpoint'}."
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
                raise ConfigError("checkpoint.initial_load_in_hf needs a state dict adapter, and a path to load from.")
        if path is None:
            return False
        if not filesystem.isdir(path):
            raise ConfigError(f"checkpoint.initial_load_path={path} is no directory.")
        if in_hf:
            model = self.states[base.MODEL].state_dict()
            dcp.CheckpointManager.dcp_load(self, model, path, True, self.config.initial_load_in_hf_quantized)
            return True
        return self._restore(path, self.config.initial_load_model_only)

    def _restore(self, source: str | None, model_only: bool) -> bool:
        """Restore ``source``, or the newest of folder and tier, but for excluded entries; return whether one exists."""
        excluded = self.config.exclude_from_loading
        if unknown := [name for name in excluded if name not in self._others]:
            raise ConfigError(f"checkpoint.exclude_from_loading has {unknown[0]!r}, of which there is no state.")
        state = {} if model_only else {name: x for name, x in self._others.items() if name not in excluded}
        state |= self.states[base.MODEL].state_dict()
        try:
            if self._checkpointer.restore(state, source) is None:
                return False
        except CheckpointError as error:
            if "has no entry 'optimizer'" not in str(error):
                raise
            raise CheckpointError(f"{error}\n{_MODEL_ALONE}") from error
        self.states[base.MODEL].load_state_dict(state)  # for parts that save otherwise than they are
        return True

    def _exported(self) -> dict[str, Any]:
        found, dtype = dict(self.states[base.MODEL].state_dict()), getattr(torch, self.config.export_dtype)
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found[name] = value.detach().to(dtype)
        return found

    def _export_hf(self, step: int) -> None:
        """Write the model as Hugging Face has it, into ``step-N-hf``, which is complete or absent."""
        final = os.path.join(self.folder, f"step-{step}-hf")
        beside = agreed(lambda: written.begin(final))

        def commit() -> None:
            shutil.rmtree(os.path.join(beside, "sharded"), ignore_errors=True)
            written.commit(beside, final)

        dcp.CheckpointManager.dcp_save(self, self._exported(), beside, dcp.AsyncMode.DISABLED, to_hf=True)
        if dist.is_initialized():
            dist.barrier()
        agreed(commit)


def _steps_in(folder: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the paths of checkpoints by step: those of torchtitan's own managers, and those of stagereg."""
    plain, own = dict[int, str](), dict[int, str]()
    for name in filesystem.listdir(folder) if filesystem.isdir(folder) else ():
        path = filesystem.join(folder, name)
        if (step := step_of(name)) is not None:
            if filesystem.isfile(filesystem.join(path, MANIFEST)):
                own[step] = path
            elif filesystem.isfile(filesystem.join(path, METADATA)):
                plain[step] = path
    return plain, own
