"""``stagereg follow``: run a command once on each new checkpoint of a directory, such as an evaluation.

The follower takes one checkpoint at a time: it keeps the checkpoint from being deleted, verifies the content of all
files, and runs the command with the path. After the command it notes the result in ``.follow-NAME/`` or in ``--state``,
so a follower killed before that note runs the command again. A lock there excludes a second follower of the same name.
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
from stagereg.checkpoint.store.located import with_those_of_torch
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.open_store import open_store
from stagereg.commands.arguments import above_zero
from stagereg.errors import MALFORMED, RESUME_CODE, CheckpointError, ConfigError, printable

_WAIT_S = 3600.0  # for the first checkpoint, where the follower is to end by itself
_POLL_INTERVAL_S = 0.2  # how often a signal is looked for
_PAUSE_S = 5.0  # seconds before the first retry of a command, then doubled
_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: RESUME_CODE, signal.SIGUSR1: RESUME_CODE}
"""The signals that end a follower, and its exit codes."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "follow",
        help="run a command once on each new checkpoint, such as an evaluation",
        description="Run a command once on each new complete checkpoint, verified first: stagereg follow DIR -- python "
        "evaluate.py {}. It gets the checkpoint's path in place of each {} and as STAGEREG_CHECKPOINT, its step as "
        "STAGEREG_STEP.",
    )
    add = parser.add_argument
    add("directory", help="of checkpoints (checkpoint.dir); a path or a URL, which need not be there yet")
    add("command", nargs="+", help="what to run, after --")
    add("--newest", action="store_true", help="pass over all but the newest, where there are several")
    add("--name", help="of this follower; by default that of the program and script it runs")
    add(
        "--state", metavar="DIR", help="where to note what is done, a path or URL; by default .follow-NAME in directory"
    )
    add("--retries", type=above_zero(int, or_zero=True), default=2, metavar="N", help="of one that fails; default 2")
    add(
        "--poll",
        type=above_zero(seconds_of),
        default=10.0,
        metavar="T",
        help="how often to look for new ones; default 10s",
    )
    add("--until-step", type=int, metavar="N", help="end once a checkpoint of this step, or a later one, is done")
    limit = above_zero(seconds_of, or_zero=True)
    add("--idle", type=limit, metavar="T", help="end when nothing new has come for so long; 0 takes what is there")
    add(
        "--wait",
        type=limit,
        metavar="T",
        help="give up when there is no checkpoint after so long; default 1h with --idle, 0 with --idle 0, else none",
    )
    add("--failed", action="store_true", help="run those again whose command has failed")
    parser.set_defaults(run=follow)


def follow(asked: argparse.Namespace) -> int:
    """Follow; return 0, or 1 if a command has failed for good, a checkpoint was damaged, or none came in time.

    After SIGTERM or SIGUSR1 75, start it again; after Ctrl-C 130.
    """
    if shutil.which(asked.command[0]) is None:
        raise ConfigError(f"There is no command {asked.command[0]!r} to run.")
    name = asked.name or _name_of(asked.command)
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(f"--name={name!r} is to be part of a file name: letters, digits and ._+- only.")
    store = open_store(asked.directory)
    follower = _Follower(asked, store, open_store(asked.state or f"{store.root}/.follow-{name}"), name)
    # What is ignored stays so: by nohup, or a script that has this program in the background.
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, follower.receive) for number in taken}
    try:
        return follower.run()
    except OSError as error:
        text = f"{store.root} cannot be followed: {error}. Where it cannot be written, --state=DIR keeps the notes."
        raise CheckpointError(text) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stop(Exception):
    """The follower was signalled."""


class _Follower:
    def __init__(self, asked: argparse.Namespace, store: CheckpointStore, notes: CheckpointStore, name: str) -> None:
        self._asked, self._store, self._notes, self._name = asked, store, notes, name
        self._done: dict[str, str] = {}  # checkpoints, and what has become of their command
        self._furthest = -1  # the greatest step that was dealt with
        self._bad: dict[str, VerificationResult] = {}  # found so by this follower; the next one looks again
        self._waiting: set[str] = set()  # seen and not dealt with
        self._said: dict[str, str] = {}  # what was reported of bad ones
        self._since = time.monotonic()  # when something new came
        self._begun = False  # whether a checkpoint has been seen, now or by the follower before
        self._wait_s = (asked.idle and _WAIT_S) if asked.wait is None else asked.wait  # for the first one
        self._received: signal.Signals | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Have the command end, which gets the signal; a second Ctrl-C kills it."""
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
            _say(f"stopped by {self._received.name}; what is done is noted")
            return _SIGNALS[self._received]
        failed = [_name(key) for key, how in self._done.items() if how == "failed"]
        if failed:
            _say(f"the command has failed on {', '.join(sorted(failed))}; --failed runs it again")
        if self._bad:
            _say(f"passed over, since they are bad: {', '.join(sorted(map(_name, self._bad)))}")
        if not self._begun:
            waited = f" after {self._wait_s:g} s (--wait)" if self._wait_s else ""
            _say(f"there is no checkpoint in {self._store.root}{waited}")
        return int(bool(failed or self._bad or (self._wait_s and not self._begun)))

    def _await_directory(self) -> bool:
        root, said = self._store.root, False
        while not (self._store.backend.remote or os.path.isdir(root)):
            if self._is_idle():
                return False
            if not said:
                _say(f"waiting for {root}")
            said = True
            self._sleep(self._asked.poll)
        return True

    def _lock(self) -> StoreLock:
        try:
            hold = self._notes.lock()
            self._notes.backend.tidy()
            return hold
        except CheckpointError as error:
            if (owner := self._notes.holder()) is None:
                raise
            raise CheckpointError(
                f"{self._store.root} is followed under the name {self._name!r} already, by {owner}. End that one, or "
                "give this one a name of its own: --name=NAME."
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
        """Return which checkpoint is to be dealt with now, and report those that went without."""
        own, damaged = self._store.checkpoints()
        of_torch = self._store.of_torch()
        found = with_those_of_torch([VerificationResult(each.path, each.manifest) for each in own], of_torch)
        complete = [each.checkpoint for each in found if each.checkpoint is not None]
        damaged += [each for each in of_torch if each.damages]
        if not self._begun and (complete or damaged):
            self._begun, self._since = True, time.monotonic()
        there = {each.key: each for each in complete}  # newest first
        lost = {plain_name(each.name) for each in damaged}
        for key in sorted(self._waiting - there.keys()):
            if _name(key) not in lost:
                _say(f"{_name(key)} was deleted before it was its turn")
        self._done = {key: how for key, how in self._done.items() if key in there or how == "failed"}
        self._bad = {key: each for key, each in self._bad.items() if key in there}
        for each in damaged:
            self._pass_over(f"{each.name} -", each)
        left = [key for key in there if key not in self._done and key not in self._bad]
        self._waiting = set(left)
        return there[left[0 if self._asked.newest else -1]] if left else None

    def _pass_over(self, key: str, condition: VerificationResult) -> None:
        if str(condition) != self._said.get(key):
            _say(f"{condition.path} is bad and passed over: {condition}")
        self._bad[key], self._said[key] = condition, str(condition)

    def _deal_with(self, checkpoint: Checkpoint) -> None:
        key = checkpoint.key
        with self._store.readers.read_lease(checkpoint.path):
            condition = self._store.look(checkpoint.path, content=True)
            if condition.manifest != checkpoint.manifest:
                return  # deleted or replaced meanwhile, as the next look reports
            if condition.damages:
                self._pass_over(key, condition)
                return
            how = self._run(checkpoint)
        if self._asked.newest and (older := sorted(self._waiting - {key})):
            _say(f"passed over, since {_name(key)} is newer: {', '.join(map(_name, older))}")
            self._done |= dict.fromkeys(older, "passed over")
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
            # In a group of its own, so that a signal reaches what it has started too, and once.
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
            if self._received is not None:  # before there was a process to have it
                os.killpg(self._process.pid, self._received)
            code = self._process.wait()
            self._check_signal()
            if code == 0:
                _say(f"done: {checkpoint.name}")
                return "done"
            left = self._asked.retries - trial
            more = f"trying again, {left} more time{'s' * (left > 1)}" if left else "given up"
            _say(f"the command has failed on {checkpoint.name} with {code}; {more}")
        return "failed"

    def _read(self) -> None:
        try:
            read: Any = json.loads(self._notes.note(FOLLOWED, needed=True) or b"{}")
            self._done = {str(key): str(how) for key, how in read.get("done", {}).items()}
            self._furthest = int(read.get("furthest", -1))
            self._begun = self._furthest >= 0
        except (*MALFORMED, UnfitFileError) as error:
            where = f"{self._notes.root}/{FOLLOWED}"
            raise CheckpointError(f"{where} is not what was noted: {error}. Delete it to begin anew.") from error
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
    """Return what a command is called: its program, and the first argument that names a file."""
    script = next((each for each in command[1:] if os.path.isfile(each)), "")
    names = (os.path.basename(each) for each in (command[0], script) if each)
    return re.sub(r"[^\w.+-]", "_", "-".join(names))


def _say(text: str) -> None:
    warn(f"stagereg: {text}")
