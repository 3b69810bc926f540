"""Checks of a restore: options that it replaces, and a newer checkpoint of the run than the one that is named."""

from __future__ import annotations

import logging
import os

import stagereg.extensions.diagnostics.replaced as replaced
from stagereg.base.command import command_key
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, RestoreExtension, RestoreRequest
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.extensions.diagnostics.first_save import only_looks

_log = logging.getLogger(__name__)


class RestoreChecks(RestoreExtension):
    def __init__(self) -> None:
        self._before: replaced.Options | None = None  # of the state, on rank 0

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        if self._before is None and request.ranks.rank == 0:
            self._before = replaced.options_of(request.state)

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if candidate is None or candidate.checkpoint is None or request.ranks.rank != 0:
            return
        replaced.warn_of_replaced(request.state, self._before)
        if request.own and request.is_path:
            _warn_of_newer(candidate.checkpoint, request.store)


@only_looks
def _warn_of_newer(restored: Checkpoint, store: CheckpointStore) -> None:
    """Log that the run has a newer checkpoint than the one that ``resume`` names, as in a command started again.

    A run that counts its steps from 0 is known by its command.
    """
    newest = store.latest()
    if newest is None:
        return
    ahead = newest.manifest.step - restored.manifest.step
    own = os.path.realpath(open_parent_store(restored.path).root) == os.path.realpath(store.root)
    if ahead > 0 or (not own and newest.manifest.command == command_key()):
        _log.warning(
            "stagereg: resumed from step %d, in %s, as the option names it, although this run's directory has %s%s. "
            "The checkpoints that this run saves replace %s, and delete it when they are as many as are kept. If this "
            "command was started again to continue, stop it now, and start it with %s.",
            *(restored.manifest.step, restored.path, newest.path, f", {ahead} steps ahead" * (ahead > 0)),
            *(newest.name, option("checkpoint.resume", "auto")),
        )


EXTENSIONS: tuple[type[RestoreExtension], ...] = (RestoreChecks,)
"""What every restore has of this extension."""
