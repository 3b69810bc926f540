"""``prove``: start ``stagereg prove`` for the checkpoints of this run, in a separate process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from typing import Any

from stagereg.base.small_files import open_regular
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register

_OF_RANKS = re.compile(r"(STAGEREG|TORCHELASTIC|MASTER)_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$")


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
        self, host: str | None = None, after_run: bool = True, timeout: timedelta = timedelta(minutes=20)
    ) -> None:
        if not (host is None or (isinstance(host, str) and re.fullmatch(r"\w[\w.@-]*", host))):
            raise ConfigError(f"on_commit/prove: host must be the name of a host, not {host!r:.100}")
        ranks, here = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
        started = "TORCHELASTIC_RUN_ID" in os.environ or ranks != (here if "STAGEREG_LAUNCHER" in os.environ else "1")
        hydra = getattr(sys.modules.get("hydra.core.hydra_config"), "HydraConfig", None)
        job = hydra.get() if hydra is not None and hydra.initialized() else None
        started |= job is not None and str(job.mode).endswith("MULTIRUN")
        if started or "multiprocessing" in "".join(sys.orig_argv[1:3]):
            raise ConfigError(
                "on_commit/prove cannot repeat the command of this process: torchrun, multiprocessing, a sweep or "
                "several machines started it. Run `stagereg prove DIR --follow --after-run -- COMMAND` instead."
            )
        self._host, self._folder = host, os.getcwd() if job is None else job.runtime.cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._options = ["--follow", *["--after-run"] * after_run, "--timeout", f"{timeout.total_seconds():g}"]

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Start the process after the first checkpoint. Later, raise ``CheckpointError`` if it has failed."""
        root = str(checkpoint.path).rpartition("/")[0]
        log = os.devnull if (is_remote := "://" in root) else f"{root}/proofs.log"
        if self._process is not None:
            if self._process.poll():
                raise CheckpointError(f"`stagereg prove` exited with code {self._process.returncode}. See {log}")
            return
        options = "prove", root, *self._options, "--", sys.executable, *sys.orig_argv[1:]
        command = [sys.executable, "-u", "-m", "stagereg", *options]
        if self._host is not None:
            command = ["ssh", self._host, f"cd {shlex.quote(self._folder)} && exec {shlex.join(command)}"]
        how: Any = {"cwd": self._folder, "stdin": subprocess.DEVNULL, "start_new_session": True}
        how["env"] = {name: value for name, value in os.environ.items() if not _OF_RANKS.match(name)}
        with open(log, "ab", opener=None if is_remote else open_regular) as out, contextlib.suppress(BlockingIOError):
            if not is_remote:  # the process has the lock until it exits, and also proves a restarted run
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = subprocess.Popen(command, stdout=out, stderr=out, **how)
