"""The interfaces that an extension implements to take part in the launcher and in each rank.

The module ``launching`` of an extension defines two optional functions: ``launcher()`` returns a new
:class:`LaunchExtension`, and ``rank()`` returns a new :class:`RankExtension`. Extensions are called sorted by name.
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

_ACTS_ON = {"restarts": "recovery", "heartbeat_timeout": "recovery", "numa": "numa"}
"""Options that an extension implements, with the extension's name."""
_NEUTRAL = ("restarts=0", "heartbeat_timeout=10s", "numa=off", "numa=False")
"""Values of these options that work without the extension. YAML reads an unquoted ``off`` as False."""


class Start(NamedTuple):
    """The command of a rank with its working directory and environment, for :class:`subprocess.Popen`."""

    command: list[str]
    folder: str
    variables: dict[str, str]


class Process(Protocol):
    """The process of a rank, with the methods of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run. A restart after a failure is another attempt."""

    number: int  # number of earlier starts of the run
    task: SchedulerTask  # the task of this launcher, which starts the ranks of one machine
    start: Start  # the command of the ranks, without the variables of one rank
    store: RunStore  # the rendezvous store, with the keys of this attempt
    tasks: Any  # torch's store, for keys that the launchers of all tasks share
    progress: Callable[[], Progress]  # reads the progress of the run


@dataclass
class End:
    """How one start of the run (an attempt) ended on the ranks of this launcher."""

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
        """Whether the attempt failed. An attempt that a signal ended does not count as failed."""
        return self.received is None and not self.preempted

    def __str__(self) -> str:
        texts = {
            rank: f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            for rank, code in self.codes.items()
            if not self.errors or code < 0  # reported errors explain positive exit codes
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
        """Check the options of the run. Return whether the run needs a launcher even if it has one rank.

        Called first, before any rank is started. If no launcher is needed, no other method is called.

        Raises:
            StageregError: An option is invalid.
        """
        return False

    def variables(self) -> Mapping[str, str]:
        """Return environment variables for the ranks. Called before each start of the ranks."""
        return {}

    def start(self, rank: int, start: Start) -> Process | None:
        """Start a rank, or return ``None``. If all extensions return ``None``, the launcher starts an interpreter."""
        return None

    def poll(self, attempt: Attempt) -> None:
        """Do periodic work while the ranks run. Called several times per second. Must not block."""

    def ending(self, end: End) -> bool:
        """Return whether the launcher terminates the running ranks immediately, before they can report errors.

        Called when a rank has failed or all ranks have exited. ``end.errors`` is still empty.
        """
        return False

    def after(self, end: End) -> Again | Refusal | Exit | None:
        """Decide whether the run continues after a failure or signal. ``None`` leaves the decision to other extensions.

        Called in each task of a scheduler's job, after all ranks of the task have exited. The first decision counts.
        """
        return None

    def close(self) -> None:
        """Release the resources of the extension. Called once, after all ranks have exited."""


class Cause(NamedTuple):
    """The failure of other ranks that caused the failure of this rank."""

    text: str  # one or more sentences
    seen: bool  # whether the launcher of the failed ranks also detects this failure


class ThisRank(Protocol):
    """The rank in this process, as extensions see it. Implemented by :class:`stagereg.launch.rank.Rank`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def launched(self) -> bool: ...  # whether the launcher of `stagereg.main` started this rank

    @property
    def store(self) -> RunStore: ...  # the rendezvous store, with the keys of this attempt

    def note(self, why: str) -> None:
        """Notify all extensions why this start of the run fails. Thread-safe."""

    def end_after_failure(self, save: Callable[[], object], cause: Callable[[], Cause], mercy_s: float) -> None:
        """Call ``save``, then exit this rank, whose training thread may hang. Called on an extension's thread.

        If the rank exits within ``mercy_s`` seconds after the save, it reports its own error instead of ``cause``.
        """


class RankExtension:
    """The hooks of an extension in the process of one rank. The defaults do nothing. No hook is collective."""

    def began(self) -> None:
        """Prepare this process, a launcher or a rank. Called first, on the main thread. Idempotent."""

    def marked(self, moment: str) -> None:
        """Record that this process has ``imported`` modules, ``connected`` to the rendezvous store, ``composed`` the
        config, or ``grouped`` (initialized the process group). Called on the main thread.
        """

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        """Return a context manager in which this rank runs its job. Entered on the training thread.

        The context is entered before the process group exists. Not called if the only rank has no launcher.
        """
        return nullcontext()

    def recording(self, directory: str, attempt: str, rank: int) -> None:
        """Prepare for the event record that this rank begins next, in ``directory``. Called on the training thread."""

    def noted(self, rank: ThisRank, why: str) -> None:
        """Record why this rank fails. Called on any thread. The rendezvous store may be unreachable."""

    def failed_ranks(self) -> Collection[int]:
        """Return the failed ranks that this rank has detected. Called on any thread. Must not block."""
        return ()

    def ending(self, error: Exception) -> None:
        """Wait, for a bounded time, for work that needs the process group. Called on the training thread, after
        ``error``, which another rank's failure caused.
        """

    def cause(self) -> Cause | None:
        """Return the failure of other ranks, if any. May wait some seconds for its detection. Called on any thread."""
        return None

    def leave(self) -> None:
        """Record that this process exits without a failure. Called on the training thread. Idempotent."""


@functools.cache
def rank_extensions() -> tuple[RankExtension, ...]:
    """Return the rank extensions of this process, creating them in the first call."""
    return tuple(each.rank() for each in providers("launching") if hasattr(each, "rank"))


def launch_extensions() -> tuple[LaunchExtension, ...]:
    """Create and return the extensions of a launcher."""
    return tuple(each.launcher() for each in providers("launching") if hasattr(each, "launcher"))


def answers(extensions: Iterable[_E], ask: Callable[[_E], _T | None]) -> list[_T]:
    """Call ``ask(extension)`` for each extension. Return the results except ``None``. Exceptions are logged."""
    return [answer for each in extensions if (answer := _answer(each, ask)) is not None]


def first(extensions: Iterable[_E], ask: Callable[[_E], _T | None]) -> _T | None:
    """Call ``ask(extension)`` until a result is not ``None``, and return this result. Exceptions are logged."""
    return next((answer for each in extensions if (answer := _answer(each, ask)) is not None), None)


def begin() -> None:
    """Notify the extensions that this process begins. Called on the main thread. Idempotent."""
    answers(rank_extensions(), lambda each: each.began())


def mark(moment: str) -> None:
    """Notify the extensions that this process has reached ``moment`` (:meth:`RankExtension.marked`)."""
    answers(rank_extensions(), lambda each: each.marked(moment))


def expect_installed(cfg: Any) -> None:
    """Raise ``LaunchError`` if the config sets an option whose extension is not installed."""
    from omegaconf import OmegaConf

    for key, extension in _ACTS_ON.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and f"{key}={value}" not in _NEUTRAL and not has(extension):
            raise LaunchError(f"{key}={value} {needs(extension)}")


def _answer(extension: _E, ask: Callable[[_E], _T | None]) -> _T | None:
    try:
        return ask(extension)
    except Exception as error:
        _log.warning("stagereg: %s failed: %r", type(extension).__name__, error, exc_info=error)
        return None
