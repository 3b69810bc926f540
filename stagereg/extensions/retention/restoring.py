"""Refuses to restore an optimizer from a checkpoint whose optimizer state ``checkpoint.keep.weights_after`` dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import stagereg.errors as errors
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, Rejection, RestoreExtension, RestoreRequest
from stagereg.checkpoint.load.choosing import WEIGHTS_ONLY
from stagereg.checkpoint.state.name_map import NameMap


class WeightsOnly(RestoreExtension):
    """Rejects a checkpoint if the state of any rank has an entry that retention dropped from the checkpoint."""

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        dropped = {name for each in listed if each.manifest is not None for name in each.manifest.dropped}
        if not dropped:  # on all ranks
            return listed
        of_ranks = request.ranks.run_on_all(request.failing, lambda: _wanted(request, sorted(dropped)))
        wanted = {name for each in of_ranks for name in each}
        return [_rejected(each, wanted, request.resume) for each in listed]


def _wanted(request: RestoreRequest, dropped: Sequence[str]) -> list[str]:
    """Return the names in ``dropped`` that this rank would restore, unless ``allow_missing`` permits their absence."""
    names = NameMap(request.rename, request.allow_missing)
    found = names.rename_entries(dropped, request.state).items()
    here = {saved: name if name in request.state else name.rpartition(".rank")[0] for name, saved in found}
    return [saved for saved, name in here.items() if name in request.state and not names.may_miss(name)]


def _rejected(candidate: Candidate, wanted: set[str], resume: str) -> Candidate:
    lacking = [] if candidate.manifest is None else [name for name in candidate.manifest.dropped if name in wanted]
    if not lacking or candidate.found.damages:
        return candidate
    names = errors.listed(lacking)
    why = f"{option('checkpoint.keep.weights_after')} has dropped this optimizer state, so only the weights are left"
    how = (
        f"To restore the weights and begin {names} from scratch, add "
        f"{option('checkpoint.restore.allow_missing', lacking)}, or restore a state without {names}."
    )
    if resume != "auto":
        raise errors.MissingEntryError(
            f"{candidate.path} has no {names}: {why}. {how} To continue the training run exactly, restore a newer "
            "checkpoint, which is whole: `stagereg ls` lists the checkpoints."
        )
    return replace(
        candidate, rejections=(*candidate.rejections, Rejection(WEIGHTS_ONLY, names, why, advice=f"{how}\n"))
    )


EXTENSIONS: tuple[type[RestoreExtension], ...] = (WeightsOnly,)
"""The restore extensions of this package."""
