"""The interfaces through which extensions plug into the launcher and into a rank.

An extension implements them in its module ``launching``: ``launcher()`` returns a new :class:`LaunchExtension`,
``rank()`` a new :class:`RankExtension`. Both functions are optional. Extensions are called in the order of their names.
If :meth:`LaunchExtension.check` or :meth:`RankExtension.around` raises, the run fails. An exception in any other method
is logged, and the method counts as returning ``None``.
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
"""Options that extensions implement: the default value, which needs no extension, and the name of the extension."""


class Start(NamedTuple):
    """The command of a rank with its working directory and environment, for :class:`subprocess.Popen`."""

    command: list[str]
    folder: str
    variables: dict[str, str]


class Process(Protocol):
    """The process of a rank; the methods are those of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run."""

    number: int  # number of earlier starts of the run
    task: SchedulerTask  # the task of this launcher, which starts the ranks of one machine
    start: Start  # the command of the ranks, without the variables of one rank
    store: RunStore  # the rendezvous store, with the keys of this attempt
    tasks: Any  # torch's store, for keys that the launchers of all tasks share
    progress: Callable[[], Progress]  # reads the progress of the run


@dataclass
class End:
    """The end of an attempt on the ranks of this launcher."""

    attempt: Attempt
    codes: dict[int, int]  # nonzero exit codes, by rank
    noticed: float  # Unix time at which the launcher saw the first nonzero exit code
    forwarded: signal.Signals | None = None  # the signal that the launcher forwarded
    stopped: signal.Signals | None = None  # the signal after which the launcher terminated the ranks
    started: bool = True  # whether a rank had been started when ``stopped`` arrived
    errors: dict[int, str] = field(default_factory=dict)  # errors that ranks reported, by rank
    result: Any = None  # the return value of rank 0
    skipped: str = ""  # a sentence if the next start skips the newest checkpoint, otherwise empty

    @property
    def received(self) -> signal.Signals | None:
        """The signal that ended the run; ``None`` if no signal did."""
        exited = (each for each in SIGNALS if 128 + each in self.codes.values())
        return self.stopped or self.forwarded or next(exited, None)

    @property
    def preempted(self) -> bool:
        """Whether the ranks saved and exited after a signal."""
        return not self.errors and self.stopped is None and RESUME_CODE in self.codes.values()

    @property
    def failed(self) -> bool:
        """Whether the attempt failed. An attempt that a signal ended has not failed."""
        return self.received is None and not self.preempted

    def __str__(self) -> str:
        texts = {
            rank: f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            for rank, code in self.codes.items()
            if not self.errors or code < 0  # a reported error explains its exit code
        } | self.errors
        causes_first = sorted(texts, key=lambda rank: (self.codes.get(rank, 0) >= 0, rank))
        return "\n".join(f"rank {rank}: {texts[rank]}" for rank in causes_first)


class Again(NamedTuple):
    """The decision to start the run again."""

    why: str  # text that the launcher prints after the failure
    overrides: tuple[str, ...] = ()  # overrides to add to the command of the ranks for all later attempts


class Refusal(NamedTuple):
    """The decision to let the run fail."""

    why: str  # text that the launcher prints after the failure


class Exit(NamedTuple):
    """The decision to exit with ``code``, which is not a failure of the run."""

    code: int
    why: str  # text that the launcher prints


class LaunchExtension:
    """The hooks of an extension in the launcher, called on its main thread. The defaults do nothing."""

    def check(self, cfg: Any) -> bool:
        """Check the options of the run; return whether the run needs a launcher even for one rank.

        Called first, before any rank is started. If no launcher is needed, no other method is called.

        Raises:
            StageregError: An option is invalid.
        """
        return False

    def variables(self) -> Mapping[str, str]:
        """Return environment variables for the ranks. Called before each attempt."""
        return {}

    def start(self, rank: int, start: Start) -> Process | None:
        """Start a rank. If every extension returns ``None``, the launcher starts the rank in a fresh interpreter."""
        return None

    def poll(self, attempt: Attempt) -> None:
        """Run periodic work while the ranks run. Called several times a second; must not block."""

    def ending(self, end: End) -> bool:
        """Return whether the launcher terminates running ranks immediately, before they can report errors.

        Called when a rank has failed or all ranks have exited. ``end.errors`` is still empty.
        """
        return False

    def after(self, end: End) -> Again | Refusal | Exit | None:
        """Decide how the run continues after a failed or signalled attempt. ``None``: leave it to other extensions.

        Called in each task, after all ranks of the task have exited. The first decision counts.
        """
        return None

    def close(self) -> None:
        """Release the resources of the extension. Called once, after all ranks have exited."""


class Cause(NamedTuple):
    """The failure of other ranks that makes this rank fail."""

    text: str  # one or more sentences
    seen: bool  # whether the launcher of the failed ranks detects the same failure


class ThisRank(Protocol):
    """The interface of this process's rank for extensions (:class:`stagereg.launch.rank.Rank`)."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def launched(self) -> bool: ...  # whether the launcher of `stagereg.main` started this rank

    @property
    def store(self) -> RunStore: ...  # the rendezvous store, with the keys of this attempt

    def note(self, why: str) -> None:
        """Report to all extensions why this attempt fails. Thread-safe."""

    def end_after_failure(self, save: Callable[[], object], cause: Callable[[], Cause], mercy_s: float) -> None:
        """Save, then exit this rank, whose training thread may hang on a failed rank. Called on an extension's thread.

        If the rank exits within ``mercy_s`` seconds after the save, it reports its own error instead.
        """


class RankExtension:
    """The hooks of an extension in one rank, called in its process. The defaults do nothing. No hook is collective."""

    def began(self) -> None:
        """Prepare the process of the launcher or of a rank. Called first, on the main thread. Idempotent."""

    def marked(self, moment: str) -> None:
        """Record that this process has ``imported``, ``connected``, ``composed`` or ``grouped``. Main thread."""

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        """Return a context manager around the process group and the job of this rank. Training thread.

        The process group does not exist yet when the context is entered. Not called in a process that is the only rank
        and has no launcher.
        """
        return nullcontext()

    def recording(self, directory: str, attempt: str, rank: int) -> None:
        """Prepare for the event record that this rank is about to begin in ``directory``. Training thread."""

    def noted(self, rank: ThisRank, why: str) -> None:
        """Record the reason that this rank reports for the failed attempt. Any thread; the store may be unreachable."""

    def failed_ranks(self) -> Collection[int]:
        """Return the failed ranks that this rank has detected. Any thread; must not block."""
        return ()

    def ending(self, error: Exception) -> None:
        """Wait, for a bounded time, for work that needs the process group. Training thread.

        Another rank's failure caused ``error``.
        """

    def cause(self) -> Cause | None:
        """Return the failure of other ranks; may wait for some seconds until it is detected. Any thread."""
        return None

    def leave(self) -> None:
        """Record that this process exits normally and has not failed. Training thread. Idempotent."""


@functools.cache
def rank_extensions() -> tuple[RankExtension, ...]:
    """Return the extensions of this process, which is at most one rank."""
    return tuple(each.rank() for each in providers("launching") if hasattr(each, "rank"))


def launch_extensions() -> tuple[LaunchExtension, ...]:
    """Return new extensions for a launcher."""
    return tuple(each.launcher() for each in providers("launching") if hasattr(each, "launcher"))


def answers(extensions: Iterable[_E], ask: Callable[[_E], _T | None]) -> list[_T]:
    """Call ``ask`` with each extension; return the results that are not ``None``. Exceptions are logged."""
    return [answer for each in extensions if (answer := _answer(each, ask)) is not None]


def first(extensions: Iterable[_E], ask: Callable[[_E], _T | None]) -> _T | None:
    """Call ``ask`` with each extension until a result is not ``None``; return this result. Exceptions are logged."""
    return next((answer for each in extensions if (answer := _answer(each, ask)) is not None), None)


def begin() -> None:
    """Notify the extensions that this process begins. Main thread. Idempotent."""
    answers(rank_extensions(), lambda each: each.began())


def mark(moment: str) -> None:
    """Notify the extensions that this process has reached ``moment`` (:meth:`RankExtension.marked`)."""
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
