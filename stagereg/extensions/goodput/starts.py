"""Marks how far a start has come, at its first step."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import stagereg.extensions.goodput.phases as phases
from stagereg.checkpoint.extension import CheckpointExtension, Saves, Setup


class StartPhases(CheckpointExtension):
    name = "goodput"

    def start(self, setup: Setup, saves: Saves) -> None:
        phases.saves_to(str(setup.dir))

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        phases.take_step(step)
