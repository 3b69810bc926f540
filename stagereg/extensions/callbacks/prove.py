"""``prove``: start ``stagereg prove`` for the checkpoints of this run, in a separate process."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys

from stagereg.base.small_files import open_regular
from stagereg.errors import ConfigError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register


@register("on_commit", "prove")
class StartProofs:
    """Starts ``stagereg prove --follow`` with the command line of this run, once, in the background.

    The process proves each checkpoint whose steps are recorded, and outlives the run. Its output is in the file
    ``proofs.log`` of the checkpoint directory.

    Args:
        host: a spare machine that sees the same files, reached by ``ssh`` without a password; ``None``: this machine.
        after_run: whether the proofs begin only after the run has released the directory.
        timeout: the time after which one proof is ended.

    Raises:
        ConfigError: ``host`` is not the name of a host, or this process is not a program that can be started again.
    """

    def __init__(
        self,
        host: str | None = None,
        after_run: bool = True,
        timeout: datetime.timedelta = datetime.timedelta(minutes=20),
    ) -> None:
        if host is not None and not re.fullmatch(r"\w[\w.@-]*", host):
            raise ConfigError(f"on_commit/prove: host must be the name of a host, not {host!r:.100}")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError(
                "on_commit/prove cannot repeat torchrun's command. Run `stagereg prove --follow` instead."
            )
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        wait = ["--after-run"] * after_run
        self._options = ["--follow", *wait, "--timeout", f"{timeout.total_seconds():g}"]

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Start the process after the first checkpoint."""
        if self._process is not None:
            return
        root = str(checkpoint.path).rpartition("/")[0]
        command = [sys.executable, "-m", "stagereg", "prove", root, *self._options, "--", *sys.orig_argv]
        if self._host is not None:
            command = ["ssh", self._host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"]
        log = os.devnull if "://" in root else f"{root}/proofs.log"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.open(log, flags) if log == os.devnull else open_regular(log, flags)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        finally:
            os.close(file)
