"""What goes between ``stagereg.main`` and its ranks: a word at the start, and files in a folder of the run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["LauncherChannel"]

_HANDOVER = "STAGEREG_HANDOVER"


@dataclass(frozen=True)
class LauncherChannel:
    """What ``stagereg.main`` gives to the ranks it starts: its process id, a folder to answer in, the run's time."""

    pid: int
    folder: Path
    started_at: float

    def variables(self) -> dict[str, str]:
        """The environment variable that carries this to a rank."""
        return {_HANDOVER: json.dumps(asdict(self) | {"folder": str(self.folder)})}

    @classmethod
    def received(cls) -> LauncherChannel | None:
        """What this process was given, or ``None`` when it was not started by ``stagereg.main``."""
        text = os.environ.get(_HANDOVER)
        if text is None:
            return None
        fields = json.loads(text)
        return cls(fields["pid"], Path(fields["folder"]), fields["started_at"])

    def ready(self, rank: int) -> Path:
        """Exists once the rank is in its job: from there on, an interrupt may find something to put in order."""
        return self.folder / f"{rank}.ready"

    def listening(self, rank: int) -> Path:
        """Exists while the rank listens for signals to leave."""
        return self.folder / f"{rank}.listening"

    def left(self, rank: int) -> Path:
        """How the rank has left, if it was told to."""
        return self.folder / f"{rank}.left"

    def error(self, rank: int) -> Path:
        """What the rank has to tell about its failure, where it is not only a consequence of another rank's."""
        return self.folder / f"{rank}.error"

    def errors(self) -> dict[int, str]:
        """What ranks have told, by rank; those of other machines among them, where they are the cause."""
        files = sorted(self.folder.glob("*.error"), key=lambda file: int(file.stem))
        return {int(file.stem): file.read_text() for file in files}

    @property
    def result(self) -> Path:
        """Rank 0's return value, JSON."""
        return self.folder / "result.json"
