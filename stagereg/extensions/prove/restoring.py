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
            store = open_parent_store(candidate.path)
            if notes.verdict_of(store, candidate.found).startswith(notes.REFUTED):
                proven = [x.path for x in store.checkpoints()[0] if notes.read(store, x).get("verdict") == notes.PROVEN]
                other = f" Resume from a proven one with {option('checkpoint.resume', proven[0])}." if proven else ""
                why = notes.read(store, candidate.checkpoint)["why"]
                text = "stagereg: %s is refuted: a run that resumed from it differed from this run in %s.%s"
                _log.warning(text, candidate.path, why, other)


EXTENSIONS = (RefutedCheckpoints,)
