"""A user's training program as the search runs it: composed once to learn what it is, then run anew for each trial.

A program is a script of ``stagereg.main`` (or ``hydra.main``) with the overrides that hold for every run. Each run is a
fresh process in a session of its own, with bounded time, its output in a file; it and what it has started have ended
when :meth:`Program.run` comes back, however it comes back. What a run has measured is read by others, from its files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagereg.crash_report import signal_name
from stagereg.errors import ConfigError
from stagereg.launch.command_line import quoted

__all__ = ["LOG", "Composed", "Ended", "Program"]

LOG = "output.log"
"""What a run has printed, in its directory."""
_COMPOSE_S = 120.0
"""Seconds that composing may take: it imports torch, and whatever the program imports."""
_GRACE_S = 10.0
"""Seconds that a run has to end after it was interrupted, before it is killed."""
_LINES = 12
"""Lines of a program's output in an error."""


@dataclass(frozen=True)
class Composed:
    """The config of a program as it is without a search.

    Attributes:
        config: plain containers, interpolations as they are written.
        choices: which option each config group has, such as ``{"stager": "pinned_cached"}``.
    """

    config: dict[str, Any]
    choices: dict[str, str]

    def has(self, key: str) -> bool:
        """Whether a key with dots, such as ``"checkpoint.every"``, is in the config."""
        return self._found(key)[0]

    def get(self, key: str) -> Any:
        """The value under a key with dots, ``None`` where there is none."""
        return self._found(key)[1]

    def keys(self) -> list[str]:
        """All keys there are, with dots, and the groups."""
        return [*self.choices, *_keys("", self.config)]

    def _found(self, key: str) -> tuple[bool, Any]:
        node: Any = self.config
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return False, None
            node = node[part]
        return True, node


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        error: why it is worth nothing, one line; empty if it ended well.
        began: seconds since the epoch.
        seconds: how long it took.
    """

    error: str
    began: float
    seconds: float


@dataclass(frozen=True)
class Program:
    """A script and what every run of it is given.

    Attributes:
        script: its path, as the user wrote it.
        flags: Hydra's own, such as ``("--config-name", "big")``.
        overrides: of every run.
    """

    script: str
    flags: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The script's name without its suffix."""
        return Path(self.script).stem

    def line(self, *overrides: str) -> str:
        """The command line that runs it with more overrides, for a shell to read."""
        return shlex.join(["python", self.script, *self.flags, *self.overrides, *overrides])

    def compose(self) -> Composed:
        """Let the program compose its config, and do nothing else.

        Raises:
            ConfigError: there is no such script, it cannot compose, or it shows no config when asked for it.
        """
        if not Path(self.script).is_file():
            raise ConfigError(f"There is no script {self.script}: name the file that `python` runs, such as train.py.")
        try:
            done = subprocess.run(
                self._command("--cfg", "all"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMPOSE_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self.script} did not show its config within {_COMPOSE_S:g} s.") from None
        if done.returncode:
            output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_LINES:])
            raise ConfigError(f"{self.script} cannot be run with these overrides:\n{output}")
        return _composed(self.script, done.stdout)

    def run(self, directory: Path, overrides: tuple[str, ...], limit_s: float) -> Ended:
        """Run it in ``directory``, which becomes its Hydra run directory; its output goes to :data:`LOG` there.

        Args:
            directory: made if it is not there.
            overrides: of this run.
            limit_s: seconds after which it is ended.
        """
        directory.mkdir(parents=True, exist_ok=True)
        log, began = directory / LOG, time.time()
        where = f"hydra.run.dir={quoted(str(directory.resolve()))}"
        with log.open("wb") as output:
            child = subprocess.Popen(
                self._command(*overrides, where),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(limit_s)
            finally:
                _end(child)
        error = "" if code == 0 else _failure(code, limit_s, log)
        return Ended(error, began, time.time() - began)

    def _command(self, *more: str) -> list[str]:
        return [sys.executable, self.script, *self.flags, *self.overrides, *more]


def _composed(script: str, text: str) -> Composed:
    from omegaconf import OmegaConf

    lines = text.splitlines()
    # What the script prints when it is imported comes before.
    start = next((number for number, line in enumerate(lines) if line == "hydra:"), None)
    try:
        config: Any = OmegaConf.to_container(OmegaConf.create("\n".join(lines[start or 0 :])), resolve=False)
        choices = config.pop("hydra")["runtime"]["choices"]
    except Exception as error:
        raise ConfigError(
            f"{script} does not show its config when it is given --cfg all: is it a program of stagereg.main?"
        ) from error
    own = {group: str(option) for group, option in choices.items() if not group.startswith("hydra/") and option}
    return Composed(config, own)


def _keys(prefix: str, node: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in node.items():
        found.append(f"{prefix}{name}")
        if isinstance(value, dict):
            found += _keys(f"{prefix}{name}.", value)
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a run and what is left of its session; one that is asked first can end its ranks and close its files."""
    try:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _failure(code: int | None, limit_s: float, log: Path) -> str:
    """Why a run failed, in one line: the last line of its output if it has any."""
    if code is None:
        return f"did not end within {limit_s:g} s"
    if code < 0:
        return f"died of {signal_name(-code)}"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65_536))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with exit code {code}"
