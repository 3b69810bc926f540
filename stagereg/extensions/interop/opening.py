"""Open a checkpoint for evaluation and model surgery: :func:`open_checkpoint`.

A corrupt checkpoint is rejected before torch is imported, since the import takes more time and memory than the check.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.store.located import newest
from stagereg.errors import CheckpointError
from stagereg.extensions.interop.refusing import refusing

if TYPE_CHECKING:
    from stagereg.extensions.interop.opened import OpenCheckpoint

_log = logging.getLogger(__name__)


def open_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> OpenCheckpoint:
    """Open a checkpoint to read its tensors by name.

    Args:
        path: a path or URL of one checkpoint, which ``torch.distributed.checkpoint`` may have written, or of a
            checkpoint directory. A directory opens its newest valid checkpoint; newer corrupt checkpoints log warnings.
        verify: whether to read every file first and verify its checksum. Otherwise only the checksum of the index and
            the sizes of the files are verified.

    Raises:
        CheckpointError: no checkpoint exists, or the checkpoint is incomplete, corrupt or in another format; or
            ``verify`` is set, but the checkpoint has no checksums, because plain torch wrote it.
        ConfigError: the URL is not supported, or a package for its protocol is not installed.

    Example::

        with stagereg.open_checkpoint("runs/gpt") as checkpoint:
            print(checkpoint.step, checkpoint.entries)
            weight = checkpoint["model.0.weight"]
            model.load_state_dict(checkpoint.entry("model"))
    """
    text = "%s is corrupt and was skipped: %s"
    opened = open_newest(os.fspath(path), verify, lambda each: _log.warning(text, each.path, each))
    if verify and not opened.verified:
        opened.close()
        raise CheckpointError(f"Cannot verify {opened.path}: plain torch wrote it, without checksums.")
    return opened


def open_newest(path: str, verify: bool, on_skip: Callable[[VerificationResult], object]) -> OpenCheckpoint:
    """Open a checkpoint like :func:`open_checkpoint`, but ignore ``verify`` if plain torch wrote the checkpoint.

    ``on_skip`` is called with each corrupt checkpoint that is newer than the opened checkpoint.
    """
    with refusing(path), ExitStack() as reading:
        chosen, skipped = newest(path, verify, reading)
        for each in skipped:
            on_skip(each)
        from stagereg.extensions.interop.opened import open_found  # imports torch

        return open_found(chosen, verify, reading)
