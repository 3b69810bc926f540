"""``command``: run a shell command for each complete checkpoint.

A config can select this component only if the program allows it, ``stagereg.instantiate(cfg.checkpoint,
allow=["on_commit/command"])``. Otherwise the author of a config could run any command.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess

from stagereg.checkpoint.format.manifest import metrics_to_json
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register


@register("on_commit", "command")
class ShellCommand:
    """Runs a shell command, with ``$STAGEREG_STEP``, ``$STAGEREG_CHECKPOINT`` and ``$STAGEREG_METRICS`` (JSON) set.

    ``$STAGEREG_CHECKPOINT`` is the directory or the URL of the checkpoint. ``/bin/sh`` runs the command, with empty
    stdin and the run's stdout and stderr. A nonzero exit code is a failure. The program must allow this component.

    Args:
        command: the shell command.
        timeout: time after which the command and its child processes are killed.
    """

    def __init__(self, command: str, timeout: datetime.timedelta = datetime.timedelta(minutes=20)) -> None:
        if not isinstance(command, str) or not command.strip():
            raise ConfigError(f"on_commit/command: command must be a string with a command, not {command!r:.100}")
        self.command, self.timeout = command, timeout

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Run the command and wait until it exits.

        Raises:
            CheckpointError: the command exited with a nonzero code, or was killed after ``timeout``.
        """
        told = {"STAGEREG_STEP": str(checkpoint.step), "STAGEREG_CHECKPOINT": str(checkpoint.path)}
        told["STAGEREG_METRICS"] = json.dumps(metrics_to_json(checkpoint.metrics))
        # A separate process group, so that the command can be killed with its children.
        process = subprocess.Popen(
            self.command, shell=True, env={**os.environ, **told}, stdin=subprocess.DEVNULL, process_group=0
        )
        try:
            code = process.wait(self.timeout.total_seconds())
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            limit = f"{self.timeout.total_seconds():g} s"
            raise CheckpointError(f"{self.command!r:.100} was killed: it took longer than {limit} (timeout)") from None
        if code:
            raise CheckpointError(f"{self.command!r:.100} exited with code {code}")
