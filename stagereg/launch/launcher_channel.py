"""What ``stagereg.main`` and its ranks exchange: an environment variable, and a JSON file a rank, its *status*.

* ``in_job``: true once the rank runs the job; from then on an interrupt may find something to clean up.
* ``pid``, ``grace_s``: the process, and the seconds it takes to save and exit after a signal; null if it does not.
* ``exit``: the fields of the ``Preempted`` or ``Stopped`` that the rank has ended with.
* ``error``: the message of the rank's failure, where it is a cause.
* ``result``: rank 0's return value.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagereg.errors import Preempted, Stopped

__all__ = ["LauncherChannel"]

_VARIABLE = "STAGEREG_LAUNCHER"


@dataclass(frozen=True)
class LauncherChannel:
    """What a launcher gives to its ranks: its process id, the folder of the statuses, the time the run started at."""

    pid: int
    folder: Path
    started_at: float

    def variables(self) -> dict[str, str]:
        """The environment variable that carries this to a rank."""
        return {_VARIABLE: json.dumps(asdict(self) | {"folder": str(self.folder)})}

    @classmethod
    def received(cls) -> LauncherChannel | None:
        """The channel that this process was given, or ``None`` if ``stagereg.main`` has not started it."""
        text = os.environ.get(_VARIABLE)
        if text is None:
            return None
        fields = json.loads(text)
        return cls(fields["pid"], Path(fields["folder"]), fields["started_at"])

    def report(self, rank: int, **fields: Any) -> None:
        """Add ``fields`` to the status of ``rank``; a reader sees the old status or the new one."""
        beside = self.folder / f".{rank}.{os.getpid()}"
        beside.write_text(json.dumps(self.status(rank) | fields))
        beside.replace(self.folder / f"{rank}.json")

    def report_grace(self, rank: int, grace_s: float | None) -> None:
        """Report that this process handles signals and how long it then takes; ``None`` when it no longer does."""
        with contextlib.suppress(OSError):  # the folder is gone with the launcher, or the disk is full
            self.report(rank, pid=os.getpid(), grace_s=grace_s)

    def report_exit(self, rank: int, error: Preempted | Stopped) -> None:
        """Report that the rank ends because the run was signalled."""
        self.report(rank, exit=vars(error))

    def status(self, rank: int) -> dict[str, Any]:
        """What the rank has reported; empty where it has not."""
        try:
            return dict(json.loads((self.folder / f"{rank}.json").read_text()))
        except FileNotFoundError:
            return {}

    def exit_of(self, ranks: Iterable[int]) -> Preempted | Stopped | None:
        """What the first of these ranks has ended with because the run was signalled, if one has."""
        fields = next((status["exit"] for status in map(self.status, ranks) if "exit" in status), None)
        if fields is None:
            return None
        fields["received"] = signal.Signals(fields["received"])
        return Preempted(**fields) if "step" in fields else Stopped(**fields)

    def errors(self) -> dict[int, str]:
        """The reported errors by rank; those of other machines among them, where they are the cause."""
        ranks = sorted(int(file.stem) for file in self.folder.glob("[0-9]*.json"))
        return {rank: status["error"] for rank in ranks if "error" in (status := self.status(rank))}
