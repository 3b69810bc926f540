"""The errors of the project: one root, one class per thing that can go wrong, a message that says what to do.

Where PyTorch raises a built-in type in the same place (``ValueError`` for a join without joinables), the class here
derives from that type too. This module imports nothing of the project and nothing heavy.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable, Sequence

RESUME_CODE = 75
"""Exit code of a run that has saved and exited on a signal: start it again. ``EX_TEMPFAIL`` of sysexits.h."""


_RANKS = 4  # that a message names
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object; of no use, and another one on each rank
_LONGEST = 1000  # characters of the text of one error; some print what they could not handle


# Characters that a terminal obeys, that change the order of what it shows, or that cannot be encoded.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile(f"[\t\n]|{_UNPRINTABLE.pattern}")


def printable(text: str, lines: bool = True) -> str:
    """Return ``text`` with escapes, such as ``\\x1b``, for the characters that are commands and not text.

    Line breaks and tabs stay with ``lines``. Texts from files of other people go through this before they are shown.
    """
    kind = _UNPRINTABLE if lines else _LINES
    return kind.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What reading the content of one file raises if the content is not what was expected. A reader catches these around
one file, and says which it is; around a whole command they would hide faults of the command."""


class StageregError(Exception):
    """Root of all errors of the project. Its text is :func:`printable`."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InstallationError(StageregError, ImportError):
    """What is installed is incomplete, or another project lies where this one is."""


class RegistryError(StageregError):
    """A component could not be registered, loaded or built."""


class UnknownNameError(RegistryError, LookupError):
    """No component of that kind has that name; the message lists the names there are."""


class ConfigError(StageregError, ValueError):
    """A configuration has a key, type or value that its component does not take."""


class TargetNotAllowedError(ConfigError):
    """A config names a ``_target_`` that is not registered, so nothing was imported or called."""


class StagingError(StageregError, RuntimeError):
    """A state dict could not be staged.

    Attributes:
        path: the keys that lead to the entry in the state dict, outermost first; empty where it is no entry's fault.
        reason: what is wrong with it.
    """

    def __init__(self, path: Sequence[object], reason: str) -> None:
        self.path = tuple(path)
        self.reason = reason
        where = ".".join(map(str, self.path))
        super().__init__(f"cannot stage {where!r}: {reason}" if where else f"cannot stage: {reason}")

    def __reduce__(self) -> tuple[type[StagingError], tuple[tuple[object, ...], str]]:
        return type(self), (self.path, self.reason)


class UnstageableTypeError(StagingError, ValueError, TypeError):
    """A state dict has a value of a type that cannot be staged; the message names the type and its path."""


class WrittenWhileStagedError(StagingError):
    """The source of a copy was written, freed or resized while it was being copied; the copy was discarded."""


class StagerClosedError(StagingError):
    """A stager was used after its ``close()``."""

    def __init__(self, path: Sequence[object] = (), reason: str = "this stager was closed; build a new one") -> None:
        super().__init__(path, reason)


class JoinError(StageregError, ValueError):
    """A join context was given joinables that it cannot join."""


class JoinableNotInitializedError(StageregError, AssertionError):
    """A joinable notified before its ``Joinable`` constructor had run."""


class UnevenInputsError(StageregError, RuntimeError):
    """Inputs ran out on some rank and the join was configured to throw.

    Attributes:
        rank: the rank whose inputs ran out, or ``None`` on the other ranks.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[UnevenInputsError], tuple[str, int | None]]:
        return type(self), (str(self), self.rank)


class PeerFailedError(JoinError, RuntimeError):
    """Another rank of a join raised, died, froze or got stuck, so this rank cannot go on.

    Attributes:
        rank: the global rank that failed, the first of several; ``None`` where it is unknown.
        message: what that rank said, or how it ended.
    """

    def __init__(self, text: str, rank: int | None = None, message: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.message = message or text

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[str, int | None, str]]:
        return type(self), (str(self), self.rank, self.message)


class CheckpointError(StageregError, RuntimeError):
    """A checkpoint could not be written, committed or read; nothing that was complete before is harmed."""


class MissingEntryError(CheckpointError):
    """A checkpoint has nothing that an entry of the state could take: not its name, or another kind of optimizer's."""


class CorruptCheckpointError(CheckpointError):
    """What was to be read is damaged or incomplete; the message names the files."""


class RankMismatchError(CheckpointError):
    """The ranks do not do the same: not the same calls, options, or steps of an optimizer."""


class ClosedError(CheckpointError):
    """A checkpointer, or a checkpoint that was opened, was used after its ``close()``."""


class SaveTimeoutError(CheckpointError):
    """A save has taken longer than its ``timeout``."""


class WrittenWhileSavedError(CheckpointError):
    """A save was discarded, since the state was written while it was being copied; ``Checkpointer`` saves again."""


class LaunchError(StageregError, RuntimeError):
    """Local ranks could not be started, or one of them failed."""


class BrokenPromiseError(StageregError, AssertionError):
    """A component does not keep a promise of its kind's contract; the message says what was seen."""


class Preempted(SystemExit):
    """The run was signalled to exit, and its state is saved. Raised on all ranks, at the same step.

    Left alone, it ends the process with :data:`RESUME_CODE`.

    Attributes:
        step: that was saved.
        directory: of the checkpoints, a path or URL.
        received: the signal.
    """

    def __init__(self, step: int, directory: str, received: signal.Signals) -> None:
        super().__init__(RESUME_CODE)
        self.step, self.directory, self.received = step, directory, received

    def __str__(self) -> str:
        return f"preempted by {self.received.name}: step {self.step} is saved in {self.directory}"

    def __reduce__(self) -> tuple[type[Preempted], tuple[int, str, signal.Signals]]:
        return type(self), (self.step, self.directory, self.received)


class Stopped(SystemExit):
    """The run was signalled to exit, and its state could not be saved. Raised on all ranks.

    Left alone, it ends the process with 128 + the number of the signal.

    Attributes:
        received: the signal.
        why: what went wrong, and what there is.
    """

    def __init__(self, received: signal.Signals, why: str) -> None:
        super().__init__(128 + received)
        self.received, self.why = received, why

    def __str__(self) -> str:
        return f"stopped by {self.received.name}: {self.why}"

    def __reduce__(self) -> tuple[type[Stopped], tuple[signal.Signals, str]]:
        return type(self), (self.received, self.why)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a message: "rank 0", "ranks 1, 2", of many the first."""
    return f"rank{'s' if len(ranks) > 1 else ''} {few_of([*map(str, ranks)], _RANKS)}"


def few_of(texts: Sequence[str], most: int, by: str = ", ") -> str:
    """Return the first ``most`` of some texts, and how many more there are."""
    return by.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest of ``choices``, or an empty string when none is close.

    One that only begins like ``name`` is close too: ``pined`` may mean ``pinned_cached``.
    """
    names = list(choices)
    beginnings = {each[: len(name) + 1]: each for each in names}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    close = close or [beginnings[each] for each in difflib.get_close_matches(name, beginnings, n=1, cutoff=0.8)]
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return names of a checkpoint for a message, of many the first ``most``."""
    more = len(names) - most
    shown = [f"{name:.100}" if name.isprintable() else f"{name!r:.100}" for name in names[:most]]  # from elsewhere
    shown += [f"and {more} more"] if more > 0 else []
    return ", ".join(shown) or "an empty state"


def reason(error: BaseException) -> str:
    """Return one line on an error: its type and message, or the message of an error of the project, as it is."""
    if isinstance(error, CheckpointError):
        return str(error).strip()
    try:
        text = printable(_ADDRESS.sub("", " ".join(str(error).split("\n"))).strip())
    except Exception:
        text = "(its message cannot be made)"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... ({len(text)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def at_least(least: int, name: str, given: object) -> int:
    """Return a whole number from ``least`` on."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {given!r}.")
    return given


def kind_of(errors: Iterable[BaseException]) -> type[CheckpointError]:
    """Return the class for an error that tells of ``errors``: theirs, where all have one, so that callers can tell."""
    kinds = {type(error) for error in errors}
    [kind] = kinds if len(kinds) == 1 else {CheckpointError}
    return kind if issubclass(kind, CheckpointError) else CheckpointError


def one_of(name: str, given: object, choices: Sequence[str]) -> str:
    """Return one of ``choices``."""
    if given not in choices:
        close = nearest(given, choices) if isinstance(given, str) else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {given!r}.{close}")
    return str(given)


_LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "timeout caused pair closure",
    "remote process exited",
    "one of them hangs",
)
"""How gloo, NCCL, torch's store and the exchanges of a checkpointer say that another rank is gone, in lower case."""


def is_consequence(error: BaseException) -> bool:
    """Whether the error only says that something went wrong on another rank."""
    if isinstance(error, UnevenInputsError):
        return error.rank is None
    if isinstance(error, PeerFailedError) or (error.__cause__ is not None and is_consequence(error.__cause__)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(sign in str(error).lower() for sign in _LOST_PEER)
