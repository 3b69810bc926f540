"""Makes the Hugging Face ``Trainer`` save and resume with stagereg: ``Trainer(..., callbacks=[StageregCallback()])``.

A plain callback cannot restore, because the Trainer calls it only after it has computed the data position. So
:class:`StageregCallback` finds the Trainer that is being constructed, and changes its class: it inserts
:class:`_StageregTrainer` before ``Trainer`` in the method resolution order. Methods of the user's subclass still run,
and their ``super()`` calls reach :class:`_StageregTrainer`.

A restore has two parts, because ``train`` needs the step before it creates the optimizer. First, all files are
verified, and the entry ``trainer`` is written as ``trainer_state.json`` into a temporary folder, from which the Trainer
resumes. Later, when model, optimizer and scheduler exist, they are restored from the same checkpoint. The states of the
random number generators are then written to that folder. The Trainer loads them after it has skipped used batches.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from types import FrameType
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback, __version__
from transformers.integrations import integration_utils
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

import stagereg.integrations.written as written
from stagereg.assembly import Checkpointer
from stagereg.base.spec import refuse_unknown
from stagereg.errors import ConfigError, InstallationError
from stagereg.integrations.agreed import agreed, expect_known
from stagereg.integrations.proofs import is_proof

__all__ = ["StageregCallback"]

_WRITTEN_FOR = "==5.23.*"
_CALLED = {"_save_rng_state": ["self", "output_dir"], "save_model": ["self", "output_dir", "_internal_call"]}


class StageregCallback(TrainerCallback):
    """Makes the Trainer save and resume with :class:`stagereg.Checkpointer`.

    ``save_strategy`` and ``save_steps`` select the steps to save. The training loop waits only for the staged copy. A
    background thread writes and commits the checkpoint; the end of ``train`` waits for it. If a save fails, the next
    save or the end of ``train`` raises the error. ``train(resume_from_checkpoint=True)`` resumes from the newest valid
    checkpoint, or starts from scratch without one. A path may be a checkpoint of stagereg, or a directory
    ``checkpoint-N`` of the Trainer. After SIGTERM or SIGUSR1, all ranks save the same step, and ``train`` raises
    :class:`stagereg.Preempted`, which ends the process with exit code 75.

    At the end of ``train``, files for ``from_pretrained`` are written into ``output_dir``. If ``metric_for_best_model``
    is set, each save with the best evaluation so far also writes such files into ``output_dir/best-STEP``. Old
    directories of this kind are deleted only if ``keep`` is a number, not a rule.

    A ``tier`` (local copies) receives the steps that ``tier.every`` selects, and all saves of the Trainer. A save to
    the tier alone does not call other callbacks. A resume uses the newest checkpoint of the tier and ``dir``.

    Args:
        checkpoint_options: options of :class:`stagereg.Checkpointer`, the same on all ranks. The default of ``dir`` is
            ``output_dir/checkpoints``. The default of ``keep`` is ``save_total_limit``; ``None`` retains all. ``every``
            requires ``save_strategy="no"``. ``save_last``: whether to also save the last step of ``train``.

    Raises:
        ConfigError: an option is unknown or duplicates an argument of the Trainer. The constructor of a Trainer raises
            this error if the Trainer uses an unsupported feature.
        InstallationError: this version of transformers is not supported.
    """

    def __init__(self, **checkpoint_options: Any) -> None:
        if "resume" in checkpoint_options:
            raise ConfigError("StageregCallback does not take resume. Use trainer.train(resume_from_checkpoint=...).")
        refuse_unknown("StageregCallback", checkpoint_options, Checkpointer)
        Checkpointer.check_options(checkpoint_options)
        ours = {name: value for name, value in vars(_StageregTrainer).items() if inspect.isfunction(value)}
        overridden = {name: list(inspect.signature(value).parameters) for name, value in ours.items()}
        expect_known("transformers", _WRITTEN_FOR, Trainer, {**overridden, **_CALLED})
        self._options = checkpoint_options
        self._run: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Attach to a Trainer that was created without this callback. Call it on all ranks, before training."""
        if isinstance(trainer, _StageregTrainer):
            raise ConfigError("This Trainer already has a StageregCallback.")
        _refuse(trainer, self._options)
        kind = type(trainer)
        bases = (_StageregTrainer,) if kind is Trainer else (kind, _StageregTrainer)
        trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
        self._run = trainer.stagereg = _Run(trainer, self._options)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)

    def on_init_end(self, *_: Any, **__: Any) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back  # Search the call stack, because the Trainer does not pass itself to callbacks.
        if frame is None:
            raise ConfigError("No Trainer is being constructed. Call StageregCallback().attach(trainer).")
        self.attach(frame.f_locals["self"])

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._run is None:
            raise ConfigError("add_callback is too late. Use Trainer(callbacks=[...]) or callback.attach(trainer).")
        if not self._run.restored:
            raise InstallationError(
                f"The Trainer of transformers {__version__} did not load the optimizer. Run: pip install "
                f"'transformers{_WRITTEN_FOR}'"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpointer = self._run.checkpointer
        if checkpointer.should_save(state.global_step) and checkpointer.goes_everywhere(state.global_step):
            control.should_save = True
            if checkpointer.preemption is not None and checkpointer.preemption.agreed is not None:
                control.should_evaluate = False  # An evaluation may take longer than the grace period.

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_training_stop and self._run.saves_last:
            control.should_save |= self._run.checkpointer.saved != state.global_step


class _Run:
    """Saves and restores the state of one Trainer. All methods are called on all ranks."""

    checkpointer: Checkpointer

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        args, limit = trainer.args, trainer.args.save_total_limit
        keep = limit if limit is not None and limit > 0 else sys.maxsize
        usual = {"dir": os.path.join(args.output_dir, "checkpoints"), "every": sys.maxsize, "keep": keep}
        self._options = {**usual, **options, "save_last": False}
        self._trainer = trainer
        self.saves_last = options.get("save_last", True) and (args.save_strategy != "no" or "every" in options)
        self.folder = ""
        self.restored = True

    def train(self, resume: Any, then: Any) -> Any:
        """Open a checkpointer, and call ``then``, which trains, with the path from which the Trainer resumes."""
        options, output_dir = self._options, self._trainer.args.output_dir
        if resume and resume is not True:
            resume = os.fspath(resume)
            options = {**options, "resume": resume}
        with tempfile.TemporaryDirectory(prefix="stagereg-") as self.folder, Checkpointer(**options) as checkpointer:
            self.checkpointer = checkpointer
            if is_proof():
                resume = bool(resume)
                for kind in set(integration_utils.INTEGRATION_TO_CALLBACK.values()):
                    self._trainer.remove_callback(kind)  # so that no logger writes
            if resume is True or (resume and not os.path.isfile(os.path.join(resume, TRAINER_STATE_NAME))):
                os.makedirs(output_dir, exist_ok=True)
                # Prefer checkpoints of stagereg to older ones that the Trainer wrote without this callback.
                resume = self.folder if self._restore_trainer() else get_last_checkpoint(output_dir)
            output = then(resume or None)
            if not is_proof():
                self._trainer.save_model(output_dir, _internal_call=True)
        return output

    def _restore_trainer(self) -> bool:
        """Verify the checkpoint to resume from, and write its Trainer state to a file. Return False if none exists."""
        state = {"trainer": ""}
        if self.checkpointer.restore(state) is None:
            return False
        with open(os.path.join(self.folder, TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
            file.write(state["trainer"])
        self.restored = False
        return True

    def restore(self) -> None:
        """Load model, optimizer and other objects, which exist now, from the checkpoint verified before."""
        checkpointer = self.checkpointer
        checkpointer.resume = str(checkpointer.restored)
        checkpointer.restore_options = dataclasses.replace(checkpointer.restore_options, verify="fast")
        checkpointer.restore(self._objects())
        self._trainer._save_rng_state(self.folder)
        self.restored = True

    def save(self) -> None:
        state = self._trainer.state
        if is_proof():
            return
        if state.best_global_step == state.global_step:
            self._write_best(state.global_step)
        self._save()

    def save_to_tier(self) -> None:
        """Save the step to the tier only, unless ``every`` selects it and the Trainer has therefore saved it."""
        if not self.checkpointer.goes_everywhere(self._trainer.state.global_step):
            self._save(everywhere=False)

    def _save(self, everywhere: bool = True) -> None:
        """Save to the tier. With ``everywhere``, also save to the checkpoint directory, regardless of ``every``."""
        state = {**self._objects(), "trainer": self._trainer_state()}
        self.checkpointer.save(self._trainer.state.global_step, state, everywhere)

    def _objects(self) -> dict[str, Any]:
        trainer = self._trainer
        optimizer = trainer.optimizer
        objects = {
            "model": trainer.accelerator.unwrap_model(trainer.model_wrapped),
            "optimizer": optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
        }
        return {name: value for name, value in objects.items() if value is not None}

    def _trainer_state(self) -> str:
        state = self._trainer.state
        callbacks = defaultdict(list)
        for each in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(each, ExportableState):
                callbacks[type(each).__name__].append(each.state())
        state.stateful_callbacks = {name: each if len(each) > 1 else each[0] for name, each in callbacks.items()}
        on_each_rank = ("is_local_process_zero", "is_world_process_zero")  # These differ by rank.
        return json.dumps({name: x for name, x in dataclasses.asdict(state).items() if name not in on_each_rank})

    def _write_best(self, step: int) -> None:
        """Write the model's files atomically to ``best-STEP``, and delete older directories that are no longer used."""
        trainer = self._trainer
        folder = trainer.args.output_dir
        path = os.path.join(folder, f"best-{step}")
        hidden = agreed(lambda: written.begin(path))
        trainer.save_model(hidden, _internal_call=True)
        trainer.state.best_model_checkpoint = path
        if not trainer.args.should_save:
            return
        written.commit(hidden, path)
        steps = sorted(int(found[1]) for each in os.listdir(folder) if (found := re.fullmatch(r"best-(\d+)", each)))
        # Retain one best-STEP for each retained and each pending checkpoint: all may refer to different ones.
        most = self._options["keep"] if isinstance(self._options["keep"], int) else sys.maxsize
        kept = [each for each in steps if each <= step][-most - 3 :]
        for old in set(steps).difference(kept):
            written.remove(os.path.join(folder, f"best-{old}"))


class _StageregTrainer(Trainer):
    """Overrides checkpoint methods of ``Trainer``. :class:`StageregCallback` makes it a base of a Trainer's class."""

    stagereg: _Run

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        if trial is not None or self.hp_search_backend is not None:
            raise ConfigError(
                "StageregCallback does not support hyperparameter_search, because all trials would share one directory."
            )
        train = super().train
        return self.stagereg.train(resume_from_checkpoint, lambda path: train(path, None, ignore_keys_for_eval))

    # fmt: off
    def _init_training_state(self, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any,
                             resume_from_checkpoint: Any, trial: Any) -> Any:
        # fmt: on
        given = max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        trained = super()._init_training_state(*given)
        # If max_steps is reached, train no epoch. Otherwise a run that ended within an epoch trains one more step.
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else trained

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if resume_from_checkpoint != self.stagereg.folder:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint == self.stagereg.folder:
            self.stagereg.restore()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    # fmt: off
    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any,
                                 ignore_keys_for_eval: Any, start_time: Any, learning_rate: Any = None) -> None:
        # fmt: on
        given = tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time
        super()._maybe_log_save_evaluate(*given, learning_rate=learning_rate)
        self.stagereg.save_to_tier()  # Save after all callbacks have processed the step.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        self.stagereg.save()

    def _load_best_model(self) -> None:
        self.stagereg.checkpointer.wait()  # The files of the best model exist only after all ranks have saved.
        super()._load_best_model()


def _refuse(trainer: Any, options: dict[str, Any]) -> None:
    args = trainer.args
    strategy, limit = args.save_strategy, args.save_total_limit
    refused = {
        "DeepSpeed writes its own checkpoints": trainer.is_deepspeed_enabled,
        "FSDP through the Trainer is not tested": trainer.is_fsdp_enabled,
        "a model sharded by from_pretrained is not tested": (
            getattr(trainer, "is_distributed_loading_by_transformers", False)
        ),
        "a quantized model is not tested": getattr(trainer.model, "is_quantized", False),
        "save_only_model=True omits the state that a resume requires": args.save_only_model,
        "enable_jit_checkpoint=True also handles SIGTERM. Remove it": args.enable_jit_checkpoint,
        "auto_find_batch_size=True restarts training on one rank only. Remove it": args.auto_find_batch_size,
        "push_to_hub=True pushes each save. Set hub_strategy='end'": args.push_to_hub and args.hub_strategy != "end",
        f"every and save_strategy='{strategy}' both decide when to save. Set save_strategy='no', or remove every": (
            "every" in options and strategy != "no"
        ),
        "keep and save_total_limit both limit the checkpoints. Set only one": "keep" in options and limit is not None,
    }
    for reason, applies in refused.items():
        if applies:
            raise ConfigError(f"StageregCallback cannot save this Trainer's checkpoints: {reason}.")
