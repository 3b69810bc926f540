"""Record when two phases of a start end: with the restore of the checkpointer, and with the first step."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import stagereg.extensions.goodput.phases as phases
from stagereg.checkpoint.extension import Candidate, CheckpointExtension, RestoreRequest, Saves, Setup


class StartPhases(CheckpointExtension):
    name = "goodput"

    def start(self, setup: Setup, saves: Saves) -> None:
        phases.saves_to(str(setup.dir))

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if candidate is None or candidate.manifest is None:
            phases.restored(0, "", "")
            return
        origin = "tier" if candidate.source == "tier" else "survivors" if candidate.manifest.lost else "store"
        phases.restored(candidate.manifest.step, candidate.path, origin)

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        phases.take_step(step)
