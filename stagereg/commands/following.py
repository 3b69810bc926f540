"""``stagereg follow``: runs a command, for example an evaluation, once for each new checkpoint in a directory.

The follower handles one checkpoint at a time. It takes a read lease, which prevents the deletion of the checkpoint, and
verifies the content of all files. Then it runs the command with the path, and records the result in ``.follow-NAME/``
or in the directory of ``--state``. If the follower is killed before it records the result, it runs the command again
after a restart. A lock prevents a second follower with the same name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from stagereg.base.durations import seconds_of
from stagereg.base.output import warn
from stagereg.base.small_files import UnfitFileError
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import FOLLOWED, Checkpoint, plain_name
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.located import with_torchs
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.open_store import open_store
from stagereg.commands.arguments import above_zero
from stagereg.errors import MALFORMED, RESUME_CODE, CheckpointError, ConfigError, printable

_WAIT_S = 3600.0  # seconds to wait for the first checkpoint, with --idle
_POLL_INTERVAL_S = 0.2  # seconds between checks for a signal
_PAUSE_S = 5.0  # seconds before the first retry of a command; doubles with each retry
_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: RESUME_CODE, signal.SIGUSR1: RESUME_CODE}
"""The signals that terminate a follower, and the exit code for each signal."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "follow",
        help="run a command, such as an evaluation, once for each new checkpoint",
        description="Verify each new complete checkpoint and run a command once for it: stagereg follow DIR -- python "
        "evaluate.py {}. The checkpoint's path replaces {}, and is also in the environment variable "
        "STAGEREG_CHECKPOINT; the step is in STAGEREG_STEP.",
    )
    add, limit = parser.add_argument, above_zero(seconds_of, or_zero=True)
    add("directory", help="checkpoint directory (checkpoint.dir): a path or a URL, which may not exist yet")
    add("command", nargs="+", help="the command and its arguments, after --")
    add("--newest", action="store_true", help="if several checkpoints are waiting, skip all but the newest")
    add("--name", help="name of this follower; default: the names of the program and its script")
    help_ = "path or URL of the directory for the follower's records; default: .follow-NAME in the checkpoint directory"
    add("--state", metavar="DIR", help=help_)
    help_ = "how often to retry a command that fails; default 2"
    add("--retries", type=above_zero(int, or_zero=True), default=2, metavar="N", help=help_)
    help_ = "interval between checks for new checkpoints; default 10s"
    add("--poll", type=above_zero(seconds_of), default=10.0, metavar="T", help=help_)
    help_ = "exit after handling a checkpoint of step N or of a later step"
    add("--until-step", type=int, metavar="N", help=help_)
    help_ = "exit if no new checkpoint arrives for this long; 0: handle the existing checkpoints and exit"
    add("--idle", type=limit, metavar="T", help=help_)
    help_ = "exit if no first checkpoint arrives in this time; default: 1h with --idle, 0 with --idle 0, or no limit"
    add("--wait", type=limit, metavar="T", help=help_)
    help_ = "run the command again for checkpoints for which it failed before"
    add("--failed", action="store_true", help=help_)
    parser.set_defaults(run=follow)


def follow(asked: argparse.Namespace) -> int:
    """Follow a directory. Return 1 if a command failed, a checkpoint was corrupt or none arrived in time, otherwise 0.

    Returns 75 (start the follower again) after SIGTERM or SIGUSR1, and 130 after Ctrl-C.
    """
    if shutil.which(asked.command[0]) is None:
        raise ConfigError(f"command not found: {asked.command[0]!r}")
    name = asked.name or _name_of(asked.command)
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(f"invalid --name={name!r}: use only letters, digits and the characters ._+-")
    store = open_store(asked.directory)
    follower = _Follower(asked, store, open_store(asked.state or f"{store.root}/.follow-{name}"), name)
    # A signal that is already ignored, for example because of nohup, stays ignored.
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, follower.receive) for number in taken}
    try:
        return follower.run()
    except OSError as error:
        text = f"cannot follow {store.root}: {error}. If it is read-only, pass --state=DIR for the follower's records."
        raise CheckpointError(text) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stop(Exception):
    """Raised when the follower has received a signal."""


class _Follower:
    def __init__(self, asked: argparse.Namespace, store: CheckpointStore, notes: CheckpointStore, name: str) -> None:
        self._asked, self._store, self._notes, self._name = asked, store, notes, name
        self._done: dict[str, str] = {}  # result of the command for each checkpoint
        self._furthest = -1  # greatest step that was handled
        self._bad: dict[str, VerificationResult] = {}  # corrupt checkpoints, which are checked again after a restart
        self._waiting: set[str] = set()  # checkpoints that exist and are not handled yet
        self._said: dict[str, str] = {}  # last message about each corrupt checkpoint
        self._since = time.monotonic()  # when the follower began to wait for a checkpoint
        self._begun = False  # whether this follower has seen a checkpoint, even before a restart
        self._wait_s = (asked.idle and _WAIT_S) if asked.wait is None else asked.wait  # for the first checkpoint
        self._received: signal.Signals | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the command. A second Ctrl-C kills the command."""
        again, self._received = self._received is not None, self._received or signal.Signals(number)
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL if again and number == signal.SIGINT else number)

    def run(self) -> int:
        try:
            if self._await_directory():
                with self._lock() as hold:
                    self._read()
                    self._follow(hold)
        except _Stop:
            assert self._received is not None
            _say(f"stopped by {self._received.name}; the results so far are recorded")
            return _SIGNALS[self._received]
        failed = [_name(key) for key, how in self._done.items() if how == "failed"]
        if failed:
            _say(f"the command failed for {', '.join(sorted(failed))}. Pass --failed to run it again.")
        if self._bad:
            _say(f"skipped corrupt checkpoints: {', '.join(sorted(map(_name, self._bad)))}")
        if not self._begun:
            waited = f" after {self._wait_s:g} s (--wait)" if self._wait_s else ""
            _say(f"no checkpoint in {self._store.root}{waited}")
        return int(bool(failed or self._bad or (self._wait_s and not self._begun)))

    def _await_directory(self) -> bool:
        root, said = self._store.root, False
        while not (self._store.backend.remote or os.path.isdir(root)):
            if self._is_idle():
                return False
            if not said:
                _say(f"waiting until {root} exists")
            said = True
            self._sleep(self._asked.poll)
        return True

    def _lock(self) -> StoreLock:
        try:
            hold = self._notes.lock()
            self._notes.backend.tidy()
            return hold
        except CheckpointError as error:
            if (owner := self._notes.backend.holder()) is None:
                raise
            raise CheckpointError(
                f"{owner} already follows {self._store.root} under the name {self._name!r}. Stop that process, or "
                "choose another name with --name=NAME."
            ) from error

    def _follow(self, hold: StoreLock) -> None:
        until = self._asked.until_step
        while True:
            if (checkpoint := self._next()) is not None:
                hold.check()
                self._deal_with(checkpoint)
                self._since = time.monotonic()
                continue
            furthest = max([self._furthest, *(each.step or 0 for each in self._bad.values())])
            if self._is_idle() or (until is not None and furthest >= until):
                return
            self._sleep(self._asked.poll)

    def _is_idle(self) -> bool:
        limit = self._asked.idle if self._begun else self._wait_s
        return limit is not None and time.monotonic() >= self._since + limit

    def _next(self) -> Checkpoint | None:
        """Return the next checkpoint to handle, or ``None``. Reports checkpoints that are corrupt or were deleted."""
        own, damaged = self._store.checkpoints()
        of_torch = self._store.of_torch()
        found = with_torchs([VerificationResult(each.path, each.manifest) for each in own], of_torch)
        complete = [each.checkpoint for each in found if each.checkpoint is not None]
        damaged += [each for each in of_torch if each.damages]
        if not self._begun and (complete or damaged):
            self._begun, self._since = True, time.monotonic()
        there = {each.key: each for each in complete}  # sorted, newest first
        lost = {plain_name(each.name) for each in damaged}
        for key in sorted(self._waiting - there.keys()):
            if _name(key) not in lost:
                _say(f"{_name(key)} was deleted before the command ran")
        self._done = {key: how for key, how in self._done.items() if key in there or how == "failed"}
        self._bad = {key: each for key, each in self._bad.items() if key in there}
        for each in damaged:
            self._pass_over(f"{each.name} -", each)
        left = [key for key in there if key not in self._done and key not in self._bad]
        self._waiting = set(left)
        return there[left[0 if self._asked.newest else -1]] if left else None

    def _pass_over(self, key: str, condition: VerificationResult) -> None:
        if str(condition) != self._said.get(key):
            _say(f"{condition.path} is corrupt and was skipped: {condition}")
        self._bad[key], self._said[key] = condition, str(condition)

    def _deal_with(self, checkpoint: Checkpoint) -> None:
        key = checkpoint.key
        with self._store.readers.read_lease(checkpoint.path):
            condition = self._store.look(checkpoint.path, content=True)
            if condition.manifest != checkpoint.manifest:
                return  # deleted or replaced; the next poll reports it
            if condition.damages:
                self._pass_over(key, condition)
                return
            how = self._run(checkpoint)
        if self._asked.newest and (older := sorted(self._waiting - {key})):
            _say(f"skipped, because {_name(key)} is newer: {', '.join(map(_name, older))}")
            self._done |= dict.fromkeys(older, "skipped")
        self._done[key], self._furthest = how, max(self._furthest, checkpoint.manifest.step)
        self._waiting -= self._done.keys()
        note = {"command": self._asked.command, "furthest": self._furthest, "done": self._done}
        self._notes.backend.replace(FOLLOWED, f"{json.dumps(note, indent=1)}\n".encode())

    def _run(self, checkpoint: Checkpoint) -> str:
        command = [argument.replace("{}", checkpoint.path) for argument in self._asked.command]
        step = str(checkpoint.manifest.step)
        environment = {**os.environ, "STAGEREG_CHECKPOINT": checkpoint.path, "STAGEREG_STEP": step}
        for trial in range(self._asked.retries + 1):
            if trial:
                self._sleep(_PAUSE_S * 2 ** (trial - 1))
            self._check_signal()
            # In a new process group, so that a signal reaches the children of the command too, and only once.
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
            if self._received is not None:  # a signal arrived before the process was started
                os.killpg(self._process.pid, self._received)
            code = self._process.wait()
            self._check_signal()
            if code == 0:
                _say(f"{checkpoint.name}: the command succeeded")
                return "done"
            left = self._asked.retries - trial
            more = f"{left} more attempt{'s' * (left > 1)}" if left else "no attempt left"
            _say(f"{checkpoint.name}: the command exited with code {code}; {more}")
        return "failed"

    def _read(self) -> None:
        try:
            read: Any = json.loads(self._notes.note(FOLLOWED, needed=True) or b"{}")
            self._done = {str(key): str(how) for key, how in read.get("done", {}).items()}
            self._furthest = int(read.get("furthest", -1))
            self._begun = self._furthest >= 0
        except (*MALFORMED, UnfitFileError) as error:
            where = f"{self._notes.root}/{FOLLOWED}"
            raise CheckpointError(f"cannot read {where}: {error}. Delete this file to start from scratch.") from error
        if self._asked.failed:
            self._done = {key: how for key, how in self._done.items() if how != "failed"}

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check_signal()
            time.sleep(min(left, _POLL_INTERVAL_S))

    def _check_signal(self) -> None:
        if self._received is not None:
            raise _Stop


def _name(key: str) -> str:
    return printable(key.partition(" ")[0], lines=False)


def _name_of(command: Sequence[str]) -> str:
    script = next((each for each in command[1:] if os.path.isfile(each)), "")
    names = (os.path.basename(each) for each in (command[0], script) if each)
    return re.sub(r"[^\w.+-]", "_", "-".join(names))


def _say(text: str) -> None:
    warn(f"stagereg: {text}")
