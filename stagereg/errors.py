"""The errors of the project: one base class, one class for each kind of failure, and helpers for messages.

If PyTorch raises a built-in type for the same failure (``ValueError`` for a join without joinables), the class also
derives from that type. This module imports no other module of the project, and no large packages.
"""

from __future__ import annotations

import copyreg
import difflib
import re
import signal
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

RESUME_CODE = 75
"""Exit code of a run that saved and exited after a signal, and should be started again: EX_TEMPFAIL of sysexits.h."""

_RANKS = 4  # maximum number of ranks that a message lists
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # the address of an object, which differs between ranks
_LONGEST = 1000  # maximum characters of an error message; some messages contain the whole input

# Control characters of terminals, characters that reorder text, and characters that cannot be encoded.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINES = re.compile(f"[\t\n]|{_UNPRINTABLE.pattern}")


def printable(text: str, lines: bool = True) -> str:
    """Return ``text`` with escapes, such as ``\\x1b``, instead of control characters.

    With ``lines``, line breaks and tabs stay unchanged. Call this function before printing text from an untrusted file.
    """
    kind = _UNPRINTABLE if lines else _LINES
    return kind.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""Exceptions that are raised while a file with unexpected content is parsed. Catch them only where one file is parsed:
around a whole command, the handler would hide bugs of the command."""


class StageregError(Exception):
    """Base class of all errors of the project. Its message is passed through :func:`printable`."""

    def __str__(self) -> str:
        return printable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:  # without the constructor, whose arguments differ between the classes
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InstallationError(StageregError, ImportError):
    """The installation is incomplete, or another project is installed in the directory of this project."""


class RegistryError(StageregError):
    """A component could not be registered, loaded or built."""


class UnknownNameError(RegistryError, LookupError):
    """No component of the kind has this name. The message lists the available names."""


class ConfigError(StageregError, ValueError):
    """A configuration has a key, type or value that its component does not accept."""


class TargetNotAllowedError(ConfigError):
    """A config contains a ``_target_`` that is not registered. The target was neither imported nor called."""


class StagingError(StageregError, RuntimeError):
    """A state dict could not be staged.

    Attributes:
        path: the keys that lead to the invalid entry in the state dict; empty if the error is not about an entry.
        reason: why the entry or the state dict cannot be staged.
    """

    def __init__(self, path: Sequence[object], reason: str) -> None:
        self.path = tuple(path)
        self.reason = reason
        where = ".".join(map(str, self.path))
        super().__init__(f"cannot stage {where!r}: {reason}" if where else f"cannot stage: {reason}")


class UnstageableTypeError(StagingError, ValueError, TypeError):
    """A state dict contains a value of an unsupported type. The message contains the type and the path of the value."""


class WrittenWhileStagedError(StagingError):
    """A tensor was written, freed or resized while it was being copied; the copy was discarded."""


class StagerClosedError(StagingError):
    """A stager was used after its ``close()``."""

    def __init__(self, path: Sequence[object] = (), reason: str = "this stager was closed; build a new one") -> None:
        super().__init__(path, reason)


class JoinError(StageregError, ValueError):
    """A join was used incorrectly, or its joinables cannot be joined."""


class JoinableNotInitializedError(StageregError, AssertionError):
    """A joinable was used before its ``Joinable`` constructor was called."""


class UnevenInputsError(StageregError, RuntimeError):
    """A rank ran out of inputs, and the join was configured to throw.

    Attributes:
        rank: the rank whose inputs ran out; ``None`` if unknown.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerFailedError(JoinError, RuntimeError):
    """Another rank of a join raised an error, died or hangs, so this rank cannot continue.

    Attributes:
        rank: the global rank that failed first; ``None`` if it is unknown.
        message: the error of the failed rank, or how the rank terminated.
    """

    def __init__(self, text: str, rank: int | None = None, message: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.message = message or text


class CheckpointError(StageregError, RuntimeError):
    """A checkpoint could not be written, committed or read. Complete checkpoints are not affected."""


class MissingEntryError(CheckpointError):
    """A checkpoint lacks an entry of the state, or contains the state of a different optimizer class for the entry."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is corrupt or incomplete. The message lists the files."""


class RankMismatchError(CheckpointError):
    """The ranks differ in their calls, options, values, or optimizer step counts."""


class ClosedError(CheckpointError):
    """A checkpointer, or an opened checkpoint, was used after its ``close()``."""


class SaveTimeoutError(CheckpointError):
    """A save took longer than its ``timeout``."""


class WrittenWhileSavedError(CheckpointError):
    """The state was written while it was copied. The save was discarded; ``Checkpointer`` saves a later step again."""


class LaunchError(StageregError, RuntimeError):
    """Local ranks could not be started, or a rank failed."""


class BrokenPromiseError(StageregError, AssertionError):
    """A component violates the contract of its kind. The message describes the observed behaviour."""


class Preempted(SystemExit):
    """A signal requested the run to exit, and the state was saved. Raised on all ranks at the same step.

    If the program does not catch this exception, the process exits with :data:`RESUME_CODE`.

    Attributes:
        step: the saved step.
        directory: the checkpoint directory, a path or URL.
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
    """A signal requested the run to exit, and the state could not be saved. Raised on all ranks.

    If the program does not catch this exception, the process exits with code 128 + the number of the signal.

    Attributes:
        received: the signal.
        why: the reason why nothing was saved, and the newest checkpoint.
    """

    def __init__(self, received: signal.Signals, why: str) -> None:
        super().__init__(128 + received)
        self.received, self.why = received, why

    def __str__(self) -> str:
        return f"stopped by {self.received.name}: {self.why}"

    def __reduce__(self) -> tuple[type[Stopped], tuple[signal.Signals, str]]:
        return type(self), (self.received, self.why)


global_ranks: ContextVar[Sequence[int]] = ContextVar("global_ranks", default=())
"""The global rank of each rank in the process group in use; empty if the group contains all ranks."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the global numbers of ranks for a message, such as "ranks 1, 2". Lists only the first few ranks."""
    names = global_ranks.get()
    texts = [str(names[each] if each < len(names) else each) for each in ranks]
    return f"rank{'s' if len(ranks) > 1 else ''} {few_of(texts, _RANKS)}"


def few_of(texts: Sequence[str], most: int, by: str = ", ") -> str:
    """Join the first ``most`` strings, and append the number of the remaining strings."""
    return by.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the closest of ``choices``, or ``""`` if no choice is close to ``name``.

    A choice is also close if its beginning is close: ``pined`` may mean ``pinned_cached``.
    """
    names = list(choices)
    beginnings = {each[: len(name) + 1]: each for each in names}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    close = close or [beginnings[each] for each in difflib.get_close_matches(name, beginnings, n=1, cutoff=0.8)]
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 10) -> str:
    """Join the names of a checkpoint's entries for a message. Lists at most the first ``most`` names."""
    more = len(names) - most
    shown = [f"{name:.100}" if name.isprintable() else f"{name!r:.100}" for name in names[:most]]  # untrusted text
    shown += [f"and {more} more"] if more > 0 else []
    return ", ".join(shown) or "an empty state"


def reason(error: BaseException) -> str:
    """Return one line that describes an error: its type and message, or only the message of a ``CheckpointError``."""
    if isinstance(error, CheckpointError):
        return str(error).strip()
    try:
        text = printable(_ADDRESS.sub("", " ".join(str(error).split("\n"))).strip())
    except Exception:
        text = "(the message of this error is unavailable)"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... ({len(text)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def at_least(least: int, name: str, given: object) -> int:
    """Return ``given`` if it is an integer of at least ``least``. Otherwise raise ``ConfigError``."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {given!r}.")
    return given


def kind_of(errors: Iterable[BaseException]) -> type[CheckpointError]:
    """Return the class for an error that summarizes ``errors``: their common class, or ``CheckpointError``."""
    kinds = {type(error) for error in errors}
    [kind] = kinds if len(kinds) == 1 else {CheckpointError}
    return kind if issubclass(kind, CheckpointError) else CheckpointError


def one_of(name: str, given: object, choices: Sequence[str]) -> str:
    """Return ``given`` if it is one of ``choices``. Otherwise raise ``ConfigError``."""
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
"""Parts of messages, in lower case, by which gloo, NCCL, torch's store and a checkpointer report a failed rank."""


def is_consequence(error: BaseException) -> bool:
    """Return whether the error only reports that another rank has failed."""
    if isinstance(error, UnevenInputsError):
        return error.rank is None
    if isinstance(error, PeerFailedError) or (error.__cause__ is not None and is_consequence(error.__cause__)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(sign in str(error).lower() for sign in _LOST_PEER)
