"""The protocols by which extensions plug into the launcher and into a rank.

An extension offers them in its module ``launching``: ``launcher()`` returns a new :class:`LaunchExtension`, ``rank()``
a new :class:`RankExtension`; either may be left out. They are called in one order, by the names of the extensions. What
:meth:`LaunchExtension.check` and :meth:`RankExtension.around` raise ends the run. What any other method raises is
logged, as if the method had returned nothing.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from stagereg.base.crash_report import signal_name
from stagereg.base.providers import has, needs, providers
from stagereg.base.signals import SIGNALS
from stagereg.errors import RESUME_CODE, LaunchError
from stagereg.launch.progress import Progress
from stagereg.launch.run_store import RunStore
from stagereg.launch.scheduler_task import SchedulerTask

_log = logging.getLogger(__name__)
_E = TypeVar("_E")
_T = TypeVar("_T")

_ACTS_ON = {"restarts": ("0", "recovery"), "heartbeat_timeout": ("10s", "recovery")}
"""Options of a run that an extension acts on: the default, which needs no extension, and the name of the extension."""


class Start(NamedTuple):
    """What a rank is to run, as :class:`subprocess.Popen` takes it."""

    command: list[str]
    folder: str
    variables: dict[str, str]


class Process(Protocol):
    """The process of a rank, as :class:`subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run, as the launcher has it."""

    number: int  # how often the run was started before
    task: SchedulerTask  # whose ranks this launcher has started
    start: Start  # of each rank, without the variables of one rank
    store: RunStore  # of this attempt
    tasks: Any  # torch's store, with keys that the launchers of all tasks share
    progress: Callable[[], Progress]  # reads how far the run has come


@dataclass
class End:
    """How an attempt has ended on the ranks of this launcher."""

    attempt: Attempt
    codes: dict[int, int]  # exit codes that are not 0, by rank
    noticed: float  # when the first of them was seen, in unix seconds
    forwarded: signal.Signals | None = None  # the signal that the launcher has forwarded
    stopped: signal.Signals | None = None  # the signal for which the launcher has ended the ranks
    started: bool = True  # whether a rank had been started when ``stopped`` came
    errors: dict[int, str] = field(default_factory=dict)  # what the ranks have reported, by rank
    result: Any = None  # what rank 0 has returned
    skipped: str = ""  # that the next start skips the newest checkpoint, if so

    @property
    def received(self) -> signal.Signals | None:
        """The signal that has ended the run, if one has."""
        exited = (each for each in SIGNALS if 128 + each in self.codes.values())
        return self.stopped or self.forwarded or next(exited, None)

    @property
    def preempted(self) -> bool:
        """Whether the ranks have saved and exited on a signal."""
        return not self.errors and self.stopped is None and RESUME_CODE in self.codes.values()

    @property
    def failed(self) -> bool:
        """Whether the attempt ended by a failure, and not by a signal."""
        return self.received is None and not self.preempted

    def __str__(self) -> str:
        texts = {
            rank: f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            for rank, code in self.codes.items()
            if not self.errors or code < 0  # an error says more than the code that came of it
        } | self.errors
        return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))


class Again(NamedTuple):
    """The run is to be started again."""

    why: str  # what the launcher prints below the failure
    overrides: tuple[str, ...] = ()  # of the ranks from now on, unless the command has them


class Refusal(NamedTuple):
    """The run ends with its failure."""

    why: str  # what the launcher prints below the failure


class Exit(NamedTuple):
    """The run ends in order."""

    code: int
    why: str  # what the launcher prints


class LaunchExtension:
    """Accompanies one launcher, in its process, on its main thread. Each method does nothing here."""

    def check(self, cfg: Any) -> bool:
        """Take the options of the run; return whether the run needs a launcher even for one rank.

        Called first, while nothing has started. If no launcher is needed, no other method is called.

        Raises:
            StageregError: an option is invalid.
        """
        return False

    def variables(self) -> Mapping[str, str]:
        """Return environment variables for the ranks. Called before each attempt."""
        return {}

    def start(self, rank: int, start: Start) -> Process | None:
        """Start a rank; return ``None`` for a fresh interpreter, unless another extension starts the rank."""
        return None

    def poll(self, attempt: Attempt) -> None:
        """Do what is to be done while the ranks run. Called several times a second; must not wait."""

    def ending(self, end: End) -> bool:
        """Return whether the ranks that still run get no time to report. Called when a rank has failed, or all ended.

        ``end`` has no errors yet.
        """
        return False

    def after(self, end: End) -> Again | Refusal | Exit | None:
        """Return what happens after an attempt that has not succeeded. The first answer counts, in each task.

        All ranks of this task have ended.
        """
        return None

    def close(self) -> None:
        """Free what the extension has started. All ranks have ended. Called once."""


class Cause(NamedTuple):
    """What has failed elsewhere, so that this rank fails."""

    text: str  # sentences
    seen: bool  # whether the launcher of the failed ranks sees the same


class ThisRank(Protocol):
    """This process as a rank, as an extension has it (:class:`stagereg.launch.rank.Rank`)."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def launched(self) -> bool: ...  # by the launcher of `stagereg.main`

    @property
    def store(self) -> RunStore: ...  # of this attempt

    def note(self, why: str) -> None:
        """Have extensions know why this attempt fails. Any thread."""

    def end_after_failure(self, save: Callable[[], object], cause: Callable[[], Cause], mercy_s: float) -> None:
        """Save, and end this rank: its training thread may hang on a failed rank. On an extension's thread.

        A rank that ends within ``mercy_s`` seconds reports what it has seen.
        """


class RankExtension:
    """Accompanies one rank, in its process. Each method does nothing here. No method is collective."""

    def began(self) -> None:
        """Prepare a process that runs the program, the launcher or a rank. Main thread, before all else. Idempotent."""

    def marked(self, moment: str) -> None:
        """Note that this process has ``imported``, ``connected``, ``composed`` or ``grouped``. Main thread."""

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        """Return what surrounds the process group and the job of this rank. Training thread.

        The ranks know their run, and have no process group yet. Not called in a process that is the only rank without
        a launcher.
        """
        return nullcontext()

    def recording(self, directory: str, attempt: str, rank: int) -> None:
        """Prepare for the record of this rank that is about to begin, in a directory. Training thread."""

    def noted(self, rank: ThisRank, why: str) -> None:
        """Note why this attempt fails, as this rank reports it. Any thread; the store of the run may be gone."""

    def failed_ranks(self) -> Collection[int]:
        """Return the ranks that are known to have failed. Any thread; must not wait."""
        return ()

    def ending(self, error: Exception) -> None:
        """Wait, for a bounded time, for what needs the process group. ``error`` came of another rank's failure.

        Training thread.
        """

    def cause(self) -> Cause | None:
        """Return what has failed on other ranks; may wait for some seconds until that is known. Any thread."""
        return None

    def leave(self) -> None:
        """Note that this process is about to exit, which is no failure. Training thread. Idempotent."""


@functools.cache
def rank_extensions() -> tuple[RankExtension, ...]:
    """Return the extensions of this process, which is one rank at most."""
    return tuple(each.rank() for each in providers("launching") if hasattr(each, "rank"))


def launch_extensions() -> tuple[LaunchExtension, ...]:
    """Return new extensions for a launcher."""
    return tuple(each.launcher() for each in providers("launching") if hasattr(each, "launcher"))


def answers(extensions: Iterable[_E], ask: Callable[[_E], _T | None]) -> list[_T]:
    """Return what extensions return, without those that return ``None``; what one raises is logged."""
    return [answer for each in extensions if (answer := _answer(each, ask)) is not None]


def first(extensions: Iterable[_E], ask: Callable[[_E], _T | None]) -> _T | None:
    """Return the first answer that is not ``None``, and ask no further; what one raises is logged."""
    return next((answer for each in extensions if (answer := _answer(each, ask)) is not None), None)


def begin() -> None:
    """Have the extensions know that this process begins. On the main thread. Idempotent."""
    answers(rank_extensions(), lambda each: each.began())


def mark(moment: str) -> None:
    """Have the extensions know that this process has come so far."""
    answers(rank_extensions(), lambda each: each.marked(moment))


def expect_installed(cfg: Any) -> None:
    """Raise ``LaunchError`` for an option whose extension is not installed."""
    from omegaconf import OmegaConf

    for key, (neutral, extension) in _ACTS_ON.items():
        value = OmegaConf.select(cfg, key, default=neutral)
        if str(value) != neutral and not has(extension):
            raise LaunchError(f"{key}={value} {needs(extension)}")


def _answer(extension: _E, ask: Callable[[_E], _T | None]) -> _T | None:
    try:
        return ask(extension)
    except Exception as error:
        _log.warning("stagereg: %s failed: %r", type(extension).__name__, error, exc_info=error)
        return None
