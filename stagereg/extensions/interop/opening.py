"""Opening a checkpoint for evaluation and surgery: :func:`open_checkpoint`.

A damaged checkpoint is refused before torch is imported: the import takes more time and memory than the check.
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
    """Open a checkpoint to read tensors of it by name.

    Args:
        path: of a checkpoint, or of the directory that has them: then the newest complete one, past newer ones that are
            damaged, with a warning. A path or a URL; also a directory that ``torch.distributed.checkpoint.save`` wrote.
        verify: whether to read every file first and compare its checksum. Otherwise the index is compared with its
            checksum, and the sizes of the files with the manifest.

    Raises:
        CheckpointError: there is none, it is incomplete or damaged, or its index is refused; ``verify`` is set, and it
            is of plain torch, which writes no checksums; it is in another format, which the message names.
        ConfigError: it is a URL that cannot be read here.

    Example::

        with stagereg.open_checkpoint("runs/gpt") as checkpoint:
            print(checkpoint.step, checkpoint.entries)
            weight = checkpoint["model.0.weight"]
            model.load_state_dict(checkpoint.entry("model"))
    """
    opened = first_good(
        os.fspath(path), verify, lambda each: _log.warning("%s is corrupt and was skipped: %s", each.path, each)
    )
    if verify and not opened.verified:
        opened.close()
        raise CheckpointError(f"{opened.path} was written by plain torch, without checksums: nothing can be verified.")
    return opened


def first_good(path: str, verify: bool, passing_over: Callable[[VerificationResult], object]) -> OpenCheckpoint:
    """Open a checkpoint as :func:`open_checkpoint`, one of plain torch also with ``verify``. Raises as that.

    ``passing_over`` is called with each newer checkpoint that is not good.
    """
    with refusing(path), ExitStack() as reading:
        chosen, passed = newest(path, verify, reading)
        for each in passed:
            passing_over(each)
        from stagereg.extensions.interop.opened import open_found  # imports torch

        return open_found(chosen, verify, reading)
