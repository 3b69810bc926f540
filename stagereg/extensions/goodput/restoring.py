"""Records what a run resumes from, as the end of the phase in which the model is built and restored."""

from __future__ import annotations

import stagereg.extensions.goodput.phases as phases
from stagereg.checkpoint.extension import Candidate, RestoreExtension, RestoreRequest


class Phases(RestoreExtension):
    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if request.ranks.rank != 0:
            return
        if candidate is None or candidate.manifest is None:
            phases.restored(0, "", "")
            return
        in_tier = candidate.source == "tier"
        origin = "tier" if in_tier else "survivors" if candidate.manifest.lost else "store"
        phases.restored(candidate.manifest.step, candidate.path, origin)


EXTENSIONS: tuple[type[RestoreExtension], ...] = (Phases,)
"""What every restore has of this extension."""
