"""How the writer is checked: by pytest, or by ``stagereg check lean-export`` once the package is installed."""

from __future__ import annotations

import json
from typing import Any

from stagereg.plugin import CommittedCheckpoint
from stagereg.testing import OnCommitContract

from lean_export.after_commit import JournalWriter

__all__ = ["JournalContract"]


class JournalContract(OnCommitContract):
    """``on_commit=journal`` keeps every promise, with a file in the folder of the trial."""

    def make(self) -> JournalWriter:
        """Return a writer to one file."""
        return JournalWriter(str(self.folder / "journal.jsonl"))

    def verify(self, component: Any, checkpoint: CommittedCheckpoint) -> None:
        """Look for the line of a checkpoint."""
        steps = [json.loads(line)["step"] for line in component.lines()]
        if steps.count(checkpoint.step) != 1:
            self.broken(f"step {checkpoint.step} is not once in its file, which has {steps}")
