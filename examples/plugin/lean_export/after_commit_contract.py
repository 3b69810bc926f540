"""The contract of the writer, for pytest and, once the package is installed, ``stagereg check lean-export``."""

from __future__ import annotations

import json
from typing import Any

from stagereg.plugin import CommittedCheckpoint
from stagereg.testing import OnCommitContract

from lean_export.after_commit import JournalWriter

__all__ = ["JournalContract"]


class JournalContract(OnCommitContract):
    """Tests ``on_commit=journal``, with a file in the folder of the test."""

    def make(self) -> JournalWriter:
        """Return a new writer."""
        return JournalWriter(str(self.folder / "journal.jsonl"))

    def verify(self, component: Any, checkpoint: CommittedCheckpoint) -> None:
        """Check that the file has one line for a checkpoint."""
        steps = [json.loads(line)["step"] for line in component.lines()]
        if steps.count(checkpoint.step) != 1:
            self.broken(f"the file must have one line for step {checkpoint.step}, but has lines for {steps}")
