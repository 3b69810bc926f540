"""A warning before a run resumes from a refuted checkpoint."""

from __future__ import annotations

import logging

import stagereg.extensions.prove.notes as notes
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, RestoreExtension, RestoreRequest
from stagereg.checkpoint.store.open_store import open_parent_store

_log = logging.getLogger(__name__)


class RefutedCheckpoints(RestoreExtension):
    """Logs a warning on rank 0, before a refuted checkpoint is read."""

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        if request.ranks.rank == 0 and candidate.checkpoint is not None:
            own = open_parent_store(candidate.path) if request.is_path else request.store  # a tier copies checkpoints
            verdict = notes.verdict_of(own, candidate.found)
            if verdict.startswith(notes.REFUTED):
                whole = [each for each in own.checkpoints()[0] if not each.manifest.dropped]
                proven = [each.path for each in whole if notes.read(own, each).get("verdict") == notes.PROVEN]
                use = [option("checkpoint.resume", each) if request.own else f'source="{each}"' for each in proven[:1]]
                other = f" Resume from a proven one with {use[0]}." if use else ""
                text = "stagereg: %s is %s: a run that resumed from it differed from this run.%s"
                _log.warning(text, candidate.path, verdict, other)


EXTENSIONS = (RefutedCheckpoints,)
