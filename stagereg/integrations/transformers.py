"""The Hugging Face ``Trainer`` saves and resumes with stagereg: ``Trainer(..., callbacks=[StageregCallback()])``.

A callback of the Trainer cannot restore: its first event comes after the position in the data is computed. So
:class:`StageregCallback` finds the Trainer that is being constructed, and puts :class:`_StageregTrainer` right above
``Trainer`` in the bases of its class: what a subclass overrides still runs, and its ``super()`` leads here.

Restoring has two parts, since ``train`` needs the step before it makes the optimizer. First all files are checked, and
the entry ``trainer`` alone is restored and written as ``trainer_state.json`` into a temporary folder, which is what
the Trainer resumes from. When model, optimizer and schedule are there, they are restored from the same checkpoint, and
the Trainer writes the random number generators into that folder, to set them again when it has skipped the data.
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
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

import stagereg.integrations.written as written
from stagereg.assembly import Checkpointer
from stagereg.base.spec import refuse_unknown
from stagereg.errors import ConfigError, InstallationError
from stagereg.integrations.agreed import agreed, expect_known

__all__ = ["StageregCallback"]

_WRITTEN_FOR = "==5.23.*"
_CALLED = {"_save_rng_state": ["self", "output_dir"], "save_model": ["self", "output_dir", "_internal_call"]}


class StageregCallback(TrainerCallback):
    """Has the Trainer save and resume with :class:`stagereg.Checkpointer`.

    Saves come when ``save_strategy`` and ``save_steps`` say so. The loop waits for a copy at most; a background thread
    writes and commits, and what fails there is raised by the next save, or at the end of ``train``, which waits for the
    last one. ``train(resume_from_checkpoint=True)`` goes on from the newest undamaged checkpoint, and starts from
    scratch if there is none; a path may be a checkpoint of stagereg, or a directory ``checkpoint-N`` of the Trainer.
    After SIGTERM or SIGUSR1 all ranks save the same step, and ``train`` raises :class:`stagereg.Preempted`, which ends
    the process with exit code 75.

    What ``from_pretrained`` reads is written into ``output_dir`` at the end of ``train``, and, where
    ``metric_for_best_model`` is set, into ``output_dir/best-STEP`` at each save with the best evaluation so far.
    A policy as ``keep`` deletes none of these.

    A ``tier`` gets a step whenever ``tier.every`` says so, and what the Trainer saves. Saves that it gets alone are no
    events of callbacks. ``train(resume_from_checkpoint=True)`` goes on from the newest of both.

    Args:
        checkpoint_options: those of :class:`stagereg.Checkpointer`, the same on all ranks. ``dir`` is
            ``output_dir/checkpoints`` if not given, ``keep`` is ``save_total_limit``, or all checkpoints if that is
            ``None``. ``every`` wants ``save_strategy="no"``. ``save_last``: also save the last step of
            ``train``.

    Raises:
        ConfigError: an option is unknown, or says what an argument of the Trainer says; the Trainer's constructor
            raises it if the Trainer was given what this cannot keep.
        InstallationError: the Trainer of this version of transformers has other methods than those overridden here.
    """

    def __init__(self, **checkpoint_options: Any) -> None:
        if "resume" in checkpoint_options:
            raise ConfigError("What to resume from is the Trainer's: trainer.train(resume_from_checkpoint=...).")
        refuse_unknown("StageregCallback", checkpoint_options, Checkpointer)
        Checkpointer.check_options(checkpoint_options)
        ours = {name: value for name, value in vars(_StageregTrainer).items() if inspect.isfunction(value)}
        overridden = {name: list(inspect.signature(value).parameters) for name, value in ours.items()}
        expect_known("transformers", _WRITTEN_FOR, Trainer, {**overridden, **_CALLED})
        self._options = checkpoint_options
        self._run: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Take over the checkpoints of a Trainer that was made without this callback; on all ranks, before training."""
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
            frame = frame.f_back  # the Trainer gives itself to no callback
        if frame is None:
            raise ConfigError("No Trainer is being constructed: call StageregCallback().attach(trainer).")
        self.attach(frame.f_locals["self"])

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._run is None:
            raise ConfigError("add_callback is too late. Use Trainer(callbacks=[...]) or callback.attach(trainer).")
        if not self._run.restored:
            raise InstallationError(
                f"transformers {__version__} has not loaded the optimizer: 'transformers{_WRITTEN_FOR}' does."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpointer = self._run.checkpointer
        if checkpointer.should_save(state.global_step) and checkpointer.goes_everywhere(state.global_step):
            control.should_save = True
            if checkpointer.preemption is not None and checkpointer.preemption.agreed is not None:
                control.should_evaluate = False  # there may be no time for it

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_training_stop and self._run.saves_last:
            control.should_save |= self._run.checkpointer.saved != state.global_step


class _Run:
    """What one Trainer saves and restores, and where. Its methods are called on all ranks."""

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
        """Open the checkpointer, restore what ``resume`` says, and call ``then`` with what the Trainer resumes from."""
        options, output_dir = self._options, self._trainer.args.output_dir
        if resume and resume is not True:
            resume = os.fspath(resume)
            options = {**options, "resume": resume}
        with tempfile.TemporaryDirectory(prefix="stagereg-") as self.folder, Checkpointer(**options) as checkpointer:
            self.checkpointer = checkpointer
            if resume is True or (resume and not os.path.isfile(os.path.join(resume, TRAINER_STATE_NAME))):
                os.makedirs(output_dir, exist_ok=True)
                # What the Trainer wrote before it had this callback comes after what stagereg has.
                resume = self.folder if self._restore_trainer() else get_last_checkpoint(output_dir)
            output = then(resume or None)
            self._trainer.save_model(output_dir, _internal_call=True)
        return output

    def _restore_trainer(self) -> bool:
        """Check the files of a checkpoint, and write the Trainer's own state where ``train`` reads it."""
        state = {"trainer": ""}
        if self.checkpointer.restore(state) is None:
            return False
        with open(os.path.join(self.folder, TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
            file.write(state["trainer"])
        self.restored = False
        return True

    def restore(self) -> None:
        """Load the objects, which are all there now, from the checkpoint whose files were checked."""
        checkpointer = self.checkpointer
        checkpointer.resume = str(checkpointer.restored)
        checkpointer.restore_options = dataclasses.replace(checkpointer.restore_options, verify="fast")
        checkpointer.restore(self._objects())
        self._trainer._save_rng_state(self.folder)
        self.restored = True

    def save(self) -> None:
        state = self._trainer.state
        if state.best_global_step == state.global_step:
            self._write_best(state.global_step)
        self._save()

    def save_near(self) -> None:
        """Save the step in the tier, where that is due there alone, and the Trainer has not saved it."""
        if not self.checkpointer.goes_everywhere(self._trainer.state.global_step):
            self._save(everywhere=False)

    def _save(self, everywhere: bool = True) -> None:
        """Save; by default in the checkpoint directory, as the Trainer wants it, whatever the tier wants."""
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
        on_each_rank = ("is_local_process_zero", "is_world_process_zero")  # what the Trainer sets there
        return json.dumps({name: x for name, x in dataclasses.asdict(state).items() if name not in on_each_rank})

    def _write_best(self, step: int) -> None:
        """Write the model's files beside and rename, and delete those that no checkpoint refers to."""
        trainer = self._trainer
        folder = trainer.args.output_dir
        path = os.path.join(folder, f"best-{step}")
        beside = agreed(lambda: written.begin(path))
        trainer.save_model(beside, _internal_call=True)
        trainer.state.best_model_checkpoint = path
        if not trainer.args.should_save:
            return
        written.commit(beside, path)
        steps = sorted(int(found[1]) for each in os.listdir(folder) if (found := re.fullmatch(r"best-(\d+)", each)))
        # Each checkpoint that stays may refer to another one, and so may the two that are not complete yet.
        most = self._options["keep"] if isinstance(self._options["keep"], int) else sys.maxsize
        kept = [each for each in steps if each <= step][-most - 3 :]
        for old in set(steps).difference(kept):
            written.remove(os.path.join(folder, f"best-{old}"))


class _StageregTrainer(Trainer):
    """Overrides what ``Trainer`` does with checkpoints; :class:`StageregCallback` puts it into a Trainer's class."""

    stagereg: _Run

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        if trial is not None or self.hp_search_backend is not None:
            raise ConfigError("hyperparameter_search has a directory for each trial: use it without StageregCallback.")
        train = super().train
        return self.stagereg.train(resume_from_checkpoint, lambda path: train(path, None, ignore_keys_for_eval))

    # fmt: off
    def _init_training_state(self, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any,
                             resume_from_checkpoint: Any, trial: Any) -> Any:
        # fmt: on
        given = max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        trained = super()._init_training_state(*given)
        # Resuming a run that has ended within an epoch, the Trainer would train one step more.
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
        self.stagereg.save_near()  # when all callbacks have seen the step

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        self.stagereg.save()

    def _load_best_model(self) -> None:
        self.stagereg.checkpointer.wait()  # until all ranks have saved, so that the best model's files are there
        super()._load_best_model()


def _refuse(trainer: Any, options: dict[str, Any]) -> None:
    args = trainer.args
    strategy, limit = args.save_strategy, args.save_total_limit
    refused = {
        "DeepSpeed writes its own checkpoints": trainer.is_deepspeed_enabled,
        "FSDP by the Trainer has not been tried": trainer.is_fsdp_enabled,
        "a model sharded by from_pretrained has not been tried": (
            getattr(trainer, "is_distributed_loading_by_transformers", False)
        ),
        "a quantized model has not been tried": getattr(trainer.model, "is_quantized", False),
        "save_only_model=True leaves nothing to resume from": args.save_only_model,
        "enable_jit_checkpoint=True catches SIGTERM as well: leave it out": args.enable_jit_checkpoint,
        "auto_find_batch_size=True begins again on one rank alone: leave it out": args.auto_find_batch_size,
        "push_to_hub=True pushes each save: set hub_strategy='end'": args.push_to_hub and args.hub_strategy != "end",
        f"every and save_strategy='{strategy}' both say when to save: set save_strategy='no', or leave out every": (
            "every" in options and strategy != "no"
        ),
        "keep and save_total_limit both say how many to keep": "keep" in options and limit is not None,
    }
    for reason, applies in refused.items():
        if applies:
            raise ConfigError(f"StageregCallback cannot save this Trainer's checkpoints: {reason}.")
