"""Run all checks on the saves of a run. Each check logs each finding once."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import stagereg.extensions.diagnostics.first_save as first_save
from stagereg.checkpoint.extension import CheckpointExtension, Saves, Setup
from stagereg.checkpoint.state.module_state import modules_of
from stagereg.checkpoint.state.nested import state_dicts
from stagereg.checkpoint.targets import SaveTarget
from stagereg.errors import listed
from stagereg.extensions.diagnostics.forgotten import ForgottenObjects, GivenSteps

_log = logging.getLogger(__name__)

_A_COPY = (
    "stagereg: the state has state dicts instead of objects: %s. restore() changes these dicts only. Put the objects "
    "into the state, as in {'model': model, 'optimizer': optimizer}; or pass each dict to load_state_dict() of its "
    "object after restore()."
)

_all: weakref.WeakSet[Diagnostics] = weakref.WeakSet()
"""All instances of this process, since one checkpointer may save the optimizer of a model that another one saves."""


class Diagnostics(CheckpointExtension):
    """The checks of one checkpointer. ``cast``: whether a restore converts dtypes. ``stager`` copies the state."""

    name = "diagnostics"

    def __init__(self, cast: bool, stager: object) -> None:
        self._cast, self._stager = cast, f"{type(stager).__module__}.{type(stager).__qualname__}"
        self._state: Mapping[str, Any] | None = None  # the state that the program passed last
        self._saved: int | None = None  # the last saved step

    def start(self, setup: Setup, saves: Saves) -> None:
        rank = setup.ranks.rank
        self._every = setup.every
        self._warned = rank > 0 or setup.resume == "never"  # whether to omit the warning about state dicts
        self._inspected = rank > 0  # whether the first save has been checked, which only rank 0 does
        self._stale = None if rank > 0 else first_save.StaleNumbers()
        self._steps = GivenSteps() if rank == 0 and setup.stores else None
        self._forgotten = ForgottenObjects(setup.ranks)
        _all.add(self)

    @first_save.only_looks
    def given(self, state: Mapping[str, Any]) -> None:
        self._state = state
        found = [] if self._warned else [pair for name in state for pair in state_dicts(state[name], name)]
        if any(kind == "module" for _, kind in found) and any(modules_of(state[name]) for name in state):
            found = [pair for pair in found if pair[1] != "module"]  # may be intended copies, such as the best model
        if found:
            self._warned = True
            _log.warning(_A_COPY, listed([f"{path!r} ({kind})" for path, kind in found]))

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        if self._steps is not None:
            self._steps.look(step, self._every, self._saved, self._forgotten.stepped)
            self._forgotten.stepped = False

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        self._saved = step
        if state is not None and self._stale is not None:
            self._stale.look(state)

    def capturing(
        self, state: Mapping[str, Any], captured: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], object] | None:
        inspect = None
        if not self._inspected:
            self._inspected = True
            first_save.warn_of_foreign_parameters(state, captured)
            kinds = first_save.kinds_of(state, captured, self._cast) or {}
            inspect = partial(first_save.warn_of_other_kinds, kinds, self._stager)
        self._forgotten.look(state, captured, (each._state for each in _all if each is not self))
        return inspect

    def close(self, in_time: bool = True) -> None:
        """Log the remaining findings, and stop the checks. Idempotent. Called on the training thread."""
        self._forgotten.close()
