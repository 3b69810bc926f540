"""The tier of a ``fit``: each ``tier.every`` global steps what ``trainer.save_checkpoint`` would save goes there alone.

A tier belongs to the directory of the first ``ModelCheckpoint``, or else ``default_root_dir``: its run is noted in
``DIR/.stagereg/near``, by a :class:`stagereg.Checkpointer` whose own directory gets no checkpoint. No callback has a
part in its saves. They come when a batch is over; where a validation or the end of the epoch follows, when that is
over, since what goes on from before it would leave it out.

``fit(ckpt_path=)`` names a path. ``last*.ckpt`` in that directory stands for what was saved last, there or in the tier:
saves to a directory are counted, and each step has in it how many there were. Any other path is what is restored, and
the tier begins anew with the next save. Lightning finds ``"last"`` by its path, so ``DIR/last-near.ckpt`` is an empty
directory, older than any other, for a run whose steps are in the tier alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import __version__

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.options import Failure, Leave
from stagereg.errors import CheckpointError
from stagereg.integrations.lightning_resume import ResumedFit
from stagereg.integrations.named import NEAR, STORE, is_empty, number_of, split

_log = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint"  # the entry with what Lightning has collected, of rank 0
_SAVES = "stagereg_saves"  # in it: how many saves there were, by directory


class _Nothing(dict[str, Any]):
    """What Lightning takes for no checkpoint."""

    def __bool__(self) -> bool:
        return False


class FitTier:
    """The tier of one strategy, on one rank; what saves and loads is called on all ranks.

    Args:
        plugin: the ``StageregCheckpointIO``.
        tier: as given to it.
        parts: returns what this rank saves of a checkpoint: of what Lightning has collected, and its own.
    """

    def __init__(
        self, plugin: Any, tier: Any, parts: Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]
    ) -> None:
        self._plugin, self._tier, self._parts = plugin, tier, parts
        self._trainer: Any = None
        self._checkpointer: Checkpointer | None = None  # while ``fit`` runs
        self._directories: list[str] = []
        self._seen: int | None = None  # the global step last looked at
        self._near = False  # whether a step of the tier is gone on from
        self._stored: int | None = None  # that of the last checkpoint in one of the directories

    def open(self, trainer: Any) -> Checkpointer:
        """Return the checkpointer of this ``fit``, which has the tier."""
        if self._checkpointer is None:
            self._trainer, self._seen, self._stored, self._near = trainer, None, None, False
            own = [each.dirpath for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)]
            folders = own or [trainer.default_root_dir]
            self._directories = self._plugin.agree(lambda: [split(os.path.join(each, NEAR))[0] for each in folders])
            for each in self._directories:
                self._plugin.directory(each)
            options = self._plugin.build_options("stager", "restore", "failure", "replicas")
            how = {"every": sys.maxsize, "leave": Leave(grace=None, save_last=False), "tier": self._tier}
            self._checkpointer = Checkpointer(str(Path(self._directories[0], STORE, "near")), **how, **options)
        return self._checkpointer

    def follow(self, trainer: Any) -> None:
        """Save after what ends a batch, and an epoch, from :meth:`begin` on."""
        self.open(trainer)
        self._call_after(trainer.fit_loop.epoch_loop, False)
        self._call_after(trainer.fit_loop, True)

    def _call_after(self, loop: Any, ends_epoch: bool) -> None:
        def on_advance_end(*args: Any) -> None:
            type(loop).on_advance_end(loop, *args)
            self.end_step(ends_epoch)

        loop.on_advance_end = on_advance_end

    def begin(self) -> None:
        """Training begins, or goes on."""
        if self._trainer is not None:
            self._seen, loop = self._trainer.global_step, self._trainer.fit_loop.epoch_loop
            if self._near and loop.batch_progress.is_last_batch:  # with max_steps Lightning would end that epoch again
                loop.restarting = False

    def end_step(self, ends_epoch: bool = False) -> None:
        """Save, if the optimizer has made the step, it is due, and what follows it is over."""
        checkpointer, trainer = self._checkpointer, self._trainer
        if checkpointer is None or self._seen is None:
            return
        step, is_last = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if step != self._seen:
            self._seen = step
            checkpointer.due(step)
        if checkpointer.near_at == step and (ends_epoch or not is_last):
            rest, own = self._parts(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
            if trainer.is_global_zero:
                rest[_SAVES] = [[each, self._plugin.directory(each).begun] for each in self._directories]
                self._make_path()
                own = {**own, _CHECKPOINT: rest}
            checkpointer.save(step, own)

    def _make_path(self) -> None:
        path = Path(self._directories[0], NEAR)
        with contextlib.suppress(OSError):  # it is there; if it cannot be made, "last" wants a last.ckpt
            path.mkdir()
            os.utime(path, (0, 0))

    def stored(self, checkpoint: dict[str, Any], path: Any) -> None:
        """A checkpoint was saved to a path, and is complete when ``fit`` ends without an error."""
        certain = self._plugin.option("failure", Failure()).on_error == "raise"
        if certain and "optimizer_states" in checkpoint and split(path)[0] in self._directories:
            self._stored = checkpoint["global_step"]

    def load(self, trainer: Any, path: Any, resumed: ResumedFit, objects: dict[str, Any]) -> dict[str, Any] | None:
        """Go on from the newest step of the tier; ``None`` if that is not newer than what ``path`` stands for."""
        checkpointer = self.open(trainer)
        parent, name = self._plugin.agree(lambda: split(path))
        if parent not in self._directories or not name.startswith("last"):
            return None
        found: dict[str, Any] = {}
        try:
            step = resumed.load(lambda own: checkpointer.restore({**objects, **own, _CHECKPOINT: found}))
        except CheckpointError as error:
            if name == NEAR and self._plugin.agree(lambda: is_empty(parent)):
                raise
            _log.warning("stagereg: %s is gone on from, since the tier has nothing good: %s", path, error)
            step = None
        if step is not None:
            saves = dict(found.pop(_SAVES, ()))
            self._near = not self._is_newer(path, saves.get(parent, -1), found)
            if self._near:
                return found
        resumed.forget()
        if step is None and name == NEAR and self._plugin.agree(lambda: is_empty(parent)):
            _log.warning("stagereg: no machine has a complete step of this run: training starts from scratch")
            return _Nothing({"pytorch-lightning_version": __version__})
        return None

    def _is_newer(self, path: Any, saves: int, step: dict[str, Any]) -> bool:
        """Whether what is at ``path`` was saved after a step of the tier, before which there were ``saves``."""
        try:
            chosen = self._plugin.choose(path, verify=False)
        except CheckpointError:
            return False
        if chosen is None:
            return bool(TorchCheckpointIO().load_checkpoint(path)["global_step"] > step["global_step"])
        return number_of(Path(chosen)) > saves

    def close(self) -> None:
        """``fit`` has ended: let go of the tier, and delete what it has, if that was well and the store has as much."""
        checkpointer, self._checkpointer, error = self._checkpointer, None, sys.exc_info()
        self._trainer = self._seen = None
        if checkpointer is not None and error[0] is not None:
            checkpointer.__exit__(*error)
        elif checkpointer is not None:
            checkpointer.close(self._stored)
